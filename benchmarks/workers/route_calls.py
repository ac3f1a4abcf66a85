"""One client that asks now and then, and notes each answer."""

import asyncio
import json
import time
from typing import Any

from benchmarks.keep_alive import Connection, request
from benchmarks.workers import ready_and_wait, run_worker


async def route_calls(
    kafka: str, port: int, way: str, prefix: str, count: int, pause_seconds: float, work_seconds: float
) -> list[dict[str, Any]]:
    """Of each call: its run, how long it took, how long its workflow says it worked, when the answer was read (Unix seconds)."""
    client = await Connection.open(port)
    await ready_and_wait()
    calls = []
    for number in range(count):
        text = request(way, number, key=f"{prefix}-{number}", work_seconds=work_seconds)
        began = time.monotonic()
        answer = await client.ask(text, 201)
        took, at = time.monotonic() - began, time.time()
        worked = json.loads(answer.body)["worked_seconds"]
        calls.append({"run": answer.run_id, "seconds": took, "worked_seconds": worked, "at": at})
        await asyncio.sleep(pause_seconds)
    client.close()
    return calls


if __name__ == "__main__":
    run_worker(route_calls)
