"""Writes events to the outbox on the caller's connection, in the caller's transaction, in one round trip.

Build an ``Event``; it is checked whole before any statement. Then call ``enqueue`` or ``enqueue_many`` of the adapter
for your driver: ``producer_sdk.asyncpg``, ``producer_sdk.psycopg``, ``producer_sdk.sqlalchemy``,
``producer_sdk.django``. No adapter begins, commits, rolls back or retries anything.

An adapter raises ``TransactionRequired`` where the event would not share the domain rows' fate, ``DuplicateEvent`` for
an event id that the outbox holds, ``ConfigurationError`` when the schema or a grant is missing. Every other error of
the driver passes through as it is.
"""

from fencepost.errors import ConfigurationError, DuplicateEvent, InvalidEvent, TransactionRequired
from producer_sdk.event import Event

__all__ = ["ConfigurationError", "DuplicateEvent", "Event", "InvalidEvent", "TransactionRequired"]
