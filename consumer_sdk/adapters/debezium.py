"""Topics that Debezium's outbox event router fills (``io.debezium.transforms.outbox.EventRouter``).

By https://debezium.io/documentation/reference/stable/transformations/outbox-event-router.html the router writes the aggregate
id as the key, the event id as the header ``id``, the payload column as the value, and the aggregate type into the topic's name
(``route.topic.replacement``). The type of the event is in no default header: the connector adds it, for example by
``table.fields.additional.placement=type:header:eventType``.

Kafka Connect's converters decide how a text looks: header values are plain text (``SimpleHeaderConverter``, the default), or
JSON texts, or a JSON object of ``schema`` and ``payload`` (``JsonConverter``). All three are read alike, in headers and value.
"""

import base64
from collections.abc import Mapping
from typing import Final

from consumer_sdk.adapters.adapter import Adapter, check_name, check_schema_version
from consumer_sdk.adapters.json_members import Member, json_members, json_value
from consumer_sdk.message import Message, NotAMessage, Record, header_values, place, read_message
from fencepost.wire import (
    CE_FENCING_TOKEN,
    CE_ID,
    CE_OPERATION,
    CE_RUN_ID,
    CE_SOURCE,
    CE_STEP,
    CE_TENANT_ID,
    CE_TYPE,
    CONTENT_TYPE,
    SCHEMA_VERSION,
    TRACEPARENT,
    TRACESTATE,
)

__all__ = ["debezium_outbox"]

_EVENT_ID: Final = "id"
_ENVELOPE: Final = {"schema", "payload"}
# Columns may be placed under these names too; other attributes are the router's or the application's to say.
_PLACED: Final = (
    CE_TENANT_ID, CE_RUN_ID, CE_STEP, CE_OPERATION, CE_FENCING_TOKEN, SCHEMA_VERSION, TRACEPARENT, TRACESTATE,
)  # fmt: skip


def debezium_outbox(
    *,
    type: str | None = None,  # noqa: A002 - the attribute's name everywhere else
    type_header: str = "eventType",
    source: str | None = None,
    schema_version: int = 1,
    content_type: str | None = "application/json",
    unwrap: bool = True,
) -> Adapter:
    """Return an adapter for such topics.

    The event's type is ``type``, or the value of the header ``type_header`` where that is None. ``source`` defaults to the
    topic, ``schema_version`` to the header of that name, else to this one. With ``unwrap``, a value that is one JSON text, or a
    JSON object of just ``schema`` and ``payload``, gives its content as the payload, byte for byte; any other value, and every
    value without ``unwrap``, is the payload as it is (``BinaryDataConverter``, Avro).
    """
    for field, text in (("type", type), ("type_header", type_header), ("source", source), ("content_type", content_type)):
        check_name(field, text)
    check_schema_version(schema_version)
    constants = {SCHEMA_VERSION: b"%d" % schema_version}
    if content_type is not None:
        constants[CONTENT_TYPE] = content_type.encode()

    def debezium(record: Record) -> Message[None]:
        headers = header_values(record, identifying=(_EVENT_ID, type_header))
        named = {
            CE_ID: _header(record, headers, _EVENT_ID),
            CE_TYPE: _header(record, headers, type_header) if type is None else type.encode(),
            CE_SOURCE: (source or record.topic).encode(),
        }
        placed = {name: _header(record, headers, name) for name in _PLACED if name in headers}
        payload = _unwrapped(record.value) if unwrap else record.value
        return read_message(record, constants | placed | named, payload=payload)

    return debezium


def _header(record: Record, headers: Mapping[str, bytes], name: str) -> bytes:
    if name not in headers:
        remedy = "the topic is not one of Debezium's outbox event router" if name == _EVENT_ID else "place its column there"
        raise NotAMessage(f"{place(record)}: without the header {name}; {remedy}")
    text = _unwrapped(headers[name])
    if not text:
        raise NotAMessage(f"{place(record)}: the header {name} is empty")
    return text


def _unwrapped(value: bytes | None) -> bytes | None:
    """What a converter wrapped: the content of a JSON text, or of a JSON object of schema and payload."""
    if value is None:
        return None
    try:
        if value.startswith(b'"'):
            return str.encode(json_value(value))
        return _content(json_members(value), otherwise=value) if value.startswith(b"{") else value
    except ValueError:
        return value


def _content(members: Mapping[str, Member], *, otherwise: bytes) -> bytes | None:
    if members.keys() != _ENVELOPE:
        return otherwise
    schema, payload = members["schema"].value, members["payload"]
    if schema is not None and not (isinstance(schema, dict) and "type" in schema):
        return otherwise
    if payload.value is None:
        return None
    if not payload.text.startswith('"'):
        return payload.text.encode()
    in_base64 = schema is not None and schema["type"] == "bytes"
    return base64.b64decode(payload.value, validate=True) if in_base64 else str.encode(payload.value)
