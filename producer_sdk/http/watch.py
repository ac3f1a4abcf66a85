"""Waits for lineages: one LISTEN connection and one batched read for all that a process waits for.

A ring is a hint and reading is the truth. Each second everything that is waited for and has not ended is read in one statement, so
a ring that is lost costs a second. The connection listens before the first read of a lineage: what happens in between rings. The
same connection hears live chunks.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final
from uuid import UUID

import asyncpg
import structlog

from fencepost.clock import lease_clock
from fencepost.errors import ConfigurationError, TransientError
from fencepost.listening import Listener
from producer_sdk.http.live import CHANNEL as LIVE_CHANNEL
from producer_sdk.http.live import Live
from producer_sdk.http.store import ROLE, LineageKey, RouteStore, Standing

__all__ = ["Follower", "Watch"]

_log = structlog.get_logger(__name__)

_CHANNEL: Final = "fencepost_lineages"
_FLOOR_SECONDS: Final = 1.0
_ARMED_SECONDS: Final = 10.0
_MOST_AT_ONCE: Final = 500
#: Of those that nothing was heard of. One that rings meanwhile waits for no more than these.
_MOST_DUE_AT_ONCE: Final = 100
_LISTEN_PATIENCE_SECONDS: Final = 1.0


class Follower:
    """One who waits for a lineage. ``standing``: as it was read last. ``heard`` is set by the first read, and by each that finds
    another standing; whoever has other news for the one who waits may set it as well."""

    def __init__(self, key: LineageKey) -> None:
        self.key = key
        self.standing: Standing | None = None
        self.heard = asyncio.Event()
        self.closing = False

    async def wait(self, seconds: float) -> bool:
        """Wait for news, at most so long. False: the time is over."""
        if seconds > 0 and not self.closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.heard.wait()
        news = self.heard.is_set()
        self.heard.clear()
        return news and not self.closing


class Watch:
    """``run`` it for as long as anybody may follow. ``live`` is told of live chunks. ``listening`` and ``read`` are told of the
    connection, and of seconds and size of each read."""

    def __init__(
        self,
        store: RouteStore,
        database_url: str,
        *,
        live: Live | None = None,
        listening: Callable[[bool], None] = lambda _: None,
        read: Callable[[float, int], None] = lambda _seconds, _size: None,
    ) -> None:
        self._store = store
        self._told_listening = listening
        self._told_read = read
        self._followers: dict[LineageKey, set[Follower]] = {}
        self._by_root: dict[UUID, set[LineageKey]] = {}
        self._dirty: set[LineageKey] = set()
        self._due: set[LineageKey] = set()
        self._rung = asyncio.Event()
        self._up = asyncio.Event()
        self._armed_until = 0.0
        self._live_armed_until = 0.0
        self._live = live or Live()
        heard = {_CHANNEL: self._on_ring, LIVE_CHANNEL: self._live.hear}
        self._listener = Listener(database_url, role=ROLE, heard=heard, changed=self._on_change)

    @contextmanager
    def follow(self, key: LineageKey) -> Iterator[Follower]:
        """Follow a lineage: it is read at once, at each of its rings, and each second."""
        follower = Follower(key)
        self._followers.setdefault(key, set()).add(follower)
        self._by_root.setdefault(key.root_run_id, set()).add(key)
        self.look(key)
        try:
            yield follower
        finally:
            self._leave(follower)

    async def run(self) -> None:
        """Listen and read until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listener.run())
            group.create_task(self._read_forever())
            group.create_task(self._floor())

    def look(self, *keys: LineageKey) -> None:
        """Have these read before others."""
        self._dirty.update(keys)
        if self._dirty:
            self._rung.set()

    def read_all(self) -> None:
        """Have everything read again that is waited for and has not ended."""
        self._due.update(key for key, followers in self._followers.items() if not all(map(_has_ended, followers)))
        if self._due:
            self._rung.set()

    def close(self) -> None:
        """Wake all who wait, for good: the process is about to end."""
        for followers in self._followers.values():
            for follower in followers:
                follower.closing = True
                follower.heard.set()

    @property
    def listening(self) -> bool:
        return self._listener.up

    def _leave(self, follower: Follower) -> None:
        followers = self._followers[follower.key]
        followers.discard(follower)
        if followers:
            return
        del self._followers[follower.key]
        self._dirty.discard(follower.key)
        self._due.discard(follower.key)
        keys = self._by_root[follower.key.root_run_id]
        keys.discard(follower.key)
        if not keys:
            del self._by_root[follower.key.root_run_id]

    def _on_ring(self, payload: str) -> None:
        for text in payload.split(","):
            with contextlib.suppress(ValueError):
                self.look(*self._by_root.get(UUID(text), ()))

    def _on_change(self, up: bool) -> None:
        self._told_listening(up)
        if up:
            self._up.set()
            self.look(*self._followers)  # whatever happened while nobody listened
        else:
            self._up.clear()

    async def _floor(self) -> None:
        while True:
            await asyncio.sleep(_FLOOR_SECONDS)
            self.read_all()

    async def _read_forever(self) -> None:
        # A process that cannot listen polls: it does not make its clients wait for a connection.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LISTEN_PATIENCE_SECONDS):
                await self._up.wait()
        while True:
            await self._rung.wait()
            self._rung.clear()
            try:
                await self._arm()
                while batch := _taken(self._dirty, _MOST_AT_ONCE) or _taken(self._due, _MOST_DUE_AT_ONCE):
                    self._due.difference_update(batch)
                    await self._read(batch)
            except (TransientError, ConfigurationError, asyncpg.PostgresError) as error:
                # Whatever it is that cannot be read now, those who wait are waiting for a later read.
                _log.warning("lineages_not_read", error=type(error).__name__, followers=len(self._followers))

    async def _arm(self) -> None:
        now = lease_clock()
        if self.listening and now > self._armed_until - _ARMED_SECONDS / 2:
            await self._store.arm(int(_ARMED_SECONDS * 1000))
            self._armed_until = now + _ARMED_SECONDS
        if self.listening and self._live.followed and now > self._live_armed_until - _ARMED_SECONDS / 2:
            await self._store.arm_live(int(_ARMED_SECONDS * 1000))
            self._live_armed_until = now + _ARMED_SECONDS

    async def _read(self, keys: Sequence[LineageKey]) -> None:
        started = lease_clock()
        standings = await self._store.read(keys)
        self._told_read(lease_clock() - started, len(keys))
        for key, standing in zip(keys, standings, strict=True):
            for follower in self._followers.get(key, ()):
                if standing is None or standing != follower.standing:
                    follower.standing = standing
                    follower.heard.set()


def _has_ended(follower: Follower) -> bool:
    return follower.standing is not None and follower.standing.ended


def _taken(keys: set[LineageKey], most: int) -> list[LineageKey]:
    return [keys.pop() for _ in range(min(len(keys), most))]
