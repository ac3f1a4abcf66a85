"""A service at a steady, low rate: BEGIN, enqueue, some work, COMMIT; notes when each commit returned."""

import asyncio
import random
import time
import uuid
from typing import Final

import asyncpg

from benchmarks.workers import ready_and_wait, run_worker

_ENQUEUE: Final = "SELECT fencepost.enqueue($1, 'order.changed', $2, $3, $4)"


async def steady_writers(
    kafka: str, database_url: str, topic: str, writers: int, rate: float, seconds: float, work_seconds: float, payload_bytes: int
) -> dict[str, float]:
    """Event id -> Unix seconds of its commit. ``rate`` is of all writers together."""
    connections = [await asyncpg.connect(database_url) for _ in range(writers)]
    try:
        for connection in connections:
            await connection.prepare(_ENQUEUE)
        await ready_and_wait()
        until = time.monotonic() + seconds
        work = [_write(one, topic, writers / rate, until, work_seconds, payload_bytes) for one in connections]
        return {name: at for committed in await asyncio.gather(*work) for name, at in committed.items()}
    finally:
        for connection in connections:
            await connection.close()


async def _write(
    connection: "asyncpg.Connection[asyncpg.Record]",
    topic: str,
    period: float,
    until: float,
    work_seconds: float,
    payload_bytes: int,
) -> dict[str, float]:
    committed: dict[str, float] = {}
    payload = random.randbytes(payload_bytes)
    due = time.monotonic() + random.uniform(0, period)
    while due < until:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        event_id = uuid.uuid4()
        async with connection.transaction():
            await connection.execute(_ENQUEUE, topic, event_id.bytes[:4].hex().encode(), payload, event_id)
            await asyncio.sleep(work_seconds)
        committed[str(event_id)] = time.time()
        due += period
    return committed


if __name__ == "__main__":
    run_worker(steady_writers)
