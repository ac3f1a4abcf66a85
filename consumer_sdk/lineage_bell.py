"""Rings for lineages that have news: after the commit, many at once, and never in the way of what has happened already.

A ring that is lost costs its waiters a second; they look by themselves.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Final
from uuid import UUID

import asyncpg
import structlog

from fencepost.errors import FencepostError

__all__ = ["LineageBell"]

_log = structlog.get_logger(__name__)

_MOST_AT_ONCE: Final = 1_000
_END_SECONDS: Final = 1.0


class LineageBell:
    """``ring`` sends for many lineages. What fails is told once, until a ring goes out again."""

    def __init__(self, ring: Callable[[Sequence[UUID]], Awaitable[None]]) -> None:
        self._ring = ring
        self._waiting: dict[UUID, None] = {}
        self._ringing: asyncio.Task[None] | None = None
        self._fails = False

    def ring(self, root_run_ids: Sequence[UUID]) -> None:
        """These lineages have changed, and the change is committed."""
        self._waiting |= dict.fromkeys(root_run_ids)
        if self._ringing is None or self._ringing.done():
            self._ringing = asyncio.create_task(self._ring_all())

    async def close(self) -> None:
        """Ring for what waits, and wait no longer than a moment."""
        if self._ringing is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await self._ringing

    async def _ring_all(self) -> None:
        while self._waiting:
            batch = list(self._waiting)[:_MOST_AT_ONCE]
            for root_run_id in batch:
                del self._waiting[root_run_id]
            try:
                await self._ring(batch)
                self._fails = False
            except (FencepostError, asyncpg.PostgresError) as error:  # of the latter: the queue of notifications is full
                if not self._fails:
                    _log.warning("lineages_not_rung", error=str(error), consequence="who waits for them looks once a second")
                self._fails = True
