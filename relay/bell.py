"""The doorbell's relay side: a LISTEN connection, and the flag that tells writers whether to ring.

A ring is only a hint. Polling is the truth, and every loss here (connection, notification, flag) costs at most one poll
interval. Writers look at the flag within their enqueue, so one that enqueued before the flag was set and commits after
the relay's last look does not ring: while any transaction older than the flag is in progress, the relay keeps looking.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final

import asyncpg
import structlog

from fencepost.clock import lease_clock
from fencepost.database import connect_listener
from fencepost.errors import TransientError
from relay.metrics import Metrics
from relay.store import ROLE, Store

__all__ = ["Bell", "transactions_in_progress"]

_log = structlog.get_logger(__name__)

_DOORBELL: Final = "fencepost_doorbell"
_LANES: Final = "fencepost_lanes"
# A dead relay's flag runs out by itself; a living one renews it at half time.
_ARMED_SECONDS: Final = 10.0
_PROBE_SECONDS: Final = 15.0
_RECONNECT_SECONDS: Final = 1.0


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
        self._database_url = database_url
        self._store = store
        self._metrics = metrics
        self._lanes = lanes
        self._ring = ring
        self._lanes_changed = lanes_changed
        self._connection: asyncpg.Connection | None = None
        self._armed: tuple[int, ...] = ()
        self._armed_until = 0.0
        self._unsure_below = 0
        metrics.listening(False)

    async def run(self) -> None:
        """Keep a listening connection for as long as the relay runs; probe it, since a cut one says nothing."""
        while True:
            try:
                await self._listen()
            except TransientError as error:
                _log.warning("listen_lost", error=str(error))
            finally:
                await self._hang_up()
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def _listen(self) -> None:
        connection = await connect_listener(self._database_url, role=ROLE)
        self._connection = connection
        ended = asyncio.Event()
        connection.add_termination_listener(lambda _: ended.set())
        try:
            await connection.add_listener(_DOORBELL, self._on_ring)
            await connection.add_listener(_LANES, self._on_lanes)
            self._metrics.listening(True)
            self._ring()  # whatever happened while nobody listened
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PROBE_SECONDS):
                        await ended.wait()
                if not ended.is_set():
                    await connection.fetchval("SELECT 1", timeout=5)
        except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError) as error:
            raise TransientError(f"listen: {type(error).__name__}: {error}") from error

    async def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        self._metrics.listening(False)
        if connection is not None:
            connection.terminate()

    def _on_ring(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        if str(payload).isdigit() and int(str(payload)) in self._lanes():
            self._ring()

    def _on_lanes(self, *_: object) -> None:
        self._lanes_changed()

    @property
    def listening(self) -> bool:
        return self._connection is not None and not self._connection.is_closed()

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
