"""The database adapter of runs: one method a statement, and no decision of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from json import dumps
from typing import Any, Final
from uuid import UUID

import asyncpg

from consumer_sdk.jobs import Claim, Completion, FailedAttempt, JobKey, Reaped, Release, Settled, Standing, Usage
from fencepost.database import StatementPool
from fencepost.errors import InvariantViolated
from fencepost.statements import load_statements

__all__ = ["PLANNER", "ROLE", "Claimable", "QueueDepth", "RunStore", "Served", "complete_within", "guard_within", "usage_columns"]

#: What to grant to the worker's database user.
ROLE: Final = "fencepost_consumer"

_SQL: Final = load_statements("consumer_sdk", "runs.sql")
# claim, renew, complete, fail and release side by side, and one for the rest: each can hang without the others.
_POOL_SIZE: Final = 5
# With statistics of an empty table the planner would scan it, and go on doing so while it fills; and a limit that it does not
# know makes it hash what it should probe. No statement here is better off with either.
# Nor does any gain from knowing its arrays, and planning costs more than the statement.
PLANNER: Final = {
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A workflow that the worker has a handler for."""

    workflow: str
    attempt_seconds: float | None
    last_tenant: str


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueDepth:
    """``ready`` is counted up to a bound."""

    workflow: str
    ready: int
    oldest_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Claimable:
    """How a job stands. ``wait_seconds``: until its lease runs out, or its time comes."""

    state: str
    workflow: str
    cancel_requested: bool
    wait_seconds: float


class RunStore:
    """``worker_id`` is the owner that every write names; it holds a nonce, so that a restarted worker is another owner."""

    def __init__(self, statements: StatementPool, worker_id: str) -> None:
        self._fetch = statements.fetch
        self._worker_id = worker_id
        self.close = statements.close

    @classmethod
    async def open(cls, database_url: str, *, worker_id: str, timeout_seconds: float, pooler: bool = False) -> "RunStore":
        """``pooler``: a transaction pooler stands between, which takes no settings of the session."""
        settings = {"application_name": "fencepost-worker"} | ({} if pooler else PLANNER)
        statements = await StatementPool.open(
            database_url, _SQL, role=ROLE, size=_POOL_SIZE, timeout_seconds=timeout_seconds, server_settings=settings
        )
        return cls(statements, worker_id)

    async def claim(self, served: Sequence[Served], *, limit: int, lease_seconds: float) -> Sequence[Claim]:
        """Lease up to ``limit`` ready jobs, oldest first."""
        rows = await self._fetch(
            "claim",
            self._worker_id,
            limit,
            timedelta(seconds=lease_seconds),
            [one.workflow for one in served],
            [_interval(one.attempt_seconds) for one in served],
            [one.last_tenant for one in served],
        )
        return [_claim(row) for row in rows]

    async def claim_run(
        self, workflow: str, run_id: UUID, tenant_id: str, *, attempt_seconds: float, lease_seconds: float
    ) -> Claim | None:
        """Lease the job of one run, or of the replay that took its place; None if it is not to be had: ``claimable`` says why."""
        limit, lease = timedelta(seconds=attempt_seconds), timedelta(seconds=lease_seconds)
        rows = await self._fetch("claim_run", self._worker_id, lease, workflow, run_id, tenant_id, limit)
        return _claim(rows[0]) if rows else None

    async def claimable(self, run_id: UUID, tenant_id: str) -> Claimable | None:
        """How a job stands that was not to be had; None if there is no such run."""
        rows = await self._fetch("read_claimable", run_id, tenant_id)
        return Claimable(**dict(rows[0])) if rows else None

    async def renew(self, checkpoints: Mapping[JobKey, bytes | None], *, lease_seconds: float) -> Mapping[JobKey, bool]:
        """Renew leases and keep checkpoints. The keys still held, and whether their cancellation was requested."""
        rows = await self._fetch(
            "renew", self._worker_id, *_keys(checkpoints), timedelta(seconds=lease_seconds), list(checkpoints.values())
        )
        return {_key(row): row["cancel_requested"] for row in rows}

    async def complete(self, completions: Sequence[Completion]) -> frozenset[JobKey]:
        """End runs as completed; the keys that were. Whatever is missing was lost, or is to be cancelled."""
        return frozenset(_key(row) for row in await self._fetch("complete", *_completions(self._worker_id, completions)))

    async def fail(self, failures: Sequence[FailedAttempt]) -> Mapping[JobKey, Settled]:
        """End attempts in failure; what became of each job that was still held."""
        rows = await self._fetch(
            "fail",
            self._worker_id,
            *_keys([failure.key for failure in failures]),
            [_interval(failure.delay_seconds) for failure in failures],
            [failure.reason for failure in failures],
            [failure.error_class for failure in failures],
            [failure.error_code for failure in failures],
            [failure.checkpoint for failure in failures],
            [timedelta(seconds=failure.started_after_seconds) for failure in failures],
            *usage_columns([failure.usage for failure in failures]),
            [failure.failure for failure in failures],
        )
        return {_key(row): Settled(state=row["state"], reason=row["reason"]) for row in rows}

    async def release(self, releases: Sequence[Release]) -> Mapping[JobKey, Settled]:
        """Give attempts back; what became of each job that was still held."""
        rows = await self._fetch(
            "release",
            self._worker_id,
            *_keys([release.key for release in releases]),
            [release.checkpoint for release in releases],
            [timedelta(seconds=release.started_after_seconds) for release in releases],
            [_interval(release.delay_seconds) for release in releases],
            [release.parked_as for release in releases],
        )
        return {_key(row): Settled(state=row["state"], reason=None) for row in rows}

    async def append_event(self, key: JobKey, event_type: str, detail: Mapping[str, object]) -> int | None:
        """Append an event to a run that is held; its sequence, None if the lease was lost."""
        rows = await self._fetch(
            "append_event", self._worker_id, key.run_id, key.tenant_id, key.generation, event_type, dumps(detail)
        )
        return rows[0]["sequence"] if rows else None

    async def standing(self, key: JobKey) -> Standing | None:
        """How a lost job stands now; None when there is no such job any more."""
        rows = await self._fetch("why_lost", key.run_id, key.tenant_id)
        return _standing(rows[0], self._worker_id, key.generation) if rows else None

    async def reap(self, *, limit: int) -> Sequence[Reaped]:
        """End or queue again what no claim can see."""
        rows = await self._fetch("reap", limit)
        return [
            Reaped(
                run_id=row["run_id"],
                workflow=row["workflow"],
                state=row["state"],
                reason=row["reason"],
                root_run_id=row["root_run_id"],
            )
            for row in rows
        ]

    async def ring_lineages(self, root_run_ids: Sequence[UUID]) -> None:
        """Tell whoever waits for these lineages that they have news."""
        await self._fetch("ring_lineages", list(root_run_ids))

    async def expire_keys(self, *, limit: int) -> int:
        """Turn idempotency keys past their retention into tombstones; how many."""
        return len(await self._fetch("expire_keys", limit))

    async def forget(self, retention: timedelta, *, limit: int) -> int:
        """Delete what is past its retention in the ledger; how much."""
        forgotten: int = (await self._fetch("forget_effects", retention, limit))[0]["forgotten"]
        return forgotten

    async def arm(self, *, milliseconds: int) -> None:
        """Ask whoever makes a job ready to ring, for that long."""
        await self._fetch("arm", milliseconds)

    async def next_ready(self, workflows: Sequence[str]) -> float | None:
        """Seconds until a queued job is ready; None if none is queued."""
        rows = await self._fetch("next_ready", list(workflows))
        seconds: float | None = rows[0]["seconds"] if rows else None
        return seconds

    async def queue_depth(self, workflows: Sequence[str], *, most: int) -> Sequence[QueueDepth]:
        """For the gauges, by workflow."""
        rows = await self._fetch("queue_depth", list(workflows), most)
        return [QueueDepth(workflow=row["workflow"], ready=row["ready"], oldest_seconds=row["oldest_seconds"]) for row in rows]


async def guard_within(connection: asyncpg.Connection, worker_id: str, key: JobKey) -> bool:
    """Whether the run is still held, as the last statement of a transaction that does not complete it."""
    return bool(await connection.fetch(_SQL["guard"], worker_id, key.run_id, key.tenant_id, key.generation))


async def complete_within(connection: asyncpg.Connection, worker_id: str, completion: Completion) -> bool:
    """The same statement in a transaction of the caller's, as its last: whether the run was still held.

    The guard before it waits for the row, which the statement itself would pass over.
    """
    if not await guard_within(connection, worker_id, completion.key):
        return False
    return bool(await connection.fetch(_SQL["complete"], *_completions(worker_id, [completion])))


def _completions(worker_id: str, completions: Sequence[Completion]) -> Sequence[object]:
    return (
        worker_id,
        *_keys([completion.key for completion in completions]),
        [completion.output for completion in completions],
        [timedelta(seconds=completion.started_after_seconds) for completion in completions],
        *usage_columns([completion.usage for completion in completions]),
    )


def _keys(keys: "Sequence[JobKey] | Mapping[JobKey, Any]") -> tuple[list[UUID], list[str], list[int]]:
    return [key.run_id for key in keys], [key.tenant_id for key in keys], [key.generation for key in keys]


def usage_columns(usages: Sequence[Usage]) -> tuple[list[Decimal | None], list[str | None]]:
    """Costs and details, as the statements take them."""
    costs = [None if usage.cost is None else Decimal(str(usage.cost)) for usage in usages]
    return costs, [dumps(usage.detail) if usage.detail else None for usage in usages]


def _interval(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)


def _seconds(interval: timedelta | None) -> float | None:
    return None if interval is None else interval.total_seconds()


def _key(row: Any) -> JobKey:
    return JobKey(row["run_id"], row["tenant_id"], row["lease_generation"])


def _claim(row: Any) -> Claim:
    return Claim(
        key=_key(row),
        attempt=row["attempts"],
        max_attempts=row["max_attempts"],
        workflow=row["workflow"],
        workflow_version=row["workflow_version"],
        input=row["input"],
        checkpoint=row["checkpoint"],
        retry_delay_seconds=_seconds(row["retry_delay"]),
        attempt_seconds=_seconds(row["attempt_remaining"]),
        root_run_id=row["root_run_id"],
        iteration=row["iteration"],
        is_replay=row["is_replay"],
        traceparent=row["traceparent"],
        created_at=row["created_at"],
        round_ended_at=row["round_ended_at"],
        data_key=row["data_key"],
    )


def _standing(row: Any, worker_id: str, generation: int) -> Standing:
    if row["lease_generation"] < generation:
        raise InvariantViolated("a job's generation went back")
    same = row["lease_generation"] == generation
    return Standing(
        state=row["state"],
        left_here=same and row["state"] != "leased",
        held=same and row["state"] == "leased" and row["lease_owner"] == worker_id and not row["expired"],
        cancel_requested=row["cancel_requested"],
    )
