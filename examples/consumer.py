"""A consumer group on the topic of `producer.py`: one line a message, repeats ignored, commits by hand.

    FENCEPOST_KAFKA_BOOTSTRAP_SERVERS=localhost:9092 python examples/consumer.py --count 10

It remembers event ids in memory only. A service whose effects must happen once keeps them in its database, in the
transaction of the effect.
"""

import argparse
import asyncio
import os
import sys

from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import TopicAlreadyExistsError, for_code

from consumer_sdk import Message, NotAMessage

TOPIC = "orders"
GROUP = "example-consumer"
PARTITIONS = 8
REMEMBERED_IDS = 100_000
FETCH_MILLISECONDS = 1_000


class Repeats:
    """The last event ids, so that a repeat is known."""

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}

    def is_new(self, event_id: str) -> bool:
        if event_id in self._ids:
            return False
        self._ids[event_id] = None
        if len(self._ids) > REMEMBERED_IDS:
            del self._ids[next(iter(self._ids))]
        return True


async def create_topic(bootstrap_servers: str, topic: str) -> None:
    """Create the topic unless it exists: many brokers create none by themselves."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers)
    await admin.start()
    try:
        brokers = len((await admin.describe_cluster())["brokers"])
        answer = await admin.create_topics([NewTopic(topic, PARTITIONS, replication_factor=min(3, brokers))])
        for name, code, *_ in answer.topic_errors:
            if code not in (0, TopicAlreadyExistsError.errno):
                raise for_code(code)(name)
    finally:
        await admin.close()


def handle(message: Message[None]) -> None:
    print(
        f"{message.topic}/{message.partition}@{message.offset} {message.type} {message.event_id} {message.json()}",
        flush=True,
    )


async def consume(consumer: AIOKafkaConsumer, count: int | None) -> None:
    repeats = Repeats()
    handled = 0
    while count is None or handled < count:
        batches = await consumer.getmany(timeout_ms=FETCH_MILLISECONDS)
        for record in (record for batch in batches.values() for record in batch):
            try:
                message = Message.from_record(record)
            except NotAMessage as error:
                print(f"skipped: {error}", flush=True)
                continue
            if repeats.is_new(message.event_id):
                handle(message)
                handled += 1
        if batches:
            await consumer.commit()  # after the messages are handled, so that none is lost


async def main(bootstrap_servers: str, topic: str, count: int | None) -> None:
    await create_topic(bootstrap_servers, topic)
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=bootstrap_servers,
        group_id=GROUP,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
    )
    await consumer.start()
    try:
        await consume(consumer, count)
    finally:
        await consumer.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prints the messages of a topic until stopped.")
    parser.add_argument("--count", type=int, help="stop after so many new messages; without it, go on")
    parser.add_argument("--topic", default=TOPIC)
    options = parser.parse_args()
    if "FENCEPOST_KAFKA_BOOTSTRAP_SERVERS" not in os.environ:
        sys.exit("set FENCEPOST_KAFKA_BOOTSTRAP_SERVERS: host:port")
    try:
        asyncio.run(main(os.environ["FENCEPOST_KAFKA_BOOTSTRAP_SERVERS"], options.topic, options.count))
    except KeyboardInterrupt:
        print("stopped")
