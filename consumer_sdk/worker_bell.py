"""Hints for a worker: a job became ready, a run of its own is to be cancelled.

A ring is only a hint, polling and renewing are the truth: every loss here costs at most one poll interval, or one renewal.
"""

import contextlib
from collections.abc import Awaitable, Callable
from typing import Final
from uuid import UUID

from consumer_sdk.run_store import ROLE
from consumer_sdk.worker_metrics import WorkerMetrics
from fencepost.clock import lease_clock
from fencepost.listening import Listener

__all__ = ["WorkerBell"]

_JOBS: Final = "fencepost_jobs"
_CANCELLED: Final = "fencepost_cancelled"
# A dead worker's flag runs out by itself; a living idle one renews it at half time.
_ARMED_SECONDS: Final = 10.0


class WorkerBell:
    """``arm`` asks the database to have this worker rung for some milliseconds; ``cancelled`` hears of cancelled runs."""

    def __init__(
        self,
        *,
        database_url: str,
        metrics: WorkerMetrics,
        arm: Callable[[int], Awaitable[None]],
        ring: Callable[[], None],
        cancelled: Callable[[UUID], None],
    ) -> None:
        self._metrics = metrics
        self._arm = arm
        self._ring = ring
        self._cancelled = cancelled
        self._armed_until = 0.0
        heard = {_JOBS: lambda _: ring(), _CANCELLED: self._on_cancelled}
        self._listener = Listener(database_url, role=ROLE, heard=heard, changed=self._on_change)
        self.run = self._listener.run

    def _on_change(self, up: bool) -> None:
        self._metrics.listening(up)
        if up:
            self._ring()  # whatever happened while nobody listened

    def _on_cancelled(self, payload: str) -> None:
        with contextlib.suppress(ValueError):
            self._cancelled(UUID(payload))

    @property
    def listening(self) -> bool:
        return self._listener.up

    def rearm_in(self) -> float:
        """Seconds until the flag wants to be renewed."""
        return max(self._armed_until - _ARMED_SECONDS / 2 - lease_clock(), 0.0)

    async def armed_anew(self) -> bool:
        """Have this worker rung from now on. True when that was not so before: look once more, what was ready did not ring."""
        now = lease_clock()
        if not self.listening or self.rearm_in() > 0:
            return False
        fresh = self._armed_until <= now
        await self._arm(int(_ARMED_SECONDS * 1000))
        self._armed_until = now + _ARMED_SECONDS
        return fresh
