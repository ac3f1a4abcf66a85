"""The contract of runs in plain Python: what every call answers, and how each run stands after it. It knows no SQL.

Time is a number of seconds that stands still but for `pass_time`, and for a tick at each call: no two calls are simultaneous.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from uuid import UUID

from producer_sdk import Secrets

__all__ = ["HOUR", "Claimed", "Handle", "Key", "Model", "Proposal", "Run", "Seen"]

HOUR: Final = 3600.0
TICK: Final = 1.0
ENDED: Final = ("completed", "failed", "cancelled")


class Handle(NamedTuple):
    """What a worker got with a claim, and may use long after it lost the lease."""

    worker: str
    tenant_id: str
    run_id: UUID
    generation: int


class Claimed(NamedTuple):
    """A claim's answer beside its handle."""

    attempt: int
    checkpoint: bytes | None
    retry_delay: float | None


class Seen(NamedTuple):
    """All that can be seen of a run. Times are in whole hours from now, None where they mean nothing."""

    state: str
    version: int
    events: tuple[str, ...]
    error_code: str | None
    output: bytes | None
    cancel_asked: bool
    job: str
    attempts: int
    generation: int
    owner: str | None
    outcomes: tuple[str | None, ...]
    dead_reason: str | None
    checkpoint: bytes | None
    cost: float
    effects: int
    ready_in: int | None
    lease_ends_in: int | None
    deadline_in: int | None


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A command as a producer hands it over. Times in seconds."""

    run_id: UUID
    tenant_id: str
    workflow: str
    request: str
    delay: float = 0
    max_attempts: int = 3
    deadline: float | None = None
    cost_limit: float | None = None


@dataclass(kw_only=True)
class Run:
    """A run and its job. Its generation is the number of its attempts, each with its outcome or, while it goes on, None."""

    run_id: UUID
    tenant_id: str
    workflow: str
    max_attempts: int
    cost_limit: float | None
    created_at: float
    available_at: float
    deadline_at: float | None
    root: UUID
    replayed_as: UUID | None = None
    state: str = "queued"
    version: int = 1
    events: list[str] = field(default_factory=lambda: ["run_queued"])
    error_code: str | None = None
    output: bytes | None = None
    cancel_asked: bool = False
    job: str = "queued"
    attempts: int = 0
    outcomes: list[str | None] = field(default_factory=list)
    owner: str | None = None
    lease_ends_at: float = -math.inf
    attempt_ends_at: float = math.inf
    dead_reason: str | None = None
    retry_delay: float | None = None
    checkpoint: bytes | None = None
    cost: float = 0
    effects: int = 0

    @property
    def generation(self) -> int:
        return len(self.outcomes)

    def late(self, now: float) -> bool:
        return self.deadline_at is not None and self.deadline_at <= now

    def lease_over(self, now: float) -> bool:
        return self.job == "leased" and self.lease_ends_at <= now

    def spent(self) -> bool:
        return self.attempts >= self.max_attempts

    def held_by(self, handle: Handle, now: float) -> bool:
        held = (self.tenant_id, self.job, self.owner, self.generation) == (
            handle.tenant_id, "leased", handle.worker, handle.generation
        )  # fmt: skip
        return held and self.lease_ends_at > now

    def begin(self, worker: str, now: float, *, lease: float, limit: float | None) -> None:
        if self.job == "leased":
            self.outcomes[-1] = "lost"
        if self.state == "queued":
            self.state, self.version = "running", self.version + 1
        self.job, self.owner, self.lease_ends_at = "leased", worker, now + lease
        self.attempt_ends_at = min(self.deadline_at or math.inf, math.inf if limit is None else now + limit)
        self.attempts += 1
        self.outcomes.append(None)

    def stop(self, outcome: str) -> None:
        """The attempt is over, if there is one."""
        if self.job == "leased":
            self.outcomes[-1] = outcome
        self.owner = None

    def queue_again(self, available_at: float) -> str:
        self.job, self.available_at = "queued", available_at
        return self.job

    def end(self, state: str) -> str:
        """The job's new state."""
        self.state, self.version = state, self.version + 1
        self.events.append(f"run_{state}")
        self.job = "dead" if state == "failed" else state
        return self.job

    def die(self, reason: str, error_code: str) -> str:
        self.dead_reason, self.error_code = reason, error_code
        return self.end("failed")

    def seen(self, now: float) -> Seen:
        def hours(at: float | None) -> int | None:
            return None if at is None else round((at - now) / HOUR)

        return Seen(
            state=self.state, version=self.version, events=tuple(self.events), error_code=self.error_code, output=self.output,
            cancel_asked=self.cancel_asked, job=self.job, attempts=self.attempts, generation=self.generation, owner=self.owner,
            outcomes=tuple(self.outcomes), dead_reason=self.dead_reason, checkpoint=self.checkpoint, cost=self.cost,
            effects=self.effects,
            ready_in=hours(self.available_at) if self.job == "queued" else None,
            lease_ends_in=hours(self.lease_ends_at) if self.job == "leased" else None,
            deadline_in=hours(self.deadline_at),
        )  # fmt: skip


@dataclass(kw_only=True)
class Key:
    """What an idempotency key stands for. ``rows``: under how many versions of the secrets it is kept."""

    run_id: UUID
    request: tuple[str, str]
    expires_at: float
    rows: int
    tombstone: bool = False


class Model:
    """Every verb of producers, workers, operators and time. A verb under a lease answers for the handles that are held only."""

    def __init__(self) -> None:
        self.now = 0.0
        self.runs: dict[UUID, Run] = {}
        self.keys: dict[tuple[str, str], Key] = {}

    def tick(self) -> None:
        self.now += TICK

    # Producers.

    def accept(self, proposal: Proposal, key: str | None, *, secrets: Secrets, retention: float) -> tuple[str, UUID | None]:
        known = self.keys.get((proposal.tenant_id, key)) if key else None
        request = (proposal.workflow, proposal.request)
        if known is not None:
            if known.tombstone or known.expires_at <= self.now:
                return "expired", None
            return ("replayed", known.run_id) if known.request == request else ("conflict", None)
        first_at = self.now + proposal.delay
        deadline_at = None if proposal.deadline is None else first_at + proposal.deadline
        self.runs[proposal.run_id] = Run(
            run_id=proposal.run_id, tenant_id=proposal.tenant_id, workflow=proposal.workflow, max_attempts=proposal.max_attempts,
            cost_limit=proposal.cost_limit, created_at=self.now, available_at=first_at,
            deadline_at=deadline_at, root=proposal.run_id,
        )  # fmt: skip
        if key:
            self.keys[proposal.tenant_id, key] = Key(
                run_id=proposal.run_id, request=request, expires_at=self.now + retention, rows=len(secrets.write)
            )
        return "created", proposal.run_id

    def cancel(self, tenant_id: str, run_id: UUID, expected_version: int | None) -> tuple[str, str | None, int | None]:
        run = self.runs.get(run_id)
        if run is None or run.tenant_id != tenant_id:
            return "not_found", None, None
        if run.state in ENDED:
            return "ended", run.state, None
        if expected_version not in (None, run.version):
            return "changed", None, None
        if run.job == "leased" and run.lease_ends_at > self.now:
            if not run.cancel_asked:
                run.cancel_asked, run.version = True, run.version + 1
                run.events.append("run_cancel_requested")
            return "requested", run.state, run.version
        run.stop("lost")
        run.cancel_asked = True
        run.end("cancelled")
        return "cancelled", run.state, run.version

    # Workers.

    def claim(
        self,
        worker: str,
        chosen: Sequence[UUID],
        *,
        workflows: Sequence[str],
        limit: int,
        lease: float,
        attempt_limit: float | None,
    ) -> dict[Handle, Claimed]:
        """The contract leaves some choice where more is ready than was asked for; ``chosen`` is checked against it."""
        self._check_choice([self.runs[run_id] for run_id in chosen], workflows, limit)
        answer = {}
        for run_id in chosen:
            run = self.runs[run_id]
            run.begin(worker, self.now, lease=lease, limit=attempt_limit)
            handle = Handle(worker, run.tenant_id, run_id, run.generation)
            answer[handle] = Claimed(run.attempts, run.checkpoint, run.retry_delay)
        return answer

    def renew(self, handles: Sequence[Handle], *, lease: float, checkpoint: bytes | None) -> dict[Handle, bool]:
        """Whether cancellation was asked for."""
        answer = {}
        for handle, run in self._held(handles):
            if run.attempt_ends_at > self.now:
                run.lease_ends_at = self.now + lease
                run.checkpoint = checkpoint or run.checkpoint
                answer[handle] = run.cancel_asked
        return answer

    def complete(self, handles: Sequence[Handle], *, output: bytes, cost: float | None) -> frozenset[Handle]:
        done = [(handle, run) for handle, run in self._held(handles) if not run.cancel_asked]
        for _, run in done:
            run.cost += cost or 0
            run.output = output
            run.stop("completed")
            run.end("completed")
        return frozenset(handle for handle, _ in done)

    def complete_with_effect(self, handles: Sequence[Handle]) -> frozenset[Handle]:
        """A row of the caller's and the completion, both or neither."""
        done = self.complete(handles, output=b"effect", cost=None)
        for handle in done:
            self.runs[handle.run_id].effects += 1
        return done

    def fail(
        self, handles: Sequence[Handle], *, delay: float | None, reason: str | None, error_code: str, cost: float | None,
        checkpoint: bytes | None,
    ) -> dict[Handle, tuple[str, str | None]]:  # fmt: skip
        """The job's new state and why no attempt follows."""
        answer = {}
        for handle, run in self._held(handles):
            run.cost += cost or 0
            run.retry_delay = delay
            run.checkpoint = checkpoint or run.checkpoint
            ending = self._ending(run, delay, reason)
            run.stop("cancelled" if ending == "cancelled" else "failed")
            answer[handle] = self._settle(run, ending, error_code, available_at=self.now + (delay or 0)), ending
        return answer

    def release(self, handles: Sequence[Handle], *, checkpoint: bytes | None) -> dict[Handle, str]:
        """The job's new state."""
        answer = {}
        for handle, run in self._held(handles):
            run.attempts -= 1
            run.checkpoint = checkpoint or run.checkpoint
            run.stop("cancelled" if run.cancel_asked else "released")
            answer[handle] = run.end("cancelled") if run.cancel_asked else run.queue_again(self.now)
        return answer

    def append(self, handles: Sequence[Handle], *, event_type: str) -> dict[Handle, int]:
        """The event's sequence."""
        answer = {}
        for handle, run in self._held(handles):
            run.events.append(event_type)
            answer[handle] = len(run.events)
        return answer

    def holds(self, handle: Handle) -> bool:
        return self.runs[handle.run_id].held_by(handle, self.now)

    def standing(self, handle: Handle) -> tuple[str, bool, bool, bool]:
        """What a holder is told: the job's state, still held, left the lease under this generation, cancellation asked for."""
        run = self.runs[handle.run_id]
        left_here = run.job != "leased" and run.generation == handle.generation
        return run.job, self.holds(handle), left_here, run.cancel_asked

    # Upkeep and operators.

    def reap(self) -> "Counter[tuple[str, str, str | None]]":
        """(workflow, the job's new state, reason) of all that no claim would end."""
        answer: Counter[tuple[str, str, str | None]] = Counter()
        for run in self.runs.values():
            if run.lease_over(self.now) or (run.job == "queued" and run.late(self.now)):
                ending = (
                    "cancelled" if run.cancel_asked
                    else "deadline_exceeded" if run.late(self.now)
                    else "attempts_exhausted" if run.spent() else None
                )  # fmt: skip
                run.stop("lost")
                answer[run.workflow, self._settle(run, ending, "lease_expired", available_at=self.now), ending] += 1
        return answer

    def replay(self, tenant_id: str, run_id: UUID, new_id: UUID, *, limit: int, retention: float) -> tuple[str, UUID | None]:
        run = self.runs.get(run_id)
        if run is None or run.tenant_id != tenant_id:
            return "not_found", None
        if run.replayed_as is not None:
            return "already_replayed", run.replayed_as
        if run.state != "failed":
            return "not_dead", None
        if sum(other.root == run.root for other in self.runs.values()) - 1 >= limit:
            return "budget_spent", None
        if self.runs[run.root].created_at <= self.now - retention:
            return "too_old", None
        deadline_at = None if run.deadline_at is None else self.now + run.deadline_at - run.created_at
        run.replayed_as = new_id
        self.runs[new_id] = Run(
            run_id=new_id, tenant_id=tenant_id, workflow=run.workflow, max_attempts=run.max_attempts, cost_limit=run.cost_limit,
            created_at=self.now, available_at=self.now, deadline_at=deadline_at, root=run.root,
        )  # fmt: skip
        return "replayed", new_id

    def due_keys(self) -> list[Key]:
        return [key for key in self.keys.values() if not key.tombstone and key.expires_at <= self.now]

    def expire_keys(self) -> int:
        """How many rows became tombstones."""
        due = self.due_keys()
        for key in due:
            key.tombstone = True
        return sum(key.rows for key in due)

    def key_rows(self) -> "Counter[tuple[str, UUID | None]]":
        """How many rows each tenant has for each run; tombstones name none."""
        rows: Counter[tuple[str, UUID | None]] = Counter()
        for (tenant_id, _), key in self.keys.items():
            rows[tenant_id, None if key.tombstone else key.run_id] += key.rows
        return rows

    # Time.

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def expire_lease(self, run_id: UUID) -> None:
        self.runs[run_id].lease_ends_at = self.now

    # What stands behind them.

    def _held(self, handles: Sequence[Handle]) -> list[tuple[Handle, Run]]:
        return [(handle, self.runs[handle.run_id]) for handle in handles if self.holds(handle)]

    def _ending(self, run: Run, delay: float | None, reason: str | None) -> str | None:
        """Why a failed attempt is the run's last one, None if it is not."""
        if run.cancel_asked:
            return "cancelled"
        if delay is None:
            return reason or "not_retryable"
        if run.spent():
            return "attempts_exhausted"
        if run.late(self.now + delay):
            return "deadline_exceeded"
        if run.cost_limit is not None and run.cost >= run.cost_limit:
            return "cost_exhausted"
        return None

    def _settle(self, run: Run, ending: str | None, error_code: str, *, available_at: float) -> str:
        if ending is None:
            return run.queue_again(available_at)
        if ending == "cancelled":
            return run.end("cancelled")
        return run.die(ending, ending if ending in ("deadline_exceeded", "cost_exhausted") else error_code)

    def _check_choice(self, chosen: Sequence[Run], workflows: Sequence[str], limit: int) -> None:
        """As many as there are and were asked for: expired leases first, oldest first, then what is ready, shared by tenants."""
        open_to_all = [
            run for run in self.runs.values()
            if run.workflow in workflows and not (run.spent() or run.late(self.now) or run.cancel_asked)
        ]  # fmt: skip
        expired = {run.run_id: run.lease_ends_at for run in open_to_all if run.lease_over(self.now)}
        ready = [run for run in open_to_all if run.job == "queued" and run.available_at <= self.now]
        taken = {run.run_id for run in chosen}
        assert taken <= expired.keys() | {run.run_id for run in ready}, "a job was claimed that nobody may have"
        assert len(taken) == min(limit, len(expired) + len(ready)), "a job was passed over"
        assert len(taken & expired.keys()) == min(limit, len(expired)), "an expired lease was passed over"
        assert _oldest_first(taken, expired), "a lease that expired later was preferred"
        self._check_shares(taken, ready, limit - len(taken & expired.keys()))

    def _check_shares(self, taken: set[UUID], ready: Sequence[Run], room: int) -> None:
        crowd: dict[tuple[str, str], dict[UUID, float]] = {}
        for run in ready:
            crowd.setdefault((run.workflow, run.tenant_id), {})[run.run_id] = run.available_at
        for mine in crowd.values():
            assert len(taken & mine.keys()) >= min(len(mine), room // len(crowd)), "a tenant got less than its share"
            assert _oldest_first(taken, mine), "a tenant's later job was preferred"


def _oldest_first(taken: set[UUID], ages: dict[UUID, float]) -> bool:
    """Nothing that was left is older than something that was taken."""
    chosen = [at for run_id, at in ages.items() if run_id in taken]
    left = [at for run_id, at in ages.items() if run_id not in taken]
    return not chosen or not left or max(chosen) <= min(left)
