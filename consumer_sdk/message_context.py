"""What a handler sees of one message beside the message: who it is, effects that happen once, and the transaction that ends it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol

from consumer_sdk.classification import Ambiguous
from consumer_sdk.context import RunContext
from consumer_sdk.effects import Call, CallLimits, EffectKey
from fencepost.errors import AlreadyHandled, ConfigurationError, InvalidInput, LeaseLost, TransactionRequired, TransientError

if TYPE_CHECKING:
    import asyncpg

__all__ = ["COMMIT_TOLD_BY_ITS_ROW", "HandlingState", "MessageContext", "MessageWriter"]

_DEFAULT_LIMITS: Final = CallLimits()
_RESERVED: Final = "fencepost."


class _CommitToldByItsRow:
    """Of a COMMIT without an answer the message's own row tells, and everything else with it: so it is tried again."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _class: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        if isinstance(error, Ambiguous) and error.code == "commit_unknown":
            raise TransientError("transaction: no answer to the commit") from error


COMMIT_TOLD_BY_ITS_ROW: Final = _CommitToldByItsRow()


class HandlingState:
    """What the consumer and a handler's context share of one attempt. ``effect_run`` and ``effect_step`` are what effects are kept
    under; ``recorded``: the message's outcome is committed; ``duplicate``: another delivery's was."""

    def __init__(
        self, *, tenant_id: str, effect_run: str, effect_step: str, step: str, attempt: int, stopping: asyncio.Event
    ) -> None:
        self.tenant_id = tenant_id
        self.effect_run = effect_run
        self.effect_step = effect_step
        self.step = step
        self.attempt = attempt
        self.stopping = stopping
        self.recorded = False
        self.duplicate = False
        self.over = False


class MessageWriter(Protocol):
    """The consumer, as far as a context needs it. ``ending`` begins a transaction in which the message is recorded as handled, and
    gives None for one that was already; of that ``record_within`` is False."""

    async def once(self, key: EffectKey, *, request: object, call: Call, limits: CallLimits) -> object: ...
    def ending(self, state: HandlingState) -> "AbstractAsyncContextManager[asyncpg.Connection | None]": ...
    async def record_within(self, connection: "asyncpg.Connection", state: HandlingState) -> bool: ...


class MessageContext:
    """One attempt at one message. ``run`` is the run behind it, where the handler was registered with a ``workflow``."""

    def __init__(self, state: HandlingState, writer: MessageWriter, run: RunContext | None = None) -> None:
        self._state = state
        self._writer = writer
        self.in_transaction = False
        self.run = run

    @property
    def attempt(self) -> int:
        """1 at the first attempt of this delivery."""
        return self._state.attempt

    @property
    def tenant_id(self) -> str | None:
        """The tenant that the message, or its run, belongs to."""
        return self._state.tenant_id or None

    @property
    def stopping(self) -> asyncio.Event:
        """Set when the consumer stops, or its group takes the message's partition back: return soon. What is not recorded is
        delivered again."""
        return self._state.stopping

    async def once(
        self,
        operation: str,
        *,
        request: object,
        call: Call,
        limits: CallLimits = _DEFAULT_LIMITS,
        occurrence: int = 0,
    ) -> object:
        """Make an outside effect happen once for this message, however often it is delivered, and return its result.

        It belongs to the run that the message names, if it names one: another message of that run for the same step finds it.
        ``call`` gets an ``Effect``: pass its ``key`` as the provider's idempotency key. ``request`` is what the effect is for;
        another one under the same operation raises ``EffectMismatch``. An operation that happens more than once in a handler
        numbers its ``occurrence``.

        Raises ``EffectFailed`` for a refusal, this time's or a recorded one; ``EffectUnknown`` while nobody knows the answer;
        ``LeaseLost`` where another delivery took over; ``RunErased`` where the run that the message names was erased; and what
        ``call`` raised, where it surely did nothing.
        """
        self._refuse_after_end()
        if self.in_transaction:
            raise TransactionRequired("a call must not hold a transaction open: make it before")
        if operation.startswith(_RESERVED):
            raise InvalidInput("operation", f"must not begin with {_RESERVED}", "name it after the provider")
        state = self._state
        if self.run is not None:
            return await self.run.once(
                operation, request=request, call=call, limits=limits, step=state.step, occurrence=occurrence
            )  # fmt: skip
        key = EffectKey(state.effect_run, state.tenant_id, 0, state.effect_step, occurrence, operation)
        return await self._writer.once(key, request=request, call=call, limits=limits)

    def transaction(self) -> "AbstractAsyncContextManager[asyncpg.Connection]":
        """A transaction in the consumer's database that commits together with the message's outcome, and so ends its handling.

        What is written on the connection, outbox rows included, exists once, or not at all. If another delivery of the message is
        faster, ``AlreadyHandled`` is raised and nothing is kept. It is the last thing that a handler does; keep it short.

        With a run it is so where the run is completed in it. A transaction that does not complete the run is one of several: it
        commits only while the run is held, and the message is handled when the run has ended.
        """
        return _Ending(self, self._state, self._writer) if self.run is None else self._run_transaction(self.run)

    @asynccontextmanager
    async def _run_transaction(self, run: RunContext) -> "AsyncIterator[asyncpg.Connection]":
        self.begin_transaction()
        try:
            with COMMIT_TOLD_BY_ITS_ROW:
                async with run.transaction() as connection:
                    yield connection
                    if (completes := run.completes) and not await self._writer.record_within(connection, self._state):
                        raise already_handled(self._state)
                self._state.recorded = completes
        finally:
            self.in_transaction = False

    def begin_transaction(self) -> None:
        """An attempt is in one transaction at a time."""
        self._refuse_after_end()
        if self.in_transaction:
            raise TransactionRequired("this attempt is in a transaction already; use its connection")
        self.in_transaction = True

    async def complete(self, output: object = None) -> None:
        """Complete the message's run. Inside ``transaction()`` it commits with the rest. Raises ``LeaseLost`` if it is not held."""
        if self.run is None:
            raise ConfigurationError("there is no run to complete: register the handler with workflow=")
        await self.run.complete(output)

    def _refuse_after_end(self) -> None:
        if self._state.over:
            raise LeaseLost("the attempt has ended; nothing was changed")
        if self._state.recorded:
            raise TransactionRequired("the message's outcome is committed, as the last thing of its handling; do this before")


class _Ending:
    """The transaction of ``MessageContext.transaction`` where there is no run. A generator would cost more than all else here."""

    __slots__ = ("_context", "_ending", "_state", "_writer")

    _ending: "AbstractAsyncContextManager[asyncpg.Connection | None]"

    def __init__(self, context: MessageContext, state: HandlingState, writer: MessageWriter) -> None:
        self._context = context
        self._state = state
        self._writer = writer

    async def __aenter__(self) -> "asyncpg.Connection":
        self._context.begin_transaction()
        try:
            self._ending = self._writer.ending(self._state)
            connection = await self._ending.__aenter__()
            if connection is not None:
                return connection
            duplicate = already_handled(self._state)
            await self._ending.__aexit__(AlreadyHandled, duplicate, None)
            raise duplicate
        except BaseException:
            self._context.in_transaction = False
            raise

    async def __aexit__(self, class_: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            with COMMIT_TOLD_BY_ITS_ROW:
                await self._ending.__aexit__(class_, error, trace)
        finally:
            self._context.in_transaction = False
        self._state.recorded = error is None


def already_handled(state: HandlingState) -> AlreadyHandled:
    """What a handler is told whose message another delivery has handled."""
    state.duplicate = True
    return AlreadyHandled("another delivery of this message has been handled")
