"""Produces straight to Kafka at a steady rate, as if there were no database: the floor of every latency here."""

import asyncio
import time
import uuid
from random import randbytes

from aiokafka import AIOKafkaProducer

from benchmarks.workers import ready_and_wait, run_worker
from fencepost.wire import CE_ID


async def direct_producer(kafka: str, topic: str, rate: float, seconds: float, payload_bytes: int) -> dict[str, float]:
    """Event id -> Unix seconds right before it was given to the client."""
    producer = AIOKafkaProducer(bootstrap_servers=kafka, enable_idempotence=True, acks="all", linger_ms=0)
    await producer.start()
    try:
        await producer.partitions_for(topic)
        payload = randbytes(payload_bytes)
        await ready_and_wait()
        return await _produce(producer, topic, 1 / rate, time.monotonic() + seconds, payload)
    finally:
        await producer.stop()


async def _produce(producer: AIOKafkaProducer, topic: str, period: float, until: float, payload: bytes) -> dict[str, float]:
    sent: dict[str, float] = {}
    acknowledgements = []
    due = time.monotonic()
    while due < until:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        event_id = uuid.uuid4()
        sent[str(event_id)] = time.time()
        headers = [(CE_ID, str(event_id).encode())]
        acknowledgements.append(await producer.send(topic, payload, event_id.bytes[:4].hex().encode(), headers=headers))
        due += period
    await asyncio.gather(*acknowledgements)
    return sent


if __name__ == "__main__":
    run_worker(direct_producer)
