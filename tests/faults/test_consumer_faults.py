"""Brokers, databases and processes go away around a consumer: every effect is there once, every message done, nobody blamed."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from aiokafka.errors import KafkaError
from structlog.testing import capture_logs

from consumer_sdk import LeaseLost, Message, MessageContext, MessageHandlers
from fencepost.clock import lease_clock
from fencepost.devservices.processes import Watchdog
from fencepost.errors import InvariantViolated, TransientError
from tests.support.consumer_handlers import SCHEMA
from tests.support.consumer_process import ConsumerProcess, ConsumerProcesses
from tests.support.consumers import Stage, sample, stage
from tests.support.kafka_proxy import KafkaProxy
from tests.support.service_process import Setting
from tests.support.tcp_proxy import TcpProxy
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

pytestmark = pytest.mark.services

# A session's silence, and what the broker and the client need after it.
AWAY_SECONDS: Final = 40.0


@pytest.fixture
async def one(database_url: str, kafka: str, topic: TopicFactory) -> AsyncIterator[Stage]:
    async with stage(database_url, kafka, topic) as made:
        await made.connection.execute(SCHEMA)
        yield made


@pytest.fixture
async def three(database_url: str, kafka: str, topic: TopicFactory) -> AsyncIterator[Stage]:
    async with stage(database_url, kafka, topic, partitions=3) as made:
        await made.connection.execute(SCHEMA)
        yield made


@pytest.fixture
def processes_of(tmp_path: Path, watchdog: Watchdog) -> Iterator[Any]:
    made: list[ConsumerProcesses] = []

    def of(at: Stage) -> ConsumerProcesses:
        made.append(ConsumerProcesses(at, tmp_path, watchdog))
        return made[-1]

    yield of
    for processes in made:
        processes.kill_all()


class Gated:
    """An app whose handler waits at the gate before its transaction. ``begun``: how often each was."""

    def __init__(self, attempts: int = 1) -> None:
        self.app, self.gate, self.begun = MessageHandlers(), asyncio.Event(), Counter[str]()

        @self.app.handler("ping", step="wait", attempts=attempts)
        async def wait(message: Message[Any], context: MessageContext) -> None:
            self.begun[message.event_id] += 1
            await self.gate.wait()
            async with context.transaction() as connection:
                await connection.execute("INSERT INTO seen VALUES ($1, $2)", message.event_id, message.value["n"])


async def effects(made: Stage) -> Counter[str]:
    return Counter(row["event_id"] for row in await made.connection.fetch("SELECT event_id FROM seen"))


async def written(made: Stage) -> Counter[str]:
    return Counter(row["event_id"] for row in await made.connection.fetch("SELECT event_id FROM written"))


# The broker goes away


@pytest.mark.parametrize("suspect", [False, True])
async def test_a_living_member_that_lost_the_broker_for_longer_than_its_session_has_not_ended(one: Stage, suspect: bool) -> None:
    """What it had in hand is not suspect for it; and a suspect is not blamed for a time that its process survived."""
    gated = Gated()
    event = await one.send({"n": 1})
    if suspect:
        await one.leave_held("another")
    async with KafkaProxy(one.kafka) as proxy:
        settings = {"kafka_bootstrap_servers": proxy.address, "consumer_rebalance_grace_seconds": 0}
        async with one.running(gated.app, **settings):
            await eventually(lambda: gated.begun[event] == 1)
            assert await one.trials() == ({event: 1} if suspect else {})
            proxy.welcoming.clear()
            proxy.reading.clear()
            await proxy.cut()
            await eventually(lambda: _is(one.members, 0), AWAY_SECONDS)
            proxy.reading.set()
            proxy.welcoming.set()
            await eventually(lambda: gated.begun[event] == 2, AWAY_SECONDS)
            assert await one.trials() == ({event: 1} if suspect else {})
            gated.gate.set()
            await one.until_committed({0: 1})
    assert await effects(one) == {event: 1}
    assert (await one.dead(), await one.trials()) == ([], {})
    assert await one.notes() == {0: "left"}


async def test_a_client_that_has_given_up_for_good_ends_the_consumer(one: Stage) -> None:
    """aiokafka's part in the group has ended by an error of its own: without a restart nothing would ever be fetched again."""
    gated = Gated()
    consumer = one.consumer(gated.app)
    task = asyncio.create_task(consumer.run())
    await eventually(lambda: sample(consumer, "fencepost_consumer_partitions") == 1, 30)
    coordinator = consumer._member._consumer._coordinator
    own, ended = coordinator._coordination_task, asyncio.get_running_loop().create_future()
    ended.set_exception(KafkaError("Unexpected error during coordination"))
    coordinator._coordination_task = ended
    with pytest.raises(InvariantViolated):
        await asyncio.wait_for(task, 30)
    await asyncio.wait_for(own, 30)


# The database goes away


async def test_a_suspect_whose_end_the_database_did_not_hear_is_blamed_for_nothing(one: Stage) -> None:
    """The trial that ended while the database was away is taken back when it answers."""
    gated = Gated()
    await one.leave_held("another")
    event = await one.send({"n": 1})
    async with TcpProxy(one.database_url) as proxy:
        settings = {"database_url": proxy.url, "consumer_statement_seconds": 1}
        async with one.running(gated.app, **settings) as consumer:
            await eventually(lambda: gated.begun[event] == 1)
            assert await one.trials() == {event: 1}
            await proxy.refuse()
            gated.gate.set()
            put_off = {"type": "ping", "outcome": "postponed"}
            await eventually(lambda: sample(consumer, "fencepost_consumer_messages_total", **put_off) >= 2, 30)
            await proxy.accept()
            await one.until_committed({0: 1})
    assert await effects(one) == {event: 1}
    assert (await one.dead(), await one.trials()) == ([], {})


async def test_an_outage_longer_than_a_messages_patience_is_not_held_against_it(one: Stage) -> None:
    """The first attempt after it fails of a connection that has gone, and the database answers again by then."""
    app, begun, gate, stale = MessageHandlers(), asyncio.Event(), asyncio.Event(), asyncio.Event()

    @app.handler("ping", step="write", attempts=1, patience_seconds=6)
    async def write(message: Message[Any], context: MessageContext) -> None:
        begun.set()
        await gate.wait()
        if stale.is_set():
            stale.clear()
            raise TransientError("the connection has gone")
        async with context.transaction() as connection:
            await connection.execute("INSERT INTO seen VALUES ($1, $2)", message.event_id, message.value["n"])

    event = await one.send({"n": 1})
    async with TcpProxy(one.database_url) as proxy:
        settings = {"database_url": proxy.url, "consumer_statement_seconds": 1}
        async with one.running(app, **settings) as consumer:
            await begun.wait()
            began = lease_clock()
            await proxy.refuse()
            gate.set()
            put_off = {"type": "ping", "outcome": "postponed"}
            await eventually(
                lambda: lease_clock() - began > 6 and sample(consumer, "fencepost_consumer_messages_total", **put_off) >= 2, 30
            )
            stale.set()
            await proxy.accept()
            await one.until_committed({0: 1})
    assert not stale.is_set()
    assert (await effects(one), await one.dead()) == ({event: 1}, [])


async def test_one_of_a_batch_that_looks_like_an_outage_costs_only_itself(one: Stage) -> None:
    """CONSUME-22: whatever it does to its transaction, the database answers, so the batch is tried in halves."""
    app, mended = MessageHandlers(), asyncio.Event()

    @app.batch_handler("ping", step="write", most=20, attempts=1)
    async def write(messages: Sequence[Message[Any]], connection: Any) -> None:
        if not mended.is_set() and any(message.value["n"] == 7 for message in messages):
            raise TransientError("no answer in time")
        for message in messages:
            await connection.execute("INSERT INTO seen VALUES ($1, $2)", message.event_id, message.value["n"])

    events = [await one.send({"n": number}, key=f"k{number}") for number in range(20)]
    async with one.running(app):
        await eventually(lambda: _is(lambda: effects(one), Counter(events[:7] + events[8:])))
        mended.set()
        await one.until_committed({0: 20})
    assert await effects(one) == Counter(events)
    assert await one.dead() == []


# Processes freeze and end


async def test_a_process_frozen_past_its_session_changes_nothing_when_it_goes_on(one: Stage, processes_of: Any) -> None:
    processes: ConsumerProcesses = processes_of(one)
    event = await one.send({"gate": "g"}, type="waiting")
    frozen = processes.start()
    await eventually(lambda: _begun(one, 1), 60)
    frozen.pause()
    other = processes.start()
    await eventually(lambda: _begun(one, 2), 60)
    await one.connection.execute("INSERT INTO gates VALUES ('g')")
    await one.until_committed({0: 1})
    frozen.resume()
    await eventually(lambda: len(frozen.logged("partitions_assigned")) >= 2, 60)
    more = [await one.send({"n": number}, type="strict", key=f"k{number}") for number in range(5)]
    await one.until_committed({0: 6})
    assert await written(one) == Counter([event, *more])
    assert (await one.dead(), await one.trials()) == ([], {})
    assert frozen.running
    assert other.running


async def test_a_message_that_ends_its_processes_takes_no_innocent_with_it(three: Stage, processes_of: Any) -> None:
    """Of three processes each ends that gets it, and is started anew; two attempts, after an end that was nobody's yet. Those that
    are with it have one attempt, so one time too many would be a dead letter."""
    processes: ConsumerProcesses = processes_of(three)
    innocents = [await three.send({"seconds": 0.3}, type="slow", key=f"before{number}", partition=0) for number in range(3)]
    killer = await three.send({}, type="deadly", key="killer", partition=0)
    for number in range(12):
        kind = ("slow", "strict", "strict_batch")[number % 3]
        innocents.append(await three.send({"seconds": 0.3}, type=kind, key=f"k{number}", partition=number % 3))
    static: list[dict[str, Setting]] = [{"consumer_instance": name} for name in "abc"]
    running: list[ConsumerProcess] = [processes.start(settings=settings) for settings in static]
    ends = 0

    async def done() -> bool:
        nonlocal ends
        for place, process in enumerate(running):
            if not process.running:
                ends += 1
                running[place] = processes.start(settings=static[place])
        return await three.committed() == {0: 8, 1: 4, 2: 4}

    await eventually(done, 120)
    (letter,) = await three.dead()
    assert (letter["run_key"], letter["error_code"]) == (killer, "process_ended")
    assert ends == 3
    assert await written(three) == Counter(innocents)
    assert await three.trials() == {}


# Stops


class Late(KafkaProxy):
    """Every answer of the broker is late, as over a long line."""

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, produced: set[bytes]) -> None:
        inner = asyncio.StreamReader()

        async def pass_on() -> None:
            while chunk := await reader.read(65_536):
                asyncio.get_running_loop().call_later(0.15, inner.feed_data, chunk)
            asyncio.get_running_loop().call_later(0.15, inner.feed_eof)

        async with asyncio.TaskGroup() as both:
            both.create_task(pass_on())
            both.create_task(super()._answers(inner, writer, produced))


async def test_a_stop_under_load_leaves_every_partition(three: Stage) -> None:
    """The last word beside each offset is that it is left, however often offsets are committed; the rest is handled by the next."""
    app = MessageHandlers()

    @app.handler("ping", step="write", attempts=1)
    async def write(message: Message[Any], context: MessageContext) -> None:
        async with context.transaction() as connection:
            await connection.execute("INSERT INTO seen VALUES ($1, $2)", message.event_id, message.value["n"])

    events = [await three.send({"n": number}, key=f"k{number}", partition=number % 3) for number in range(300)]
    settings = {"consumer_commit_interval_ms": 10, "consumer_concurrency": 2, "consumer_max_in_flight": 20}
    async with Late(three.kafka) as proxy:
        for done in (20, 90, 160):
            async with three.running(app, kafka_bootstrap_servers=proxy.address, **settings):
                await eventually(partial(_at_least, three, done), 30)
            assert await three.notes() == dict.fromkeys(range(3), "left")
    async with three.running(app, **settings):
        await three.until_committed({0: 100, 1: 100, 2: 100})
    assert await effects(three) == Counter(events)
    assert (await three.dead(), await three.trials()) == ([], {})


async def test_a_stop_while_partitions_are_taken_in_hand_leaves_them(one: Stage) -> None:
    """The note that says that they are held is on its way."""
    gated = Gated()
    await one.send({"n": 1})
    async with Late(one.kafka) as proxy:
        consumer = one.consumer(gated.app, kafka_bootstrap_servers=proxy.address)
        task = asyncio.create_task(consumer.run())
        await eventually(lambda: consumer._assignment is not None, 30)
        consumer.stop()
        await asyncio.wait_for(task, 30)
    assert await one.notes() == {0: "left"}
    assert gated.begun == {}


async def test_suspects_that_were_not_tried_stay_suspect_when_their_partition_is_left(one: Stage) -> None:
    """Else a message that ends its process would be counted only where no rebalance comes between."""
    gated = Gated()
    await one.leave_held("another")
    events = [await one.send({"n": number}) for number in range(2)]
    for _ in range(2):
        async with one.running(gated.app, consumer_stop_grace_seconds=0):
            await eventually(lambda: _is(one.trials, {events[0]: 1}))
        assert (await one.notes(), await one.trials()) == ({0: "held"}, {})
        gated.begun.clear()
    gated.gate.set()
    async with one.running(gated.app):
        await one.until_committed({0: 2})
    assert await one.notes() == {0: "left"}
    assert await one.dead() == []


async def test_a_stop_takes_back_its_own_trial_and_not_those_that_never_ended(one: Stage) -> None:
    gated = Gated(attempts=3)
    await one.leave_held("another")
    event = await one.send({"n": 1})
    await one.connection.execute(
        "INSERT INTO fencepost.message_trials (run_key, tenant_id, step, trials) VALUES ($1, '', $2, 2)", event, f"{one.topic}/wait"
    )
    async with one.running(gated.app, consumer_stop_grace_seconds=0):
        await eventually(lambda: _is(one.trials, {event: 3}))
    assert (await one.trials(), await one.dead()) == ({event: 2}, [])


async def test_a_redrive_ends_its_process_once_and_not_for_ever(one: Stage) -> None:
    """Where a process ended with the dead letter in hand, the next gives it up again; the operator's next word counts anew."""
    gated = Gated(attempts=5)
    event = await one.send({"n": "not a number"})
    gated.gate.set()
    async with one.running(gated.app):
        await one.until_committed({0: 1})
        (letter,) = await one.dead()
        await one.connection.execute(
            "INSERT INTO fencepost.message_trials (run_key, tenant_id, step) VALUES ($1, '', $2)", event, f"{one.topic}/wait"
        )
        for code in ("process_ended", letter["error_code"]):
            asked = "SELECT outcome FROM fencepost.redrive_dead_letter($1, true, 'me', 'why')"
            assert await one.connection.fetchval(asked, letter["dead_letter_id"]) == "redriving"
            await eventually(lambda: _is(lambda: _states(one), ["dead"]))
            assert [dead["error_code"] for dead in await one.dead()] == [code]
            await eventually(lambda: _is(one.trials, {}))  # the trial is taken back once its letter is written


# Handlers


async def test_a_handler_that_does_not_end_is_told_of(one: Stage) -> None:
    """After its time, and when its partition is to be let go of; by type and place, once each, and never by its payload."""
    app, release = MessageHandlers(), asyncio.Event()

    @app.handler("ping", step="deaf", attempt_seconds=0.2)
    async def deaf(message: Message[Any], context: MessageContext) -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    await one.send({"n": "s3cr3t"})
    with capture_logs() as logs:
        async with one.running(app, consumer_stop_grace_seconds=0):
            await eventually(lambda: _told(logs), 30)
            release.set()
    (told,) = _told(logs)
    assert (told["type"], told["topic"], told["partition"], told["offset"]) == ("ping", one.topic, 0, 0)
    assert "s3cr3t" not in str(logs)


async def test_a_handler_that_outlives_its_cancellation_is_told_of_and_its_partition_stays_held(one: Stage) -> None:
    app, begun, release = MessageHandlers(), asyncio.Event(), asyncio.Event()

    @app.handler("ping", step="deaf")
    async def deaf(message: Message[Any], context: MessageContext) -> None:
        begun.set()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    await one.send({"n": 1})
    with capture_logs() as logs:
        async with one.running(app, consumer_stop_grace_seconds=0) as consumer:
            await begun.wait()
        release.set()
    assert [told["offset"] for told in _told(logs)] == [0]
    assert await one.notes() == {0: f"held {consumer.holder.rpartition('/')[2]}"}


async def test_a_lease_that_another_took_is_no_failure_and_has_its_own_word_in_the_log(one: Stage) -> None:
    app, begun = MessageHandlers(), Counter[str]()

    @app.handler("ping", step="lose", attempts=1)
    async def lose(message: Message[Any], context: MessageContext) -> None:
        begun[message.event_id] += 1
        if begun[message.event_id] == 1:
            raise LeaseLost("another delivery has it")

    event = await one.send({"n": 1})
    with capture_logs() as logs:
        async with one.running(app):
            await one.until_committed({0: 1})
    assert [entry["code"] for entry in logs if entry["event"] == "lease_lost"] == ["lease_lost"]
    assert [entry for entry in logs if entry["event"] == "attempt_failed"] == []
    assert (begun, await one.dead()) == ({event: 2}, [])


async def test_what_a_handler_awaited_was_cancelled_and_its_message_is_tried_again(one: Stage) -> None:
    """Nobody has cancelled the handler: its lane must not wait for ever."""
    app, begun = MessageHandlers(), Counter[str]()

    @app.handler("ping", step="inner")
    async def inner(message: Message[Any], context: MessageContext) -> None:
        begun[message.event_id] += 1
        if begun[message.event_id] == 1:
            task = asyncio.create_task(asyncio.Event().wait())
            task.cancel()
            await task

    event = await one.send({"n": 1})
    async with one.running(app):
        await one.until_committed({0: 1})
    assert (begun, await one.dead()) == ({event: 2}, [])


def _told(logs: list[Any]) -> list[Any]:
    return [entry for entry in logs if entry["event"] == "handler_does_not_end"]


async def _is(ask: Any, expected: object) -> bool:
    return bool(await ask() == expected)


async def _states(made: Stage) -> list[str]:
    return [letter["state"] for letter in await made.dead()]


async def _begun(made: Stage, processes: int) -> bool:
    return bool(await made.connection.fetchval("SELECT count(DISTINCT process) FROM begun") == processes)


async def _at_least(made: Stage, count: int) -> bool:
    return bool(await made.connection.fetchval("SELECT count(*) FROM seen") >= count)
