"""Workers' hands on one database: every verb of a holder, whole-table dumps, and barriers made of locks.

``Runs`` (tests.support.runs) accepts, cancels, replays and moves time; a ``Hand`` here writes what a worker writes, through
the worker's own store, on connections of its own.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final

import asyncpg

from consumer_sdk.jobs import Claim, Completion, FailedAttempt, JobKey, Release, Settled, Standing, Usage
from consumer_sdk.run_store import RunStore, Served, complete_within, guard_within
from fencepost.statements import load_statements
from tests.support.runs import Runs
from tests.support.turns import TakingTurns
from tests.support.waiting import eventually

__all__ = ["LEASE_SECONDS", "SQL", "STEPS", "TABLES", "VERBS", "Crew", "Hand", "break_step", "completion", "dump", "failed", "fill"]

SQL: Final = load_statements("consumer_sdk", "runs.sql")
LEASE_SECONDS: Final = 30.0
#: Everything that a statement on runs may write.
TABLES: Final = ("runs", "run_events", "jobs", "job_attempts", "idempotency_keys", "job_replays", "outbox", "audit")
#: What a completion writes: table and kind of write.
STEPS: Final = MappingProxyType(
    {"jobs": "UPDATE", "runs": "UPDATE", "run_events": "INSERT", "outbox": "INSERT", "job_attempts": "UPDATE"}
)

_BREAK: Final = """
CREATE FUNCTION break_{table}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$;
CREATE TRIGGER break_{table} BEFORE {write} ON fencepost.{table} FOR EACH ROW EXECUTE FUNCTION break_{table}();
"""
# Rows as acceptance and earlier attempts leave them, without their triggers and foreign keys; the events are left out.
_FILL: Final = """
WITH rows AS (
    SELECT gen_random_uuid() AS run_id, $2 || CASE WHEN $3 > 1 THEN '-' || lpad((n % $3)::text, 6, '0') ELSE '' END AS tenant_id
    FROM generate_series(1, $1::bigint) AS n
), runs AS (
    INSERT INTO fencepost.runs (run_id, tenant_id, root_run_id, workflow, workflow_version, topic, input, event_sequence,
                                state, started_at, finished_at)
    SELECT r.run_id, r.tenant_id, r.run_id, $4, 1, 'runs', '{}', 1, CASE WHEN $6 THEN 'completed' ELSE 'queued' END,
           CASE WHEN $6 THEN clock_timestamp() END, CASE WHEN $6 THEN clock_timestamp() END
    FROM rows AS r
), attempts AS (
    INSERT INTO fencepost.job_attempts (run_id, tenant_id, generation, number, worker, claimed_at, finished_at, outcome)
    SELECT r.run_id, r.tenant_id, 1, 1, 'before', clock_timestamp(), clock_timestamp(), 'completed' FROM rows AS r WHERE $6
)
INSERT INTO fencepost.jobs (run_id, tenant_id, workflow, available_at, max_attempts, state, finished_at, lease_generation, attempts)
SELECT r.run_id, r.tenant_id, $4, clock_timestamp() + $5, 3, CASE WHEN $6 THEN 'completed' ELSE 'queued' END,
       CASE WHEN $6 THEN clock_timestamp() END, CASE WHEN $6 THEN 1 ELSE 0 END, CASE WHEN $6 THEN 1 ELSE 0 END
FROM rows AS r
"""


class Hand:
    """A worker as the database sees it. Each verb says whether it changed the job: False is a lost lease."""

    def __init__(self, store: RunStore, connection: "asyncpg.Connection[Any]", worker_id: str) -> None:
        self.store = store
        self.connection = connection
        self.worker_id = worker_id

    async def claims(
        self, limit: int = 1, *, workflow: str = "report", lease_seconds: float = LEASE_SECONDS, after: str = "",
        attempt_seconds: float | None = None,
    ) -> Sequence[Claim]:  # fmt: skip
        served = [Served(workflow=workflow, attempt_seconds=attempt_seconds, last_tenant=after)]
        return await self.store.claim(served, limit=limit, lease_seconds=lease_seconds)

    async def claim(self, limit: int = 1, **options: Any) -> list[JobKey]:
        return [claim.key for claim in await self.claims(limit, **options)]

    async def claim_one(self, **options: Any) -> JobKey:
        """The one job that is ready."""
        (key,) = await self.claim(2, **options)
        return key

    async def renew(self, key: JobKey) -> bool:
        return key in await self.store.renew({key: None}, lease_seconds=LEASE_SECONDS)

    async def checkpoint(self, key: JobKey) -> bool:
        return key in await self.store.renew({key: b"of " + self.worker_id.encode()}, lease_seconds=LEASE_SECONDS)

    async def complete(self, key: JobKey) -> bool:
        return key in await self.store.complete([completion(key)])

    async def complete_within(self, key: JobKey) -> bool:
        """By a transaction of the handler's own."""
        async with self.connection.transaction():
            return await complete_within(self.connection, self.worker_id, completion(key))

    async def retry(self, key: JobKey) -> bool:
        return await self.settle(key, delay_seconds=0) is not None

    async def fail(self, key: JobKey) -> bool:
        return await self.settle(key, delay_seconds=None) is not None

    async def settle(self, key: JobKey, **failure: Any) -> Settled | None:
        return (await self.store.fail([failed(key, **failure)])).get(key)

    async def release(self, key: JobKey) -> bool:
        return key in await self.store.release([Release(key=key, checkpoint=None, started_after_seconds=0)])

    async def append_event(self, key: JobKey) -> bool:
        return await self.store.append_event(key, "workflow.chunk", {}) is not None

    async def guard(self, key: JobKey) -> bool:
        async with self.connection.transaction():
            return await guard_within(self.connection, self.worker_id, key)

    async def standing(self, key: JobKey) -> Standing:
        found = await self.store.standing(key)
        assert found is not None
        return found


#: What a holder can do to its job.
VERBS: Final[Mapping[str, Callable[[Hand, JobKey], Awaitable[bool]]]] = MappingProxyType(
    {
        "renew": Hand.renew,
        "checkpoint": Hand.checkpoint,
        "complete": Hand.complete,
        "complete within": Hand.complete_within,
        "retry": Hand.retry,
        "fail": Hand.fail,
        "release": Hand.release,
        "append event": Hand.append_event,
        "guard": Hand.guard,
    }
)


def completion(key: JobKey, *, output: bytes = b"{}", usage: Usage | None = None) -> Completion:
    return Completion(key=key, output=output, started_after_seconds=0, usage=usage or Usage())


def failed(
    key: JobKey, *, delay_seconds: float | None = 0, reason: str | None = None, error_class: str = "builtins.OSError",
    error_code: str = "unavailable", checkpoint: bytes | None = None, usage: Usage | None = None,
) -> FailedAttempt:  # fmt: skip
    return FailedAttempt(
        key=key, delay_seconds=delay_seconds, reason=reason, error_class=error_class, error_code=error_code,
        checkpoint=checkpoint, started_after_seconds=0, usage=usage or Usage(),
    )  # fmt: skip


class Crew:
    """Everybody on one database. ``database`` looks and arranges; nobody waits for it."""

    def __init__(self, database_url: str, database: "asyncpg.Connection[Any]") -> None:
        self.url = database_url
        self.database = database
        self.runs = Runs(database)
        self._closing: list[Callable[[], Awaitable[None]]] = []

    @staticmethod
    @asynccontextmanager
    async def on(database_url: str) -> AsyncIterator["Crew"]:
        crew = Crew(database_url, await asyncpg.connect(database_url, connection_class=TakingTurns))
        crew._closing.append(crew.database.close)
        try:
            yield crew
        finally:
            for close in reversed(crew._closing):
                await close()

    async def connect(self) -> "asyncpg.Connection[Any]":
        """One more session, ended with the test."""
        connection = await asyncpg.connect(self.url)
        self._closing.append(connection.close)
        return connection

    async def hand(self, worker_id: str = "A", *, pooler: bool = False) -> Hand:
        store = await RunStore.open(self.url, worker_id=worker_id, timeout_seconds=60, pooler=pooler)
        self._closing.append(store.close)
        return Hand(store, await self.connect(), worker_id)

    async def dump(self) -> dict[str, list[str]]:
        return await dump(self.database)

    async def blocked(self, sessions: int = 1) -> None:
        """Until so many sessions of this database wait for locks."""
        await eventually(lambda: blocked(self.database, sessions), message=f"{sessions} sessions wait for locks")


async def blocked(database: "asyncpg.Connection[Any]", sessions: int) -> bool:
    waiting = await database.fetchval(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    assert waiting <= sessions
    return bool(waiting == sessions)


async def dump(database: "asyncpg.Connection[Any]") -> dict[str, list[str]]:
    """Every row of every table, as text: two equal dumps have nothing between them."""
    return {
        table: [row[0] for row in await database.fetch(f"SELECT t::text FROM fencepost.{table} AS t ORDER BY 1")]
        for table in TABLES
    }


async def break_step(database: "asyncpg.Connection[Any]", table: str, body: str) -> None:
    """Put a statement of PL/pgSQL before each write of that step."""
    await database.execute(_BREAK.format(table=table, write=STEPS[table], body=body))


async def fill(
    database: "asyncpg.Connection[Any]", jobs: int, *, tenant: str = "acme", tenants: int = 1, workflow: str = "report",
    ready_in: timedelta = timedelta(seconds=-60), finished: bool = False,
) -> None:  # fmt: skip
    """Many runs at once, without events and outbox rows; several tenants are named ``tenant-000000`` and on."""
    async with database.transaction():
        await database.execute("SET LOCAL session_replication_role = replica")
        await database.execute(_FILL, jobs, tenant, tenants, workflow, ready_in, finished)
