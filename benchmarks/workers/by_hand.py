"""A consumer as an application would write it without Fencepost: fetch, an inbox row and a domain row a message, commit offsets.

What it leaves out is what the SDK is for: order per key, retries, dead letters, time limits, rebalances in the middle of a batch.
"""

import asyncio
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import asyncpg
from aiokafka import AIOKafkaConsumer

from benchmarks.order_messages import INSERT_ORDER, Order
from benchmarks.workers import ready_and_wait, run_worker
from fencepost.wire import CE_ID

if TYPE_CHECKING:
    _Connection: TypeAlias = asyncpg.Connection[Any]
else:
    _Connection = asyncpg.Connection

_POLL_MS = 200
_MOST_AT_ONCE = 500
_INBOX = "INSERT INTO inbox (event_id) VALUES ($1) ON CONFLICT DO NOTHING"
_NEW = "INSERT 0 1"


async def by_hand(kafka: str, database_url: str, topic: str, group: str, rows: int, connections: int) -> dict[str, float]:
    """Seconds and CPU of ``rows`` messages from the first on, with as many at once as there are connections."""
    client = AIOKafkaConsumer(
        topic, bootstrap_servers=kafka, group_id=group, auto_offset_reset="earliest", enable_auto_commit=False
    )
    pool = [await asyncpg.connect(database_url) for _ in range(connections)]
    try:
        await ready_and_wait()
        await client.start()
        done, began, cpu = 0, 0.0, 0.0
        while done < rows:
            fetched = await client.getmany(timeout_ms=_POLL_MS, max_records=_MOST_AT_ONCE)
            if fetched and not done:
                began, cpu = time.monotonic(), time.process_time()
            records = [record for batch in fetched.values() for record in batch]
            waiting = iter(records)
            await asyncio.gather(*[_work(connection, waiting) for connection in pool])
            if records:
                await client.commit({partition: batch[-1].offset + 1 for partition, batch in fetched.items()})
            done += len(records)
        return {"seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - cpu}
    finally:
        await client.stop()
        for connection in pool:
            await connection.close()


async def _work(connection: _Connection, records: Iterator[Any]) -> None:
    for record in records:
        event_id = dict(record.headers)[CE_ID].decode()
        order = Order.model_validate_json(record.value)
        async with connection.transaction():
            if await connection.execute(_INBOX, event_id) == _NEW:
                await connection.execute(INSERT_ORDER, event_id, order.order_id, order.amount)


if __name__ == "__main__":
    run_worker(by_hand)
