"""The doorbell's relay side: a LISTEN connection, and the flag that tells writers whether to ring.

A ring is only a hint. Polling is the truth, and every loss here (connection, notification, flag) costs at most one poll
interval. Writers look at the flag within their enqueue, so one that enqueued before the flag was set and commits after
the relay's last look does not ring: while any transaction older than the flag is in progress, the relay keeps looking.
"""

from collections.abc import Callable, Sequence
from typing import Final

from fencepost.clock import lease_clock
from fencepost.listening import Listener
from relay.metrics import Metrics
from relay.store import ROLE, Store

__all__ = ["Bell", "transactions_in_progress"]

_DOORBELL: Final = "fencepost_doorbell"
_LANES: Final = "fencepost_lanes"
# A dead relay's flag runs out by itself; a living one renews it at half time.
_ARMED_SECONDS: Final = 10.0


def transactions_in_progress(snapshot: str, below: int) -> bool:
    """Whether ``snapshot`` (pg_snapshot as text) saw a transaction older than ``below`` in progress. Pure."""
    _, _, xip = snapshot.split(":")
    return any(int(xid) < below for xid in xip.split(",")) if xip else False


class Bell:
    """``ring`` is called at a ring for one of ``lanes()``; ``lanes_changed`` when another relay gave lanes up."""

    def __init__(
        self,
        *,
        database_url: str,
        store: Store,
        metrics: Metrics,
        lanes: Callable[[], Sequence[int]],
        ring: Callable[[], None],
        lanes_changed: Callable[[], None],
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._lanes = lanes
        self._ring = ring
        self._armed: tuple[int, ...] = ()
        self._armed_until = 0.0
        self._unsure_below = 0
        heard = {_DOORBELL: self._on_ring, _LANES: lambda _: lanes_changed()}
        self._listener = Listener(database_url, role=ROLE, heard=heard, changed=self._on_change)
        self.run = self._listener.run

    def _on_change(self, up: bool) -> None:
        self._metrics.listening(up)
        if up:
            self._ring()  # whatever happened while nobody listened

    def _on_ring(self, payload: str) -> None:
        if payload.isdigit() and int(payload) in self._lanes():
            self._ring()

    @property
    def listening(self) -> bool:
        return self._listener.up

    @property
    def armed(self) -> bool:
        """Writers of every held lane ring, for some time yet."""
        return self.listening and self._armed == tuple(self._lanes()) and self.rearm_in() > 0

    def rearm_in(self) -> float:
        """Seconds until the flag wants to be renewed."""
        return max(self._armed_until - _ARMED_SECONDS / 2 - lease_clock(), 0.0)

    async def arm(self) -> None:
        """From now on writers ring. Poll once more afterwards: what was committed before did not."""
        lanes = tuple(self._lanes())
        if not lanes or not self.listening:
            return
        started = lease_clock()
        fresh = self._armed != lanes or started >= self._armed_until
        armed_at = await self._store.arm(lanes, int(_ARMED_SECONDS * 1000))
        self._armed, self._armed_until = lanes, started + _ARMED_SECONDS
        if fresh:
            self._unsure_below = armed_at

    async def disarm(self) -> None:
        """A relay at work is not rung."""
        if self._armed:
            # Only what is still ours: another lane's flag is its new owner's.
            lanes, self._armed = set(self._armed) & set(self._lanes()), ()
            if lanes:
                await self._store.disarm(sorted(lanes))

    def unsure(self, snapshot: str) -> bool:
        """Whether ``snapshot`` shows a transaction that may have enqueued without seeing the flag."""
        if self._unsure_below and not transactions_in_progress(snapshot, self._unsure_below):
            self._unsure_below = 0
        return self._unsure_below > 0
