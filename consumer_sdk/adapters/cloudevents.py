"""CloudEvents 1.0 in both content modes of the Kafka protocol binding 1.0.2; the JSON event format is the one that is read.

The content type decides: ``application/cloudevents+json`` is structured, anything outside ``application/cloudevents`` is
binary, every other event format is refused, batches among them. In structured mode the envelope is the event: headers named
``ce_`` are copies and not looked at, while the application's headers and trace context are read in both modes. In both, an
event without data has the payload None. Attributes that Fencepost has no name for, ``subject`` too, are left out.
"""

import base64
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from consumer_sdk.adapters.json_members import Member, json_members
from consumer_sdk.message import CE_PREFIX, Message, NotAMessage, Record, header_values, place, read_message, require
from fencepost.wire import (
    CE_FENCING_TOKEN,
    CE_ID,
    CE_OPERATION,
    CE_RUN_ID,
    CE_SEQUENCE,
    CE_SOURCE,
    CE_SPEC_VERSION,
    CE_STEP,
    CE_TENANT_ID,
    CE_TIME,
    CE_TYPE,
    CONTENT_TYPE,
    TRACEPARENT,
    TRACESTATE,
)

__all__ = ["cloud_events"]

_ANY_FORMAT: Final = "application/cloudevents"
_JSON_FORMAT: Final = "application/cloudevents+json"
_JSON: Final = b"application/json"
_DATA: Final = "data"
_BASE64: Final = "data_base64"
_MEDIA_TYPE: Final = "datacontenttype"
_HEADERS: Final = (
    CE_SPEC_VERSION, CE_ID, CE_SOURCE, CE_TYPE, CE_TIME, CE_SEQUENCE, CE_TENANT_ID, CE_RUN_ID, CE_STEP, CE_OPERATION,
    CE_FENCING_TOKEN, CE_PREFIX + TRACEPARENT, CE_PREFIX + TRACESTATE,
)  # fmt: skip
_READ: Final = {header.removeprefix(CE_PREFIX): header for header in _HEADERS} | {_MEDIA_TYPE: CONTENT_TYPE}
_UTF_8: Final = ("utf-8", "utf8", "us-ascii")


def cloud_events(record: Record) -> Message[None]:
    """Read a CloudEvent in either mode. Raises ``NotAMessage`` for any other record."""
    values = header_values(record)
    form, charset = _media_type(values.get(CONTENT_TYPE, b""))
    if not form.startswith(_ANY_FORMAT):
        require(record, values, mode="binary")
        return read_message(record, values, payload=record.value)
    if form != _JSON_FORMAT or charset not in _UTF_8:
        raise NotAMessage(f"{place(record)}: a CloudEvent of a format that is not read; {_JSON_FORMAT} in UTF-8 is")
    return _structured(record, values)


def _structured(record: Record, headers: Mapping[str, bytes]) -> Message[None]:
    members = _envelope(record)
    around = {name: value for name, value in headers.items() if name != CONTENT_TYPE and not name.startswith(CE_PREFIX)}
    values = around | _attributes(record, members)
    require(record, values, mode="structured")
    payload = _payload(record, members)
    return read_message(record, values, payload=payload)


def _envelope(record: Record) -> dict[str, Member]:
    if record.value is None:
        raise NotAMessage(f"{place(record)}: a CloudEvent in structured mode without a value")
    try:
        return json_members(record.value)
    except ValueError:
        # Without its cause: that error carries the whole value.
        raise NotAMessage(f"{place(record)}: a CloudEvent in structured mode whose value is not one JSON object") from None


def _attributes(record: Record, members: Mapping[str, Member]) -> dict[str, bytes]:
    """The attributes by the names that they have as headers. A null is an absent one (JSON event format 1.0.2, section 2.2)."""
    values = {
        header: _text(record, name, members[name])
        for name, header in _READ.items()
        if name in members and members[name].value is not None
    }
    if _DATA in members:
        values.setdefault(CONTENT_TYPE, _JSON)
    return values


def _text(record: Record, name: str, member: Member) -> bytes:
    try:
        return str.encode(member.value)
    except (TypeError, ValueError):
        raise NotAMessage(f"{place(record)}: the attribute {name} is neither text nor a whole number") from None


def _payload(record: Record, members: Mapping[str, Member]) -> bytes | None:
    if _DATA in members and _BASE64 in members:
        raise NotAMessage(f"{place(record)}: a CloudEvent with both {_DATA} and {_BASE64}")
    try:
        if _BASE64 in members:
            return base64.b64decode(members[_BASE64].value, validate=True)
        return _data(members) if _DATA in members else None
    except (TypeError, ValueError):
        raise NotAMessage(f"{place(record)}: the data of the CloudEvent cannot be read as what it says it is") from None


def _data(members: Mapping[str, Member]) -> bytes:
    """JSON as it stands, any other type from the text that holds it (JSON event format 1.0.2, section 3.1)."""
    data = members[_DATA]
    declared = members.get(_MEDIA_TYPE)
    form, charset = _media_type(_JSON if declared is None or declared.value is None else str.encode(declared.value))
    if form.endswith(("/json", "+json")):
        return data.text.encode()
    if not isinstance(data.value, str) or data.text[:1] != '"' or charset not in _UTF_8:
        raise ValueError("not text in UTF-8")
    return data.value.encode()


@lru_cache(maxsize=256)
def _media_type(header: bytes) -> tuple[str, str]:
    """Type and charset, both in lower case; the charset is UTF-8 where none is given."""
    form, *parameters = header.decode(errors="replace").lower().split(";")
    named = (parameter.strip().partition("=") for parameter in parameters)
    charset = next((value.strip('"') for name, _, value in named if name == "charset"), _UTF_8[0])
    return form.strip(), charset
