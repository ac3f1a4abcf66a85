"""The broker adapter: one idempotent aiokafka producer that can be discarded without sending another byte.

aiokafka's own ``stop()`` flushes and retries, so a relay that lost its lease would still publish. ``discard`` cancels the
sender and closes the connections instead. Errors of the broker are translated here, once, into what to do about them.
"""

import asyncio
import contextlib
import enum
import functools
import logging
from collections.abc import Callable
from typing import Any, Final

from aiokafka import AIOKafkaProducer, TopicPartition, errors
from aiokafka.client import ConnectionGroup
from aiokafka.producer.message_accumulator import BatchBuilder

from fencepost.errors import LeaseLost, TransientError

__all__ = ["MAX_BATCH_BYTES", "BatchBuilder", "Producer", "ProducerDiscarded", "Verdict", "verdict"]

# Under Kafka's default of 1,048,588 bytes a record batch; a single larger record makes a batch of its own.
MAX_BATCH_BYTES: Final = 1_000_000
_START_SECONDS: Final = 30.0
_CLOSE_SECONDS: Final = 2.0
_QUEUE_SECONDS: Final = 30.0


class ProducerDiscarded(TransientError):
    """The producer was thrown away before the broker answered; the rows may or may not be on the topic."""


class Verdict(enum.Enum):
    """What an error of a batch says about its rows."""

    RETRY = "retry"
    """The environment's fault, or the producer's: the same rows go again through a new producer."""
    REFUSED = "refused"
    """The broker will not take these bytes, however often they are sent."""


# These name the records themselves. All else (leader, quota, topic, permission, sequence) is not the row's fault.
_REFUSALS: Final = (
    errors.MessageSizeTooLargeError,
    errors.RecordListTooLargeError,
    errors.InvalidMessageError,
    errors.CorruptRecordException,
    errors.InvalidTimestampError,
    errors.UnknownError,  # what aiokafka makes of INVALID_RECORD (87): a null key on a compacted topic, say
)


def verdict(error: BaseException) -> Verdict:
    """Pure: what to do about an error that a batch ended with."""
    return Verdict.REFUSED if isinstance(error, _REFUSALS) else Verdict.RETRY


class _LeaseGuard(errors.KafkaError):  # type: ignore[misc]
    retriable = False


class Producer:
    """``may_send`` is asked right before every request leaves the process; False ends all sending for good."""

    def __init__(self, *, bootstrap_servers: str, client_id: str, compression: str, may_send: Callable[[], bool]) -> None:
        self._producer = AIOKafkaProducer(
            bootstrap_servers=bootstrap_servers,
            client_id=client_id,
            acks="all",
            enable_idempotence=True,
            compression_type=None if compression == "none" else compression,
            linger_ms=0,
            max_batch_size=MAX_BATCH_BYTES,
            metadata_max_age_ms=60_000,
            request_timeout_ms=30_000,
            retry_backoff_ms=100,
        )
        self._may_send = may_send
        self._gone = False
        self._answers: set[asyncio.Future[int]] = set()
        self._guard_requests()

    def _guard_requests(self) -> None:
        # aiokafka sends queued batches by itself, so the check sits at the last place before the socket. Connecting may
        # take long and comes first: afterwards send() does not suspend before it writes.
        client = self._producer.client
        send = client.send

        async def guarded(node_id: int, request: Any, *, group: Any = ConnectionGroup.DEFAULT) -> Any:
            self._refuse_untrusted()
            if not await client.ready(node_id, group=group):
                raise errors.NodeNotReadyError(f"no connection to broker {node_id}")
            self._refuse_untrusted()
            return await send(node_id, request, group=group)

        client.send = guarded

    def _refuse_untrusted(self) -> None:
        if self._gone or not self._may_send():
            raise _LeaseGuard("the lease is no longer trusted; nothing more is sent")

    async def start(self) -> None:
        """Connect and obtain a producer id. Raises ``TransientError``; nothing is left open then."""
        try:
            # aiokafka goes on for as long as it knows a broker, also when all of them have moved.
            async with asyncio.timeout(_START_SECONDS):
                await self._producer.start()
        except (errors.KafkaError, OSError, TimeoutError) as error:
            await self.discard()
            raise TransientError(f"cannot reach Kafka: {error}") from error
        except BaseException:
            await self.discard()
            raise

    @property
    def alive(self) -> bool:
        """False once a fatal error has ended the sender, or the producer was discarded."""
        sender = self._producer._sender.sender_task
        return not self._gone and sender is not None and not sender.done()

    def partition_count(self, topic: str) -> int:
        """Partitions of ``topic`` in the metadata at hand; 0 when the topic is not known (yet)."""
        return len(self._producer.client.cluster.partitions_for_topic(topic) or ())

    async def learn_topic(self, topic: str, timeout_seconds: float) -> int:
        """Ask the cluster about ``topic``; its partitions, or 0 if it does not exist or nobody answers in time."""
        with contextlib.suppress(errors.KafkaError, TimeoutError, OSError):
            async with asyncio.timeout(timeout_seconds):
                self._producer.client.add_topic(topic)
                await self._producer.client.force_metadata_update()
        return self.partition_count(topic)

    def leader(self, topic: str, partition: int) -> int | None:
        """The broker that leads a partition, or None while there is none."""
        broker = self._producer.client.cluster.leader_for_partition(TopicPartition(topic, partition))
        return None if broker is None or broker < 0 else int(broker)

    def new_batch(self) -> "BatchBuilder":
        return self._producer.create_batch()

    def send(self, builder: "BatchBuilder", topic: str, partition: int) -> "asyncio.Future[int]":
        """Publish a batch; the offset of its first record once every in-sync replica has it.

        Never gives up by itself: the caller watches the clock and discards. The future ends with aiokafka's error of the
        batch, ``ProducerDiscarded``, or ``LeaseLost`` when the lease ended before the request left. No task a batch: a
        round of few rows has a batch for each partition, and a task costs more than its rows.
        """
        builder.close()
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self._gone:
            answer.set_exception(ProducerDiscarded("the producer was discarded"))
            return answer
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)
        where = TopicPartition(topic, partition)
        accumulator = self._producer._message_accumulator
        if accumulator._batches.get(where) or accumulator._exception is not None:
            # An earlier batch of the partition still waits for its leader, or the producer has failed and says how.
            waiting = asyncio.ensure_future(self._queue(builder, where))
            answer.add_done_callback(lambda _: waiting.cancel())
            waiting.add_done_callback(functools.partial(_pass_on, answer))
        else:
            accumulator._append_batch(builder, where).future.add_done_callback(functools.partial(_pass_on, answer))
        return answer

    async def _queue(self, builder: "BatchBuilder", where: TopicPartition) -> Any:
        while True:
            try:
                future = await self._producer._message_accumulator.add_batch(builder, where, _QUEUE_SECONDS)
                break
            except errors.KafkaTimeoutError:
                continue
        return await future

    async def discard(self) -> None:
        """Stop without sending: cancel the sender, close the connections. What was in the network may still land."""
        if self._gone:
            return
        self._gone = True
        for answer in [answer for answer in self._answers if not answer.done()]:  # one that came just now is in it still
            answer.set_exception(ProducerDiscarded("the producer was discarded before the broker answered"))
        producer = self._producer
        producer._closed = True  # or its __del__ would warn that stop() was not called
        sender = producer._sender.sender_task
        if sender is not None:
            sender.cancel()
        _cut_connections(producer.client)
        with contextlib.suppress(errors.KafkaError, OSError, TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await producer.client.close()
        _end_metadata_waits(producer.client)
        if sender is not None:
            # The sender waits for the requests it had started; their connections are closed, so they end now.
            _, pending = await asyncio.wait([sender], timeout=_CLOSE_SECONDS)
            if pending:
                logging.getLogger(__name__).warning("a discarded producer's sender did not end in time")


def _pass_on(answer: "asyncio.Future[int]", delivery: "asyncio.Future[Any]") -> None:
    error = asyncio.CancelledError() if delivery.cancelled() else delivery.exception()
    if answer.done():
        return
    if isinstance(error, _LeaseGuard):
        answer.set_exception(LeaseLost("the lease ended before the batch left"))
    elif error is not None:
        answer.set_exception(ProducerDiscarded("cancelled") if isinstance(error, asyncio.CancelledError) else error)
    else:
        answer.set_result(int(delivery.result().offset))


def _cut_connections(client: Any) -> None:
    # Closing a transport flushes what it still buffers; half a request must not become a whole one now.
    for connection in client._conns.values():
        if connection._writer is not None:
            connection._writer.transport.abort()


def _end_metadata_waits(client: Any) -> None:
    # The requests that the sender still waits for want fresh metadata after their connections broke, and the task that
    # would fetch it is gone.
    refused = asyncio.get_running_loop().create_future()
    refused.set_result(False)
    client.force_metadata_update = lambda: refused
    waiting, client._md_update_fut = client._md_update_fut, None
    if waiting is not None and not waiting.done():
        waiting.set_result(False)


logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
