"""Delays between attempts: exact values with a chosen random source, bounds with any (JOB-24, JOB-25, JOB-38)."""

import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.errors import ConfigurationError
from fencepost.retry import JITTER_FRACTION, LEAST_SECONDS, MOST_SECONDS, Jitter, Retry

TOP = math.nextafter(1, 0)
NOW = datetime(2015, 10, 21, 7, 28, 30, tzinfo=UTC)

shares = st.floats(0, TOP)
attempts = st.integers(0, 20_000)


@st.composite
def policies(draw: st.DrawFn, jitter: Jitter) -> Retry:
    base = draw(st.floats(LEAST_SECONDS, MOST_SECONDS))
    return Retry(base_seconds=base, cap_seconds=draw(st.floats(base, MOST_SECONDS)), jitter=jitter)


def always(share: float) -> Callable[[], float]:
    return lambda: share


def chain(policy: Retry, share: float, count: int) -> list[float]:
    """Delays one after another, each kept for the next."""
    delays: list[float] = []
    for attempt in range(count):
        # The first previous is the base, as JOB-24 starts.
        delays.append(policy.delay(attempt, delays[-1] if delays else None, random=always(share)))
    return delays


@pytest.mark.parametrize(
    ("share", "delays"),
    [(0, [1, 1, 1, 1, 1, 1]), (0.5, [2, 3.5, 5.75, 9.125, 14.1875, 20]), (TOP, [3, 9, 20, 20, 20, 20])],
    ids=["low end", "middle", "top"],
)
def test_decorrelated_jitter_keeps_its_exact_bounds(share: float, delays: list[float]) -> None:
    policy = Retry(base_seconds=1, cap_seconds=20, jitter="decorrelated")

    assert chain(policy, share, 6) == pytest.approx(delays, rel=1e-15)


@pytest.mark.parametrize(("attempt", "seconds"), [(0, 1), (5, 32), (6, 60), (64, 60), (65, 60), (1024, 60), (10_000, 60)])
def test_an_exponential_delay_neither_overflows_nor_wraps(attempt: int, seconds: float) -> None:
    for jitter in ("none", "exponential", "full"):
        policy = Retry(base_seconds=1, cap_seconds=60, jitter=jitter)
        assert policy.delay(attempt, random=always(1.0)) == seconds


def test_jitter_is_taken_off_inside_the_cap() -> None:
    policy = Retry(base_seconds=1, cap_seconds=60)

    assert [policy.delay(n, random=always(0)) for n in (0, 1, 5, 6, 9)] == [0.5, 1, 16, 30, 30]


def test_full_jitter_starts_at_a_millisecond_and_never_at_0() -> None:
    policy = Retry(base_seconds=1, cap_seconds=60, jitter="full")

    assert policy.delay(5, random=always(0)) == LEAST_SECONDS
    assert policy.delay(5, random=always(0.25)) == 8


@given(policy=policies("exponential"), attempt=attempts, share=shares)
def test_exponential_delays_stay_between_bounds_that_only_rise(policy: Retry, attempt: int, share: float) -> None:
    def bounds(n: int) -> tuple[float, float]:
        return policy.delay(n, random=always(0)), policy.delay(n, random=always(1.0))

    low, high = bounds(attempt)

    assert 0 < low <= policy.delay(attempt, random=always(share)) <= high <= policy.cap_seconds
    assert low == pytest.approx(high * (1 - JITTER_FRACTION))
    later_low, later_high = bounds(attempt + 1)
    assert low <= later_low
    assert high <= later_high


@given(
    policy=policies("decorrelated"),
    attempt=attempts,
    share=shares,
    previous=st.none() | st.floats(allow_nan=True, allow_infinity=True),
)
def test_a_decorrelated_delay_lies_between_base_and_cap_whatever_was_kept(
    policy: Retry, attempt: int, share: float, previous: float | None
) -> None:
    assert policy.base_seconds <= policy.delay(attempt, previous, random=always(share)) <= policy.cap_seconds


@given(policy=policies("full"), attempt=attempts, share=shares)
def test_a_fully_jittered_delay_is_never_0_and_never_above_the_cap(policy: Retry, attempt: int, share: float) -> None:
    assert LEAST_SECONDS <= policy.delay(attempt, random=always(share)) <= policy.cap_seconds


def test_without_a_source_delays_differ() -> None:
    assert len({Retry().delay(20) for _ in range(20)}) > 1


@pytest.mark.parametrize("name", ["base_seconds", "cap_seconds", "retry_after_max_seconds"])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, -math.inf, MOST_SECONDS + 1, 10**400, "5", True])
def test_an_impossible_number_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name} must be a number of seconds from 0"):
        Retry(**{name: value})


@pytest.mark.parametrize("name", ["base_seconds", "cap_seconds"])
def test_a_delay_of_0_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        Retry(**{name: 0})  # type: ignore[arg-type]


def test_a_base_above_the_cap_is_refused_with_both_named() -> None:
    with pytest.raises(ConfigurationError, match=r"base_seconds \(30\) must not be above cap_seconds \(20\)"):
        Retry(base_seconds=30, cap_seconds=20)


def test_an_unknown_jitter_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="jitter must be one of exponential, full, decorrelated, none"):
        Retry(jitter="some")  # type: ignore[arg-type]


def test_an_attempt_before_the_first_is_refused() -> None:
    with pytest.raises(ValueError, match="counts from 0"):
        Retry().delay(-1)


def test_a_providers_wish_is_clamped_to_the_cap_unless_the_policy_says_otherwise() -> None:
    assert Retry(cap_seconds=20).retry_after_seconds("3600", now=NOW) == 20
    assert Retry(cap_seconds=20, retry_after_max_seconds=600).retry_after_seconds("3600", now=NOW) == 600
    assert Retry(cap_seconds=20, retry_after_max_seconds=0).retry_after_seconds("3600", now=NOW) == 0
