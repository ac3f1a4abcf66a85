"""Enqueues on an asyncpg connection, inside the transaction that the caller has open on it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

import asyncpg

from fencepost.errors import TransactionRequired
from producer_sdk.event import Event
from producer_sdk.writing import (
    AUTOCOMMIT,
    ENQUEUE,
    ENQUEUE_MANY,
    event_ids,
    many_parameters,
    one_parameters,
    translated,
)

if TYPE_CHECKING:
    from asyncpg.pool import PoolConnectionProxy

    Connection: TypeAlias = asyncpg.Connection[Any] | PoolConnectionProxy[Any]

__all__ = ["enqueue", "enqueue_many"]


async def enqueue(connection: "Connection", event: Event) -> UUID:
    """Write one event and return its id. Call it after taking the lock that serialises the key, a row's say.

    Raises what ``producer_sdk`` lists. After an error of the database, asyncpg needs the rollback of the transaction,
    or of the nested ``connection.transaction()`` around this call.
    """
    _require_transaction(connection)
    with translated(asyncpg.PostgresError):
        await connection.fetchval(ENQUEUE.numbered, *one_parameters(event))
    return event.event_id


async def enqueue_many(connection: "Connection", events: Sequence[Event]) -> list[UUID]:
    """Write up to 10,000 events in their order, all or none, and return their ids. No event, no statement.

    Raises as ``enqueue`` does, and ``InvalidEvent`` for too many events.
    """
    _require_transaction(connection)
    if events:
        with translated(asyncpg.PostgresError):
            await connection.fetchval(ENQUEUE_MANY.numbered, *many_parameters(events))
    return event_ids(events)


def _require_transaction(connection: "Connection") -> None:
    if not hasattr(connection, "is_in_transaction"):
        raise TypeError("enqueue takes an asyncpg connection; acquire one from the pool, and begin a transaction on it")
    if not connection.is_in_transaction():
        raise TransactionRequired(AUTOCOMMIT)
