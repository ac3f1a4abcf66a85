"""What every adapter shares: the statements in each style of placeholder, the parameters of events, and the refusals."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from uuid import UUID

from fencepost.errors import (
    ConfigurationError,
    DuplicateEvent,
    FencepostError,
    InvalidCommand,
    InvalidEvent,
    InvalidInput,
    TransactionRequired,
)
from fencepost.statements import load_statements
from producer_sdk.event import Event
from producer_sdk.rules import check_count

__all__ = [
    "ABORTED",
    "ACCEPT",
    "AUTOCOMMIT",
    "CANCEL_RUN",
    "ENQUEUE",
    "ENQUEUE_MANY",
    "ERASE_LINEAGE",
    "READ_DATA_KEY",
    "READ_RUN",
    "Parameters",
    "Statement",
    "event_ids",
    "is_aborted",
    "many_parameters",
    "one_parameters",
    "translated",
    "with_counted_placeholders",
]

AUTOCOMMIT: Final = "the connection is in autocommit, so this would commit alone; open a transaction around it and the domain rows"
ABORTED: Final = (
    "an earlier error aborted the transaction, which can write nothing more; "
    "roll back, or roll back to a savepoint taken before that error, then try again"
)
READ_ONLY: Final = "the transaction is read-only, or the server is a standby; use a read-write transaction on the primary"

# Values for the driver, in the order of a statement's placeholders.
Parameters: TypeAlias = tuple[Any, ...]

# libpq's PQTRANS_INERROR. Adapters of libraries that may or may not run on psycopg compare with it.
_IN_ERROR: Final = 3

_PLACEHOLDER: Final = re.compile(r"\$(\d+)")
_REFUSAL: Final = re.compile(r"fencepost: (?P<field>\w+): (?P<limit>[^;]*)(?:; (?P<remedy>.*))?", re.DOTALL)


@dataclass(frozen=True)
class Statement:
    """One statement in both styles: ``numbered`` has $1, $2 and so on; ``counted`` has %s in the same order."""

    numbered: str
    counted: str


def with_counted_placeholders(sql: str) -> str:
    """Return ``sql`` with %s in place of $1, $2 and so on; ``ValueError`` unless each stands once and in order."""
    places = [int(place) for place in _PLACEHOLDER.findall(sql)]
    if places != list(range(1, len(places) + 1)):
        raise ValueError(f"placeholders must stand once each and in order, but read {places}")
    return _PLACEHOLDER.sub("%s", sql.replace("%", "%%"))


_STATEMENTS: Final = load_statements("producer_sdk", "statements.sql")


def _statement(name: str) -> Statement:
    return Statement(_STATEMENTS[name], with_counted_placeholders(_STATEMENTS[name]))


ENQUEUE: Final = _statement("enqueue")
ENQUEUE_MANY: Final = _statement("enqueue_many")
ACCEPT: Final = _statement("accept")
CANCEL_RUN: Final = _statement("cancel_run")
ERASE_LINEAGE: Final = _statement("erase_lineage")
READ_DATA_KEY: Final = _statement("read_data_key")
READ_RUN: Final = _statement("read_run")


def one_parameters(event: Event) -> Parameters:
    """The parameters of ``ENQUEUE``. Ids travel as text, which every driver sends without a type adapter."""
    return (
        event.topic,
        event.type,
        event.key,
        event.payload,
        str(event.event_id),
        [name for name, _ in event.headers] or None,
        [value for _, value in event.headers] or None,
        event.source,
        event.content_type,
        event.tenant_id,
        event.run_id,
        event.step,
        event.operation,
        event.fencing_token,
        event.traceparent,
        event.tracestate,
    )


def many_parameters(events: Sequence[Event]) -> Parameters:
    """The parameters of ``ENQUEUE_MANY``; raise ``InvalidEvent`` for more events than one call takes."""
    check_count(events)
    headers = [header for event in events for header in event.headers]
    return (
        [event.topic for event in events],
        [event.type for event in events],
        [event.key for event in events],
        [event.payload for event in events],
        [str(event.event_id) for event in events],
        _header_ends(events) if headers else None,
        [name for name, _ in headers] or None,
        [value for _, value in headers] or None,
        _column([event.source for event in events]),
        _column([event.content_type for event in events]),
        _column([event.tenant_id for event in events]),
        _column([event.run_id for event in events]),
        _column([event.step for event in events]),
        _column([event.operation for event in events]),
        _column([event.fencing_token for event in events]),
        _column([event.traceparent for event in events]),
        _column([event.tracestate for event in events]),
    )


def event_ids(events: Sequence[Event]) -> list[UUID]:
    """The ids in the order of the events."""
    return [event.event_id for event in events]


def is_aborted(driver_connection: object) -> bool:
    """Whether psycopg knows that the transaction is aborted; False for a driver that does not tell."""
    info = getattr(driver_connection, "info", None)
    return getattr(info, "transaction_status", None) == _IN_ERROR


def _header_ends(events: Sequence[Event]) -> list[int]:
    end = 0
    return [end := end + len(event.headers) for event in events]


def _column(values: Sequence[object]) -> Sequence[object] | None:
    return None if all(value is None for value in values) else values


@contextmanager
def translated(
    foreign: type[Exception],
    origin: Callable[[Exception], BaseException] = lambda error: error,
    *,
    refusal: type[InvalidInput] = InvalidEvent,
) -> Iterator[None]:
    """Turn the driver's errors that Fencepost knows into its own; every other passes through as it is.

    ``origin`` finds the driver's error inside a library's wrapper. It becomes the cause, and the wrapper does not:
    a wrapper may print the parameters, payload included. ``refusal``: what a limit of the SQL function becomes.
    """
    try:
        yield
    except foreign as error:
        cause = origin(error)
        known = _known(cause, refusal)
        if known is None:
            raise
        raise known from cause


def _known(error: BaseException, refusal: type[InvalidInput]) -> FencepostError | None:
    """The error of ours that a driver's error stands for, by SQLSTATE, constraint and our own messages' prefix."""
    diagnosis = getattr(error, "diag", None)  # psycopg; asyncpg has these as attributes of the error itself
    message = getattr(diagnosis, "message_primary", None) or getattr(error, "message", None) or ""
    match getattr(error, "sqlstate", None):
        case "25P02":
            return TransactionRequired(ABORTED)
        case "25006":
            return TransactionRequired(READ_ONLY)
        case "3F000" | "42883":
            return ConfigurationError("the database has no Fencepost schema, or an old one; run `fencepost migrate`")
        case "42501":
            return ConfigurationError("the database user may not call Fencepost; GRANT fencepost_producer TO that user")
        case "23505":
            return _duplicate(getattr(diagnosis or error, "constraint_name", None))
        case "23514" | "22023":
            return _refused(message, refusal)
    return None


def _duplicate(constraint: str | None) -> FencepostError | None:
    match constraint:
        case "outbox_event_id_key":
            return DuplicateEvent(
                "event_id", "the outbox already holds this id", "take the event as written, or leave event_id out"
            )
        case "runs_pkey":
            return InvalidCommand("run_id", "a run with this id exists", "leave run_id out; the key is what finds a run again")
    return None


def _refused(message: str, refusal: type[InvalidInput]) -> InvalidInput | None:
    match = _REFUSAL.fullmatch(message)
    if match is None:
        return None
    return refusal(match["field"], match["limit"], match["remedy"] or "correct it and try again")
