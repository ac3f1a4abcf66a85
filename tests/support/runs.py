"""Runs as tests arrange them: accepted by the function and moved by the worker's own statements, on one connection.

Time passes by moving rows: nothing here waits.
"""

import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import asyncpg
from uuid_utils.compat import uuid7

from fencepost.statements import load_statements
from tests.support.waiting import eventually

__all__ = ["LEASE", "Held", "Key", "Runs", "new_key"]

LEASE: Final = timedelta(seconds=30)
_SQL: Final = load_statements("consumer_sdk", "runs.sql")
_ACCEPT: Final = """
SELECT outcome, accepted_run_id FROM fencepost.accept(
    $1, $2, $3, 1, $4, $5, $6, $7, $8, $9, NULL, $10::smallint[], $11::bytea[], $12::bytea[], $13, 1::smallint, $14)
"""


@dataclass(frozen=True, kw_only=True)
class Key:
    """An idempotency key as the database sees it: a hash and a fingerprint under one version of the secrets."""

    key_hash: bytes
    fingerprint: bytes
    version: int = 1


def new_key() -> Key:
    return Key(key_hash=secrets.token_bytes(32), fingerprint=secrets.token_bytes(32))


@dataclass(frozen=True, kw_only=True)
class Held:
    """A claimed job: what each write under its lease names."""

    run_id: uuid.UUID
    tenant_id: str
    generation: int
    attempt: int


class Runs:
    """What producers, workers and operators do to runs. ``worker`` names the owner of the leases."""

    def __init__(
        self, connection: "asyncpg.Connection[Any]", worker: str = "w1", *, tenant: str = "acme", workflow: str = "report"
    ) -> None:
        self.connection = connection
        self.worker = worker
        self.tenant = tenant
        self.workflow = workflow

    def by(self, worker: str) -> "Runs":
        """The same, as another worker."""
        return Runs(self.connection, worker, tenant=self.tenant, workflow=self.workflow)

    async def accept(
        self, *, tenant: str | None = None, workflow: str | None = None, run_id: uuid.UUID | None = None, key: Key | None = None,
        data: bytes = b"{}", topic: str = "runs", max_attempts: int = 3, delay: timedelta = timedelta(0),
        deadline: timedelta | None = None, cost_limit: float | None = None, retention: timedelta = timedelta(days=1),
    ) -> uuid.UUID:  # fmt: skip
        """Accept a command; the run that it started, or that its key stands for."""
        keys = [key] if key else []
        row = await self.connection.fetchrow(
            _ACCEPT, tenant or self.tenant, run_id or uuid7(), workflow or self.workflow, topic, data, delay, max_attempts,
            deadline, cost_limit, [key.version for key in keys], [key.key_hash for key in keys],
            [key.fingerprint for key in keys], len(keys), retention,
        )  # fmt: skip
        assert row is not None
        assert row["outcome"] in ("created", "found"), row
        return uuid.UUID(str(row["accepted_run_id"]))

    async def claim(
        self, limit: int = 1, *, lease: timedelta = LEASE, workflow: str | None = None, attempt_limit: timedelta | None = None
    ) -> list[Held]:
        rows = await self._rows("claim", self.worker, limit, lease, [workflow or self.workflow], [attempt_limit], [""])
        return [
            Held(
                run_id=uuid.UUID(str(row["run_id"])), tenant_id=row["tenant_id"], generation=row["lease_generation"],
                attempt=row["attempts"],
            )
            for row in rows
        ]  # fmt: skip

    async def claim_one(self, **options: Any) -> Held:
        """The one job that is ready."""
        (held,) = await self.claim(**options)
        return held

    async def claim_soon(self) -> Held:
        """The same beside a worker, whose own statement may have the row locked just now."""
        held: Held = (await eventually(self.claim, message="the job is claimed"))[0]
        return held

    # Each write says whether it changed the job: False is a lost lease.

    async def renew(self, held: Held, *, lease: timedelta = LEASE, checkpoint: bytes | None = None) -> bool:
        return bool(await self._rows("renew", self.worker, *self._named(held), lease, [checkpoint]))

    async def complete(self, held: Held, *, output: bytes | None = b"{}", cost: float | None = None) -> bool:
        return bool(await self._rows("complete", self.worker, *self._named(held), [output], [timedelta(0)], [cost], [None]))

    async def fail(
        self, held: Held, *, delay: timedelta | None = timedelta(0), reason: str | None = None, error_class: str = "retryable",
        error_code: str = "provider_unavailable", cost: float | None = None,
    ) -> bool:  # fmt: skip
        """``delay`` None: do not try again, for ``reason``."""
        return bool(
            await self._rows(
                "fail", self.worker, *self._named(held), [delay], [reason], [error_class], [error_code], [None],
                [timedelta(0)], [cost], [None], [None],
            )
        )  # fmt: skip

    async def release(self, held: Held) -> bool:
        return bool(await self._rows("release", self.worker, *self._named(held), [None], [timedelta(0)], [None], [None]))

    async def reap(self, limit: int = 100) -> list[tuple[uuid.UUID, str, str | None]]:
        """(run, the job's new state, reason) of what was ended or queued again."""
        rows = await self._rows("reap", limit)
        return [(uuid.UUID(str(row["run_id"])), row["state"], row["reason"]) for row in rows]

    async def cancel(
        self, run_id: uuid.UUID, *, tenant: str | None = None, actor: str = "ana", reason: str = "test", version: int | None = None
    ) -> str:
        """The outcome."""
        return str(
            await self.connection.fetchval(
                "SELECT outcome FROM fencepost.cancel_run($1, $2, $3, $4, $5)",
                tenant or self.tenant,
                run_id,
                actor,
                reason,
                version,
            )
        )

    async def replay(
        self, run_id: uuid.UUID, *, tenant: str | None = None, actor: str = "ana", reason: str = "test", limit: int = 3,
        ledger_retention: timedelta = timedelta(days=30),
    ) -> tuple[str, uuid.UUID | None]:  # fmt: skip
        """The outcome, and the new run if there is one."""
        row = await self.connection.fetchrow(
            "SELECT outcome, new_run_id FROM fencepost.replay_run($1, $2, $3, $4, $5, $6, $7)",
            tenant or self.tenant, run_id, uuid7(), actor, reason, limit, ledger_retention,
        )  # fmt: skip
        assert row is not None
        return row["outcome"], row["new_run_id"] and uuid.UUID(str(row["new_run_id"]))

    # Time, moved.

    async def expire_lease(self, run_id: uuid.UUID, *, by: timedelta = timedelta(seconds=1)) -> None:
        """The lease ran out so long ago."""
        await self._move("lease_expires_at = clock_timestamp() - $2::interval", run_id, by)

    async def make_ready(self, run_id: uuid.UUID) -> None:
        """The delay before the next attempt is over."""
        await self._move("available_at = clock_timestamp() - $2::interval", run_id, timedelta(seconds=1))

    async def pass_deadline(self, run_id: uuid.UUID, *, by: timedelta = timedelta(seconds=1)) -> None:
        await self._move("deadline_at = clock_timestamp() - $2::interval", run_id, by)

    # What can be seen afterwards.

    async def state(self, run_id: uuid.UUID) -> tuple[str, str]:
        """(run's state, job's state)."""
        row = await self.connection.fetchrow(
            "SELECT r.state AS run, j.state AS job FROM fencepost.runs AS r JOIN fencepost.jobs AS j USING (run_id, tenant_id)"
            " WHERE r.run_id = $1", run_id,
        )  # fmt: skip
        assert row is not None
        return row["run"], row["job"]

    async def events(self, run_id: uuid.UUID) -> list[tuple[int, str]]:
        """(sequence, type), in order."""
        rows = await self.connection.fetch(
            "SELECT sequence, type FROM fencepost.run_events WHERE run_id = $1 ORDER BY sequence", run_id
        )
        return [(row["sequence"], row["type"]) for row in rows]

    async def attempts(self, run_id: uuid.UUID) -> list[dict[str, Any]]:
        """Rows of job_attempts, in order of their generations."""
        rows = await self.connection.fetch("SELECT * FROM fencepost.job_attempts WHERE run_id = $1 ORDER BY generation", run_id)
        return [dict(row) for row in rows]

    async def _rows(self, name: str, *arguments: object) -> Sequence[Any]:
        return await self.connection.fetch(_SQL[name], *arguments)

    async def _move(self, assignment: str, run_id: uuid.UUID, by: timedelta) -> None:
        moved = await self.connection.execute(f"UPDATE fencepost.jobs SET {assignment} WHERE run_id = $1", run_id, by)
        assert moved == "UPDATE 1", moved

    @staticmethod
    def _named(held: Held) -> tuple[list[uuid.UUID], list[str], list[int]]:
        return [held.run_id], [held.tenant_id], [held.generation]
