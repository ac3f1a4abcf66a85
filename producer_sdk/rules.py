"""Why an event may not be written: the rules of the SQL function ``fencepost.refusal``, told before any statement.

Whatever passes here passes there. Two rules have no match there because no driver could send such text at all: NUL
characters, and text that UTF-8 cannot encode. No message quotes a value.
"""

import re
from collections.abc import Sequence
from typing import Any, Final, Protocol
from uuid import UUID

from fencepost.errors import InvalidEvent
from fencepost.wire import (
    MAX_ATTRIBUTE_BYTES,
    MAX_EVENTS_PER_CALL,
    MAX_HEADER_NAME_BYTES,
    MAX_HEADERS,
    MAX_HEADERS_BYTES,
    MAX_KEY_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_TOPIC_CHARACTERS,
    MAX_TRACESTATE_BYTES,
    RESERVED_HEADER_PREFIXES,
    RESERVED_HEADERS,
)

__all__ = ["check_count", "check_event", "check_optional_text", "check_text", "check_topic", "key_bytes"]

_TOPIC: Final = re.compile(rf"[a-zA-Z0-9._-]{{1,{MAX_TOPIC_CHARACTERS}}}")
_DOTS: Final = frozenset({".", ".."})
_MAX_FENCING_TOKEN: Final = 2**63 - 1
_TEXT_REMEDY: Final = "pass text without NUL characters and lone surrogates"
_ATTRIBUTES_BEFORE_TOKEN: Final = ("source", "content_type", "tenant_id", "run_id", "step", "operation")


class Draft(Protocol):
    """An event whose fields nobody has looked at yet."""

    @property
    def topic(self) -> Any: ...
    @property
    def type(self) -> Any: ...
    @property
    def key(self) -> Any: ...
    @property
    def payload(self) -> Any: ...
    @property
    def event_id(self) -> Any: ...
    @property
    def headers(self) -> Any: ...
    @property
    def fencing_token(self) -> Any: ...
    @property
    def traceparent(self) -> Any: ...
    @property
    def tracestate(self) -> Any: ...


def check_event(event: Draft) -> None:
    """Raise ``InvalidEvent`` for the first rule that the event breaks, in the order of the SQL function."""
    check_topic(event.topic)
    check_text("type", event.type)
    _check_key(event.key)
    _check_payload(event.payload, event.key)
    _check_event_id(event.event_id)
    for name in _ATTRIBUTES_BEFORE_TOKEN:
        check_optional_text(name, getattr(event, name))
    _check_fencing_token(event.fencing_token)
    check_optional_text("traceparent", event.traceparent)
    check_optional_text("tracestate", event.tracestate, most=MAX_TRACESTATE_BYTES)
    _check_headers(event.headers)


def check_count(events: Sequence[object]) -> None:
    """Raise ``InvalidEvent`` when one call cannot take so many events."""
    if len(events) > MAX_EVENTS_PER_CALL:
        raise InvalidEvent("events", f"{len(events)} in one call, may be {MAX_EVENTS_PER_CALL}", "enqueue them in several calls")


def key_bytes(key: bytes | str | None) -> bytes | None:
    """Return the key as bytes; raise ``InvalidEvent`` for text that UTF-8 cannot encode."""
    return _encoded("key", key) if isinstance(key, str) else key


def _encoded(field: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        # Without its cause: that error carries the whole text.
        raise InvalidEvent(field, "must be valid Unicode text", _TEXT_REMEDY) from None


def check_topic(topic: object) -> None:
    """Raise ``InvalidEvent`` for a name that no Kafka topic can have."""
    if not isinstance(topic, str) or not _TOPIC.fullmatch(topic) or topic in _DOTS:
        raise InvalidEvent(
            "topic",
            f'must be 1 to {MAX_TOPIC_CHARACTERS} characters of a-z A-Z 0-9 . _ - and not "." or ".."',
            "use the name of an existing Kafka topic",
        )


def _check_key(key: object) -> None:
    if key is None:
        return
    if not isinstance(key, bytes):
        raise InvalidEvent("key", "must be bytes, text or None", "encode it")
    if len(key) > MAX_KEY_BYTES:
        raise InvalidEvent("key", f"has {len(key)} bytes, may have {MAX_KEY_BYTES}", "use a hash of it")


def _check_payload(payload: object, key: object) -> None:
    if payload is None:
        if key is None:
            raise InvalidEvent("payload", "a tombstone (payload None) needs a key", "give the key to delete")
        return
    if not isinstance(payload, bytes):
        raise InvalidEvent("payload", "must be bytes or None", "encode it, or use Event.json")
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise InvalidEvent(
            "payload",
            f"has {len(payload)} bytes, may have {MAX_PAYLOAD_BYTES}",
            "store it elsewhere and enqueue a reference",
        )


def _check_event_id(event_id: object) -> None:
    if not isinstance(event_id, UUID):
        raise InvalidEvent("event_id", "must be a uuid.UUID", "leave it out to have one minted")


def check_optional_text(field: str, text: object, *, most: int = MAX_ATTRIBUTE_BYTES) -> None:
    """Raise ``InvalidEvent`` for what is neither None nor text of 1 to ``most`` bytes."""
    if text is not None:
        check_text(field, text, most=most, remedy="shorten it, or leave it out")


def check_text(field: str, text: object, *, most: int = MAX_ATTRIBUTE_BYTES, remedy: str = "give it a name of that size") -> None:
    """Raise ``InvalidEvent`` for what is not text of 1 to ``most`` bytes."""
    if not isinstance(text, str):
        raise InvalidEvent(field, "must be text", "pass a str")
    size = len(_encoded(field, text))
    if not 1 <= size <= most:
        raise InvalidEvent(field, f"has {size} bytes, must have 1 to {most}", remedy)
    if "\0" in text:
        raise InvalidEvent(field, "must hold no NUL character", _TEXT_REMEDY)


def _check_fencing_token(token: object) -> None:
    if token is None:
        return
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= _MAX_FENCING_TOKEN:
        raise InvalidEvent("fencing_token", "must be an integer from 0 to 2**63 - 1", "pass the token of the lease")


def _check_headers(headers: object) -> None:
    if not isinstance(headers, Sequence) or isinstance(headers, str | bytes):
        raise InvalidEvent("headers", "must be a sequence of (name, value) pairs", "pass list(headers.items())")
    if len(headers) > MAX_HEADERS:
        raise InvalidEvent("headers", f"has {len(headers)}, may have {MAX_HEADERS}", "put the rest into the payload")
    total = sum(_checked_header_bytes(place, header) for place, header in enumerate(headers))
    if total > MAX_HEADERS_BYTES:
        raise InvalidEvent(
            "headers",
            f"names and values together have {total} bytes, may have {MAX_HEADERS_BYTES}",
            "put the rest into the payload",
        )


def _checked_header_bytes(place: int, header: object) -> int:
    if not isinstance(header, tuple) or len(header) != 2 or not isinstance(header[1], bytes):
        raise InvalidEvent("headers", f"header {place} must be a pair of text and bytes", "encode the value")
    name, value = header
    _check_header_name(place, name)
    return len(name.encode()) + len(value)


def _check_header_name(place: int, name: object) -> None:
    try:
        check_text("headers", name, most=MAX_HEADER_NAME_BYTES, remedy="use a name of that size")
    except InvalidEvent as error:
        raise InvalidEvent("headers", f"the name of header {place} {error.limit}", error.remedy) from None
    lowered = str(name).lower()
    if lowered in RESERVED_HEADERS or lowered.startswith(RESERVED_HEADER_PREFIXES):
        raise InvalidEvent(
            "headers",
            f"the name of header {place} is reserved, as are all that begin with ce_ or fencepost-, and content-type, "
            "traceparent and tracestate",
            "use the argument of that name, or another name",
        )
