"""Order per key with concurrency across keys: a lane a key, and never two deliveries of one lane at once.

A delivery stays at the head of its lane until it has its outcome, so a retry lets nothing overtake; a lane that waits for a retry
holds no slot. Deliveries without a key have lanes of their own. Those for a handler of batches are gathered from many lanes.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from consumer_sdk.delivery import Again, Delivery, Outcome
from consumer_sdk.message_handlers import MessageHandler

__all__ = ["Dispatcher", "LaneKey"]

LaneKey = tuple[object, ...]


class _Lane:
    """``queue[0]`` is what is being handled, or waits to be, once ``busy``."""

    __slots__ = ("busy", "key", "queue", "timer")

    def __init__(self, key: LaneKey) -> None:
        self.key = key
        self.queue: deque[Delivery] = deque()
        self.busy = False
        self.timer: asyncio.TimerHandle | None = None


class Dispatcher:
    """``handle_one`` and ``handle_batch`` return outcomes that are recorded; what they raise ends the consumer, by ``failed``.
    ``settled`` is told of each outcome. At most ``concurrency`` deliveries are handled at once, and one batch a handler."""

    def __init__(
        self,
        *,
        concurrency: int,
        handle_one: Callable[[Delivery], Awaitable[Outcome]],
        handle_batch: Callable[[MessageHandler, Sequence[Delivery]], Awaitable[Sequence[Outcome]]],
        settled: Callable[[Delivery, Outcome], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._concurrency = concurrency
        self._handle_one = handle_one
        self._handle_batch = handle_batch
        self._settled = settled
        self._failed = failed
        self._lanes: dict[LaneKey, _Lane] = {}
        self._ready: deque[_Lane] = deque()
        self._batches: dict[MessageHandler, deque[_Lane]] = {}
        self._batching: set[MessageHandler] = set()
        self._singles = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False

    def add(self, lane_key: LaneKey, delivery: Delivery) -> None:
        """Queue a delivery behind those of its lane."""
        lane = self._lanes.get(lane_key)
        if lane is None:
            lane = self._lanes[lane_key] = _Lane(lane_key)
        lane.queue.append(delivery)
        if not lane.busy:
            self._make_ready(lane)

    @property
    def active(self) -> int:
        """Handlings at work, a batch counting as one."""
        return len(self._tasks)

    def stop(self) -> None:
        """Start nothing more."""
        self._stopped = True
        for lane in self._lanes.values():
            if lane.timer is not None:
                lane.timer.cancel()

    async def finish(self, seconds: float) -> bool:
        """Wait for what is at work; whether all of it has ended."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=max(seconds, 0.0))
        return not self._tasks

    def cancel(self) -> None:
        """Cancel what is at work."""
        for task in self._tasks:
            task.cancel()

    def _make_ready(self, lane: _Lane) -> None:
        lane.busy, lane.timer = True, None
        head = lane.queue[0].handler
        if head is None or not head.batch:
            self._ready.append(lane)
            self._fill()
            return
        self._batches.setdefault(head, deque()).append(lane)
        if head not in self._batching and not self._stopped:
            self._batching.add(head)
            self._start(self._serve_batches(head))

    def _fill(self) -> None:
        while self._ready and self._singles < self._concurrency and not self._stopped:
            self._singles += 1
            self._start(self._serve(self._ready.popleft()))

    def _start(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)
        elif task.cancelled() and not self._stopped:
            self._failed(asyncio.CancelledError("nobody has cancelled a handling, and its lane would wait for ever"))

    async def _serve(self, lane: _Lane) -> None:
        try:
            outcome = await self._handle_one(lane.queue[0])
        finally:
            self._singles -= 1
        if not self._stopped or not isinstance(outcome, Again):
            self._settle(lane, [outcome])
        self._fill()

    async def _serve_batches(self, handler: MessageHandler) -> None:
        try:
            while not self._stopped and (gathered := self._gathered(handler)):
                outcomes = iter(await self._handle_batch(handler, [one for _, taken in gathered for one in taken]))
                for lane, taken in gathered:
                    self._settle(lane, [next(outcomes) for _ in taken])
        finally:
            self._batching.discard(handler)

    def _gathered(self, handler: MessageHandler) -> list[tuple[_Lane, list[Delivery]]]:
        """A batch: from each ready lane the deliveries at its head that are this handler's. One that failed comes by itself, so
        that it fails nobody else's batch."""
        gathered: list[tuple[_Lane, list[Delivery]]] = []
        waiting, room = self._batches[handler], handler.batch
        while waiting and room > 0:
            alone = waiting[0].queue[0].is_apart
            if alone and gathered:
                break
            lane = waiting.popleft()
            taken = _head(lane, handler, 1 if alone else room)
            gathered.append((lane, taken))
            room = 0 if alone else room - len(taken)
        return gathered

    def _settle(self, lane: _Lane, outcomes: Sequence[Outcome]) -> None:
        """Take off the lane what has an outcome. At the first that is to be tried again the lane waits, with all that follow."""
        for outcome in outcomes:
            delivery = lane.queue[0]
            self._settled(delivery, outcome)
            if isinstance(outcome, Again):
                if not self._stopped:
                    loop = asyncio.get_running_loop()
                    lane.timer = loop.call_later(outcome.after_seconds, self._make_ready, lane)
                return
            lane.queue.popleft()
        if lane.queue:
            self._make_ready(lane)
        else:
            del self._lanes[lane.key]


def _head(lane: _Lane, handler: MessageHandler, most: int) -> list[Delivery]:
    taken: list[Delivery] = []
    for delivery in lane.queue:
        if len(taken) == most or delivery.handler is not handler or (taken and delivery.is_apart):
            break
        taken.append(delivery)
    return taken
