"""Many messages in one transaction: what they share, what one that fails costs the others, and what two consumers do at once."""

import asyncio
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

import pytest

from consumer_sdk import Message, MessageContext, MessageHandlers, Retry, Terminal
from tests.support.consumers import Ping, Stage, sample, stage
from tests.support.tcp_proxy import TcpProxy
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

pytestmark = pytest.mark.services

SOON: Final = Retry(base_seconds=0.05, cap_seconds=0.05, jitter="none")

Meet = Callable[[Sequence[int], Any], Awaitable[None]]


@pytest.fixture
async def one(database_url: str, kafka: str, topic: TopicFactory) -> AsyncIterator[Stage]:
    async with stage(database_url, kafka, topic) as made:
        yield made


async def insert(messages: Sequence[Message[Ping]], connection: Any) -> None:
    await connection.executemany("INSERT INTO seen VALUES ($1, $2)", [(each.event_id, each.value.n) for each in messages])


def writing(meet: Meet | None = None, **options: Any) -> tuple[MessageHandlers, list[list[int]]]:
    """An app that writes each batch, after it met ``meet``; and the batches that it was given."""
    app, batches = MessageHandlers(), list[list[int]]()

    @app.batch_handler("ping", model=Ping, step="write", **({"retry": SOON} | options))
    async def write(messages: Sequence[Message[Ping]], connection: Any) -> None:
        numbers = [message.value.n for message in messages]
        batches.append(numbers)
        await insert(messages, connection)
        if meet is not None:
            await meet(numbers, connection)

    return app, batches


async def send(made: Stage, count: int, *, keys: int = 4) -> list[str]:
    return [await made.send({"n": number}, key=f"k{number % keys}") for number in range(count)]


async def test_a_batch_is_one_transaction_and_no_larger_than_it_may_be(one: Stage) -> None:
    """CONSUME-11's batch: all rows and all outcomes appear together."""
    uncommitted: list[int] = []

    async def look(_numbers: Sequence[int], _connection: Any) -> None:
        uncommitted.append(len(await one.seen()) - len(await one.outcomes()))

    app, batches = writing(look, most=7)
    events = await send(one, 20)
    async with one.running(app):
        await one.until_committed({0: 20})
    assert sorted(await one.seen()) == list(range(20))
    assert await one.outcomes() == dict.fromkeys(events, "succeeded")
    assert max(len(batch) for batch in batches) == 7
    assert sum(len(batch) for batch in batches) == 20
    assert set(uncommitted) == {0}


async def test_copies_in_a_batch_and_in_a_later_one_are_not_given_to_the_handler(one: Stage) -> None:
    """CONSUME-16, CONSUME-26."""
    app, batches = writing()
    events = await send(one, 4)
    for event in events[:2]:
        await one.send({"n": 99}, event_id=event)
    async with one.running(app) as consumer:
        await one.until_committed({0: 6})
        await one.send({"n": 99}, event_id=events[0])
        await one.send({"n": 4})
        await one.until_committed({0: 8})
        assert sample(consumer, "fencepost_consumer_messages_total", type="ping", outcome="duplicate") == 3
    assert sorted(number for batch in batches for number in batch) == [0, 1, 2, 3, 4]


async def test_two_consumers_with_the_same_messages_in_other_orders_share_them(one: Stage) -> None:
    """CONSUME-10: batches of both overlap; whoever is second waits, neither deadlocks, each message exists once."""
    events = await send(one, 60, keys=60)
    again = list(reversed(events))
    for number, event in zip(reversed(range(60)), again, strict=True):
        await one.send({"n": number}, event_id=event, key=f"r{number % 7}")
    groups = [f"{one.topic}-{name}" for name in "ab"]

    async def consume(group: str) -> None:
        async with one.running(writing(most=20)[0], consumer_group=group, consumer_name="same"):
            await one.until_committed({0: 120}, group, seconds=40)

    await asyncio.gather(*(consume(group) for group in groups))
    assert sorted(await one.seen()) == list(range(60))
    assert await one.outcomes() == dict.fromkeys(events, "succeeded")
    assert await one.dead() == []


async def test_one_that_takes_too_long_is_found_and_costs_only_itself(one: Stage) -> None:
    """CONSUME-22: it has its attempts, alone; the others wait for the search, and are handled by it."""

    async def hang(numbers: Sequence[int], connection: Any) -> None:
        if 5 in numbers:
            await connection.execute("SELECT pg_sleep(60)")

    app, batches = writing(hang, attempts=2, attempt_seconds=0.3)
    await send(one, 8)
    async with one.running(app):
        await one.until_committed({0: 8})
    (letter,) = await one.dead()
    assert (letter["offset"], letter["reason"], letter["attempts"]) == (5, "attempts_exhausted", 2)
    assert sorted(await one.seen()) == [0, 1, 2, 3, 4, 6, 7]
    assert batches.count([5]) == 2


async def test_one_that_ends_the_process_ends_its_own_attempts(one: Stage) -> None:
    async def leave(numbers: Sequence[int], _connection: Any) -> None:
        if 5 in numbers:
            sys.exit(3)

    app, batches = writing(leave, attempts=2)
    await send(one, 8)
    async with one.running(app):
        await one.until_committed({0: 8})
    (letter,) = await one.dead()
    assert (letter["offset"], letter["reason"]) == (5, "attempts_exhausted")
    assert letter["error_class"].endswith("HandlerExited")
    assert len(await one.seen()) == 7
    assert batches.count([5]) == 2


@pytest.mark.parametrize("state", ["40001", "57P03"])
async def test_a_conflict_spends_nobodys_attempt(one: Stage, state: str) -> None:
    """CONSUME-20: what PostgreSQL asks to try again, whether of many or of one."""
    failed: list[int] = []

    async def conflict(numbers: Sequence[int], connection: Any) -> None:
        if len(failed) < 6:
            failed.append(len(numbers))
            await connection.execute(f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{state}'; END $$")

    app, _ = writing(conflict, attempts=1)
    await send(one, 5)
    async with one.running(app):
        await one.until_committed({0: 5})
    assert sorted(await one.seen()) == list(range(5))
    assert await one.dead() == []
    assert 1 in failed


@pytest.mark.parametrize("how", ["the session ends", "the network is cut"])
async def test_a_database_that_goes_away_under_a_batch_spends_nobodys_attempt(one: Stage, how: str) -> None:
    """CONSUME-20: all of the batch waits, and is handled once."""
    cut = asyncio.Event()
    async with TcpProxy(one.database_url) as proxy:

        async def disappear(_numbers: Sequence[int], connection: Any) -> None:
            if not cut.is_set():
                cut.set()
                pid = await connection.fetchval("SELECT pg_backend_pid()")
                if how == "the network is cut":
                    await proxy.refuse()
                assert await one.connection.fetchval("SELECT pg_terminate_backend($1, 5000)", pid)

        app, _ = writing(disappear, attempts=1)
        await send(one, 6)
        async with one.running(app, database_url=proxy.url, consumer_statement_seconds=1) as consumer:
            await cut.wait()
            if how == "the network is cut":
                await eventually(lambda: sample(consumer, "fencepost_consumer_database_errors_total", statement="redrive") >= 1, 30)
                assert (await one.seen(), await one.committed()) == ([], {0: 0})
                await proxy.accept()
            await one.until_committed({0: 6})
    assert sorted(await one.seen()) == list(range(6))
    assert await one.dead() == []


async def test_what_does_not_fit_never_reaches_a_batch(one: Stage) -> None:
    """A payload of another form, an unknown version and a tombstone are dead letters; their neighbours' batch is whole."""
    app, batches = writing(version=1)
    fits = {"schema-version": "1"}
    await one.send({"n": 0}, headers=fits)
    await one.send({"m": 0}, headers=fits)
    await one.send({"n": 1}, headers={"schema-version": "2"})
    await one.send(None, headers=fits)
    await one.send({"n": 2}, headers=fits)
    async with one.running(app):
        await one.until_committed({0: 5})
    assert [number for batch in batches for number in batch] == [0, 2]
    assert [letter["reason"] for letter in await one.dead()] == ["invalid_payload", "unknown_version", "tombstone"]


async def test_batches_and_single_messages_of_one_key_keep_their_order(one: Stage) -> None:
    """CONSUME-23: a key's messages of two types never overtake each other."""
    app, order, dice = MessageHandlers(), defaultdict[bytes | None, list[int]](list), iter(range(10**6))

    @app.batch_handler("bulk", model=Ping, step="bulk")
    async def bulk(messages: Sequence[Message[Ping]], _connection: Any) -> None:
        await asyncio.sleep(0)
        for message in messages:
            order[message.key].append(message.value.n)

    @app.handler("single", model=Ping, step="single")
    async def single(message: Message[Ping], _context: MessageContext) -> None:
        for _ in range(next(dice) % 3):
            await asyncio.sleep(0)
        order[message.key].append(message.value.n)

    for number in range(80):
        await one.send({"n": number}, type="single" if number % 5 == 0 else "bulk", key=f"k{number % 4}")
    async with one.running(app):
        await one.until_committed({0: 80})
    assert sorted(number for numbers in order.values() for number in numbers) == list(range(80))
    assert all(numbers == sorted(numbers) for numbers in order.values())


async def test_tombstones_reach_a_batch_that_takes_them(one: Stage) -> None:
    app, values = MessageHandlers(), list[object]()

    @app.batch_handler("ping", step="note", tombstones=True)
    async def note(messages: Sequence[Message[Any]], _connection: Any) -> None:
        values.extend(message.value for message in messages)

    await one.send(None)
    await one.send({"n": 1})
    async with one.running(app):
        await one.until_committed({0: 2})
    assert values == [None, {"n": 1}]


async def test_two_steps_of_one_type_batch_apart_and_fail_apart(one: Stage) -> None:
    """CONSUME-9: what one step gives up, the other has handled; the offset waits for both."""
    app, other = writing()

    @app.batch_handler("ping", model=Ping, step="refuse")
    async def refuse(messages: Sequence[Message[Ping]], _connection: Any) -> None:
        if any(message.value.n == 2 for message in messages):
            raise Terminal("two")

    await send(one, 5)
    async with one.running(app):
        await one.until_committed({0: 5})
    (letter,) = await one.dead()
    assert (letter["offset"], letter["step"]) == (2, f"{one.topic}/refuse")
    assert sorted(number for batch in other for number in batch) == list(range(5))
    assert len(await one.connection.fetch("SELECT FROM fencepost.effects WHERE state = 'succeeded'")) == 9


async def test_a_batch_that_the_stop_cuts_short_leaves_nothing(one: Stage) -> None:
    """CONSUME-3, CONSUME-4: neither rows nor outcomes nor offsets; the next process handles all of it."""
    reached, hang = asyncio.Event(), asyncio.Event()

    async def wait(_numbers: Sequence[int], _connection: Any) -> None:
        reached.set()
        await hang.wait()

    app, _ = writing(wait, attempts=1)
    await send(one, 5)
    async with one.running(app, consumer_stop_grace_seconds=0):
        await reached.wait()
    assert (await one.seen(), await one.outcomes(), await one.committed()) == ([], {}, {0: 0})
    hang.set()
    async with one.running(app):
        await one.until_committed({0: 5})
    assert sorted(await one.seen()) == list(range(5))
    assert await one.dead() == []
