"""The bare loop: the least that can be done between this table and this topic, as fast as it reasonably gets.

Pages by primary key of all lanes in one statement, the same headers, batches a partition, acknowledged by all replicas;
the next page is read and built while the one before is on its way, and the mark is one small update that nobody waits
for. No lease, no fence, no late rows, no receipt, no deadline, no metric.
"""

import asyncio
import gc
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import asyncpg
from aiokafka import AIOKafkaProducer
from aiokafka.partitioner import murmur2

from benchmarks.workers import ready_and_wait, run_worker
from relay.wire import RecordEncoder

_LANES: Final = 8
_CURSOR: Final = """
DROP TABLE IF EXISTS bare_cursor;
CREATE TABLE bare_cursor (lane smallint PRIMARY KEY, position bigint NOT NULL) WITH (fillfactor = 50);
INSERT INTO bare_cursor SELECT lane, 0 FROM generate_series(0, 7) AS lane;
"""
_PAGE: Final = """
SELECT o.* FROM unnest($1::smallint[], $2::bigint[]) AS c(lane, position)
CROSS JOIN LATERAL (
    SELECT lane, id, false, record_bytes, created_at, event_id::text AS event_id, topic, event_type, key, payload, source,
           content_type, tenant_id, run_id, step, operation, fencing_token, traceparent, tracestate, header_names, header_values
    FROM fencepost.outbox AS p WHERE p.lane = c.lane AND p.id > c.position ORDER BY p.lane, p.id LIMIT $3
) AS o
"""
_MARK: Final = """
UPDATE bare_cursor AS b SET position = c.position
FROM unnest($1::smallint[], $2::bigint[]) AS c(lane, position) WHERE b.lane = c.lane
"""
_BATCH_BYTES: Final = 1_000_000


class BareLoop:
    """``page`` rows of each lane at a time."""

    def __init__(self, producer: AIOKafkaProducer, topic: str, partitions: Sequence[int], page: int) -> None:
        self._producer = producer
        self._topic = topic
        self._page = page
        self._encoder = RecordEncoder("benchmark")
        self._lanes = list(range(_LANES))
        self._positions = [0] * _LANES
        count = len(partitions)
        self._partition_of = lru_cache(65_536)(lambda key: partitions[(murmur2(key) & 0x7FFFFFFF) % count])
        self.marks: list[tuple[float, int]] = []

    async def run(self, page: Any, mark: Any) -> None:
        """Until a page is empty."""
        rows = await page.fetch(self._lanes, self._positions, self._page)
        acks: list[Any] = []
        marking: asyncio.Task[Any] | None = None
        sent_rows = 0
        sent_positions: list[int] = []
        while rows or acks:
            for row in rows:
                self._positions[row["lane"]] = row["id"]
            positions = list(self._positions)
            following = asyncio.create_task(page.fetch(self._lanes, positions, self._page)) if rows else None
            batches = self._build(rows)
            await asyncio.gather(*acks)
            if sent_rows:
                if marking is not None:
                    await marking
                marking = asyncio.create_task(self._mark(mark, sent_positions, sent_rows))
            acks = [await self._producer.send_batch(batch, self._topic, partition=number) for number, batch in batches]
            sent_rows, sent_positions = len(rows), positions
            rows = await following if following is not None else []
        if marking is not None:
            await marking

    async def _mark(self, mark: Any, positions: list[int], rows: int) -> None:
        await mark.fetch(self._lanes, positions)
        self.marks.append((time.time(), rows))

    def _build(self, rows: Sequence[Any]) -> list[tuple[int, Any]]:
        encode, partition_of = self._encoder.encode, self._partition_of
        create_batch = self._producer.create_batch
        open_batches: dict[int, Any] = {}
        batches: list[tuple[int, Any]] = []
        for row in rows:
            _, key, payload, timestamp, headers, _ = encode(row)
            number = partition_of(key)
            batch = open_batches.get(number)
            if batch is None:
                batch = open_batches[number] = create_batch()
                batches.append((number, batch))
            if batch.append(timestamp=timestamp, key=key, value=payload, headers=headers) is None:
                batch = open_batches[number] = create_batch()
                batches.append((number, batch))
                batch.append(timestamp=timestamp, key=key, value=payload, headers=headers)
        return batches


async def bare_loop(kafka: str, database_url: str, topic: str, page: int) -> dict[str, Any]:
    """Drain the outbox once, from its beginning."""
    reader, marker = [await _connect(database_url) for _ in range(2)]
    producer = AIOKafkaProducer(
        bootstrap_servers=kafka, enable_idempotence=True, acks="all", linger_ms=0, max_batch_size=_BATCH_BYTES
    )
    await producer.start()
    try:
        await marker.execute(_CURSOR)
        loop = BareLoop(producer, topic, sorted(await producer.partitions_for(topic)), page)
        statements = await reader.prepare(_PAGE), await marker.prepare(_MARK)
        gc.freeze()
        await ready_and_wait()
        began = time.process_time()
        await loop.run(*statements)
        return {"marks": loop.marks, "cpu_seconds": time.process_time() - began}
    finally:
        await producer.stop()
        await reader.close()
        await marker.close()


async def _connect(database_url: str) -> "asyncpg.Connection[Any]":
    connection = await asyncpg.connect(database_url, server_settings={"synchronous_commit": "off"})
    await connection.set_type_codec(
        "timestamptz", schema="pg_catalog", encoder=lambda value: value, decoder=lambda value: value[0], format="tuple"
    )
    return connection


if __name__ == "__main__":
    run_worker(bare_loop)
