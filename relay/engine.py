"""The relay's main loop: poll what is free, send what is ready, mark what is acknowledged.

Each lane goes its own way: the poll of its batch k+1 runs while k is in flight, k+1 is sent when k is acknowledged, and
marks follow in order. Lanes that are ready at the same moment share statements and Kafka batches.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Final

import structlog

from fencepost.clock import lease_clock
from fencepost.errors import TransientError
from relay.bell import Bell
from relay.cursor import Batch, advance
from relay.lane import Flight, Lane, Receipt, Stopped
from relay.metrics import Metrics
from relay.ownership import Ownership
from relay.pacing import Pace
from relay.publishing import Publishing
from relay.settings import RelaySettings
from relay.store import Poll, Store
from relay.wire import RecordEncoder

__all__ = ["Engine"]

_log = structlog.get_logger(__name__)

_ERROR_PAUSE_FIRST_SECONDS: Final = 0.05
_ERROR_PAUSE_MOST_SECONDS: Final = 2.0
_LEAST_LANE_BYTES: Final = 65_536
# Acknowledged batches of a lane whose mark is not answered yet; beyond it the lane waits.
_UNMARKED_MOST: Final = 2
# After arming, looks for transactions that did not see the flag double from here up to the poll interval.
_UNSURE_FIRST_SECONDS: Final = 0.002
# With wakeup=poll, the first wait after rows were found; it doubles up to the poll interval.
_AFTER_ROWS_SECONDS: Final = 0.005


class Engine:
    """``bell`` is None with wakeup = poll."""

    def __init__(
        self,
        *,
        settings: RelaySettings,
        store: Store,
        metrics: Metrics,
        lanes: dict[int, Lane],
        bell: Bell | None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._metrics = metrics
        self._lanes = lanes
        self._bell = bell
        self._pace = Pace(settings.pace_max_ms / 1000, lease_clock())
        # Set by every change: ends the wait for a lane that can be polled.
        self._work = asyncio.Event()
        # Set by a ring and by lanes that are known to have more: ends the wait for rows.
        self._wake = asyncio.Event()
        self._rang = False
        self._marks_wanted = asyncio.Event()
        self._receipts: list[Receipt] = []
        self._wait_seconds = 0.0
        self._submit_scheduled = False
        self.draining = False
        self.polled_at = lease_clock()

    def connect(self, publishing: Publishing, ownership: Ownership) -> None:
        """The engine and these two tell each other of changes, so they meet after construction."""
        self._publishing = publishing
        self._ownership = ownership

    # -- signals -------------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Lanes came or went, a producer is there, a retry is due: look again. Coalesced within a loop turn."""
        self._work.set()
        if any(lane.hungry and lane.pollable for lane in self._lanes.values()):
            self._wake.set()
        if not self._submit_scheduled:
            self._submit_scheduled = True
            asyncio.get_running_loop().call_soon(self._submit)

    def ring(self) -> None:
        """A writer committed rows for one of our lanes."""
        self._rang = True
        self._wake.set()

    def flight_done(self, flight: Flight) -> None:
        """Every row of the flight is acknowledged: mark it, and let the lane's next batch go."""
        lane = flight.lane
        if lane.flight is not flight or self._lanes.get(lane.number) is not lane:
            return  # the lane was lost meanwhile; its successor publishes these rows
        lane.flight = None
        now = lease_clock()
        rows = flight.batch.rows
        self._metrics.batch_done(
            rows=len(rows),
            size=flight.acknowledged_bytes,
            late=flight.batch.late_count,
            publish_seconds=now - flight.started_at,
            age_seconds=_age_seconds(rows[0]["created_at"]),
        )
        self._metrics.phase("publish", now - flight.started_at)
        self._want_mark(lane, flight.receipt())
        self.changed()

    def lane_lost(self, lane: Lane) -> None:
        """The lane's rows in flight must not be sent any more, and its receipts would be refused."""
        if lane.flight is not None:
            self._publishing.abandon([lane.flight])
        self._receipts = [receipt for receipt in self._receipts if receipt.lane != lane.number]

    # -- sending -------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        self._submit_scheduled = False
        if not self._publishing.ready:
            return
        starting = [flight for lane in self._lanes.values() if (flight := self._next_flight(lane)) is not None]
        if starting:
            self._publishing.start(starting)
            self._work.set()  # their lanes can be polled ahead
            if any(flight.lane.hungry for flight in starting):
                self._wake.set()

    @staticmethod
    def _next_flight(lane: Lane) -> Flight | None:
        if not lane.trusted:
            return None
        flight = lane.flight
        if flight is not None:
            return flight if flight.to_send and not flight.outstanding and flight.due else None
        if lane.ready is None or lane.unmarked >= _UNMARKED_MOST:
            return None
        lane.sequence += 1
        lane.flight, lane.ready = Flight(lane, lane.ready, lane.sequence), None
        return lane.flight

    # -- polling -------------------------------------------------------------------------------------------------

    async def poll_forever(self) -> None:
        """Poll, hand out, wait; until cancelled. A database error pauses and is counted, and nothing is lost by it."""
        pause = _ERROR_PAUSE_FIRST_SECONDS
        while True:
            try:
                await self._round()
                pause = _ERROR_PAUSE_FIRST_SECONDS
            except TransientError as error:
                self._metrics.database_error("poll")
                _log.warning("poll_failed", error=str(error), retry_seconds=pause)
                await asyncio.sleep(pause)
                pause = min(pause * 2, _ERROR_PAUSE_MOST_SECONDS)

    async def _round(self) -> None:
        """One poll, and how long to wait after it."""
        self._work.clear()
        self._wake.clear()  # before the poll, so that a ring during it is kept
        if self._rang:
            self._rang = False
            for lane in self._lanes.values():
                lane.hungry = lane.hungry or not lane.pollable  # the ring may have been for it: look once it is free
        lanes = [lane for lane in self._lanes.values() if lane.pollable] if not self.draining else []
        if not lanes:
            await self._work.wait()
            return
        snapshot, found, more = await self._poll(lanes)
        if found:
            self.changed()
        await self._wait(snapshot, found, more)

    async def _poll(self, lanes: Sequence[Lane]) -> tuple[str, int, bool]:
        row_limit, byte_limit = self._settings.batch_rows, self._byte_limit()
        started = lease_clock()
        poll = await self._store.poll({lane.number: lane.cursor for lane in lanes}, row_limit=row_limit, byte_limit=byte_limit)
        if self._settings.wait_for_flush and poll.rows:
            await self._flushed()
        self.polled_at = now = lease_clock()
        self._metrics.phase("poll", now - started)
        found = 0
        more = False
        for lane in lanes:
            batch = self._hand_out(lane, poll, row_limit, byte_limit)
            if batch is not None:
                found += len(batch.rows)
                more = more or batch.more
        self._pace.observe(found, now)
        return poll.snapshot, found, more

    def _hand_out(self, lane: Lane, poll: Poll, row_limit: int, byte_limit: int) -> Batch | None:
        if self._lanes.get(lane.number) is not lane or lane.releasing:
            return None  # lost or on its way out while the statement ran
        batch = advance(lane.cursor, poll.rows.get(lane.number, ()), poll.snapshot, row_limit=row_limit, byte_limit=byte_limit)
        lane.cursor, lane.hungry = batch.cursor, batch.more
        if batch.rows:
            lane.ready = batch
        return batch

    def _byte_limit(self) -> int:
        # Two batches a lane are held at most, one polled and one in flight.
        return max(self._settings.memory_budget_bytes // (2 * max(len(self._lanes), 1)), _LEAST_LANE_BYTES)

    async def _flushed(self) -> None:
        inserted, flushed = await self._store.flushed()
        while flushed < inserted:
            await asyncio.sleep(0.002)
            _, flushed = await self._store.flushed()

    # -- waiting -------------------------------------------------------------------------------------------------

    async def _wait(self, snapshot: str, found: int, more: bool) -> None:
        interval = self._settings.poll_interval_ms / 1000
        if more:
            self._metrics.woken("more")
            self._wait_seconds = 0.0
            return
        if self._pace.busy:
            await self._give_way()
        elif self._bell is None or not self._bell.listening:
            self._wait_seconds = _AFTER_ROWS_SECONDS if found else min(max(self._wait_seconds * 2, _AFTER_ROWS_SECONDS), interval)
            await self._sleep(self._wait_seconds)
        elif not self._bell.armed:
            await self._bell.arm()
            self._wait_seconds = 0.0
        elif self._bell.unsure(snapshot):
            self._wait_seconds = min(max(self._wait_seconds * 2, _UNSURE_FIRST_SECONDS), interval)
            await self._sleep(self._wait_seconds)
        else:
            self._wait_seconds = 0.0
            await self._sleep(min(interval, self._bell.rearm_in()))

    async def _give_way(self) -> None:
        """Under a steady stream: writers do not ring, and get the cores for a moment."""
        if self._bell is not None:
            await self._bell.disarm()
        self._metrics.woken("poll")
        await asyncio.sleep(self._pace.pause())

    async def _sleep(self, seconds: float) -> None:
        """Until a ring or a lane that is known to have more, or until ``seconds`` have passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        self._metrics.woken("ring" if self._rang else "more" if self._wake.is_set() else "poll")

    # -- marking -------------------------------------------------------------------------------------------------

    def _want_mark(self, lane: Lane, receipt: Receipt) -> None:
        lane.unmarked += 1
        self._receipts.append(receipt)
        self._marks_wanted.set()

    def mark_taken_back(self, receipt: Receipt) -> None:
        """A crash of the server undid this newest mark of a lane that we still hold: write it again."""
        lane = self._lanes.get(receipt.lane)
        if lane is not None and lane.receipt is receipt and lane.unmarked == 0:
            _log.warning("mark_taken_back", lane=receipt.lane, sequence=receipt.sequence)
            self._want_mark(lane, receipt)

    async def mark_forever(self) -> None:
        """Mark whatever is acknowledged, all lanes in one statement; until cancelled."""
        while True:
            await self._marks_wanted.wait()
            self._marks_wanted.clear()
            receipts, self._receipts = self._receipts, []
            if receipts:
                await self._mark(receipts)

    async def _mark(self, receipts: Sequence[Receipt]) -> None:
        pause = _ERROR_PAUSE_FIRST_SECONDS
        unanswered = False
        started = lease_clock()
        while receipts := self._still_held(receipts):
            try:
                if unanswered:
                    done = await self._store.marked_already(receipts)
                    self._marked([receipt for receipt in receipts if (receipt.lane, receipt.sequence) in done])
                    receipts = [receipt for receipt in receipts if (receipt.lane, receipt.sequence) not in done]
                if receipts:
                    held = await self._store.mark(receipts)
                    self._marked([receipt for receipt in receipts if receipt.lane in held])
                    for number, generation in {
                        (receipt.lane, receipt.generation) for receipt in receipts if receipt.lane not in held
                    }:
                        self._ownership.lose(number, generation)
                self._metrics.phase("mark", lease_clock() - started)
                return
            except TransientError as error:
                unanswered = True
                self._metrics.database_error("mark")
                _log.warning("mark_failed", error=str(error), retry_seconds=pause)
                await asyncio.sleep(pause)
                pause = min(pause * 2, _ERROR_PAUSE_MOST_SECONDS)

    def _still_held(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        self._ownership.expire()  # a lane whose receipt is dropped here must be gone, or it would wait for its mark for ever
        held = {lane.number: lane.generation for lane in self._lanes.values()}
        return [receipt for receipt in receipts if held.get(receipt.lane) == receipt.generation]

    def _marked(self, receipts: Sequence[Receipt]) -> None:
        for receipt in receipts:
            lane = self._lanes.get(receipt.lane)
            if lane is not None and lane.generation == receipt.generation:
                lane.unmarked -= 1
                lane.marked_position = receipt.cursor.position
                lane.receipt = receipt
                if lane.releasing and lane.idle:
                    self._ownership.look_now()
        self.changed()

    # -- health --------------------------------------------------------------------------------------------------

    def stuck_seconds(self) -> float:
        """How long a lane could have been polled and was not; 0 when all is as it should be."""
        waiting = not self.draining and any(lane.pollable for lane in self._lanes.values())
        return lease_clock() - self.polled_at if waiting else 0.0

    def stopped(self) -> dict[int, Stopped]:
        """Held lanes that stand still, and why."""
        since = lease_clock() - self._settings.publish_deadline_seconds
        return {lane.number: what for lane in self._lanes.values() if (what := lane.stopped(since)) is not None}


def _age_seconds(created_at: int) -> float:
    """Age of a row by this host's clock: for a histogram only, no decision hangs on it."""
    return time.time() - RecordEncoder.unix_seconds(created_at)
