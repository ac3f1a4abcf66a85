"""A service that ends, for a process of its own: python -m tests.support.failing_service FAULT LEFT. What it leaves never ends."""

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

from consumer_sdk.service import run_service
from fencepost.errors import ConfigurationError, InvariantViolated

FAULTS: Final[Mapping[str, Callable[[], Exception]]] = {
    "configuration": lambda: ConfigurationError("the secrets are gone"),
    "invariant": lambda: InvariantViolated("a part of the worker failed"),
    "other": lambda: ValueError("a row's secret"),
}


async def _stay() -> None:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


async def _spawn() -> None:
    """Hands what it has to clean up to another task."""
    try:
        await asyncio.Event().wait()
    finally:
        _kept.append(asyncio.create_task(_stay()))


async def _generate() -> AsyncIterator[None]:
    try:
        yield
    finally:
        await _stay()


async def _exit() -> None:
    _kept.append(asyncio.create_task(_stay()))
    sys.exit(3)


async def _sleep() -> None:
    await asyncio.to_thread(time.sleep, 3600)


async def _exit_at_its_end() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        sys.exit(0)


async def _leave(what: str) -> None:
    if what == "generator":
        _kept.append(generator := _generate())
        await anext(generator)
    elif what == "thread":
        threading.Thread(target=time.sleep, args=(3600,)).start()
    elif what != "nothing":
        left = {
            "task": _stay,
            "spawning task": _spawn,
            "exiting task": _exit,
            "task that exits at its end": _exit_at_its_end,
            "worker thread": _sleep,
        }[what]
        _kept.append(asyncio.create_task(left()))
        await asyncio.sleep(0.05 if what == "worker thread" else 0)


_kept: Final[list[object]] = []


class _Fails:
    left_behind = 0

    def stop(self) -> None: ...

    async def run(self) -> None:
        _, fault, left = sys.argv
        await _leave(left)
        if fault != "none":
            raise FAULTS[fault]()
        if left == "exiting task":
            await asyncio.Event().wait()


if __name__ == "__main__":
    run_service(_Fails)
