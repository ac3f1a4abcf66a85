"""The published copy of a dead letter: written in the dead letter's transaction, and brought to its topic by a real relay."""

from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from consumer_sdk import Message, MessageContext, MessageHandlers, Terminal
from fencepost.errors import ConfigurationError
from fencepost.wire import MAX_PAYLOAD_BYTES
from tests.support.consumers import Ping, Stage, stage
from tests.support.records import Record, read_all
from tests.support.relay_process import RelayFactory
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

pytestmark = pytest.mark.services


@pytest.fixture
async def one(database_url: str, kafka: str, topic: TopicFactory) -> AsyncIterator[Stage]:
    async with stage(database_url, kafka, topic) as made:
        yield made


@pytest.fixture
async def dead_letters(topic: TopicFactory) -> str:
    return await topic(partitions=3)


def refusing() -> MessageHandlers:
    app = MessageHandlers()

    @app.handler("ping", model=Ping, step="refuse")
    async def refuse(message: Message[Ping], _context: MessageContext) -> None:
        if message.value.n < 0:
            raise Terminal("negative")

    return app


def headers_of(record: Record) -> dict[str, bytes]:
    return dict(record.headers)


async def published(made: Stage, start_relay: RelayFactory, dead_letters: str, count: int) -> list[Record]:
    """The copies, in the order of the places of what they are copies of."""
    await start_relay(made.database_url, made.kafka).wait_ready()
    records = await read_all(made.kafka, dead_letters, count=count)
    return sorted(records, key=lambda record: int(headers_of(record)["dead-letter-offset"]))


async def test_a_dead_letter_arrives_whole_with_its_reason(one: Stage, dead_letters: str, start_relay: RelayFactory) -> None:
    """X7, CONSUME-21: one record with one id, the original payload, key and headers, where it came from and why."""
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    sent = {"content-type": "application/json", "x-shop": "north", "traceparent": traceparent, "ce_tenantid": "acme"}
    event = await one.send({"n": -1}, key="order-1", headers=sent)
    await one.send({"n": 1})
    async with one.running(refusing(), consumer_dead_letter_topic=dead_letters):
        await one.until_committed({0: 2})
    (record,) = await published(one, start_relay, dead_letters, 1)
    headers = headers_of(record)
    assert (record.key, record.value) == (b"order-1", b'{"n": -1}')
    assert (headers["ce_type"], headers["ce_tenantid"]) == (b"fencepost.message_dead_lettered", b"acme")
    assert UUID(headers["ce_id"].decode()) != UUID(event)
    assert (headers["content-type"], headers["traceparent"]) == (b"application/json", traceparent.encode())
    assert (headers["original-ce_id"], headers["original-x-shop"]) == (event.encode(), b"north")
    told = {name: value.decode() for name, value in headers.items() if name.startswith("dead-letter-")}
    assert told == {
        "dead-letter-reason": "rejected",
        "dead-letter-error-class": "consumer_sdk.classification.Terminal",
        "dead-letter-error-code": "negative",
        "dead-letter-consumer": one.topic,
        "dead-letter-step": f"{one.topic}/refuse",
        "dead-letter-topic": one.topic,
        "dead-letter-partition": "0",
        "dead-letter-offset": "0",
        "dead-letter-attempts": "1",
    }


async def test_dead_letters_of_one_key_arrive_in_the_order_in_which_they_were_given_up(
    one: Stage, dead_letters: str, start_relay: RelayFactory
) -> None:
    for number in range(1, 13):
        await one.send({"n": -number}, key=f"k{number % 3}")
    async with one.running(refusing(), consumer_dead_letter_topic=dead_letters):
        await one.until_committed({0: 12})
    await start_relay(one.database_url, one.kafka).wait_ready()
    records = await read_all(one.kafka, dead_letters, count=12)
    assert len(records) == 12
    for key in (b"k0", b"k1", b"k2"):
        offsets = [int(headers_of(record)["dead-letter-offset"]) for record in records if record.key == key]
        assert offsets == sorted(offsets)
        assert len({record.partition for record in records if record.key == key}) == 1


async def test_whatever_was_received_can_be_published(one: Stage, dead_letters: str, start_relay: RelayFactory) -> None:
    """A tombstone, bytes of no form, odd and many headers, no key: the copy says what it had to leave out; the table has it all."""
    await one.send(None, key="tombstone")
    await one.send_record(b"\xff\x00", key=None, headers=[("", "empty name"), ("ce_type", "ping"), ("a\0b", "1"), ("ünï", "ü")])
    await one.send_record(b"{}", headers=[(f"h{number}", "x" * 400) for number in range(300)])
    await one.send_record(b"{}", headers=[("n" * 2000, "1"), ("v", "x" * 100_000), ("traceparent", "t" * 5000)])
    async with one.running(refusing(), consumer_dead_letter_topic=dead_letters):
        await one.until_committed({0: 4})
    tombstone, odd, many, long = await published(one, start_relay, dead_letters, 4)
    assert headers_of(tombstone)["dead-letter-tombstone"] == b"true"
    assert (odd.key, odd.value) == (None, b"\xff\x00")
    assert (headers_of(odd)["original-ce_type"], headers_of(odd)["original-ünï"]) == (b"ping", "ü".encode())
    assert [headers_of(record).get("dead-letter-omitted") for record in (odd, many, long)] == [b"headers"] * 3
    assert [len(letter["header_names"]) for letter in await one.dead()] == [4, 4, 300, 3]


async def test_a_payload_that_the_outbox_would_not_take_stays_in_the_table(
    one: Stage, dead_letters: str, start_relay: RelayFactory
) -> None:
    """The limit is the outbox's: what a topic of larger records brings is given up whole all the same."""
    payload = b'"' + b"x" * MAX_PAYLOAD_BYTES + b'"'
    await large(one, payload, 2 * MAX_PAYLOAD_BYTES)
    async with one.running(refusing(), consumer_dead_letter_topic=dead_letters):
        await one.until_committed({0: 1})
    (record,) = await published(one, start_relay, dead_letters, 1)
    (letter,) = await one.dead()
    assert (record.value, headers_of(record)["dead-letter-omitted"]) == (b"", b"payload")
    assert letter["payload"] == payload


async def test_a_redrive_that_fails_publishes_no_second_copy(one: Stage, dead_letters: str) -> None:
    await one.send({"n": -1})
    async with one.running(refusing(), consumer_dead_letter_topic=dead_letters):
        await one.until_committed({0: 1})
        (letter,) = await one.dead()
        await one.connection.execute("SELECT fencepost.redrive_dead_letter($1, false, 'ana', 'why')", letter["dead_letter_id"])
        await eventually(lambda: _dead_again(one))
    assert await one.connection.fetchval("SELECT count(*) FROM fencepost.outbox") == 1


async def test_without_its_dead_letter_topic_a_consumer_does_not_start(one: Stage) -> None:
    """Better than a relay that waits for the topic while nobody looks."""
    with pytest.raises(ConfigurationError, match="FENCEPOST_CONSUMER_DEAD_LETTER_TOPIC"):
        await one.consumer(refusing(), consumer_dead_letter_topic=f"{one.topic}-missing").run()


async def large(made: Stage, payload: bytes, limit: int) -> None:
    """A record that is larger than Kafka's defaults allow."""
    admin = AIOKafkaAdminClient(bootstrap_servers=made.kafka)
    await admin.start()
    await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, made.topic, configs={"max.message.bytes": str(limit)})])
    await admin.close()
    producer = AIOKafkaProducer(bootstrap_servers=made.kafka, max_request_size=limit)
    await producer.start()
    attributes: list[tuple[str, Any]] = [("ce_specversion", b"1.0"), ("ce_id", b"e"), ("ce_source", b"s"), ("ce_type", b"ping")]
    await producer.send_and_wait(made.topic, payload, key=b"k", headers=attributes)
    await producer.stop()


async def _dead_again(made: Stage) -> bool:
    return [(letter["state"], letter["attempts"]) for letter in await made.dead()] == [("dead", 2)]
