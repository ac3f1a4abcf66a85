"""The naive relay, as it is written first: lock some rows, send each and wait, update each, commit."""

import time
from typing import Any, Final

import asyncpg
from aiokafka import AIOKafkaProducer

from benchmarks.workers import ready_and_wait, run_worker
from relay.wire import RecordEncoder

_ROWS: Final = 100
_TABLE: Final = """
DROP TABLE IF EXISTS naive_outbox;
CREATE TABLE naive_outbox (LIKE fencepost.outbox, published_at timestamptz, PRIMARY KEY (id));
CREATE INDEX ON naive_outbox (id) WHERE published_at IS NULL;
"""
_COPY: Final = "INSERT INTO naive_outbox SELECT *, NULL FROM fencepost.outbox ORDER BY id LIMIT $1"
_TAKE: Final = """
SELECT lane, id, false AS late, record_bytes, created_at, event_id::text AS event_id, topic, event_type, key, payload, source,
       content_type, tenant_id, run_id, step, operation, fencing_token, traceparent, tracestate, header_names, header_values
FROM naive_outbox WHERE published_at IS NULL ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED
"""
_DONE: Final = "UPDATE naive_outbox SET published_at = now() WHERE id = $1"


async def naive(kafka: str, database_url: str, topic: str, rows: int) -> dict[str, Any]:
    """Relay ``rows`` rows of its own table."""
    connection = await asyncpg.connect(database_url)
    await connection.set_type_codec(
        "timestamptz", schema="pg_catalog", encoder=lambda value: value, decoder=lambda value: value[0], format="tuple"
    )
    producer = AIOKafkaProducer(bootstrap_servers=kafka, enable_idempotence=True, acks="all")
    await producer.start()
    try:
        await connection.execute(_TABLE)
        await connection.execute(_COPY, rows)
        await connection.execute("VACUUM ANALYZE naive_outbox")
        await ready_and_wait()
        began = time.process_time()
        marks = await _relay(connection, producer, topic)
        return {"marks": marks, "cpu_seconds": time.process_time() - began}
    finally:
        await producer.stop()
        await connection.close()


async def _relay(connection: "asyncpg.Connection[Any]", producer: AIOKafkaProducer, topic: str) -> list[tuple[float, int]]:
    encoder = RecordEncoder("benchmark")
    marks: list[tuple[float, int]] = []
    while True:
        async with connection.transaction():
            rows = await connection.fetch(_TAKE, _ROWS)
            for row in rows:
                await producer.send_and_wait(topic, row["payload"], row["key"], headers=encoder.encode(row).headers)
                await connection.execute(_DONE, row["id"])
        if not rows:
            return marks
        marks.append((time.time(), len(rows)))


if __name__ == "__main__":
    run_worker(naive)
