"""Rows as Kafka records: CloudEvents headers, timestamp, key and value. On the hot path, so what can be built once is.

Texts that repeat from row to row (types, sources, tenants, ...) are encoded once and kept, up to a bound; what differs
in every row (id, time, sequence) is encoded by the cheapest means measured. An absent attribute costs one comparison.
"""

from datetime import UTC, datetime
from typing import Final, NamedTuple

from fencepost import wire
from relay.cursor import Row

__all__ = ["Encoded", "Header", "RecordEncoder"]

Header = tuple[str, bytes]

_CACHED_TEXTS: Final = 16_384
_PER_SECOND: Final = 1_000_000
# asyncpg hands a timestamptz over as microseconds since 2000-01-01 UTC, PostgreSQL's own form (see relay.store).
_POSTGRES_EPOCH_SECONDS: Final = 946_684_800
_SPEC: Final[Header] = (wire.CE_SPEC_VERSION, wire.SPEC_VERSION.encode())


class Encoded(NamedTuple):
    """A row as Kafka takes it, with what the publisher needs to know of it. ``timestamp_ms`` is Unix time."""

    topic: str
    key: bytes | None
    payload: bytes | None
    timestamp_ms: int
    headers: list[Header]
    record_bytes: int


class _Cache(dict[str, Header]):
    """text -> (name, encoded text); emptied when full, which costs one more encoding of each text in use."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __missing__(self, text: str) -> Header:
        if len(self) >= _CACHED_TEXTS:
            self.clear()
        self[text] = header = (self._name, text.encode())
        return header


class RecordEncoder:
    """Builds the records of one relay's rows; ``source`` stands in for rows that name none."""

    def __init__(self, source: str) -> None:
        self._types = _Cache(wire.CE_TYPE)
        self._sources = _Cache(wire.CE_SOURCE)
        self._default_source: Header = (wire.CE_SOURCE, source.encode())
        self._content_types = _Cache(wire.CONTENT_TYPE)
        self._tenants = _Cache(wire.CE_TENANT_ID)
        self._runs = _Cache(wire.CE_RUN_ID)
        self._steps = _Cache(wire.CE_STEP)
        self._operations = _Cache(wire.CE_OPERATION)
        self._second: int | None = None
        self._second_text = b""

    def encode(self, row: Row) -> Encoded:
        """The record of a row: its headers in their fixed order, the application's own last."""
        (
            _, row_id, _, record_bytes, created_at, event_id, topic, event_type, key, payload, source, content_type, tenant_id,
            run_id, step, operation, fencing_token, traceparent, tracestate, header_names, header_values,
        ) = row  # fmt: skip
        headers = [
            _SPEC,
            (wire.CE_ID, event_id.encode()),
            self._default_source if source is None else self._sources[source],
            self._types[event_type],
            (wire.CE_TIME, self._time(created_at)),
            (wire.CE_SEQUENCE, b"%d" % row_id),
        ]
        if content_type is not None:
            headers.append(self._content_types[content_type])
        if tenant_id is not None:
            headers.append(self._tenants[tenant_id])
        if run_id is not None:
            headers.append(self._runs[run_id])
        if step is not None:
            headers.append(self._steps[step])
        if operation is not None:
            headers.append(self._operations[operation])
        if traceparent is not None:
            headers.append((wire.TRACEPARENT, traceparent.encode()))
        if tracestate is not None:
            headers.append((wire.TRACESTATE, tracestate.encode()))
        if fencing_token is not None:
            headers.append((wire.CE_FENCING_TOKEN, b"%d" % fencing_token))
        if header_names is not None:
            headers.extend(zip(header_names, header_values, strict=True))
        return Encoded(topic, key, payload, created_at // 1000 + _POSTGRES_EPOCH_SECONDS * 1000, headers, record_bytes)

    def _time(self, microseconds: int) -> bytes:
        # RFC 3339 in UTC; the part down to the second is kept, since neighbours share it.
        second, fraction = divmod(microseconds, _PER_SECOND)
        if second != self._second:
            moment = datetime.fromtimestamp(second + _POSTGRES_EPOCH_SECONDS, UTC)
            self._second, self._second_text = second, moment.strftime("%Y-%m-%dT%H:%M:%S").encode()
        return b"%s.%06dZ" % (self._second_text, fraction)

    @staticmethod
    def unix_seconds(microseconds: int) -> float:
        """A ``created_at`` as the poll returns it, in Unix seconds."""
        return microseconds / _PER_SECOND + _POSTGRES_EPOCH_SECONDS
