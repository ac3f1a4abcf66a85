"""The broker adapter: one member of a consumer group. The broker's errors are translated here, once, into what to do about them."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition, errors
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from consumer_sdk.consumer_settings import ConsumerSettings
from consumer_sdk.incarnation import Incarnation, UnknownTopic, incarnations
from consumer_sdk.raw_fetch import RawBatch, fetch_batch
from consumer_sdk.retention_check import topic_retention
from fencepost.clock import lease_clock
from fencepost.errors import ConfigurationError, InvariantViolated, TransientError

__all__ = ["Committed", "KafkaMember", "UnreadableRecord"]

_log = structlog.get_logger(__name__)

_T = TypeVar("_T")

_START_SECONDS: Final = 30.0
_ANSWER_SECONDS: Final = 30.0
_TELL_FENCING_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 5.0
_MAX_POLL_INTERVAL_MS: Final = 300_000
# How soon partitions are found that were added, and those of a topic that was away.
_METADATA_AGE_MS: Final = 30_000
# What a fetch may bring, all partitions of a broker together: the client holds about as much again.
_FETCH_BYTES: Final = 16 * 1024 * 1024
# Brokers deliver a larger record all the same, by itself.
_PARTITION_FETCH_BYTES: Final = 1024 * 1024

#: An operator must act: no right, a group of another kind, or a time-out that the broker does not allow.
_FATAL: Final = (
    errors.TopicAuthorizationFailedError,
    errors.GroupAuthorizationFailedError,
    errors.ClusterAuthorizationFailedError,
    errors.InconsistentGroupProtocolError,
    errors.InvalidGroupIdError,
    errors.InvalidSessionTimeoutError,
    errors.UnsupportedVersionError,
)


class _FencedInstanceIdError(errors.BrokerResponseError):  # type: ignore[misc]
    """aiokafka has no name for it, and would tell of it as of any unknown error."""

    errno = 82
    message = "FENCED_INSTANCE_ID"
    description = "Another process has joined the group under this static member's name."


errors.kafka_errors.setdefault(_FencedInstanceIdError.errno, _FencedInstanceIdError)
# As the client quotes it.
_FENCED: Final = _FencedInstanceIdError.__name__

Committed = tuple[int, str]


class UnreadableRecord(Exception):
    """The client cannot unpack a record. Records that it had unpacked for the same answer are lost with it: seek and read again."""


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, revoked: Callable[[], Awaitable[None]], assigned: Callable[[Collection[TopicPartition]], None]) -> None:
        self._revoked = revoked
        self._assigned = assigned

    async def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        """The group takes back all partitions: aiokafka's protocol is eager."""
        await self._revoked()

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        self._assigned(assigned)


class KafkaMember:
    """``revoked`` is awaited before the group gives partitions to others; ``assigned`` is told of new ones."""

    def __init__(
        self,
        settings: ConsumerSettings,
        *,
        client_id: str,
        revoked: Callable[[], Awaitable[None]],
        assigned: Callable[[Collection[TopicPartition]], None],
    ) -> None:
        self._topics = settings.topics
        self._settings = settings
        self._listener = _Listener(revoked, self._mind_assigned)
        self._assigned = assigned
        self._member_id: str | None = None
        self._member_since = 0.0
        self._fencing_told = -_TELL_FENCING_SECONDS
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=settings.kafka_bootstrap_servers,
            group_id=settings.consumer_group,
            group_instance_id=settings.consumer_instance or None,
            client_id=client_id,
            enable_auto_commit=False,
            auto_offset_reset="earliest",  # where an offset is gone; where a group begins is decided by `begin`
            isolation_level=settings.consumer_isolation,
            session_timeout_ms=int(settings.consumer_session_timeout_seconds * 1000),
            heartbeat_interval_ms=int(settings.consumer_session_timeout_seconds * 1000 / 3),
            max_poll_interval_ms=_MAX_POLL_INTERVAL_MS,
            metadata_max_age_ms=_METADATA_AGE_MS,
            rebalance_timeout_ms=int(settings.consumer_rebalance_grace_seconds * 1000) + 30_000,
            fetch_max_bytes=_FETCH_BYTES,
            max_partition_fetch_bytes=_PARTITION_FETCH_BYTES,
        )

    async def start(self) -> None:
        """Connect. Raises ``TransientError``; nothing is left open then."""
        try:
            async with asyncio.timeout(_START_SECONDS):
                await self._consumer.start()
        except (errors.KafkaError, OSError, TimeoutError) as error:
            await self.stop()
            raise TransientError(f"cannot reach Kafka: {type(error).__name__}") from error
        except BaseException:
            await self.stop()
            raise

    def join(self) -> None:
        """Join the group."""
        self._consumer.subscribe(topics=list(self._topics), listener=self._listener)

    @property
    def has_coordinator(self) -> bool:
        """Whether the broker that keeps the group is known: no more, soon after it fell silent. Polls just bring nothing then."""
        return self._consumer._coordinator.coordinator_id is not None

    def _mind_assigned(self, partitions: Collection[TopicPartition]) -> None:
        self._mind_fencing()
        self._assigned(partitions)

    def _mind_fencing(self) -> None:
        """A static member keeps its id through rebalances. It loses it when its session has run out, and sooner only to another
        process that joins under its name. It is told of that where it joins itself; its heartbeats and commits hear that it is
        unknown, and it joins anew."""
        member_id, now = self._consumer._coordinator.member_id, lease_clock()
        if not self._settings.consumer_instance or member_id == self._member_id:
            return
        sooner = self._member_id is not None and now - self._member_since < self._settings.consumer_session_timeout_seconds
        if sooner:
            self._tell_fencing()
        self._member_id, self._member_since = member_id, now

    def _tell_fencing(self) -> None:
        if lease_clock() - self._fencing_told < _TELL_FENCING_SECONDS:
            return
        self._fencing_told = lease_clock()
        _log.error(
            "instance_shared",
            instance=self._settings.consumer_instance,
            remedy="another process has the same FENCEPOST_CONSUMER_INSTANCE, and they take the partitions from each other; "
            "give each process one of its own",
        )

    async def poll(
        self, *partitions: TopicPartition, most: int | None, milliseconds: int
    ) -> Mapping[TopicPartition, Sequence[Any]]:
        """Records that have come, waited for at most so long, of these partitions or of all.

        Whatever it raises, ``UnreadableRecord`` too, records may be lost that it had in hand: seek. ``InvariantViolated``: the
        client has given up for good.
        """
        try:
            records: Mapping[TopicPartition, Sequence[Any]] = await self._translated(
                self._consumer.getmany(*partitions, timeout_ms=milliseconds, max_records=most)
            )
        except UnicodeDecodeError:
            raise UnreadableRecord from None  # without its cause, which carries the bytes
        except TransientError as error:
            self._mend(str(error.__cause__))
            raise
        return records

    def _mend(self, told: str) -> None:
        """What the client does beside has no other way to tell: without its heart it would be no member for ever."""
        if _FENCED in told:
            self._tell_fencing()
        coordinator = self._consumer._coordinator
        if coordinator._coordination_task.done():
            raise InvariantViolated("the Kafka client has ended its part in the group")
        heart = coordinator._heartbeat_task
        if heart is not None and heart.done() and not heart.cancelled() and heart.exception() is not None:
            coordinator.request_rejoin()

    def seek(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Go on at these offsets."""
        for partition, offset in offsets.items():
            with contextlib.suppress(errors.IllegalStateError):  # the partition is another's by now
                self._consumer.seek(partition, offset)

    async def fetch_batch(self, partition: TopicPartition, offset: int) -> RawBatch:
        """The batch that holds an offset, read by other means."""
        return await fetch_batch(self._consumer._client, partition, offset)

    async def beginning_of(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]:
        """The offsets of the first records that there are."""
        found: Mapping[TopicPartition, int] = await self._translated(self._consumer.beginning_offsets(list(partitions)))
        return found

    async def end_of(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]:
        """The offsets that the next records will have."""
        found: Mapping[TopicPartition, int] = await self._translated(self._consumer.end_offsets(list(partitions)))
        return found

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed]:
        """The group's offsets with what was said beside them; without partitions that have none."""
        found = await self._translated(self._consumer._coordinator.fetch_committed_offsets(list(partitions)))
        return {partition: (kept.offset, kept.metadata) for partition, kept in found.items() if kept.offset >= 0}

    async def commit(self, offsets: Mapping[TopicPartition, Committed]) -> bool:
        """Commit. False: the group has moved on, and the partitions are others' by now, or soon will be."""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await self._consumer.commit(dict(offsets))
        except (errors.CommitFailedError, errors.IllegalStateError):
            return False
        except _FATAL as error:
            raise self._fatal(error) from error
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise TransientError(f"commit: {type(error).__name__}") from error
        return True

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """Fetch no more of these for now."""
        for partition in partitions:
            with contextlib.suppress(errors.IllegalStateError):
                self._consumer.pause(partition)

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """Fetch these again."""
        for partition in partitions:
            with contextlib.suppress(errors.IllegalStateError):
                self._consumer.resume(partition)

    def end_seen(self, partition: TopicPartition) -> int | None:
        """The end of a partition as the last fetch told it."""
        with contextlib.suppress(errors.IllegalStateError):
            end: int | None = self._consumer.highwater(partition)
            return end
        return None

    async def incarnations(self) -> Mapping[str, Incarnation]:
        """What the topics' names mean now."""
        return await incarnations(self._consumer._client, self._topics)

    async def retention_days(self) -> Mapping[str, float | None]:
        """How long each topic keeps its messages, in days; infinity where it keeps them for ever, or compacts them; None where this
        user may not know.
        """
        admin = AIOKafkaAdminClient(bootstrap_servers=self._settings.kafka_bootstrap_servers)
        try:
            await self._translated(admin.start())
            asked = [ConfigResource(ConfigResourceType.TOPIC, topic) for topic in self._topics]
            answers = await self._translated(admin.describe_configs(asked))
        finally:
            with contextlib.suppress(errors.KafkaError, OSError):
                await admin.close()
        return dict(topic_retention(resource) for answer in answers for resource in answer.resources)

    async def has_topic(self, topic: str) -> bool:
        """Whether there is such a topic."""
        try:
            await incarnations(self._consumer._client, [topic])
        except UnknownTopic:
            return False
        return True

    async def stop(self) -> None:
        """Leave the group, unless the member is a static one, and close the connections."""
        await _in_time(self._consumer.stop())
        await _in_time(self._consumer._client.close())  # where that was cut short

    async def _translated(self, answer: Awaitable[_T]) -> _T:
        try:
            return await answer
        except _FATAL as error:
            raise self._fatal(error) from error
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise TransientError(f"Kafka: {type(error).__name__}") from error

    def _fatal(self, error: Exception) -> ConfigurationError:
        if isinstance(error, errors.InvalidSessionTimeoutError):
            asked = self._settings.consumer_session_timeout_seconds
            return ConfigurationError(
                f"FENCEPOST_CONSUMER_SESSION_TIMEOUT_SECONDS: the broker refuses {asked:g} s; take a time that its "
                "group.min.session.timeout.ms and group.max.session.timeout.ms allow (by default 6 s to 1800 s), "
                "or have these changed"
            )
        return ConfigurationError(
            f"Kafka refuses this consumer: {type(error).__name__}; see FENCEPOST_CONSUMER_GROUP, FENCEPOST_CONSUMER_TOPICS, "
            "FENCEPOST_CONSUMER_INSTANCE and the rights of the Kafka user"
        )


async def _in_time(ending: Awaitable[None]) -> None:
    """Of a client that ends nothing more is wanted than that it ends."""
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await ending
    except asyncio.CancelledError:
        # While brokers are away the client cancels fetches of its own, and lets that out.
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
    except (errors.KafkaError, OSError, TimeoutError):
        pass
