"""The database adapter of messages: one method a statement, and no decision of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import asyncpg

from consumer_sdk.delivery import Dead, Redrive
from consumer_sdk.identity import Identity
from consumer_sdk.message import Record
from consumer_sdk.run_store import PLANNER, ROLE
from consumer_sdk.transactions import whole_milliseconds
from fencepost.database import StatementPool, Statements
from fencepost.statements import load_statements

__all__ = ["Copy", "Letter", "MessageStore", "StoredRecord"]

_SQL: Final = load_statements("consumer_sdk", "messages.sql")
# Looking up, recording and giving up side by side, and one for the rest.
_POOL_SIZE: Final = 4
# The first and the last day of the calendar, less one for the zones.
_FIRST_MS: Final = -62_135_510_400_000
_LAST_MS: Final = 253_402_214_400_000
_UNBOUNDED: Final = ("0", "0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """What is published of a dead letter."""

    topic: str
    key: bytes | None
    payload: bytes | None
    headers: Sequence[tuple[str, bytes]]
    content_type: str | None
    traceparent: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRecord:
    """A record as a dead letter keeps it, which can be read again like one from Kafka."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    timestamp: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Letter:
    """A dead letter in hand. ``created_at``: when it was given up."""

    redrive: Redrive
    identity: Identity
    record: StoredRecord
    created_at: datetime


class MessageStore:
    """``holder`` is who the rows are written by."""

    def __init__(self, statements: Statements, holder: str) -> None:
        self._fetch = statements.fetch
        self._fetch_on = statements.fetch_on
        self._holder = holder
        self.close = statements.close

    @classmethod
    async def open(cls, database_url: str, *, holder: str, timeout_seconds: float, pooler: bool = False) -> "MessageStore":
        """``pooler``: a transaction pooler stands between, which takes no settings of the session."""
        settings = {"application_name": "fencepost-consumer"} | ({} if pooler else PLANNER)
        statements = await StatementPool.open(
            database_url, _SQL, role=ROLE, size=_POOL_SIZE, timeout_seconds=timeout_seconds, server_settings=settings
        )
        return cls(statements, holder)

    async def known(self, identities: Sequence[Identity]) -> frozenset[int]:
        """The places of those that have an outcome."""
        return frozenset(row["n"] - 1 for row in await self._fetch("known_messages", *_columns(identities)))

    async def record(self, identities: Sequence[Identity]) -> frozenset[Identity]:
        """Record messages as handled; those that were not yet."""
        rows = await self._fetch("record_messages", *_columns(identities), self._holder, *_UNBOUNDED)
        return frozenset(Identity(*row) for row in rows)

    async def record_within(
        self, connection: asyncpg.Connection, identities: Sequence[Identity], *, limit_seconds: float
    ) -> frozenset[Identity]:
        """The same as the first statement of a transaction, which it bounds."""
        rows = await self._fetch_on(
            connection, "record_messages", *_columns(identities), self._holder, *_bounds(limit_seconds)
        )  # fmt: skip
        return frozenset(Identity(*row) for row in rows)

    async def store_dead(
        self,
        identity: Identity,
        record: Record,
        dead: Dead,
        *,
        consumer: str,
        event_type: str | None,
        attempts: int,
        copy: Copy | None,
    ) -> UUID | None:
        """Give a message up; the dead letter's id, or None if the message has an outcome already."""
        rows = await self._fetch(
            "store_dead_letter",
            identity.run_key, identity.tenant_id, identity.step, self._holder, consumer,
            record.topic, record.partition, record.offset, _moment(record.timestamp), event_type,
            record.key, record.value, *_headers(record),
            dead.reason, dead.error_class, dead.error_code, attempts,
            *_copied(copy),
        )  # fmt: skip
        return rows[0]["dead_letter_id"] if rows else None

    async def claim_redrives(self, consumer: str, *, hold_seconds: float, limit: int) -> Sequence[Letter]:
        """Dead letters that an operator wants handled anew."""
        rows = await self._fetch("claim_redrives", self._holder, consumer, timedelta(seconds=hold_seconds), limit)
        return [_letter(row) for row in rows]

    async def finish_redrive(self, redrive: Redrive, identity: Identity) -> bool:
        """A dead letter is handled. False: it is no longer in this hand."""
        rows = await self._fetch("finish_redrive", *redrive[:2], *identity, self._holder, *_UNBOUNDED)
        return bool(rows[0]["ended"])

    async def finish_redrive_within(
        self, connection: asyncpg.Connection, redrive: Redrive, identity: Identity, *, limit_seconds: float
    ) -> tuple[bool, bool]:
        """The same as the first statement of a transaction: (it is in this hand, nobody had handled it yet)."""
        rows = await self._fetch_on(
            connection, "finish_redrive", *redrive[:2], *identity, self._holder, *_bounds(limit_seconds)
        )  # fmt: skip
        return rows[0]["ended"], rows[0]["recorded"]

    async def fail_redrive(self, redrive: Redrive, dead: Dead) -> bool:
        """A redrive failed. False: it is no longer in this hand."""
        return bool(await self._fetch("fail_redrive", *redrive[:2], dead.reason, dead.error_class, dead.error_code, 1))

    async def release_redrive(self, redrive: Redrive) -> bool:
        """A redrive is given back. False: it is no longer in this hand."""
        return bool(await self._fetch("release_redrive", *redrive[:2]))

    async def begin_trial(self, identity: Identity) -> int:
        """A message is begun that may have ended a process; how often it was, this time included."""
        trials: int = (await self._fetch("begin_trial", *identity))[0]["trials"]
        return trials

    async def end_trial(self, identity: Identity, trials: int, left: int) -> None:
        """The trial that made so many of them has ended, and its process has not; how many are left. It may be said twice."""
        await self._fetch("end_trial", *identity, trials, left)

    async def forget_trials(self, age: timedelta, *, limit: int) -> int:
        """Delete trials of long ago; how many."""
        return len(await self._fetch("forget_trials", age, limit))

    async def oldest_remembered(self, retention: timedelta) -> datetime:
        """Up to when a ledger of that retention remembers."""
        oldest: datetime = (await self._fetch("oldest_remembered", retention))[0]["oldest"]
        return oldest

    async def forget(self, retention: timedelta, *, limit: int) -> int:
        """Delete what is past its retention; how much."""
        forgotten: int = (await self._fetch("forget_effects", retention, limit))[0]["forgotten"]
        return forgotten

    async def dead_letters_waiting(self, consumer: str, *, most: int) -> tuple[int, float]:
        """How many wait for an operator, counted up to ``most``, and for how long the oldest has."""
        row = (await self._fetch("dead_letters_waiting", consumer, most))[0]
        return row["waiting"], row["oldest_seconds"]


def _columns(identities: Sequence[Identity]) -> tuple[list[str], list[str], list[str]]:
    return [one[0] for one in identities], [one[1] for one in identities], [one[2] for one in identities]


def _moment(milliseconds: int) -> datetime:
    """The record's timestamp; producers may write any number, and one beyond the calendar is the calendar's end."""
    return datetime.fromtimestamp(min(max(milliseconds, _FIRST_MS), _LAST_MS) / 1000, UTC)


def _headers(record: Record) -> tuple[list[bytes], list[bytes | None]]:
    """Names and values. A name that is not UTF-8 keeps its bytes, as ``raw_fetch`` has read it."""
    return [name.encode(errors="surrogateescape") for name, _ in record.headers], [value for _, value in record.headers]


def _bounds(limit_seconds: float) -> tuple[str, str]:
    milliseconds = str(whole_milliseconds(limit_seconds))
    return milliseconds, milliseconds


def _copied(copy: Copy | None) -> tuple[object, ...]:
    if copy is None:
        return (None,) * 7
    names, values = [name for name, _ in copy.headers], [value for _, value in copy.headers]
    return copy.topic, copy.key, copy.payload, names, values, copy.content_type, copy.traceparent


def _letter(row: Any) -> Letter:
    headers = tuple(
        (name.decode(errors="surrogateescape"), value)
        for name, value in zip(row["header_names"], row["header_values"], strict=True)
    )
    return Letter(
        redrive=Redrive(row["dead_letter_id"], row["generation"], row["attempts"]),
        identity=Identity(row["run_key"], row["tenant_id"], row["step"]),
        record=StoredRecord(
            topic=row["topic"],
            partition=row["partition"],
            offset=row["offset"],
            key=row["key"],
            value=row["payload"],
            headers=headers,
            timestamp=int(row["recorded_at"].timestamp() * 1000),
        ),
        created_at=row["created_at"],
    )
