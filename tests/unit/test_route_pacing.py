"""Slots and the pace of starts: bounds for the process and for each principal."""

import pytest

from producer_sdk.http.pacing import StartPace
from producer_sdk.http.principal import Principal
from producer_sdk.http.slots import Slots

ADA, BOB = Principal("acme", "ada"), Principal("acme", "bob")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_one_principal_cannot_take_all() -> None:
    """ROUTE-15, L23 (S35)"""
    told: list[int] = []
    slots = Slots(most=3, most_each=2, changed=told.append)
    with slots.take(ADA) as first, slots.take(ADA) as second, slots.take(ADA) as third, slots.take(BOB) as other:
        assert [first, second, third, other] == [True, True, False, True]
        with slots.take(Principal("acme", "eve")) as none_left:
            assert not none_left
    assert slots.taken == 0
    assert told == [1, 2, 3, 2, 1, 0]


def test_a_slot_that_was_freed_is_usable_at_once() -> None:
    """R28"""
    slots = Slots(most=1, most_each=1)
    for _ in range(3):
        with slots.take(ADA) as free:
            assert free


def test_no_slots_at_all() -> None:
    """R28: 0 is nobody."""
    with Slots(most=0, most_each=5).take(ADA) as free:
        assert not free


def test_starts_beyond_the_pace_wait_their_turn() -> None:
    """9.2-10: two a minute, then none for half a minute; another principal has a pace of its own."""
    clock = Clock()
    pace = StartPace(clock)
    assert [pace.seconds_until("order", ADA, 2) for _ in range(3)] == [0, 0, 30]
    assert pace.seconds_until("order", BOB, 2) == 0
    assert pace.seconds_until("refund", ADA, 2) == 0
    clock.now = 29
    assert pace.seconds_until("order", ADA, 2) == pytest.approx(1)
    clock.now = 30
    assert [pace.seconds_until("order", ADA, 2) for _ in range(2)] == [0, 30]


def test_no_limit_keeps_no_bucket() -> None:
    """And the number of buckets has a bound."""
    pace = StartPace(Clock())
    assert pace.seconds_until("order", ADA, None) == 0
    assert len(pace._buckets) == 0
    for number in range(10_050):
        pace.seconds_until("order", Principal("acme", str(number)), 1)
    assert len(pace._buckets) == 10_000
