"""Whatever a handler raises ends its attempt and nothing else; only who cancels it from outside sees it cancelled."""

import asyncio
import sys

import pytest

from consumer_sdk.calling import HandlerExited, called


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
