"""The worker: claims ready jobs, supervises their attempts, keeps their leases, and stops in order.

Claiming, renewing and watching run side by side, so that none waits for another: a claim that hangs costs no lease, and a lease
that cannot be renewed ends its handler by this machine's clock, before the database gives the job to somebody else.
"""

import asyncio
import contextlib
import random
import traceback
from collections.abc import Coroutine, Mapping, Sequence
from secrets import token_hex
from typing import Any, Final
from uuid import UUID

import structlog

from consumer_sdk.attempt import Attempt
from consumer_sdk.context import AttemptState
from consumer_sdk.decision import StopReason
from consumer_sdk.handlers import Handlers
from consumer_sdk.jobs import Claim, JobKey
from consumer_sdk.run_store import RunStore, Served
from consumer_sdk.run_writer import RunWriter
from consumer_sdk.worker_bell import WorkerBell
from consumer_sdk.worker_metrics import WorkerMetrics
from consumer_sdk.worker_settings import WorkerSettings
from fencepost import __version__
from fencepost.clock import lease_clock
from fencepost.errors import ConfigurationError, InvariantViolated, TransientError
from fencepost.health import HealthServer
from fencepost.secrets import Secrets

__all__ = ["Worker"]

_log = structlog.get_logger(__name__)

_WATCH_SECONDS: Final = 0.1
_MEASURE_SECONDS: Final = 5.0
_DEPTH_MOST: Final = 10_000
_MOST_AT_ONCE: Final = 500
_MOST_HEARD_OF: Final = 1_000
_MOST_FRAMES: Final = 12
# From so many slots on a claim takes half of them, so that one half is executed while the other is claimed.
_CLAIMS_HALF_FROM: Final = 50
_LOOP_STALLED_SECONDS: Final = 30.0
# Past its deadline the database renews an attempt no more, and a lost lease cannot be renewed.
_NOT_RENEWED: Final = frozenset({StopReason.LEASE_LOST, StopReason.ATTEMPT_DEADLINE})
_START_PAUSE_SECONDS: Final = 1.0
_MOST_STATEMENT_SECONDS: Final = 10.0
_FAULT_PAUSE_SECONDS: Final = 0.2
_REAP_MOST: Final = 100
_EXPIRE_MOST: Final = 1_000
# What is left of the grace when attempts are given back: time for the handlers to end and for the statement.
_GIVE_BACK_FRACTION: Final = 0.25
_GIVE_BACK_MOST_SECONDS: Final = 5.0
_END_SECONDS: Final = 1.0


def _jittered(seconds: float) -> float:
    """A fifth more or less, so that a fleet does not look at once."""
    return seconds * random.uniform(0.8, 1.2)  # noqa: S311 - nothing secret


class Worker:
    """Executes the runs that ``handlers`` has handlers for. ``run`` returns after ``stop``, and raises on what a restart must mend.

    ``secrets`` bind outside effects to their requests; they default to the environment's, read when the first is asked for.
    ``worker_id`` is the owner of its leases: the name with a nonce, so that a restarted worker is another owner.
    """

    def __init__(self, handlers: Handlers, settings: WorkerSettings, *, secrets: Secrets | None = None) -> None:
        self._handlers = handlers.by_workflow
        self._reconcilers = handlers.reconcilers
        self._secrets = secrets
        if not self._handlers:
            raise ConfigurationError("the worker has no handlers: register at least one workflow")
        self._settings = settings
        self.worker_id = f"{settings.worker_name}/{token_hex(8)}"
        self._metrics = WorkerMetrics(version=__version__, worker_id=self.worker_id, workflows=sorted(self._handlers))
        slots = settings.worker_concurrency
        self._claim_most = min(slots if slots < _CLAIMS_HALF_FROM else -(-slots // 2), _MOST_AT_ONCE)
        self._attempts: dict[JobKey, Attempt] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_tenants: dict[str, str] = {}
        self._stopping = asyncio.Event()
        self._heard_of: dict[UUID, float] = {}
        self._rung = asyncio.Event()
        self._freed = asyncio.Event()
        self._renew_now = asyncio.Event()
        self._fault: BaseException | None = None
        self._faulted = asyncio.Event()
        self._ticked_at = self._database_seen_at = lease_clock()
        self._problems: list[str] = ["starting"]
        self.http_port: int | None = None
        self.left_behind = 0

    def stop(self) -> None:
        """Ask for the graceful stop. Safe to call more than once."""
        for event in (self._stopping, self._rung, self._freed):
            event.set()

    async def run(self) -> None:
        """Run until stopped. Cancelling it is the hard stop: handlers are cancelled, leases run out."""
        settings = self._settings
        health = HealthServer(
            settings.worker_http_host,
            settings.worker_http_port,
            prefix="FENCEPOST_WORKER_",
            registry=self._metrics.registry,
            live=self._not_live,
            ready=lambda: list(self._problems),
        )
        self.http_port = health.port
        try:
            store = await self._open_store()
            if store is not None:
                try:
                    await self._run_parts(store)
                finally:
                    await store.close()
        finally:
            health.close()

    async def _open_store(self) -> RunStore | None:
        """Wait for the database for as long as it takes, or until stopped."""
        while not self._stopping.is_set():
            self._ticked_at = lease_clock()
            try:
                return await self._opened_store()
            except TransientError as error:
                self._problems = ["database: no answer"]
                remedy = "see FENCEPOST_DATABASE_URL; the worker goes on once the database answers"
                _log.warning("database_unreachable", error=str(error), retry_seconds=_START_PAUSE_SECONDS, remedy=remedy)
                await self._pause(_START_PAUSE_SECONDS)
        return None

    async def _opened_store(self) -> RunStore:
        store = await RunStore.open(
            self._settings.database_url.get_secret_value(),
            worker_id=self.worker_id,
            timeout_seconds=min(self._settings.worker_lease_seconds / 3, _MOST_STATEMENT_SECONDS),
            pooler=self._settings.worker_wakeup == "poll",
        )
        try:
            await store.next_ready(sorted(self._handlers))  # a missing schema or right is told now
        except BaseException:
            await store.close()
            raise
        return store

    async def _run_parts(self, store: RunStore) -> None:
        settings = self._settings
        writer = RunWriter(
            store=store,
            worker_id=self.worker_id,
            database_url=settings.database_url.get_secret_value(),
            lease_seconds=settings.worker_lease_seconds,
            concurrency=settings.worker_concurrency,
            reconcilers=self._reconcilers,
            secrets=self._secrets,
            metrics=self._metrics,
        )
        bell: WorkerBell | None = None
        if settings.worker_wakeup == "listen":
            bell = WorkerBell(
                database_url=settings.database_url.get_secret_value(),
                metrics=self._metrics,
                arm=lambda milliseconds: store.arm(milliseconds=milliseconds),
                ring=self._rung.set,
                cancelled=self._look_at,
            )
        _log.info("worker_started", version=__version__, name=settings.worker_name, workflows=sorted(self._handlers))
        loops = [asyncio.create_task(loop) for loop in self._loops(store, writer, bell)]
        claiming = asyncio.create_task(self._claim_forever(store, writer, bell))
        try:
            ends = [asyncio.create_task(event.wait()) for event in (self._stopping, self._faulted)]
            await asyncio.wait([*loops, claiming, *ends], return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
            if self._stopping.is_set() and not self._faulted.is_set():
                await self._finish(claiming)
        finally:
            await self._end([*loops, claiming])
            await writer.close()
        self._raise_fault([*loops, claiming])
        _log.info("worker_stopped")

    def _loops(self, store: RunStore, writer: RunWriter, bell: WorkerBell | None) -> Sequence[Coroutine[Any, Any, None]]:
        """What runs side by side until the last attempt has ended."""
        loops = [self._renew_forever(store), self._watch(), self._maintain(store), self._measure(store)]
        return [*loops, bell.run()] if bell is not None else loops

    # Claiming

    async def _claim_forever(self, store: RunStore, writer: RunWriter, bell: WorkerBell | None) -> None:
        while not self._stopping.is_set():
            free = self._settings.worker_concurrency - len(self._tasks)
            if free <= 0:
                self._freed.clear()
                await self._freed.wait()
                continue
            self._rung.clear()  # before the claim, so that a ring during it is kept
            try:
                claimed_at = lease_clock()
                claims = await self._claim(store, min(free, self._claim_most))
                for claim in claims:
                    self._start(claim, claimed_at, writer)
                if not claims and not (bell is not None and await bell.armed_anew()):
                    await self._idle(store, bell)
            except TransientError as error:
                self._metrics.database_error("claim")
                _log.warning("claim_failed", error=str(error))
                await self._pause(_FAULT_PAUSE_SECONDS)

    async def _claim(self, store: RunStore, limit: int) -> Sequence[Claim]:
        served = [
            Served(workflow=name, attempt_seconds=handler.attempt_seconds, last_tenant=self._last_tenants.get(name, ""))
            for name, handler in sorted(self._handlers.items())
        ]
        started = lease_clock()
        claims = await store.claim(served, limit=limit, lease_seconds=self._settings.worker_lease_seconds)
        self._database_seen_at = lease_clock()
        self._metrics.statement("claim", self._database_seen_at - started)
        if claims:
            self._metrics.claimed(len(claims))
        self._last_tenants |= {claim.workflow: claim.round_ended_at for claim in claims if claim.round_ended_at is not None}
        return claims

    def _start(self, claim: Claim, claimed_at: float, writer: RunWriter) -> None:
        state = AttemptState(claim, claimed_at=claimed_at, trusted_seconds=self._settings.trusted_seconds)
        self._ask_if_cancelled(state, asked_at=claimed_at)
        attempt = Attempt(state, handler=self._handlers[claim.workflow], writer=writer, metrics=self._metrics)
        self._attempts[claim.key] = attempt
        task = asyncio.create_task(attempt.run())
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._attempt_ended(claim.key, done))

    def _attempt_ended(self, key: JobKey, task: asyncio.Task[None]) -> None:
        self._attempts.pop(key, None)
        self._tasks.discard(task)
        self._freed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault = self._fault or error
            self._faulted.set()

    async def _idle(self, store: RunStore, bell: WorkerBell | None) -> None:
        """Until somebody rings, the next job is due, or the poll interval is over."""
        longest = _jittered(self._settings.worker_poll_interval_ms / 1000)
        due = await store.next_ready(sorted(self._handlers))
        # A job that is due and was not claimed is locked by another worker's claim, or past its deadline.
        wait = longest if not due else min(longest, due)
        if bell is not None and bell.listening:
            wait = min(wait, bell.rearm_in())
        try:
            async with asyncio.timeout(wait):
                await self._rung.wait()
            self._metrics.woken("ring")
        except TimeoutError:
            self._metrics.woken("poll")

    # Keeping and ending leases

    async def _renew_forever(self, store: RunStore) -> None:
        pause = self._settings.renew_after_seconds / 4
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._renew_now.wait()
            self._renew_now.clear()
            due_before = lease_clock() - self._settings.renew_after_seconds + pause
            due = [attempt for attempt in self._attempts.values() if attempt.state.renewed_at <= due_before]
            due = [attempt for attempt in due if self._may_renew(attempt)]
            for place in range(0, len(due), _MOST_AT_ONCE):
                await self._renew(store, due[place : place + _MOST_AT_ONCE])

    def _may_renew(self, attempt: Attempt) -> bool:
        """A handler that does not end after it was stopped is not kept alive for ever: its lease runs out. A completion that a
        handler's open transaction holds is not asked about: its row's lock is its fence."""
        if attempt.state.completing or attempt.state.completed or attempt.reason in _NOT_RENEWED:
            return False
        grace = self._settings.worker_cancel_grace_seconds
        return attempt.reason is None or lease_clock() - attempt.stopped_at <= grace

    async def _renew(self, store: RunStore, attempts: Sequence[Attempt]) -> None:
        checkpoints = {attempt.state.claim.key: attempt.state.unsaved_checkpoint for attempt in attempts}
        asked_at = lease_clock()
        try:
            held = await store.renew(checkpoints, lease_seconds=self._settings.worker_lease_seconds)
        except TransientError as error:
            self._metrics.database_error("renew")
            _log.warning("renew_failed", error=str(error))
            return
        self._database_seen_at = lease_clock()
        self._metrics.statement("renew", self._database_seen_at - asked_at)
        for attempt in attempts:
            if attempt.state.claim.key in held:
                self._renewed(attempt, held, checkpoints[attempt.state.claim.key], asked_at)
            else:
                await self._not_renewed(store, attempt)

    async def _not_renewed(self, store: RunStore, attempt: Attempt) -> None:
        """Lost, or somebody else has its row locked just now; then the next round tries again, until the lease is not trusted."""
        key = attempt.state.claim.key
        with contextlib.suppress(TransientError):
            standing = await store.standing(key)
            deadline = attempt.state.deadline
            if key not in self._attempts:
                return
            if deadline is not None and lease_clock() >= deadline:
                attempt.stop(StopReason.ATTEMPT_DEADLINE)
            elif standing is None or not standing.held:
                attempt.stop(StopReason.LEASE_LOST)

    def _renewed(self, attempt: Attempt, held: Mapping[JobKey, bool], checkpoint: bytes | None, asked_at: float) -> None:
        key = attempt.state.claim.key
        attempt.state.renewed(asked_at)
        self._ask_if_cancelled(attempt.state, asked_at=asked_at)
        if checkpoint is not None:
            attempt.state.saved_checkpoint = checkpoint
        if held[key]:
            attempt.stop(StopReason.CANCEL_REQUESTED)

    def _look_at(self, run_id: UUID) -> None:
        """A run was cancelled, it is said: if it is ours, or about to be, ask the database now."""
        self._heard_of[run_id] = lease_clock()
        if len(self._heard_of) > _MOST_HEARD_OF:
            del self._heard_of[next(iter(self._heard_of))]
        for attempt in self._attempts.values():
            self._ask_if_cancelled(attempt.state, asked_at=attempt.state.renewed_at)

    def _ask_if_cancelled(self, state: AttemptState, *, asked_at: float) -> None:
        """Renew again at once if a cancellation was heard of since the last answer was asked for."""
        if self._heard_of.get(state.claim.key.run_id, 0.0) >= asked_at:
            state.renewed_at = 0.0
            self._renew_now.set()

    async def _watch(self) -> None:
        """Ten times a second: what the clock decides."""
        while True:
            self._ticked_at = now = lease_clock()
            for attempt in self._attempts.values():
                deadline = attempt.state.deadline
                if attempt.state.completed:
                    continue
                if now >= attempt.state.trusted_until:
                    attempt.stop(StopReason.LEASE_LOST)
                elif deadline is not None and now >= deadline:
                    attempt.stop(StopReason.ATTEMPT_DEADLINE)
                elif attempt.has_progress_limit_passed:
                    attempt.stop(StopReason.NO_PROGRESS)
            silent = now - self._database_seen_at > max(self._settings.worker_lease_seconds / 2, 5.0)
            self._problems = ["database: no answer"] if silent else []
            self._metrics.slots(len(self._attempts), self._settings.worker_concurrency)
            await asyncio.sleep(_WATCH_SECONDS)

    # What nobody claims, and what is only looked at

    async def _maintain(self, store: RunStore) -> None:
        """Reap and expire, in bounded batches, at a pace that a fleet shares by chance."""
        while True:
            await asyncio.sleep(_jittered(self._settings.worker_lease_seconds / 2))
            try:
                for reaped in await store.reap(limit=_REAP_MOST):
                    self._metrics.reaped(reaped.state)
                    if reaped.state == "dead":
                        self._metrics.dead(reaped.workflow, reaped.reason or "unknown")
                self._metrics.keys_expired(await store.expire_keys(limit=_EXPIRE_MOST))
            except TransientError as error:
                self._metrics.database_error("maintain")
                _log.warning("maintenance_failed", error=str(error))

    async def _measure(self, store: RunStore) -> None:
        while True:
            try:
                for depth in await store.queue_depth(sorted(self._handlers), most=_DEPTH_MOST):
                    self._metrics.queue(depth.workflow, depth.ready, depth.oldest_seconds)
                self._database_seen_at = lease_clock()
            except TransientError as error:
                self._metrics.database_error("measure")
                _log.warning("measure_failed", error=str(error))
            await asyncio.sleep(_MEASURE_SECONDS)

    # Stopping

    async def _finish(self, claiming: asyncio.Task[None]) -> None:
        """Let attempts end by themselves within the grace, then stop them: what they leave is given back, without a failure."""
        grace = self._settings.worker_stop_grace_seconds
        ends_at = lease_clock() + grace
        reserve = min(grace * _GIVE_BACK_FRACTION, _GIVE_BACK_MOST_SECONDS)
        _log.info("worker_stopping", attempts=len(self._attempts), grace_seconds=grace)
        for attempt in self._attempts.values():
            attempt.state.stopping.set()
        # A claim on its way is waited for: cancelled, it would leave leases that nobody knows of.
        await asyncio.wait([claiming], timeout=min(grace - reserve, _MOST_STATEMENT_SECONDS))
        for attempt in self._attempts.values():
            attempt.state.stopping.set()
        if not await self._without_attempts(ends_at - reserve - lease_clock()):
            for attempt in list(self._attempts.values()):
                attempt.stop(StopReason.STOPPING)
            if not await self._without_attempts(ends_at - lease_clock()):
                self.left_behind = len(self._tasks)
                runs = [str(key.run_id) for key in self._attempts]
                _log.error("handlers_did_not_end", run_ids=runs[:20], consequence="their leases run out and others recover them")

    async def _without_attempts(self, seconds: float) -> bool:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=max(seconds, 0.0))
        return not self._tasks

    async def _end(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in [*tasks, *self._tasks]:
            task.cancel()
        await asyncio.wait([*tasks, *self._tasks], timeout=_END_SECONDS)

    def _raise_fault(self, loops: Sequence[asyncio.Task[None]]) -> None:
        fault = self._fault
        for loop in loops:
            if fault is None and loop.done() and not loop.cancelled():
                fault = loop.exception()
        if isinstance(fault, ConfigurationError):
            raise fault
        if fault is not None:
            # The frames and the class, not the message: a PostgreSQL error's detail quotes rows.
            frames = traceback.extract_tb(fault.__traceback__)[-_MOST_FRAMES:]
            stack = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
            _log.error("worker_failed", error_class=type(fault).__name__, stack=stack)
            raise InvariantViolated("a part of the worker failed in an unforeseen way; the process ends") from fault

    async def _pause(self, seconds: float) -> None:
        """Wait, but not for a stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    def _not_live(self) -> list[str]:
        stalled = lease_clock() - self._ticked_at > _LOOP_STALLED_SECONDS
        return ["the event loop stands still"] if stalled else []
