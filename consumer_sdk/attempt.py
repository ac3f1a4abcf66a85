"""Supervises one attempt: runs the handler, stops it when there is a reason to, and writes what it ended in."""

import asyncio
import logging
import random
from collections.abc import Coroutine
from typing import Any, Final

import structlog

from consumer_sdk.calling import called
from consumer_sdk.classification import Failure
from consumer_sdk.context import AttemptState, RunContext
from consumer_sdk.decision import CHANGED, Action, Drop, Ended, Left, Raised, Returned, StopReason, WasCancelled, decide
from consumer_sdk.evidence import frames_of, problems_of
from consumer_sdk.handlers import Handler, MissingVersion, WorkflowHandler
from consumer_sdk.jobs import Completion, Continuation, FailedAttempt, Release
from consumer_sdk.leaving import GivenBack
from consumer_sdk.ledger import LedgerUnusable
from consumer_sdk.run_writer import RunWriter
from consumer_sdk.worker_metrics import WorkerMetrics
from consumer_sdk.workflow_context import WorkflowContext
from consumer_sdk.workflow_writer import WorkflowWriter
from fencepost.clock import lease_clock
from fencepost.errors import InvalidCommand, InvariantViolated, LeaseLost, TransientError, WorkflowChanged

__all__ = ["Attempt"]

_log = structlog.get_logger(__name__)

# Long enough that a rolling deploy costs few claims in vain, short enough to be no outage where it is the other way round.
_ELSEWHERE: Final = GivenBack(seconds=5.0)
#: After these a lineage has something to tell whoever waits for it.
_NEWS: Final = frozenset({"completed", "continued", "refused", "dead", "cancelled", "parked"})
_INVALID_INPUT: Final = InvalidCommand("input", "does not fit the handler's model", "accept it anew in the right form")


class Attempt:
    """One claimed job at work. ``run`` ends with the attempt, and raises only what must end the worker.

    Then ``outcome`` is what was written: completed, continued, refused (a workflow's word to its client), retried (after
    ``retry_seconds``), dead, cancelled, released, parked or lost; and ``failure`` is what it failed of. ``workflows`` is needed for
    handlers that are workflows.
    """

    def __init__(
        self,
        state: AttemptState,
        *,
        handler: Handler | MissingVersion,
        writer: RunWriter,
        metrics: WorkerMetrics,
        workflows: WorkflowWriter | None = None,
    ) -> None:
        self.state = state
        self._handler = handler
        self._definition = handler.definition if isinstance(handler, WorkflowHandler) else None
        self._writer = writer
        self._workflows = workflows
        self._metrics = metrics
        self._handling: asyncio.Task[object] | None = None
        self.reason: StopReason | None = None
        self.stopped_at = 0.0
        self.told_that_it_does_not_end = False
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

    def cancel_again(self) -> None:
        """The handler was stopped, and waits while it cleans up; why, see ``fencepost.cancelling``."""
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
        if isinstance(ended, Raised) and isinstance(ended.error, InvariantViolated | LedgerUnusable):
            raise ended.error
        if state.completed:
            self._ended("completed")
            return
        if isinstance(ended, Raised) and isinstance(ended.error, LeaseLost):
            await self._learn_why()
        action, failure = self._decided(ended)
        if isinstance(ended, Raised) and isinstance(ended.error, WorkflowChanged):
            self._note_change(ended.error)
        if failure is not None:
            self.failure = failure
            self._note(failure, ended, is_told=isinstance(action, FailedAttempt) and action.failure is not None)
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

    def _decided(self, ended: Ended) -> tuple[Action, Failure | None]:
        retry = self._handler.retry
        try:
            return decide(self.state, ended, self.reason, retry=retry, random=random.random, workflow=self._definition)
        except Exception as error:  # noqa: BLE001 - a boundary: a codec is the author's, and no output may end the worker
            return decide(self.state, Raised(error), self.reason, retry=retry, random=random.random)

    async def _handled(self) -> Ended:
        handler, claim = self._handler, self.state.claim
        if isinstance(handler, MissingVersion):
            return self._not_executed(handler)
        try:
            payload = self.state.codec.decode(claim.input)
        except Exception as error:  # noqa: BLE001 - a boundary: a codec is the author's, and no input may end the worker
            told = f"input: the codec of this worker cannot read what the run was accepted with ({type(error).__name__})"
            return Raised(WorkflowChanged(told))
        try:
            value = handler.parse(payload)
        except Exception as refused:  # noqa: BLE001 - a boundary: the model is the author's, and no input may end the worker
            _log.warning("input_refused", run_id=str(claim.key.run_id), problems=problems_of(refused))
            return Raised(_INVALID_INPUT)
        if not isinstance(handler, WorkflowHandler):
            return await self._executed(called(handler.function, RunContext(self.state, self._writer), value))
        context = self._workflow_context(handler)
        return context.ending(await self._executed(called(context.execute, handler.function, value)))

    def _workflow_context(self, handler: WorkflowHandler) -> WorkflowContext:
        steps = self._workflows
        assert steps is not None, "who executes workflows keeps their steps"
        publisher = steps.publisher(self.state)
        return WorkflowContext(
            self.state, self._writer, workflow=handler.definition, registry=handler.registry, steps=steps, publisher=publisher
        )

    def _not_executed(self, missing: MissingVersion) -> Ended:
        told = {"run_id": str(self.state.claim.key.run_id), "workflow": missing.workflow, "version": missing.version}
        if missing.is_newer:
            _log.warning("workflow_version_elsewhere", seconds=_ELSEWHERE.seconds, **told)
            return Left(_ELSEWHERE)
        return Raised(WorkflowChanged(f"version {missing.version} is registered no more: keep it until its runs have ended"))

    async def _executed(self, body: Coroutine[Any, Any, object]) -> Ended:
        handling = asyncio.create_task(body)
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
        elif isinstance(action, Completion | Continuation):
            await self._complete(action)
        elif isinstance(action, Release):
            settled = await self._writer.release(action, trusted_until=trusted_until)
            given_back = "released" if action.parked_as is None else "parked"
            self._ended("cancelled" if settled.state == "cancelled" else given_back)
        else:
            self.retry_seconds = action.delay_seconds
            settled = await self._writer.fail(action, trusted_until=trusted_until)
            is_refused = settled.state == "dead" and action.failure is not None
            self._ended("refused" if is_refused else {"queued": "retried"}.get(settled.state, settled.state))
            if settled.state == "dead" and not is_refused:
                self._dead(settled.reason or "unknown", action.error_code)

    async def _complete(self, completion: Completion | Continuation) -> None:
        """A completion that the fence refused because of a cancellation ends as cancelled; otherwise the lease is lost."""
        trusted_until = self.state.trusted_until
        try:
            if isinstance(completion, Continuation):
                await self._writer.continue_run(completion, trusted_until=trusted_until)
            else:
                await self._writer.complete(completion, trusted_until=trusted_until)
        except LeaseLost:
            standing = await self._writer.standing(completion.key)
            if standing is None or not (standing.held and standing.cancel_requested):
                raise
            self.stop(StopReason.CANCEL_REQUESTED)
            action, _ = self._decided(WasCancelled())
            await self._written(action)
        else:
            self._ended("continued" if isinstance(completion, Continuation) else "completed")

    def _note(self, failure: Failure, ended: Ended, *, is_told: bool) -> None:
        """What a developer needs to find the fault, and no value: class, code and place, never the message."""
        claim = self.state.claim
        run_id, generation = str(claim.key.run_id), claim.key.generation
        run = {"run_id": run_id, "workflow": claim.workflow, "attempt": claim.attempt, "generation": generation}
        if self.reason is StopReason.CANCEL_REQUESTED:
            _log.info("attempt_cancelled", **run)
            return
        if is_told:
            _log.info("workflow_refused", **run, code=failure.code)  # what it is for, and no fault
            return
        self._metrics.attempt_failed(claim.workflow, failure.kind)
        error = ended.error if isinstance(ended, Raised) else None
        told = {"kind": failure.kind, "code": failure.code, "error_class": failure.error_class, "at": frames_of(error)}
        level = logging.WARNING if failure.kind != "retryable" or failure.code == "unexpected" else logging.INFO
        _log.log(level, "attempt_failed", **run, **told)

    def _note_change(self, changed: WorkflowChanged) -> None:
        claim = self.state.claim
        told = {"run_id": str(claim.key.run_id), "workflow": claim.workflow, "version": claim.workflow_version}
        remedy = "register what the run began under, then `fencepost runs resume`"
        _log.error("workflow_changed", **told, code=CHANGED.code, change=str(changed), remedy=remedy)

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
        if outcome in _NEWS:
            self._writer.ring([self.state.claim.root_run_id])
        self._metrics.attempt_ended(self.state.claim.workflow, outcome, lease_clock() - self.state.claimed_at)
