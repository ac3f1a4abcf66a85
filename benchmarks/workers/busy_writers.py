"""Writers that commit as fast as they can: each transaction changes a domain row and enqueues one event."""

import asyncio
import random
import time
from typing import Any, Final

import asyncpg

from benchmarks.workers import ready_and_wait, run_worker

_DOMAIN_ROWS: Final = 5_000
_CHANGE: Final = "UPDATE domain_orders SET version = version + 1 WHERE id = $1"
_ENQUEUE: Final = "SELECT fencepost.enqueue($1, 'order.changed', $2, $3)"


async def busy_writers(
    kafka: str, database_url: str, topic: str, writers: int, seconds: float, warm_seconds: float, payload_bytes: int
) -> dict[str, Any]:
    """Commits counted over ``seconds``, after ``warm_seconds`` that do not count."""
    connections = [await asyncpg.connect(database_url) for _ in range(writers)]
    try:
        statements = [(await one.prepare(_CHANGE), await one.prepare(_ENQUEUE)) for one in connections]
        await ready_and_wait()
        counted_from = time.monotonic() + warm_seconds
        until = counted_from + seconds
        payload = random.randbytes(payload_bytes)
        work = [
            _write(connection, *prepared, topic, payload, counted_from, until)
            for connection, prepared in zip(connections, statements, strict=True)
        ]
        counts = await asyncio.gather(*work)
        return {"commits": sum(counted for counted, _ in counts), "all_commits": sum(every for _, every in counts)}
    finally:
        for connection in connections:
            await connection.close()


async def _write(
    connection: "asyncpg.Connection[Any]", change: Any, enqueue: Any, topic: str, payload: bytes, counted_from: float, until: float
) -> tuple[int, int]:
    counted = every = 0
    while (now := time.monotonic()) < until:
        order = random.randrange(_DOMAIN_ROWS)
        async with connection.transaction():
            await change.fetchval(order)
            await enqueue.fetchval(topic, b"order-%d" % order, payload)
        every += 1
        counted += now >= counted_from
    return counted, every


if __name__ == "__main__":
    run_worker(busy_writers)
