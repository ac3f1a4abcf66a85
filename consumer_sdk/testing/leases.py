"""Leases of runs as a test hands them out: the stand-in for the jobs table, which the ledger's fences look at."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID, uuid4

from consumer_sdk.effects import RunFence
from consumer_sdk.testing.clock import Clock

__all__ = ["Leases"]


@dataclass(kw_only=True, slots=True)
class _Lease:
    tenant_id: str
    owner: str
    generation: int
    expires_at: datetime | None
    cancel_requested: bool = False
    held: bool = True


class Leases:
    """One lease a run, the latest. A lease holds until it is revoked, or until the clock has passed its time if it has one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_run: dict[UUID, _Lease] = {}

    def grant(self, owner: str, *, tenant_id: str = "acme", seconds: float | None = None) -> RunFence:
        """The first lease of a new run."""
        return self._granted(uuid4(), owner, tenant_id, 1, seconds)

    def take_over(self, run_id: UUID, owner: str, *, seconds: float | None = None) -> RunFence:
        """The run's next lease; the one before has ended."""
        before = self._by_run[run_id]
        return self._granted(run_id, owner, before.tenant_id, before.generation + 1, seconds)

    def replay(self, run_id: UUID, owner: str, *, seconds: float | None = None) -> RunFence:
        """The first lease of a new run in its place, with the same effects; the run itself has ended."""
        self.revoke(run_id)
        return self._granted(uuid4(), owner, self._by_run[run_id].tenant_id, 1, seconds)

    def revoke(self, run_id: UUID) -> None:
        """End the run's lease: it has lapsed, or was given back."""
        self._by_run[run_id].held = False

    def cancel(self, run_id: UUID) -> None:
        """Ask for the run's cancellation: it sends nothing more, and may still record what was sent."""
        self._by_run[run_id].cancel_requested = True

    def is_held(self, fence: RunFence, tenant_id: str, *, cancelled_too: bool = False) -> bool:
        """Whether the fence is that of its run's lease now. A message without a run is behind no lease, so nothing can be lost."""
        if fence.run_id is None:
            return True
        lease = self._by_run.get(fence.run_id)
        if lease is None or not lease.held or (lease.expires_at is not None and lease.expires_at <= self._clock.now()):
            return False
        named = (lease.tenant_id, lease.owner, lease.generation) == (tenant_id, fence.owner, fence.generation)
        return named and (cancelled_too or not lease.cancel_requested)

    def _granted(self, run_id: UUID, owner: str, tenant_id: str, generation: int, seconds: float | None) -> RunFence:
        expires_at = None if seconds is None else self._clock.now() + timedelta(seconds=seconds)
        self._by_run[run_id] = _Lease(tenant_id=tenant_id, owner=owner, generation=generation, expires_at=expires_at)
        return RunFence(run_id, owner, generation)
