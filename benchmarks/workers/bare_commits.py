"""Transactions as a handler of one message would make them without Fencepost and without Kafka: a domain row, and an inbox row."""

import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import asyncpg
from uuid_utils.compat import uuid7

from benchmarks.order_messages import INSERT_ORDER
from benchmarks.workers import commit_repeatedly, ready_and_wait, run_worker

if TYPE_CHECKING:
    _Connection: TypeAlias = asyncpg.Connection[Any]
else:
    _Connection = asyncpg.Connection

_WARM_SECONDS = 0.5


async def _committed(connection: _Connection, *, inbox: bool) -> None:
    event_id = str(uuid7())
    async with connection.transaction():
        if inbox:
            await connection.execute("INSERT INTO inbox (event_id) VALUES ($1)", event_id)
        await connection.execute(INSERT_ORDER, event_id, f"order-{event_id[-4:]}", 1)


async def bare_commits(kafka: str, database_url: str, connections: int, inbox: bool, seconds: float) -> dict[str, float]:
    """Commits counted over ``seconds``, after a moment that does not count; and the CPU of all of them here."""
    pool = [await asyncpg.connect(database_url) for _ in range(connections)]
    try:
        await ready_and_wait()
        began = time.process_time()
        work = [partial(_committed, connection, inbox=inbox) for connection in pool]
        counts = await commit_repeatedly(work, seconds=seconds, warm_seconds=_WARM_SECONDS)
        return {**counts, "cpu_seconds": time.process_time() - began}
    finally:
        for connection in pool:
            await connection.close()


if __name__ == "__main__":
    run_worker(bare_commits)
