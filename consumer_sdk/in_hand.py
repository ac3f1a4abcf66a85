"""What handlers have in hand, so that one that does not end is told of: until it does, it holds the offset of its partition."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

import structlog

from consumer_sdk.delivery import Delivery
from consumer_sdk.message_handlers import MessageHandler
from fencepost.clock import lease_clock

__all__ = ["InHand"]

_log = structlog.get_logger(__name__)

# What a handler may need to clean up, after its time or after it was cancelled.
_MARGIN_SECONDS: Final = 5.0
_TOLD_AT_ONCE: Final = 5
_REMEDY: Final = "it catches its own cancellation: let asyncio.CancelledError pass; a restart of the process frees the partition"


@dataclass(slots=True, eq=False)
class _Held:
    all: "set[_Held]"
    handler: MessageHandler
    deliveries: Sequence[Delivery]
    since: float
    told: bool = False

    def __enter__(self) -> None:
        self.all.add(self)

    def __exit__(self, *_: object) -> None:
        self.all.discard(self)


class InHand:
    """Each handling is told of once."""

    def __init__(self) -> None:
        self._held: set[_Held] = set()

    def held(self, handler: MessageHandler, deliveries: Sequence[Delivery]) -> AbstractContextManager[None]:
        """These are in the handler's hand for as long as the block lasts."""
        return _Held(self._held, handler, deliveries, lease_clock())

    def tell_of_late(self) -> None:
        """Those whose time is long over."""
        now = lease_clock()
        self._tell([one for one in self._held if not one.told and now > one.since + one.handler.attempt_seconds + _MARGIN_SECONDS])

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
