"""The published copy of a dead letter: whole where the outbox takes it, and within the outbox's bounds whatever came."""

from collections.abc import Sequence
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from consumer_sdk.dead_lettering import copy_of
from consumer_sdk.delivery import Dead, Delivery
from consumer_sdk.identity import Identity, step_key
from consumer_sdk.message import Message, NotAMessage, Record
from consumer_sdk.message_handlers import MessageHandlers
from consumer_sdk.message_store import Copy
from consumer_sdk.testing import Memory, event, handle, record
from fencepost.wire import (
    MAX_HEADER_NAME_BYTES,
    MAX_HEADERS,
    MAX_HEADERS_BYTES,
    MAX_KEY_BYTES,
    MAX_PAYLOAD_BYTES,
)
from producer_sdk import Event

TOPIC: Final = "dead"
DEAD: Final = Dead("rejected", "shop.Refused", "card_declined")
TRACE: Final = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
Headers = Sequence[tuple[str, bytes | None]]


def copied(of: Record, dead: Dead = DEAD, **given: Any) -> Copy:
    try:
        message = Message.from_record(of)
    except NotAMessage:
        message = None
    identity = Identity("e-1", "acme", step_key("billing", "charge"))
    delivery = Delivery(record=of, message=message, handler=None, identity=identity, arrival=None, **{"attempts": 5} | given)
    copy = copy_of(delivery, dead, topic=TOPIC, consumer="billing")
    check_as_the_outbox_does(copy)
    return copy


def check_as_the_outbox_does(copy: Copy) -> None:
    """By the producer's own rules, which are those of ``fencepost.refusal`` and ``fencepost.headers_refusal``."""
    Event(
        topic=copy.topic,
        type="fencepost.message_dead_lettered",
        key=copy.key,
        payload=copy.payload,
        headers=list(copy.headers),
        content_type=copy.content_type,
        traceparent=copy.traceparent,
    )


def with_headers(*headers: tuple[str, bytes | None], **given: Any) -> Copy:
    return copied(record(b"payload", headers=headers), **given)


def originals(copy: Copy) -> Headers:
    return [(name.removeprefix("original-"), value) for name, value in copy.headers if name.startswith("original-")]


def omitted(copy: Copy) -> bytes | None:
    return dict(copy.headers).get("dead-letter-omitted")


def test_a_copy_holds_the_original_whole() -> None:
    """CONSUME-12."""
    of = event("order.placed", b"\x00\xff", key=b"\x00key", headers=[("mine", b"\x00\xff"), ("mine", b""), ("yours", b"1")])
    copy = copied(of)

    assert (copy.topic, copy.key, copy.payload) == (TOPIC, b"\x00key", b"\x00\xff")
    assert originals(copy) == list(of.headers)
    assert omitted(copy) is None


def test_a_copy_says_why_it_was_given_up_and_where_it_came_from() -> None:
    copy = copied(event("order.placed", {}, topic="orders", partition=3, offset=99))

    assert {name: value for name, value in copy.headers if not name.startswith("original-")} == {
        "dead-letter-reason": b"rejected",
        "dead-letter-error-class": b"shop.Refused",
        "dead-letter-error-code": b"card_declined",
        "dead-letter-consumer": b"billing",
        "dead-letter-step": b"billing/charge",
        "dead-letter-topic": b"orders",
        "dead-letter-partition": b"3",
        "dead-letter-offset": b"99",
        "dead-letter-attempts": b"5",
    }


def test_a_tombstone_is_told_from_an_empty_payload() -> None:
    """CONSUME-13: the outbox takes no null without a key, and a copy that is null would delete in a compacted topic."""
    tombstone, empty = copied(record(None, key=None)), copied(record(b"", key=None))

    assert (tombstone.payload, empty.payload) == (b"", b"")
    assert dict(tombstone.headers)["dead-letter-tombstone"] == b"true"
    assert "dead-letter-tombstone" not in dict(empty.headers)


def test_a_copy_carries_the_trace_and_the_media_type_of_the_original() -> None:
    copy = copied(event("order.placed", b"<a/>", traceparent=TRACE, content_type="text/xml"))

    assert (copy.traceparent, copy.content_type) == (TRACE, "text/xml")


@pytest.mark.parametrize("trace", ["", "x" * 257, "é" * 129])
def test_a_trace_that_the_outbox_would_refuse_is_left_out(trace: str) -> None:
    """One header of a record's must not keep it from being given up."""
    assert copied(event("order.placed", {}, traceparent=trace)).traceparent is None


@pytest.mark.parametrize("kind", [b"", b"x" * 257, b"\xff", "é".encode(), b"text/\0xml", None])
def test_a_media_type_that_the_outbox_would_refuse_is_left_out(kind: bytes | None) -> None:
    assert with_headers(("content-type", kind)).content_type is None


# Bounds


@pytest.mark.parametrize(("size", "fits"), [(MAX_PAYLOAD_BYTES, True), (MAX_PAYLOAD_BYTES + 1, False)])
def test_a_payload_that_is_too_large_is_left_out_and_told(size: int, fits: bool) -> None:
    copy = copied(record(b"x" * size))

    assert (copy.payload, omitted(copy)) == ((b"x" * size, None) if fits else (b"", b"payload"))
    assert "dead-letter-tombstone" not in dict(copy.headers)


@pytest.mark.parametrize(("size", "fits"), [(MAX_KEY_BYTES, True), (MAX_KEY_BYTES + 1, False)])
def test_a_key_that_is_too_long_is_left_out_and_told(size: int, fits: bool) -> None:
    copy = copied(record(b"1", key=b"k" * size))

    assert (copy.key, omitted(copy)) == ((b"k" * size, None) if fits else (None, b"key"))


def test_of_too_many_headers_the_first_are_kept_in_order() -> None:
    copy = with_headers(*((f"h-{number}", b"1") for number in range(100)))

    assert len(copy.headers) == MAX_HEADERS
    assert originals(copy) == [(f"h-{number}", b"1") for number in range(len(originals(copy)))]
    assert len(originals(copy)) > 50
    assert omitted(copy) == b"headers"


def test_of_headers_that_are_too_large_those_are_kept_that_fit() -> None:
    copy = with_headers(("small", b"1"), ("large", b"x" * MAX_HEADERS_BYTES), ("after", b"2"))

    assert originals(copy) == [("small", b"1"), ("after", b"2")]
    assert omitted(copy) == b"headers"


def test_headers_are_filled_to_the_bound() -> None:
    copy = with_headers(*((f"h-{number}", b"x" * 1000) for number in range(50)))

    assert 30_000 < sum(len(name) + len(value) for name, value in copy.headers) <= MAX_HEADERS_BYTES
    assert omitted(copy) == b"headers"


LONGEST: Final = MAX_HEADER_NAME_BYTES - len("original-")


@pytest.mark.parametrize("name", ["x" * LONGEST, "é" * (LONGEST // 2), "a b", "CE_ID", "traceparent", "fencepost-x", "ß\n"])
def test_a_name_that_fits_with_its_prefix_is_kept(name: str) -> None:
    """Reserved ones too: with their prefix they are no attribute of the copy."""
    assert originals(with_headers((name, b"1"))) == [(name, b"1")]


@pytest.mark.parametrize("name", ["x" * (LONGEST + 1), "é" * (LONGEST // 2 + 1), "a\0b", "\udcff", ""])
def test_a_name_that_the_outbox_cannot_hold_is_left_out_and_told(name: str) -> None:
    copy = with_headers((name, b"1"), ("kept", b"2"))

    assert originals(copy) == [("kept", b"2")]
    assert omitted(copy) == b"headers"


def test_a_header_without_a_value_is_left_out_and_told() -> None:
    copy = with_headers(("null", None), ("empty", b""))

    assert originals(copy) == [("empty", b"")]
    assert omitted(copy) == b"headers"


def test_all_that_was_left_out_is_told() -> None:
    copy = copied(record(b"x" * (MAX_PAYLOAD_BYTES + 1), key=b"k" * 5000, headers=[("null", None), ("null", None)]))

    assert omitted(copy) == b"payload,key,headers"


NAMES: Final = st.one_of(st.text(max_size=4), st.sampled_from(["x" * 247, "x" * 248, "é" * 124, "\udcff", "content-type"]))
VALUES: Final = st.one_of(st.none(), st.binary(max_size=4), st.sampled_from([b"x" * 1_000, b"x" * 32_000]))


@given(st.lists(st.tuples(NAMES, VALUES), max_size=80), st.one_of(st.none(), st.binary(max_size=3)))
@example([(f"h-{number}", b"x" * 500) for number in range(63)], None)
def test_whatever_headers_come_the_outbox_takes_the_copy(headers: list[tuple[str, bytes | None]], value: bytes | None) -> None:
    copy = copied(record(value, headers=headers, key=None))

    kept = originals(copy)
    assert len(copy.headers) <= MAX_HEADERS
    rest = iter(headers)
    assert all(header in rest for header in kept)  # in order
    assert (len(kept) < len(headers)) == (omitted(copy) is not None)


# What is stored


@pytest.mark.parametrize("timestamp", [-1, 0, 2**62, -(2**62), 1_772_368_200_500_000])
async def test_a_timestamp_beyond_the_calendar_does_not_keep_a_message_from_being_given_up(timestamp: int) -> None:
    """Producers write microseconds by mistake; brokers take them."""
    handled = await handle(MessageHandlers(), record(b"\xff", timestamp=timestamp), memory=Memory())

    assert isinstance(handled.outcome, Dead)
    assert [letter.reason for letter in handled.dead_letters] == ["undecodable"]
