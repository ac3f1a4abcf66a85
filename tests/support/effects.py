"""A provider that keeps a book, and the ledger of effects on a real database, as tests arrange them.

The provider knows no idempotency keys on purpose: whatever reaches it twice stands twice in its book.
"""

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import asyncpg

from consumer_sdk.effect_store import EFFECT_STATEMENTS, EffectStore
from consumer_sdk.effects import CallLimits, EffectKey, Reconciler, RunFence
from consumer_sdk.ledger import Ledger
from consumer_sdk.run_store import ROLE
from consumer_sdk.testing.bench import Provider
from fencepost.database import StatementPool
from fencepost.secrets import Secrets
from tests.support.runs import Held, Runs
from tests.support.turns import TakingTurns

__all__ = ["CHARGE", "REQUEST", "Bench", "Provider", "Wanted", "opened"]

CHARGE: Final = "card.charge"
REQUEST: Final = {"order": "o-1", "amount": 10}
_CONNECTIONS: Final = 4
#: Longer than any test.
_LEASE: Final = timedelta(hours=1)
_PASS: Final = """
UPDATE fencepost.effects SET held_until = held_until - $1::interval, deadline_at = deadline_at - $1, sent_at = sent_at - $1,
    first_sent_at = first_sent_at - $1, created_at = created_at - $1
"""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One effect of one holder."""

    key: EffectKey
    fence: RunFence

    def of(self, operation: str) -> "Wanted":
        return Wanted(key=self.key._replace(operation=operation), fence=self.fence)


class Bench:
    """The ledger's statements and verbs, with time that is moved."""

    def __init__(self, connection: "asyncpg.Connection[Any]", pool: StatementPool) -> None:
        self.connection = connection
        self.pool = pool
        self.runs = Runs(connection, "w1", workflow=f"order-{secrets.token_hex(4)}")
        self.secrets = Secrets({1: secrets.token_bytes(32)}, write=[1])
        self.provider = Provider()
        self.counted: list[str] = []
        self.statements: list[str] = []

    async def fetch(self, name: str, *arguments: object) -> Sequence[Any]:
        self.statements.append(name)
        return await self.pool.fetch(name, *arguments)

    def store(self, holder: str = "w1") -> EffectStore:
        return EffectStore(self.fetch, holder)

    def ledger(self, holder: str = "w1", *, secrets: Secrets | None = None) -> Ledger:
        return Ledger(self.store(holder), secrets or self.secrets, count=self.counted.append)

    async def once(
        self,
        wanted: Wanted,
        *,
        request: object = REQUEST,
        call: Any = None,
        limits: CallLimits | None = None,
        reconciler: Reconciler | None = None,
        holder: str = "w1",
        secrets: Secrets | None = None,
    ) -> Any:
        return await self.ledger(holder, secrets=secrets).once(
            wanted.key, wanted.fence, request=request, call=call or self.provider.charge, limits=limits or CallLimits(),
            reconciler=reconciler,
        )  # fmt: skip

    async def message(self, **parts: Any) -> Wanted:
        """An effect of a message that no run stands behind."""
        key = EffectKey(f"event-{secrets.token_hex(8)}", "acme", 0, "charge", 0, CHARGE)
        return Wanted(key=key._replace(**parts), fence=RunFence(None, None, None))

    async def run(self, *, worker: str = "w1") -> Wanted:
        """An effect of a run that ``worker`` holds."""
        run_id = await self.runs.accept(max_attempts=20)
        held = await self.runs.by(worker).claim_one(lease=_LEASE)
        return Wanted(key=EffectKey(str(run_id), "acme", 0, "order", 0, CHARGE), fence=self.fence(held, worker))

    async def taken_over(self, wanted: Wanted, worker: str = "w2") -> Wanted:
        """The same effect, for the next holder of the run."""
        assert wanted.fence.run_id is not None
        await self.runs.expire_lease(wanted.fence.run_id)
        held = await self.runs.by(worker).claim_one(lease=_LEASE)
        return Wanted(key=wanted.key, fence=self.fence(held, worker))

    @staticmethod
    def fence(held: Held, worker: str) -> RunFence:
        return RunFence(held.run_id, worker, held.generation)

    async def row(self, wanted: Wanted) -> dict[str, Any]:
        (row,) = await self.rows(wanted)
        return row

    async def rows(self, wanted: Wanted) -> list[dict[str, Any]]:
        found = await self.connection.fetch("SELECT * FROM fencepost.effects WHERE run_key = $1", wanted.key.run_key)
        return [dict(row) for row in found]

    async def state(self, wanted: Wanted) -> str:
        return str((await self.row(wanted))["state"])

    async def pass_time(self, **duration: float) -> None:
        await self.connection.execute(_PASS, timedelta(**duration))


@asynccontextmanager
async def opened(database_url: str) -> AsyncIterator[Bench]:
    connection = await asyncpg.connect(database_url, connection_class=TakingTurns)
    pool = await StatementPool.open(
        database_url, EFFECT_STATEMENTS, role=ROLE, size=_CONNECTIONS, timeout_seconds=30, server_settings={}
    )
    try:
        yield Bench(connection, pool)
    finally:
        await pool.close()
        await connection.close()
