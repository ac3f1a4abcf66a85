"""Writes what attempts end in: batched, tried again while the lease may be trusted, and told apart when nothing was changed."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final, NoReturn, TypeVar
from uuid import UUID

import asyncpg

from consumer_sdk.context import AttemptState
from consumer_sdk.effects import Call, CallLimits, EffectKey, Reconciler, RunFence
from consumer_sdk.jobs import Claim, Completion, Continuation, FailedAttempt, JobKey, Release, Settled, Standing
from consumer_sdk.late_ledger import LateLedger
from consumer_sdk.lineage_bell import LineageBell
from consumer_sdk.patience import patiently
from consumer_sdk.run_store import ROLE, RunStore, complete_within, guard_within
from consumer_sdk.transactions import Transactions, open_effects
from consumer_sdk.worker_metrics import WorkerMetrics
from fencepost.batching import Batcher
from fencepost.clock import lease_clock
from fencepost.database import translated
from fencepost.errors import LeaseLost, TransientError
from fencepost.secrets import Secrets

__all__ = ["RunWriter"]

_Answer = TypeVar("_Answer")

_MOST_TRANSACTIONS: Final = 20
_NOT_WHEN_CANCELLED: Final = frozenset({"complete", "continue_run", "record_steps", "begin_timer"})
_COMPLETED: Final = Settled(state="completed", reason=None)


class RunWriter:
    """The writes of one worker's attempts. Each raises ``LeaseLost`` where the fence refused it. ``pooler``: one stands between."""

    def __init__(
        self,
        *,
        store: RunStore,
        worker_id: str,
        database_url: str,
        lease_seconds: float,
        concurrency: int,
        reconcilers: Mapping[str, Reconciler],
        secrets: Secrets | None,
        metrics: WorkerMetrics,
        continue_run: Callable[[Continuation], Awaitable[UUID | None]] | None = None,
        pooler: bool = False,
    ) -> None:
        self._store = store
        self._worker_id = worker_id
        self._lease_seconds = lease_seconds
        self._reconcilers = reconcilers
        connections = min(concurrency, _MOST_TRANSACTIONS)
        self._transactions = Transactions(
            database_url, role=ROLE, size=connections, limit_seconds=lease_seconds, own_sessions=not pooler
        )  # fmt: skip
        # On connections of its own: handlers that wait for it must not wait in the way of renewals.
        effects = partial(open_effects, database_url, role=ROLE, size=connections, timeout_seconds=lease_seconds)
        self._ledger = LateLedger(effects, holder=worker_id, secrets=secrets, count=metrics.effect)
        self._metrics = metrics
        self._continue_run = continue_run
        self._bell = LineageBell(store.ring_lineages)
        self._completions = Batcher[Completion, bool](self._complete_all)
        self._failures = Batcher[FailedAttempt, Settled | None](self._fail_all)
        self._releases = Batcher[Release, Settled | None](self._release_all)

    async def complete(self, completion: Completion, *, trusted_until: float) -> None:
        """End the run as completed."""

        async def write() -> Settled | None:
            return _COMPLETED if await self._completions.put(completion) else None

        if (await self._settled("complete", completion.key, write, trusted_until)).state != "completed":
            raise self._refused("complete")

    async def fail(self, failure: FailedAttempt, *, trusted_until: float) -> Settled:
        """End the attempt in failure; what became of the job."""
        return await self._settled("fail", failure.key, lambda: self._failures.put(failure), trusted_until)

    async def release(self, release: Release, *, trusted_until: float) -> Settled:
        """Give the attempt back; what became of the job."""
        return await self._settled("release", release.key, lambda: self._releases.put(release), trusted_until)

    async def continue_run(self, continuation: Continuation, *, trusted_until: float) -> None:
        """End the run by starting the next one of its lineage."""
        assert self._continue_run is not None, "only workflows continue as new"
        start = self._continue_run

        async def write() -> Settled | None:
            return _COMPLETED if await self.timed("continue_run", start(continuation)) is not None else None

        if (await self._settled("continue_run", continuation.key, write, trusted_until)).state != "completed":
            raise self._refused("continue_run")

    def ring(self, root_run_ids: Sequence[UUID]) -> None:
        """Tell whoever waits for these lineages that they have changed; the change is committed."""
        self._bell.ring(root_run_ids)

    async def standing(self, key: JobKey) -> Standing | None:
        """How a job stands now that a write did not change; None if it is gone."""
        return await self._store.standing(key)

    async def complete_within(self, connection: asyncpg.Connection, completion: Completion) -> None:
        """End the run as completed in the transaction of ``connection``, as its last statement."""
        async with translated("complete", role=ROLE):
            held = await complete_within(connection, self._worker_id, completion)
        if not held:
            raise self._refused("complete")

    async def guard_within(self, connection: asyncpg.Connection, claim: Claim) -> None:
        """Let the transaction of ``connection`` commit only if the run is still held."""
        async with translated("guard", role=ROLE):
            held = await guard_within(connection, self._worker_id, claim.key)
        if not held:
            raise self._refused("guard")

    async def append_event(self, claim: Claim, event_type: str, detail: Mapping[str, object]) -> int:
        """Append to the run's story; the event's sequence."""
        sequence = await self._store.append_event(claim.key, event_type, detail)
        if sequence is None:
            raise self._refused("append_event")
        return sequence

    async def save_checkpoint(self, state: AttemptState) -> None:
        """Store the attempt's newest checkpoint, which renews its lease as well."""
        started, checkpoint = lease_clock(), state.checkpoint
        held = await self._store.renew({state.claim.key: checkpoint}, lease_seconds=self._lease_seconds)
        if state.claim.key not in held:
            await self._settled_already("renew", state.claim.key)
            raise self._refused("renew")
        state.saved_checkpoint = checkpoint
        state.renewed(started)
        if held[state.claim.key]:
            state.renewed_at = 0.0  # to be cancelled: the next round of renewals asks, and stops the handler

    def transaction(self) -> AbstractAsyncContextManager[asyncpg.Connection]:
        """A connection with a transaction begun."""
        return self._transactions.begin()

    async def once(self, state: AttemptState, key: EffectKey, *, request: object, call: Call, limits: CallLimits) -> object:
        """Make an outside effect of the run happen once."""
        ledger = await self._ledger.opened()
        fence = RunFence(state.claim.key.run_id, self._worker_id, state.claim.key.generation)
        reconciler = self._reconcilers.get(key.operation)
        return await ledger.once(key, fence, request=request, call=call, limits=limits, reconciler=reconciler, codec=state.codec)

    async def close(self) -> None:
        """Close the handlers' connections."""
        await self._bell.close()
        self._transactions.close()
        await self._ledger.close()

    async def _settled(
        self, statement: str, key: JobKey, write: Callable[[], Awaitable[Settled | None]], trusted_until: float
    ) -> Settled:
        """Write, or find it written. Raises ``LeaseLost`` where the fence refused."""

        async def once() -> Settled:
            return await write() or await self._settled_already(statement, key)

        return await self.patiently(statement, once, trusted_until)

    async def patiently(self, statement: str, once: Callable[[], Awaitable[_Answer]], trusted_until: float) -> _Answer:
        """Do it, and again while that may help: for as long as the lease may be trusted."""
        return await patiently(once, until=trusted_until, failed=lambda: self._metrics.database_error(statement))

    async def _settled_already(self, statement: str, key: JobKey) -> Settled:
        """A write that was thought unanswered may have been done: then its repetition changes nothing, and all is well."""
        standing = await self._store.standing(key)
        if standing is None or not standing.left_here:
            raise self._unchanged(statement, standing)
        return Settled(state=standing.state, reason=None)

    async def refuse_unchanged(self, statement: str, key: JobKey) -> NoReturn:
        """Say why a write within an attempt changed nothing: ``LeaseLost`` if the fence refused it, ``TransientError`` if the row
        was locked."""
        raise self._unchanged(statement, await self._store.standing(key))

    def _unchanged(self, statement: str, standing: Standing | None) -> LeaseLost | TransientError:
        if standing is None or not standing.held or (standing.cancel_requested and statement in _NOT_WHEN_CANCELLED):
            return self._refused(statement)
        return TransientError(f"{statement}: the job's row is locked by another transaction")

    def _refused(self, statement: str) -> LeaseLost:
        self._metrics.stale_refused(statement)
        return LeaseLost(f"{statement}: the run is no longer held by this attempt; nothing was changed")

    async def _complete_all(self, completions: Sequence[Completion]) -> Sequence[bool]:
        done = await self.timed("complete", self._store.complete(completions))
        return [completion.key in done for completion in completions]

    async def _fail_all(self, failures: Sequence[FailedAttempt]) -> Sequence[Settled | None]:
        settled = await self.timed("fail", self._store.fail(failures))
        return [settled.get(failure.key) for failure in failures]

    async def _release_all(self, releases: Sequence[Release]) -> Sequence[Settled | None]:
        settled = await self.timed("release", self._store.release(releases))
        return [settled.get(release.key) for release in releases]

    async def timed(self, statement: str, answer: Awaitable[_Answer]) -> _Answer:
        """The answer; how long the statement took is measured."""
        started = lease_clock()
        answered = await answer
        self._metrics.statement(statement, lease_clock() - started)
        return answered
