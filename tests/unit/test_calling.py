"""Whatever a handler raises ends its attempt and nothing else; only who cancels it from outside sees it cancelled. A call that has
a time is waited for no longer, whatever it makes of its cancellation."""

import asyncio
import contextlib
import gc
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from structlog.testing import capture_logs

from consumer_sdk import calling
from consumer_sdk.calling import HandlerExited, called, called_within


async def exits() -> None:
    sys.exit(3)


async def awaits_what_was_cancelled() -> None:
    inner = asyncio.get_running_loop().create_future()
    inner.cancel()
    await inner


@pytest.mark.parametrize("handler", [exits, awaits_what_was_cancelled])
async def test_no_handler_ends_the_process_or_looks_cancelled_when_it_was_not(handler: object) -> None:
    with pytest.raises(HandlerExited):
        await called(handler)  # type: ignore[arg-type]


async def test_a_handler_that_is_cancelled_is() -> None:
    """CONSUME-3."""
    begun = asyncio.Event()

    async def waits() -> None:
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(called(waits))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_its_own_is_passed_on() -> None:
    async def fails() -> None:
        raise ValueError("why")

    with pytest.raises(ValueError, match="why"):
        await called(fails)


# What takes no longer than it may


class Stubborn:
    """A call that waits on however often it is cancelled, until it is let go."""

    def __init__(self, then: Callable[[], object] = lambda: "late") -> None:
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.let_go = asyncio.Event()
        self.ended = asyncio.Event()
        self._then = then

    async def call(self) -> object:
        self.begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        self.cancelled.set()
        while not self.let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.let_go.wait()
        self.ended.set()
        return self._then()


def raises() -> None:
    raise ValueError("secret")


@pytest.fixture
async def loop_errors() -> AsyncIterator[list[object]]:
    """What asyncio complains of, which is logged and read by nobody: an error that nobody asked for, say."""
    told: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context["message"]))
    yield told
    loop.set_exception_handler(None)


async def test_what_ends_in_time_is_as_if_it_had_no_limit() -> None:
    async def returns(value: str) -> str:
        return value

    async def fails() -> None:
        raise ValueError("why")

    assert (await called_within(60, "x", returns, "a")).answer() == "a"
    failed = await called_within(60, "x", fails)
    with pytest.raises(ValueError, match="why"):
        failed.answer()
    for handler in (exits, awaits_what_was_cancelled):
        assert isinstance((await called_within(60, "x", handler)).error, HandlerExited)


async def test_what_takes_too_long_is_cancelled() -> None:
    with pytest.raises(TimeoutError):
        (await called_within(0.001, "x", asyncio.Event().wait)).answer()


async def test_a_second_cancellation_ends_what_waits_while_it_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a driver does that closes a connection which is silent."""
    monkeypatch.setattr(calling, "_CLEAN_UP_SECONDS", 0.001)

    async def closes() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()

    with capture_logs() as logs:
        assert isinstance((await called_within(0.001, "x", closes)).error, TimeoutError)
    assert (logs, calling._left) == ([], set())


async def test_the_model_that_waits_for_it_waits_on() -> None:
    """What ``asyncio.timeout`` does, which a run stood still of."""
    stubborn = Stubborn()

    async def limited() -> None:
        async with asyncio.timeout(0.001):
            await stubborn.call()

    waiting = asyncio.create_task(limited())
    await stubborn.cancelled.wait()
    assert await asyncio.wait([waiting], timeout=0.05) == (set(), {waiting})
    stubborn.let_go.set()
    await waiting


@pytest.mark.parametrize("then", [lambda: "late", raises, sys.exit])
async def test_a_call_that_does_not_end_is_left_to_itself_and_told_of(
    monkeypatch: pytest.MonkeyPatch, loop_errors: list[object], then: Callable[[], object]
) -> None:
    monkeypatch.setattr(calling, "_CLEAN_UP_SECONDS", 0.001)
    stubborn = Stubborn(then)
    with capture_logs() as logs:
        assert isinstance((await called_within(0.001, "card.charge", stubborn.call)).error, TimeoutError)
    (told,) = logs
    assert (told["event"], told["call"], told["left_behind"]) == ("call_does_not_end", "card.charge", 1)
    assert "CancelledError" in told["remedy"]
    assert stubborn.cancelled.is_set()
    stubborn.let_go.set()
    await stubborn.ended.wait()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not calling._left
    gc.collect()
    assert loop_errors == []


async def test_a_call_that_ends_well_while_it_is_cancelled_has_its_result() -> None:
    """The effect has happened: that is better known than not."""
    stubborn = Stubborn()
    stubborn.let_go.set()
    assert (await called_within(0.001, "x", stubborn.call)).answer() == "late"


@pytest.mark.parametrize("then", [lambda: "late", raises])
async def test_what_a_call_came_to_is_told_to_whoever_was_cancelled_meanwhile(then: Callable[[], object]) -> None:
    """The effect has happened, or has not: that is for the record, and the cancellation for whoever asked."""
    stubborn = Stubborn(then)
    stubborn.let_go.set()
    waiting = asyncio.create_task(called_within(60, "x", stubborn.call))
    await stubborn.begun.wait()
    waiting.cancel()
    ended = await waiting
    assert (ended.result, type(ended.error)) == (("late", type(None)) if then is not raises else (None, ValueError))
    with pytest.raises(asyncio.CancelledError):
        ended.answer()


async def test_whoever_has_to_go_while_a_call_cleans_up_tells_nothing_of_it(loop_errors: list[object]) -> None:
    """Its time was over, it is cleaning up, and the lease is lost: nobody knows yet that it does not end."""
    stubborn = Stubborn(raises)
    waiting = asyncio.create_task(called_within(0.001, "x", stubborn.call))
    await stubborn.cancelled.wait()
    with capture_logs() as logs:
        waiting.cancel()
        await asyncio.wait([waiting])
    assert (waiting.cancelled(), logs, len(calling._left)) == (True, [], 1)
    stubborn.let_go.set()
    await stubborn.ended.wait()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()
    assert (loop_errors, calling._left) == ([], set())


@pytest.mark.parametrize("patience", [0.001, 60])
async def test_whoever_waits_for_a_call_can_be_cancelled_whatever_the_call_does(
    monkeypatch: pytest.MonkeyPatch, loop_errors: list[object], patience: float
) -> None:
    """By a lost lease once, by the end of the process again."""
    monkeypatch.setattr(calling, "_CLEAN_UP_SECONDS", patience)
    stubborn = Stubborn(raises)
    waiting: asyncio.Task[object] = asyncio.create_task(_awaited(called_within(60, "x", stubborn.call)))
    await stubborn.begun.wait()
    waiting.cancel()
    await stubborn.cancelled.wait()
    if patience > 1:
        waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    stubborn.let_go.set()
    await stubborn.ended.wait()
    await asyncio.sleep(0)
    gc.collect()
    assert loop_errors == []


async def _awaited(result: Awaitable[object]) -> object:
    return await result
