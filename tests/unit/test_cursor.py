"""`advance` makes cursors, purely: a cursor never skips a row that the poll could see, and every batch has its bounds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.cursor import ORIGIN, Batch, Cursor, advance

STORED: Final = "100:100:"
TAKEN: Final = "120:130:125"
TARGET: Final = "110:115:"

PolledRow = dict[str, object]


def row(row_id: int, *, late: bool = False, size: int = 10) -> PolledRow:
    """A row of a poll, as far as `advance` looks."""
    return {"id": row_id, "late": late, "record_bytes": size}


def late_rows(*ids: int, size: int = 10) -> list[PolledRow]:
    return [row(row_id, late=True, size=size) for row_id in ids]


def fresh_rows(*ids: int, size: int = 10) -> list[PolledRow]:
    return [row(row_id, size=size) for row_id in ids]


def at(position: int, *, target: str | None = None, late_position: int = 0) -> Cursor:
    return Cursor(position=position, snapshot=STORED, target=target, late_position=late_position)


def step(cursor: Cursor, rows: Sequence[PolledRow], *, row_limit: int = 3, byte_limit: int = 1000) -> Batch:
    return advance(cursor, rows, TAKEN, row_limit=row_limit, byte_limit=byte_limit)


@dataclass(frozen=True, kw_only=True)
class Expected:
    ids: list[int]
    late: int = 0
    cursor: Cursor
    more: bool = False


# name: (cursor, polled rows, limits, what comes of it)
CASES: dict[str, tuple[Cursor, list[PolledRow], dict[str, int], Expected]] = {
    "nothing found moves the snapshot only": (
        at(5), [], {}, Expected(ids=[], cursor=Cursor(position=5, snapshot=TAKEN)),
    ),
    "fresh rows move the position to the last of them": (
        at(5), fresh_rows(6, 9), {}, Expected(ids=[6, 9], cursor=Cursor(position=9, snapshot=TAKEN)),
    ),
    "as many fresh rows as the bound mean that there may be more": (
        at(5), fresh_rows(6, 7, 8), {}, Expected(ids=[6, 7, 8], cursor=Cursor(position=8, snapshot=TAKEN), more=True),
    ),
    "fresh bytes at the bound mean that there may be more": (
        at(5), fresh_rows(6, 7, size=500), {}, Expected(ids=[6, 7], cursor=Cursor(position=7, snapshot=TAKEN), more=True),
    ),
    "one row beyond the byte bound still goes": (
        at(5), fresh_rows(6, size=5000), {}, Expected(ids=[6], cursor=Cursor(position=6, snapshot=TAKEN), more=True),
    ),
    "late rows leave the position where it is": (
        at(9), late_rows(4, 7), {}, Expected(ids=[4, 7], late=2, cursor=Cursor(position=9, snapshot=TAKEN)),
    ),
    "late rows go before fresh ones": (
        at(9), late_rows(4) + fresh_rows(10), {}, Expected(ids=[4, 10], late=1, cursor=Cursor(position=10, snapshot=TAKEN)),
    ),
    "late and fresh rows that fit together go together": (
        at(9),
        late_rows(4) + fresh_rows(10, 11),
        {},
        Expected(ids=[4, 10, 11], late=1, cursor=Cursor(position=11, snapshot=TAKEN)),
    ),
    "fresh rows wait where they would make a batch too long": (
        at(9),
        late_rows(4, 7) + fresh_rows(10, 11),
        {},
        Expected(ids=[4, 7], late=2, cursor=Cursor(position=9, snapshot=TAKEN), more=True),
    ),
    "fresh rows wait where they would make a batch too large": (
        at(9),
        late_rows(4, size=600) + fresh_rows(10, size=600),
        {},
        Expected(ids=[4], late=1, cursor=Cursor(position=9, snapshot=TAKEN), more=True),
    ),
    "as many late rows as the bound are the whole set": (
        at(9), late_rows(2, 4, 6), {}, Expected(ids=[2, 4, 6], late=3, cursor=Cursor(position=9, snapshot=TAKEN)),
    ),
    "one late row more than the bound fixes the target, and the stored snapshot stays": (
        at(9), late_rows(2, 4, 6, 8), {},
        Expected(ids=[2, 4, 6], late=3, cursor=at(9, target=TAKEN, late_position=6), more=True),
    ),
    "fresh rows wait while the late set does not fit": (
        at(9), late_rows(2, 4, 6, 8) + fresh_rows(10, 11), {},
        Expected(ids=[2, 4, 6], late=3, cursor=at(9, target=TAKEN, late_position=6), more=True),
    ),
    "late bytes at the bound fix the target": (
        at(9), late_rows(2, 4, size=500), {},
        Expected(ids=[2, 4], late=2, cursor=at(9, target=TAKEN, late_position=4), more=True),
    ),
    "one late row beyond the byte bound fixes the target": (
        at(9), late_rows(2, size=5000), {},
        Expected(ids=[2], late=1, cursor=at(9, target=TAKEN, late_position=2), more=True),
    ),
    "a fixed target stays as it is while the set is drained": (
        at(9, target=TARGET, late_position=2), late_rows(3, 4, 5, 6), {},
        Expected(ids=[3, 4, 5], late=3, cursor=at(9, target=TARGET, late_position=5), more=True),
    ),
    "the end of a late set makes the target, not this poll's snapshot, the cursor's": (
        at(9, target=TARGET, late_position=5), late_rows(6, 8), {},
        Expected(ids=[6, 8], late=2, cursor=Cursor(position=9, snapshot=TARGET), more=True),
    ),
    "a late set that ended exactly at the bound closes with an empty batch and looks again": (
        at(9, target=TARGET, late_position=8), [], {},
        Expected(ids=[], cursor=Cursor(position=9, snapshot=TARGET), more=True),
    ),
    "a new lane starts before every row": (
        ORIGIN, fresh_rows(1), {}, Expected(ids=[1], cursor=Cursor(position=1, snapshot=TAKEN)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_poll_becomes_this_batch_and_this_cursor(case: str) -> None:
    cursor, rows, limits, expected = CASES[case]

    batch = step(cursor, rows, **limits)

    assert [found["id"] for found in batch.rows] == expected.ids
    assert (batch.late_count, batch.cursor, batch.more) == (expected.late, expected.cursor, expected.more)


@dataclass(frozen=True)
class Polled:
    """A poll as the statement defines it, of a lane whose undelivered rows are `late_set` and `fresh_set`."""

    cursor: Cursor
    late_set: list[PolledRow]
    fresh_set: list[PolledRow]
    row_limit: int
    byte_limit: int

    @property
    def rows(self) -> list[PolledRow]:
        late = _cut(self.late_set, self.row_limit + 1, self.byte_limit)
        fresh = [] if self.cursor.target else _cut(self.fresh_set, self.row_limit, self.byte_limit)
        return late + fresh

    @property
    def batch(self) -> Batch:
        return advance(self.cursor, self.rows, TAKEN, row_limit=self.row_limit, byte_limit=self.byte_limit)


def _cut(rows: Sequence[PolledRow], row_limit: int, byte_limit: int) -> list[PolledRow]:
    kept: list[PolledRow] = []
    used = 0
    for candidate in rows[:row_limit]:
        if used >= byte_limit:
            break
        kept.append(candidate)
        used += int(str(candidate["record_bytes"]))
    return kept


def _bytes(rows: Sequence[object]) -> int:
    return sum(found["record_bytes"] for found in rows if isinstance(found, dict))


@st.composite
def polls(draw: st.DrawFn) -> Polled:
    """Any lane, any limits, a late set being drained or not."""
    position = 100
    sizes = st.integers(min_value=1, max_value=400)
    late_position = draw(st.integers(0, 60)) if draw(st.booleans()) else 0
    late_ids = draw(st.lists(st.integers(late_position + 1, position), unique=True, max_size=12))
    fresh_ids = draw(st.lists(st.integers(position + 1, position + 50), unique=True, max_size=12))
    draining = late_position > 0
    return Polled(
        cursor=at(position, target=TARGET if draining else None, late_position=late_position),
        late_set=[row(found, late=True, size=draw(sizes)) for found in sorted(late_ids)],
        fresh_set=[row(found, size=draw(sizes)) for found in sorted(fresh_ids)],
        row_limit=draw(st.integers(1, 8)),
        byte_limit=draw(st.integers(1, 1500)),
    )


@given(polls())
def test_no_row_is_skipped(polled: Polled) -> None:
    """Every undelivered row that the next cursor counts as delivered is in the batch, and no other is."""
    batch, after = polled.batch, polled.batch.cursor
    if after.target is None:
        behind = [*polled.late_set, *(found for found in polled.fresh_set if int(str(found["id"])) <= after.position)]
    else:
        behind = [found for found in polled.late_set if int(str(found["id"])) <= after.late_position]

    assert list(batch.rows) == behind


@given(polls())
def test_a_batch_goes_out_in_id_order(polled: Polled) -> None:
    ids = [found["id"] for found in polled.batch.rows]

    assert ids == sorted(set(ids))


@given(polls())
def test_a_batch_keeps_to_its_bounds(polled: Polled) -> None:
    """In rows, and in bytes but for the row that reaches the bound; late and fresh rows together (DB-8)."""
    batch = polled.batch

    assert len(batch.rows) <= polled.row_limit
    assert _bytes(batch.rows[:-1]) < polled.byte_limit


@given(polls())
def test_more_is_said_whenever_a_bound_left_a_row_behind(polled: Polled) -> None:
    batch = polled.batch
    left = len(polled.late_set) + len(polled.fresh_set) - len(batch.rows)

    assert batch.more or left == 0


@given(polls())
def test_the_target_is_fixed_while_a_late_set_is_drained(polled: Polled) -> None:
    before, after = polled.cursor, polled.batch.cursor
    if after.target is not None:
        assert after.target == (before.target or TAKEN)
        assert (after.position, after.snapshot) == (before.position, before.snapshot)
        assert after.late_position > before.late_position
    elif before.target is not None:
        assert after == Cursor(position=before.position, snapshot=before.target)


@given(polls())
def test_a_late_set_is_drained_to_its_end_whatever_the_limits(polled: Polled) -> None:
    """However often the bounds cut it: each round makes progress, and together the rounds are the set, once."""
    drained: list[object] = []
    late_set = polled.late_set
    cursor = polled.cursor
    for _ in range(len(polled.late_set) + 1):
        batch = replace(polled, cursor=cursor, late_set=late_set, fresh_set=[]).batch
        drained += batch.rows
        late_set, cursor = late_set[len(batch.rows) :], batch.cursor
        if cursor.target is None:
            break

    assert (cursor.target, drained) == (None, polled.late_set)
