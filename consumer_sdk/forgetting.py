"""Forgetting what is past the ledger's retention: the upkeep that consumers and workers share.

The database deletes by the longest retention that a service has named of late (`fencepost.forget_effects`), so one that remembers
for ever names it as well: silent, it would lose its rows to the others.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Final, Protocol

__all__ = ["FORGET_SECONDS", "Forgets", "forget_old"]

#: How often a process looks, give or take a fifth.
FORGET_SECONDS: Final = 30.0
_FORGET_MOST: Final = 1_000
_FOR_EVER: Final = timedelta(days=1_000_000)


class Forgets(Protocol):
    """A store that deletes up to ``limit`` of what is past ``retention``; how much."""

    async def forget(self, retention: timedelta, *, limit: int) -> int: ...


async def forget_old(store: Forgets, *, retention_days: float, told: Callable[[int], None]) -> None:
    """Delete what is past its retention, batch by batch while there is any; ``told`` of each. 0 days is for ever."""
    retention = timedelta(days=retention_days) if retention_days else _FOR_EVER
    while forgotten := await store.forget(retention, limit=_FORGET_MOST):
        told(forgotten)
