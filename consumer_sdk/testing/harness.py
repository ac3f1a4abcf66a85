"""What the contract of the ledger needs of a ledger that is put to the test, and the harness of the one in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol
from uuid import UUID

from consumer_sdk.effects import EffectKey, RunFence
from consumer_sdk.testing.memory_effects import MemoryEffects

__all__ = ["LedgerHarness", "MemoryHarness"]


class LedgerHarness(Protocol):
    """A ledger's table, the runs behind its fences, and its time."""

    async def fetch(self, name: str, *arguments: Any) -> Sequence[Mapping[str, Any]]:
        """The rows of the statement ``name`` of ``effects.sql``."""
        ...

    async def row(self, key: EffectKey) -> Mapping[str, Any] | None:
        """The row of an effect, by column; None if there is none."""
        ...

    async def advance(self, seconds: float) -> None:
        """Let time pass for effects. Leases do not lapse of it."""
        ...

    async def lease(self, owner: str, *, tenant_id: str) -> RunFence:
        """The first lease of a new run."""
        ...

    async def take_over(self, fence: RunFence, owner: str) -> RunFence:
        """The run's next lease, now that this one has lapsed."""
        ...

    async def replay(self, fence: RunFence, owner: str) -> RunFence:
        """The first lease of a new run of the same lineage, now that this one has failed for good."""
        ...

    async def lapse(self, fence: RunFence) -> None:
        """The run's lease ends, and nobody takes it over."""
        ...

    async def cancel(self, fence: RunFence) -> None:
        """The run's cancellation is asked for; its lease goes on."""
        ...

    async def resolve(self, key: EffectKey, resolution: str, *, generation: int) -> str:
        """What an operator says of an effect; the outcome."""
        ...


class MemoryHarness:
    """Of ``MemoryEffects``."""

    def __init__(self, effects: MemoryEffects | None = None) -> None:
        self.effects = MemoryEffects() if effects is None else effects
        self.fetch = self.effects.fetch

    async def row(self, key: EffectKey) -> Mapping[str, Any] | None:
        row = self.effects.row(key)
        return None if row is None else asdict(row)

    async def advance(self, seconds: float) -> None:
        self.effects.clock.advance(seconds)

    async def lease(self, owner: str, *, tenant_id: str) -> RunFence:
        return self.effects.leases.grant(owner, tenant_id=tenant_id)

    async def take_over(self, fence: RunFence, owner: str) -> RunFence:
        return self.effects.leases.take_over(_run(fence), owner)

    async def replay(self, fence: RunFence, owner: str) -> RunFence:
        return self.effects.leases.replay(_run(fence), owner)

    async def lapse(self, fence: RunFence) -> None:
        self.effects.leases.revoke(_run(fence))

    async def cancel(self, fence: RunFence) -> None:
        self.effects.leases.cancel(_run(fence))

    async def resolve(self, key: EffectKey, resolution: str, *, generation: int) -> str:
        return self.effects.resolve(key, resolution, generation=generation)


def _run(fence: RunFence) -> UUID:
    assert fence.run_id is not None
    return fence.run_id
