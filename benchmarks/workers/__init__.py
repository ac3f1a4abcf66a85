"""Processes that the benchmarks start: each says READY, waits for a line, works, and prints one JSON document."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

__all__ = ["ready_and_wait", "run_worker"]


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
