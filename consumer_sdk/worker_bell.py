"""Hints for a worker: a job became ready, a run of its own is to be cancelled.

A ring is only a hint, polling and renewing are the truth: every loss here costs at most one poll interval, or one renewal.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final
from uuid import UUID

import asyncpg
import structlog

from consumer_sdk.run_store import ROLE
from consumer_sdk.worker_metrics import WorkerMetrics
from fencepost.clock import lease_clock
from fencepost.database import connect_listener
from fencepost.errors import TransientError

__all__ = ["WorkerBell"]

_log = structlog.get_logger(__name__)

_JOBS: Final = "fencepost_jobs"
_CANCELLED: Final = "fencepost_cancelled"
# A dead worker's flag runs out by itself; a living idle one renews it at half time.
_ARMED_SECONDS: Final = 10.0
_PROBE_SECONDS: Final = 15.0
_RECONNECT_SECONDS: Final = 1.0


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
        self._database_url = database_url
        self._metrics = metrics
        self._arm = arm
        self._ring = ring
        self._cancelled = cancelled
        self._connection: asyncpg.Connection | None = None
        self._armed_until = 0.0
        metrics.listening(False)

    async def run(self) -> None:
        """Keep a listening connection for as long as the worker runs; probe it, since a cut one says nothing."""
        while True:
            try:
                await self._listen()
            except TransientError as error:
                _log.warning("listen_lost", error=str(error))
            finally:
                self._hang_up()
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def _listen(self) -> None:
        connection = await connect_listener(self._database_url, role=ROLE)
        self._connection = connection
        ended = asyncio.Event()
        connection.add_termination_listener(lambda _: ended.set())
        try:
            await connection.add_listener(_JOBS, self._on_jobs)
            await connection.add_listener(_CANCELLED, self._on_cancelled)
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

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        self._metrics.listening(False)
        if connection is not None:
            connection.terminate()

    def _on_jobs(self, *_: object) -> None:
        self._ring()

    def _on_cancelled(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        with contextlib.suppress(ValueError):
            self._cancelled(UUID(str(payload)))

    @property
    def listening(self) -> bool:
        return self._connection is not None and not self._connection.is_closed()

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
