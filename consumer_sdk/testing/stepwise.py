"""A consumer without Kafka, which tries each message when it is told to, and once.

The consumer's own code reads records, tells duplicates, runs handlers, keeps count and gives up. What is left out is the waiting:
for records, and between two attempts.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple
from uuid import UUID

from consumer_sdk.batches import BatchHandling, lane_of
from consumer_sdk.consumer_metrics import ConsumerMetrics
from consumer_sdk.delivery import Again, Arrival, Delivery, Done, Outcome
from consumer_sdk.dispatch import LaneKey
from consumer_sdk.handling import Handling
from consumer_sdk.identity import Identity
from consumer_sdk.intake import Intake
from consumer_sdk.message import Record
from consumer_sdk.message_handlers import MessageHandlers
from consumer_sdk.message_store import Letter
from consumer_sdk.message_writer import MessageWriter
from consumer_sdk.redriving import Redriving
from consumer_sdk.tracing import Tracing
from fencepost.errors import ConfigurationError

__all__ = ["Attempt", "StepwiseConsumer"]

_DUPLICATE: Final = Done("duplicate")
#: What stands behind a message of its key that is to be tried again is not tried.
_BEHIND: Final = Again(0.0, spent=False)
_CLUSTER: Final = "test"
_REPLAY: Final = timedelta(days=7)
_MOST_REDRIVES: Final = 1_000


class Attempt(NamedTuple):
    """What became of one delivery. ``error`` is what its handler raised, where that decided."""

    delivery: Delivery
    outcome: Outcome
    error: Exception | None


class _Incarnation(NamedTuple):
    cluster_id: str
    topic_id: UUID


class _AnyTopic(dict[str, Any]):
    """Every topic is there, and is what it always was."""

    def __missing__(self, topic: str) -> _Incarnation:
        return _Incarnation(_CLUSTER, UUID(int=0))


class _Watched(Handling):
    """Keeps what handlers raised."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.errors: dict[Identity, Exception] = {}

    async def failed(self, delivery: Delivery, error: Exception) -> Outcome:
        self.errors[delivery.identity] = error
        return await super().failed(delivery, error)


class StepwiseConsumer:
    """``writer_of`` makes the writes of a consumer with these metrics; ``passed`` is told of time that a message has waited."""

    def __init__(
        self,
        app: MessageHandlers,
        writer_of: Callable[[ConsumerMetrics], MessageWriter],
        *,
        consumer: str,
        passed: Callable[[float], Awaitable[None]],
    ) -> None:
        metrics = ConsumerMetrics(version="test", holder="test", types=sorted({one.type for one in app.all}), topics=())
        writer, incarnations = writer_of(metrics), _AnyTopic()
        self._consumer = consumer
        self._passed = passed
        self._store = writer.store
        self._intake = Intake(app, consumer=consumer, incarnations=lambda: incarnations)
        self._handling = _Watched(
            consumer=consumer, writer=writer, runs=None, tracing=Tracing(consumer), metrics=metrics, stopping=asyncio.Event()
        )
        self._batching = BatchHandling(writer=writer, handling=self._handling, metrics=metrics)
        self._hold_seconds = max((handler.attempt_seconds for handler in app.all), default=0.0)
        self._redriving = Redriving(
            consumer=consumer,
            store=writer.store,
            intake=self._intake,
            handling=self._handling,
            batching=self._batching,
            longest_attempt_seconds=self._hold_seconds,
            replay=_REPLAY,
            metrics=metrics,
        )

    async def receive(self, records: Sequence[Record], *, suspect: bool = False) -> Sequence[Sequence[Attempt]]:
        """The attempts at records that one fetch brings, record by record. ``suspect``: whoever had them before has ended."""
        read = [self._intake.identified(record, Arrival(record, 0, _nobody, suspect)) for record in records]
        deliveries = [delivery for one in read for delivery in one]
        _refuse_runs(deliveries)
        outcomes = dict.fromkeys(await self._known(deliveries), _DUPLICATE)
        fresh = [delivery for delivery in deliveries if delivery not in outcomes]
        self._validate(fresh)
        attempts = {one: Attempt(one, outcome, None) for one, outcome in outcomes.items()}
        attempts.update(await self._tried(fresh))
        return [[attempts[delivery] for delivery in one] for one in read]

    async def again(self, attempts: Sequence[Attempt]) -> Sequence[Attempt]:
        """The next attempt of those that are to be tried again, once they have waited as long as they were told to."""
        waiting = [one for one in attempts if isinstance(one.outcome, Again)]
        waits = [one.outcome.after_seconds for one in waiting if isinstance(one.outcome, Again)]
        await self._passed(max(waits, default=0.0))
        for attempt in waiting:
            if attempt.delivery.first_tried_at is not None:
                attempt.delivery.first_tried_at -= max(waits)
        tried = await self._tried([one.delivery for one in waiting])
        return [tried.get(one.delivery, one) for one in attempts]

    async def claim(self, *, hold_seconds: float | None = None) -> Sequence[Letter]:
        """Take dead letters in hand that an operator wants handled anew."""
        hold = self._hold_seconds if hold_seconds is None else hold_seconds
        return await self._store.claim_redrives(self._consumer, hold_seconds=hold, limit=_MOST_REDRIVES)

    async def redrive(self, letter: Letter) -> tuple[Outcome, Exception | None]:
        """The one attempt at a dead letter in hand."""
        outcome = await self._redriving.redrive(letter)
        return outcome, self._handling.errors.pop(letter.identity, None)

    async def _known(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        asked = [delivery for delivery in deliveries if delivery.handler is not None]
        return [asked[place] for place in await self._store.known([one.identity for one in asked])]

    def _validate(self, deliveries: Sequence[Delivery]) -> None:
        underway: set[Identity] = set()
        for delivery in deliveries:
            self._intake.validate(delivery)
            delivery.doubtful = delivery.identity in underway
            underway.add(delivery.identity)

    async def _tried(self, deliveries: Sequence[Delivery]) -> Mapping[Delivery, Attempt]:
        """One attempt each, in order; of a key nothing is tried behind what is to be tried again."""
        outcomes: dict[Delivery, Outcome] = {}
        held_up: set[LaneKey] = set()
        for place, delivery in enumerate(deliveries):
            if delivery in outcomes:
                continue
            if lane_of(delivery) in held_up:
                outcomes[delivery] = _BEHIND
                continue
            behind = [one for one in deliveries[place + 1 :] if one not in outcomes and lane_of(one) not in held_up]
            outcomes.update(await self._tried_once(delivery, behind))
            held_up.update(lane_of(one) for one, outcome in outcomes.items() if isinstance(outcome, Again))
        errors = self._handling.errors
        return {one: Attempt(one, outcome, errors.pop(one.identity, None)) for one, outcome in outcomes.items()}

    async def _tried_once(self, delivery: Delivery, behind: Sequence[Delivery]) -> Mapping[Delivery, Outcome]:
        if delivery.handler is None or not delivery.handler.batch:
            return {delivery: await self._handling.handle(delivery)}
        batch = _batch_of(delivery, behind)
        return dict(zip(batch, await self._batching.handle(delivery.handler, batch), strict=True))


def _batch_of(first: Delivery, behind: Sequence[Delivery]) -> Sequence[Delivery]:
    """What is handled together with a message: others of its handler that have nothing before them."""
    assert first.handler is not None
    batch, blocked = [first], set()
    for delivery in () if first.is_apart else behind:
        lane = lane_of(delivery)
        if delivery.handler is first.handler and not delivery.is_apart and lane not in blocked and len(batch) < first.handler.batch:
            batch.append(delivery)
        else:
            blocked.add(lane)
    return batch


def _refuse_runs(deliveries: Sequence[Delivery]) -> None:
    for delivery in deliveries:
        if delivery.handler is not None and delivery.handler.workflow is not None:
            raise ConfigurationError(
                f"type {delivery.handler.type}, step {delivery.handler.step}: a handler with a workflow executes a run, which needs"
                " PostgreSQL: test it with consumer_sdk.Consumer at a database"
            )


def _nobody(_arrival: Arrival) -> None:
    """Nobody commits offsets here."""
