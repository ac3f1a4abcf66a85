"""Supervises one attempt: runs the handler, stops it when there is a reason to, and writes what it ended in."""

import asyncio
import logging
import random
from typing import Final

import structlog

from consumer_sdk.calling import called
from consumer_sdk.classification import Failure
from consumer_sdk.context import AttemptState, RunContext
from consumer_sdk.decision import Action, Drop, Ended, Raised, Returned, StopReason, WasCancelled, decide
from consumer_sdk.evidence import frames_of, problems_of
from consumer_sdk.handlers import Handler
from consumer_sdk.jobs import Completion, Release
from consumer_sdk.run_writer import RunWriter
from consumer_sdk.worker_metrics import WorkerMetrics
from fencepost.clock import lease_clock
from fencepost.errors import InvalidCommand, InvariantViolated, LeaseLost, TransientError

__all__ = ["Attempt"]

_log = structlog.get_logger(__name__)

_INVALID_INPUT: Final = InvalidCommand("input", "does not fit the handler's model", "accept it anew in the right form")


class Attempt:
    """One claimed job at work. ``run`` ends with the attempt, and raises only what must end the worker.

    Then ``outcome`` is what was written: completed, retried (after ``retry_seconds``), dead, cancelled, released, or lost; and
    ``failure`` is what it failed of.
    """

    def __init__(self, state: AttemptState, *, handler: Handler, writer: RunWriter, metrics: WorkerMetrics) -> None:
        self.state = state
        self._handler = handler
        self._writer = writer
        self._metrics = metrics
        self._handling: asyncio.Task[object] | None = None
        self.reason: StopReason | None = None
        self.stopped_at = 0.0
        self.outcome: str | None = None
        self.failure: Failure | None = None
        self.retry_seconds: float | None = None

    def stop(self, reason: StopReason) -> None:
        """Stop the handler. The first reason stands, but for a lost lease, which takes everything."""
        if self.reason is reason or (self.reason is not None and reason is not StopReason.LEASE_LOST):
            return
        if self.reason is None:
            self.stopped_at = lease_clock()
        self.reason = reason
        if reason is StopReason.CANCEL_REQUESTED:
            self.state.cancelled.set()
        if self._handling is not None:
            self._handling.cancel()

    @property
    def has_progress_limit_passed(self) -> bool:
        limit = self._handler.progress_seconds
        return limit is not None and lease_clock() - self.state.progressed_at > limit

    async def run(self) -> None:
        """Execute the handler and write how it ended."""
        state = self.state
        state.started_after = lease_clock() - state.known_at
        ended = await self._handled()
        state.over = True
        if isinstance(ended, Raised) and isinstance(ended.error, InvariantViolated):
            raise ended.error
        if state.completed:
            self._ended("completed")
            return
        if isinstance(ended, Raised) and isinstance(ended.error, LeaseLost):
            await self._learn_why()
        action, failure = decide(state, ended, self.reason, retry=self._handler.retry, random=random.random)
        if failure is not None:
            self.failure = failure
            self._note(failure, ended)
        await self._write(action)

    async def _learn_why(self) -> None:
        """A write within the handler was refused: the lease is lost, or the run is to be cancelled."""
        try:
            standing = await self._writer.standing(self.state.claim.key)
        except TransientError:
            standing = None
        if standing is None or not standing.held:
            self.stop(StopReason.LEASE_LOST)
        elif standing.cancel_requested:
            self.stop(StopReason.CANCEL_REQUESTED)

    async def _handled(self) -> Ended:
        try:
            value = self._handler.parse(self.state.claim.input)
        except Exception as refused:  # noqa: BLE001 - a boundary: the model is the author's, and no input may end the worker
            _log.warning("input_refused", run_id=str(self.state.claim.key.run_id), problems=problems_of(refused))
            return Raised(_INVALID_INPUT)
        handling = asyncio.create_task(called(self._handler.function, RunContext(self.state, self._writer), value))
        self._handling = handling
        if self.reason is not None:
            handling.cancel()  # it was asked to stop before there was anything to stop
        try:
            await asyncio.wait([handling])
        except asyncio.CancelledError:
            handling.cancel()
            raise
        if handling.cancelled():
            return WasCancelled()
        error = handling.exception()
        return Returned(handling.result()) if error is None else Raised(error)

    async def _write(self, action: Action) -> None:
        try:
            await self._written(action)
        except LeaseLost:
            self._lost()
        except TransientError as error:
            # The lease is no longer to be trusted, and what was to be written may or may not have been. Expiry recovers.
            _log.warning("outcome_not_written", run_id=str(self.state.claim.key.run_id), error=str(error))
            self._lost()

    async def _written(self, action: Action) -> None:
        trusted_until = self.state.trusted_until
        if isinstance(action, Drop):
            self._lost()
        elif isinstance(action, Completion):
            await self._complete(action)
        elif isinstance(action, Release):
            settled = await self._writer.release(action, trusted_until=trusted_until)
            self._ended("cancelled" if settled.state == "cancelled" else "released")
        else:
            self.retry_seconds = action.delay_seconds
            settled = await self._writer.fail(action, trusted_until=trusted_until)
            self._ended({"queued": "retried"}.get(settled.state, settled.state))
            if settled.state == "dead":
                self._dead(settled.reason or "unknown", action.error_code)

    async def _complete(self, completion: Completion) -> None:
        """A completion that the fence refused because of a cancellation ends as cancelled; otherwise the lease is lost."""
        try:
            await self._writer.complete(completion, trusted_until=self.state.trusted_until)
        except LeaseLost:
            standing = await self._writer.standing(completion.key)
            if standing is None or not (standing.held and standing.cancel_requested):
                raise
            self.stop(StopReason.CANCEL_REQUESTED)
            action, _ = decide(self.state, WasCancelled(), self.reason, retry=self._handler.retry, random=random.random)
            await self._written(action)
        else:
            self._ended("completed")

    def _note(self, failure: Failure, ended: Ended) -> None:
        """What a developer needs to find the fault, and no value: class, code and place, never the message."""
        claim = self.state.claim
        run_id, generation = str(claim.key.run_id), claim.key.generation
        run = {"run_id": run_id, "workflow": claim.workflow, "attempt": claim.attempt, "generation": generation}
        if self.reason is StopReason.CANCEL_REQUESTED:
            _log.info("attempt_cancelled", **run)
            return
        self._metrics.attempt_failed(claim.workflow, failure.kind)
        error = ended.error if isinstance(ended, Raised) else None
        told = {"kind": failure.kind, "code": failure.code, "error_class": failure.error_class, "at": frames_of(error)}
        level = logging.WARNING if failure.kind != "retryable" or failure.code == "unexpected" else logging.INFO
        _log.log(level, "attempt_failed", **run, **told)

    def _dead(self, reason: str, code: str) -> None:
        claim = self.state.claim
        self._metrics.dead(claim.workflow, reason)
        _log.error(
            "job_dead", run_id=str(claim.key.run_id), workflow=claim.workflow, reason=reason, code=code, attempts=claim.attempt
        )

    def _lost(self) -> None:
        claim = self.state.claim
        self._metrics.lease_lost()
        self._ended("lost")
        _log.warning("lease_lost", run_id=str(claim.key.run_id), workflow=claim.workflow, generation=claim.key.generation)

    def _ended(self, outcome: str) -> None:
        self.outcome = outcome
        self._metrics.attempt_ended(self.state.claim.workflow, outcome, lease_clock() - self.state.claimed_at)
