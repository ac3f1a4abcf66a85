"""A message as a handler sees it, read from a Kafka record in the wire format of ``fencepost.wire``."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Protocol, TypeVar

from fencepost.errors import PermanentError
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
    RESERVED_HEADER_PREFIXES,
    RESERVED_HEADERS,
    SPEC_VERSION,
    TRACEPARENT,
    TRACESTATE,
)

__all__ = ["Message", "NotAMessage", "Record"]

Value = TypeVar("Value")

_REQUIRED: Final = (CE_SPEC_VERSION, CE_ID, CE_SOURCE, CE_TYPE)


class NotAMessage(PermanentError):
    """The record is no CloudEvent in binary mode, or the payload is not what was asked for; the message says why.

    It names topic, partition and offset, and quotes neither key nor payload.
    """


class Record(Protocol):
    """What is read of a record; aiokafka's ``ConsumerRecord`` has it. ``timestamp`` is in Unix milliseconds."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> Sequence[tuple[str, bytes | None]]: ...
    @property
    def timestamp(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message. ``repr`` leaves out key, payload and headers.

    ``event_id`` stays the same when a message is repeated: handle each id once. ``sequence`` rises along a key, with
    gaps. ``time`` is when the row was written, with its zone. ``headers`` are the application's own, in order. A
    ``payload`` of None is a tombstone.
    """

    topic: str
    partition: int
    offset: int
    event_id: str
    type: str
    source: str
    time: datetime
    sequence: int | None
    tenant_id: str | None
    run_id: str | None
    step: str | None
    operation: str | None
    fencing_token: int | None
    content_type: str | None
    traceparent: str | None
    tracestate: str | None
    key: bytes | None = field(repr=False)
    payload: bytes | None = field(repr=False)
    headers: tuple[tuple[str, bytes], ...] = field(repr=False)

    @classmethod
    def from_record(cls, record: Record) -> "Message":
        """Read a record. Raises ``NotAMessage`` when a required attribute is missing or one cannot be read.

        A record without ``ce_time`` takes the record's timestamp, which is the same instant on Fencepost's topics.
        A header whose value is null is left out; the outbox holds none.
        """
        headers = [(name, value) for name, value in record.headers if value is not None]
        attributes = _Attributes(record, dict(headers))
        attributes.require()
        return cls(
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            event_id=attributes.required(CE_ID),
            type=attributes.required(CE_TYPE),
            source=attributes.required(CE_SOURCE),
            time=attributes.read(CE_TIME, _time) or datetime.fromtimestamp(record.timestamp / 1000, UTC),
            sequence=attributes.read(CE_SEQUENCE, _whole_number),
            tenant_id=attributes.read(CE_TENANT_ID, str),
            run_id=attributes.read(CE_RUN_ID, str),
            step=attributes.read(CE_STEP, str),
            operation=attributes.read(CE_OPERATION, str),
            fencing_token=attributes.read(CE_FENCING_TOKEN, _whole_number),
            content_type=attributes.read(CONTENT_TYPE, str),
            traceparent=attributes.read(TRACEPARENT, str),
            tracestate=attributes.read(TRACESTATE, str),
            key=record.key,
            payload=record.value,
            headers=tuple((name, value) for name, value in headers if not _is_reserved(name)),
        )

    def json(self) -> Any:
        """Return the payload read as JSON; raises ``NotAMessage`` when there is none or it is not JSON."""
        if self.payload is None:
            raise NotAMessage(f"{_place(self)}: no payload to read as JSON; the message is a tombstone")
        try:
            return json.loads(self.payload)
        except (ValueError, RecursionError):
            # Without its cause: that error carries the whole payload.
            raise NotAMessage(f"{_place(self)}: the payload is not JSON") from None


@dataclass(frozen=True)
class _Attributes:
    """A record's headers by name; of a repeated one, the last."""

    record: Record
    values: Mapping[str, bytes]

    def require(self) -> None:
        """Raise unless the record says that it is a CloudEvent of our version, and names itself."""
        missing = [name for name in _REQUIRED if not self.values.get(name)]
        if missing:
            raise NotAMessage(f"{_place(self.record)}: not a CloudEvent in binary mode, without {', '.join(missing)}")
        if self.required(CE_SPEC_VERSION) != SPEC_VERSION:
            raise NotAMessage(f"{_place(self.record)}: {CE_SPEC_VERSION} is not {SPEC_VERSION}")

    def required(self, name: str) -> str:
        """The text of an attribute that ``require`` found."""
        return self._parsed(name, self.values[name], str)

    def read(self, name: str, parse: Callable[[str], Value]) -> Value | None:
        """The attribute, or None when the record has none."""
        value = self.values.get(name)
        return None if value is None else self._parsed(name, value, parse)

    def _parsed(self, name: str, value: bytes, parse: Callable[[str], Value]) -> Value:
        try:
            return parse(value.decode())
        except ValueError as error:
            raise NotAMessage(f"{_place(self.record)}: the header {name} cannot be read") from error


def _time(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError("a time needs its zone")
    return moment


def _whole_number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError("a whole number has digits only")
    return int(text)


def _is_reserved(name: str) -> bool:
    lowered = name.lower()
    return lowered in RESERVED_HEADERS or lowered.startswith(RESERVED_HEADER_PREFIXES)


def _place(record: "Record | Message") -> str:
    return f"{record.topic}/{record.partition}@{record.offset}"
