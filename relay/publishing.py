"""Puts batches of many lanes into Kafka batches, and tells each lane when all of its rows are acknowledged.

Rows of different lanes share Kafka batches; a lane is done on its own. A flight never gives up: what failed for a
passing reason goes again through a new producer, after a growing pause. What the broker refuses is cut down until the
row at fault stands alone; its lane stands still there, and only it.

One producer is current. A producer with a failed batch has a hole in its sequence numbers, so it retires: new batches go
to a new one, those on their way may finish, and then, or when they take too long, it is discarded.
"""

import asyncio
import functools
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

import structlog
from aiokafka import errors

from fencepost.clock import lease_clock
from fencepost.errors import LeaseLost, TransientError
from relay.cursor import Row
from relay.lane import Flight, Stopped, TopicUnavailable
from relay.metrics import Metrics
from relay.partitioner import partition_of
from relay.producer import Producer, ProducerDiscarded, Verdict, verdict
from relay.wire import RecordEncoder

__all__ = ["Publishing"]

_log = structlog.get_logger(__name__)

_RETRY_FIRST_SECONDS: Final = 0.05
_RETRY_MOST_SECONDS: Final = 5.0
# Between two tries to reach Kafka at all: what an outage of every broker can cost beyond itself.
_BUILD_MOST_SECONDS: Final = 2.0
_REFUSED_RETRY_SECONDS: Final = 30.0
# How long batches on their way may still take once one of their producer has passed its deadline.
_RETIRE_SECONDS: Final = 1.0
_LEAST_BATCH_BYTES: Final = 1024

TopicPartition = tuple[str, int]


class _Part:
    """Rows of one flight within a Kafka batch, side by side from ``first_index``."""

    __slots__ = ("append", "builder", "bytes", "first_index", "flight", "rows")

    def __init__(self, flight: Flight, segment: "_Segment") -> None:
        self.flight = flight
        self.append = segment.builder.append
        self.first_index = segment.size
        self.rows: list[Row] = []
        self.bytes = 0
        self.builder = segment.builder  # not the segment, which holds its parts: a cycle would keep the rows for the collector

    def full(self, bound: int | None, size: int) -> bool:
        """Whether a row of ``size`` would take the batch over the bytes that its topic's broker was seen to take."""
        return bound is not None and self.builder.record_count() > 0 and self.builder.size() + size > bound


class _Segment:
    """One Kafka batch on its way."""

    __slots__ = ("broker", "builder", "parts", "topic_partition")

    def __init__(self, topic_partition: TopicPartition, producer: Producer) -> None:
        self.topic_partition = topic_partition
        self.builder = producer.new_batch()
        self.broker = producer.leader(*topic_partition)
        self.parts: list[_Part] = []

    @property
    def size(self) -> int:
        """Records in the batch."""
        return int(self.builder.record_count())

    def open_part(self, flight: Flight) -> _Part:
        part = _Part(flight, self)
        self.parts.append(part)
        flight.outstanding += 1
        return part

    def withdraw(self, part: _Part) -> None:
        """A part whose first row did not fit any more: what becomes of this batch is none of its flight's business."""
        self.parts.remove(part)
        part.flight.outstanding -= 1


class _Target:
    """A topic while one flight is built: its partitions, and the flight's open part on each."""

    __slots__ = ("bound", "count", "parts", "spread")

    def __init__(self, count: int, bound: int | None) -> None:
        self.count = count
        self.bound = bound
        self.parts: list[_Part | None] = [None] * count
        # Rows without a key go to one partition a batch, so that batches stay large.
        self.spread = random.randrange(count) if count else 0  # noqa: S311 - no secret


class _Unpublished:
    """Rows of one flight whose topic is not known (yet)."""

    __slots__ = ("flight", "rows")

    def __init__(self, flight: Flight) -> None:
        self.flight = flight
        self.rows: list[Row] = []


class _Course:
    """A producer and the flights that are on it."""

    def __init__(self, make_producer: Callable[[Callable[[], bool]], Producer]) -> None:
        # The brokers that each flight waits for, once a batch; None: a partition without a leader.
        self.flights: dict[Flight, list[int | None]] = {}
        self._answered_at: dict[int, float] = {}
        self.retiring = False
        self.producer = make_producer(self.may_send)

    def may_send(self) -> bool:
        """Every lane with rows on this producer is still ours, by our own clock."""
        return all(flight.lane.trusted for flight in self.flights)

    def board(self, flight: Flight, broker: int | None) -> None:
        self.flights.setdefault(flight, []).append(broker)

    def leave(self, flight: Flight, broker: int | None) -> None:
        brokers = self.flights[flight]
        brokers.remove(broker)
        if not brokers:
            del self.flights[flight]

    def answered(self, broker: int | None) -> None:
        if broker is not None:
            self._answered_at[broker] = lease_clock()

    def silent_since(self, flight: Flight) -> float:
        """When a broker that this flight waits for was last heard of. A slow broker that answers others is not silent."""
        return min(
            max(flight.sent_at, self._answered_at.get(broker, 0.0) if broker is not None else 0.0)
            for broker in self.flights[flight]
        )


class Publishing:
    """``make_producer`` builds an unstarted producer around its ``may_send``; ``done`` is told of each flight that
    has every row acknowledged; ``changed`` that something may be sent again."""

    def __init__(
        self,
        *,
        make_producer: Callable[[Callable[[], bool]], Producer],
        encoder: RecordEncoder,
        metrics: Metrics,
        deadline_seconds: float,
        done: Callable[[Flight], None],
        changed: Callable[[], None],
    ) -> None:
        self._make_producer = make_producer
        self._encoder = encoder
        self._metrics = metrics
        self._deadline = deadline_seconds
        self._done = done
        self._changed = changed
        self._current: _Course | None = None
        self._courses: set[_Course] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._builder_task: asyncio.Task[None] | None = None
        self._closed = False
        self.first_ready = asyncio.Event()
        # Topics whose broker refused a batch of several rows as too large, and the bytes that may still fit.
        self._batch_bytes: dict[str, int] = {}

    # -- the current producer ------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """A started producer is at hand."""
        return self._current is not None

    def open(self) -> None:
        """Begin to obtain a producer; ``changed`` is called once there is one. Retries for as long as it takes."""
        if self._builder_task is None and not self._closed:
            self._builder_task = asyncio.create_task(self._build_producer())

    async def _build_producer(self) -> None:
        pause = _RETRY_FIRST_SECONDS
        try:
            while self._current is None:
                course = _Course(self._make_producer)
                try:
                    await course.producer.start()
                except TransientError as error:
                    _log.warning(
                        "kafka_unreachable",
                        error=str(error),
                        retry_seconds=round(pause, 2),
                        remedy="see FENCEPOST_KAFKA_BOOTSTRAP_SERVERS",
                    )
                    await asyncio.sleep(_jittered(pause))
                    pause = min(pause * 2, _BUILD_MOST_SECONDS)
                except Exception:  # noqa: BLE001 - a library fault must not end the building of producers; it is logged whole
                    _log.exception("producer_failed", retry_seconds=round(pause, 2))
                    await asyncio.sleep(_jittered(pause))
                    pause = min(pause * 2, _BUILD_MOST_SECONDS)
                else:
                    self._courses.add(course)
                    self._current = course
                    self.first_ready.set()
        finally:
            self._builder_task = None
        self._changed()

    def _retire(self, course: _Course, grace_seconds: float) -> None:
        """No new batch for this producer; discard it when it is empty, at the latest after the grace."""
        if course.retiring:
            return
        course.retiring = True
        if self._current is course:
            self._current = None
            self._metrics.producer_rebuilt()
            self.open()
        if not course.flights:
            self._spawn(self._discard(course))
        else:
            asyncio.get_running_loop().call_later(grace_seconds, lambda: self._spawn(self._discard(course)))

    async def _discard(self, course: _Course) -> None:
        if course in self._courses:
            self._courses.remove(course)
            await course.producer.discard()

    def abandon(self, flights: Iterable[Flight]) -> None:
        """The leases of these flights are lost: nothing more of them leaves, so their producers go at once."""
        lost = set(flights)
        for course in list(self._courses):
            if lost & course.flights.keys():
                self._retire(course, 0)
                self._spawn(self._discard(course))

    async def close(self) -> None:
        """Discard everything, sending nothing more."""
        self._closed = True
        if self._builder_task is not None:
            self._builder_task.cancel()
            await asyncio.wait([self._builder_task])
        await asyncio.gather(*(self._discard(course) for course in list(self._courses)))
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- flights -------------------------------------------------------------------------------------------------

    def start(self, flights: Sequence[Flight]) -> None:
        """Send what these flights have to send. Requires ``ready``."""
        course = self._current
        assert course is not None
        chains: dict[TopicPartition, list[_Segment]] = {}
        shared: dict[TopicPartition, _Segment] = {}
        unknown: dict[str, list[_Unpublished]] = {}
        for flight in flights:
            flight.outstanding += 1  # held while its segments are built: it must not settle in between
            open_segments = shared if flight.narrow is None else {}
            self._build(course, flight, open_segments, chains, unknown)
        for chain in chains.values():
            for segment in chain:
                for part in segment.parts:
                    course.board(part.flight, segment.broker)
            self._send_next(course, deque(chain))
        for topic, parts in unknown.items():
            self._spawn(self._learn(course, topic, parts))
        for flight in flights:
            flight.sent_at = lease_clock()
            self._part_settled(flight)

    def _build(
        self,
        course: _Course,
        flight: Flight,
        open_segments: dict[TopicPartition, _Segment],
        chains: dict[TopicPartition, list[_Segment]],
        unknown: dict[str, list[_Unpublished]],
    ) -> None:
        producer, encode, narrow = course.producer, self._encoder.encode, flight.narrow
        targets: dict[str, _Target] = {}
        for row in flight.to_send:
            topic, key, payload, timestamp, headers, size = encode(row)
            target = targets.get(topic)
            if target is None:
                target = targets[topic] = _Target(producer.partition_count(topic), self._batch_bytes.get(topic))
            if not target.count:
                _set_aside(flight, topic, row, unknown)
                continue
            partition = target.spread if key is None else partition_of(key, target.count)
            part = target.parts[partition]
            if part is None or (narrow is not None and len(part.rows) >= narrow) or part.full(target.bound, size):
                segment = self._segment(producer, (topic, partition), open_segments, chains, full=part is not None)
                part = target.parts[partition] = segment.open_part(flight)
            if part.append(timestamp=timestamp, key=key, value=payload, headers=headers) is None:
                if not part.rows:
                    open_segments[topic, partition].withdraw(part)
                segment = self._segment(producer, (topic, partition), open_segments, chains, full=True)
                part = target.parts[partition] = segment.open_part(flight)
                part.append(timestamp=timestamp, key=key, value=payload, headers=headers)
            part.rows.append(row)
            part.bytes += size
        flight.to_send = ()
        flight.partition_counts.update({topic: target.count for topic, target in targets.items() if target.count})

    @staticmethod
    def _segment(
        producer: Producer,
        where: TopicPartition,
        open_segments: dict[TopicPartition, _Segment],
        chains: dict[TopicPartition, list[_Segment]],
        *,
        full: bool,
    ) -> _Segment:
        segment = open_segments.get(where)
        if segment is None or full:
            segment = open_segments[where] = _Segment(where, producer)
            chains.setdefault(where, []).append(segment)
        return segment

    def _send_next(self, course: _Course, chain: deque[_Segment]) -> None:
        """One partition's batches, one after the other: the second may not pass a first that is refused."""
        segment = chain[0]
        answer = course.producer.send(segment.builder, *segment.topic_partition)
        answer.add_done_callback(functools.partial(self._answered, course, chain))

    def _answered(self, course: _Course, chain: deque[_Segment], answer: "asyncio.Future[int]") -> None:
        segment = chain.popleft()
        error = answer.exception()
        if error is None:
            self._acknowledged(course, segment, answer.result())
            if chain:
                self._send_next(course, chain)
            return
        self._retire(course, self._deadline)
        self._failed(course, segment, error)
        for unsent in chain:
            self._failed(course, unsent, ProducerDiscarded("an earlier batch of the partition failed"))

    def _acknowledged(self, course: _Course, segment: _Segment, offset: int) -> None:
        topic, partition = segment.topic_partition
        course.answered(segment.broker)
        self._metrics.acknowledged(topic, segment.size, sum(part.bytes for part in segment.parts))
        for part in segment.parts:
            first = offset + part.first_index
            part.flight.acknowledge(topic, partition, first, first + len(part.rows) - 1)
            part.flight.acknowledged_bytes += part.bytes
            self._off_course(course, part.flight, segment.broker)

    def _failed(self, course: _Course, segment: _Segment, error: BaseException) -> None:
        topic, partition = segment.topic_partition
        refused = verdict(error) is Verdict.REFUSED
        if isinstance(error, errors.MessageSizeTooLargeError) and segment.size > 1:
            self._batch_bytes[topic] = max(segment.builder.size() // 2, _LEAST_BATCH_BYTES)
        for part in segment.parts:
            flight = part.flight
            if refused:
                self._narrow(flight, part, segment, error)
            elif flight.narrow is None and not isinstance(error, ProducerDiscarded | LeaseLost):
                flight.narrow = len(part.rows)
            self._metrics.not_published(topic, "refused" if refused else "retried", len(part.rows))
            flight.fail(part.rows, error)
            self._off_course(course, flight, segment.broker)
        if not isinstance(error, ProducerDiscarded | LeaseLost):
            _log.warning(
                "batch_failed", topic=topic, partition=partition, rows=segment.size, error=f"{type(error).__name__}: {error}"
            )

    @staticmethod
    def _narrow(flight: Flight, part: _Part, segment: _Segment, error: BaseException) -> None:
        if segment.size > 1:
            flight.narrow = max(1, min(segment.size // 2, flight.narrow or segment.size))
            return
        row = part.rows[0]
        if flight.lane.refusal is None:
            _log.error(
                "row_refused", lane=flight.lane.number, event_id=row["event_id"], topic=row["topic"], bytes=row["record_bytes"],
                error=type(error).__name__, remedy="the lane stands still here: raise the topic's limit or change its policy",
            )  # fmt: skip
        flight.lane.refusal = Stopped(
            reason="refused_row", topic=row["topic"], error=type(error).__name__, event_id=row["event_id"]
        )

    def _off_course(self, course: _Course, flight: Flight, broker: int | None) -> None:
        course.leave(flight, broker)
        if course.retiring and not course.flights:
            self._spawn(self._discard(course))
        self._part_settled(flight)

    async def _learn(self, course: _Course, topic: str, parts: Sequence[_Unpublished]) -> None:
        known = await course.producer.learn_topic(topic, self._deadline)
        if not known:
            _log.warning(
                "topic_unavailable", topic=topic, remedy="if Kafka answers: create the topic, or allow the relay to write it"
            )
            if not course.producer.alive:
                self._retire(course, _RETIRE_SECONDS)
        for part in parts:
            part.flight.fail(part.rows, TopicUnavailable("it does not exist, as far as Kafka answers"))
            if known:
                part.flight.attempts = 0
            else:
                self._metrics.not_published(topic, "retried", len(part.rows))
            self._part_settled(part.flight, again_at_once=bool(known))

    def _part_settled(self, flight: Flight, *, again_at_once: bool = False) -> None:
        flight.outstanding -= 1
        if flight.outstanding:
            return
        if not flight.failed:
            flight.lane.refusal = None
            self._done(flight)
            return
        flight.prepare_retry()
        delay = 0.0 if again_at_once else _retry_delay(flight)
        asyncio.get_running_loop().call_later(delay, self._retry, flight)

    def _retry(self, flight: Flight) -> None:
        flight.due = True
        self._changed()

    def watch(self) -> None:
        """Retire every producer that has kept a flight waiting beyond the publish deadline. To be called regularly."""
        limit = lease_clock() - self._deadline
        for course in list(self._courses):
            late = [flight for flight in course.flights if course.silent_since(flight) < limit]
            if late and not course.retiring:
                for flight in late:
                    self._metrics.not_published("(any)", "timeout", len(flight.batch.rows))
                _log.warning("publish_deadline", lanes=sorted(flight.lane.number for flight in late), seconds=self._deadline)
                self._retire(course, _RETIRE_SECONDS)


def _set_aside(flight: Flight, topic: str, row: Row, unknown: dict[str, list[_Unpublished]]) -> None:
    waiting = unknown.setdefault(topic, [])
    if not waiting or waiting[-1].flight is not flight:
        waiting.append(_Unpublished(flight))
        flight.outstanding += 1
    waiting[-1].rows.append(row)


def _retry_delay(flight: Flight) -> float:
    if flight.lane.refusal is not None:
        return _jittered(_REFUSED_RETRY_SECONDS)
    if isinstance(flight.last_error, ProducerDiscarded) or verdict(flight.last_error or TransientError()) is Verdict.REFUSED:
        return 0.0
    return _jittered(min(_RETRY_FIRST_SECONDS * 2 ** min(flight.attempts, 16), _RETRY_MOST_SECONDS))


def _jittered(seconds: float) -> float:
    return seconds * random.uniform(0.75, 1.0)  # noqa: S311 - spreads retries; no secret
