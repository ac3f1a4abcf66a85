"""Writers that commit as fast as they can: each transaction changes a domain row and enqueues one event."""

import random
from functools import partial
from typing import Any, Final

import asyncpg

from benchmarks.workers import commit_repeatedly, ready_and_wait, run_worker

_DOMAIN_ROWS: Final = 5_000
_CHANGE: Final = "UPDATE domain_orders SET version = version + 1 WHERE id = $1"
_ENQUEUE: Final = "SELECT fencepost.enqueue($1, 'order.changed', $2, $3)"


async def busy_writers(
    kafka: str, database_url: str, topic: str, writers: int, seconds: float, warm_seconds: float, payload_bytes: int
) -> dict[str, int]:
    """Commits counted over ``seconds``, after ``warm_seconds`` that do not count."""
    connections = [await asyncpg.connect(database_url) for _ in range(writers)]
    try:
        statements = [(await one.prepare(_CHANGE), await one.prepare(_ENQUEUE)) for one in connections]
        payload = random.randbytes(payload_bytes)
        work = [
            partial(_write, connection, *prepared, topic, payload)
            for connection, prepared in zip(connections, statements, strict=True)
        ]
        await ready_and_wait()
        return await commit_repeatedly(work, seconds=seconds, warm_seconds=warm_seconds)
    finally:
        for connection in connections:
            await connection.close()


async def _write(connection: "asyncpg.Connection[Any]", change: Any, enqueue: Any, topic: str, payload: bytes) -> None:
    order = random.randrange(_DOMAIN_ROWS)
    async with connection.transaction():
        await change.fetchval(order)
        await enqueue.fetchval(topic, b"order-%d" % order, payload)


if __name__ == "__main__":
    run_worker(busy_writers)
