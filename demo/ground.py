"""What a run stands on: a database and topics of its own, removed afterwards."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError, for_code

from fencepost.devservices import Services, ServicesError
from migrations import migrate

__all__ = ["PARTITIONS", "database", "topics"]

#: Of each topic.
PARTITIONS: Final = 6
_LEADER_SECONDS: Final = 20.0
_TICK_SECONDS: Final = 0.05


@asynccontextmanager
async def database(services: Services) -> AsyncIterator[tuple[str, int]]:
    """A migrated database: its address, and how many migrations were applied."""
    url = await asyncio.to_thread(services.create_database)
    try:
        yield url, len(await migrate(url))
    finally:
        await asyncio.to_thread(services.drop_database, url)


@asynccontextmanager
async def topics(bootstrap_servers: str, names: Sequence[str]) -> AsyncIterator[None]:
    """Topics whose partitions all have a leader."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers)
    await admin.start()
    try:
        response = await admin.create_topics([NewTopic(name, PARTITIONS, 1) for name in names])
        for name, code, *_ in response.topic_errors:
            if code:
                raise for_code(code)(name)
        await _until_led(admin, names)
        yield
    finally:
        with contextlib.suppress(KafkaError):
            await admin.delete_topics(list(names))
        await admin.close()


async def _until_led(admin: AIOKafkaAdminClient, names: Sequence[str]) -> None:
    deadline = time.monotonic() + _LEADER_SECONDS
    while True:
        partitions = [one for topic in await admin.describe_topics(list(names)) for one in topic["partitions"]]
        if len(partitions) == PARTITIONS * len(names) and all(partition["leader"] >= 0 for partition in partitions):
            return
        if time.monotonic() > deadline:
            raise ServicesError(f"topics {', '.join(names)} have no leader on every partition; try again on a less busy machine")
        await asyncio.sleep(_TICK_SECONDS)
