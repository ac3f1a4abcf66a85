"""An event is checked whole when it is built, before any statement; what it refuses, it names without quoting it."""

import dataclasses
import subprocess
import sys
import time
import traceback
from enum import StrEnum
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest

import producer_sdk
from fencepost.wire import (
    MAX_HEADER_NAME_BYTES,
    MAX_HEADERS,
    MAX_HEADERS_BYTES,
    MAX_KEY_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_TRACESTATE_BYTES,
)
from producer_sdk import Event, InvalidEvent
from producer_sdk.writing import ENQUEUE, ENQUEUE_MANY, many_parameters, one_parameters, with_counted_placeholders

TEXT_ATTRIBUTES = (
    "source",
    "content_type",
    "tenant_id",
    "run_id",
    "step",
    "operation",
    "traceparent",
    "tracestate",
)
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def event(**changes: Any) -> Event:
    """An event that may be written, with changes."""
    return Event(**({"topic": "orders", "type": "order.placed", "key": "o-1", "payload": b"{}"} | changes))


def refusal(**changes: Any) -> InvalidEvent:
    with pytest.raises(InvalidEvent) as caught:
        event(**changes)
    assert caught.value.limit
    assert caught.value.remedy
    return caught.value


def test_the_public_surface_is_this() -> None:
    assert producer_sdk.__all__ == [
        "UNKEYED",
        "Accepted",
        "Cancellation",
        "Command",
        "ConfigurationError",
        "DuplicateEvent",
        "Event",
        "IdempotencyConflict",
        "IdempotencyError",
        "InProgress",
        "InvalidCommand",
        "InvalidEvent",
        "InvalidInput",
        "KeyExpired",
        "KeyInvalid",
        "KeyMissing",
        "Run",
        "RunChanged",
        "RunEnded",
        "RunErased",
        "RunNotFound",
        "Scope",
        "Secrets",
        "Submission",
        "TransactionRequired",
    ]
    for name in producer_sdk.__all__:
        assert hasattr(producer_sdk, name)


@pytest.mark.parametrize("package", ["producer_sdk", "consumer_sdk"])
def test_importing_an_sdk_loads_no_driver_and_no_broker_client(package: str) -> None:
    heavy = {"aiokafka", "prometheus_client", "asyncpg", "psycopg", "sqlalchemy", "django", "opentelemetry"}
    program = f"import sys, {package}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_event_without_an_id_gets_a_uuid_of_version_7_that_the_caller_sees() -> None:
    before = time.time_ns() // 1_000_000
    minted = event().event_id
    after = time.time_ns() // 1_000_000
    assert isinstance(minted, UUID)
    assert minted.version == 7
    assert before <= minted.int >> 80 <= after
    assert event().event_id != minted


def test_a_given_id_is_kept() -> None:
    given = uuid4()
    assert event(event_id=given).event_id == given
    assert refusal(event_id=str(given)).field == "event_id"


def test_an_event_cannot_be_changed_and_a_replaced_one_is_checked() -> None:
    placed = event()
    with pytest.raises(dataclasses.FrozenInstanceError):
        placed.topic = "other"  # type: ignore[misc]
    assert dataclasses.replace(placed, topic="other").event_id == placed.event_id
    with pytest.raises(InvalidEvent):
        dataclasses.replace(placed, topic="")


def test_a_text_key_is_its_utf8_and_an_empty_one_stays_empty() -> None:
    assert event(key="gr\u00fcn").key == "gr\u00fcn".encode()
    assert event(key=b"\xff").key == b"\xff"
    assert event(key="").key == b""
    assert event(key=None).key is None


def test_text_of_an_enum_is_text() -> None:
    class Topic(StrEnum):
        ORDERS = "orders"

    assert one_parameters(event(topic=Topic.ORDERS))[0] == "orders"


def test_json_is_compact_utf8_and_says_so() -> None:
    placed = Event.json({"a": [], "b": None, "c": "\u2713"}, topic="orders", type="order.placed", key="o-1")
    assert placed.payload == '{"a":[],"b":null,"c":"\u2713"}'.encode()
    assert placed.content_type == "application/json"
    assert placed.key == b"o-1"
    assert Event.json(None, topic="orders", type="t", key=None).payload == b"null"


@pytest.mark.parametrize(
    "value",
    [float("nan"), {"a": object()}, {("a",): 1}, "secret\ud800", b"secret"],
    ids=["nan", "object", "key", "surrogate", "bytes"],
)
def test_what_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(InvalidEvent) as caught:
        Event.json(value, topic="orders", type="order.placed", key="o-1")
    assert caught.value.field == "payload"
    assert "secret" not in "".join(traceback.format_exception(caught.value)[1:])


@pytest.mark.parametrize("topic", ["", "t" * 250, "a b", "\u00fc", "a/b", ".", "..", "orders\n", "a\0", None, b"orders"])
def test_a_topic_that_kafka_does_not_know_is_refused(topic: object) -> None:
    assert refusal(topic=topic).field == "topic"


@pytest.mark.parametrize("topic", ["a", "t" * 249, "A.b_c-9", "...", "_"])
def test_a_topic_that_kafka_knows_is_kept(topic: str) -> None:
    assert event(topic=topic).topic == topic


def test_sizes_are_named_with_their_limits() -> None:
    assert str(refusal(payload=b"x" * (MAX_PAYLOAD_BYTES + 1))) == (
        "payload: has 1000001 bytes, may have 1000000; store it elsewhere and enqueue a reference"
    )
    assert str(refusal(key="k" * (MAX_KEY_BYTES + 1))) == "key: has 4097 bytes, may have 4096; use a hash of it"
    assert "has 257 bytes, must have 1 to 256" in str(refusal(type="t" * 257))
    assert "has 513 bytes, must have 1 to 512" in str(refusal(tracestate="t" * (MAX_TRACESTATE_BYTES + 1)))
    assert "have 32769 bytes, may have 32768" in str(refusal(headers=[("h", b"v" * MAX_HEADERS_BYTES)]))
    assert "has 65, may have 64" in str(refusal(headers=[("h", b"")] * (MAX_HEADERS + 1)))


def test_what_reaches_a_limit_exactly_is_kept() -> None:
    event(key=b"k" * MAX_KEY_BYTES, payload=b"x" * MAX_PAYLOAD_BYTES, type="\u00fc" * 128, fencing_token=2**63 - 1)
    event(headers=[("h" * MAX_HEADER_NAME_BYTES, b"v" * (MAX_HEADERS_BYTES - MAX_HEADER_NAME_BYTES))])
    event(headers=[("h", b"")] * MAX_HEADERS, tracestate="t" * MAX_TRACESTATE_BYTES)


def test_a_tombstone_needs_a_key() -> None:
    assert event(payload=None).payload is None
    assert refusal(payload=None, key=None).field == "payload"


@pytest.mark.parametrize("field", ["type", *TEXT_ATTRIBUTES])
@pytest.mark.parametrize("text", ["", "a\0b", "\ud800", b"bytes", 7], ids=["empty", "NUL", "surrogate", "bytes", "int"])
def test_text_that_postgresql_or_kafka_cannot_take_is_refused(field: str, text: object) -> None:
    assert refusal(**{field: text}).field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", "\ud800"),
        ("key", 7),
        ("payload", "text"),
        ("payload", bytearray(b"x")),
        ("fencing_token", -1),
        ("fencing_token", 2**63),
        ("fencing_token", True),
        ("fencing_token", "1"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(field: str, value: object) -> None:
    assert refusal(**{field: value}).field == field


@pytest.mark.parametrize(
    "headers",
    [
        [("", b"")],
        [("h" * 257, b"")],
        [("a\0b", b"")],
        [("\udcff", b"")],
        [(b"name", b"")],
        [("name", "text")],
        [("name", None)],
        [("name",)],
        ["ab"],
        "ab",
        {"name": b""},
        None,
        [("ce_id", b"")],
        [("CE_Anything", b"")],
        [("fencepost-x", b"")],
        [("Content-Type", b"")],
        [("TraceParent", b"")],
        [("tracestate", b"")],
    ],
)
def test_headers_that_cannot_travel_are_refused(headers: object) -> None:
    assert refusal(headers=headers).field == "headers"


def test_headers_keep_order_repeats_and_bytes() -> None:
    given = [("b", b""), ("a", b"\xff"), ("b", "\u00fc".encode()), ("\u2713", b"x"), ("ce", b"not reserved")]
    placed = event(headers=given)
    given.clear()
    assert placed.headers == (
        ("b", b""), ("a", b"\xff"), ("b", "\u00fc".encode()), ("\u2713", b"x"), ("ce", b"not reserved"),
    )  # fmt: skip


def test_key_payload_and_headers_are_in_no_message() -> None:
    shown = repr(event(key="secret", payload=b"secret", headers=[("secret", b"secret")]))
    assert "secret" not in shown
    for changes in (
        {"key": "secret\ud800"},
        {"key": b"secret" * MAX_KEY_BYTES},
        {"payload": b"secret" * MAX_PAYLOAD_BYTES},
        {"headers": [("secret\ud800", b"")]},
    ):
        assert "secret" not in "".join(traceback.format_exception(refusal(**changes)))


def test_the_current_span_is_carried_unless_a_trace_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    span = _span(tracestate="vendor=1")
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", SimpleNamespace(get_current_span=lambda: span))
    assert event().traceparent == TRACEPARENT
    assert event().tracestate == "vendor=1"
    given = event(traceparent=TRACEPARENT.replace("b7", "c7"))
    assert (given.traceparent, given.tracestate) == (TRACEPARENT.replace("b7", "c7"), None)


def test_a_span_never_makes_an_event_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    current = {"span": _span(tracestate="v=" + "x" * MAX_TRACESTATE_BYTES)}
    api = SimpleNamespace(get_current_span=lambda: current["span"])
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", api)
    assert (event().traceparent, event().tracestate) == (TRACEPARENT, None)
    current["span"] = _span(is_valid=False)
    assert event().traceparent is None


def _span(*, tracestate: str = "", is_valid: bool = True) -> SimpleNamespace:
    context = SimpleNamespace(
        is_valid=is_valid,
        trace_id=int(TRACEPARENT[3:35], 16),
        span_id=int(TRACEPARENT[36:52], 16),
        trace_flags=1,
        trace_state=SimpleNamespace(to_header=lambda: tracestate),
    )
    return SimpleNamespace(get_span_context=lambda: context)


def test_both_styles_of_placeholder_come_from_one_text() -> None:
    for statement, parameters in ((ENQUEUE, one_parameters(event())), (ENQUEUE_MANY, many_parameters([event()]))):
        assert statement.counted.count("%s") == len(parameters)
        assert f"${len(parameters)}::" in statement.numbered
        assert "$" not in statement.counted
    assert with_counted_placeholders("a = $1 AND b LIKE '%' || $2") == "a = %s AND b LIKE '%%' || %s"


@pytest.mark.parametrize("sql", ["$2, $1", "$1, $1", "$1, $3"])
def test_placeholders_out_of_order_are_a_mistake_of_ours(sql: str) -> None:
    with pytest.raises(ValueError, match="once each and in order"):
        with_counted_placeholders(sql)


def test_headers_of_many_events_travel_as_one_array_with_ends() -> None:
    events = [event(headers=[("a", b"1"), ("b", b"2")]), event(), event(headers=[("c", b"3")])]
    parameters = many_parameters(events)
    assert parameters[5:8] == ([2, 2, 3], ["a", "b", "c"], [b"1", b"2", b"3"])
    assert many_parameters([event(), event()])[5:8] == (None, None, None)
