"""Topics for tests: a new name each, so that tests in parallel never meet."""

import asyncio
import time
import uuid
from collections.abc import Mapping
from typing import Any, Final, Protocol

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError, TopicAlreadyExistsError, for_code

from tests.support.waiting import eventually

CREATE_SECONDS: Final = 60.0
REQUEST_MILLISECONDS: Final = 5_000
RETRY_SECONDS: Final = 0.2
NO_LEADER: Final = -1


class TopicFactory(Protocol):
    """Creates topics on one cluster: `name = await topic(partitions=4)`."""

    async def __call__(self, partitions: int = 8, *, copies: int | None = None, config: Mapping[str, str] | None = None) -> str:
        """Create a topic with a unique name and return the name; `copies` defaults to 3 or the number of brokers."""


def topic_factory(bootstrap_servers: str) -> TopicFactory:
    """Return a factory for topics of this cluster."""

    async def create(partitions: int = 8, *, copies: int | None = None, config: Mapping[str, str] | None = None) -> str:
        name = f"test-{uuid.uuid4().hex[:16]}"
        await create_topic(bootstrap_servers, name, partitions, copies=copies, config=config)
        return name

    return create


async def create_topic(
    bootstrap_servers: str,
    name: str,
    partitions: int = 8,
    *,
    copies: int | None = None,
    config: Mapping[str, str] | None = None,
) -> None:
    """Create a topic and wait until each partition has a leader.

    Tried again with a new client for a bounded time: right after a broker's end, a client may still be sent to it.
    """
    deadline = time.monotonic() + CREATE_SECONDS
    while True:
        try:
            await _create_once(bootstrap_servers, name, partitions, copies, dict(config or {}))
        except (KafkaError, TimeoutError) as error:
            if time.monotonic() > deadline:
                raise AssertionError(f"topic {name} could not be created within {CREATE_SECONDS:g} s") from error
            await asyncio.sleep(RETRY_SECONDS)
        else:
            return


async def delete_topic(bootstrap_servers: str, name: str) -> None:
    """Delete a topic and wait until the cluster has forgotten it."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers)
    await admin.start()
    try:
        await admin.delete_topics([name])

        async def gone() -> bool:
            return name not in await admin.list_topics()

        await eventually(gone)
    finally:
        await admin.close()


async def _create_once(bootstrap_servers: str, name: str, partitions: int, copies: int | None, config: dict[str, str]) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers, request_timeout_ms=REQUEST_MILLISECONDS)
    try:
        await admin.start()
        brokers = len((await admin.describe_cluster())["brokers"])
        topic = NewTopic(name, partitions, copies or min(3, brokers), topic_configs=config)
        response = await admin.create_topics([topic])
        for _, code, *_ in response.topic_errors:
            if code not in (0, TopicAlreadyExistsError.errno):
                raise for_code(code)(name)

        async def has_leaders() -> bool:
            return _has_leaders(await admin.describe_topics([name]), partitions)

        await eventually(has_leaders, CREATE_SECONDS, message=f"each partition of {name} has a leader")
    finally:
        await admin.close()


def _has_leaders(described: list[dict[str, Any]], partitions: int) -> bool:
    led = [one for one in described[0]["partitions"] if one["leader"] != NO_LEADER and one["error_code"] == 0]
    return len(led) == partitions
