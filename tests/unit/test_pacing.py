"""A lone row is never held up; a steady stream is, by no more than the operator allows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.pacing import Pace

PAUSE_MAX = 0.02


def stream(pace: Pace, *, rows_per_poll: int, every: float, polls: int, start: float = 0.0) -> float:
    """Poll in a steady rhythm; the time of the last poll."""
    now = start
    for _ in range(polls):
        now += every
        pace.observe(rows_per_poll, now)
    return now


def test_a_lone_row_goes_at_once() -> None:
    pace = Pace(PAUSE_MAX, now=0.0)

    pace.observe(1, now=60.0)

    assert (pace.busy, pace.pause()) == (False, 0.0)


def test_one_hundred_rows_a_second_are_not_held_up() -> None:
    """The rate at which the latency is promised."""
    pace = Pace(PAUSE_MAX, now=0.0)

    stream(pace, rows_per_poll=1, every=0.01, polls=1000)

    assert (pace.busy, pace.pause()) == (False, 0.0)


def test_a_steady_stream_of_small_batches_is_paced() -> None:
    pace = Pace(PAUSE_MAX, now=0.0)

    stream(pace, rows_per_poll=5, every=0.002, polls=1000)

    assert pace.busy
    assert 0 < pace.pause() <= PAUSE_MAX


def test_the_pause_grows_with_the_rate_up_to_its_bound() -> None:
    pauses = []
    for rows_per_poll in (5, 10, 100, 10_000):
        pace = Pace(PAUSE_MAX, now=0.0)
        stream(pace, rows_per_poll=rows_per_poll, every=0.01, polls=500)
        pauses.append(pace.pause())

    assert pauses == sorted(pauses)
    assert pauses[-1] == PAUSE_MAX


def test_the_stream_over_the_relay_is_quick_again() -> None:
    pace = Pace(PAUSE_MAX, now=0.0)
    last = stream(pace, rows_per_poll=100, every=0.01, polls=500)

    pace.observe(0, now=last + 2.0)

    assert (pace.busy, pace.pause()) == (False, 0.0)


@pytest.mark.parametrize(("before", "expected"), [(100, True), (0, False)])
def test_a_rate_between_the_bounds_changes_nothing(before: int, expected: bool) -> None:
    """300 rows a second: busy stays busy and calm stays calm, so that the doorbell does not flip."""
    pace = Pace(PAUSE_MAX, now=0.0)
    last = stream(pace, rows_per_poll=before, every=0.01, polls=200)

    for _ in range(200):
        last = stream(pace, rows_per_poll=3, every=0.01, polls=1, start=last)

    assert pace.busy is expected


def test_no_pacing_means_none() -> None:
    """FENCEPOST_PACE_MAX_MS=0."""
    pace = Pace(0.0, now=0.0)

    stream(pace, rows_per_poll=1000, every=0.01, polls=100)

    assert pace.pause() == 0.0


@given(st.lists(st.tuples(st.integers(0, 100_000), st.floats(0, 10)), max_size=50))
def test_the_pause_never_leaves_its_bounds(polls: list[tuple[int, float]]) -> None:
    """Also for polls at the same instant, and for a clock that stands still."""
    pace = Pace(PAUSE_MAX, now=0.0)
    now = 0.0
    for rows, elapsed in polls:
        now += elapsed
        pace.observe(rows, now)
        assert 0.0 <= pace.pause() <= PAUSE_MAX
        assert pace.rate >= 0.0
