"""Enqueues events and accepts commands through SQLAlchemy 2, on the drivers psycopg and asyncpg, in the transaction of a
connection or a session.

``enqueue`` and ``accept`` take a ``Connection`` or a ``Session``, ``enqueue_async`` and ``accept_async`` their async twins.
A session with ``autoflush``
is flushed first: its changed rows take their locks before the event is written, which is what keeps a key in order.
An engine with ``echo=True`` logs parameters, payloads included, unless it has ``hide_parameters=True``.
"""

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from fencepost.errors import ConfigurationError, InvalidCommand, InvalidEvent, InvalidInput, TransactionRequired
from fencepost.secrets import Secrets
from producer_sdk.acceptance import KEY_RETENTION_SECONDS, Acceptance, Accepted, Answer, Patience, persist, persist_async
from producer_sdk.command import Command
from producer_sdk.event import Event
from producer_sdk.identity import Scope, Unkeyed
from producer_sdk.runs import Cancellation, Run, cancel_parameters, cancelled, read_parameters, run_from
from producer_sdk.writing import (
    ABORTED,
    ACCEPT,
    AUTOCOMMIT,
    CANCEL_RUN,
    ENQUEUE,
    ENQUEUE_MANY,
    READ_RUN,
    Parameters,
    Statement,
    event_ids,
    is_aborted,
    many_parameters,
    one_parameters,
    translated,
)

__all__ = [
    "accept",
    "accept_async",
    "cancel",
    "cancel_async",
    "enqueue",
    "enqueue_async",
    "enqueue_many",
    "enqueue_many_async",
    "read_run",
    "read_run_async",
]

_NUMBERED_DRIVERS: Final = frozenset({"asyncpg"})
_COUNTED_DRIVERS: Final = frozenset({"psycopg", "psycopg_async"})


def enqueue(connection: Connection | Session, event: Event) -> UUID:
    """Write one event and return its id. Call it after taking the lock that serialises the key, a row's say.

    Raises what ``producer_sdk`` lists, and ``ConfigurationError`` for another driver. After an error of the database,
    roll back the transaction, or the ``begin_nested()`` around this call.
    """
    _execute(_usable(connection), ENQUEUE, one_parameters(event))
    return event.event_id


def enqueue_many(connection: Connection | Session, events: Sequence[Event]) -> list[UUID]:
    """Write up to 10,000 events in their order, all or none, and return their ids. No event, no statement.

    Raises as ``enqueue`` does, and ``InvalidEvent`` for too many events.
    """
    usable = _usable(connection)
    if events:
        _execute(usable, ENQUEUE_MANY, many_parameters(events))
    return event_ids(events)


async def enqueue_async(connection: AsyncConnection | AsyncSession, event: Event) -> UUID:
    """``enqueue`` for an ``AsyncConnection`` or an ``AsyncSession``."""
    return await connection.run_sync(enqueue, event)


async def enqueue_many_async(connection: AsyncConnection | AsyncSession, events: Sequence[Event]) -> list[UUID]:
    """``enqueue_many`` for an ``AsyncConnection`` or an ``AsyncSession``."""
    return await connection.run_sync(enqueue_many, events)


def accept(
    connection: Connection | Session,
    command: Command,
    scope: Scope,
    key: str | Unkeyed,
    *,
    secrets: Secrets | None = None,
    key_retention_seconds: float = KEY_RETENTION_SECONDS,
    wait_seconds: float = 0,
) -> Accepted:
    """Accept a command, or find the run that its key stands for, in one round trip.

    ``secrets`` default to the environment's, read once in the life of the process. ``wait_seconds``: while another
    transaction accepts the key, try again for so long, the transaction staying open; 0 raises ``InProgress`` at once.
    Raises what ``producer_sdk`` lists. An ``IdempotencyError`` leaves the transaction usable, an error of the database
    does not, as with ``enqueue``.
    """
    acceptance = Acceptance(command, scope, key, secrets=secrets, key_retention_seconds=key_retention_seconds)
    parameters = acceptance.parameters()

    def attempt() -> Answer:
        return _accept_once(connection, parameters)

    return acceptance.judged(persist(attempt, Patience(wait_seconds)))


async def accept_async(
    connection: AsyncConnection | AsyncSession,
    command: Command,
    scope: Scope,
    key: str | Unkeyed,
    *,
    secrets: Secrets | None = None,
    key_retention_seconds: float = KEY_RETENTION_SECONDS,
    wait_seconds: float = 0,
) -> Accepted:
    """``accept`` for an ``AsyncConnection`` or an ``AsyncSession``."""
    acceptance = Acceptance(command, scope, key, secrets=secrets, key_retention_seconds=key_retention_seconds)
    parameters = acceptance.parameters()

    async def attempt() -> Answer:
        # The pauses stay outside: in here they would stop the event loop.
        return await connection.run_sync(_accept_once, parameters)

    return acceptance.judged(await persist_async(attempt, Patience(wait_seconds)))


def cancel(
    connection: Connection | Session,
    run_id: UUID,
    *,
    tenant_id: str,
    actor: str,
    reason: str,
    expected_version: int | None = None,
) -> Cancellation:
    """Cancel a run, or ask its worker to; ``actor`` and ``reason`` go to the audit.

    ``expected_version``: cancel only what you saw. Raises ``RunNotFound``, ``RunChanged``, ``RunEnded``.
    """
    parameters = cancel_parameters(run_id, tenant_id=tenant_id, actor=actor, reason=reason, expected_version=expected_version)
    return cancelled(_execute(_usable(connection), CANCEL_RUN, parameters, InvalidCommand))


async def cancel_async(
    connection: AsyncConnection | AsyncSession,
    run_id: UUID,
    *,
    tenant_id: str,
    actor: str,
    reason: str,
    expected_version: int | None = None,
) -> Cancellation:
    """``cancel`` for an ``AsyncConnection`` or an ``AsyncSession``."""
    return await connection.run_sync(
        cancel, run_id, tenant_id=tenant_id, actor=actor, reason=reason, expected_version=expected_version
    )


def read_run(connection: Connection | Session, run_id: UUID, *, tenant_id: str) -> Run:
    """Return a run's state and answer; fine in autocommit. Raises ``RunNotFound``."""
    usable = connection if isinstance(connection, Connection) else connection.connection()
    return run_from(run_id, _execute(usable, READ_RUN, read_parameters(run_id, tenant_id), InvalidCommand))


async def read_run_async(connection: AsyncConnection | AsyncSession, run_id: UUID, *, tenant_id: str) -> Run:
    """``read_run`` for an ``AsyncConnection`` or an ``AsyncSession``."""
    return await connection.run_sync(read_run, run_id, tenant_id=tenant_id)


def _accept_once(connection: Connection | Session, parameters: Parameters) -> Answer:
    return Answer(*_execute(_usable(connection), ACCEPT, parameters, InvalidCommand))


def _usable(caller: Connection | Session) -> Connection:
    """The caller's connection, if its transaction can take a row; one that autobegins is fine."""
    try:
        connection = caller if isinstance(caller, Connection) else _flushed(caller)
        pooled = connection.connection
    except PendingRollbackError as error:
        raise TransactionRequired(ABORTED) from error
    if getattr(pooled.dbapi_connection, "autocommit", False) is True:  # sqlite3 from Python 3.12 on has a number, for neither
        raise TransactionRequired(AUTOCOMMIT)
    if is_aborted(pooled.driver_connection):
        raise TransactionRequired(ABORTED)
    return connection


def _flushed(session: Session) -> Connection:
    if session.autoflush:
        session.flush()
    return session.connection()


def _execute(
    connection: Connection, statement: Statement, parameters: Parameters, refusal: type[InvalidInput] = InvalidEvent
) -> Sequence[Any]:
    sql = _for_driver(statement, connection.dialect.driver)
    with translated(DBAPIError, _origin, refusal=refusal):
        return connection.exec_driver_sql(sql, parameters).one()


def _for_driver(statement: Statement, driver: str) -> str:
    if driver in _NUMBERED_DRIVERS:
        return statement.numbered
    if driver in _COUNTED_DRIVERS:
        return statement.counted
    raise ConfigurationError(f"no adapter for the driver {driver}; use postgresql+psycopg or postgresql+asyncpg")


def _origin(error: Exception) -> BaseException:
    """The driver's own error. What passes through as SQLAlchemy's keeps its class and hides its parameters."""
    assert isinstance(error, DBAPIError)
    error.hide_parameters = True
    original = error.orig or error
    return original.__cause__ or original
