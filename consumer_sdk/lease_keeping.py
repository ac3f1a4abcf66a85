"""Keeps the leases of the attempts at work, and ends an attempt whose time is over.

Renewing asks the database, watching asks only this machine's clock: a lease that cannot be renewed ends its handler before the
database gives the job to somebody else, whether the database answers or not.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from uuid import UUID

import structlog

from consumer_sdk.attempt import Attempt
from consumer_sdk.context import AttemptState
from consumer_sdk.decision import StopReason
from consumer_sdk.jobs import JobKey
from consumer_sdk.run_store import RunStore
from consumer_sdk.worker_metrics import WorkerMetrics
from consumer_sdk.worker_settings import WorkerSettings
from fencepost.cancelling import REMEDY
from fencepost.clock import lease_clock
from fencepost.errors import TransientError

__all__ = ["LeaseKeeper"]

_log = structlog.get_logger(__name__)

_MOST_AT_ONCE: Final = 500
_MOST_HEARD_OF: Final = 1_000
# Beyond what a handler may take to clean up.
_PATIENCE_SECONDS: Final = 5.0
_REMEDY: Final = f"{REMEDY}; where it does not end, a restart of the process frees its slot"
# Past its deadline the database renews an attempt no more, and a lost lease cannot be renewed.
_NOT_RENEWED: Final = frozenset({StopReason.LEASE_LOST, StopReason.ATTEMPT_DEADLINE})


class LeaseKeeper:
    """``attempts`` are those at work, by their leases. ``answered`` is told when the database has answered."""

    def __init__(self, store: RunStore, settings: WorkerSettings, metrics: WorkerMetrics, *, answered: Callable[[], None]) -> None:
        self.attempts: dict[JobKey, Attempt] = {}
        self._store = store
        self._settings = settings
        self._metrics = metrics
        self._answered = answered
        self._heard_of: dict[UUID, float] = {}
        self._renew_now = asyncio.Event()

    def add(self, attempt: Attempt) -> None:
        """Keep the lease of an attempt from its claim on."""
        self.attempts[attempt.state.claim.key] = attempt
        self._ask_if_cancelled(attempt.state, asked_at=attempt.state.claimed_at)

    def cancelled(self, run_id: UUID) -> None:
        """A run was cancelled, it is said: if it is ours, or about to be, ask the database now."""
        self._heard_of[run_id] = lease_clock()
        if len(self._heard_of) > _MOST_HEARD_OF:
            del self._heard_of[next(iter(self._heard_of))]
        for attempt in self.attempts.values():
            self._ask_if_cancelled(attempt.state, asked_at=attempt.state.renewed_at)

    def watch(self) -> None:
        """What the clock decides: lost trust, deadlines, handlers that report no progress."""
        now = lease_clock()
        for attempt in self.attempts.values():
            self._tell_if_it_does_not_end(attempt, now)
            deadline = attempt.state.deadline
            if attempt.state.completed:
                continue
            if now >= attempt.state.trusted_until:
                attempt.stop(StopReason.LEASE_LOST)
            elif deadline is not None and now >= deadline:
                attempt.stop(StopReason.ATTEMPT_DEADLINE)
            elif attempt.has_progress_limit_passed:
                attempt.stop(StopReason.NO_PROGRESS)

    def _tell_if_it_does_not_end(self, attempt: Attempt, now: float) -> None:
        if attempt.reason is None or attempt.state.over or attempt.told_that_it_does_not_end:
            return
        if (seconds := now - attempt.stopped_at) < self._settings.worker_cancel_grace_seconds + _PATIENCE_SECONDS:
            return
        attempt.told_that_it_does_not_end = True
        attempt.cancel_again()
        claim = attempt.state.claim
        told = {"run_id": str(claim.key.run_id), "workflow": claim.workflow, "stopped_for": attempt.reason.value}
        _log.warning("handler_does_not_end", **told, seconds=round(seconds, 1), remedy=_REMEDY)

    async def renew_forever(self) -> None:
        """Renew each lease at a third of it, and at once where a cancellation was heard of."""
        pause = self._settings.renew_after_seconds / 4
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._renew_now.wait()
            self._renew_now.clear()
            due_before = lease_clock() - self._settings.renew_after_seconds + pause
            due = [attempt for attempt in self.attempts.values() if attempt.state.renewed_at <= due_before]
            due = [attempt for attempt in due if self._may_renew(attempt)]
            for place in range(0, len(due), _MOST_AT_ONCE):
                await self._renew(due[place : place + _MOST_AT_ONCE])

    def _may_renew(self, attempt: Attempt) -> bool:
        """A handler that does not end after it was stopped is not kept alive for ever: its lease runs out. A completion that a
        handler's open transaction holds is not asked about: its row's lock is its fence."""
        if attempt.state.completing or attempt.state.completed or attempt.reason in _NOT_RENEWED:
            return False
        grace = self._settings.worker_cancel_grace_seconds
        return attempt.reason is None or lease_clock() - attempt.stopped_at <= grace

    async def _renew(self, attempts: Sequence[Attempt]) -> None:
        checkpoints = {attempt.state.claim.key: attempt.state.unsaved_checkpoint for attempt in attempts}
        asked_at = lease_clock()
        try:
            held = await self._store.renew(checkpoints, lease_seconds=self._settings.worker_lease_seconds)
        except TransientError as error:
            self._metrics.database_error("renew")
            _log.warning("renew_failed", error=str(error))
            return
        self._answered()
        self._metrics.statement("renew", lease_clock() - asked_at)
        for attempt in attempts:
            if attempt.state.claim.key in held:
                self._renewed(attempt, held, checkpoints[attempt.state.claim.key], asked_at)
            else:
                await self._not_renewed(attempt)

    def _renewed(self, attempt: Attempt, held: Mapping[JobKey, bool], checkpoint: bytes | None, asked_at: float) -> None:
        attempt.state.renewed(asked_at)
        self._ask_if_cancelled(attempt.state, asked_at=asked_at)
        if checkpoint is not None:
            attempt.state.saved_checkpoint = checkpoint
        if held[attempt.state.claim.key]:
            attempt.stop(StopReason.CANCEL_REQUESTED)

    async def _not_renewed(self, attempt: Attempt) -> None:
        """Lost, or somebody else has its row locked just now; then the next round tries again, until the lease is not trusted."""
        key = attempt.state.claim.key
        with contextlib.suppress(TransientError):
            standing = await self._store.standing(key)
            deadline = attempt.state.deadline
            if key not in self.attempts:
                return  # it ended meanwhile, and its lease with it
            if deadline is not None and lease_clock() >= deadline:
                attempt.stop(StopReason.ATTEMPT_DEADLINE)
            elif standing is None or not standing.held:
                attempt.stop(StopReason.LEASE_LOST)

    def _ask_if_cancelled(self, state: AttemptState, *, asked_at: float) -> None:
        """Renew again at once if a cancellation was heard of since the last answer was asked for."""
        if self._heard_of.get(state.claim.key.run_id, 0.0) >= asked_at:
            state.renewed_at = 0.0
            self._renew_now.set()
