"""A key goes to the partition that every other Kafka client chooses (KAFKA-4).

The vectors were computed once by the Java client itself (kafka-clients 4.2.2 on a JDK 25):
``Utils.murmur2(key)`` and ``BuiltInPartitioner.partitionForKey(key, partitions)``.
"""

from typing import Final

import pytest
from aiokafka.partitioner import murmur2 as aiokafka_murmur2
from hypothesis import given
from hypothesis import strategies as st

from relay.partitioner import murmur2, partition_of

# key in hex; Java's signed hash; the partition of 7 and of 12. Text, random bytes and bytes above 127, of lengths 0 to 16.
VECTORS: Final = [
    ("", 275646681, 2, 9),
    ("6f", -994553553, 2, 11),
    ("6f72", -490689853, 6, 7),
    ("6f7264", -1798718916, 1, 8),
    ("6f726465", 2126781930, 0, 6),
    ("6f72646572", 1818166172, 4, 8),
    ("6f726465722d", 1115268824, 5, 8),
    ("6f726465722d30", -1282856692, 4, 4),
    ("6f726465722d3031", -89000877, 2, 11),
    ("6f726465722d303132", 1243947878, 5, 2),
    ("6f726465722d30313233", 1586505966, 3, 6),
    ("6f726465722d3031323334", -14369391, 1, 5),
    ("6f726465722d303132333435", -2072254537, 6, 7),
    ("6f726465722d30313233343536", 1931176268, 0, 8),
    ("6f726465722d3031323334353637", -1770475574, 2, 6),
    ("6f726465722d303132333435363738", 1735841615, 4, 11),
    ("6f726465722d30313233343536373839", 1716413473, 5, 1),
    ("35", 55100550, 1, 6),
    ("f78a", 1288432276, 5, 4),
    ("e1bbe7", -983584298, 5, 6),
    ("28c0450c", -392157833, 5, 3),
    ("e43c084f4b", 650222576, 3, 8),
    ("839dee466d85", 609540322, 6, 10),
    ("be6a61aa9a0c61", -2055415863, 5, 5),
    ("bd6743e7dc978573", 496582918, 6, 10),
    ("998e685e885cb361f8", -2143606509, 0, 11),
    ("20bebfb01100b2765457", 1749477346, 1, 10),
    ("0f406cc8e3a188fff11059", 239636182, 2, 10),
    ("6fbce62655dfbd6f83b89670", -715584511, 4, 1),
    ("d6d9f9bf52d83deedc0bf66205", 1343331766, 0, 10),
    ("16ad682d8c478a26f45027984959", 434214673, 4, 1),
    ("dd53b3351a572b40f27f72d37f347b", -221833639, 3, 1),
    ("9979162cfa959d2832a46196d92c3046", 1156755985, 0, 1),
    ("ff", -311467685, 5, 3),
    ("ffff", -1642832928, 0, 8),
    ("ffffff", 1548199422, 0, 6),
    ("ffffffff", 644171429, 6, 5),
    ("ffffffffff", -363838622, 2, 6),
    ("ffffffffffff", 28450676, 2, 8),
    ("ffffffffffffff", -71293549, 4, 7),
    ("ffffffffffffffff", 185950397, 3, 5),
    ("ffffffffffffffffff", 1612811207, 0, 11),
    ("ffffffffffffffffffff", -2119377587, 4, 9),
    ("ffffffffffffffffffffff", 1034444555, 4, 11),
    ("ffffffffffffffffffffffff", -183805200, 4, 8),
    ("ffffffffffffffffffffffffff", -2001258546, 2, 2),
    ("ffffffffffffffffffffffffffff", -987730404, 6, 8),
    ("ffffffffffffffffffffffffffffff", -934906583, 0, 9),
    ("ffffffffffffffffffffffffffffffff", 1431967450, 4, 10),
    ("5ac3bc72696368", -1551140815, 2, 1),
    ("e382ade383bc", -443984012, 6, 0),
]
LARGEST_KEY: Final = bytes(i * 31 & 0xFF for i in range(4096))


@pytest.mark.parametrize(("key", "signed_hash", "of_seven", "of_twelve"), VECTORS)
def test_a_key_goes_where_java_sends_it(key: str, signed_hash: int, of_seven: int, of_twelve: int) -> None:
    data = bytes.fromhex(key)

    assert murmur2(data) == signed_hash & 0xFFFFFFFF
    assert [partition_of(data, count) for count in (1, 7, 12)] == [0, of_seven, of_twelve]


def test_the_vectors_hold_every_length_up_to_sixteen() -> None:
    assert {len(bytes.fromhex(key)) for key, *_ in VECTORS} == set(range(17))


def test_the_longest_key_allowed_goes_where_java_sends_it() -> None:
    assert (murmur2(LARGEST_KEY), partition_of(LARGEST_KEY, 12)) == (1448821531, 7)


def test_more_partitions_give_the_partition_of_the_new_count() -> None:
    """KAFKA-4, "also after partitions were added": a remembered partition is that of the count it was asked for."""
    data = b"order-0123456789"

    assert [partition_of(data, count) for count in (7, 12, 7)] == [5, 1, 5]


@given(st.binary(max_size=64))
def test_the_hash_agrees_with_an_independent_implementation(data: bytes) -> None:
    assert murmur2(data) == aiokafka_murmur2(data) & 0xFFFFFFFF


@given(st.binary(max_size=64), st.integers(min_value=1, max_value=10_000))
def test_a_partition_exists(data: bytes, partitions: int) -> None:
    assert 0 <= partition_of(data, partitions) < partitions
