"""What handlers have in hand, each until its time is over: then it is cancelled. One that does not end even so is cancelled once
more, and told of: it holds the offset of its partition.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

import structlog

from consumer_sdk.classification import Retryable
from consumer_sdk.delivery import Delivery
from consumer_sdk.message_handlers import MessageHandler
from fencepost.cancelling import REMEDY
from fencepost.clock import lease_clock
from fencepost.errors import TransientError

__all__ = ["AttemptDeadline", "InHand"]

_log = structlog.get_logger(__name__)

# What a handler may need to clean up, after its time or after it was cancelled.
_MARGIN_SECONDS: Final = 5.0
_TOLD_AT_ONCE: Final = 5
# uvloop's timers are of whole milliseconds, and ring before a moment that lies between two.
_EARLY_SECONDS: Final = 0.001
_REMEDY: Final = f"{REMEDY}; where it does not end, a restart of the process frees the partition"


class AttemptDeadline(Retryable):
    """An attempt took longer than its handler may. Nothing is known to have happened: effects go through the ledger."""

    def __init__(self) -> None:
        super().__init__("attempt_deadline")


@dataclass(slots=True, eq=False)
class _Held:
    """Cancels as ``asyncio.timeout`` does. Raises ``AttemptDeadline`` where nobody else had cancelled the task as well, or
    where the handler or the driver has made an error of the cancellation.
    """

    all: "InHand"
    handler: MessageHandler
    deliveries: Sequence[Delivery]
    since: float
    limit_seconds: float | None
    until: float = field(init=False)
    task: "asyncio.Task[object]" = field(init=False)
    cancelling: int = field(init=False)
    expired: int = 0
    expired_at: float = 0.0
    told: bool = False

    def __enter__(self) -> None:
        self.all.take(self)

    def __exit__(self, _class: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        self.all.put_down(self)
        if not self.expired:
            return
        for _ in range(self.expired):
            left = self.task.uncancel()
        alone = left <= self.cancelling
        if isinstance(error, TimeoutError | TransientError) or (alone and isinstance(error, asyncio.CancelledError)):
            raise AttemptDeadline from error

    def expire(self) -> None:
        """Its time is over. ``expired`` counts how often it was told so."""
        self.expired += 1
        self.expired_at = lease_clock()
        self.task.cancel()


class InHand:
    """Each handling is told of once. One timer is for all: a timer each costs more than all else that is done here."""

    def __init__(self) -> None:
        self._held: set[_Held] = set()
        self._timer: asyncio.Handle | None = None
        self._looks_at = math.inf  # a timer need not know: uvloop makes a plain handle of one that is due

    def held(self, handler: MessageHandler, deliveries: Sequence[Delivery], *, since: float, limited: bool = True) -> _Held:
        """These are in the handler's hand for as long as the block lasts. ``limited``: for as long as the handler may, at most."""
        return _Held(self, handler, deliveries, since, handler.attempt_seconds if limited else None)

    def take(self, one: _Held) -> None:
        """It begins."""
        self._held.add(one)
        if one.limit_seconds is None:
            return
        task = asyncio.current_task()
        assert task is not None
        one.task, one.cancelling = task, task.cancelling()
        one.until = asyncio.get_running_loop().time() + one.limit_seconds
        if one.until < self._looks_at:
            self._look_at(one.until)

    def put_down(self, one: _Held) -> None:
        """It has ended."""
        self._held.discard(one)

    def _look_at(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._looks_at = asyncio.get_running_loop().call_at(moment, self._expire), moment

    def _expire(self) -> None:
        self._timer, self._looks_at = None, math.inf
        now = asyncio.get_running_loop().time() + _EARLY_SECONDS
        running = [one for one in self._held if one.limit_seconds is not None and not one.expired]
        for one in running:
            if one.until <= now:
                one.expire()
        if left := [one.until for one in running if not one.expired]:
            self._look_at(min(left))

    def mind_late(self) -> None:
        """Those whose time is long over: a second cancellation gets out of what waits while it cleans up."""
        now = lease_clock()
        late = [one for one in self._held if now > one.since + one.handler.attempt_seconds + _MARGIN_SECONDS]
        self._tell([one for one in late if not one.told])
        for one in late:
            # From the first one on: of two in one turn of a loop that stood still the handler would see one.
            if one.expired == 1 and now > one.expired_at + _MARGIN_SECONDS:
                one.expire()

    def tell_of_cancelled(self) -> None:
        """All that come from Kafka were cancelled, and these have not ended."""
        self._tell([one for one in self._held if not one.told and one.deliveries[0].arrival is not None])

    def _tell(self, stuck: Sequence[_Held]) -> None:
        for one in stuck[:_TOLD_AT_ONCE]:
            one.told = True
            record = one.deliveries[0].record
            _log.warning(
                "handler_does_not_end",
                type=one.handler.type,
                topic=record.topic,
                partition=record.partition,
                offset=record.offset,
                messages=len(one.deliveries),
                seconds=round(lease_clock() - one.since, 1),
                remedy=_REMEDY,
            )
