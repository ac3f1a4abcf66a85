"""Consumers as tests arrange them: a topic and a database of their own, records as producers write them, and what is left."""

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import asyncpg
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import GroupCoordinatorNotAvailableError
from aiokafka.structs import OffsetAndMetadata
from pydantic import BaseModel

from consumer_sdk import Consumer, MessageHandlers, load_consumer_settings
from consumer_sdk.incarnation import incarnations
from consumer_sdk.starts import note_of
from tests.support.topics import TopicFactory
from tests.support.turns import TakingTurns
from tests.support.waiting import eventually

__all__ = ["SECRETS", "Ping", "Stage", "sample", "stage"]

#: FENCEPOST_IDEMPOTENCY_SECRETS of tests.
SECRETS: Final = "1:QUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUE="
_STOP_SECONDS: Final = 30.0


class Ping(BaseModel):
    """What is sent."""

    n: int


class Stage:
    """One topic, one database, and whoever consumes."""

    def __init__(self, database_url: str, kafka: str, topic: str, connection: "asyncpg.Connection[Any]") -> None:
        self.database_url = database_url
        self.kafka = kafka
        self.topic = topic
        self.connection = connection
        self._producer: AIOKafkaProducer | None = None

    async def send(
        self,
        value: object,
        *,
        type: str = "ping",  # noqa: A002 - the word of CloudEvents
        key: str | None = "k",
        event_id: str | None = None,
        partition: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """Write a message as Fencepost's relay does; its event id. ``value`` None is a tombstone."""
        event_id = event_id or str(uuid.uuid4())
        attributes = {"ce_specversion": "1.0", "ce_id": event_id, "ce_source": "test", "ce_type": type} | dict(headers or {})
        payload = None if value is None else json.dumps(value).encode()
        await self.send_record(payload, key=key, partition=partition, headers=list(attributes.items()))
        return event_id

    async def send_record(
        self,
        value: bytes | None,
        *,
        key: str | None = "k",
        partition: int | None = None,
        headers: Sequence[tuple[str, str]] = (),
        topic: str | None = None,
    ) -> int:
        """Write a record as it is; its offset."""
        if self._producer is None:
            self._producer = AIOKafkaProducer(bootstrap_servers=self.kafka)
            await self._producer.start()
        encoded = [(name, text.encode()) for name, text in headers]
        sent = await self._producer.send_and_wait(
            topic or self.topic, value, key=None if key is None else key.encode(), partition=partition, headers=encoded
        )
        offset: int = sent.offset
        return offset

    def consumer(self, app: MessageHandlers, **settings: object) -> Consumer:
        """A consumer of the topic, not running."""
        given: dict[str, object] = {
            "database_url": self.database_url,
            "kafka_bootstrap_servers": self.kafka,
            "consumer_topics": self.topic,
            "consumer_group": self.topic,
            "consumer_http_port": 0,
            "consumer_commit_interval_ms": 50,
            "consumer_session_timeout_seconds": 6,
            "consumer_stop_grace_seconds": 5,
        }
        return Consumer(app, load_consumer_settings(given | settings))

    @contextlib.asynccontextmanager
    async def running(self, app: MessageHandlers, **settings: object) -> AsyncIterator[Consumer]:
        """A consumer that runs for as long as the block lasts, and is stopped in order then."""
        consumer = self.consumer(app, **settings)
        task = asyncio.create_task(consumer.run())
        try:
            yield consumer
            if task.done():
                task.result()
        finally:
            consumer.stop()
            async with asyncio.timeout(_STOP_SECONDS):
                await task

    async def committed(self, group: str | None = None) -> dict[int, int]:
        """The group's offsets by partition; without partitions that have none."""
        return {partition: kept.offset for partition, kept in (await self._kept(group)).items()}

    async def notes(self) -> dict[int, str]:
        """What stands beside the group's offsets behind the topic's id, by partition: ``left``, or ``held`` and by whom."""
        return {partition: kept.metadata.partition(" ")[2] for partition, kept in (await self._kept(None)).items()}

    async def _kept(self, group: str | None) -> dict[int, OffsetAndMetadata]:
        async with self._admin() as admin:
            try:
                found = await admin.list_consumer_group_offsets(group or self.topic)
            except GroupCoordinatorNotAvailableError:
                return {}  # the cluster's first group, and nobody keeps it yet
        return {partition.partition: kept for partition, kept in found.items() if partition.topic == self.topic}

    async def leave_held(self, process: str = "") -> None:
        """As a process leaves partition 0 that ends before anything is done: at its beginning, and still held."""
        consumer = AIOKafkaConsumer(bootstrap_servers=self.kafka, group_id=self.topic, enable_auto_commit=False)
        await consumer.start()
        try:
            partition = TopicPartition(self.topic, 0)
            topic_id = (await incarnations(consumer._client, [self.topic]))[self.topic].topic_id
            consumer.assign([partition])
            await consumer.commit({partition: OffsetAndMetadata(0, note_of(str(topic_id), held_by=process))})
        finally:
            await consumer.stop()

    async def members(self) -> int:
        """How many the broker counts in the group."""
        async with self._admin() as admin:
            (answer,) = await admin.describe_consumer_groups([self.topic])
        return len(answer.groups[0][5])

    @contextlib.asynccontextmanager
    async def _admin(self) -> AsyncIterator[AIOKafkaAdminClient]:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.kafka)
        await admin.start()
        try:
            yield admin
        finally:
            await admin.close()

    async def trials(self) -> dict[str, int]:
        """How often messages were begun that may have ended a process, and never ended, by run key."""
        rows = await self.connection.fetch("SELECT run_key, trials FROM fencepost.message_trials")
        return {row["run_key"]: row["trials"] for row in rows}

    async def until_committed(self, offsets: Mapping[int, int], group: str | None = None, *, seconds: float = 20) -> None:
        """Wait until the group has these offsets."""

        async def there() -> bool:
            committed = await self.committed(group)
            assert {partition: committed.get(partition) for partition in offsets} == dict(offsets)
            return True

        await eventually(there, seconds)

    async def outcomes(self) -> dict[str, str]:
        """State of each message's row in the ledger, by its run key."""
        rows = await self.connection.fetch("SELECT run_key, state FROM fencepost.effects WHERE operation = 'fencepost.message'")
        return {row["run_key"]: row["state"] for row in rows}

    async def seen(self) -> list[int]:
        """What handlers wrote, in the order of their writes."""
        return [row["n"] for row in await self.connection.fetch("SELECT n FROM seen ORDER BY at")]

    async def dead(self) -> list[asyncpg.Record]:
        """The dead letters, in the order of their places."""
        return await self.connection.fetch('SELECT * FROM fencepost.dead_letters ORDER BY topic, "partition", "offset", step')

    async def close(self) -> None:
        if self._producer is not None:
            await self._producer.stop()
        await self.connection.close()


def sample(consumer: Consumer, name: str, **labels: str) -> float:
    """A metric's value; 0 while it has none."""
    return consumer._metrics.registry.get_sample_value(name, labels) or 0.0


@contextlib.asynccontextmanager
async def stage(database_url: str, kafka: str, topic: TopicFactory, partitions: int = 1) -> AsyncIterator[Stage]:
    """A stage with a table ``seen`` of what handlers wrote."""
    connection = await asyncpg.connect(database_url, connection_class=TakingTurns)
    await connection.execute("CREATE TABLE seen (event_id text, n integer, at timestamptz DEFAULT clock_timestamp())")
    made = Stage(database_url, kafka, await topic(partitions=partitions), connection)
    try:
        yield made
    finally:
        await made.close()
