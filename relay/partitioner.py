"""Java's default partitioner for keyed records, so that producers in every language agree on a key's partition."""

import struct
from functools import lru_cache
from typing import Final

__all__ = ["murmur2", "partition_of"]

_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF
_CACHED_KEYS: Final = 65_536


def murmur2(data: bytes) -> int:
    """MurmurHash2, 32 bit, with Kafka's seed, as an unsigned number (org.apache.kafka.common.utils.Utils.murmur2)."""
    length = len(data)
    h = (_SEED ^ length) & _MASK
    words = length >> 2
    for k in struct.unpack_from(f"<{words}I", data):
        k = k * _M & _MASK  # noqa: PLW2901 - the mixing steps of the algorithm, in place
        h = (h * _M & _MASK) ^ ((k ^ k >> 24) * _M & _MASK)
    tail = length & 3
    if tail:
        h ^= int.from_bytes(data[words << 2 :], "little")
        h = h * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    return h ^ h >> 15


@lru_cache(maxsize=_CACHED_KEYS)
def partition_of(key: bytes, partitions: int) -> int:
    """The partition of ``key`` on a topic with ``partitions`` partitions: the hash made positive, modulo."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions
