"""Enqueues through SQLAlchemy 2, on the drivers psycopg and asyncpg, in the transaction of a connection or a session.

``enqueue`` takes a ``Connection`` or a ``Session``, ``enqueue_async`` their async twins. A session with ``autoflush``
is flushed first: its changed rows take their locks before the event is written, which is what keeps a key in order.
An engine with ``echo=True`` logs parameters, payloads included, unless it has ``hide_parameters=True``.
"""

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from fencepost.errors import ConfigurationError, TransactionRequired
from producer_sdk.event import Event
from producer_sdk.writing import (
    ABORTED,
    AUTOCOMMIT,
    ENQUEUE,
    ENQUEUE_MANY,
    Parameters,
    Statement,
    event_ids,
    is_aborted,
    many_parameters,
    one_parameters,
    translated,
)

__all__ = ["enqueue", "enqueue_async", "enqueue_many", "enqueue_many_async"]

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


def _usable(caller: Connection | Session) -> Connection:
    """The caller's connection, if its transaction can take a row; one that autobegins is fine."""
    try:
        connection = caller if isinstance(caller, Connection) else _flushed(caller)
        pooled = connection.connection
    except PendingRollbackError as error:
        raise TransactionRequired(ABORTED) from error
    if getattr(pooled.dbapi_connection, "autocommit", False):
        raise TransactionRequired(AUTOCOMMIT)
    if is_aborted(pooled.driver_connection):
        raise TransactionRequired(ABORTED)
    return connection


def _flushed(session: Session) -> Connection:
    if session.autoflush:
        session.flush()
    return session.connection()


def _execute(connection: Connection, statement: Statement, parameters: Parameters) -> None:
    sql = _for_driver(statement, connection.dialect.driver)
    with translated(DBAPIError, _origin):
        connection.exec_driver_sql(sql, parameters).scalar_one()


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
