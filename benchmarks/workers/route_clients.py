"""Clients that ask as fast as they are answered, each on a connection of its own; the ways to ask take turns in windows."""

import asyncio
import random
import time
import uuid

from benchmarks.keep_alive import Connection, request
from benchmarks.workers import ready_and_wait, run_worker


async def route_clients(
    kafka: str, port: int, connections: int, windows: list[str], seconds: float, warm_seconds: float, known: int
) -> list[dict[str, int]]:
    """Answers of each window: those within its ``seconds``, and all, also those before and while it warmed up."""
    clients = [await Connection.open(port) for _ in range(connections)]
    await ready_and_wait()
    counts = [await _window(clients, way, seconds, warm_seconds, known) for way in windows]
    for client in clients:
        client.close()
    return counts


async def _window(clients: list[Connection], way: str, seconds: float, warm_seconds: float, known: int) -> dict[str, int]:
    counted_from = time.monotonic() + warm_seconds
    until = counted_from + seconds
    counts = await asyncio.gather(*[_ask(client, way, counted_from, until, known) for client in clients])
    return {"answers": sum(counted for counted, _ in counts), "all": sum(every for _, every in counts)}


async def _ask(client: Connection, way: str, counted_from: float, until: float, known: int) -> tuple[int, int]:
    counted = every = 0
    status = 202 if way == "first_without_wait" else 201
    while time.monotonic() < until:
        number = random.randrange(known)
        key = f"known-{number}" if way == "replay" else uuid.uuid4().hex
        answer = await client.ask(request(way, number, key=key), status)
        if answer.replayed != (way == "replay"):
            raise RuntimeError(f"{way}: a run was started, or found, that should not be")
        every += 1
        counted += counted_from <= time.monotonic() < until
    return counted, every


if __name__ == "__main__":
    run_worker(route_clients)
