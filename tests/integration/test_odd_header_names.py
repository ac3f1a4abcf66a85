"""A header's name that is not UTF-8, which brokers take and aiokafka cannot unpack, stops nothing and costs no message."""

import asyncio
import struct
import uuid
from typing import Any, Final

import asyncpg
import pytest
from aiokafka.record._crc32c import crc

from consumer_sdk import Consumer, Message, MessageContext, MessageHandlers, load_consumer_settings
from tests.support.raw_records import record_batch, write_batch
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

pytestmark = pytest.mark.services

ODD: Final = b"\xff\xfe\xff\xfe"
STAND_IN: Final = "QZQZ"
# Attributes to the end are what the checksum covers.
CHECKSUM_AT: Final = 17
COVERED_FROM: Final = 21


def batch(names: list[str], value: bytes) -> bytes:
    """A record batch with one message a name; the stand-in becomes a name that is no text."""
    attributes = {"ce_specversion": b"1.0", "ce_source": b"test", "ce_type": b"ping"}
    built = record_batch(
        [(b"k", value, [*attributes.items(), ("ce_id", str(uuid.uuid4()).encode()), (name, b"1")]) for name in names]
    )
    while (place := bytes(built).find(STAND_IN.encode())) >= 0:
        built[place : place + len(ODD)] = ODD
    struct.pack_into(">I", built, CHECKSUM_AT, crc(bytes(built[COVERED_FROM:])))
    return bytes(built)


async def test_messages_around_and_with_an_odd_header_name_are_handled_in_order(
    database_url: str, kafka: str, topic: TopicFactory
) -> None:
    """Before it in the batch, itself, behind it, and in the next batch; two partitions, of which one has none."""
    name = await topic(partitions=2)
    for partition, names, value in ((0, ["a", STAND_IN, "b", STAND_IN, "c"], b"1"), (0, ["d"], b"2"), (1, ["e"] * 5, b"3")):
        await write_batch(kafka, name, partition, batch(names, value))
    handled: list[tuple[int, int]] = []
    app = MessageHandlers()

    @app.handler("ping", step="note")
    async def note(message: Message[Any], context: MessageContext) -> None:
        handled.append((message.partition, message.offset))

    settings = load_consumer_settings(
        {
            "database_url": database_url,
            "kafka_bootstrap_servers": kafka,
            "consumer_topics": name,
            "consumer_group": name,
            "consumer_http_port": 0,
        }
    )
    consumer = Consumer(app, settings)
    running = asyncio.create_task(consumer.run())
    await eventually(lambda: len(handled) == 11 or running.done(), 20)
    consumer.stop()
    await running
    assert [offset for partition, offset in handled if partition == 0] == [0, 1, 2, 3, 4, 5]
    assert sorted(offset for partition, offset in handled if partition == 1) == [0, 1, 2, 3, 4]
    connection = await asyncpg.connect(database_url)
    assert await connection.fetchval("SELECT count(*) FROM fencepost.dead_letters") == 0
    await connection.close()
