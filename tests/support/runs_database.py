"""The verbs of the model of runs, done by Fencepost on a real database; each answers as the model's does."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, Self
from uuid import UUID

import asyncpg

import producer_sdk.asyncpg
from consumer_sdk.jobs import Completion, FailedAttempt, JobKey, Release, Usage
from consumer_sdk.run_store import ROLE, RunStore, Served, complete_within
from fencepost.database import StatementPool
from fencepost.errors import IdempotencyConflict, InProgress, KeyExpired, RunChanged, RunEnded, RunNotFound
from fencepost.statements import load_statements
from producer_sdk import UNKEYED, Command, Scope, Secrets
from tests.support.run_invariants import WATCH, violations
from tests.support.runs_model import Claimed, Handle, Proposal, Seen

__all__ = ["STATEMENTS", "Calls", "prepare"]

STATEMENTS: Final = load_statements("consumer_sdk", "runs.sql")
EMPTY: Final = """
DELETE FROM fencepost.idempotency_keys; DELETE FROM fencepost.job_replays; DELETE FROM fencepost.runs; DELETE FROM fencepost.outbox;
DELETE FROM public.effects;
"""
PASS_TIME: Final = """
WITH jobs AS (
    UPDATE fencepost.jobs SET available_at = available_at - $1::interval, deadline_at = deadline_at - $1,
        lease_expires_at = lease_expires_at - $1, attempt_deadline_at = attempt_deadline_at - $1
), keys AS (UPDATE fencepost.idempotency_keys SET expires_at = expires_at - $1)
UPDATE fencepost.runs SET created_at = created_at - $1
"""
SETTINGS: Final = {"synchronous_commit": "off", "enable_seqscan": "off", "jit": "off"}
SEEN: Final = """
SELECT r.run_id, r.state, r.version, ARRAY(SELECT e.type FROM fencepost.run_events AS e
           WHERE e.run_id = r.run_id AND e.tenant_id = r.tenant_id ORDER BY e.sequence) AS events,
       r.error_code, r.output, r.cancel_requested_at IS NOT NULL AS cancel_asked, j.state AS job, j.attempts,
       j.lease_generation AS generation, j.lease_owner AS owner, ARRAY(SELECT a.outcome FROM fencepost.job_attempts AS a
           WHERE a.run_id = r.run_id AND a.tenant_id = r.tenant_id ORDER BY a.generation) AS outcomes,
       j.dead_reason, j.checkpoint, j.cost_used::float8 AS cost,
       (SELECT count(*) FROM public.effects AS f WHERE f.run_id = r.run_id) AS effects,
       CASE j.state WHEN 'queued' THEN hours_until(j.available_at) END AS ready_in,
       hours_until(j.lease_expires_at) AS lease_ends_in, hours_until(j.deadline_at) AS deadline_in
FROM fencepost.runs AS r JOIN fencepost.jobs AS j USING (run_id, tenant_id)
"""
EFFECTS: Final = "CREATE TABLE IF NOT EXISTS public.effects (run_id uuid NOT NULL)"
HOURS_UNTIL: Final = """
CREATE OR REPLACE FUNCTION public.hours_until(at timestamptz) RETURNS integer LANGUAGE sql
AS $$ SELECT round(extract(epoch FROM at - clock_timestamp()) / 3600)::integer $$
"""
# Every row of every table, to the last column.
EVERYTHING: Final = "SELECT " + " || ".join(
    f"coalesce((SELECT md5(string_agg(t::text, ',' ORDER BY t::text)) FROM fencepost.{table} AS t), '')"
    for table in ("runs", "run_events", "jobs", "job_attempts", "idempotency_keys", "job_replays", "outbox")
)


async def prepare(url: str) -> None:
    """What the tests' own statements need in a migrated database."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(f"{WATCH};{HOURS_UNTIL};{EFFECTS}")
    finally:
        await connection.close()


class Calls:
    """One connection of producers, operators and time, and one for the statements of ``workers``."""

    def __init__(self, connection: "asyncpg.Connection[Any]", pool: StatementPool, workers: Sequence[str]) -> None:
        self._connection = connection
        self._pool = pool
        self._stores = {worker: RunStore(pool, worker) for worker in workers}
        self._upkeep = self._stores[workers[0]]

    @classmethod
    async def open(cls, url: str, *, workers: Sequence[str], statements: Mapping[str, str] = STATEMENTS) -> Self:
        pool = await StatementPool.open(url, statements, role=ROLE, size=1, timeout_seconds=60, server_settings=SETTINGS)
        return cls(await asyncpg.connect(url, server_settings=SETTINGS), pool, workers)

    async def close(self) -> None:
        await self._pool.close()
        await self._connection.close()

    async def empty(self) -> None:
        await self._connection.execute(EMPTY)

    async def accept(self, proposal: Proposal, key: str | None, *, secrets: Secrets, retention: float) -> tuple[str, UUID | None]:
        command = Command(
            workflow=proposal.workflow, input={"request": proposal.request}, delay_seconds=proposal.delay,
            max_attempts=proposal.max_attempts, deadline_seconds=proposal.deadline, cost_limit=proposal.cost_limit,
            run_id=proposal.run_id,
        )  # fmt: skip
        scope = Scope(tenant_id=proposal.tenant_id, principal="ana", operation="POST /reports")
        try:
            async with self._connection.transaction():
                accepted = await producer_sdk.asyncpg.accept(
                    self._connection, command, scope, key or UNKEYED, secrets=secrets, key_retention_seconds=retention
                )
        except IdempotencyConflict:
            return "conflict", None
        except KeyExpired:
            return "expired", None
        except InProgress:
            return "in_progress", None
        return accepted.outcome, accepted.run_id

    async def cancel(self, tenant_id: str, run_id: UUID, expected_version: int | None) -> tuple[str, str | None, int | None]:
        try:
            async with self._connection.transaction():
                done = await producer_sdk.asyncpg.cancel(
                    self._connection, run_id, tenant_id=tenant_id, actor="ana", reason="test", expected_version=expected_version
                )
        except RunNotFound:
            return "not_found", None, None
        except RunEnded as error:
            return "ended", error.state, None
        except RunChanged:
            return "changed", None, None
        return done.outcome, done.state, done.version

    async def replay(self, tenant_id: str, run_id: UUID, new_id: UUID, *, limit: int, retention: float) -> tuple[str, UUID | None]:
        row = await self._connection.fetchrow(
            "SELECT outcome, new_run_id FROM fencepost.replay_run($1, $2, $3, 'ana', 'test', $4, $5)",
            tenant_id, run_id, new_id, limit, timedelta(seconds=retention),
        )  # fmt: skip
        assert row is not None
        return row["outcome"], row["new_run_id"] and UUID(str(row["new_run_id"]))

    async def claim(
        self, worker: str, *, workflows: Sequence[str], limit: int, lease: float, attempt_limit: float | None, last_tenant: str
    ) -> dict[Handle, Claimed]:
        served = [Served(workflow=name, attempt_seconds=attempt_limit, last_tenant=last_tenant) for name in workflows]
        claims = await self._stores[worker].claim(served, limit=limit, lease_seconds=lease)
        return {
            handle_of(worker, claim.key): Claimed(claim.attempt, claim.checkpoint, claim.retry_delay_seconds) for claim in claims
        }

    async def renew(self, handles: Sequence[Handle], *, lease: float, checkpoint: bytes | None) -> dict[Handle, bool]:
        worker, keys = held(handles)
        answer = await self._stores[worker].renew(dict.fromkeys(keys, checkpoint), lease_seconds=lease)
        return {handle_of(worker, key): asked for key, asked in answer.items()}

    async def complete(self, handles: Sequence[Handle], *, output: bytes, cost: float | None) -> frozenset[Handle]:
        worker, keys = held(handles)
        usage = Usage(cost=cost)
        completions = [Completion(key=key, output=output, started_after_seconds=0, usage=usage) for key in keys]
        return frozenset(handle_of(worker, key) for key in await self._stores[worker].complete(completions))

    async def complete_with_effect(self, handles: Sequence[Handle]) -> frozenset[Handle]:
        return frozenset([handle for handle in handles if await self._complete_with_effect(handle)])

    async def _complete_with_effect(self, handle: Handle) -> bool:
        worker, (key,) = held([handle])
        transaction = self._connection.transaction()
        await transaction.start()
        await self._connection.execute("INSERT INTO public.effects (run_id) VALUES ($1)", handle.run_id)
        completion = Completion(key=key, output=b"effect", started_after_seconds=0, usage=Usage())
        done = await complete_within(self._connection, worker, completion)
        await (transaction.commit() if done else transaction.rollback())
        return done

    async def fail(
        self, handles: Sequence[Handle], *, delay: float | None, reason: str | None, error_code: str, cost: float | None,
        checkpoint: bytes | None,
    ) -> dict[Handle, tuple[str, str | None]]:  # fmt: skip
        worker, keys = held(handles)
        failures = [
            FailedAttempt(
                key=key, delay_seconds=delay, reason=reason, error_class="retryable", error_code=error_code, checkpoint=checkpoint,
                started_after_seconds=0, usage=Usage(cost=cost),
            )
            for key in keys
        ]  # fmt: skip
        answer = await self._stores[worker].fail(failures)
        return {handle_of(worker, key): (settled.state, settled.reason) for key, settled in answer.items()}

    async def release(self, handles: Sequence[Handle], *, checkpoint: bytes | None) -> dict[Handle, str]:
        worker, keys = held(handles)
        releases = [Release(key=key, checkpoint=checkpoint, started_after_seconds=0) for key in keys]
        answer = await self._stores[worker].release(releases)
        return {handle_of(worker, key): settled.state for key, settled in answer.items()}

    async def append(self, handles: Sequence[Handle], *, event_type: str) -> dict[Handle, int]:
        worker, keys = held(handles)
        store = self._stores[worker]
        sequences = [await store.append_event(key, event_type, {"step": 1}) for key in keys]
        return {handle_of(worker, key): sequence for key, sequence in zip(keys, sequences, strict=True) if sequence is not None}

    async def standing(self, handle: Handle) -> tuple[str, bool, bool, bool]:
        worker, (key,) = held([handle])
        found = await self._stores[worker].standing(key)
        assert found is not None
        return found.state, found.held, found.left_here, found.cancel_requested

    async def reap(self) -> "Counter[tuple[str, str, str | None]]":
        reaped = await self._upkeep.reap(limit=100)
        return Counter((one.workflow, one.state, one.reason) for one in reaped)

    async def expire_keys(self) -> int:
        return await self._upkeep.expire_keys(limit=100)

    async def pass_time(self, seconds: float) -> None:
        await self._connection.execute(PASS_TIME, timedelta(seconds=seconds))

    async def expire_lease(self, run_id: UUID) -> None:
        await self._connection.execute(
            "UPDATE fencepost.jobs SET lease_expires_at = clock_timestamp() WHERE run_id = $1 AND state = 'leased'", run_id
        )

    async def seen(self) -> dict[UUID, Seen]:
        rows = [dict(row) for row in await self._connection.fetch(SEEN)]
        return {UUID(str(row.pop("run_id"))): Seen(**_tuples(row)) for row in rows}

    async def key_rows(self) -> "Counter[tuple[str, UUID | None]]":
        """How many rows each tenant has for each run; tombstones name none."""
        rows = await self._connection.fetch("SELECT tenant_id, run_id FROM fencepost.idempotency_keys")
        return Counter((row["tenant_id"], row["run_id"] and UUID(str(row["run_id"]))) for row in rows)

    async def everything(self) -> str:
        return str(await self._connection.fetchval(EVERYTHING))

    async def violations(self) -> list[tuple[str, str]]:
        return await violations(self._connection)


def handle_of(worker: str, key: JobKey) -> Handle:
    return Handle(worker, key.tenant_id, UUID(str(key.run_id)), key.generation)


def held(handles: Sequence[Handle]) -> tuple[str, list[JobKey]]:
    """The one worker of the handles, and their keys."""
    (worker,) = {handle.worker for handle in handles}
    return worker, [JobKey(handle.run_id, handle.tenant_id, handle.generation) for handle in handles]


def _tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
