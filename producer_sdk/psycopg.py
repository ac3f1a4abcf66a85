"""Enqueues on a psycopg 3 connection: ``enqueue`` on a ``Connection``, ``enqueue_async`` on an ``AsyncConnection``.

A connection that begins at its first statement is fine. One in autocommit needs ``connection.transaction()``.
"""

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from fencepost.errors import TransactionRequired
from producer_sdk.event import Event
from producer_sdk.writing import (
    ABORTED,
    AUTOCOMMIT,
    ENQUEUE,
    ENQUEUE_MANY,
    Parameters,
    event_ids,
    many_parameters,
    one_parameters,
    translated,
)

__all__ = ["enqueue", "enqueue_async", "enqueue_many", "enqueue_many_async"]

_ENQUEUE: Final = ENQUEUE.counted.encode()
_ENQUEUE_MANY: Final = ENQUEUE_MANY.counted.encode()


def enqueue(connection: psycopg.Connection[Any], event: Event) -> UUID:
    """Write one event and return its id. Call it after taking the lock that serialises the key, a row's say.

    Raises what ``producer_sdk`` lists. After an error of the database, roll back to a savepoint taken before the call,
    or the transaction.
    """
    _execute(connection, _ENQUEUE, one_parameters(event))
    return event.event_id


def enqueue_many(connection: psycopg.Connection[Any], events: Sequence[Event]) -> list[UUID]:
    """Write up to 10,000 events in their order, all or none, and return their ids. No event, no statement.

    Raises as ``enqueue`` does, and ``InvalidEvent`` for too many events.
    """
    if events:
        _execute(connection, _ENQUEUE_MANY, many_parameters(events))
    else:
        _require_transaction(connection)
    return event_ids(events)


async def enqueue_async(connection: psycopg.AsyncConnection[Any], event: Event) -> UUID:
    """``enqueue`` for an ``AsyncConnection``."""
    await _execute_async(connection, _ENQUEUE, one_parameters(event))
    return event.event_id


async def enqueue_many_async(connection: psycopg.AsyncConnection[Any], events: Sequence[Event]) -> list[UUID]:
    """``enqueue_many`` for an ``AsyncConnection``."""
    if events:
        await _execute_async(connection, _ENQUEUE_MANY, many_parameters(events))
    else:
        _require_transaction(connection)
    return event_ids(events)


def _execute(connection: psycopg.Connection[Any], sql: bytes, parameters: Parameters) -> None:
    _require_transaction(connection)
    # A cursor of our own: the connection's factories may want another style of placeholder or another row.
    # The row is fetched so that, in a pipeline too, an error is raised here and not at a later statement.
    with translated(psycopg.Error), psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        cursor.execute(sql, parameters).fetchone()


async def _execute_async(connection: psycopg.AsyncConnection[Any], sql: bytes, parameters: Parameters) -> None:
    _require_transaction(connection)
    with translated(psycopg.Error):
        async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
            await (await cursor.execute(sql, parameters)).fetchone()


def _require_transaction(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    status = connection.info.transaction_status
    if status == TransactionStatus.INERROR:
        raise TransactionRequired(ABORTED)
    if connection.autocommit and status == TransactionStatus.IDLE:
        raise TransactionRequired(AUTOCOMMIT)
