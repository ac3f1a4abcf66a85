"""Enqueues through Django's connection of an alias, inside ``transaction.atomic`` of the same alias.

Django's ``DEBUG = True`` logs parameters, payloads included, as it does for every statement.
"""

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from django.db import DEFAULT_DB_ALIAS, Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

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

__all__ = ["enqueue", "enqueue_many"]

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


def _usable(using: str) -> BaseDatabaseWrapper:
    """The alias's connection, if its transaction can take a row."""
    connection = connections[using]
    if connection.vendor != _POSTGRESQL:
        raise ConfigurationError(f"the outbox needs PostgreSQL, but the alias {using} is {connection.vendor}")
    if connection.get_autocommit() and not connection.in_atomic_block:
        raise TransactionRequired(AUTOCOMMIT)
    if connection.needs_rollback or is_aborted(connection.connection):
        raise TransactionRequired(ABORTED)
    return connection


def _execute(connection: BaseDatabaseWrapper, statement: Statement, parameters: Parameters) -> None:
    with translated(Error, _origin), connection.cursor() as cursor:
        cursor.execute(statement.counted, parameters)


def _origin(error: Exception) -> BaseException:
    return error.__cause__ or error
