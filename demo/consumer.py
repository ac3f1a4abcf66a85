"""A plain Kafka consumer. All it knows of Fencepost is that the event's id is in the header ``ce_id``."""

import asyncio
import json
import time
from typing import Any

from aiokafka import AIOKafkaConsumer

from demo.audit import Event, Reading

__all__ = ["Consumer"]

_EVENT_ID = "ce_id"


class Consumer:
    """Reads a topic from its beginning for as long as the block lasts; ``readings`` grows meanwhile."""

    def __init__(self, bootstrap_servers: str, topic: str) -> None:
        self.readings: list[Reading] = []
        self.received_at: dict[Event, float] = {}
        self._consumer = AIOKafkaConsumer(
            topic, bootstrap_servers=bootstrap_servers, group_id=None, auto_offset_reset="earliest", enable_auto_commit=False
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Consumer":
        try:
            await self._consumer.start()
        except BaseException:
            await self._consumer.stop()
            raise
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._consumer.stop()

    def check(self) -> None:
        """Raise what ended the reading, if anything did."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def at_end(self) -> bool:
        """Whether everything that the topic holds now has been read."""
        ends = await self._consumer.end_offsets(list(self._consumer.assignment()))
        return all([await self._consumer.position(partition) >= end for partition, end in ends.items()])

    async def _read(self) -> None:
        while True:
            batches = await self._consumer.getmany(timeout_ms=1_000)
            now = time.time()
            for records in batches.values():
                for record in records:
                    event = _event(record)
                    self.readings.append(Reading(event, now))
                    self.received_at.setdefault(event, now)


def _event(record: Any) -> Event:
    headers = dict(record.headers)
    return Event(headers[_EVENT_ID].decode(), record.key.decode(), json.loads(record.value)["version"])
