"""Writes events to the outbox and accepts commands on the caller's connection, in the caller's transaction, in one round trip.

Build an ``Event`` or a ``Command``; it is checked whole before any statement. Then call ``enqueue``, ``enqueue_many`` or
``accept`` of the adapter for your driver: ``producer_sdk.asyncpg``, ``producer_sdk.psycopg``, ``producer_sdk.sqlalchemy``,
``producer_sdk.django``. No adapter begins, commits, rolls back or retries a transaction.

An adapter raises ``TransactionRequired`` where what it writes would not share the domain rows' fate, ``DuplicateEvent`` for
an event id that the outbox holds, ``ConfigurationError`` when the schema, a grant or the secrets are missing.

``accept`` writes a run with all that belongs to it, or finds the run that the key stands for. It raises ``KeyMissing`` and
``KeyInvalid`` for the key itself, ``IdempotencyConflict`` where the key belongs to another request, ``InProgress`` while
another transaction is accepting it, ``KeyExpired`` past its retention: all are ``IdempotencyError``, have a ``code``, started
nothing and left the transaction usable. ``cancel`` and ``read_run`` raise ``RunNotFound``, ``RunChanged``, ``RunEnded``, and
``codec_of`` raises ``RunErased``. Every other error of the driver passes through as it is.
"""

from fencepost.errors import (
    ConfigurationError,
    DuplicateEvent,
    IdempotencyConflict,
    IdempotencyError,
    InProgress,
    InvalidCommand,
    InvalidEvent,
    InvalidInput,
    KeyExpired,
    KeyInvalid,
    KeyMissing,
    RunChanged,
    RunEnded,
    RunErased,
    RunNotFound,
    TransactionRequired,
)
from fencepost.secrets import Secrets
from producer_sdk.acceptance import Accepted, Submission
from producer_sdk.command import Command
from producer_sdk.event import Event
from producer_sdk.identity import UNKEYED, Scope
from producer_sdk.runs import Cancellation, Run

__all__ = [
    "UNKEYED",
    "Accepted",
    "Cancellation",
    "Command",
    "ConfigurationError",
    "DuplicateEvent",
    "Event",
    "IdempotencyConflict",
    "IdempotencyError",
    "InProgress",
    "InvalidCommand",
    "InvalidEvent",
    "InvalidInput",
    "KeyExpired",
    "KeyInvalid",
    "KeyMissing",
    "Run",
    "RunChanged",
    "RunEnded",
    "RunErased",
    "RunNotFound",
    "Scope",
    "Secrets",
    "Submission",
    "TransactionRequired",
]
