"""A record in the wire format becomes a message; any other is refused by a typed error that names what is wrong."""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

import consumer_sdk
from consumer_sdk import Message, NotAMessage
from fencepost.errors import PermanentError

REQUIRED = {"ce_specversion": b"1.0", "ce_id": b"01a2", "ce_source": b"shop", "ce_type": b"order.placed"}
OPTIONAL = {
    "ce_time": b"2026-03-01T12:30:00.123456Z",
    "ce_sequence": b"42",
    "ce_tenantid": b"acme",
    "ce_runid": b"run-1",
    "ce_step": b"charge",
    "ce_operation": b"card",
    "ce_fencingtoken": b"7",
    "content-type": b"application/json",
    "traceparent": b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": b"vendor=1",
}


@dataclass(frozen=True)
class Record:
    """What aiokafka hands over."""

    headers: Sequence[tuple[str, bytes | None]] = field(default_factory=lambda: list(REQUIRED.items()))
    key: bytes | None = b"o-1"
    value: bytes | None = b'{"a":[]}'
    topic: str = "orders"
    partition: int = 3
    offset: int = 99
    timestamp: int = 1_772_368_200_500


def read(without: str = "", **headers: Any) -> Message[None]:
    given = REQUIRED | headers
    return Message.from_record(Record([(name, value) for name, value in given.items() if name != without]))


def test_the_public_surface_is_this() -> None:
    assert consumer_sdk.__all__ == [
        "Absent",
        "Adapter",
        "AlreadyHandled",
        "Ambiguous",
        "Applied",
        "CallLimits",
        "Consumer",
        "ConsumerSettings",
        "Effect",
        "EffectFailed",
        "EffectMismatch",
        "EffectUnknown",
        "Handlers",
        "LeaseLost",
        "Message",
        "MessageContext",
        "MessageHandlers",
        "NotAMessage",
        "PayloadCodec",
        "Record",
        "Retry",
        "RetryLater",
        "Retryable",
        "RunContext",
        "Terminal",
        "Worker",
        "WorkerSettings",
        "WorkflowChanged",
        "WorkflowContext",
        "WorkflowFailure",
        "Workflows",
        "cloud_events",
        "debezium_outbox",
        "load_consumer_settings",
        "load_worker_settings",
        "plain_records",
    ]
    assert all(getattr(consumer_sdk, name) for name in consumer_sdk.__all__)


def test_every_attribute_is_read() -> None:
    application = [("b", b"\xff"), ("a", b""), ("b", b"2")]
    message = Message.from_record(Record([*(REQUIRED | OPTIONAL).items(), *application]))
    assert message == Message(
        topic="orders",
        partition=3,
        offset=99,
        event_id="01a2",
        type="order.placed",
        schema_version=1,
        source="shop",
        time=datetime(2026, 3, 1, 12, 30, 0, 123456, UTC),
        sequence=42,
        tenant_id="acme",
        run_id="run-1",
        step="charge",
        operation="card",
        fencing_token=7,
        content_type="application/json",
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        tracestate="vendor=1",
        key=b"o-1",
        payload=b'{"a":[]}',
        headers=(("b", b"\xff"), ("a", b""), ("b", b"2")),
        value=None,
    )
    assert message.json() == {"a": []}


def test_an_absent_attribute_is_none_and_an_absent_time_is_the_records() -> None:
    message = read()
    absent = ("sequence", "tenant_id", "run_id", "step", "operation", "fencing_token", "content_type", "traceparent")
    assert [getattr(message, name) for name in absent] == [None] * len(absent)
    assert message.time == datetime(2026, 3, 1, 12, 30, 0, 500_000, UTC)


def test_a_time_keeps_its_zone() -> None:
    east = timezone(timedelta(hours=2))
    assert read(ce_time=b"2026-03-01T14:30:00+02:00").time == datetime(2026, 3, 1, 14, 30, tzinfo=east)


@pytest.mark.parametrize("missing", REQUIRED)
def test_a_record_without_a_required_attribute_is_refused_by_its_name(missing: str) -> None:
    with pytest.raises(NotAMessage, match=rf"orders/3@99: .*without {missing}$"):
        read(without=missing)


def test_a_record_of_another_origin_is_refused_with_all_that_is_missing() -> None:
    with pytest.raises(NotAMessage, match="without ce_specversion, ce_id, ce_source, ce_type"):
        Message.from_record(Record([("content-type", b"application/cloudevents+json"), ("x", None)]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ce_specversion", b"0.3"),
        ("ce_id", b"\xff"),
        ("ce_time", b"yesterday"),
        ("ce_time", b"2026-03-01T12:30:00"),
        ("ce_sequence", b"-1"),
        ("ce_sequence", b""),
        ("ce_sequence", "\u0664".encode()),
        ("ce_sequence", b"9" * 5000),
        ("ce_fencingtoken", b"1.5"),
        ("ce_fencingtoken", b"-1"),
        ("ce_fencingtoken", b"%d" % 2**63),
        ("ce_sequence", b"%d" % 2**63),
        ("ce_time", b"0001-01-01T00:00:00+14:00"),
        ("ce_tenantid", b"\xff"),
        ("ce_tenantid", b""),
        ("ce_runid", b"r" * 257),
        ("ce_id", b"i" * 257),
        ("ce_id", b"a\0b"),
        ("ce_source", b"a\0b"),
        ("schema-version", b"0"),
        ("schema-version", b"2.1"),
        ("content-type", b"\xff"),
    ],
)
def test_an_attribute_that_cannot_be_read_is_refused_by_its_name(name: str, value: bytes) -> None:
    with pytest.raises(NotAMessage, match=name) as caught:
        read("", **{name: value})
    assert caught.value.__cause__ is None, "the cause would show the value"


def test_the_largest_numbers_and_names_are_read() -> None:
    headers: dict[str, Any] = {"ce_fencingtoken": b"%d" % (2**63 - 1), "ce_id": b"i" * 256, "schema-version": b"2"}
    message = read(**headers)
    assert (message.fencing_token, message.event_id, message.schema_version) == (2**63 - 1, "i" * 256, 2)


@pytest.mark.parametrize("name", ["ce_id", "ce_subject", "content-type", "schema-version"])
def test_an_attribute_with_two_values_is_refused_and_one_repeated_is_read(name: str) -> None:
    given: list[tuple[str, bytes | None]] = [*(REQUIRED | {name: b"1"}).items()]
    assert Message.from_record(Record([*given, (name, b"1"), (name, None)])).type == "order.placed"
    with pytest.raises(NotAMessage, match=rf"{name} is given twice"):
        Message.from_record(Record([*given, (name, b"2")]))


def test_of_trace_context_the_last_header_counts_and_the_attribute_stands_in() -> None:
    """Whoever passes a record on may add its own; the CloudEvents extension is what the producer wrote."""
    both: list[tuple[str, bytes | None]] = [*REQUIRED.items(), ("ce_traceparent", b"event"), ("ce_tracestate", b"a=1")]
    assert Message.from_record(Record(both)).traceparent == "event"
    message = Message.from_record(Record([*both, ("traceparent", b"first"), ("traceparent", b"last"), ("tracestate", b"\xff")]))
    assert (message.traceparent, message.tracestate) == ("last", "a=1")


def test_names_of_headers_are_case_sensitive() -> None:
    upper: list[tuple[str, bytes | None]] = [(name.upper(), value) for name, value in REQUIRED.items()]
    with pytest.raises(NotAMessage, match="without ce_specversion, ce_id, ce_source, ce_type"):
        Message.from_record(Record(upper))
    assert Message.from_record(Record([*REQUIRED.items(), ("CE_ID", b"other")])).event_id == "01a2"


def test_a_record_of_no_time_is_refused() -> None:
    with pytest.raises(NotAMessage, match="timestamp"):
        Message.from_record(Record(timestamp=2**62))


def test_a_refusal_is_permanent() -> None:
    assert issubclass(NotAMessage, PermanentError)


def test_a_header_of_the_application_without_value_is_left_out() -> None:
    assert Message.from_record(Record([*REQUIRED.items(), ("x", None), ("y", b"")])).headers == (("y", b""),)


@pytest.mark.parametrize("value", [None, b"", b"\xff\xfe", b"{secret"])
def test_a_payload_stays_as_it_is_and_only_json_reads_as_json(value: bytes | None) -> None:
    message = Message.from_record(Record(value=value))
    assert message.payload == value
    with pytest.raises(NotAMessage) as caught:
        message.json()
    assert "secret" not in "".join(traceback.format_exception(caught.value))


def test_key_payload_and_headers_are_not_shown() -> None:
    headers: list[tuple[str, Any]] = [*REQUIRED.items(), ("secret", b"secret")]
    assert "secret" not in repr(Message.from_record(Record(headers, key=b"secret", value=b"secret")))
