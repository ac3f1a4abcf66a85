"""Enqueues events and accepts commands through Django's connection of an alias, inside ``transaction.atomic`` of the same alias.

Django's ``DEBUG = True`` logs parameters, payloads included, as it does for every statement.
"""

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

from django.db import DEFAULT_DB_ALIAS, Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from fencepost.errors import ConfigurationError, InvalidCommand, InvalidEvent, InvalidInput, TransactionRequired
from fencepost.secrets import Secrets
from producer_sdk.acceptance import KEY_RETENTION_SECONDS, Acceptance, Accepted, Answer, Patience, persist
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

__all__ = ["accept", "cancel", "enqueue", "enqueue_many", "read_run"]

_POSTGRESQL: Final = "postgresql"


def enqueue(event: Event, *, using: str = DEFAULT_DB_ALIAS) -> UUID:
    """Write one event on the connection ``using`` and return its id.

    Call it after taking the lock that serialises the key, by ``select_for_update`` say. Raises what ``producer_sdk``
    lists. After an error of the database, leave the ``atomic`` block around this call by an exception.
    """
    _execute(_usable(using), ENQUEUE, one_parameters(event))
    return event.event_id


def enqueue_many(events: Sequence[Event], *, using: str = DEFAULT_DB_ALIAS) -> list[UUID]:
    """Write up to 10,000 events in their order, all or none, and return their ids. No event, no statement.

    Raises as ``enqueue`` does, and ``InvalidEvent`` for too many events.
    """
    connection = _usable(using)
    if events:
        _execute(connection, ENQUEUE_MANY, many_parameters(events))
    return event_ids(events)


def accept(
    command: Command,
    scope: Scope,
    key: str | Unkeyed,
    *,
    secrets: Secrets | None = None,
    key_retention_seconds: float = KEY_RETENTION_SECONDS,
    wait_seconds: float = 0,
    using: str = DEFAULT_DB_ALIAS,
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
        return Answer(*_execute(_usable(using), ACCEPT, parameters, InvalidCommand))

    return acceptance.judged(persist(attempt, Patience(wait_seconds)))


def cancel(
    run_id: UUID,
    *,
    tenant_id: str,
    actor: str,
    reason: str,
    expected_version: int | None = None,
    using: str = DEFAULT_DB_ALIAS,
) -> Cancellation:
    """Cancel a run, or ask its worker to; ``actor`` and ``reason`` go to the audit.

    ``expected_version``: cancel only what you saw. Raises ``RunNotFound``, ``RunChanged``, ``RunEnded``.
    """
    parameters = cancel_parameters(run_id, tenant_id=tenant_id, actor=actor, reason=reason, expected_version=expected_version)
    return cancelled(_execute(_usable(using), CANCEL_RUN, parameters, InvalidCommand))


def read_run(run_id: UUID, *, tenant_id: str, using: str = DEFAULT_DB_ALIAS) -> Run:
    """Return a run's state and answer; needs no ``atomic``. Raises ``RunNotFound``."""
    return run_from(run_id, _execute(_postgresql(using), READ_RUN, read_parameters(run_id, tenant_id), InvalidCommand))


def _usable(using: str) -> BaseDatabaseWrapper:
    """The alias's connection, if its transaction can take a row."""
    connection = _postgresql(using)
    if connection.get_autocommit() and not connection.in_atomic_block:
        raise TransactionRequired(AUTOCOMMIT)
    if connection.needs_rollback or is_aborted(connection.connection):
        raise TransactionRequired(ABORTED)
    return connection


def _postgresql(using: str) -> BaseDatabaseWrapper:
    connection = connections[using]
    if connection.vendor != _POSTGRESQL:
        raise ConfigurationError(f"the outbox needs PostgreSQL, but the alias {using} is {connection.vendor}")
    return connection


def _execute(
    connection: BaseDatabaseWrapper, statement: Statement, parameters: Parameters, refusal: type[InvalidInput] = InvalidEvent
) -> tuple[Any, ...]:
    with translated(Error, _origin, refusal=refusal), connection.cursor() as cursor:
        cursor.execute(statement.counted, parameters)
        row = cursor.fetchone()
    assert row is not None
    return tuple(row)


def _origin(error: Exception) -> BaseException:
    return error.__cause__ or error
