"""Every record is a message or is refused by its adapter, with a reason that quotes nothing of it; what is read is exact."""

import base64
import json
import traceback
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumer_sdk import Message, NotAMessage
from consumer_sdk.adapters import Adapter, cloud_events, debezium_outbox, plain_records
from fencepost.errors import ConfigurationError

STRUCTURED: Final = ("content-type", b"application/cloudevents+json")
TRACE: Final = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CORE: Final[dict[str, Any]] = {"specversion": "1.0", "id": "01a2", "source": "/shop", "type": "order.placed"}
SECRET: Final = "do-not-quote-me"

Headers = list[tuple[str, bytes | None]]


@dataclass(frozen=True)
class Record:
    """What aiokafka hands over."""

    value: bytes | None = b'{"a":1}'
    headers: Headers = field(default_factory=list)
    key: bytes | None = b"o-1"
    topic: str = "orders"
    partition: int = 3
    offset: int = 99
    timestamp: int = 1_772_368_200_500


def structured(text: str | bytes | None = None, *headers: tuple[str, bytes], **members: Any) -> Message[None]:
    """The message of an envelope: a text, or the core attributes with these members."""
    value = text.encode() if isinstance(text, str) else text if text is not None else json.dumps(CORE | members).encode()
    return cloud_events(Record(value, [STRUCTURED, *headers]))


def refusal(adapter: Adapter, record: Record) -> str:
    """The text of the refusal, after a look that it quotes nothing."""
    with pytest.raises(NotAMessage) as caught:
        adapter(record)
    shown = "".join(traceback.format_exception(caught.value))
    assert SECRET not in shown
    return str(caught.value)


# CloudEvents


def test_both_modes_make_the_same_message() -> None:
    extensions = {
        "time": "2026-03-01T12:30:00.123456Z", "sequence": "42", "tenantid": "acme", "runid": "run-1", "step": "charge",
        "operation": "card", "fencingtoken": str(2**63 - 1), "traceparent": TRACE, "tracestate": "vendor=1",
    }  # fmt: skip
    own: Headers = [("schema-version", b"3"), ("x", b"\xff")]
    headers: Headers = [(f"ce_{name}", text.encode()) for name, text in (CORE | extensions).items()]
    binary = cloud_events(Record(b'{"a":1}', [*headers, ("content-type", b"application/json"), *own]))
    envelope = json.dumps(CORE | extensions | {"datacontenttype": "application/json"})[:-1] + ', "data": {"a":1} }'
    assert cloud_events(Record(envelope.encode(), [STRUCTURED, *own])) == binary
    assert (binary.fencing_token, binary.schema_version, binary.traceparent) == (2**63 - 1, 3, TRACE)
    assert binary.headers == (("schema-version", b"3"), ("x", b"\xff"))


@pytest.mark.parametrize(
    "content_type",
    [
        b"application/cloudevents+json; charset=UTF-8",
        b'APPLICATION/CloudEvents+JSON;charset="utf-8"',
        b" application/cloudevents+json ;x=y",
        b"application/cloudevents+json;charset=us-ascii",
    ],
)
def test_the_content_type_says_structured_in_any_spelling(content_type: bytes) -> None:
    assert cloud_events(Record(json.dumps(CORE).encode(), [("content-type", content_type)])).event_id == "01a2"


@pytest.mark.parametrize(
    "content_type",
    [
        b"application/cloudevents-batch+json",
        b"application/cloudevents+avro",
        b"application/cloudevents",
        b"application/cloudevents+json; charset=utf-16",
        b"application/cloudevents+json\xff",
    ],
)
def test_other_event_formats_are_refused_also_with_the_headers_of_binary_mode(content_type: bytes) -> None:
    headers: Headers = [(f"ce_{name}", text.encode()) for name, text in CORE.items()]
    record = Record(json.dumps([CORE | {"data": SECRET}]).encode(), [*headers, ("content-type", content_type)])
    assert "orders/3@99: a CloudEvent of a format that is not read" in refusal(cloud_events, record)


def test_in_structured_mode_the_envelope_is_the_event_and_the_key_the_records() -> None:
    message = structured(None, ("ce_id", b"another"), ("traceparent", b"hop"), ("x", b"1"), traceparent=TRACE, partitionkey="p")
    assert (message.event_id, message.key, message.traceparent, message.headers) == ("01a2", b"o-1", "hop", (("x", b"1"),))


@pytest.mark.parametrize(
    ("members", "payload", "content_type"),
    [
        ('"data":{"a": [1,  2.50] }', b'{"a": [1,  2.50] }', "application/json"),
        ('"data":null', b"null", "application/json"),
        ('"data":"text"', b'"text"', "application/json"),
        ('"data":123456789012345678901234567890.10', b"123456789012345678901234567890.10", "application/json"),
        ('"data":{"big":' + "9" * 5000 + "}", b'{"big":' + b"9" * 5000 + b"}", "application/json"),
        ('"data":"x","datacontenttype":null', b'"x"', "application/json"),
        ('"datacontenttype":"application/vnd.a+json; v=1","data":[ ]', b"[ ]", "application/vnd.a+json; v=1"),
        ('"datacontenttype":"text/xml","data":"<gr\\u00f6\\u00dfe/>"', "<größe/>".encode(), "text/xml"),
        ('"data_base64":"//4=","datacontenttype":"a/b"', b"\xff\xfe", "a/b"),
        ('"data_base64":""', b"", None),
        ('"subject":"s"', None, None),
    ],
)
def test_data_is_passed_on_as_it_was_written(members: str, payload: bytes | None, content_type: str | None) -> None:
    message = structured(json.dumps(CORE)[:-1] + "," + members + "}")
    assert (message.payload, message.content_type) == (payload, content_type)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "without a value"),
        (b"", "not one JSON object"),
        (b"\xff" + SECRET.encode(), "not one JSON object"),
        (b"[]", "not one JSON object"),
        (b'"' + SECRET.encode() + b'"', "not one JSON object"),
        (b"{}{}", "not one JSON object"),
        (b'{"id":"a","id":"' + SECRET.encode() + b'"}', "not one JSON object"),
        (b'{"id":NaN}', "not one JSON object"),
        (b'{"id":1,}', "not one JSON object"),
        (b'{"id" 1}', "not one JSON object"),
        (b'{1:"a"}', "not one JSON object"),
        (b"[" * 100_000, "not one JSON object"),
        (b'{"data":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not one JSON object"),
        (b'{"data":' + b'{"a":' * 100_000, "not one JSON object"),
        (b"{}", "not a CloudEvent in structured mode, without ce_specversion, ce_id, ce_source, ce_type"),
    ],
)
def test_an_envelope_that_is_none_is_refused(value: bytes | None, reason: str) -> None:
    assert reason in refusal(cloud_events, Record(value, [STRUCTURED]))


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"specversion": "0.3"}, "ce_specversion is not 1.0"),
        ({"specversion": 1.0}, "specversion is neither"),
        ({"id": None}, "without ce_id"),
        ({"id": ""}, "without ce_id"),
        ({"id": {"a": SECRET}}, "the attribute id is neither"),
        ({"source": [SECRET]}, "the attribute source is neither"),
        ({"type": True}, "the attribute type is neither"),
        ({"id": "\ud800" + SECRET}, "the attribute id is neither"),
        ({"time": SECRET}, "ce_time cannot be read"),
        ({"time": "2026-03-01T12:30:00"}, "ce_time cannot be read"),
        ({"fencingtoken": 2**63}, "ce_fencingtoken cannot be read"),
        ({"fencingtoken": -1}, "ce_fencingtoken cannot be read"),
        ({"fencingtoken": 1.5}, "fencingtoken is neither"),
        ({"sequence": "9" * 5000}, "ce_sequence cannot be read"),
        ({"tenantid": "a\0b"}, "ce_tenantid cannot be read"),
        ({"datacontenttype": 1.5}, "datacontenttype is neither"),
        ({"data": SECRET, "data_base64": ""}, "both data and data_base64"),
        ({"data_base64": SECRET}, "data of the CloudEvent cannot be read"),
        ({"data_base64": {"a": 1}}, "data of the CloudEvent cannot be read"),
        ({"datacontenttype": "text/plain", "data": {SECRET: 1}}, "data of the CloudEvent cannot be read"),
        ({"datacontenttype": "text/plain", "data": 5}, "data of the CloudEvent cannot be read"),
        ({"datacontenttype": "text/plain;charset=latin-1", "data": SECRET}, "data of the CloudEvent cannot be read"),
    ],
)
def test_a_member_that_cannot_be_read_is_refused_by_its_name(members: dict[str, Any], reason: str) -> None:
    assert reason in refusal(cloud_events, Record(json.dumps(CORE | members).encode(), [STRUCTURED]))


def test_numbers_are_read_as_numbers_or_text_and_null_is_absent() -> None:
    message = structured(sequence=7, fencingtoken="8", tenantid=9, runid=None, unknown={"any": [1.5]})
    assert (message.sequence, message.fencing_token, message.tenant_id, message.run_id) == (7, 8, "9", None)


def test_nanoseconds_are_cut_to_microseconds() -> None:
    assert structured(time="2026-03-01T12:30:00.123456789Z").time == datetime(2026, 3, 1, 12, 30, 0, 123456, UTC)


# Debezium

EVENT_ID: Final = "4d47e190-0402-4048-bc2c-89dd54343cdc"


def enveloped(kind: str, payload: Any) -> bytes:
    """As Connect's JsonConverter writes with schemas.enable."""
    return json.dumps({"schema": {"type": kind, "optional": False}, "payload": payload}).encode()


def routed(value: bytes | None = b'{"id": 1}', **headers: bytes) -> Record:
    return Record(value, list(({"id": EVENT_ID.encode(), "eventType": b"OrderCreated"} | headers).items()))


@pytest.mark.parametrize("wrap", [str.encode, lambda text: json.dumps(text).encode(), lambda text: enveloped("string", text)])
def test_a_routed_event_is_read_with_the_headers_of_each_converter(wrap: Any) -> None:
    record = routed(id=wrap(EVENT_ID), eventType=wrap("OrderCreated"), ce_tenantid=wrap("acme"), x=b"1", traceparent=TRACE.encode())
    message = debezium_outbox()(record)
    assert (message.event_id, message.type, message.source, message.key) == (EVENT_ID, "OrderCreated", "orders", b"o-1")
    assert (message.tenant_id, message.traceparent, message.content_type) == ("acme", TRACE, "application/json")
    assert message.time == datetime(2026, 3, 1, 12, 30, 0, 500_000, UTC)
    assert dict(message.headers)["x"] == b"1"


@pytest.mark.parametrize(
    ("value", "payload"),
    [
        (b'{"id": 1}', b'{"id": 1}'),
        (json.dumps('{"id": 1}').encode(), b'{"id": 1}'),
        (enveloped("string", '{"id": 1}'), b'{"id": 1}'),
        (b'{"schema":null,"payload":{"id": 1.10}}', b'{"id": 1.10}'),
        (enveloped("struct", {"id": 1}), b'{"id": 1}'),
        (enveloped("int32", 5), b"5"),
        (enveloped("bytes", base64.b64encode(b"\0\xff").decode()), b"\0\xff"),
        (enveloped("string", None), None),
        (b'{"schema":"s","payload":1}', b'{"schema":"s","payload":1}'),
        (b'{"schema":{},"payload":1}', b'{"schema":{},"payload":1}'),
        (b'{"schema":{"type":"string"},"payload":1,"more":2}', b'{"schema":{"type":"string"},"payload":1,"more":2}'),
        (b'"\xff not JSON', b'"\xff not JSON'),
        (b"\0\0\0\0\x05", b"\0\0\0\0\x05"),
        (b"", b""),
        (None, None),
        (b'{"schema":' + b"[" * 100_000, b'{"schema":' + b"[" * 100_000),
    ],
)
def test_the_payload_column_is_unwrapped_from_what_the_converter_made_of_it(value: bytes | None, payload: bytes | None) -> None:
    assert debezium_outbox()(routed(value)).payload == payload
    assert debezium_outbox(unwrap=False)(routed(value)).payload == value


def test_type_source_version_and_media_type_can_be_set_for_the_topic() -> None:
    adapter = debezium_outbox(type="order", source="/shop", schema_version=2, content_type=None)
    message = adapter(Record(headers=[("id", b"1")]))
    assert (message.type, message.source, message.schema_version, message.content_type) == ("order", "/shop", 2, None)
    assert debezium_outbox(schema_version=2)(routed(**{"schema-version": b"3"})).schema_version == 3
    assert debezium_outbox(type_header="type")(routed(type=b"t")).type == "t"


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ([], "without the header id; the topic is not one of Debezium's"),
        ([("ID", b"1")], "without the header id"),
        ([("id", b"1")], "without the header eventType; place its column there"),
        ([("id", b""), ("eventType", b"t")], "the header id is empty"),
        ([("id", None), ("eventType", b"t")], "without the header id"),
        ([("id", b"1"), ("id", SECRET.encode()), ("eventType", b"t")], "id is given twice"),
        ([("id", b"1"), ("eventType", b"t"), ("eventType", SECRET.encode())], "eventType is given twice"),
        ([("id", b"\xff"), ("eventType", b"t")], "ce_id cannot be read"),
        ([("id", b"1" * 257), ("eventType", b"t")], "ce_id cannot be read"),
    ],
)
def test_a_record_that_the_router_did_not_write_is_refused(headers: Headers, reason: str) -> None:
    assert reason in refusal(debezium_outbox(), Record(SECRET.encode(), headers))


# Plain records


def test_a_plain_record_is_known_by_its_coordinates_alone() -> None:
    record = Record(
        b"\xff", [("x", b"1"), ("ce_id", b"a"), ("ce_id", b"b"), ("traceparent", b"t"), ("content-type", b"\xff")], key=None
    )
    message = plain_records(type="click", schema_version=2, content_type="text/csv")(record)
    assert (message.event_id, message.type, message.schema_version, message.source) == ("", "click", 2, "orders")
    assert (message.topic, message.partition, message.offset, message.key) == ("orders", 3, 99, None)
    assert (message.payload, message.content_type, message.traceparent) == (b"\xff", "text/csv", "t")
    assert (message.headers, message.sequence, message.run_id) == ((("x", b"1"),), None, None)
    assert plain_records(type="click", source="/web")(Record(None)).payload is None


@pytest.mark.parametrize(
    "arguments",
    [{"type": ""}, {"type": "t" * 257}, {"type": "a\0"}, {"type": "t", "source": ""}, {"type": "t", "schema_version": 0}],
)
def test_constants_that_no_message_could_carry_are_refused_when_the_topic_is_set_up(arguments: dict[str, Any]) -> None:
    for make in (plain_records, debezium_outbox):
        with pytest.raises(ConfigurationError, match=list(arguments)[-1]):
            make(**arguments)


# All of them

_NAMES = st.sampled_from(
    [
        "ce_specversion", "ce_id", "ce_source", "ce_type", "ce_time", "ce_sequence", "ce_fencingtoken", "ce_runid", "ce_x",
        "content-type", "schema-version", "traceparent", "tracestate", "id", "eventType", "CE_ID",
    ]
) | st.text(max_size=5)  # fmt: skip
_TEXTS = st.sampled_from(
    ["1.0", "1", "-1", "9" * 20, "application/cloudevents+json", "application/json", "2026-01-01T00:00:00Z", '"a"', '{"schema":{}}']
) | st.text(max_size=9)  # fmt: skip
_BYTES = st.none() | st.binary(max_size=9) | _TEXTS.map(lambda text: text.encode(errors="replace"))
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
_MEMBERS = st.sampled_from(
    [*CORE, "time", "sequence", "fencingtoken", "data", "data_base64", "datacontenttype", "schema", "payload"]
)
_ENVELOPES = st.builds(
    lambda base, more, cut: json.dumps(base | more).encode()[:cut],
    st.sampled_from([CORE, {}]),
    st.dictionaries(_MEMBERS | st.text(max_size=3), _JSON, max_size=4),
    st.none() | st.integers(0, 200),
)
_WHOLE: Final[Headers] = [(f"ce_{name}", text.encode()) for name, text in CORE.items()]
_HEADERS = st.builds(
    lambda base, more: [*base, *more], st.sampled_from([[], _WHOLE, [STRUCTURED]]), st.lists(st.tuples(_NAMES, _BYTES), max_size=5)
)
_RECORDS = st.builds(
    Record,
    value=_BYTES | _ENVELOPES,
    headers=_HEADERS,
    key=_BYTES,
    timestamp=st.integers(-1, 2**63 - 1) | st.just(1_772_368_200_500),
)


@given(record=_RECORDS)
def test_any_record_is_a_message_or_is_refused(record: Record) -> None:
    for adapter in (cloud_events, debezium_outbox(), debezium_outbox(type="t"), plain_records(type="t")):
        try:
            message = adapter(record)
        except NotAMessage:
            continue
        assert (message.topic, message.partition, message.offset, message.key) == ("orders", 3, 99, record.key)
        assert message.type
        assert message.time.astimezone(UTC) == message.time
        assert "\0" not in message.event_id + (message.run_id or "") + (message.traceparent or "")


@given(data=_JSON)
def test_any_data_arrives_in_structured_mode_as_json_says_it(data: Any) -> None:
    text = json.dumps(data)
    if "NaN" in text or "Infinity" in text:
        return
    assert structured(json.dumps(CORE)[:-1] + f',"data":{text}}}').payload == text.encode()
