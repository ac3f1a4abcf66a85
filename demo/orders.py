"""A small order service: each transaction locks the order's row, changes it and enqueues what happened.

The row's version counts the order's events, so the versions of what was committed are 1, 2, 3, ... without a gap. The
writers differ as a service's code paths do: most are quick, some change their mind, some are slow, some write in bulk.
Each keeps books on what it committed and what it rolled back.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import asyncpg

import producer_sdk
from demo.audit import Commit, Event
from producer_sdk.asyncpg import enqueue, enqueue_many

__all__ = ["Books", "OrderService"]

_SCHEMA: Final = "CREATE TABLE orders (id text PRIMARY KEY, version integer NOT NULL DEFAULT 0, changed_at timestamptz)"
_FILL: Final = "INSERT INTO orders (id) SELECT unnest($1::text[])"
# The lock that serialises the order: everything after it in this transaction is in the order's own order.
_CHANGE: Final = "UPDATE orders SET version = version + $2, changed_at = clock_timestamp() WHERE id = $1 RETURNING version"
_FREE: Final = "SELECT id FROM orders WHERE id = ANY ($1::text[]) ORDER BY id LIMIT $2 FOR UPDATE SKIP LOCKED"

# Writers wait for one another on these orders; the slow ones keep off them, or everybody would wait for seconds.
_BUSY_ORDERS: Final = tuple(f"order-{number:03d}" for number in range(8))
_CALM_ORDERS: Final = tuple(f"order-{number:03d}" for number in range(8, 200))
_BUSY_SHARE: Final = 0.5
_ROLLBACK_SHARE: Final = 0.1
_SLOW_ROLLBACK_SHARE: Final = 0.3
_SLOW_SECONDS: Final = (0.8, 3.0)
_BULK_ORDERS: Final = 10
_BULK_EVENTS_EACH: Final = 20
_BULK_PAUSE_SECONDS: Final = (0.8, 1.6)
# A writer that fell behind its rate makes up for so much and lets the rest go.
_CATCH_UP_SECONDS: Final = 0.1


@dataclass
class Books:
    """What was committed, and what was rolled back."""

    commits: list[Commit] = field(default_factory=list)
    rolled_back: list[Event] = field(default_factory=list)


class OrderService:
    """``writers`` quick writers make ``rate`` transactions a second together; a slow one and a bulk one come on top."""

    def __init__(self, database_url: str, topic: str, *, writers: int, rate: float, seed: int) -> None:
        self.books = Books()
        self._database_url = database_url
        self._topic = topic
        self._writers = writers
        self._rate = rate
        self._seed = seed

    async def prepare(self) -> None:
        """Create the service's own table."""
        connection = await asyncpg.connect(self._database_url)
        try:
            await connection.execute(_SCHEMA)
            await connection.execute(_FILL, [*_BUSY_ORDERS, *_CALM_ORDERS])
        finally:
            await connection.close()

    async def run(self, seconds: float) -> None:
        """Write for so long; open transactions end in their own time. A writer's error ends the run."""
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for number in range(self._writers):
                group.create_task(self._work(number, until, self._quick))
            group.create_task(self._work(self._writers, until, self._slow))
            group.create_task(self._work(self._writers + 1, until, self._bulk))

    async def _work(self, number: int, until: float, step: "Callable[[_Desk, float], Awaitable[None]]") -> None:
        connection = await asyncpg.connect(self._database_url)
        try:
            desk = _Desk(connection, self._topic, self.books, random.Random(f"{self._seed}/{number}"))
            due = time.monotonic() + desk.random.uniform(0, self._writers / self._rate)
            while True:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if time.monotonic() >= until:
                    return
                await step(desk, until)
                due = max(due + self._writers / self._rate, time.monotonic() - _CATCH_UP_SECONDS)
        finally:
            await connection.close()

    @staticmethod
    async def _quick(desk: "_Desk", _until: float) -> None:
        async with desk.transaction(_ROLLBACK_SHARE) as transaction:
            busy = desk.random.random() < _BUSY_SHARE
            orders = [desk.random.choice(_BUSY_ORDERS)] if busy else await desk.free_orders(1)
            await transaction.change(orders, 1)

    @staticmethod
    async def _slow(desk: "_Desk", until: float) -> None:
        # Enqueues early, so that hundreds of rows with higher ids are published before it commits; and once more, late.
        async with desk.transaction(_SLOW_ROLLBACK_SHARE) as transaction:
            orders = await desk.free_orders(2)
            await transaction.change(orders, 1)
            seconds = desk.random.uniform(*_SLOW_SECONDS)
            await asyncio.sleep(min(seconds, max(0.0, until - time.monotonic())))
            await transaction.change(orders, 1)

    @staticmethod
    async def _bulk(desk: "_Desk", until: float) -> None:
        async with desk.transaction(_ROLLBACK_SHARE) as transaction:
            await transaction.change(await desk.free_orders(_BULK_ORDERS), _BULK_EVENTS_EACH)
        pause = desk.random.uniform(*_BULK_PAUSE_SECONDS)
        await asyncio.sleep(min(pause, max(0.0, until - time.monotonic())))


class _Desk:
    """One writer's connection, books and dice."""

    def __init__(self, connection: "asyncpg.Connection[Any]", topic: str, books: Books, dice: random.Random) -> None:
        self.connection = connection
        self.topic = topic
        self.books = books
        self.random = dice

    def transaction(self, rollback_share: float) -> "_Transaction":
        return _Transaction(self, roll_back=self.random.random() < rollback_share)

    async def free_orders(self, count: int) -> list[str]:
        """Lock some orders that nobody holds, in the order of their names, so that two writers cannot deadlock."""
        candidates = self.random.sample(_CALM_ORDERS, min(count * 2, len(_CALM_ORDERS)))
        return [row["id"] for row in await self.connection.fetch(_FREE, candidates, count)]


class _Transaction:
    """Commits, or rolls back where the dice said so; books the events either way."""

    def __init__(self, desk: _Desk, *, roll_back: bool) -> None:
        self._desk = desk
        self._roll_back = roll_back
        self._events: list[Event] = []
        self._transaction = desk.connection.transaction()

    async def __aenter__(self) -> "_Transaction":
        await self._transaction.start()
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        books = self._desk.books
        if error is not None or self._roll_back:
            await self._transaction.rollback()
            books.rolled_back.extend(self._events)
            return
        await self._transaction.commit()
        now = time.time()
        books.commits.extend(Commit(event, now) for event in self._events)

    async def change(self, orders: Sequence[str], times: int) -> None:
        """Change each order so often, and enqueue an event for each change, in the order of the versions."""
        events: list[producer_sdk.Event] = []
        for order in orders:
            version = await self._desk.connection.fetchval(_CHANGE, order, times)
            events += [self._event(order, number) for number in range(version - times + 1, version + 1)]
        if len(events) == 1:
            await enqueue(self._desk.connection, events[0])
        else:
            await enqueue_many(self._desk.connection, events)

    def _event(self, order: str, version: int) -> producer_sdk.Event:
        value = {"order": order, "version": version, "items": self._desk.random.randrange(1, 20)}
        event = producer_sdk.Event.json(value, topic=self._desk.topic, type="order.changed", key=order)
        self._events.append(Event(str(event.event_id), order, version))
        return event
