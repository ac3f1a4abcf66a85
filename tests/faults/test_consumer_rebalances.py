"""Members join and leave under load: the order of each key holds, nothing is lost, and every effect is there once."""

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, Final

import pytest
from structlog.testing import capture_logs

from consumer_sdk import Consumer, Message, MessageContext, MessageHandlers
from tests.support.consumers import Ping, Stage, sample, stage
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

pytestmark = pytest.mark.services

PARTITIONS: Final = 4
KEYS: Final = 12
MOST_MESSAGES: Final = 6_000
JOIN_SECONDS: Final = 30.0
END_SECONDS: Final = 30.0
SETTINGS: Final[dict[str, object]] = {
    "consumer_rebalance_grace_seconds": 0.5,
    "consumer_max_in_flight": 40,
    "consumer_concurrency": 4,
}


@pytest.fixture
async def four(database_url: str, kafka: str, topic: TopicFactory) -> AsyncIterator[Stage]:
    async with stage(database_url, kafka, topic, partitions=PARTITIONS) as made:
        await made.connection.execute(
            "CREATE TABLE written (event_id text, key text, n integer, at bigint GENERATED ALWAYS AS IDENTITY)"
        )
        yield made


@pytest.fixture
async def one(database_url: str, kafka: str, topic: TopicFactory) -> AsyncIterator[Stage]:
    async with stage(database_url, kafka, topic) as made:
        yield made


def writing(kind: str) -> MessageHandlers:
    """Each message is a row, with one attempt: what a rebalance spends without need is a dead letter."""
    app = MessageHandlers()

    async def write(messages: Sequence[Message[Ping]], connection: Any) -> None:
        for message in messages:
            row = (message.event_id, message.key and message.key.decode(), message.value.n)
            await connection.execute("INSERT INTO written (event_id, key, n) VALUES ($1, $2, $3)", *row)

    if kind == "batch":
        app.batch_handler("ping", model=Ping, step="write", attempts=1, most=20)(write)
        return app

    @app.handler("ping", model=Ping, step="write", attempts=1)
    async def write_one(message: Message[Ping], context: MessageContext) -> None:
        async with context.transaction() as connection:
            await write([message], connection)

    return app


class Group:
    """Consumers that join and leave as a test says; all that still run are stopped at the end."""

    def __init__(self, made: Stage, app: MessageHandlers, *, static: bool) -> None:
        self._made = made
        self._app = app
        self._static = static
        self._running: dict[str, tuple[Consumer, asyncio.Task[None]]] = {}

    async def join(self, name: str) -> None:
        """And have partitions."""
        own = {"consumer_instance": name} if self._static else {}
        consumer = self._made.consumer(self._app, **SETTINGS, **own)
        self._running[name] = consumer, asyncio.create_task(consumer.run())
        await eventually(partial(has_partitions, consumer), JOIN_SECONDS)

    async def leave(self, name: str) -> None:
        consumer, task = self._running.pop(name)
        consumer.stop()
        await asyncio.wait_for(task, END_SECONDS)

    async def leave_all(self) -> None:
        for name in list(self._running):
            await self.leave(name)


@contextlib.asynccontextmanager
async def group_of(made: Stage, app: MessageHandlers, *, static: bool) -> AsyncIterator[Group]:
    group = Group(made, app, static=static)
    try:
        yield group
    finally:
        await group.leave_all()


def has_partitions(consumer: Consumer) -> bool:
    return sample(consumer, "fencepost_consumer_partitions") >= 1


async def send(made: Stage, enough: asyncio.Event) -> list[str]:
    """A message of each key in turn, until it is enough; a key's numbers rise."""
    events = list[str]()
    while not enough.is_set() and len(events) < MOST_MESSAGES:
        for place in range(KEYS):
            events.append(await made.send({"n": len(events)}, key=f"k{place}", partition=place % PARTITIONS))
    return events


async def check(made: Stage, events: Sequence[str]) -> None:
    """Everything once, in order, and nobody given up."""
    rows = await made.connection.fetch("SELECT event_id, key, n FROM written ORDER BY at")
    assert Counter(row["event_id"] for row in rows) == Counter(events)
    of_keys = defaultdict(list)
    for row in rows:
        of_keys[row["key"]].append(row["n"])
    assert [key for key, numbers in of_keys.items() if numbers != sorted(numbers)] == []
    assert await made.outcomes() == dict.fromkeys(events, "succeeded")
    assert (await made.dead(), await made.trials()) == ([], {})


@pytest.mark.parametrize("kind", ["transaction", "batch"])
@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
async def test_members_that_join_and_leave_under_load_change_nothing(four: Stage, kind: str, static: bool) -> None:
    """CONSUME-4, CONSUME-7, CONSUME-23."""
    async with group_of(four, writing(kind), static=static) as group:
        enough = asyncio.Event()
        sending = asyncio.create_task(send(four, enough))
        await group.join("a")
        await group.join("b")
        await group.join("c")
        await group.leave("b")
        await group.join("b")
        await group.leave("a")
        enough.set()
        events = await sending
        await four.until_committed(dict.fromkeys(range(PARTITIONS), len(events) // PARTITIONS), seconds=30)
    await check(four, events)
    assert await four.notes() == dict.fromkeys(range(PARTITIONS), "left")


async def test_a_handler_hears_that_its_partition_is_taken_back(four: Stage) -> None:
    """``context.stopping`` is set for what is in hand, and the process goes on with what it is given next."""
    app, stopped, release = MessageHandlers(), list[int](), asyncio.Event()

    @app.handler("ping", model=Ping, step="long")
    async def long(message: Message[Ping], context: MessageContext) -> None:
        if not release.is_set():
            await context.stopping.wait()
            stopped.append(message.value.n)

    settings = {"consumer_rebalance_grace_seconds": 20}
    async with four.running(app, **settings) as first:
        for number in range(PARTITIONS):
            await four.send({"n": number}, key=f"k{number}", partition=number)
        await eventually(lambda: sample(first, "fencepost_consumer_in_flight_messages") == PARTITIONS, JOIN_SECONDS)
        async with four.running(app, **settings) as second:
            await eventually(partial(has_partitions, second), JOIN_SECONDS)
            assert sorted(stopped) == list(range(PARTITIONS))
            await four.until_committed(dict.fromkeys(range(PARTITIONS), 1))
            release.set()
            await four.send({"n": 9}, partition=0)
            await four.until_committed({0: 2})
    assert sorted(stopped) == list(range(PARTITIONS))


@pytest.mark.parametrize("together", [False, True], ids=["one-after-the-other", "together"])
async def test_two_processes_with_one_instance_are_told_of_each_other(one: Stage, together: bool) -> None:
    """The broker gives the name to whoever joins last. The other is shut out, or joins anew and takes it back."""
    app = writing("transaction")
    with capture_logs() as logs:
        async with one.running(app, consumer_instance="same") as first:
            if not together:
                await eventually(partial(has_partitions, first), JOIN_SECONDS)
            async with one.running(app, consumer_instance="same"):
                await eventually(lambda: [entry for entry in logs if entry["event"] == "instance_shared"], 60)
    told = [entry for entry in logs if entry["event"] == "instance_shared"]
    assert {(entry["log_level"], entry["instance"]) for entry in told} == {("error", "same")}
    assert "FENCEPOST_CONSUMER_INSTANCE" in told[0]["remedy"]


async def test_a_member_that_is_shut_out_is_told_of_the_other(one: Stage) -> None:
    """It joins with an id that another process of its name has replaced."""
    with capture_logs() as logs:
        async with one.running(writing("transaction"), consumer_instance="same") as member:
            await eventually(partial(has_partitions, member), JOIN_SECONDS)
            coordinator = member._member._consumer._coordinator
            own, coordinator.member_id = coordinator.member_id, "same-replaced"
            coordinator.request_rejoin()
            await eventually(lambda: [entry for entry in logs if entry["event"] == "instance_shared"])
            coordinator.member_id = own
            await one.send({"n": 1})
            await one.until_committed({0: 1})
    assert len([entry for entry in logs if entry["event"] == "instance_shared"]) == 1


async def test_a_member_that_comes_back_under_its_name_is_not_told_of_another(one: Stage) -> None:
    app = writing("transaction")
    with capture_logs() as logs:
        for _ in range(2):
            async with one.running(app, consumer_instance="same") as member:
                await eventually(partial(has_partitions, member), JOIN_SECONDS)
    assert [entry for entry in logs if entry["event"] == "instance_shared"] == []
