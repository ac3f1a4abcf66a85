"""The snapshot cursor as values: what a poll returned becomes a batch and the cursor behind it. Pure.

A row is delivered exactly when ``id <= position`` and its transaction is visible in ``snapshot``, or, while a late set
is drained, also when ``id <= late_position`` and it is visible in ``target``. A cursor that skips a visible row loses
it; ``advance`` is the only place where cursors are made.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

__all__ = ["COLUMNS", "ORIGIN", "Batch", "Cursor", "Row", "advance"]


# The columns of a polled row, in the order of fencepost.poll: the hot path takes a row apart in one go.
COLUMNS: Final = (
    "lane", "id", "late", "record_bytes", "created_at", "event_id", "topic", "event_type", "key", "payload", "source",
    "content_type", "tenant_id", "run_id", "step", "operation", "fencing_token", "traceparent", "tracestate",
    "header_names", "header_values",
)  # fmt: skip


class Row(Protocol):
    """A row of the poll (an ``asyncpg.Record``): by column name, or its values in the order of ``COLUMNS``."""

    def __getitem__(self, column: str, /) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """``snapshot`` and ``target`` are pg_snapshot in text form, ``xmin:xmax:xip``; opaque here but for tests of life."""

    position: int
    snapshot: str
    target: str | None = None
    late_position: int = 0


ORIGIN: Final = Cursor(position=0, snapshot="1:1:")


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Rows of one lane in the order to publish them, and the cursor once all of them are acknowledged.

    ``more`` says that a bound cut the poll short, so the next one should not wait.
    """

    rows: Sequence[Row]
    late_count: int
    cursor: Cursor
    more: bool


def advance(cursor: Cursor, rows: Sequence[Row], snapshot: str, *, row_limit: int, byte_limit: int) -> Batch:
    """What to publish of a lane's polled ``rows`` (late ones first), and the cursor after it.

    ``snapshot`` is the poll's own; the limits are those that the poll was given. A late set that may not be complete,
    in rows or in bytes, fixes the target: until it is drained, later polls return late rows only.
    """
    late = [row for row in rows if row["late"]]
    if len(late) > row_limit or _bytes(late) >= byte_limit:
        late = late[:row_limit]
        target = snapshot if cursor.target is None else cursor.target
        behind = replace(cursor, target=target, late_position=late[-1]["id"])
        return Batch(rows=late, late_count=len(late), cursor=behind, more=True)
    if cursor.target is not None:
        drained = Cursor(position=cursor.position, snapshot=cursor.target)
        return Batch(rows=late, late_count=len(late), cursor=drained, more=True)
    if late and (len(rows) > row_limit or _bytes(rows) >= byte_limit):
        # Together they would be a batch of twice the bounds. The fresh rows stay above the position.
        return Batch(rows=late, late_count=len(late), cursor=Cursor(position=cursor.position, snapshot=snapshot), more=True)
    position = rows[-1]["id"] if len(rows) > len(late) else cursor.position
    more = len(rows) - len(late) >= row_limit or _bytes(rows) >= byte_limit
    return Batch(rows=rows, late_count=len(late), cursor=Cursor(position=position, snapshot=snapshot), more=more)


def _bytes(rows: Sequence[Row]) -> int:
    return sum(row["record_bytes"] for row in rows)
