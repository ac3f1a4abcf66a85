"""Handles dead letters anew where an operator asked for it: by the same handlers, under the same identity, through the same ledger.

A redrive is one attempt. It ends the dead letter, or leaves it dead with the new reason; nobody retries it but the operator.
"""

import asyncio
import contextlib
from datetime import timedelta
from typing import Final

import structlog

from consumer_sdk.batches import BatchHandling
from consumer_sdk.consumer_metrics import ConsumerMetrics
from consumer_sdk.delivery import Again, Dead, Delivery, Outcome, Refusal
from consumer_sdk.handling import Handling
from consumer_sdk.intake import Intake
from consumer_sdk.message_store import Letter, MessageStore
from fencepost.errors import TransientError

__all__ = ["Redriving"]

_log = structlog.get_logger(__name__)

_LOOK_SECONDS: Final = 1.0
_MARGIN_SECONDS: Final = 30.0
_TOO_OLD: Final = Refusal("too_old", "consumer_sdk.TooOld", "older_than_replay_days")


class Redriving:
    """``replay`` is how far back dead letters may be handled anew. Several consumers share the work by the database's locks."""

    def __init__(
        self,
        *,
        consumer: str,
        store: MessageStore,
        intake: Intake,
        handling: Handling,
        batching: BatchHandling,
        longest_attempt_seconds: float,
        replay: timedelta,
        metrics: ConsumerMetrics,
    ) -> None:
        self._consumer = consumer
        self._store = store
        self._intake = intake
        self._handling = handling
        self._batching = batching
        self._hold_seconds = longest_attempt_seconds + _MARGIN_SECONDS
        self._replay = replay
        self._metrics = metrics

    async def run(self, stopping: asyncio.Event) -> None:
        """Look for dead letters to redrive until stopped."""
        while not stopping.is_set():
            try:
                letters = await self._store.claim_redrives(self._consumer, hold_seconds=self._hold_seconds, limit=1)
                for letter in letters:
                    outcome = await self.redrive(letter)
                    if isinstance(outcome, Again):
                        await asyncio.sleep(min(outcome.after_seconds, _LOOK_SECONDS))
            except TransientError as error:
                self._metrics.database_error("redrive")
                _log.warning("redrive_failed", error=str(error))
                letters = []
            if not letters:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await stopping.wait()

    async def redrive(self, letter: Letter) -> Outcome:
        """One attempt at a dead letter in hand, after which it is in no hand any more."""
        try:
            outcome = await self._handled(letter)
        except asyncio.CancelledError:
            with contextlib.suppress(TransientError):
                await asyncio.shield(self._store.release_redrive(letter.redrive))
            raise
        told = {"dead_letter_id": str(letter.redrive.dead_letter_id)}
        if isinstance(outcome, Dead):
            self._metrics.redrive("dead")
            _log.warning("redrive_dead", reason=outcome.reason, code=outcome.error_code, **told)
        elif isinstance(outcome, Again):
            # Not now: an attempt that failed has left it dead.
            self._metrics.redrive("released")
            await self._store.release_redrive(letter.redrive)
        else:
            self._metrics.redrive("redriven")
            _log.info("redriven", outcome=outcome.outcome, **told)
        return outcome

    async def _handled(self, letter: Letter) -> Outcome:
        *others, delivery = self._intake.redeliveries(letter.record, letter.identity, letter.redrive)
        for other in others:  # each has a row of its own: what fails is a dead letter of its own, what was done is a duplicate
            if isinstance(outcome := await self._delivered(other), Again):
                return outcome
        if delivery.refusal is None and letter.created_at < await self._store.oldest_remembered(self._replay):
            delivery.refusal, delivery.handler = _TOO_OLD, None
        return await self._delivered(delivery)

    async def _delivered(self, delivery: Delivery) -> Outcome:
        if delivery.handler is None or not delivery.handler.batch:
            return await self._handling.handle(delivery)
        return (await self._batching.handle(delivery.handler, [delivery]))[0]
