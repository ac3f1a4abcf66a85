"""Processes that the benchmarks start: each says READY, waits for a line, works, and prints one JSON document."""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import uvloop

__all__ = ["commit_repeatedly", "ready_and_wait", "run_worker"]


def run_worker(work: Callable[..., Awaitable[Any]]) -> None:
    """Run ``work`` with the parameters of the command line and print what it returns."""
    parameters = json.loads(sys.argv[1])
    print(json.dumps(uvloop.run(_call(work, parameters))), flush=True)


async def _call(work: Callable[..., Awaitable[Any]], parameters: dict[str, Any]) -> Any:
    return await work(**parameters)


async def ready_and_wait() -> None:
    """Say READY and wait for the start signal."""
    print("READY", flush=True)
    await asyncio.to_thread(sys.stdin.readline)


async def commit_repeatedly(
    transactions: Sequence[Callable[[], Awaitable[object]]], *, seconds: float, warm_seconds: float
) -> dict[str, int]:
    """Run each transaction again and again, side by side. ``commits`` counts over ``seconds``, after ``warm_seconds``
    that count only in ``all_commits``."""
    counted_from = time.monotonic() + warm_seconds
    counts = await asyncio.gather(*[_repeat(one, counted_from, counted_from + seconds) for one in transactions])
    return {"commits": sum(counted for counted, _ in counts), "all_commits": sum(every for _, every in counts)}


async def _repeat(transaction: Callable[[], Awaitable[object]], counted_from: float, until: float) -> tuple[int, int]:
    counted = every = 0
    while (now := time.monotonic()) < until:
        await transaction()
        every += 1
        counted += now >= counted_from
    return counted, every
