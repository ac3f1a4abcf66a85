"""Claims one after the other on several databases in turn, so that a slow moment of the machine hits all alike."""

import gc
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import asyncpg

from benchmarks.noop_jobs import WORKFLOW
from benchmarks.run_backlog import ACCEPT_RUNS
from benchmarks.workers import ready_and_wait, run_worker
from consumer_sdk.jobs import Claim, Completion, Usage
from consumer_sdk.run_store import RunStore, Served

#: The first finds a crowd of one too many and shares it out over the tenants; the second finds just what it wants.
LIMITS: Final = (10, 1)
_WARM_ROUNDS: Final = 20
_LEASE_SECONDS: Final = 30.0
_OUTPUT: Final = b"null"


class Claimant:
    """A worker's store on one database, and a connection that accepts."""

    def __init__(self, store: RunStore, connection: "asyncpg.Connection[Any]") -> None:
        self._store = store
        self._connection = connection
        self._last_tenant = ""
        self.milliseconds: dict[str, list[float]] = {str(limit): [] for limit in LIMITS}

    async def round(self, *, counts: bool) -> None:
        """Accept what is wanted, claim it, complete it."""
        await self._connection.execute(ACCEPT_RUNS.format(count=sum(LIMITS)))
        for limit in LIMITS:
            served = [Served(workflow=WORKFLOW, attempt_seconds=None, last_tenant=self._last_tenant)]
            began = time.perf_counter()
            claims = await self._store.claim(served, limit=limit, lease_seconds=_LEASE_SECONDS)
            elapsed = time.perf_counter() - began
            await self._complete(claims, limit)
            if counts:
                self.milliseconds[str(limit)].append(elapsed * 1_000)

    async def _complete(self, claims: Sequence[Claim], expected: int) -> None:
        if len(claims) != expected:
            raise RuntimeError(f"a claim of {expected} jobs got {len(claims)}")
        completions = [Completion(key=claim.key, output=_OUTPUT, started_after_seconds=0.0, usage=Usage()) for claim in claims]
        if len(await self._store.complete(completions)) != expected:
            raise RuntimeError("a lease was lost")
        self._last_tenant = next((claim.round_ended_at for claim in claims if claim.round_ended_at is not None), self._last_tenant)

    async def close(self) -> None:
        await self._connection.close()
        await self._store.close()


async def claims(kafka: str, databases: Mapping[str, str], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each claim, by database and limit."""
    claimants = {name: await _open(url) for name, url in databases.items()}
    try:
        for _ in range(_WARM_ROUNDS):
            for claimant in claimants.values():
                await claimant.round(counts=False)
        await ready_and_wait()
        gc.freeze()
        turns = list(claimants.values())
        for _ in range(rounds):
            for claimant in turns:
                await claimant.round(counts=True)
            turns.append(turns.pop(0))  # nobody always comes after the same other
        return {name: claimant.milliseconds for name, claimant in claimants.items()}
    finally:
        for claimant in claimants.values():
            await claimant.close()


async def _open(url: str) -> Claimant:
    return Claimant(await RunStore.open(url, worker_id="benchmark", timeout_seconds=30), await asyncpg.connect(url))


if __name__ == "__main__":
    run_worker(claims)
