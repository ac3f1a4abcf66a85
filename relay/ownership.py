"""Leases of lanes: joins the fleet, claims its share, renews, hands over, and notices what was lost.

Renewals run in a task of their own and depend on nothing but the database. ``trusted_until`` counts from before the
statement was sent, with the margin taken off, so this relay stops before any other may start.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from fencepost import __version__
from fencepost.clock import lease_clock
from fencepost.errors import TransientError
from relay.lane import Flight, Lane, Receipt, Stopped
from relay.metrics import Metrics
from relay.settings import RelaySettings
from relay.share import plan
from relay.store import Store

__all__ = ["Ownership"]

_log = structlog.get_logger(__name__)

_LOOK_SECONDS: Final = 1.0


class Ownership:
    """``lanes`` is the set of lanes held, shared with the engine; ``lost`` is told of each that went without our doing;
    ``changed`` that some came or that a hand-over is wanted; ``taken_back`` of a mark that a crash of the server undid."""

    def __init__(
        self,
        *,
        store: Store,
        settings: RelaySettings,
        relay_id: str,
        metrics: Metrics,
        lanes: dict[int, Lane],
        lost: Callable[[Lane], None],
        changed: Callable[[], None],
        stopped: Callable[[], Mapping[int, Stopped]],
        taken_back: Callable[[Receipt], None],
    ) -> None:
        self._store = store
        self._settings = settings
        self._relay_id = relay_id
        self._metrics = metrics
        self._lanes = lanes
        self._lost = lost
        self._changed = changed
        self._stopped = stopped
        self._taken_back = taken_back
        self._reported: Mapping[int, Stopped] = {}
        self._look = asyncio.Event()
        self._gone = asyncio.Event()
        # Given up here, and not yet known to be released in the database: tried again until it answers.
        self._to_release: dict[int, int] = {}
        self._renew_at = 0.0
        self._leaving = False
        self.database_seen_at = lease_clock()

    def look_now(self) -> None:
        """Another relay gave lanes up, or one of ours is ready to be handed over."""
        self._look.set()

    async def leave(self) -> None:
        """Leave the fleet: claim nothing from now on, and hand over every lane at its next batch boundary."""
        self._leaving = True
        self._begin_release(len(self._lanes))
        await self._store.leave()

    async def without_lanes(self) -> None:
        """Wait until no lane is held, and those given up are released."""
        while self._lanes or self._to_release:
            self._gone.clear()
            await self._gone.wait()

    async def run(self) -> None:
        """Look, act, wait: until cancelled. A database that does not answer costs leases, never this task."""
        pause = min(_LOOK_SECONDS, self._settings.renew_interval_seconds / 2)
        while True:
            self._look.clear()
            try:
                await self.step()
                self.database_seen_at = lease_clock()
            except TransientError as error:
                self._metrics.database_error("coordinate")
                _log.warning("coordination_failed", error=str(error))
            self.expire()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._look.wait()

    async def step(self) -> None:
        """One round: renew when due, release what is ready to go, then claim or begin hand-overs."""
        if lease_clock() >= self._renew_at or self._stopped() != self._reported:
            await self._renew()
        await self._release_ready()
        if self._leaving:
            return
        fleet = await self._store.fleet(list(self._lanes))
        wanted = plan(self._relay_id, sum(not lane.releasing for lane in self._lanes.values()), fleet)
        if wanted.claim and not self._leaving:
            await self._claim(wanted.claim)
        if wanted.release:
            self._begin_release(wanted.release)

    async def _renew(self) -> None:
        started = lease_clock()
        if not self._leaving:
            stopped = self._stopped()
            await self._store.join(self._settings.relay_name, __version__, self._settings.lease_seconds, stopped)
            self._reported = stopped
        held = {lane.number: lane.generation for lane in self._lanes.values() if lane.trusted}
        marked = {lane.number: lane.receipt for lane in self._lanes.values()}
        if held:
            kept = await self._store.renew(held, self._settings.lease_seconds)
            self.expire()  # trust that lapsed while the statement ran does not come back: receipts may have been dropped on it
            for number in held.keys() - kept.keys():
                self._metrics.stale_refused(1)
                self._drop(number, "renewal refused")
            for number in kept.keys() & self._lanes.keys():
                self._lanes[number].trusted_until = started + self._settings.trusted_seconds
                receipt = marked[number]
                if receipt is not None and receipt.sequence > kept[number]:
                    self._taken_back(receipt)
        self._renew_at = started + self._settings.renew_interval_seconds

    async def _claim(self, most: int) -> None:
        started = lease_clock()
        claimed = await self._store.claim(self._settings.lease_seconds, most, list(self._lanes))
        if not claimed:
            return
        # Read after the claim has committed: a mark that the claim waited for is in it.
        cursors = await self._store.cursors(list(claimed))
        for number, generation in claimed.items():
            self._to_release.pop(number, None)
            cursor, sequence = cursors[number]
            self._lanes[number] = Lane(
                number=number,
                generation=generation,
                trusted_until=started + self._settings.trusted_seconds,
                cursor=cursor,
                sequence=sequence,
                marked_position=cursor.position,
            )
        self._metrics.claimed(len(claimed))
        _log.info("lanes_claimed", lanes=sorted(claimed), generations=claimed)
        if self._leaving:
            self._begin_release(len(self._lanes))
        self._changed()

    def _begin_release(self, count: int) -> None:
        # Idle lanes first: they can go at once.
        candidates = sorted(
            (lane for lane in self._lanes.values() if not lane.releasing), key=lambda lane: (not lane.idle, -lane.number)
        )
        for lane in candidates[:count]:
            lane.releasing = True
            lane.ready = None  # polled ahead and not sent: the successor polls it again
        self._changed()
        self._look.set()

    async def _release_ready(self) -> None:
        for lane in self._lanes.values():
            if lane.releasing and lane.flight is not None and self._waits_for_nothing(lane.flight):
                lane.flight = None
        # Out of the held lanes before the statement: from then on they may be another's, and no tick takes them for lost.
        for lane in [lane for lane in self._lanes.values() if lane.releasing and lane.idle]:
            del self._lanes[lane.number]
            lane.distrust()
            self._metrics.lane_gone(lane.number)
            self._to_release[lane.number] = lane.generation
        if not self._to_release:
            return
        wanted = dict(self._to_release)
        released = await self._store.release(wanted)
        self._to_release.clear()
        self._gone.set()
        self._metrics.released(len(released))
        self._metrics.stale_refused(len(wanted) - len(released))
        _log.info("lanes_released", lanes=sorted(released))

    def _waits_for_nothing(self, flight: Flight) -> bool:
        """Nothing of it is on the wire: it waits for a retry, and the successor polls its rows again.

        Rows that were acknowledged would be repeated by that, so a planned hand-over waits for the rest; a stop does not.
        """
        return not flight.outstanding and (self._leaving or not flight.offsets)

    async def release_all(self) -> None:
        """At a stop: give up every lane at once, whatever it was doing; the publisher has been discarded before."""
        for lane in self._lanes.values():
            lane.releasing, lane.ready, lane.flight, lane.unmarked = True, None, None, 0
        await self._release_ready()
        await self._store.leave()  # once more: a renewal under way at the first may have joined again

    def expire(self) -> None:
        """Drop lanes that are no longer trusted. No statement is needed to know it."""
        for number in [lane.number for lane in self._lanes.values() if not lane.trusted]:
            self._drop(number, "not renewed in time")

    def lose(self, number: int, generation: int) -> None:
        """A mark of this lane under this generation was refused."""
        self._metrics.stale_refused(1)
        lane = self._lanes.get(number)
        if lane is not None and lane.generation == generation:
            self._drop(number, "mark refused")

    def _drop(self, number: int, reason: str) -> None:
        lane = self._lanes.pop(number, None)
        if lane is None:
            return
        lane.distrust()
        self._gone.set()
        self._metrics.lost(1)
        self._metrics.lane_gone(number)
        _log.warning("lane_lost", lane=number, generation=lane.generation, reason=reason)
        self._lost(lane)
