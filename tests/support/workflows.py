"""Workflows on a real database: runs of them, workers in this process that execute them, and what can be seen of both."""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

import asyncpg

from consumer_sdk import Handlers, Worker, load_worker_settings
from consumer_sdk.testing.bench import Provider
from fencepost.codec import PayloadCodec
from fencepost.retry import Retry
from fencepost.secrets import Secrets
from fencepost.workflows import Workflows
from tests.support.emptied import emptied
from tests.support.runs import Runs
from tests.support.waiting import eventually

__all__ = ["SOON", "Hall", "hall_on"]

SOON: Final = Retry(base_seconds=0.02, cap_seconds=0.02, jitter="none")
_QUICK: Final = {"worker_http_port": 0, "worker_poll_interval_ms": 30, "worker_stop_grace_seconds": 1}
_END_SECONDS: Final = 10.0
_LEDGER: Final = "TRUNCATE fencepost.effects, fencepost.audit"
_LINEAGE: Final = """
SELECT * FROM fencepost.runs WHERE root_run_id = (SELECT root_run_id FROM fencepost.runs WHERE run_id = $1)
ORDER BY iteration, run_id
"""
_WAKE: Final = """
UPDATE fencepost.effects SET deadline_at = deadline_at - $2::interval WHERE run_id = $1 AND operation = 'fencepost.timer'
"""


class Hall:
    """Where workflows are executed. ``secrets`` are those of every worker here."""

    def __init__(self, database_url: str, connection: "asyncpg.Connection[Any]") -> None:
        self.database_url = database_url
        self.connection = connection
        self.runs = Runs(connection, workflow="order")
        self.secrets = Secrets({1: secrets.token_bytes(32)}, write=[1])
        self.provider = Provider()
        self._running: dict[Worker, asyncio.Task[None]] = {}

    async def work(
        self,
        workflows: Workflows | Handlers,
        *,
        codec: PayloadCodec | None = None,
        secrets: Secrets | None = None,
        **settings: object,
    ) -> Worker:
        """A worker that looks every 30 ms and stops quickly."""
        handlers = workflows if isinstance(workflows, Handlers) else including(workflows)
        chosen = load_worker_settings(_QUICK | {"database_url": self.database_url} | settings)
        worker = Worker(handlers, chosen, secrets=secrets or self.secrets, codec=codec)
        task = self._running[worker] = asyncio.create_task(worker.run())
        await eventually(lambda: task.done() or not worker._problems, message="the worker is ready")
        return worker

    async def stop(self, worker: Worker) -> None:
        """Stop in order; raises what the worker raises."""
        worker.stop()
        async with asyncio.timeout(_END_SECONDS):
            await self._running.pop(worker)

    async def kill(self, worker: Worker) -> None:
        """As SIGKILL would: nothing is given back, and what it holds runs out at once."""
        task = self._running.pop(worker)
        task.cancel()
        await asyncio.wait([task])
        await self.connection.execute(
            "UPDATE fencepost.jobs SET lease_expires_at = clock_timestamp() - interval '1 second' WHERE lease_owner = $1",
            worker.worker_id,
        )

    async def close(self) -> None:
        for worker in list(self._running):
            with contextlib.suppress(Exception):
                await self.stop(worker)

    async def accept(self, value: object = None, *, version: int = 1, **options: Any) -> UUID:
        """A run of the workflow, with ``value`` as its input."""
        async with self.connection.transaction():
            run_id = await self.runs.accept(data=json.dumps(value).encode(), **{"max_attempts": 20, **options})
            await self.connection.execute("UPDATE fencepost.runs SET workflow_version = $2 WHERE run_id = $1", run_id, version)
        return run_id

    async def reaches(self, run_id: UUID, state: str) -> None:
        async def reached() -> bool:
            return (await self.runs.state(run_id))[0] == state

        await eventually(reached, message=f"the run is {state}")

    async def parked(self, run_id: UUID) -> None:
        async def reached() -> bool:
            job = await self.job(run_id)
            return bool(job["state"] == "queued" and job["available_at"].year == 9999)

        await eventually(reached, message="the run is parked")

    async def sleeps(self, run_id: UUID) -> None:
        """Until it waits in the database for a later time."""

        async def reached() -> bool:
            return bool(
                await self.connection.fetchval(
                    "SELECT state = 'queued' AND available_at > clock_timestamp() FROM fencepost.jobs WHERE run_id = $1", run_id
                )
            )

        await eventually(reached, message="the run sleeps")

    async def wakes(self, run_id: UUID, *, by: timedelta = timedelta(days=400)) -> None:
        """Time passes for the run, its timers and its job alike."""
        await self.connection.execute(_WAKE, run_id, by)
        await self.connection.execute(
            "UPDATE fencepost.jobs SET available_at = available_at - $2::interval WHERE run_id = $1", run_id, by
        )

    async def run(self, run_id: UUID) -> Mapping[str, Any]:
        return await self._one("SELECT * FROM fencepost.runs WHERE run_id = $1", run_id)

    async def job(self, run_id: UUID) -> Mapping[str, Any]:
        return await self._one("SELECT * FROM fencepost.jobs WHERE run_id = $1", run_id)

    async def output(self, run_id: UUID) -> Any:
        """The result of a run, which has come to its end."""
        await self.reaches(run_id, "completed")
        return json.loads((await self.run(run_id))["output"])

    async def lineage(self, run_id: UUID) -> Sequence[Mapping[str, Any]]:
        """Its runs, in the order of iterations."""
        return [dict(row) for row in await self.connection.fetch(_LINEAGE, run_id)]

    async def ended(self, run_id: UUID, state: str = "completed") -> Mapping[str, Any]:
        """The newest run of the lineage, once it has come to such an end."""

        async def reached() -> bool:
            return bool((await self.lineage(run_id))[-1]["state"] == state)

        await eventually(reached, message=f"the lineage is {state}")
        return (await self.lineage(run_id))[-1]

    async def ledger(self, run_id: UUID) -> Sequence[Mapping[str, Any]]:
        """The lineage's rows, in the order in which they were made."""
        rows = await self.connection.fetch(
            "SELECT * FROM fencepost.effects WHERE run_key = (SELECT root_run_id::text FROM fencepost.runs WHERE run_id = $1)"
            " ORDER BY created_at",
            run_id,
        )
        return [dict(row) for row in rows]

    async def steps(self, run_id: UUID) -> list[tuple[int, str, int]]:
        """(iteration, step, occurrence) of what is kept, in that order."""
        rows = [row for row in await self.ledger(run_id) if row["operation"] == "fencepost.step"]
        return sorted((row["iteration"], row["step"], row["occurrence"]) for row in rows)

    async def _one(self, query: str, run_id: UUID) -> Mapping[str, Any]:
        row = await self.connection.fetchrow(query, run_id)
        assert row is not None
        return dict(row)


def including(workflows: Workflows) -> Handlers:
    handlers = Handlers()
    handlers.include(workflows)
    return handlers


@asynccontextmanager
async def hall_on(database_url: str) -> AsyncIterator[Hall]:
    """On a module's database, emptied."""
    connection = await emptied(database_url)
    await connection.execute(_LEDGER)
    hall = Hall(database_url, connection)
    try:
        yield hall
    finally:
        await hall.close()
        await connection.close()
