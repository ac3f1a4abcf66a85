"""Which handler takes which message. Everything about it is checked when it is registered."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from consumer_sdk.adapters import Adapter, cloud_events
from consumer_sdk.message import Message
from consumer_sdk.message_context import MessageContext
from consumer_sdk.reconcilers import Reconcilers
from fencepost.codec import PLAIN, PayloadCodec
from fencepost.errors import ConfigurationError
from fencepost.registration import WORKFLOW, InputModel, check_function, check_model_and_retry, check_seconds
from fencepost.retry import Retry
from fencepost.wire import MAX_ATTRIBUTE_BYTES

if TYPE_CHECKING:
    import asyncpg

__all__ = ["BatchFunction", "MessageFunction", "MessageHandler", "MessageHandlers"]

MessageFunction = Callable[[Message[Any], MessageContext], Coroutine[Any, Any, object]]
BatchFunction = Callable[[Sequence[Message[Any]], "asyncpg.Connection"], Coroutine[Any, Any, object]]
_Message = TypeVar("_Message", bound=MessageFunction)
_Batch = TypeVar("_Batch", bound=BatchFunction)

_STEP: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_MOST_ATTEMPTS: Final = 100
_MOST_BATCH: Final = 1_000
_MOST_PATIENCE_SECONDS: Final = 7 * 86_400.0


@dataclass(frozen=True, kw_only=True, eq=False)
class MessageHandler:
    """One step over one type of message.

    ``batch`` is how many messages one transaction may hold; 0: each by itself, with a context.

    ``attempt_seconds``: the longest that an attempt may take. ``patience_seconds``: the longest that a message may be put off by
    ``RetryLater``, which spends no attempt. ``workflow``: the run that the message names is claimed, and completed by the handler.
    """

    type: str
    version: int | None
    step: str
    function: MessageFunction | BatchFunction
    model: InputModel | None
    tombstones: bool
    batch: int
    workflow: str | None
    retry: Retry
    attempts: int
    attempt_seconds: float
    patience_seconds: float

    def value_of(self, payload: bytes | None) -> object:
        """The payload as the handler takes it; None for a tombstone. Raises ``ValueError``, pydantic's too, if it does not fit."""
        if payload is None:
            return None
        return json.loads(payload.decode()) if self.model is None else self.model.model_validate_json(payload)


class MessageHandlers(Reconcilers):
    """What a consumer does with messages. Use ``handler`` and ``batch_handler`` as decorators::

        app = MessageHandlers()

        @app.handler("payments.charge_requested", model=ChargeRequested, step="charge")
        async def charge(message: Message[ChargeRequested], context: MessageContext) -> None: ...

    A type that no handler takes is a dead letter, unless ``ignore`` names it. ``codec`` decodes payloads and encodes results.
    """

    def __init__(self, *, codec: PayloadCodec = PLAIN) -> None:
        super().__init__()
        self.codec = codec
        self._handlers: dict[str, list[MessageHandler]] = defaultdict(list)
        self._adapters: dict[str, Adapter] = {}
        self._ignored: set[str] = set()

    def handler(
        self,
        type: str,  # noqa: A002 - the word of CloudEvents
        *,
        step: str,
        model: InputModel | None = None,
        version: int | None = None,
        tombstones: bool = False,
        workflow: str | None = None,
        retry: Retry | None = None,
        attempts: int = 5,
        attempt_seconds: float = 60,
        patience_seconds: float = 3600,
    ) -> Callable[[_Message], _Message]:
        """Register the decorated ``async def handler(message, context)``. Raises ``ConfigurationError`` for what cannot work.

        ``step`` names what it does, in the ledger: keep it when you rename the function, and give no two handlers the same.
        ``version`` None takes every version that has no handler of its own. ``tombstones``: it takes messages without a payload as
        well, with ``message.value`` None; otherwise they are dead letters. ``workflow``: the message's run is of this database, and
        the handler executes it: it is claimed first, and completed with what the handler returns or gives to ``context.complete``.
        """
        given = {"type": type, "version": version, "step": step, "model": model, "tombstones": tombstones, "workflow": workflow}

        def register(function: _Message) -> _Message:
            check_function(f"type {type}: the handler", function, "message and context", 2)
            self._add(
                function, batch=0, retry=retry, attempts=attempts, seconds=attempt_seconds, patience=patience_seconds, **given
            )
            return function

        return register

    def batch_handler(
        self,
        type: str,  # noqa: A002 - the word of CloudEvents
        *,
        step: str,
        model: InputModel | None = None,
        version: int | None = None,
        tombstones: bool = False,
        most: int = 500,
        retry: Retry | None = None,
        attempts: int = 5,
        attempt_seconds: float = 60,
    ) -> Callable[[_Batch], _Batch]:
        """Register the decorated ``async def handler(messages, connection)``, whose effects are all inside this database.

        Up to ``most`` messages share a transaction: their rows in the ledger, what the handler writes on ``connection``, and the
        commit. A batch that fails is undone and tried in halves, so a message that cannot be handled costs only itself.
        """
        given = {"type": type, "version": version, "step": step, "model": model, "tombstones": tombstones, "workflow": None}
        if not _is_whole(most) or not 1 <= most <= _MOST_BATCH:
            raise ConfigurationError(f"type {type}: most must be from 1 to {_MOST_BATCH}")

        def register(function: _Batch) -> _Batch:
            check_function(f"type {type}: the handler", function, "messages and connection", 2)
            self._add(function, batch=most, retry=retry, attempts=attempts, seconds=attempt_seconds, patience=3600, **given)
            return function

        return register

    def ignore(self, *types: str) -> None:
        """Messages of these types are passed over, and counted. ``"*"``: of every type that has no handler."""
        for one in types:
            _check_type(one)
        self._ignored.update(types)

    def adapter(self, topic: str, adapter: Adapter) -> None:
        """How records of a topic are read, where they are no CloudEvents."""
        if topic in self._adapters:
            raise ConfigurationError(f"topic {topic}: has an adapter already")
        self._adapters[topic] = adapter

    @property
    def all(self) -> Sequence[MessageHandler]:
        return [handler for handlers in self._handlers.values() for handler in handlers]

    def adapter_of(self, topic: str) -> Adapter:
        return self._adapters.get(topic, cloud_events)

    def is_ignored(self, type: str) -> bool:  # noqa: A002 - the word of CloudEvents
        return type in self._ignored or "*" in self._ignored

    def is_known(self, type: str) -> bool:  # noqa: A002 - the word of CloudEvents
        return type in self._handlers

    def handlers_of(self, message: Message[Any]) -> Sequence[MessageHandler]:
        """The handlers of a message, one a step: those for its version before those for any."""
        fitting = [one for one in self._handlers.get(message.type, ()) if one.version in (message.schema_version, None)]
        if len(fitting) < 2:  # as almost always
            return fitting
        own = {one.step for one in fitting if one.version is not None}
        return [one for one in fitting if one.version is not None or one.step not in own]

    def _add(
        self, function: Any, *, batch: int, retry: Retry | None, attempts: int, seconds: float, patience: float, **given: Any
    ) -> None:
        handler = MessageHandler(
            function=function,
            batch=batch,
            retry=retry or Retry(),
            attempts=attempts,
            attempt_seconds=seconds,
            patience_seconds=patience,
            **given,
        )
        _check(handler, retry)
        for other in self.all:
            if other.step == handler.step and (other.type, other.version) == (handler.type, handler.version):
                raise ConfigurationError(f"type {handler.type}: step {handler.step} has a handler already; name each step once")
        self._handlers[handler.type].append(handler)


def _check(handler: MessageHandler, retry: object) -> None:
    _check_type(handler.type)
    what = f"type {handler.type}"
    if not _STEP.fullmatch(handler.step):
        raise ConfigurationError(f"{what}: step must be 1 to 64 characters of a-z A-Z 0-9 _ . : -")
    check_model_and_retry(what, handler.model, retry)
    if handler.version is not None and (not _is_whole(handler.version) or handler.version < 1):
        raise ConfigurationError(f"{what}: version must be a whole number from 1, or None for any")
    if not _is_whole(handler.attempts) or not 1 <= handler.attempts <= _MOST_ATTEMPTS:
        raise ConfigurationError(f"{what}: attempts must be from 1 to {_MOST_ATTEMPTS}")
    if handler.workflow is not None and not WORKFLOW.fullmatch(handler.workflow):
        raise ConfigurationError(f"{what}: workflow must be 1 to 200 characters of a-z A-Z 0-9 _ . : -, or None")
    if handler.attempt_seconds is None:
        raise ConfigurationError(f"{what}: attempt_seconds must be a number: a handler that hangs holds its key back")
    check_seconds(f"{what}: attempt_seconds", handler.attempt_seconds)
    patience = handler.patience_seconds
    if not math.isfinite(patience) or not 0 <= patience <= _MOST_PATIENCE_SECONDS:
        raise ConfigurationError(f"{what}: patience_seconds must be from 0 to {_MOST_PATIENCE_SECONDS:g} (7 days)")


def _check_type(type: object) -> None:  # noqa: A002 - the word of CloudEvents
    if callable(type):
        raise ConfigurationError('write @app.handler("the type", step="..."), with the type')
    if not isinstance(type, str) or not 1 <= len(type.encode()) <= MAX_ATTRIBUTE_BYTES:
        raise ConfigurationError(f"type: must be text of 1 to {MAX_ATTRIBUTE_BYTES} bytes")


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)
