"""Builds records as aiokafka hands them over, and messages as handlers get them, without a broker."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, TypedDict, TypeVar, Unpack

from uuid_utils.compat import uuid7

from consumer_sdk.encoding import encoded
from consumer_sdk.message import Message
from fencepost import wire

__all__ = ["BuiltRecord", "EventOptions", "event", "message", "record"]

Value = TypeVar("Value")

_TOPIC: Final = "events"
_KEY: Final = "key-1"
_TENANT: Final = "acme"
_SOURCE: Final = "test"
_JSON: Final = "application/json"

_offsets = itertools.count()
_sequences = itertools.count(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltRecord:
    """What aiokafka's ``ConsumerRecord`` has, by the same names. ``timestamp`` is in Unix milliseconds."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None = field(repr=False)
    value: bytes | None = field(repr=False)
    headers: Sequence[tuple[str, bytes | None]] = field(repr=False)
    timestamp_type: int = 0
    checksum: int | None = None

    @property
    def serialized_key_size(self) -> int:
        """The bytes of the key, -1 without one."""
        return -1 if self.key is None else len(self.key)

    @property
    def serialized_value_size(self) -> int:
        """The bytes of the value, -1 of a tombstone."""
        return -1 if self.value is None else len(self.value)


class EventOptions(TypedDict, total=False):
    """What an event may say; None leaves an attribute out.

    By default each has an id, a time, a sequence and an offset of its own, and shares topic ``events``, partition 0, key ``key-1``,
    tenant ``acme`` and source ``test`` with all others. ``headers`` are the application's own.
    """

    topic: str
    partition: int
    offset: int
    key: str | bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    event_id: str
    source: str
    time: datetime
    sequence: int | None
    schema_version: int | None
    content_type: str | None
    tenant_id: str | None
    run_id: str | None
    step: str | None
    operation: str | None
    fencing_token: int | None
    traceparent: str | None
    tracestate: str | None


def record(
    value: bytes | None = None,
    *,
    headers: Sequence[tuple[str, bytes | None]] = (),
    key: str | bytes | None = _KEY,
    topic: str = _TOPIC,
    partition: int = 0,
    offset: int | None = None,
    timestamp: int | None = None,
) -> BuiltRecord:
    """Any record, a foreign or broken one as well. Without ``offset`` it comes after all that were built before, and without
    ``timestamp`` it was written now."""
    return BuiltRecord(
        topic=topic,
        partition=partition,
        offset=next(_offsets) if offset is None else offset,
        timestamp=_milliseconds(datetime.now(UTC)) if timestamp is None else timestamp,
        key=key.encode() if isinstance(key, str) else key,
        value=value,
        headers=tuple(headers),
    )


def event(event_type: str, value: object = None, **options: Unpack[EventOptions]) -> BuiltRecord:
    """A record in the wire format, as the relay publishes it.

    ``value`` is a pydantic model or what JSON can hold; ``bytes`` are the payload as they are, and None is a tombstone.
    """
    moment = options.get("time") or datetime.now(UTC)
    payload = value if value is None or isinstance(value, bytes) else encoded("value", value, most=wire.MAX_PAYLOAD_BYTES)
    return record(
        payload,
        headers=(*_attributes(event_type, moment, options), *options.get("headers", ())),
        key=options.get("key", _KEY),
        topic=options.get("topic", _TOPIC),
        partition=options.get("partition", 0),
        offset=options.get("offset"),
        timestamp=_milliseconds(moment),
    )


def message(event_type: str, value: Value, **options: Unpack[EventOptions]) -> Message[Value]:
    """A message as a handler gets it: read from the record of that event, with ``value`` as its value."""
    return Message.from_record(event(event_type, value, **options)).with_value(value)


def _attributes(event_type: str, moment: datetime, options: EventOptions) -> Iterator[tuple[str, bytes]]:
    """In the relay's order; what is None is absent."""
    written: dict[str, Any] = {
        wire.CE_SPEC_VERSION: wire.SPEC_VERSION,
        wire.CE_ID: options.get("event_id") or str(uuid7()),
        wire.CE_SOURCE: options.get("source", _SOURCE),
        wire.CE_TYPE: event_type,
        wire.CE_TIME: moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        wire.CE_SEQUENCE: options.get("sequence", next(_sequences)),
        wire.CONTENT_TYPE: options.get("content_type", _JSON),
        wire.CE_TENANT_ID: options.get("tenant_id", _TENANT),
        wire.CE_RUN_ID: options.get("run_id"),
        wire.CE_STEP: options.get("step"),
        wire.CE_OPERATION: options.get("operation"),
        wire.TRACEPARENT: options.get("traceparent"),
        wire.TRACESTATE: options.get("tracestate"),
        wire.CE_FENCING_TOKEN: options.get("fencing_token"),
        wire.SCHEMA_VERSION: options.get("schema_version"),
    }
    return ((name, str(value).encode()) for name, value in written.items() if value is not None)


def _milliseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)
