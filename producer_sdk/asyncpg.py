"""Enqueues events and accepts commands on an asyncpg connection, inside the transaction that the caller has open on it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

import asyncpg

from fencepost.codec import PayloadCodec
from fencepost.errors import ConfigurationError, IdempotencyError, InvalidCommand, TransactionRequired
from fencepost.secrets import Secrets
from producer_sdk.acceptance import (
    KEY_RETENTION_SECONDS,
    Acceptance,
    Accepted,
    Answer,
    Patience,
    Submission,
    acceptances,
    outcomes,
    persist_async,
)
from producer_sdk.command import Command
from producer_sdk.event import Event
from producer_sdk.identity import Scope, Unkeyed
from producer_sdk.runs import (
    Cancellation,
    Erasure,
    Run,
    cancel_parameters,
    cancelled,
    erase_parameters,
    erased,
    lineage_codec_from,
    read_parameters,
    run_from,
)
from producer_sdk.writing import (
    ACCEPT,
    AUTOCOMMIT,
    CANCEL_RUN,
    ENQUEUE,
    ENQUEUE_MANY,
    ERASE_LINEAGE,
    READ_DATA_KEY,
    READ_RUN,
    Parameters,
    Statement,
    event_ids,
    many_parameters,
    one_parameters,
    translated,
)

if TYPE_CHECKING:
    from asyncpg.pool import PoolConnectionProxy

    Connection: TypeAlias = asyncpg.Connection[Any] | PoolConnectionProxy[Any]

__all__ = ["accept", "accept_many", "cancel", "codec_of", "enqueue", "enqueue_many", "erase", "read_run"]


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


async def accept(
    connection: "Connection",
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

    async def attempt() -> Answer:
        return Answer(*await _row(connection, ACCEPT, parameters))

    return acceptance.judged(await persist_async(attempt, Patience(wait_seconds)))


async def accept_many(
    connection: "Connection",
    submissions: Sequence[Submission],
    *,
    secrets: Secrets | None = None,
    key_retention_seconds: float = KEY_RETENTION_SECONDS,
) -> list[Accepted | IdempotencyError]:
    """Accept up to 1,000 commands in one pipelined round trip and return, in their order, what came of each.

    A key that is refused stands in the list as its error and spoils no other. An error of the database undoes all.
    """
    _require_transaction(connection)
    accepting = acceptances(submissions, secrets=secrets, key_retention_seconds=key_retention_seconds)
    sent = [one.parameters() for one in accepting if isinstance(one, Acceptance)]
    rows: list[Any] = []
    if sent:
        with translated(asyncpg.PostgresError, refusal=InvalidCommand):
            rows = await connection.fetchmany(ACCEPT.numbered, sent)
    return outcomes(accepting, [Answer(*row) for row in rows])


async def cancel(
    connection: "Connection", run_id: UUID, *, tenant_id: str, actor: str, reason: str, expected_version: int | None = None
) -> Cancellation:
    """Cancel a run, or ask its worker to; ``actor`` and ``reason`` go to the audit.

    ``expected_version``: cancel only what you saw. Raises ``RunNotFound``, ``RunChanged``, ``RunEnded``.
    """
    _require_transaction(connection)
    parameters = cancel_parameters(run_id, tenant_id=tenant_id, actor=actor, reason=reason, expected_version=expected_version)
    return cancelled(await _row(connection, CANCEL_RUN, parameters))


async def erase(connection: "Connection", run_id: UUID, *, tenant_id: str, actor: str, reason: str) -> Erasure:
    """Erase the whole lineage of a run, by any run of it: a live one ends as cancelled; keys stay used; ``actor`` and ``reason`` go
    to the audit, so keep personal data out of them.

    Not a producer's right: ``GRANT EXECUTE ON FUNCTION fencepost.erase_lineage`` to whoever may, as docs/how-to/erasure.md shows.
    Whoever writes to the lineage is waited for; where that is a deadlock (asyncpg's ``DeadlockDetectedError``), begin the
    transaction anew. Raises ``RunNotFound``, ``ConfigurationError`` without the right, ``InvalidCommand`` in a transaction that is
    not READ COMMITTED.
    """
    _require_transaction(connection)
    parameters = erase_parameters(run_id, tenant_id=tenant_id, actor=actor, reason=reason)
    try:
        return erased(await _row(connection, ERASE_LINEAGE, parameters))
    except ConfigurationError as error:
        if isinstance(error.__cause__, asyncpg.InsufficientPrivilegeError):
            raise ConfigurationError(
                "the database user may not erase; GRANT EXECUTE ON FUNCTION fencepost.erase_lineage"
            ) from error
        raise


async def codec_of(connection: "Connection", run_id: UUID, *, tenant_id: str, codec: PayloadCodec) -> PayloadCodec:
    """The codec of a run's lineage, for whoever reads what its worker encoded by ``context.codec`` or stored; needs no transaction.
    Keep it no longer than what it reads. ``codec``: the service's.

    Raises ``RunNotFound``, and ``RunErased`` for a lineage of which nothing can be read any more.
    """
    return lineage_codec_from(await _row(connection, READ_DATA_KEY, read_parameters(run_id, tenant_id)), codec)


async def read_run(connection: "Connection", run_id: UUID, *, tenant_id: str) -> Run:
    """Return a run's state and answer; needs no transaction. Raises ``RunNotFound``."""
    return run_from(run_id, await _row(connection, READ_RUN, read_parameters(run_id, tenant_id)))


async def _row(connection: "Connection", statement: Statement, parameters: Parameters) -> Sequence[Any]:
    with translated(asyncpg.PostgresError, refusal=InvalidCommand):
        row = await connection.fetchrow(statement.numbered, *parameters)
    assert row is not None
    return tuple(row)


def _require_transaction(connection: "Connection") -> None:
    if not hasattr(connection, "is_in_transaction"):
        raise TypeError("this takes an asyncpg connection; acquire one from the pool, and begin a transaction on it")
    if not connection.is_in_transaction():
        raise TransactionRequired(AUTOCOMMIT)
