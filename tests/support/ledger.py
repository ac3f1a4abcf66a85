"""What writers committed, what they rolled back, and what a topic must therefore hold.

Every event carries its key's version, drawn under the lock of the key's row: along a key, versions rise in the order of
the commits. So a topic is right when it holds each committed event, no other, and rising versions in each key.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import asyncpg

from fencepost import wire
from producer_sdk import Event
from producer_sdk.asyncpg import enqueue, enqueue_many
from tests.support.records import Record

ROLLED_BACK_EVERY: Final = 5
EVENTS_A_CALL: Final = 10_000


@dataclass(frozen=True)
class Reading:
    """What a topic held: all records, and how many of them repeat an earlier one."""

    records: int
    repeats: int


@dataclass
class Ledger:
    """The rows of one topic. Several writers may share it; each commits one transaction after the other."""

    url: str
    topic: str
    keys: Sequence[str] = tuple(f"key-{number}" for number in range(24))
    committed: dict[str, tuple[str, int]] = field(default_factory=dict)
    rolled_back: set[str] = field(default_factory=set)

    async def open(self) -> "Ledger":
        """Create the domain table that serialises the writers of a key."""
        connection = await asyncpg.connect(self.url)
        try:
            await connection.execute("CREATE TABLE IF NOT EXISTS account (key text PRIMARY KEY, version bigint NOT NULL)")
            await connection.execute("INSERT INTO account SELECT unnest($1::text[]), 0 ON CONFLICT DO NOTHING", self.keys)
        finally:
            await connection.close()
        return self

    async def fill(self, rows: int, *, payload_bytes: int = 0, keys: Sequence[str] | None = None) -> None:
        """Commit a backlog in one transaction, key by key in turn."""
        keys = keys or self.keys
        connection = await asyncpg.connect(self.url)
        try:
            async with connection.transaction():
                locked = await connection.fetch("SELECT key, version FROM account WHERE key = ANY ($1) FOR UPDATE", keys)
                versions: dict[str, int] = {row["key"]: row["version"] for row in locked}
                events = []
                for number in range(rows):
                    key = keys[number % len(keys)]
                    versions[key] += 1
                    events.append(self._event(key, versions[key], payload_bytes))
                for start in range(0, rows, EVENTS_A_CALL):
                    await enqueue_many(connection, events[start : start + EVENTS_A_CALL])
                await connection.executemany("UPDATE account SET version = $2 WHERE key = $1", list(versions.items()))
            self._keep(events)
        finally:
            await connection.close()

    async def write(self, transactions: int, *, seed: int, until: asyncio.Event | None = None) -> None:
        """Commit one row a transaction, or roll it back now and then; end early when ``until`` is set."""
        choice = random.Random(seed)
        connection = await asyncpg.connect(self.url)
        try:
            for number in range(transactions):
                if until is not None and until.is_set():
                    return
                await self._transaction(connection, choice.choice(self.keys), roll_back=number % ROLLED_BACK_EVERY == 0)
        finally:
            await connection.close()

    async def _transaction(self, connection: "asyncpg.Connection[Any]", key: str, *, roll_back: bool) -> None:
        transaction = connection.transaction()
        await transaction.start()
        version = await connection.fetchval("UPDATE account SET version = version + 1 WHERE key = $1 RETURNING version", key)
        event = self._event(key, version, 0)
        await enqueue(connection, event)
        if roll_back:
            await transaction.rollback()
            self.rolled_back.add(str(event.event_id))
        else:
            await transaction.commit()
            self._keep([event])

    def _event(self, key: str, version: int, payload_bytes: int) -> Event:
        payload = str(version).encode().ljust(payload_bytes, b" ")
        return Event(topic=self.topic, type="account.changed", key=key, payload=payload)

    def _keep(self, events: Iterable[Event]) -> None:
        for event in events:
            assert event.key is not None
            assert event.payload is not None
            self.committed[str(event.event_id)] = event.key.decode(), int(event.payload)

    def check(self, records: Sequence[Record]) -> Reading:
        """Assert that the topic holds what it must, in order; say how much it holds twice."""
        first: dict[str, Record] = {}
        repeats = 0
        for record in records:
            known = first.setdefault(header(record, wire.CE_ID), record)
            if known is not record:
                repeats += 1
                assert _content(known) == _content(record), "a repeat is its first record, byte for byte"
        assert not self.rolled_back & first.keys(), "a row that was rolled back is on the topic"
        lost = self.committed.keys() - first.keys()
        assert not lost, f"{len(lost)} of {len(self.committed)} committed rows are not on the topic"
        assert first.keys() == self.committed.keys(), "the topic holds rows that nobody committed"
        self._check_order(first)
        return Reading(records=len(records), repeats=repeats)

    def _check_order(self, first: dict[str, Record]) -> None:
        by_key: dict[str, list[Record]] = defaultdict(list)
        for event_id, record in first.items():
            key, version = self.committed[event_id]
            assert record.key == key.encode()
            assert int(record.value) == version
            by_key[key].append(record)
        for key, records in by_key.items():
            assert len({record.partition for record in records}) == 1, f"{key} lies in one partition"
            records.sort(key=lambda record: record.offset)
            versions = [int(record.value) for record in records]
            assert versions == sorted(versions), f"{key} appears out of order: {versions}"


def header(record: Record, name: str) -> str:
    """The text of a record's header."""
    return str(dict(record.headers)[name].decode())


def event_ids(records: Iterable[Record]) -> list[str]:
    """The event id of each record."""
    return [header(record, wire.CE_ID) for record in records]


def _content(record: Record) -> tuple[object, ...]:
    return record.partition, record.key, record.value, tuple(record.headers), record.timestamp
