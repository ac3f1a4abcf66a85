"""The database adapter of workflows' steps, timers and continuations: one method a statement, and no decision of its own."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from consumer_sdk.jobs import Claim, Continuation
from consumer_sdk.late import Late
from consumer_sdk.run_store import PLANNER, ROLE, usage_columns
from consumer_sdk.steps import KeptStep, StepKey, StepRecord, Timer
from fencepost.database import StatementPool
from fencepost.statements import load_statements

__all__ = ["WorkflowStore"]

_SQL: Final = load_statements("consumer_sdk", "workflows.sql")
# Records, reads, and one for timers and continuations: each can hang without the others.
_POOL_SIZE: Final = 3


class WorkflowStore:
    """``worker_id`` is the owner that every write names. It has connections of its own, opened at first use: workflows that wait
    for their steps must not wait in the way of leases. ``pooler``: a transaction pooler stands between, which takes no settings."""

    def __init__(self, database_url: str, *, worker_id: str, timeout_seconds: float, pooler: bool = False) -> None:
        self._database_url = database_url
        self._worker_id = worker_id
        self._timeout = timeout_seconds
        self._pooler = pooler
        self._pool = Late(self._open)

    async def record(self, records: Sequence[StepRecord]) -> Mapping[int, bool]:
        """Keep what steps returned. By their place, where the fence let it through: whether the row is the lease's."""
        rows = await self._fetch(
            "record_steps",
            self._worker_id,
            [record.job.run_id for record in records],
            [record.job.tenant_id for record in records],
            [record.job.generation for record in records],
            [record.key.run_key for record in records],
            [record.key.iteration for record in records],
            [record.key.step for record in records],
            [record.key.occurrence for record in records],
            [record.kept.fingerprint for record in records],
            [record.kept.fingerprint_version for record in records],
            [record.kept.result for record in records],
        )
        return {row["place"] - 1: row["recorded"] for row in rows}

    async def read(self, keys: Sequence[StepKey]) -> Sequence[KeptStep | None]:
        """What is kept of each step; None where nothing is."""
        rows = await self._fetch(
            "read_steps",
            [key.run_key for key in keys],
            [key.tenant_id for key in keys],
            [key.iteration for key in keys],
            [key.step for key in keys],
            [key.occurrence for key in keys],
        )
        kept = {row["place"] - 1: KeptStep(row["fingerprint"], row["fingerprint_version"], row["result"]) for row in rows}
        return [kept.get(place) for place in range(len(keys))]

    async def begin_timer(self, claim: Claim, key: StepKey, *, fingerprint: bytes, version: int, seconds: float) -> Timer | None:
        """Set a timer, or find it set; None if the run is not held."""
        rows = await self._fetch(
            "begin_timer",
            self._worker_id,
            *claim.key,
            key.run_key,
            key.iteration,
            key.step,
            key.occurrence,
            fingerprint,
            version,
            timedelta(seconds=seconds),
        )
        return Timer(*rows[0].values()) if rows else None

    async def continue_run(self, continuation: Continuation) -> UUID | None:
        """End a run by starting the next one; its id, None if the fence refused."""
        deadline = continuation.deadline_seconds
        (cost,), (detail,) = usage_columns([continuation.usage])
        run_id, tenant_id, generation = continuation.key
        rows = await self._fetch(
            "continue_run",
            self._worker_id,
            tenant_id,
            run_id,
            generation,
            continuation.new_run_id,
            continuation.workflow,
            continuation.workflow_version,
            continuation.input,
            continuation.max_attempts,
            None if deadline is None else timedelta(seconds=deadline),
            timedelta(seconds=continuation.started_after_seconds),
            cost,
            detail,
        )
        new_run_id: UUID | None = rows[0]["new_run_id"]
        return new_run_id

    async def close(self) -> None:
        """Close the connections, those as well that are being opened for a write that nobody waits for any more."""
        await self._pool.close()

    async def _fetch(self, name: str, *arguments: object) -> Sequence[Any]:
        return await (await self._pool.opened()).fetch(name, *arguments)

    async def _open(self) -> StatementPool:
        settings = {"application_name": "fencepost-steps"} | ({} if self._pooler else PLANNER)
        return await StatementPool.open(
            self._database_url, _SQL, role=ROLE, size=_POOL_SIZE, timeout_seconds=self._timeout, server_settings=settings
        )
