"""Where a consumer begins, what it commits, and what a rebalance leaves: on a real group of a real broker."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.records_to_delete import RecordsToDelete
from aiokafka.structs import OffsetAndMetadata

from consumer_sdk import Consumer, Message, MessageContext, MessageHandlers
from tests.support.consumers import Ping, Stage, sample, stage
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

pytestmark = pytest.mark.services


@pytest.fixture
async def one(database_url: str, kafka: str, topic: TopicFactory) -> AsyncIterator[Stage]:
    async with stage(database_url, kafka, topic) as made:
        yield made


@pytest.fixture
async def two(database_url: str, kafka: str, topic: TopicFactory) -> AsyncIterator[Stage]:
    async with stage(database_url, kafka, topic, partitions=2) as made:
        yield made


def noting() -> tuple[MessageHandlers, list[int]]:
    app, noted = MessageHandlers(), list[int]()

    @app.handler("ping", model=Ping, step="note")
    async def note(message: Message[Ping], _context: MessageContext) -> None:
        noted.append(message.value.n)

    return app, noted


async def transact(made: Stage, number: int, *, commit: bool) -> None:
    """One message in a Kafka transaction of its own, and its marker, which the broker writes after it has answered."""
    began = await end_of(made)
    producer = AIOKafkaProducer(bootstrap_servers=made.kafka, transactional_id=f"{made.topic}-{number}")
    await producer.start()
    try:
        await producer.begin_transaction()
        attributes = {"ce_specversion": "1.0", "ce_id": f"t{number}", "ce_source": "test", "ce_type": "ping"}
        headers = [(name, text.encode()) for name, text in attributes.items()]
        await producer.send_and_wait(made.topic, b'{"n": %d}' % number, key=b"k", headers=headers)
        await (producer.commit_transaction() if commit else producer.abort_transaction())
    finally:
        await producer.stop()

    async def marked() -> bool:
        return await end_of(made) == began + 2

    await eventually(marked)


async def end_of(made: Stage) -> int:
    """The partition's end, transactions and markers included."""
    consumer = AIOKafkaConsumer(bootstrap_servers=made.kafka)
    await consumer.start()
    try:
        partition = TopicPartition(made.topic, 0)
        return int((await consumer.end_offsets([partition]))[partition])
    finally:
        await consumer.stop()


async def set_offset(made: Stage, offset: int) -> None:
    """As another client of the group would leave it."""
    consumer = AIOKafkaConsumer(bootstrap_servers=made.kafka, group_id=made.topic, enable_auto_commit=False)
    await consumer.start()
    try:
        partition = TopicPartition(made.topic, 0)
        consumer.assign([partition])
        await consumer.commit({partition: OffsetAndMetadata(offset, "")})
    finally:
        await consumer.stop()


async def test_the_committed_number_is_the_next_one_over_gaps(one: Stage) -> None:
    """CONSUME-1: offsets 1 and 3 are markers of transactions, and 2 was aborted. Nothing waits for them."""
    app, noted = noting()
    await transact(one, 0, commit=True)
    await transact(one, 1, commit=False)
    last = await one.send_record(b'{"n": 2}', headers=plain("e2"))
    assert last == 4
    async with one.running(app):
        await one.until_committed({0: last + 1})
        await transact(one, 3, commit=True)
        await one.until_committed({0: last + 2})
    assert noted == [0, 2, 3]


async def test_a_reader_of_uncommitted_messages_gets_the_aborted_ones_too(one: Stage) -> None:
    app, noted = noting()
    await transact(one, 0, commit=False)
    async with one.running(app, consumer_isolation="read_uncommitted"):
        await one.until_committed({0: 1})
    assert noted == [0]


async def test_a_new_group_begins_at_the_beginning_or_at_the_end_as_it_is_told(one: Stage) -> None:
    """A group that began at the end does not pass over what comes between two of its processes."""
    (early, from_start), (late, from_end) = noting(), noting()
    for number in range(2):
        await one.send({"n": number})
    async with one.running(early, consumer_group=f"{one.topic}-early"):
        await one.until_committed({0: 2}, f"{one.topic}-early")
    settings = {"consumer_offset_reset": "latest", "consumer_group": f"{one.topic}-late"}
    async with one.running(late, **settings):
        await one.until_committed({0: 2}, f"{one.topic}-late")
    await one.send({"n": 2})
    async with one.running(late, **settings):
        await one.until_committed({0: 3}, f"{one.topic}-late")
    assert (from_start, from_end) == ([0, 1], [2])


async def test_a_group_of_another_client_is_gone_on_with_where_that_has_left_off(one: Stage) -> None:
    app, noted = noting()
    for number in range(3):
        await one.send({"n": number})
    await set_offset(one, 2)
    async with one.running(app):
        await one.until_committed({0: 3})
    assert noted == [2]


async def test_an_offset_beyond_the_end_is_no_reason_to_stand_still(one: Stage) -> None:
    """A log that was cut is read from its beginning: what is new is handled, what was handled is known."""
    app, noted = noting()
    await one.send({"n": 0})
    async with one.running(app):
        await one.until_committed({0: 1})
    await set_offset(one, 1000)
    await one.send({"n": 1})
    async with one.running(app):
        await one.until_committed({0: 2})
    assert noted == [0, 1]


async def test_messages_that_were_deleted_are_passed_over(one: Stage) -> None:
    app, noted = noting()
    for number in range(3):
        await one.send({"n": number})
    await set_offset(one, 0)
    admin = AIOKafkaAdminClient(bootstrap_servers=one.kafka)
    await admin.start()
    await admin.delete_records({TopicPartition(one.topic, 0): RecordsToDelete(before_offset=2)})
    await admin.close()
    async with one.running(app):
        await one.until_committed({0: 3})
    assert noted == [2]


async def test_a_revocation_with_holes_commits_up_to_the_first_and_repeats_nothing(one: Stage) -> None:
    """CONSUME-7, CONSUME-4: of 0 to 5 only 2 and 5 are done; the next owner does the others, and finds those two in the ledger."""
    app, calls, release = MessageHandlers(), Counter[int](), asyncio.Event()

    @app.handler("ping", model=Ping, step="wait")
    async def wait(message: Message[Ping], _context: MessageContext) -> None:
        calls[message.value.n] += 1
        if message.value.n not in (2, 5):
            await release.wait()

    for number in range(6):
        await one.send({"n": number}, key=f"k{number}")
    settings = {"consumer_rebalance_grace_seconds": 0}
    async with one.running(app, **settings) as first:
        await eventually(lambda: _handled(one, 2))
        async with one.running(app, **settings) as second:
            await eventually(lambda: rebalances(second) >= 1 and rebalances(first) >= 2, 30)
            await eventually(lambda: calls[4] == 2)
            assert await one.committed() == {0: 0}
            release.set()
            await one.until_committed({0: 6})
    assert calls == {0: 2, 1: 2, 2: 1, 3: 2, 4: 2, 5: 1}
    assert await one.dead() == []


async def test_a_static_member_that_comes_back_moves_nobodys_partitions(two: Stage) -> None:
    app, noted = noting()

    async with two.running(app, consumer_instance="b") as other:
        async with two.running(app, consumer_instance="a") as member:
            await eventually(lambda: partitions(member) == partitions(other) == 1, 30)
        before = rebalances(other)
        async with two.running(app, consumer_instance="a") as back:
            await eventually(lambda: partitions(back) == 1, 30)
            for number in range(4):
                await two.send({"n": number}, partition=number % 2)
            await two.until_committed({0: 2, 1: 2})
        assert rebalances(other) == before
    assert sorted(noted) == [0, 1, 2, 3]


def plain(event_id: str) -> list[tuple[str, str]]:
    return [("ce_specversion", "1.0"), ("ce_id", event_id), ("ce_source", "test"), ("ce_type", "ping")]


def rebalances(consumer: Consumer) -> float:
    return sample(consumer, "fencepost_consumer_rebalances_total")


def partitions(consumer: Consumer) -> float:
    return sample(consumer, "fencepost_consumer_partitions")


async def _handled(made: Stage, count: int) -> bool:
    return len(await made.outcomes()) == count
