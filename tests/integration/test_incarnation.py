"""A topic's name can come back, its incarnation cannot: what the real broker says of topics, made, deleted and made again."""

import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import (
    IncompatibleBrokerVersion,
    InvalidTopicError,
    KafkaConnectionError,
    RequestTimedOutError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)

from consumer_sdk.incarnation import Incarnation, incarnations
from fencepost.errors import ConfigurationError, FencepostError, TransientError
from tests.support.topics import TopicFactory, create_topic
from tests.support.waiting import eventually


@pytest.fixture
async def client(kafka: str) -> AsyncIterator[AIOKafkaClient]:
    client = AIOKafkaClient(bootstrap_servers=kafka)
    await client.bootstrap()
    yield client
    await client.close()


async def delete(kafka: str, name: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        await admin.delete_topics([name])
    finally:
        await admin.close()


async def test_a_topic_made_again_is_another_one_on_the_same_cluster(
    client: AIOKafkaClient, kafka: str, topic: TopicFactory
) -> None:
    name = await topic(partitions=3)
    before = (await incarnations(client, [name]))[name]
    await delete(kafka, name)

    async def gone() -> bool:
        try:
            await incarnations(client, [name])
        except TransientError:
            return True
        return False

    await eventually(gone, message="the topic is deleted")
    await create_topic(kafka, name, 3)
    after = (await incarnations(client, [name]))[name]
    assert after.cluster_id == before.cluster_id
    assert after.topic_id != before.topic_id


async def test_topics_asked_for_together_are_told_apart(client: AIOKafkaClient, topic: TopicFactory) -> None:
    names = [await topic(partitions=1), await topic(partitions=2)]
    found = await incarnations(client, names)
    assert set(found) == set(names)
    assert len({one.topic_id for one in found.values()}) == 2
    assert len({one.cluster_id for one in found.values()}) == 1
    assert found == await incarnations(client, names)


async def test_asking_for_a_missing_topic_waits_and_does_not_make_it(client: AIOKafkaClient) -> None:
    name = f"test-{uuid.uuid4().hex}"
    for _ in range(2):
        with pytest.raises(TransientError, match=f"topic {name}: .*; create it, or correct its name"):
            await incarnations(client, [name])


async def test_a_name_that_no_topic_can_have_is_for_an_operator(client: AIOKafkaClient) -> None:
    with pytest.raises(ConfigurationError, match="no topic can have this name"):
        await incarnations(client, ["a/b"])


class Answer:
    """A broker's answer, as far as it is read."""

    def __init__(self, *topics: tuple[Any, ...], cluster_id: str | None = "cluster") -> None:
        self.topics = [(*topic, False, [], 0, {}) for topic in topics]
        self.cluster_id = cluster_id


class Scripted:
    """A client of one broker that answers, or fails, as the test says."""

    def __init__(self, answer: Answer | Exception, *, node: int | None = 1) -> None:
        self._answer = answer
        self._node = node

    def get_random_node(self) -> int | None:
        return self._node

    async def send(self, node: int, request: object) -> Answer:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


IDENTITY = uuid.uuid4()


@pytest.mark.parametrize(
    ("client", "kind", "text"),
    [
        (Scripted(NotImplementedError()), ConfigurationError, "2.8 or newer"),
        (Scripted(IncompatibleBrokerVersion()), ConfigurationError, "2.8 or newer"),
        (Scripted(Answer((0, "t", uuid.UUID(int=0)))), ConfigurationError, "inter.broker.protocol.version"),
        (Scripted(Answer((0, "t", IDENTITY), cluster_id=None)), ConfigurationError, "2.8 or newer"),
        (Scripted(Answer((TopicAuthorizationFailedError.errno, "t", IDENTITY))), ConfigurationError, "DESCRIBE"),
        (Scripted(Answer((InvalidTopicError.errno, "t", IDENTITY))), ConfigurationError, "correct it"),
        (Scripted(Answer((UnknownTopicOrPartitionError.errno, "t", IDENTITY))), TransientError, "create it"),
        (Scripted(Answer()), TransientError, "leaves out t"),
        (Scripted(Answer(), node=None), TransientError, "bootstrap servers"),
        (Scripted(KafkaConnectionError("down")), TransientError, "KafkaConnectionError"),
        (Scripted(RequestTimedOutError()), TransientError, "is Kafka up"),
        (Scripted(OSError()), TransientError, "is Kafka up"),
    ],
)
async def test_every_other_answer_is_a_typed_error_with_a_remedy(client: Scripted, kind: type[FencepostError], text: str) -> None:
    with pytest.raises(kind, match=text):
        await incarnations(client, ["t"])


async def test_what_is_read_is_cluster_and_topic_id() -> None:
    assert await incarnations(Scripted(Answer((0, "t", IDENTITY))), ["t"]) == {"t": Incarnation("cluster", IDENTITY)}
