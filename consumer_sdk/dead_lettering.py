"""The published copy of a dead letter: the original payload and headers, where it came from, and why it was given up.

The outbox bounds what it takes, and reserves names; the database keeps the whole. Each original header is a header
``original-NAME``, in order. What does not fit is left out, and ``dead-letter-omitted`` says so.
"""

import re
from collections.abc import Sequence
from typing import Final

from consumer_sdk.delivery import Dead, Delivery
from consumer_sdk.message_store import Copy
from fencepost.wire import (
    CONTENT_TYPE,
    MAX_ATTRIBUTE_BYTES,
    MAX_HEADER_NAME_BYTES,
    MAX_HEADERS,
    MAX_HEADERS_BYTES,
    MAX_KEY_BYTES,
    MAX_PAYLOAD_BYTES,
)

__all__ = ["copy_of"]

_PREFIX: Final = "original-"
_OMITTED: Final = "dead-letter-omitted"
_MOST_CONTENT_TYPE: Final = 256
_WRITABLE: Final = re.compile("[^\0\ud800-\udfff]+")


def copy_of(delivery: Delivery, dead: Dead, *, topic: str, consumer: str) -> Copy:
    """What is published to ``topic`` of a delivery that was given up."""
    record, message = delivery.record, delivery.message
    omitted: list[str] = []
    payload = record.value if record.value is not None and len(record.value) <= MAX_PAYLOAD_BYTES else b""
    if record.value is not None and len(record.value) > MAX_PAYLOAD_BYTES:
        omitted.append("payload")
    key = record.key if record.key is not None and len(record.key) <= MAX_KEY_BYTES else None
    if record.key is not None and key is None:
        omitted.append("key")
    told = [
        ("dead-letter-reason", dead.reason.encode()),
        ("dead-letter-error-class", dead.error_class.encode()),
        ("dead-letter-error-code", dead.error_code.encode()),
        ("dead-letter-consumer", consumer.encode()),
        ("dead-letter-step", delivery.identity.step.encode()),
        ("dead-letter-topic", record.topic.encode()),
        ("dead-letter-partition", str(record.partition).encode()),
        ("dead-letter-offset", str(record.offset).encode()),
        ("dead-letter-attempts", str(delivery.attempts).encode()),
    ]
    if record.value is None:
        told.append(("dead-letter-tombstone", b"true"))
    return Copy(
        topic=topic,
        key=key,
        payload=payload,
        headers=_fitting(told, record.headers, omitted),
        content_type=_content_type(record.headers),
        traceparent=None if message is None else _bounded(message.traceparent),
    )


def _fitting(
    told: list[tuple[str, bytes]], originals: Sequence[tuple[str, bytes | None]], omitted: list[str]
) -> Sequence[tuple[str, bytes]]:
    headers, room = list(told), MAX_HEADERS_BYTES - sum(len(name) + len(value) for name, value in told) - 100
    for name, value in originals:
        length = len(_PREFIX) + len(name.encode(errors="surrogateescape"))
        size = length + len(value or b"")
        fits = length <= MAX_HEADER_NAME_BYTES and _WRITABLE.fullmatch(name) and size <= room
        if value is None or not fits or len(headers) >= MAX_HEADERS - 1:
            if "headers" not in omitted:
                omitted.append("headers")
            continue
        headers.append((_PREFIX + name, value))
        room -= size
    return [*headers, (_OMITTED, ",".join(omitted).encode())] if omitted else headers


def _bounded(text: str | None) -> str | None:
    """Text that the outbox takes for an attribute, or None."""
    return text if text is not None and 1 <= len(text.encode()) <= MAX_ATTRIBUTE_BYTES else None


def _content_type(headers: Sequence[tuple[str, bytes | None]]) -> str | None:
    for name, value in headers:
        if (
            name == CONTENT_TYPE
            and value is not None
            and len(value) <= _MOST_CONTENT_TYPE
            and value.isascii()
            and b"\0" not in value
        ):
            return value.decode() or None
    return None
