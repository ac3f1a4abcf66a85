"""Reads a batch that aiokafka cannot unpack, because a header's name in it is not UTF-8.

Brokers take any bytes for a name, and aiokafka decodes names strictly: such a record, and all behind it, would never be had. Here
they are read by aiokafka's own unpacking in Python, with names decoded so that their bytes can be got back (PEP 383).
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, SupportsIndex

from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.record.default_records import _DefaultRecordBatchPy

from consumer_sdk.message_store import StoredRecord
from fencepost.errors import TransientError

__all__ = ["RawBatch", "fetch_batch"]

_WAIT_MS: Final = 500
_MOST_BYTES: Final = 1024 * 1024
_READ_COMMITTED: Final = 1
# Base offset and length come before what the length counts.
_LENGTH_AT: Final = 8
_COUNTED_FROM: Final = 12


class RawBatch(NamedTuple):
    """The records of one batch, from an offset on, and the offset behind it."""

    records: Sequence[StoredRecord]
    next_offset: int


class _LenientBytes(bytearray):
    """Bytes whose slices decode as they are."""

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        found = super().__getitem__(place)
        return _LenientBytes(found) if isinstance(place, slice) else found

    def decode(self, encoding: str = "utf-8", errors: str = "surrogateescape") -> str:
        return super().decode(encoding, errors)


async def fetch_batch(client: AIOKafkaClient, partition: TopicPartition, offset: int) -> RawBatch:
    """The batch of the partition that holds ``offset``. Raises ``TransientError``."""
    data = await _fetched(client, partition, offset)
    place = 0
    while place + _COUNTED_FROM <= len(data):
        end = place + _COUNTED_FROM + int.from_bytes(data[place + _LENGTH_AT : place + _COUNTED_FROM], "big")
        if end > len(data):
            break
        batch = _DefaultRecordBatchPy(bytearray(data[place:end]))
        if batch.next_offset > offset:
            return RawBatch([one for one in _unpacked(batch, partition) if one.offset >= offset], batch.next_offset)
        place = end
    raise TransientError("Kafka: the batch did not come whole")


def _unpacked(batch: Any, partition: TopicPartition) -> Sequence[StoredRecord]:
    if batch.is_control_batch:
        return []
    batch._maybe_uncompress()
    batch._buffer = _LenientBytes(batch._buffer)
    return [
        StoredRecord(
            topic=partition.topic,
            partition=partition.partition,
            offset=record.offset,
            key=record.key,
            value=record.value,
            headers=tuple(record.headers),
            timestamp=record.timestamp,
        )
        for record in batch
    ]


async def _fetched(client: AIOKafkaClient, partition: TopicPartition, offset: int) -> bytes:
    node = client.cluster.leader_for_partition(partition)
    if node is None or node < 0:
        raise TransientError("Kafka: the partition has no leader")
    asked = [(partition.topic, [(partition.partition, offset, _MOST_BYTES)])]
    try:
        answer = await client.send(node, FetchRequest(_WAIT_MS, 1, _MOST_BYTES, _READ_COMMITTED, asked, rack_id=""))
    except (KafkaError, OSError, TimeoutError) as error:
        raise TransientError(f"Kafka: {type(error).__name__}") from error
    for _topic, partitions in answer.topics:
        for answered in partitions:
            if answered[1]:
                raise TransientError(f"Kafka: {for_code(answered[1]).__name__}")
            return bytes(answered[-1])
    raise TransientError("Kafka: the partition was not in the answer")
