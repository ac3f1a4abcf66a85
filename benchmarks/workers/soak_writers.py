"""Writers that outlive their database: each transaction ends as committed, rolled back, or unknown, and is booked as that.

Unknown is a COMMIT without an answer: only the database can say later what became of it. Versions are drawn under the lock
of the key's row before the enqueue, so the versions of what a key committed rise in the order of its locks.
"""

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import asyncpg

from benchmarks.workers import run_worker
from fencepost.errors import FencepostError
from producer_sdk import Event
from producer_sdk.asyncpg import enqueue, enqueue_many

_SCHEMA: Final = "CREATE TABLE account (key text PRIMARY KEY, version bigint NOT NULL DEFAULT 0)"
_FILL: Final = "INSERT INTO account (key) SELECT unnest($1::text[])"
# The lock that serialises the key: whatever follows in this transaction is in the key's own order.
_CHANGE: Final = "UPDATE account SET version = version + $2 WHERE key = $1 RETURNING version"
_FREE: Final = "SELECT key FROM account WHERE key = ANY ($1::text[]) LIMIT $2 FOR UPDATE SKIP LOCKED"

# Quick writers wait for one another on these keys; slow and bulk ones keep off them, or everybody would wait for seconds.
_BUSY_KEYS: Final = tuple(f"key-{number:03d}" for number in range(8))
_CALM_KEYS: Final = tuple(f"key-{number:03d}" for number in range(8, 200))
_BUSY_SHARE: Final = 0.5
_ROLLBACK_SHARE: Final = 0.1
_OPEN_SECONDS: Final = (0.5, 3.0)
_BULK_KEYS: Final = 20
_BULK_EVENTS_EACH: Final = (50, 200)
_BULK_PAUSE_SECONDS: Final = (5.0, 12.0)
_SLOW_WRITERS: Final = 2
_CONNECT_SECONDS: Final = 5.0
# Beyond any pause of the database that the soak makes: a statement that takes longer is given up.
_STATEMENT_SECONDS: Final = 30.0
_RECONNECT_SECONDS: Final = 0.2

# What a dying, absent or starting database makes of a statement.
_DATABASE_ERRORS: Final = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, FencepostError, OSError)

_Booked = tuple[str, str, int]


@dataclass
class Books:
    """(event id, key, version) by what is known of the transaction; ``retries`` counts those that an error ended."""

    committed: list[_Booked] = field(default_factory=list)
    rolled_back: list[_Booked] = field(default_factory=list)
    unknown: list[_Booked] = field(default_factory=list)
    retries: int = 0


class _Writer:
    """One connection at a time, and dice of its own."""

    def __init__(self, database_url: str, topic: str, books: Books, dice: random.Random) -> None:
        self._url = database_url
        self._topic = topic
        self._books = books
        self.dice = dice
        self._connection: asyncpg.Connection[Any] | None = None

    async def close(self) -> None:
        """End the connection, whatever state it is in."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    async def attempt(self, step: "Callable[[_Transaction], Awaitable[None]]") -> None:
        """One transaction. A database error ends it, books it and drops the connection; the next attempt has a new one."""
        transaction: _Transaction | None = None
        try:
            transaction = _Transaction(await self._connected(), self._topic, self.dice)
            await transaction.run(step)
        except _DATABASE_ERRORS:
            self._books.retries += 1
            await self.close()
            await asyncio.sleep(_RECONNECT_SECONDS)
        finally:
            if transaction is not None:
                getattr(self._books, transaction.outcome).extend(transaction.booked)

    async def _connected(self) -> "asyncpg.Connection[Any]":
        if self._connection is None or self._connection.is_closed():
            self._connection = await asyncpg.connect(self._url, timeout=_CONNECT_SECONDS, command_timeout=_STATEMENT_SECONDS)
        return self._connection


class _Transaction:
    """``outcome`` names the book: nothing has committed before COMMIT is sent, and nobody knows until it is answered."""

    def __init__(self, connection: "asyncpg.Connection[Any]", topic: str, dice: random.Random) -> None:
        self._connection = connection
        self._topic = topic
        self.dice = dice
        self.booked: list[_Booked] = []
        self.outcome = "rolled_back"

    async def run(self, step: "Callable[[_Transaction], Awaitable[None]]") -> None:
        transaction = self._connection.transaction()
        await transaction.start()
        await step(self)
        if self.dice.random() < _ROLLBACK_SHARE:
            await transaction.rollback()
            return
        self.outcome = "unknown"
        await transaction.commit()
        self.outcome = "committed"

    async def free_keys(self, count: int) -> Sequence[str]:
        """Lock some keys that nobody holds; it waits for none, so no two writers deadlock."""
        candidates = self.dice.sample(_CALM_KEYS, count * 2)
        return [row["key"] for row in await self._connection.fetch(_FREE, candidates, count)]

    async def change(self, keys: Sequence[str], times: int) -> None:
        """Raise each key's version so often; enqueue an event for each version, in their order."""
        events: list[Event] = []
        for key in keys:
            version = await self._connection.fetchval(_CHANGE, key, times)
            events += [self._event(key, number) for number in range(version - times + 1, version + 1)]
        if len(events) == 1:
            await enqueue(self._connection, events[0])
        else:
            await enqueue_many(self._connection, events)

    def _event(self, key: str, version: int) -> Event:
        event = Event(topic=self._topic, type="account.changed", key=key, payload=str(version).encode())
        self.booked.append((str(event.event_id), key, version))
        return event


async def _quick(transaction: _Transaction) -> None:
    busy = transaction.dice.random() < _BUSY_SHARE
    await transaction.change([transaction.dice.choice(_BUSY_KEYS)] if busy else await transaction.free_keys(1), 1)


async def _slow(transaction: _Transaction) -> None:
    # Early and late: rows with higher ids are published in between, and this one's first become late rows.
    keys = await transaction.free_keys(3)
    await transaction.change(keys, 1)
    await asyncio.sleep(transaction.dice.uniform(*_OPEN_SECONDS))
    await transaction.change(keys, 1)


async def _bulk(transaction: _Transaction) -> None:
    await transaction.change(await transaction.free_keys(_BULK_KEYS), transaction.dice.randint(*_BULK_EVENTS_EACH))


async def _write(
    writer: _Writer, step: Callable[[_Transaction], Awaitable[None]], pauses: tuple[float, float], ends: asyncio.Event
) -> None:
    try:
        while not ends.is_set():
            await writer.attempt(step)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(writer.dice.uniform(*pauses)):
                    await ends.wait()
    finally:
        await writer.close()


async def write(*, kafka: str, database_url: str, topic: str, writers: int, rate: float, seed: int) -> dict[str, Any]:
    """Write at about ``rate`` quick transactions a second, until a line comes in; return the books."""
    del kafka
    connection = await asyncpg.connect(database_url)
    await connection.execute(_SCHEMA)
    await connection.execute(_FILL, [*_BUSY_KEYS, *_CALM_KEYS])
    await connection.close()
    books, ends = Books(), asyncio.Event()
    stream = await _standard_input()
    print("READY", flush=True)
    await stream.readline()
    begun = time.monotonic()
    spacing = (0.0, 2 * writers / rate)
    kinds = [(_quick, spacing)] * writers + [(_slow, (0.0, 0.5))] * _SLOW_WRITERS + [(_bulk, _BULK_PAUSE_SECONDS)]
    async with asyncio.TaskGroup() as group:
        for number, (step, pauses) in enumerate(kinds):
            writer = _Writer(database_url, topic, books, random.Random(f"{seed}/{number}"))
            group.create_task(_write(writer, step, pauses, ends))
        await stream.readline()
        ends.set()
    return {
        "committed": books.committed,
        "rolled_back": books.rolled_back,
        "unknown": books.unknown,
        "retries": books.retries,
        "seconds": time.monotonic() - begun,
    }


async def _standard_input() -> asyncio.StreamReader:
    stream = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), sys.stdin)
    return stream


if __name__ == "__main__":
    run_worker(write)
