"""Rows as Kafka records: CloudEvents headers, timestamp, key and value. On the hot path, so what can be built once is.

Texts that repeat from row to row (types, sources, tenants, ...) are encoded once and kept, up to a bound; what differs
in every row (id, time, sequence) is encoded by the cheapest means measured. An absent attribute costs one comparison.
"""

from datetime import UTC, datetime
from typing import Final

from fencepost import wire
from relay.cursor import Row

__all__ = ["Header", "RecordEncoder"]

Header = tuple[str, bytes]

_CACHED_TEXTS: Final = 16_384
_PER_SECOND: Final = 1_000_000
# asyncpg hands a timestamptz over as microseconds since 2000-01-01 UTC, PostgreSQL's own form (see relay.store).
_POSTGRES_EPOCH_SECONDS: Final = 946_684_800
_SPEC: Final[Header] = (wire.CE_SPEC_VERSION, wire.SPEC_VERSION.encode())

_OPTIONAL: Final = (
    ("content_type", wire.CONTENT_TYPE),
    ("tenant_id", wire.CE_TENANT_ID),
    ("run_id", wire.CE_RUN_ID),
    ("step", wire.CE_STEP),
    ("operation", wire.CE_OPERATION),
    ("traceparent", wire.TRACEPARENT),
    ("tracestate", wire.TRACESTATE),
)


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
    """Builds headers for rows of one relay; ``source`` stands in for rows that name none."""

    def __init__(self, source: str) -> None:
        self._types = _Cache(wire.CE_TYPE)
        self._sources = _Cache(wire.CE_SOURCE)
        self._default_source: Header = (wire.CE_SOURCE, source.encode())
        self._optional = [(column, _Cache(name)) for column, name in _OPTIONAL]
        self._second: int | None = None
        self._second_text = b""

    def headers(self, row: Row) -> list[Header]:
        """The record's headers in their fixed order, the application's own last."""
        source = row["source"]
        headers = [
            _SPEC,
            (wire.CE_ID, row["event_id"].encode()),
            self._default_source if source is None else self._sources[source],
            self._types[row["event_type"]],
            (wire.CE_TIME, self._time(row["created_at"])),
            (wire.CE_SEQUENCE, b"%d" % row["id"]),
        ]
        for column, cache in self._optional:
            text = row[column]
            if text is not None:
                headers.append(cache[text])
        token = row["fencing_token"]
        if token is not None:
            headers.append((wire.CE_FENCING_TOKEN, b"%d" % token))
        names = row["header_names"]
        if names is not None:
            headers.extend(zip(names, row["header_values"], strict=True))
        return headers

    def _time(self, microseconds: int) -> bytes:
        # RFC 3339 in UTC; the part down to the second is kept, since neighbours share it.
        second, fraction = divmod(microseconds, _PER_SECOND)
        if second != self._second:
            moment = datetime.fromtimestamp(second + _POSTGRES_EPOCH_SECONDS, UTC)
            self._second, self._second_text = second, moment.strftime("%Y-%m-%dT%H:%M:%S").encode()
        return b"%s.%06dZ" % (self._second_text, fraction)

    @staticmethod
    def timestamp_ms(row: Row) -> int:
        """The record's timestamp: ``created_at`` in Unix milliseconds."""
        return int(row["created_at"]) // 1000 + _POSTGRES_EPOCH_SECONDS * 1000

    @staticmethod
    def unix_seconds(microseconds: int) -> float:
        """A ``created_at`` as the poll returns it, in Unix seconds."""
        return microseconds / _PER_SECOND + _POSTGRES_EPOCH_SECONDS
