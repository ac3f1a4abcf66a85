"""The worker: claims ready jobs, supervises their attempts, keeps their leases, and stops in order.

Claiming, renewing and watching run side by side, so that none waits for another: a claim that hangs costs no lease, and a lease
that cannot be renewed ends its handler by this machine's clock, before the database gives the job to somebody else.
"""

import asyncio
import contextlib
import random
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from secrets import token_hex
from typing import Any, Final

import structlog

from consumer_sdk.attempt import Attempt
from consumer_sdk.chunk_writer import ChunkWriter
from consumer_sdk.context import AttemptState
from consumer_sdk.decision import StopReason
from consumer_sdk.faults import raise_fault
from consumer_sdk.forgetting import FORGET_SECONDS, forget_old
from consumer_sdk.handlers import Handlers, Versions
from consumer_sdk.jobs import Claim, JobKey, Reaped
from consumer_sdk.lease_keeping import LeaseKeeper
from consumer_sdk.publishing import Publisher
from consumer_sdk.run_store import RunStore, Served
from consumer_sdk.run_writer import RunWriter
from consumer_sdk.worker_bell import WorkerBell
from consumer_sdk.worker_metrics import WorkerMetrics
from consumer_sdk.worker_settings import WorkerSettings, unknown_worker_variables
from consumer_sdk.workflow_store import WorkflowStore
from consumer_sdk.workflow_writer import WorkflowWriter
from fencepost import __version__
from fencepost.clock import lease_clock
from fencepost.codec import PayloadCodec, lineage_codec
from fencepost.errors import ConfigurationError, TransientError
from fencepost.health import HealthServer
from fencepost.secrets import Secrets

__all__ = ["Worker"]

_log = structlog.get_logger(__name__)

_WATCH_SECONDS: Final = 0.1
_BLOCKED_SECONDS: Final = 1.0
_MEASURE_SECONDS: Final = 5.0
_DEPTH_MOST: Final = 10_000
_MOST_AT_ONCE: Final = 500
# From so many slots on a claim takes half of them, so that one half is executed while the other is claimed.
_CLAIMS_HALF_FROM: Final = 50
_LOOP_STALLED_SECONDS: Final = 30.0
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


def _shorter(*limits: float | None) -> float | None:
    return min((limit for limit in limits if limit is not None), default=None)


class Worker:
    """Executes the runs that ``handlers`` has handlers and workflows for. ``run`` returns after ``stop``, and raises on what a
    restart must mend.

    ``secrets`` bind outside effects to their requests and steps to their arguments; they default to the environment's, read now if
    there are reconcilers or workflows, else when the first effect is asked for. ``codec`` turns inputs, outputs, failures, and what
    the ledger and checkpoints keep, into the bytes that are stored; it defaults to that of the included workflows.
    ``worker_id`` is the owner of its leases: the name with a nonce, so that a restarted worker is another owner.
    """

    def __init__(
        self, handlers: Handlers, settings: WorkerSettings, *, secrets: Secrets | None = None, codec: PayloadCodec | None = None
    ) -> None:
        self._handlers = handlers.executors
        self._reconcilers = handlers.reconcilers
        self._codec = handlers.codec if codec is None else codec
        self._has_workflows = any(isinstance(executor, Versions) for executor in self._handlers.values())
        # Where the ledger will be asked, a missing secret is told before the first run, not by it.
        needs_secrets = bool(self._reconcilers) or self._has_workflows
        self._secrets = Secrets.from_environment() if secrets is None and needs_secrets else secrets
        if not self._handlers:
            raise ConfigurationError("the worker has no handlers: register at least one workflow")
        self._settings = settings
        self.worker_id = f"{settings.worker_name}/{token_hex(8)}"
        self._metrics = WorkerMetrics(version=__version__, worker_id=self.worker_id, workflows=sorted(self._handlers))
        slots = settings.worker_concurrency
        self._claim_most = min(slots if slots < _CLAIMS_HALF_FROM else -(-slots // 2), _MOST_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_tenants: dict[str, str] = {}
        self._stopping = asyncio.Event()
        self._rung = asyncio.Event()
        self._freed = asyncio.Event()
        self._fault: BaseException | None = None
        self._faulted = asyncio.Event()
        self._workflows: WorkflowWriter | None = None
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
        _log.info("worker_stopped", reason="stopped before the database answered")
        return None

    async def _opened_store(self) -> RunStore:
        store = await RunStore.open(
            self._settings.database_url.get_secret_value(),
            worker_id=self.worker_id,
            timeout_seconds=self._statement_seconds,
            pooler=self._settings.worker_wakeup == "poll",
        )
        try:
            await store.next_ready(sorted(self._handlers))  # a missing schema or right is told now
        except BaseException:
            await store.close()
            raise
        return store

    @property
    def _statement_seconds(self) -> float:
        return min(self._settings.worker_lease_seconds / 3, _MOST_STATEMENT_SECONDS)

    async def _run_parts(self, store: RunStore) -> None:
        settings = self._settings
        workflows = WorkflowStore(
            settings.database_url.get_secret_value(),
            worker_id=self.worker_id,
            timeout_seconds=self._statement_seconds,
            pooler=settings.worker_wakeup == "poll",
        )
        writer = RunWriter(
            store=store,
            worker_id=self.worker_id,
            database_url=settings.database_url.get_secret_value(),
            lease_seconds=settings.worker_lease_seconds,
            concurrency=settings.worker_concurrency,
            reconcilers=self._reconcilers,
            secrets=self._secrets,
            metrics=self._metrics,
            continue_run=workflows.continue_run,
            pooler=settings.worker_wakeup == "poll",
        )
        chunks = ChunkWriter(
            settings.database_url.get_secret_value(),
            worker_id=self.worker_id,
            lease_seconds=settings.worker_lease_seconds,
            standing=store.standing,
            ring=writer.ring,
            count=self._metrics.chunks,
            pooler=settings.worker_wakeup == "poll",
        )
        if self._secrets is not None:
            self._workflows = WorkflowWriter(
                store=workflows,
                runs=writer,
                secrets=self._secrets,
                publisher=lambda state: Publisher(state.claim, chunks, state.codec),
            )
        keeper = LeaseKeeper(store, settings, self._metrics, answered=self._database_answered)
        bell: WorkerBell | None = None
        if settings.worker_wakeup == "listen":
            bell = WorkerBell(
                database_url=settings.database_url.get_secret_value(),
                metrics=self._metrics,
                arm=lambda milliseconds: store.arm(milliseconds=milliseconds),
                ring=self._rung.set,
                cancelled=keeper.cancelled,
            )
        if unknown := unknown_worker_variables():
            _log.warning("unknown_variables", names=unknown)
        _log.info("worker_started", version=__version__, name=settings.worker_name, workflows=sorted(self._handlers))
        loops = [asyncio.create_task(loop) for loop in self._loops(store, writer, chunks, keeper, bell)]
        claiming = asyncio.create_task(self._claim_forever(store, keeper, writer, bell))
        try:
            ends = [asyncio.create_task(event.wait()) for event in (self._stopping, self._faulted)]
            await asyncio.wait([*loops, claiming, *ends], return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
            if self._stopping.is_set() and not self._faulted.is_set():
                await self._finish(keeper, claiming)
        finally:
            await self._end([*loops, claiming])
            for part in (chunks, workflows, writer):
                await part.close()
        raise_fault("worker", self._fault, [*loops, claiming])
        _log.info("worker_stopped")

    def _loops(
        self, store: RunStore, writer: RunWriter, chunks: ChunkWriter, keeper: LeaseKeeper, bell: WorkerBell | None
    ) -> Sequence[Coroutine[Any, Any, None]]:
        """What runs side by side until the last attempt has ended."""
        loops = [
            keeper.renew_forever(),
            self._watch(keeper),
            self._maintain(store, writer),
            self._forget(store, chunks),
            self._measure(store),
        ]
        return [*loops, bell.run()] if bell is not None else loops

    # Claiming

    async def _claim_forever(self, store: RunStore, keeper: LeaseKeeper, writer: RunWriter, bell: WorkerBell | None) -> None:
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
                    self._start(claim, claimed_at, keeper, writer)
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
        self._database_answered()
        self._metrics.statement("claim", lease_clock() - started)
        if claims:
            self._metrics.claimed(len(claims))
        self._last_tenants |= {claim.workflow: claim.round_ended_at for claim in claims if claim.round_ended_at is not None}
        return claims

    def _start(self, claim: Claim, claimed_at: float, keeper: LeaseKeeper, writer: RunWriter) -> None:
        handler = self._handlers[claim.workflow].of_version(claim.workflow_version)
        claim = replace(claim, attempt_seconds=_shorter(claim.attempt_seconds, handler.attempt_seconds))
        trusted = self._settings.trusted_seconds
        codec = lineage_codec(self._codec, claim.data_key)
        state = AttemptState(claim, claimed_at=claimed_at, trusted_seconds=trusted, codec=codec)
        attempt = Attempt(state, handler=handler, writer=writer, metrics=self._metrics, workflows=self._workflows)
        keeper.add(attempt)
        task = asyncio.create_task(attempt.run())
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._attempt_ended(keeper, claim.key, done))

    def _attempt_ended(self, keeper: LeaseKeeper, key: JobKey, task: asyncio.Task[None]) -> None:
        keeper.attempts.pop(key, None)
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

    # What runs beside the claims

    async def _watch(self, keeper: LeaseKeeper) -> None:
        """Ten times a second: what the clock decides. Its own delay tells of a handler that blocks the loop."""
        self._ticked_at = lease_clock()
        while True:
            late = lease_clock() - self._ticked_at - _WATCH_SECONDS
            self._ticked_at = lease_clock()
            if late > _BLOCKED_SECONDS:
                self._blocked(keeper, late)
            keeper.watch()
            silent = self._ticked_at - self._database_seen_at > max(self._settings.worker_lease_seconds / 2, 5.0)
            self._problems = ["database: no answer"] if silent else []
            self._metrics.slots(len(keeper.attempts), self._settings.worker_concurrency)
            await asyncio.sleep(_WATCH_SECONDS)

    def _blocked(self, keeper: LeaseKeeper, seconds: float) -> None:
        """Nothing ran meanwhile, renewals neither: it can cost every run of this process its lease."""
        self._metrics.blocked(seconds)
        workflows = sorted({attempt.state.claim.workflow for attempt in keeper.attempts.values()})
        remedy = "a handler computes or waits without await: move that to a thread (asyncio.to_thread)"
        _log.warning("event_loop_blocked", seconds=round(seconds, 1), workflows=workflows[:20], remedy=remedy)

    async def _maintain(self, store: RunStore, writer: RunWriter) -> None:
        """Reap and expire, in bounded batches, at a pace that a fleet shares by chance."""
        while True:
            await asyncio.sleep(_jittered(self._settings.worker_lease_seconds / 2))
            try:
                for reaped in await store.reap(limit=_REAP_MOST):
                    self._reaped(reaped, writer)
                self._metrics.keys_expired(await store.expire_keys(limit=_EXPIRE_MOST))
            except TransientError as error:
                self._metrics.database_error("maintain")
                _log.warning("maintenance_failed", error=str(error))

    async def _forget(self, store: RunStore, chunks: ChunkWriter) -> None:
        """Delete what is past its retention: in the ledger, as consumers do (without one nobody else would), and chunks."""
        while True:
            await asyncio.sleep(_jittered(FORGET_SECONDS))
            try:
                await forget_old(store, retention_days=self._settings.ledger_retention_days, told=self._metrics.forgotten)
                if self._has_workflows:
                    await forget_old(chunks, retention_days=self._settings.chunk_retention_days, told=self._chunks_forgotten)
            except TransientError as error:
                self._metrics.database_error("maintain")
                _log.warning("forgetting_failed", error=str(error))

    def _reaped(self, reaped: Reaped, writer: RunWriter) -> None:
        self._metrics.reaped(reaped.state)
        if reaped.root_run_id is not None:
            writer.ring([reaped.root_run_id])
        told = {"run_id": str(reaped.run_id), "workflow": reaped.workflow, "reason": reaped.reason}
        if reaped.state == "dead":
            self._metrics.dead(reaped.workflow, reaped.reason or "unknown")
            _log.error("job_dead", **told)
        else:
            _log.warning("job_reaped", state=reaped.state, **told)

    def _chunks_forgotten(self, chunks: int) -> None:
        self._metrics.chunks("forgotten", chunks)

    async def _measure(self, store: RunStore) -> None:
        while True:
            try:
                for depth in await store.queue_depth(sorted(self._handlers), most=_DEPTH_MOST):
                    self._metrics.queue(depth.workflow, depth.ready, depth.oldest_seconds)
                self._database_answered()
            except TransientError as error:
                self._metrics.database_error("measure")
                _log.warning("measure_failed", error=str(error))
            await asyncio.sleep(_MEASURE_SECONDS)

    def _database_answered(self) -> None:
        self._database_seen_at = lease_clock()

    # Stopping

    async def _finish(self, keeper: LeaseKeeper, claiming: asyncio.Task[None]) -> None:
        """Let attempts end by themselves within the grace, then stop them: what they leave is given back, without a failure."""
        grace = self._settings.worker_stop_grace_seconds
        ends_at = lease_clock() + grace
        reserve = min(grace * _GIVE_BACK_FRACTION, _GIVE_BACK_MOST_SECONDS)
        _log.info("worker_stopping", attempts=len(keeper.attempts), grace_seconds=grace)
        for attempt in keeper.attempts.values():
            attempt.state.stopping.set()
        # A claim on its way is waited for: cancelled, it would leave leases that nobody knows of.
        await asyncio.wait([claiming], timeout=min(grace - reserve, _MOST_STATEMENT_SECONDS))
        for attempt in keeper.attempts.values():
            attempt.state.stopping.set()
        if not await self._without_attempts(ends_at - reserve - lease_clock()):
            for attempt in list(keeper.attempts.values()):
                attempt.stop(StopReason.STOPPING)
            if not await self._without_attempts(ends_at - lease_clock()):
                self.left_behind = len(self._tasks)
                runs = [str(key.run_id) for key in keeper.attempts]
                _log.error("handlers_did_not_end", run_ids=runs[:20], consequence="their leases run out and others recover them")

    async def _without_attempts(self, seconds: float) -> bool:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=max(seconds, 0.0))
        return not self._tasks

    async def _end(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in [*tasks, *self._tasks]:
            task.cancel()
        await asyncio.wait([*tasks, *self._tasks], timeout=_END_SECONDS)

    async def _pause(self, seconds: float) -> None:
        """Wait, but not for a stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    def _not_live(self) -> list[str]:
        stalled = lease_clock() - self._ticked_at > _LOOP_STALLED_SECONDS
        return ["the event loop stands still"] if stalled else []
