"""Handles many messages in one transaction: their rows in the ledger, what the handler writes, and one commit.

A batch that fails is undone, and tried in halves: a message that cannot be handled is found in about log2(n) steps, costs only
itself, and nobody else an attempt.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from consumer_sdk.calling import called
from consumer_sdk.consumer_metrics import ConsumerMetrics
from consumer_sdk.delivery import Again, Delivery, Done, Outcome
from consumer_sdk.dispatch import LaneKey
from consumer_sdk.handling import Handling
from consumer_sdk.identity import Identity
from consumer_sdk.message_context import COMMIT_TOLD_BY_ITS_ROW
from consumer_sdk.message_handlers import MessageHandler
from consumer_sdk.message_writer import MessageWriter
from fencepost.clock import lease_clock
from fencepost.errors import InvariantViolated, TransientError

if TYPE_CHECKING:
    import asyncpg

__all__ = ["BatchHandling"]

_HANDLED: Final = Done("handled")
_DUPLICATE: Final = Done("duplicate")
_NOT_YET: Final = Again(0.0, spent=False)


class BatchHandling:
    """``handle`` returns an outcome a delivery, in order, each of them recorded."""

    def __init__(self, *, writer: MessageWriter, handling: Handling, metrics: ConsumerMetrics) -> None:
        self._writer = writer
        self._handling = handling
        self._metrics = metrics

    async def handle(self, handler: MessageHandler, deliveries: Sequence[Delivery]) -> Sequence[Outcome]:
        """Handle a batch. Of a key whose message is to be tried again, what follows is not tried."""

        async def attempt() -> Sequence[Outcome]:
            outcomes: dict[Delivery, Outcome] = {}
            await self._handle(handler, deliveries, outcomes, set())
            return [outcomes[delivery] for delivery in deliveries]

        async def attempt_alone() -> Outcome:
            return (await attempt())[0]

        if deliveries[0].suspect:  # such a message is alone
            return [await self._handling.with_care(deliveries[0], attempt_alone)]
        return await attempt()

    async def _handle(
        self, handler: MessageHandler, deliveries: Sequence[Delivery], outcomes: dict[Delivery, Outcome], held_up: set[LaneKey]
    ) -> None:
        free = [one for one in deliveries if lane_of(one) not in held_up]
        outcomes.update({one: _NOT_YET for one in deliveries if lane_of(one) in held_up})
        if not free:
            return
        try:
            outcomes.update(await self._committed(handler, free))
        except InvariantViolated:
            raise
        except Exception as error:  # noqa: BLE001 - a boundary: whatever a handler or a driver raises is told by its class
            if len(free) == 1:
                outcomes[free[0]] = outcome = await self._handling.failed(free[0], error)
                if isinstance(outcome, Again):
                    held_up.add(lane_of(free[0]))
                return
            # The first time it may be the network's doing; a message behind it fails the batch again.
            if (isinstance(error, TransientError) and not free[0].postponed) or not await self._writer.answers():
                await self._put_off(free, error, outcomes)
                return
            self._metrics.split()
            half = len(free) // 2
            await self._handle(handler, free[:half], outcomes, held_up)
            await self._handle(handler, free[half:], outcomes, held_up)

    async def _put_off(self, deliveries: Sequence[Delivery], error: Exception, outcomes: dict[Delivery, Outcome]) -> None:
        """Nobody's fault: all wait, and no attempt is spent. What may have been committed shows at the next try."""
        first, *others = deliveries
        if not isinstance(error, TransientError):
            error = TransientError("the database does not answer")
        outcomes[first] = outcome = await self._handling.failed(first, error)
        for one in others:
            one.postponed += 1
            outcomes[one] = outcome if isinstance(outcome, Again) else _NOT_YET

    async def _committed(self, handler: MessageHandler, deliveries: Sequence[Delivery]) -> dict[Delivery, Outcome]:
        """One transaction. Its first statement records the messages, so that of two consumers that hold one message, one waits."""
        began = lease_clock()
        try:
            with self._handling.in_hand.held(handler, deliveries, since=began):
                new = await self._in_transaction(handler, deliveries)
        finally:
            self._metrics.attempt(handler.type, lease_clock() - began)
        self._metrics.batch(len(new))
        return {delivery: _HANDLED if delivery in new else _DUPLICATE for delivery in deliveries}

    async def _in_transaction(self, handler: MessageHandler, deliveries: Sequence[Delivery]) -> set[Delivery]:
        first: dict[Identity, Delivery] = {}
        for delivery in deliveries:
            first.setdefault(delivery.identity, delivery)
        with COMMIT_TOLD_BY_ITS_ROW:
            async with self._writer.transaction() as connection:
                new = await self._recorded(connection, first, handler)
                if new:
                    messages = [delivery.message for delivery in new if delivery.message is not None]
                    await called(handler.function, messages, connection)
        return set(new)

    async def _recorded(
        self, connection: "asyncpg.Connection", first: dict[Identity, Delivery], handler: MessageHandler
    ) -> Sequence[Delivery]:
        (*_, last) = first.values()
        if last.redrive is not None:  # always alone
            return [last] if await self._writer.record_delivery(connection, last) else []
        recorded = await self._writer.store.record_within(connection, list(first), limit_seconds=handler.attempt_seconds)
        return [delivery for identity, delivery in first.items() if identity in recorded]


def lane_of(delivery: Delivery) -> LaneKey:
    """What keeps its order: the key within its partition; a message without a key is by itself."""
    record = delivery.record
    if record.key is None:
        return (record.topic, record.partition, None, record.offset)
    return (record.topic, record.partition, record.key)
