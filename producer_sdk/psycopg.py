"""Enqueues events and accepts commands on a psycopg 3 connection: ``enqueue``, ``accept`` and the others take a
``Connection``, those that end in ``_async`` an ``AsyncConnection``.

A connection that begins at its first statement is fine. One in autocommit needs ``connection.transaction()``.
"""

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from fencepost.errors import InvalidCommand, InvalidEvent, InvalidInput, TransactionRequired
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
    event_ids,
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

_ENQUEUE: Final = ENQUEUE.counted.encode()
_ENQUEUE_MANY: Final = ENQUEUE_MANY.counted.encode()
_ACCEPT: Final = ACCEPT.counted.encode()
_CANCEL_RUN: Final = CANCEL_RUN.counted.encode()
_READ_RUN: Final = READ_RUN.counted.encode()


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


def accept(
    connection: psycopg.Connection[Any],
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
    _require_transaction(connection)
    acceptance = Acceptance(command, scope, key, secrets=secrets, key_retention_seconds=key_retention_seconds)
    parameters = acceptance.parameters()

    def attempt() -> Answer:
        return Answer(*_row(connection, _ACCEPT, parameters))

    return acceptance.judged(persist(attempt, Patience(wait_seconds)))


async def accept_async(
    connection: psycopg.AsyncConnection[Any],
    command: Command,
    scope: Scope,
    key: str | Unkeyed,
    *,
    secrets: Secrets | None = None,
    key_retention_seconds: float = KEY_RETENTION_SECONDS,
    wait_seconds: float = 0,
) -> Accepted:
    """``accept`` for an ``AsyncConnection``."""
    _require_transaction(connection)
    acceptance = Acceptance(command, scope, key, secrets=secrets, key_retention_seconds=key_retention_seconds)
    parameters = acceptance.parameters()

    async def attempt() -> Answer:
        return Answer(*await _row_async(connection, _ACCEPT, parameters))

    return acceptance.judged(await persist_async(attempt, Patience(wait_seconds)))


def cancel(
    connection: psycopg.Connection[Any],
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
    _require_transaction(connection)
    parameters = cancel_parameters(run_id, tenant_id=tenant_id, actor=actor, reason=reason, expected_version=expected_version)
    return cancelled(_row(connection, _CANCEL_RUN, parameters))


async def cancel_async(
    connection: psycopg.AsyncConnection[Any],
    run_id: UUID,
    *,
    tenant_id: str,
    actor: str,
    reason: str,
    expected_version: int | None = None,
) -> Cancellation:
    """``cancel`` for an ``AsyncConnection``."""
    _require_transaction(connection)
    parameters = cancel_parameters(run_id, tenant_id=tenant_id, actor=actor, reason=reason, expected_version=expected_version)
    return cancelled(await _row_async(connection, _CANCEL_RUN, parameters))


def read_run(connection: psycopg.Connection[Any], run_id: UUID, *, tenant_id: str) -> Run:
    """Return a run's state and answer; fine in autocommit. Raises ``RunNotFound``."""
    return run_from(run_id, _row(connection, _READ_RUN, read_parameters(run_id, tenant_id)))


async def read_run_async(connection: psycopg.AsyncConnection[Any], run_id: UUID, *, tenant_id: str) -> Run:
    """``read_run`` for an ``AsyncConnection``."""
    return run_from(run_id, await _row_async(connection, _READ_RUN, read_parameters(run_id, tenant_id)))


def _execute(connection: psycopg.Connection[Any], sql: bytes, parameters: Parameters) -> None:
    _require_transaction(connection)
    _fetch(connection, sql, parameters, InvalidEvent)


async def _execute_async(connection: psycopg.AsyncConnection[Any], sql: bytes, parameters: Parameters) -> None:
    _require_transaction(connection)
    await _fetch_async(connection, sql, parameters, InvalidEvent)


def _row(connection: psycopg.Connection[Any], sql: bytes, parameters: Parameters) -> tuple[Any, ...]:
    return _fetch(connection, sql, parameters, InvalidCommand)


async def _row_async(connection: psycopg.AsyncConnection[Any], sql: bytes, parameters: Parameters) -> tuple[Any, ...]:
    return await _fetch_async(connection, sql, parameters, InvalidCommand)


def _fetch(connection: psycopg.Connection[Any], sql: bytes, parameters: Parameters, refusal: type[InvalidInput]) -> tuple[Any, ...]:
    # A cursor of our own: the connection's factories may want another style of placeholder or another row.
    # The row is fetched so that, in a pipeline too, an error is raised here and not at a later statement.
    with translated(psycopg.Error, refusal=refusal), psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        row = cursor.execute(sql, parameters).fetchone()
    assert row is not None
    return row


async def _fetch_async(
    connection: psycopg.AsyncConnection[Any], sql: bytes, parameters: Parameters, refusal: type[InvalidInput]
) -> tuple[Any, ...]:
    with translated(psycopg.Error, refusal=refusal):
        async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
            row = await (await cursor.execute(sql, parameters)).fetchone()
    assert row is not None
    return row


def _require_transaction(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    status = connection.info.transaction_status
    if status == TransactionStatus.INERROR:
        raise TransactionRequired(ABORTED)
    if connection.autocommit and status == TransactionStatus.IDLE:
        raise TransactionRequired(AUTOCOMMIT)
