"""Handles one message: runs its handler within limits, and has the outcome recorded before anybody hears of it."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, cast

import structlog

from consumer_sdk.calling import called
from consumer_sdk.consumer_metrics import ConsumerMetrics
from consumer_sdk.delivery import Again, Dead, Delivery, Done, Outcome
from consumer_sdk.evidence import frames_of
from consumer_sdk.identity import key_of_run, step_key
from consumer_sdk.in_hand import InHand
from consumer_sdk.message_context import MessageContext
from consumer_sdk.message_decision import ENVIRONMENT, decide_failure, failure_of, is_refused
from consumer_sdk.message_handlers import MessageFunction
from consumer_sdk.message_runs import MessageRuns
from consumer_sdk.message_writer import DeliveryState, MessageWriter
from consumer_sdk.tracing import Tracing
from consumer_sdk.trials import NotAlone, Trials
from fencepost.clock import lease_clock
from fencepost.errors import AlreadyHandled, ConfigurationError, InvariantViolated, LeaseLost

__all__ = ["Handling"]

_log = structlog.get_logger(__name__)

_HANDLED: Final = Done("handled")
_DUPLICATE: Final = Done("duplicate")
_PROCESS_ENDED: Final = Dead("attempts_exhausted", "consumer_sdk.ProcessEnded", "process_ended")


class Handling:
    """``handle`` returns an outcome that is recorded, and raises only what must end the consumer. ``runs`` is there where handlers
    have workflows."""

    def __init__(
        self,
        *,
        consumer: str,
        writer: MessageWriter,
        runs: MessageRuns | None,
        tracing: Tracing,
        metrics: ConsumerMetrics,
        stopping: asyncio.Event,
    ) -> None:
        self._consumer = consumer
        self._writer = writer
        self._runs = runs
        self._tracing = tracing
        self._metrics = metrics
        self._stopping = stopping
        self._trials = Trials(writer.store)
        self.in_hand = InHand()

    async def handle(self, delivery: Delivery) -> Outcome:
        """Try once. A message that was tried before is looked up first: it may have been handled after all."""
        if delivery.first_tried_at is None:
            delivery.first_tried_at = lease_clock()
        if not delivery.suspect:
            return await self._attempted(delivery)
        return await self.with_care(delivery, partial(self._attempted, delivery))

    async def with_care(self, delivery: Delivery, attempt: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """The outcome of an attempt that may end its process, which raises only what must end the consumer. It is counted before it
        is begun, and is not begun any more in the end."""
        handler = delivery.handler
        if handler is None:
            return await attempt()
        most = handler.attempts if delivery.redrive is None else 1
        try:
            async with self._trials.begun(delivery.identity, apart=most == 1) as trial:
                outcome = await (attempt() if trial.number <= most else self.settled(delivery, _PROCESS_ENDED))
                trial.settled = not isinstance(outcome, Again)
                return outcome
        except InvariantViolated:
            raise
        except NotAlone:
            delivery.first_tried_at = None  # it was not: patience is with what is tried
            return await self.settled(delivery, Again(ENVIRONMENT.delay(delivery.postponed), spent=False))
        except Exception as error:  # noqa: BLE001 - a boundary: it could not be counted, so it was not begun
            return await self.failed(delivery, error)

    async def _attempted(self, delivery: Delivery) -> Outcome:
        try:
            if delivery.refusal is not None:
                return await self._given_up_or_put_off(delivery, Dead(*delivery.refusal))
            if (delivery.postponed or delivery.attempts or delivery.doubtful) and await self._is_known(delivery):
                return _DUPLICATE
            return await self._tried(delivery)
        except InvariantViolated:
            raise
        except Exception as error:  # noqa: BLE001 - a boundary: whatever a handler or a driver raises is told by its class
            return await self.failed(delivery, error)

    async def failed(self, delivery: Delivery, error: Exception) -> Outcome:
        """What an attempt's error comes to. Raises the one that must end the consumer."""
        if is_refused(error):
            raise error
        if delivery.first_tried_at is None:
            delivery.first_tried_at = lease_clock()
        away = not await self._writer.answers()
        outcome = decide_failure(delivery, error, now=lease_clock(), environment=away)
        if away:
            delivery.first_tried_at = None  # patience is with what answers, and begins anew when it does
        self._note(delivery, error, outcome)
        return await self.settled(delivery, outcome)

    async def settled(self, delivery: Delivery, outcome: Again | Dead) -> Outcome:
        """Keep count, or store the dead letter. While the database is away nothing is given up."""
        if isinstance(outcome, Again):
            delivery.attempts += outcome.spent
            delivery.postponed += not outcome.spent
            delivery.delay_seconds = outcome.after_seconds if outcome.spent else delivery.delay_seconds
            return outcome
        delivery.attempts += 1
        kept = await self._given_up_or_put_off(delivery, outcome)
        delivery.attempts -= isinstance(kept, Again)
        return kept

    async def _given_up_or_put_off(self, delivery: Delivery, dead: Dead) -> Outcome:
        """Nothing is given up before the database has it."""
        try:
            return await self._given_up(delivery, dead)
        except Exception as error:  # noqa: BLE001 - a boundary: whatever the driver raises, the message is not lost
            self._metrics.database_error("dead_letter")
            pause = ENVIRONMENT.delay(delivery.postponed)
            delivery.postponed += 1
            _log.warning("dead_letter_not_stored", error_class=type(error).__name__, retry_seconds=round(pause, 1))
            return Again(pause, spent=False)

    async def _tried(self, delivery: Delivery) -> Outcome:
        handler, message = delivery.handler, delivery.message
        assert handler is not None
        assert message is not None
        state = DeliveryState(
            delivery,
            effect_run=delivery.identity.run_key if message.run_id is None else key_of_run(message.run_id),
            effect_step=delivery.identity.step if message.run_id is None else step_key(self._consumer, handler.step, message),
            stopping=self._stopping if delivery.arrival is None else delivery.arrival.stopping or self._stopping,
        )
        began = lease_clock()
        try:
            with (
                self._tracing.processing(message, handler.step),
                self.in_hand.held(handler, [delivery], since=began, limited=handler.workflow is None),
            ):
                if handler.workflow is None:
                    await called(cast("MessageFunction", handler.function), message, MessageContext(state, self._writer))
                else:
                    assert self._runs is not None
                    ended = await self._runs.execute(handler, message, state, self._writer)
                    if isinstance(ended, Again | Dead):
                        return await self.settled(delivery, ended)
        except Exception as error:
            if not (state.recorded or state.duplicate):
                raise
            self._note_after_end(delivery, error, state)
        finally:
            state.over = True
            self._metrics.attempt(handler.type, lease_clock() - began)
        if state.recorded:
            return _HANDLED
        return await self._recorded(delivery)

    async def _recorded(self, delivery: Delivery) -> Done:
        if delivery.redrive is not None:
            await self._writer.store.finish_redrive(delivery.redrive, delivery.identity)
            return _HANDLED
        return _HANDLED if await self._writer.record(delivery.identity) else _DUPLICATE

    async def _given_up(self, delivery: Delivery, dead: Dead) -> Outcome:
        if delivery.redrive is not None:
            await self._writer.store.fail_redrive(delivery.redrive, dead)
        elif not await self._writer.store_dead(delivery, dead):
            return _DUPLICATE
        self._metrics.dead(dead.reason)
        record = delivery.record
        _log.error(
            "message_dead",
            reason=dead.reason,
            error_class=dead.error_class,
            code=dead.error_code,
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            attempts=delivery.attempts,
            remedy="`fencepost dead-letters list` shows it; mend the cause, then redrive it",
        )
        return dead

    async def _is_known(self, delivery: Delivery) -> bool:
        if delivery.redrive is not None:
            return False
        return bool(await self._writer.store.known([delivery.identity]))

    def _note(self, delivery: Delivery, error: Exception, outcome: Again | Dead) -> None:
        """What a developer needs to find the fault, and no value: class, code and place, never the message."""
        failure = failure_of(error)
        record = delivery.record
        # Fencepost's own: it names a setting and the remedy, never a value.
        problem = {"problem": str(error)} if isinstance(error, ConfigurationError) else {}
        _log.warning(
            "lease_lost" if isinstance(error, LeaseLost) else "attempt_failed",
            kind=failure.kind,
            code=failure.code,
            error_class=failure.error_class,
            at=frames_of(error),
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            attempt=delivery.attempts + 1,
            retry_seconds=round(outcome.after_seconds, 2) if isinstance(outcome, Again) else None,
            **problem,
        )

    def _note_after_end(self, delivery: Delivery, error: Exception, state: DeliveryState) -> None:
        """An error behind the commit changes nothing any more."""
        if state.duplicate and isinstance(error, AlreadyHandled):
            return
        record = delivery.record
        told = {"topic": record.topic, "partition": record.partition, "offset": record.offset, "at": frames_of(error)}
        _log.warning("raised_after_the_end", error_class=type(error).__name__, **told)
