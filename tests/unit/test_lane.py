"""A lane's state: when a batch that failed goes again."""

import math

from fencepost.errors import TransientError
from relay.cursor import Batch, Cursor
from relay.engine import Engine
from relay.lane import Flight, Lane, TopicUnavailable
from tests.support.rows import PolledRow

CURSOR = Cursor(position=2, snapshot="9:9:")


def lane_with_a_flight() -> tuple[Lane, Flight]:
    lane = Lane(number=0, generation=1, trusted_until=math.inf, cursor=CURSOR, sequence=1, marked_position=0)
    rows = [PolledRow(id=number, topic="orders") for number in (1, 2)]
    lane.flight = flight = Flight(lane, Batch(rows=rows, late_count=0, cursor=CURSOR, more=False), 1)
    return lane, flight


def test_a_batch_that_failed_goes_again_when_its_timer_says_so_whatever_any_clock_says() -> None:
    """Timers may run a moment early by another clock; a batch that compared the two would wait for ever."""
    lane, flight = lane_with_a_flight()
    flight.fail(flight.batch.rows, TransientError("no answer"))
    flight.prepare_retry()
    assert Engine._next_flight(lane) is None

    flight.due = True

    assert Engine._next_flight(lane) is flight
    assert [row["id"] for row in flight.to_send] == [1, 2]


def test_a_lane_that_waits_for_a_topic_says_so_at_once_and_one_that_waits_for_an_answer_after_the_deadline() -> None:
    lane, flight = lane_with_a_flight()
    before_the_deadline = flight.started_at - 1
    assert lane.stopped(before_the_deadline) is None
    assert lane.stopped(flight.started_at + 1) is not None

    flight.fail(flight.batch.rows, TopicUnavailable("it does not exist"))
    flight.prepare_retry()

    stopped = lane.stopped(before_the_deadline)
    assert stopped is not None
    assert (stopped.reason, stopped.topic, stopped.error) == ("unavailable", "orders", "it does not exist")
