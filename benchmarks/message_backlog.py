"""Topics full of messages as a service writes them and a relay publishes them; and groups that begin again."""

import asyncio
import time
from typing import Final

import psycopg
from aiokafka import AIOKafkaConsumer, TopicPartition

from benchmarks import backlog
from benchmarks.lab import BenchmarkFailed, Lab
from benchmarks.order_messages import TYPE

__all__ = ["PARTITIONS", "filled_topic", "set_back"]

PARTITIONS: Final = 6
_KEYS: Final = 5_000
_TICK_SECONDS: Final = 0.1
_PUBLISH_SECONDS: Final = 120.0

# Digests, so that no payload is like another and none can be compressed to nothing.
_FILL: Final = f"""
INSERT INTO fencepost.outbox (lane, topic, event_type, key, payload, content_type, record_bytes)
SELECT fencepost.lane_of(g.key), '{{topic}}', '{TYPE}', g.key, g.payload, 'application/json',
       fencepost.record_bytes(g.key, g.payload, NULL, NULL)
FROM (
    SELECT convert_to('order-' || n % {_KEYS}, 'UTF8') AS key,
           convert_to(head.text || left(note.text, {{size}} - length(head.text) - 2) || '"}}}}', 'UTF8') AS payload
    FROM generate_series(1, {{rows}}) AS n
    CROSS JOIN LATERAL (SELECT format('{{{{"order_id":"order-%s","amount":%s,"note":"', n % {_KEYS}, n) AS text) AS head
    CROSS JOIN LATERAL (
        SELECT string_agg(md5(n::text || '-' || piece), '') AS text FROM generate_series(0, {{size}} / 32) AS piece
    ) AS note
) AS g
"""


def filled_topic(lab: Lab, *, rows: int, payload_bytes: int) -> str:
    """A new topic with ``rows`` messages over 5,000 keys, published by a relay from an outbox."""
    topic = lab.topic(PARTITIONS)
    with lab.database() as url, psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_FILL.format(topic=topic, rows=rows, size=payload_bytes).encode())
        with lab.relay(url) as relay:
            deadline = time.monotonic() + _PUBLISH_SECONDS
            while backlog.delivered_rows(connection) < rows:
                relay.check()
                if time.monotonic() > deadline:
                    raise BenchmarkFailed(f"the relay did not publish {rows} messages; its log ends:\n{relay.log_tail()}")
                time.sleep(_TICK_SECONDS)
    return topic


def set_back(lab: Lab, *, group: str, topic: str) -> None:
    """Put a group's offsets back to the beginning, as an operator would; no member may be there."""
    asyncio.run(_set_back(lab.kafka, group, topic))


async def _set_back(kafka: str, group: str, topic: str) -> None:
    client = AIOKafkaConsumer(bootstrap_servers=kafka, group_id=group, enable_auto_commit=False)
    partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    client.assign(partitions)
    await client.start()
    try:
        await client.commit(dict.fromkeys(partitions, 0))
    finally:
        await client.stop()
