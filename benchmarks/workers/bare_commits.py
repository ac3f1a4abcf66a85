"""Transactions as a handler of one message would make them without Fencepost and without Kafka: a domain row, and an inbox row."""

import time
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import asyncpg
from uuid_utils.compat import uuid7

from benchmarks.order_messages import INSERT_ORDER
from benchmarks.workers import commit_repeatedly, ready_and_wait, run_worker

if TYPE_CHECKING:
    _Connection: TypeAlias = asyncpg.Connection[Any] | asyncpg.pool.PoolConnectionProxy[Any]
    _Pool: TypeAlias = asyncpg.Pool[Any]
else:
    _Connection = _Pool = Any

_WARM_SECONDS = 0.5


async def _committed(connection: _Connection, *, inbox: bool) -> None:
    event_id = str(uuid7())
    async with connection.transaction():
        if inbox:
            await connection.execute("INSERT INTO inbox (event_id) VALUES ($1)", event_id)
        await connection.execute(INSERT_ORDER, event_id, f"order-{event_id[-4:]}", 1)


async def _committed_by_pool(pool: _Pool, *, inbox: bool) -> None:
    async with pool.acquire() as connection:
        await _committed(connection, inbox=inbox)


async def bare_commits(
    kafka: str, database_url: str, connections: int, inbox: bool, pooled: bool, seconds: float
) -> dict[str, float]:
    """Commits counted over ``seconds``, after a moment that does not count; and the CPU of all of them here. ``pooled``: each takes
    its connection from the driver's pool, as applications do; otherwise each task has one of its own."""
    async with AsyncExitStack() as stack:
        if pooled:
            pool = await stack.enter_async_context(asyncpg.create_pool(database_url, min_size=connections, max_size=connections))
            work = [partial(_committed_by_pool, pool, inbox=inbox)] * connections
        else:
            own = [await asyncpg.connect(database_url) for _ in range(connections)]
            for connection in own:
                stack.push_async_callback(connection.close)
            work = [partial(_committed, connection, inbox=inbox) for connection in own]
        await ready_and_wait()
        began = time.process_time()
        counts = await commit_repeatedly(work, seconds=seconds, warm_seconds=_WARM_SECONDS)
        return {**counts, "cpu_seconds": time.process_time() - began}


if __name__ == "__main__":
    run_worker(bare_commits)
