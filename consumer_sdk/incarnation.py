"""Which topic a name means now: a topic that was deleted and made again has the old name, old offsets and another id.

(topic, partition, offset) names a record for ever only together with the cluster and the topic's id (KIP-516). aiokafka asks
for no ids, so the request is here: Metadata 11, which every broker since Kafka 2.8 answers; names and nothing else are asked
for, and no topic is created by asking.
"""

from collections.abc import Collection, Mapping
from io import BytesIO
from typing import Any, ClassVar, Final, NamedTuple
from uuid import UUID

from aiokafka.client import AIOKafkaClient
from aiokafka.errors import (
    IncompatibleBrokerVersion,
    InvalidTopicError,
    KafkaError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    for_code,
)
from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Schema, TaggedFields

from fencepost.errors import ConfigurationError, FencepostError, TransientError

__all__ = ["Incarnation", "UnknownTopic", "incarnations"]

_NO_ID: Final = UUID(int=0)
_REMEDIES: Final[Mapping[int, str]] = {
    UnknownTopicOrPartitionError.errno: "create it, or correct its name",
    TopicAuthorizationFailedError.errno: "grant the consumer DESCRIBE and READ on it",
    InvalidTopicError.errno: "no topic can have this name; correct it",
}


class UnknownTopic(TransientError):
    """There is no such topic, as far as the broker that was asked has heard."""


class Incarnation(NamedTuple):
    """One life of a topic on one cluster."""

    cluster_id: str
    topic_id: UUID


async def incarnations(client: AIOKafkaClient, topics: Collection[str]) -> Mapping[str, Incarnation]:
    """Return what each of these topics is now, as one broker of the started client knows it.

    Raises ``TransientError`` while no broker answers or one of them does not exist, and ``ConfigurationError`` where waiting
    cannot help.
    """
    answer = await _asked(client, topics)
    if not answer.cluster_id:
        raise ConfigurationError("the Kafka cluster has no id; brokers must be of version 2.8 or newer")
    found = {name: Incarnation(answer.cluster_id, _topic_id(code, name, identity)) for code, name, identity, *_ in answer.topics}
    if missing := sorted(set(topics) - found.keys()):
        raise TransientError(f"Kafka's answer leaves out {', '.join(missing)}; try again")
    return found


async def _asked(client: AIOKafkaClient, topics: Collection[str]) -> Any:
    node = client.get_random_node()
    if node is None:
        raise TransientError("no Kafka broker is known; is Kafka up, and are the bootstrap servers right?")
    try:
        return await client.send(node, _MetadataRequest(topics))
    except (NotImplementedError, IncompatibleBrokerVersion):
        raise ConfigurationError("the Kafka broker tells no topic ids; brokers must be of version 2.8 or newer") from None
    except (KafkaError, OSError, TimeoutError) as error:
        raise TransientError(f"a Kafka broker does not answer ({type(error).__name__}); is Kafka up?") from error


def _topic_id(code: int, name: str, identity: UUID) -> UUID:
    if code:
        error = for_code(code)
        kind = UnknownTopic if error is UnknownTopicOrPartitionError else _kind_of(error)
        raise kind(f"topic {name}: {error.__name__}; {_REMEDIES.get(code, 'see the log of the Kafka broker')}")
    if identity == _NO_ID:
        raise ConfigurationError(f"topic {name} has no id; set inter.broker.protocol.version to 2.8 or newer")
    return identity


def _kind_of(error: type[KafkaError]) -> type[FencepostError]:
    return TransientError if error.retriable else ConfigurationError


class _Uuid(AbstractType[UUID]):  # type: ignore[misc]
    @classmethod
    def encode(cls, value: UUID) -> bytes:
        return value.bytes

    @classmethod
    def decode(cls, data: BytesIO) -> UUID:
        return UUID(bytes=data.read(16))


class _MetadataResponse11(Response):  # type: ignore[misc]
    API_KEY: ClassVar[int] = 3
    API_VERSION: ClassVar[int] = 11
    SCHEMA: ClassVar[Schema] = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32), ("host", CompactString()), ("port", Int32), ("rack", CompactString()), ("tags", TaggedFields)
            ),
        ),
        ("cluster_id", CompactString()),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("name", CompactString()),
                ("topic_id", _Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("in_sync", CompactArray(Int32)),
                        ("offline", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class _MetadataRequest11(RequestStruct):  # type: ignore[misc]
    FLEXIBLE_VERSION: ClassVar[bool] = True
    API_KEY: ClassVar[int] = 3
    API_VERSION: ClassVar[int] = 11
    RESPONSE_TYPE: ClassVar[type[Response]] = _MetadataResponse11
    SCHEMA: ClassVar[Schema] = Schema(
        ("topics", CompactArray(("topic_id", _Uuid), ("name", CompactString()), ("tags", TaggedFields))),
        ("allow_auto_topic_creation", Boolean),
        ("include_topic_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


class _MetadataRequest(Request[_MetadataRequest11]):  # type: ignore[misc]
    API_KEY: ClassVar[int] = 3

    def __init__(self, topics: Collection[str]) -> None:
        self._topics = topics

    def build(self, request_struct_class: type[_MetadataRequest11]) -> _MetadataRequest11:
        return request_struct_class([(_NO_ID, name, {}) for name in self._topics], False, False, {})
