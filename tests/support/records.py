"""Reads a topic back, whole, the way any consumer could: from the first offset to the end at the time of the call."""

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.structs import ConsumerRecord

from tests.support.waiting import eventually

Record: TypeAlias = ConsumerRecord

READ_SECONDS: Final = 30.0
FETCH_MILLISECONDS: Final = 500


async def read_all(
    bootstrap_servers: str,
    topic: str,
    *,
    count: int | None = None,
    timeout: float = READ_SECONDS,  # noqa: ASYNC109 - every wait of a test has its own bound
    isolation: Literal["read_uncommitted", "read_committed"] = "read_uncommitted",
) -> list[Record]:
    """Return every record of the topic, by partition and in each by offset.

    With `count`, first wait until the topic holds at least so many; then read to the end, so that a record too many
    is seen as well.
    """
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=bootstrap_servers,
        group_id=None,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        isolation_level=isolation,
    )
    await consumer.start()
    try:
        if count is not None:
            wanted = count

            async def enough() -> bool:
                return sum((await _end_offsets(consumer)).values()) >= wanted

            await eventually(enough, timeout, message=f"{topic} holds {count} records")
        return await _read_to(consumer, await _end_offsets(consumer), timeout)
    finally:
        await consumer.stop()


async def _end_offsets(consumer: AIOKafkaConsumer) -> Mapping[TopicPartition, int]:
    return dict(await consumer.end_offsets(list(consumer.assignment())))


async def _read_to(consumer: AIOKafkaConsumer, ends: Mapping[TopicPartition, int], seconds: float) -> list[Record]:
    records: list[Record] = []

    async def fetched() -> bool:
        for batch in (await consumer.getmany(timeout_ms=FETCH_MILLISECONDS)).values():
            records.extend(batch)
        return all([await consumer.position(partition) >= end for partition, end in ends.items()])

    await eventually(fetched, seconds, message="the topic's end is reached")
    kept = [record for record in records if record.offset < ends[TopicPartition(record.topic, record.partition)]]
    return sorted(kept, key=lambda record: (record.partition, record.offset))
