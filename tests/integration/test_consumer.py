"""The consumer on real Kafka and PostgreSQL: what is committed, what is handled once, and in which order."""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import BaseModel

from consumer_sdk import AlreadyHandled, Message, MessageContext, MessageHandlers, Retryable
from fencepost.errors import ConfigurationError, TransactionRequired
from tests.support.consumers import SECRETS, Stage, stage
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

pytestmark = pytest.mark.services


class Ping(BaseModel):
    """What is sent."""

    n: int


@pytest.fixture
async def one(database_url: str, kafka: str, topic: TopicFactory) -> AsyncIterator[Stage]:
    async with stage(database_url, kafka, topic) as made:
        yield made


@pytest.fixture
async def three(database_url: str, kafka: str, topic: TopicFactory) -> AsyncIterator[Stage]:
    async with stage(database_url, kafka, topic, partitions=3) as made:
        yield made


def writing_app() -> MessageHandlers:
    """Each ping is a row, in the transaction of its outcome."""
    app = MessageHandlers()

    @app.handler("ping", model=Ping, step="write")
    async def write(message: Message[Ping], context: MessageContext) -> None:
        async with context.transaction() as connection:
            await connection.execute("INSERT INTO seen VALUES ($1, $2)", message.event_id, message.value.n)

    return app


async def seen(made: Stage) -> list[int]:
    return [row["n"] for row in await made.connection.fetch("SELECT n FROM seen ORDER BY at")]


async def test_messages_are_handled_in_order_and_the_next_offset_is_committed(one: Stage) -> None:
    """CONSUME-1."""
    for number in range(5):
        await one.send({"n": number})
    async with one.running(writing_app()):
        await eventually(lambda: _is(seen(one), list(range(5))))
        await one.until_committed({0: 5})
    assert set((await one.outcomes()).values()) == {"succeeded"}


async def test_only_the_finished_prefix_is_committed(one: Stage) -> None:
    """CONSUME-2, CONSUME-4, CONSUME-7: the first of three keys still runs; what is behind it is done and not committed past it."""
    release, app, calls = asyncio.Event(), MessageHandlers(), defaultdict[int, int](int)

    @app.handler("ping", model=Ping, step="wait")
    async def wait(message: Message[Ping], context: MessageContext) -> None:
        calls[message.value.n] += 1
        if message.value.n == 0:
            await release.wait()

    for number in range(3):
        await one.send({"n": number}, key=f"k{number}")
    async with one.running(app, consumer_stop_grace_seconds=0):
        await eventually(lambda: _is(_count(one), 2))
        await one.until_committed({0: 0})
    assert await one.committed() == {0: 0}
    release.set()
    async with one.running(app):
        await one.until_committed({0: 3})
    assert calls == {0: 2, 1: 1, 2: 1}


async def test_a_cancelled_handler_has_not_failed(one: Stage) -> None:
    """CONSUME-3: no failure, no attempt, no dead letter, no commit; the next process handles the message, as a first attempt."""
    attempts: list[int] = []
    app, hang = MessageHandlers(), asyncio.Event()

    @app.handler("ping", model=Ping, step="hang", attempts=1)
    async def hanging(message: Message[Ping], context: MessageContext) -> None:
        attempts.append(context.attempt)
        await hang.wait()

    await one.send({"n": 1})
    async with one.running(app, consumer_stop_grace_seconds=0):
        await eventually(lambda: attempts)
    assert await one.dead() == []
    assert await one.outcomes() == {}
    hang.set()
    async with one.running(app):
        await one.until_committed({0: 1})
    assert attempts == [1, 1]


async def test_success_does_not_bury_an_earlier_failure(one: Stage) -> None:
    """CONSUME-5: nothing past the failed one is committed until it has its outcome."""
    app, mended = MessageHandlers(), asyncio.Event()

    @app.handler("ping", model=Ping, step="fail")
    async def failing(message: Message[Ping], context: MessageContext) -> None:
        if message.value.n == 0 and not mended.is_set():
            raise Retryable("not_yet", retry_after=1)

    await one.send({"n": 0}, key="a")
    await one.send({"n": 1}, key="b")
    async with one.running(app):
        await eventually(lambda: _is(_count(one), 1))
        await one.until_committed({0: 0})
        mended.set()
        await one.until_committed({0: 2})


async def test_a_batch_of_three_partitions_commits_three_offsets(three: Stage) -> None:
    """CONSUME-11."""
    for number in range(9):
        await three.send({"n": number}, partition=number % 3)
    async with three.running(writing_app()):
        await three.until_committed({0: 3, 1: 3, 2: 3})
    async with three.running(writing_app()) as consumer:
        await eventually(lambda: not consumer._problems)
    assert sorted(await seen(three)) == list(range(9))


async def test_the_same_event_at_a_new_offset_is_a_duplicate(one: Stage) -> None:
    """CONSUME-16, CONSUME-26: whether it comes later, behind the first one, or to another process."""
    app, calls = MessageHandlers(), list[int]()

    @app.handler("ping", model=Ping, step="count")
    async def count(message: Message[Ping], context: MessageContext) -> None:
        calls.append(message.offset)

    event = await one.send({"n": 1})
    await one.send({"n": 1}, event_id=event)
    await one.send({"n": 2}, event_id="another")
    async with one.running(app):
        await one.until_committed({0: 3})
        await one.send({"n": 1}, event_id=event)
        await one.until_committed({0: 4})
    assert calls == [0, 2]


async def test_two_consumers_and_two_steps_handle_one_event_each_once(one: Stage) -> None:
    """CONSUME-9."""
    calls: list[str] = []

    def app_of(name: str) -> MessageHandlers:
        app = MessageHandlers()
        for step in ("first", "second"):

            @app.handler("ping", step=step)
            async def note(message: Message[Any], context: MessageContext, told: str = f"{name}/{step}") -> None:
                calls.append(told)

        return app

    await one.send({"n": 1})
    async with (
        one.running(app_of("a"), consumer_group=f"{one.topic}-a"),
        one.running(app_of("b"), consumer_group=f"{one.topic}-b"),
    ):
        await one.until_committed({0: 1}, f"{one.topic}-a")
        await one.until_committed({0: 1}, f"{one.topic}-b")
    assert sorted(calls) == ["a/first", "a/second", "b/first", "b/second"]


async def test_of_two_deliveries_at_once_one_is_a_duplicate(one: Stage) -> None:
    """CONSUME-10: two groups under one name hold copies of one message at the same time; the loser waits and does nothing."""
    both, told = asyncio.Barrier(2), list[str]()
    app = MessageHandlers()

    @app.handler("ping", model=Ping, step="write")
    async def write(message: Message[Ping], context: MessageContext) -> None:
        await both.wait()
        try:
            async with context.transaction() as connection:
                await connection.execute("INSERT INTO seen VALUES ($1, $2)", message.event_id, message.value.n)
            told.append("handled")
        except AlreadyHandled:
            told.append("already")
            raise

    await one.send({"n": 1})
    groups = [f"{one.topic}-{name}" for name in "ab"]
    async with (
        one.running(app, consumer_group=groups[0], consumer_name="same"),
        one.running(app, consumer_group=groups[1], consumer_name="same"),
    ):
        for group in groups:
            await one.until_committed({0: 1}, group)
    assert sorted(told) == ["already", "handled"]
    assert await seen(one) == [1]
    assert await one.dead() == []


async def test_keys_keep_their_order_and_overlap_with_each_other(three: Stage) -> None:
    """CONSUME-23: handlers of random length, some failing once; per key they never overlap and end in the order of offsets."""
    dice, app = random.Random(7), MessageHandlers()
    active: dict[bytes, int] = {}
    ended: dict[bytes, list[int]] = defaultdict(list)
    overlapped, failed = 0, set[str]()

    @app.handler("ping", model=Ping, step="order", attempts=3)
    async def handle(message: Message[Ping], context: MessageContext) -> None:
        nonlocal overlapped
        assert message.key is not None
        assert message.key not in active
        overlapped += bool(active)
        active[message.key] = 1
        try:
            for _ in range(dice.randrange(4)):
                await asyncio.sleep(0)
            if message.event_id not in failed and dice.random() < 0.02:
                failed.add(message.event_id)
                raise Retryable("once", retry_after=0)
        finally:
            del active[message.key]
        ended[message.key].append(message.value.n)

    for number in range(300):
        await three.send({"n": number}, key=f"k{number % 10}")
    async with three.running(app, consumer_concurrency=16):
        await eventually(lambda: sum(len(numbers) for numbers in ended.values()) == 300, 60)
    assert failed
    assert overlapped
    assert all(numbers == sorted(numbers) for numbers in ended.values())


async def test_a_full_consumer_stops_fetching_and_stays_in_its_group(one: Stage) -> None:
    """CONSUME-24: bounded in flight, longer than the session's time-out, without a rebalance."""
    release, app = asyncio.Event(), MessageHandlers()

    @app.handler("ping", step="slow")
    async def slow(message: Message[Any], context: MessageContext) -> None:
        await release.wait()

    for number in range(60):
        await one.send({"n": number}, key=f"k{number}")
    async with one.running(app, consumer_max_in_flight=20, consumer_session_timeout_seconds=6) as consumer:
        await eventually(lambda: consumer._metrics.registry.get_sample_value("fencepost_consumer_paused") == 1)
        assert consumer._assignment is not None
        assert consumer._assignment.messages <= 21
        release.set()
        await one.until_committed({0: 60})
        assert consumer._metrics.registry.get_sample_value("fencepost_consumer_rebalances_total") == 1


async def test_an_effect_happens_once_for_a_message_that_comes_again(one: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """LEDGER-1, LEDGER-14: after a later step has failed the handler gets the recorded result, and nobody is called."""
    monkeypatch.setenv("FENCEPOST_IDEMPOTENCY_SECRETS", SECRETS)
    calls, results, app = list[str](), list[object](), MessageHandlers()

    @app.handler("ping", model=Ping, step="charge", attempts=3)
    async def charge(message: Message[Ping], context: MessageContext) -> None:
        async def call(effect: Any) -> dict[str, str]:
            calls.append(effect.key)
            return {"receipt": "r-1"}

        results.append(await context.once("provider.charge", request=message.value, call=call))
        if len(results) < 3:
            raise Retryable("later_step", retry_after=0)

    await one.send({"n": 10})
    async with one.running(app):
        await one.until_committed({0: 1})
    assert len(calls) == 1
    assert results == [{"receipt": "r-1"}] * 3


async def test_a_transaction_ends_the_handling(one: Stage) -> None:
    """Nothing more can be done after it, and an error behind it changes nothing."""
    app, refused = MessageHandlers(), list[Exception]()

    @app.handler("ping", model=Ping, step="end")
    async def end(message: Message[Ping], context: MessageContext) -> None:
        async with context.transaction() as connection:
            await connection.execute("INSERT INTO seen VALUES ($1, $2)", message.event_id, message.value.n)
        try:
            async with context.transaction():
                pass
        except TransactionRequired as error:
            refused.append(error)
        raise Retryable("after_the_end")

    await one.send({"n": 1})
    async with one.running(app):
        await one.until_committed({0: 1})
    assert len(refused) == 1
    assert await seen(one) == [1]
    assert await one.dead() == []


async def test_a_ledger_that_would_forget_is_refused_with_the_three_numbers(one: Stage) -> None:
    """CONSUME-17: the topic keeps 7 days, replays may be 3 days old, the ledger remembers 9; with 10 it starts."""
    short = {"ledger_retention_days": 9, "consumer_replay_days": 3}
    with pytest.raises(ConfigurationError, match=r"7 days .* is 3.*9 days.*at least 10"):
        await one.consumer(writing_app(), **short).run()
    async with one.running(writing_app(), **short | {"ledger_retention_days": 10}) as consumer:
        await eventually(lambda: consumer._assignment)
    async with one.running(writing_app(), **short | {"consumer_retention_check": "warn"}) as consumer:
        await eventually(lambda: consumer._assignment)


async def _is(found: Any, wanted: object) -> bool:
    assert await found == wanted
    return True


async def _count(made: Stage) -> int:
    return len(await made.outcomes())
