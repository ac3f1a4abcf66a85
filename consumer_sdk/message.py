"""A message as a handler sees it, read from a Kafka record in the wire format of ``fencepost.wire``.

Other forms of a record become messages through ``consumer_sdk.adapters``, which read their attributes into the same
``Message`` by ``read_message``. Header names are case sensitive, as Kafka has them: ``CE_ID`` is no ``ce_id``.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final, Generic, Protocol, TypeVar

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
    MAX_ATTRIBUTE_BYTES,
    RESERVED_HEADER_PREFIXES,
    RESERVED_HEADERS,
    SCHEMA_VERSION,
    SPEC_VERSION,
    TRACEPARENT,
    TRACESTATE,
)

__all__ = ["Message", "NotAMessage", "Record"]

Value = TypeVar("Value")
Other = TypeVar("Other")

CE_PREFIX: Final = "ce_"

_REQUIRED: Final = (CE_SPEC_VERSION, CE_ID, CE_SOURCE, CE_TYPE)
_ONCE: Final = (CONTENT_TYPE, SCHEMA_VERSION)
_MAX_NUMBER: Final = 2**63 - 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class NotAMessage(PermanentError):
    """The record has not the form that its topic's adapter reads, or the payload is not what was asked for; it says why.

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
class Message(Generic[Value]):
    """One message. ``repr`` leaves out key, payload, value and headers.

    ``event_id`` stays the same when a message is repeated: handle each id once. It is empty where a foreign producer gave none:
    then coordinates are all there is. ``schema_version`` is that of the type's payload. ``sequence`` rises along a key, with
    gaps. ``time`` is when the row was written, with its zone. ``headers`` are the application's own, in order. A
    ``payload`` of None is a tombstone. ``value`` is what a consumer's handler gets: the payload as the handler's model.
    """

    topic: str
    partition: int
    offset: int
    event_id: str
    type: str
    schema_version: int
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
    value: Value = field(repr=False)

    @classmethod
    def from_record(cls, record: Record) -> "Message[None]":
        """Read a CloudEvent in binary mode. Raises ``NotAMessage`` when a required attribute is missing or one is unreadable.

        A record without ``ce_time`` takes the record's timestamp, which is the same instant on Fencepost's topics.
        A header whose value is null is left out; the outbox holds none.
        """
        values = header_values(record)
        require(record, values, mode="binary")
        return read_message(record, values, payload=record.value)

    def with_value(self, value: Other) -> "Message[Other]":
        """The same message with its payload's value."""
        message: Message[Other] = object.__new__(Message)
        for read, write in _CARRIED:  # a frozen dataclass's own way of writing costs twice as much
            write(message, read(self))
        _VALUE(message, value)
        return message

    def json(self) -> Any:
        """Return the payload read as JSON; raises ``NotAMessage`` when there is none or it is not JSON."""
        if self.payload is None:
            raise NotAMessage(f"{place(self)}: no payload to read as JSON; the message is a tombstone")
        try:
            return json.loads(self.payload)
        except (ValueError, RecursionError):
            # Without its cause: that error carries the whole payload.
            raise NotAMessage(f"{place(self)}: the payload is not JSON") from None


_SLOTS: Final[Mapping[str, Any]] = {one.name: getattr(Message, one.name) for one in fields(Message)}
_CARRIED: Final = tuple((slot.__get__, slot.__set__) for name, slot in _SLOTS.items() if name != "value")
_VALUE: Final = _SLOTS["value"].__set__


def fill(message: Message[None], value: object) -> None:
    """Give a message that nobody else has its value: ``with_value`` costs as much as reading half of a record."""
    _VALUE(message, value)


def header_values(record: Record, *, identifying: Collection[str] = ()) -> dict[str, bytes]:
    """The record's headers by name, those without value left out; of a repeated one, the last.

    Raises ``NotAMessage`` for an attribute, or one of ``identifying``, that is given two values: readers would differ about
    what the message is. Trace context is no part of that, and whoever passes a record on may add its own.
    """
    values: dict[str, bytes] = {}
    for name, value in record.headers:
        if value is None:
            continue
        if name in values and values[name] != value and (name.startswith(CE_PREFIX) or name in _ONCE or name in identifying):
            raise NotAMessage(f"{place(record)}: the header {name} is given twice, with different values")
        values[name] = value
    return values


def require(record: Record, values: Mapping[str, bytes], *, mode: str) -> None:
    """Raise ``NotAMessage`` unless the attributes say that this is a CloudEvent of our version, and name it."""
    missing = [name for name in _REQUIRED if not values.get(name)]
    if missing:
        raise NotAMessage(f"{place(record)}: not a CloudEvent in {mode} mode, without {', '.join(missing)}")
    if values[CE_SPEC_VERSION] != SPEC_VERSION.encode():
        raise NotAMessage(f"{place(record)}: {CE_SPEC_VERSION} is not {SPEC_VERSION}")


def read_message(record: Record, values: Mapping[str, bytes], *, payload: bytes | None) -> Message[None]:
    """The message of a record whose attributes are these, by the names that they have as headers in binary mode.

    Type and source are there; without an id, ``event_id`` is empty. Raises ``NotAMessage`` for one that cannot be read. An
    unreadable trace context is left out: no message is worth less for it.
    """

    def read(name: str, parse: Callable[[bytes], Value]) -> Value | None:
        value = values.get(name)
        if value is None:
            return None
        try:
            return parse(value)
        except (ValueError, OverflowError):
            # Without its cause: that error carries the value.
            raise NotAMessage(f"{place(record)}: the attribute {name} cannot be read") from None

    return Message(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        event_id=read(CE_ID, _name) or "",
        type=read(CE_TYPE, _known_name) or "",
        schema_version=read(SCHEMA_VERSION, _schema_version) or 1,
        source=read(CE_SOURCE, _text) or "",
        time=read(CE_TIME, _time) or _recorded(record),
        sequence=read(CE_SEQUENCE, _whole_number),
        tenant_id=read(CE_TENANT_ID, _known_name),
        run_id=read(CE_RUN_ID, _name),
        step=read(CE_STEP, _known_name),
        operation=read(CE_OPERATION, _known_name),
        fencing_token=read(CE_FENCING_TOKEN, _whole_number),
        content_type=read(CONTENT_TYPE, _text),
        traceparent=_first_readable(values, TRACEPARENT, CE_PREFIX + TRACEPARENT),
        tracestate=_first_readable(values, TRACESTATE, CE_PREFIX + TRACESTATE),
        key=record.key,
        payload=payload,
        headers=tuple([(name, value) for name, value in record.headers if value is not None and not _is_reserved(name)]),
        value=None,
    )


def _first_readable(values: Mapping[str, bytes], *names: str) -> str | None:
    """The first of these that there is and that is text."""
    for name in names:
        if name in values:
            with suppress(ValueError):
                return _text(values[name])
    return None


def _text(value: bytes) -> str:
    if 0 in value:
        raise ValueError("no column of the ledger holds a NUL")
    return value.decode()


def _name(value: bytes) -> str:
    # Parts of identities, which are columns and keys: the limits of the outbox.
    if not 1 <= len(value) <= MAX_ATTRIBUTE_BYTES:
        raise ValueError(f"a name has 1 to {MAX_ATTRIBUTE_BYTES} bytes")
    return _text(value)


# Types, tenants, steps: the same few again and again, and as short as names are.
_known_name: Final = lru_cache(maxsize=1_000)(_name)


def _time(value: bytes) -> datetime:
    moment = datetime.fromisoformat(value.decode())
    if moment.tzinfo is None:
        raise ValueError("a time needs its zone")
    # Readers compare times in UTC, which the first and the last day of the calendar may not have.
    moment.astimezone(UTC)
    return moment


def _recorded(record: Record) -> datetime:
    try:
        return _EPOCH + timedelta(milliseconds=record.timestamp)
    except OverflowError:
        raise NotAMessage(f"{place(record)}: the record's timestamp is beyond the calendar") from None


def _whole_number(value: bytes) -> int:
    if not value.isdigit():
        raise ValueError("a whole number has digits only")
    number = int(value)
    if number > _MAX_NUMBER:
        raise ValueError("a whole number has 63 bits")
    return number


def _schema_version(value: bytes) -> int:
    number = _whole_number(value)
    if not 1 <= number < 2**31:
        raise ValueError("a version counts from 1")
    return number


@lru_cache(maxsize=1_000)
def _is_reserved(name: str) -> bool:
    lowered = name.lower()
    return lowered in RESERVED_HEADERS or lowered.startswith(RESERVED_HEADER_PREFIXES)


def place(record: "Record | Message[Any]") -> str:
    """Where a record is, as errors name it."""
    return f"{record.topic}/{record.partition}@{record.offset}"
