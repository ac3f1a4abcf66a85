"""A consumer that notes when each event id arrived first. It ends at the signal that starts others."""

import asyncio
import contextlib
import time
from typing import Any

from aiokafka import AIOKafkaConsumer

from benchmarks.workers import ready_and_wait, run_worker
from fencepost.wire import CE_ID

_LINGER_SECONDS = 1.0


async def consumer(kafka: str, topics: list[str]) -> dict[str, float]:
    """Event id -> Unix seconds of its first arrival."""
    client = AIOKafkaConsumer(
        *topics, bootstrap_servers=kafka, group_id=None, auto_offset_reset="earliest", enable_auto_commit=False
    )
    await client.start()
    try:
        arrivals: dict[str, float] = {}
        reading = asyncio.create_task(_read(client, arrivals))
        await ready_and_wait()
        await asyncio.sleep(_LINGER_SECONDS)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        return arrivals
    finally:
        await client.stop()


async def _read(client: Any, arrivals: dict[str, float]) -> None:
    while True:
        batches = await client.getmany(timeout_ms=1_000)
        now = time.time()
        for records in batches.values():
            for record in records:
                arrivals.setdefault(dict(record.headers)[CE_ID].decode(), now)


if __name__ == "__main__":
    run_worker(consumer)
