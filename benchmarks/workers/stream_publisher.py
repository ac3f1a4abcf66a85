"""Stores chunks at a steady, low rate as a worker does: an insert, and then the bell in a statement of its own."""

import asyncio
import json
import time
import uuid

import asyncpg

from benchmarks.stream_rows import INSERT_CHUNK, RING
from benchmarks.workers import ready_and_wait, run_worker


async def stream_publisher(
    kafka: str, database_url: str, tenant: str, roots: list[str], rate: float, seconds: float, padding: str
) -> int:
    """How many it stored, in turn into each of the streams. Each chunk says when its publishing began."""
    connection = await asyncpg.connect(database_url)
    try:
        await ready_and_wait()
        stored, began = 0, time.monotonic()
        while (due := began + stored / rate) < began + seconds:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            root, offset = uuid.UUID(roots[stored % len(roots)]), stored // len(roots)
            data = json.dumps({"at": time.time(), "text": padding}, separators=(",", ":")).encode()
            await connection.execute(INSERT_CHUNK, root, tenant, offset, data)
            await connection.execute(RING, [root])
            stored += 1
        return stored
    finally:
        await connection.close()


if __name__ == "__main__":
    run_worker(stream_publisher)
