"""Clients that start runs which nobody executes yet, and wait for their results."""

import asyncio
import time
from typing import Any, Final

from benchmarks.keep_alive import Connection, request
from benchmarks.workers import ready_and_wait, run_worker

#: Fewer than a principal may have waiting by default.
_EACH_USER: Final = 100


async def route_waiters(kafka: str, port: int, count: int) -> list[dict[str, Any]]:
    """Of each answer its run, and when it was read (Unix seconds). They are asked for before the start signal."""
    clients = [await Connection.open(port) for _ in range(count)]
    waiting = [asyncio.create_task(_wait(client, number)) for number, client in enumerate(clients)]
    await ready_and_wait()
    answers = await asyncio.gather(*waiting)
    for client in clients:
        client.close()
    return answers


async def _wait(client: Connection, number: int) -> dict[str, Any]:
    text = request("first", number, key=f"waiter-{number}", user=f"user-{number // _EACH_USER}")
    answer = await client.ask(text, 201)
    return {"run": answer.run_id, "at": time.time()}


if __name__ == "__main__":
    run_worker(route_waiters)
