"""One timer cancels every attempt whose time is over, as ``asyncio.timeout`` would, in both event loops."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import pytest
import uvloop
from structlog.testing import capture_logs

from consumer_sdk import in_hand as module
from consumer_sdk.in_hand import AttemptDeadline, InHand
from consumer_sdk.message_handlers import MessageHandler, MessageHandlers
from fencepost.errors import TransientError
from tests.support.waiting import eventually

SOON: Final = 0.001
NEVER: Final = 3_600.0
#: Under this no machine is too slow, and the tests do not hang.
BOUND: Final = 10.0

Attempt: TypeAlias = Callable[[], Coroutine[Any, Any, object]]
Run: TypeAlias = Callable[[Coroutine[Any, Any, object]], object]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine in each of the loops."""

    def bounded(work: Coroutine[Any, Any, object]) -> object:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop if request.param == "uvloop" else None) as runner:
            return runner.run(asyncio.wait_for(work, BOUND))

    return bounded


def handler(seconds: float) -> MessageHandler:
    async def nothing(_message: Any, _context: Any) -> None: ...

    app = MessageHandlers()
    app.handler("order.placed", step="store", attempt_seconds=seconds)(nothing)
    return app.all[0]


HANDLERS: Final = {seconds: handler(seconds) for seconds in (SOON, NEVER)}


async def attempted(in_hand: InHand, seconds: float, attempt: Attempt) -> object:
    """What becomes of an attempt, and how many cancellations its task is left with."""
    told: object = None
    try:
        with in_hand.held(HANDLERS[seconds], [], since=0):
            told = await attempt()
    except (AttemptDeadline, asyncio.CancelledError, ArithmeticError) as error:
        told = type(error)
    task = asyncio.current_task()
    assert task is not None
    return told, task.cancelling()


async def forever() -> object:
    return await asyncio.Event().wait()


async def lapsed(in_hand: InHand) -> None:
    """Returns in the iteration of the loop in which the timer rings."""
    assert await attempted(in_hand, SOON, forever) == (AttemptDeadline, 0)


def raising(error: Exception) -> Attempt:
    async def attempt() -> object:
        try:
            return await forever()
        except asyncio.CancelledError:
            raise error from None

    return attempt


async def swallowing() -> object:
    try:
        await forever()
    except asyncio.CancelledError:
        await asyncio.sleep(0)  # what it awaits afterwards is not cancelled again
    return "went on"


@pytest.mark.parametrize(
    ("attempt", "told"),
    [
        pytest.param(forever, AttemptDeadline, id="cancelled"),
        pytest.param(swallowing, "went on", id="swallowed"),
        pytest.param(raising(ArithmeticError()), ArithmeticError, id="another error"),
        pytest.param(raising(TransientError("the connection was cut")), AttemptDeadline, id="the database's error"),
        pytest.param(raising(TimeoutError()), AttemptDeadline, id="a library's time-out"),
    ],
)
def test_an_attempt_whose_time_is_over_is_cancelled_once_and_its_task_is_left_uncancelled(
    run: Run, attempt: Attempt, told: object
) -> None:
    """A library may say its cancellation in a way of its own: a plain ``TimeoutError`` would be ambiguous, and end the message."""
    assert run(attempted(InHand(), SOON, attempt)) == (told, 0)


@pytest.mark.parametrize(
    ("attempt", "told"),
    [
        pytest.param(forever, asyncio.CancelledError, id="cancelled"),
        pytest.param(raising(TransientError("the connection was cut")), AttemptDeadline, id="the database's error"),
        pytest.param(raising(TimeoutError()), AttemptDeadline, id="a library's time-out"),
    ],
)
@pytest.mark.parametrize("first", ["the deadline", "the consumer"])
def test_a_cancellation_by_the_consumer_is_kept_where_the_time_is_over_in_the_same_moment(
    run: Run, attempt: Attempt, told: object, first: str
) -> None:
    async def both() -> object:
        in_hand = InHand()
        task = asyncio.create_task(attempted(in_hand, NEVER, attempt))
        await asyncio.sleep(0)
        (held,) = in_hand._held
        for cancel in (held.expire, task.cancel) if first == "the deadline" else (task.cancel, held.expire):
            cancel()
        return await task

    assert run(both()) == (told, 1)


def test_only_those_whose_time_is_over_are_cancelled_however_long_the_others_may_take(run: Run) -> None:
    """The timer of the first one is for an hour from now; the second one's is sooner."""

    async def mixed() -> object:
        in_hand = InHand()
        long = asyncio.create_task(attempted(in_hand, NEVER, forever))
        await asyncio.sleep(0)
        for _ in range(3):
            await lapsed(in_hand)
        assert not long.done()
        long.cancel()
        return await long

    assert run(mixed()) == (asyncio.CancelledError, 1)


def test_an_attempt_that_begins_while_the_timer_is_due_is_limited_as_well(run: Run) -> None:
    """uvloop makes no timer of less than half a millisecond, but a plain handle."""

    async def begun_at_once() -> object:
        in_hand = InHand()
        in_hand._look_at(asyncio.get_running_loop().time())
        await lapsed(in_hand)
        return len(in_hand._held)

    assert run(begun_at_once()) == 0


def test_a_timer_that_rings_early_is_not_set_again_and_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop's rings up to half a millisecond before its moment."""
    rung = list[None]()
    expire = InHand._expire

    def counted(in_hand: InHand) -> None:
        rung.append(None)
        expire(in_hand)

    monkeypatch.setattr(InHand, "_expire", counted)

    async def many() -> None:
        in_hand = InHand()
        for _ in range(50):
            await lapsed(in_hand)

    run(many())
    assert len(rung) <= 100


async def closing() -> object:
    """Waits without a bound while it cleans up."""
    try:
        return await forever()
    finally:
        await forever()


def test_what_waits_while_it_cleans_up_is_cancelled_once_more_and_its_task_is_left_uncancelled(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a driver does that closes a connection which is silent: it would hold its slot and its partition's offset for good."""

    record = SimpleNamespace(topic="orders", partition=0, offset=7)
    delivery: Any = SimpleNamespace(record=record, arrival=None)

    async def handled(in_hand: InHand) -> object:
        with in_hand.held(HANDLERS[SOON], [delivery], since=0):
            return await closing()

    async def minded() -> object:
        in_hand = InHand()
        task = asyncio.create_task(handled(in_hand))
        await asyncio.sleep(0)
        (held,) = in_hand._held
        await eventually(lambda: held.expired)
        with capture_logs() as logs:
            in_hand.mind_late()
            # It began long ago, as where the loop stood still; its cancellation is of this moment, and it may clean up.
            assert held.expired == 1
            monkeypatch.setattr(module, "_MARGIN_SECONDS", -1.0)
            in_hand.mind_late()
            in_hand.mind_late()
        assert ([entry["event"] for entry in logs], held.expired) == (["handler_does_not_end"], 2)
        await asyncio.wait([task])
        return type(task.exception()), task.cancelling()

    assert run(minded()) == (AttemptDeadline, 0)
