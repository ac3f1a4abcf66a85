"""What becomes of a request's work at its deadline: it is cancelled, once more where it waits while it cleans up, and never while
its COMMIT is on its way."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any, Final

import pytest
from structlog.testing import capture_logs

from fencepost.clock import lease_clock
from producer_sdk.http import routing
from producer_sdk.http.accepting import Accepting, NotKnown

SOON: Final = 0.01


async def waits_while_it_cleans_up() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.Event().wait()


@pytest.mark.parametrize("stood_still_seconds", [0.0, 0.1])
async def test_two_cancellations_are_two_also_where_the_loop_stood_still(
    monkeypatch: pytest.MonkeyPatch, stood_still_seconds: float
) -> None:
    """A handler that blocks, a frozen process: both are due in one turn then, and the task would see one."""
    monkeypatch.setattr(routing, "_CLEAN_UP_SECONDS", SOON)
    asyncio.get_running_loop().call_soon(time.sleep, stood_still_seconds)
    with capture_logs() as logs, pytest.raises(NotKnown):
        async with asyncio.timeout(10):
            await routing._until(lease_clock() + SOON, waits_while_it_cleans_up(), "orders")
    assert [entry["event"] for entry in logs] == ["dependency_does_not_end"]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_what_ends_at_its_deadline_is_told_of_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_CLEAN_UP_SECONDS", SOON)
    asyncio.get_running_loop().call_soon(time.sleep, 0.1)
    with capture_logs() as logs, pytest.raises(NotKnown):
        await routing._until(lease_clock() + SOON, asyncio.Event().wait(), "orders")
    await asyncio.sleep(2 * SOON)
    assert logs == []


async def test_a_cancellation_from_outside_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has gone while the deadline's second one was on its way."""
    monkeypatch.setattr(routing, "_CLEAN_UP_SECONDS", SOON)
    cancelled: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append("deadline")
            task.cancel()
            await asyncio.Event().wait()

    task = asyncio.create_task(routing._until(lease_clock() + SOON, work(), "orders"))
    await asyncio.wait([task])
    assert (cancelled, task.cancelled()) == (["deadline"], True)


class Interleaved(Accepting):
    """``opened`` lets the start go on to its COMMIT, which is answered a moment later."""

    def __init__(self) -> None:
        self._tasks = set()
        self.opened = asyncio.Event()
        self.log: list[str] = []

    async def _start(self, _request: Any, _identity: Any, start: Any) -> Any:
        await self.opened.wait()
        if start.given_up:
            raise NotKnown
        start.committing = True
        self.log.append("sent")
        try:
            await asyncio.sleep(SOON)
        except asyncio.CancelledError:
            self.log.append("cancelled on its way")
            raise
        self.log.append("answered")


@pytest.mark.parametrize("before_the_answer", range(4))
@pytest.mark.parametrize("before_the_cancellation", range(4))
async def test_no_commit_is_cancelled_on_its_way(before_the_answer: int, before_the_cancellation: int) -> None:
    """Whichever comes first, and however close they are: the client goes, the database answers."""
    accepting = Interleaved()
    request: Any = SimpleNamespace(call=SimpleNamespace(start_until=lease_clock() + 9, operation=SimpleNamespace(name="orders")))
    supervised = asyncio.create_task(accepting._supervised(request, None))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    _in_turns(before_the_cancellation, supervised.cancel)
    _in_turns(before_the_answer, accepting.opened.set)
    await asyncio.wait([supervised])
    while accepting._tasks:
        await asyncio.wait(accepting._tasks)
    assert supervised.cancelled() or "answered" in accepting.log
    assert accepting.log in ([], ["sent", "answered"])


def _in_turns(turns: int, do: Any) -> None:
    if turns == 0:
        do()
    else:
        asyncio.get_running_loop().call_soon(_in_turns, turns - 1, do)
