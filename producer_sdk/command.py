"""The command as the producer hands it over: immutable, and valid from the moment it exists."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Final
from uuid import UUID

from uuid_utils.compat import uuid7

from fencepost.canonical_json import parse_json
from fencepost.codec import PLAIN, DataKeyCodec, PayloadCodec, lineage_codec
from fencepost.errors import InvalidCommand, InvalidJson
from producer_sdk.command_rules import check_command, check_data_key, check_request, check_stored, cost
from producer_sdk.identity import request_of
from producer_sdk.tracing import current_trace

__all__ = ["RUNS_TOPIC", "Command"]

RUNS_TOPIC: Final = "fencepost.runs"


class _Input:
    """The type of the default of ``request``: None is a request too, JSON's null."""

    def __repr__(self) -> str:
        return "the input"


_INPUT: Final = _Input()


@dataclass(frozen=True, init=False, slots=True)
class Command:
    """One piece of work, to be run after the transaction that it is accepted in commits.

    Its ``repr`` leaves out input, request and data key. ``input`` is kept as compact JSON, as the codec encodes it; ``request`` as
    the values that the fingerprint is made of; ``data_key`` wrapped, for a codec that has one for each lineage.
    """

    workflow: str
    input: bytes = field(repr=False)
    version: int
    request: object = field(repr=False)
    delay_seconds: float
    max_attempts: int
    deadline_seconds: float | None
    cost_limit: Decimal | None
    topic: str
    run_id: UUID
    traceparent: str | None
    data_key: bytes | None = field(init=False, repr=False)

    def __init__(
        self,
        *,
        workflow: str,
        input: object,  # noqa: A002 - the word of the workflow's handler and of the SQL function
        version: int = 1,
        request: object = _INPUT,
        delay_seconds: float = 0,
        max_attempts: int = 5,
        deadline_seconds: float | None = None,
        cost_limit: Decimal | float | None = None,
        topic: str = RUNS_TOPIC,
        run_id: UUID | None = None,
        traceparent: str | None = None,
        codec: PayloadCodec = PLAIN,
    ) -> None:
        """Check and keep a command.

        ``workflow``: the name its handler is registered under, 1 to 200 characters of ``a-z A-Z 0-9 _ . : -``.
        ``input``: what the handler gets: a JSON value, a pydantic model (dumped in JSON mode), or bytes of JSON; stored as
        at most 1,000,000 bytes, nested 64 deep at most. ``version``: of the workflow and of the input's schema.
        ``request``: what the client asked for, which its key is bound to; defaults to the input. Give it where the input
        holds what the server made, such as times and fresh ids: those differ at each retry of the client.
        ``delay_seconds``: until the first attempt, up to 366 days. ``max_attempts``: 1 to 1,000.
        ``deadline_seconds``: counted from the first attempt's time on, after which no attempt begins; 0.001 to 366 days.
        ``cost_limit``: of all attempts together, in the unit that the handler reports. ``topic``: of the run's events.
        ``run_id``: the id proposed for a new run; defaults to a new UUIDv7. ``traceparent`` defaults to OpenTelemetry's
        current span, where the process uses OpenTelemetry. ``codec``: what makes the stored bytes of the input; give the worker
        the same. A ``DataKeyCodec`` gives the run a data key, which is stored with it, or dropped where the key finds a run.

        Raises ``InvalidCommand``, which names field, limit and remedy and quotes neither input nor request.
        """
        _set(
            self,
            {
                "workflow": workflow,
                "version": version,
                "delay_seconds": delay_seconds,
                "max_attempts": max_attempts,
                "deadline_seconds": deadline_seconds,
                "cost_limit": cost(cost_limit),
                "topic": topic,
                "run_id": uuid7() if run_id is None else run_id,
                "traceparent": current_trace()[0] if traceparent is None else traceparent,
            },
        )
        stored = check_command(self, input)
        bound = _bound(stored if isinstance(input, bytes) else input, request)
        data_key = check_data_key(codec.new_data_key()) if isinstance(codec, DataKeyCodec) else None
        encoded = lineage_codec(codec, data_key).encode(stored)
        _set(self, {"input": check_stored(encoded), "request": bound, "data_key": data_key})


def _set(command: Command, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        object.__setattr__(command, name, value)


def _bound(given: object, request: object) -> object:
    """What the fingerprint is made of, copied so that the caller's own objects may change."""
    field = "input" if isinstance(request, _Input) else "request"
    if isinstance(request, _Input):
        request = parse_json(given) if isinstance(given, bytes) else given
    try:
        bound = request_of(request)
    except InvalidJson as error:
        raise InvalidCommand(field, error.limit, error.remedy) from None
    check_request(bound, field=field)
    return bound
