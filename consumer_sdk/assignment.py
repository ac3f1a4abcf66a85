"""What one assignment of partitions holds, from the moment that the group gives it to the moment that it takes it away.

Everything in memory belongs to it: windows, lanes, handlings. Nothing of an assignment survives it, so nothing of an old one can
be committed under a new one.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import structlog
from aiokafka import TopicPartition

from consumer_sdk.batches import BatchHandling, lane_of
from consumer_sdk.consumer_metrics import ConsumerMetrics
from consumer_sdk.delivery import Again, Arrival, Dead, Delivery, Done, Outcome
from consumer_sdk.dispatch import Dispatcher
from consumer_sdk.handling import Handling
from consumer_sdk.identity import Identity
from consumer_sdk.intake import Intake
from consumer_sdk.message_decision import ENVIRONMENT
from consumer_sdk.message_store import MessageStore
from consumer_sdk.offsets import OffsetTracker
from consumer_sdk.starts import Start
from fencepost.clock import lease_clock
from fencepost.errors import TransientError

__all__ = ["Assignment"]

_log = structlog.get_logger(__name__)

# Handlers wait while messages are sorted; while nearly all are known, there are no handlers to wait.
_SORTED_AT_ONCE: Final = 100
_ASKED_AT_ONCE: Final = 500
_OVERHEAD_BYTES: Final = 500
_CANCEL_SECONDS: Final = 5.0
# What a record is thought to need before any was seen.
_FIRST_GUESS_BYTES: Final = 65_536


class Assignment:
    """``room`` is set while there is room for more."""

    def __init__(
        self,
        starts: Mapping[TopicPartition, Start],
        *,
        intake: Intake,
        store: MessageStore,
        handling: Handling,
        batching: BatchHandling,
        concurrency: int,
        most_messages: int,
        most_bytes: int,
        most_ahead: int,
        metrics: ConsumerMetrics,
        failed: Callable[[BaseException], None],
    ) -> None:
        self.partitions = frozenset(starts)
        self._trackers = {
            partition: OffsetTracker(start.offset, suspects=most_messages if start.unclean else 0, end=start.end)
            for partition, start in starts.items()
        }
        self._intake = intake
        self._store = store
        self._metrics = metrics
        self._most_messages = most_messages
        self._most_bytes = most_bytes
        self._most_ahead = most_ahead
        self._failed = failed
        self._in_hand = handling.in_hand
        self._stopping = asyncio.Event()
        self._dispatcher = Dispatcher(
            concurrency=concurrency,
            handle_one=handling.handle,
            handle_batch=batching.handle,
            settled=self._settled,
            failed=failed,
        )
        self._arrived: deque[Arrival] = deque()
        self._unfinished: dict[Arrival, float] = {}
        self._underway: set[Identity] = set()
        # A batch's own transaction tells duplicates; asking before is cheaper while most are known, as after offsets were set back.
        self._ask_all = True
        self._sorter: asyncio.Task[None] | None = None
        self._largest = _FIRST_GUESS_BYTES
        self.bytes = 0
        self.room = asyncio.Event()
        self.room.set()

    @property
    def messages(self) -> int:
        """Records in memory."""
        return len(self._unfinished)

    @property
    def most_records(self) -> int:
        """How many records there is room for; by bytes it is a guess from the largest of late."""
        by_bytes = (self._most_bytes - self.bytes) // self._largest
        return max(min(self._most_messages - len(self._unfinished), by_bytes), 0)

    @property
    def oldest_seconds(self) -> float:
        """How long the oldest record that was received is not done."""
        return lease_clock() - next(iter(self._unfinished.values())) if self._unfinished else 0.0

    @property
    def ahead(self) -> Sequence[TopicPartition]:
        """Partitions with so much behind a record that is not done that no more is to be fetched of them."""
        return [partition for partition, tracker in self._trackers.items() if tracker.span >= self._most_ahead]

    def receive(self, records: Mapping[TopicPartition, Sequence[Any]]) -> bool:
        """Take records in, in the order of their partitions. False: offsets went back, so the topic is not the one that it was."""
        now, forward = lease_clock(), True
        for partition, received in records.items():
            tracker = self._trackers.get(partition)
            self._largest = max(self._largest * 9 // 10, 1)
            for record in received:
                if tracker is None:
                    continue
                suspect = tracker.is_suspect(record.offset)
                if not tracker.receive(record.offset):
                    forward = False
                    break
                arrival = Arrival(record, _size(record), self._finished, suspect, self._stopping)
                self._unfinished[arrival] = now
                self._largest = max(self._largest, arrival.size)
                self.bytes += arrival.size
                self._arrived.append(arrival)
        self._mind_room()
        if self._arrived and (self._sorter is None or self._sorter.done()):
            self._sorter = asyncio.create_task(self._sort())
            self._sorter.add_done_callback(self._sorted)
        return forward

    def committable(self) -> Mapping[TopicPartition, int]:
        """What may be committed and is not yet."""
        found = {partition: tracker.committable for partition, tracker in self._trackers.items()}
        return {partition: offset for partition, offset in found.items() if offset is not None}

    def places(self) -> Mapping[TopicPartition, int]:
        """The next offset to be done, of each partition."""
        return {partition: tracker.place for partition, tracker in self._trackers.items()}

    def has_suspects(self, partition: TopicPartition) -> bool:
        """Whether a message of the partition may have ended a process, and nobody knows yet."""
        return self._trackers[partition].has_suspects

    def next_offsets(self) -> Mapping[TopicPartition, int]:
        """The next offset to be received, of each partition."""
        return {partition: tracker.next for partition, tracker in self._trackers.items()}

    def skip_to(self, partition: TopicPartition, offset: int) -> None:
        """There is nothing to receive before this offset."""
        self._trackers[partition].next = max(self._trackers[partition].next, offset)

    def committed(self, offsets: Mapping[TopicPartition, int]) -> None:
        """These were."""
        for partition, offset in offsets.items():
            self._trackers[partition].committed = offset

    async def close(self, grace_seconds: float) -> bool:
        """Start nothing more; let what is at work end, and cancel it when the grace is over. Whether all of it has ended."""
        self._stopping.set()
        if self._sorter is not None:
            self._sorter.cancel()
        self._dispatcher.stop()
        self.room.set()
        ended = await self._dispatcher.finish(grace_seconds)
        if not ended:
            left = self._dispatcher.active
            self._dispatcher.cancel()
            ended = await self._dispatcher.finish(_CANCEL_SECONDS)
            _log.warning("handlers_cancelled", handlings=left, ended=ended, consequence="their messages are delivered again")
        if not ended:
            self._in_hand.tell_of_cancelled()
        for _ in self._unfinished:
            self._metrics.message(None, "abandoned")
        return ended

    async def _sort(self) -> None:
        """Give records to their lanes, in order; those that were handled before go no further."""
        waited = 0
        while self._arrived:
            most = _ASKED_AT_ONCE if self._ask_all else _SORTED_AT_ONCE
            arrivals = [self._arrived[place] for place in range(min(len(self._arrived), most))]
            deliveries = [one for arrival in arrivals for one in self._intake.identified(arrival.record, arrival)]
            asked = [one for one in deliveries if one.handler is not None and (self._ask_all or not one.handler.batch)]
            while True:
                try:
                    known = await self._store.known([one.identity for one in asked]) if asked else frozenset()
                    break
                except TransientError as error:
                    self._metrics.database_error("known")
                    pause = ENVIRONMENT.delay(waited)
                    _log.warning("database_unreachable", error=str(error), retry_seconds=round(pause, 1))
                    await asyncio.sleep(pause)
                    waited += 1
            duplicates = {asked[place] for place in known}
            for _ in arrivals:
                self._arrived.popleft()
            self._ask_all = 2 * len(known) > len(asked)
            for delivery in deliveries:
                if delivery in duplicates:
                    self._settled(delivery, Done("duplicate"))
                else:
                    self._add(delivery)
            if self._intake.ignored:
                self._metrics.message(None, "ignored", self._intake.ignored)
                self._intake.ignored = 0

    def _add(self, delivery: Delivery) -> None:
        self._intake.validate(delivery)
        delivery.doubtful = delivery.identity in self._underway
        self._underway.add(delivery.identity)
        self._dispatcher.add(lane_of(delivery), delivery)

    def _sorted(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    def _settled(self, delivery: Delivery, outcome: Outcome) -> None:
        if isinstance(outcome, Again):
            self._metrics.message(delivery.type, "retried" if outcome.spent else "postponed")
            return
        self._underway.discard(delivery.identity)
        self._metrics.message(delivery.type, "dead" if isinstance(outcome, Dead) else outcome.outcome)
        if delivery.arrival is not None:
            delivery.arrival.done()

    def _finished(self, arrival: Arrival) -> None:
        record = arrival.record
        self._trackers[TopicPartition(record.topic, record.partition)].finish(record.offset)
        del self._unfinished[arrival]
        self.bytes -= arrival.size
        self._mind_room()

    def _mind_room(self) -> None:
        """Full at the bounds, and not open again before a quarter is free: a fetch for one record is no fetch."""
        if len(self._unfinished) >= self._most_messages or self.bytes >= self._most_bytes:
            self.room.clear()
        elif len(self._unfinished) <= self._most_messages * 3 // 4 and self.bytes <= self._most_bytes * 3 // 4:
            self.room.set()


def _size(record: Any) -> int:
    """Bytes of a record, with what Python needs around it."""
    size = _OVERHEAD_BYTES + len(record.key or b"") + len(record.value or b"")
    for name, value in record.headers:
        size += len(name) + (0 if value is None else len(value))
    return size
