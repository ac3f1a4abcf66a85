"""Records written as bytes: what no client of ours would write, and brokers take."""

from collections.abc import Sequence
from typing import Final

from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from tests.support.waiting import eventually

__all__ = ["RawRecord", "record_batch", "write_batch"]

_MOST_BYTES: Final = 99_999

#: Key, value and headers.
RawRecord = tuple[bytes | None, bytes | None, Sequence[tuple[str, bytes]]]


def record_batch(records: Sequence[RawRecord]) -> bytearray:
    """A batch of these records, as a producer sends it."""
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=0, is_transactional=0, producer_id=-1, producer_epoch=-1, base_sequence=-1, batch_size=_MOST_BYTES
    )
    for place, (key, value, headers) in enumerate(records):
        builder.append(place, timestamp=None, key=key, value=value, headers=list(headers))
    return bytearray(builder.build())


async def write_batch(kafka: str, topic: str, partition: int, batch: bytes) -> None:
    """Write the bytes as they are. The broker may not have heard yet that it leads a new partition."""
    client = AIOKafkaClient(bootstrap_servers=kafka)
    await client.bootstrap()

    async def written() -> bool:
        answer = await client.send(client.get_random_node(), ProduceRequest(None, -1, 5000, [(topic, [(partition, batch)])]))
        return bool(answer.topics[0][1][0][1] == 0)

    try:
        await eventually(written)
    finally:
        await client.close()
