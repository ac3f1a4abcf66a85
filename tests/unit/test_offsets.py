"""Which offset may be committed: the one after all that is done without a gap, whatever order it was done in."""

from itertools import pairwise
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumer_sdk.offsets import OffsetTracker

START: Final = 10


def window(*offsets: int, start: int = START) -> OffsetTracker:
    tracker = OffsetTracker(start)
    for offset in offsets:
        assert tracker.receive(offset)
    return tracker


def test_the_committed_number_is_the_next_one() -> None:
    """CONSUME-1."""
    tracker = window(10, 11, 14)
    for offset in (10, 11, 14):
        tracker.finish(offset)

    assert tracker.committable == 15


def test_a_gap_holds_nothing_up() -> None:
    """CONSUME-1."""
    tracker = window(10, 11, 14)
    tracker.finish(10)
    tracker.finish(11)

    assert tracker.committable == 14


def test_only_the_finished_prefix_is_committed() -> None:
    """CONSUME-2."""
    tracker = window(10, 11, 12)
    tracker.finish(11)
    tracker.finish(12)
    assert tracker.committable == 10

    tracker.finish(10)
    assert tracker.committable == 13


def test_success_does_not_bury_an_earlier_failure() -> None:
    """CONSUME-5."""
    tracker = window(20, 21, start=20)
    tracker.committed = 20
    tracker.finish(21)

    assert tracker.committable is None


def test_a_revocation_with_holes_commits_the_first_of_them() -> None:
    """CONSUME-7."""
    tracker = window(*range(30, 36), start=30)
    tracker.finish(32)
    tracker.finish(35)

    assert (tracker.place, tracker.span) == (30, 6)


@pytest.mark.parametrize("again", [9, 10, 11])
def test_what_was_received_before_is_not_received_again(again: int) -> None:
    tracker = window(10, 11)

    assert not tracker.receive(again)
    assert (tracker.next, tracker.span) == (12, 2)


def test_what_is_committed_is_not_committed_again() -> None:
    tracker = window(10)
    tracker.finish(10)
    tracker.committed = tracker.committable

    assert tracker.committable is None


def test_a_new_window_commits_where_it_starts() -> None:
    """An owner's note stands beside the offset from its first commit on, so there is one before the first record."""
    assert OffsetTracker(START).committable == START


def suspects(tracker: OffsetTracker, *offsets: int) -> list[int]:
    """Those of the offsets that are suspect when they arrive."""
    found = []
    for offset in offsets:
        found += [offset] if tracker.is_suspect(offset) else []
        tracker.receive(offset)
    return found


def test_as_many_records_are_suspect_as_were_told() -> None:
    assert suspects(OffsetTracker(START, suspects=2, end=99), 10, 12, 13) == [10, 12]
    assert suspects(OffsetTracker(START), 10, 12, 13) == []


def test_what_came_later_is_not_suspect() -> None:
    assert suspects(OffsetTracker(START, suspects=9, end=12), 10, 11, 12, 13) == [10, 11]


def test_a_window_has_suspects_until_the_last_of_them_is_done() -> None:
    tracker = OffsetTracker(START, suspects=9, end=12)
    had = [tracker.has_suspects]
    for step in (tracker.receive, tracker.finish):
        for offset in (10, 11, 12):
            step(offset)
            had.append(tracker.has_suspects)

    assert had == [True, True, True, True, True, False, False]
    assert not OffsetTracker(START).has_suspects
    assert not OffsetTracker(START, suspects=9, end=START).has_suspects


# A model: what is known of each record, and the definition of what may be committed.


def allowed(received: list[int], finished: set[int]) -> int:
    """The first that is not finished; the one after the last where there is none."""
    return next((offset for offset in received if offset not in finished), received[-1] + 1 if received else START)


class HighestFinished(OffsetTracker):
    """The broken model: it takes the highest offset that was seen for done."""

    @property
    def place(self) -> int:
        return self.next


def explore(kind: type[OffsetTracker], data: st.DataObject) -> None:
    """Let records come and be done in any order, with gaps, and look at every step."""
    tracker = kind(START)
    received: list[int] = []
    finished: set[int] = set()
    at_work: list[int] = []
    places = [tracker.place]
    for _ in range(data.draw(st.integers(0, 40), "steps")):
        if not at_work or data.draw(st.booleans(), "receive"):
            offset = tracker.next + data.draw(st.integers(0, 3), "gap")
            assert tracker.receive(offset)
            received.append(offset)
            at_work.append(offset)
        else:
            offset = at_work.pop(data.draw(st.integers(0, len(at_work) - 1), "which"))
            finished.add(offset)
            tracker.finish(offset)
        assert tracker.place == allowed(received, finished)
        assert tracker.span == sum(offset >= tracker.place for offset in received)
        places.append(tracker.place)
        if data.draw(st.booleans(), "commit"):
            tracker.committed = tracker.place
            assert tracker.committable is None
    assert all(earlier <= later for earlier, later in pairwise(places))


@given(st.data())
def test_in_any_order_the_whole_finished_prefix_is_committed_and_nothing_behind_it(data: st.DataObject) -> None:
    """CONSUME-2, CONSUME-5, CONSUME-7."""
    explore(OffsetTracker, data)


def test_a_tracker_that_takes_the_highest_for_done_is_caught() -> None:
    """CONSUME-7, the broken model."""
    with pytest.raises(AssertionError):
        given(st.data())(lambda data: explore(HighestFinished, data))()
