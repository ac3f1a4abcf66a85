"""A crowd that calls runs at once, and what each of them was told: seeded, so that its choices can be made again."""

import random
from dataclasses import dataclass, field, replace
from typing import Final
from uuid import UUID

from uuid_utils.compat import uuid7

from producer_sdk import Secrets
from tests.support.runs_database import Calls
from tests.support.runs_model import HOUR, Handle, Proposal

__all__ = ["Caller", "Record"]

TENANTS: Final = ("acme", "zeta")
# Small numbers, so that calls meet.
FEW: Final = 6
SECRETS: Final = Secrets({1: b"a" * 32}, write=[1])


@dataclass(kw_only=True)
class Record:
    """What everyone was told, and what all of them may use: the same few runs, and every handle that was ever given out."""

    runs: list[Proposal] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)
    created: list[tuple[str, str]] = field(default_factory=list)
    ended_attempts: list[tuple[Handle, str]] = field(default_factory=list)
    ended_runs: list[tuple[UUID, str]] = field(default_factory=list)
    appended: list[tuple[UUID, int]] = field(default_factory=list)


class Caller:
    """One of a crowd: it has connections of its own and makes its calls in an order that its seed decides."""

    def __init__(self, calls: Calls, worker: str, seed: int, record: Record) -> None:
        self.calls = calls
        self.worker = worker
        self.choice = random.Random(f"{seed}/{worker}")
        self.record = record

    async def work(self, calls: int) -> None:
        often = [self.accept, self.claim, self.fail]
        verbs = [
            *often, *often, self.accept, self.claim, self.renew, self.complete, self.complete_with_effect, self.release,
            self.append, self.cancel, self.replay, self.reap, self.expire_lease,
        ]  # fmt: skip
        await self.accept()
        for _ in range(calls):
            await self.choice.choice(verbs)()

    async def accept(self) -> None:
        key = self.choice.choice([None, None, "k1", "k2", "k3", "k4"])
        proposal = Proposal(
            run_id=uuid7(),
            tenant_id=self.choice.choice(TENANTS),
            workflow="report",
            request="a",
            max_attempts=self.choice.randint(1, 4),
        )
        outcome, _ = await self.calls.accept(proposal, key, secrets=SECRETS, retention=24 * HOUR)
        if outcome == "created":
            self.record.created.append((proposal.tenant_id, key or str(proposal.run_id)))
            self.record.runs.append(proposal)
        assert outcome in ("created", "replayed", "in_progress")

    async def claim(self) -> None:
        answer = await self.calls.claim(
            self.worker, workflows=["report"], limit=self.choice.choice([1, 2, 9]), lease=HOUR, attempt_limit=None, last_tenant=""
        )
        self.record.handles += answer

    def some_handles(self) -> list[Handle]:
        """Mostly the newest, and in any order, so that locks are asked for in any order."""
        mine = [handle for handle in self.record.handles if handle.worker == self.worker]
        recent = mine[-FEW:] if self.choice.random() < 0.8 else mine
        return self.choice.sample(recent, min(len(recent), self.choice.choice([1, 1, 2, FEW])))

    async def renew(self) -> None:
        if handles := self.some_handles():
            await self.calls.renew(handles, lease=HOUR, checkpoint=b"c")

    async def complete(self) -> None:
        if handles := self.some_handles():
            for handle in await self.calls.complete(handles, output=b"{}", cost=None):
                self.ended(handle, "completed", "completed")

    async def complete_with_effect(self) -> None:
        for handle in await self.calls.complete_with_effect(self.some_handles()[:1]):
            self.ended(handle, "completed", "completed")

    async def fail(self) -> None:
        if handles := self.some_handles():
            delay = self.choice.choice([0, 0, 0, None])
            answer = await self.calls.fail(handles, delay=delay, reason=None, error_code="e", cost=None, checkpoint=None)
            for handle, (state, _) in answer.items():
                self.ended(handle, "cancelled" if state == "cancelled" else "failed", state)

    async def release(self) -> None:
        if handles := self.some_handles():
            for handle, state in (await self.calls.release(handles, checkpoint=None)).items():
                self.ended(handle, "cancelled" if state == "cancelled" else "released", state)

    def ended(self, handle: Handle, outcome: str, job: str) -> None:
        self.record.ended_attempts.append((handle, outcome))
        if job != "queued":
            self.record.ended_runs.append((handle.run_id, job))

    async def append(self) -> None:
        if handles := self.some_handles():
            answer = await self.calls.append(handles, event_type="workflow.step")
            self.record.appended += [(handle.run_id, sequence) for handle, sequence in answer.items()]

    async def cancel(self) -> None:
        if self.record.runs and self.choice.random() < 0.5:
            run = self.choice.choice(self.record.runs)
            outcome, _, _ = await self.calls.cancel(run.tenant_id, run.run_id, self.choice.choice([None, 1, 2, 3]))
            if outcome == "cancelled":
                self.record.ended_runs.append((run.run_id, "cancelled"))

    async def replay(self) -> None:
        for run in self.choice.sample(self.record.runs, min(len(self.record.runs), 3)):
            outcome, new_id = await self.calls.replay(run.tenant_id, run.run_id, uuid7(), limit=50, retention=24 * HOUR)
            if outcome == "replayed" and new_id:
                self.record.runs.append(replace(run, run_id=new_id))

    async def reap(self) -> None:
        await self.calls.reap()

    async def expire_lease(self) -> None:
        if self.record.handles:
            await self.calls.expire_lease(self.choice.choice(self.record.handles[-FEW:]).run_id)
