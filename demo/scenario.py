"""The run itself: two relays settle, writers write, one relay dies without a word, everything must arrive; then the payments."""

import asyncio
import contextlib
import random
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import asyncpg

from demo.audit import Audit, Window, audit, latencies_ms, summary_ms
from demo.consumer import Consumer
from demo.ground import PARTITIONS, database, topics
from demo.orders import OrderService
from demo.payments_audit import PaymentsAudit
from demo.processes import Processes
from demo.relays import LEASE_SECONDS, RELAYS, Fleet, LaneView
from demo.shop_floor import ShopFloor
from demo.view import Progress, View
from fencepost.devservices import Services, ServicesError

__all__ = ["Result", "Scenario"]

_KILL_AT: Final = 0.5
# Left out of the latency: broker, database and relays have all just started, and it falls over these seconds.
_WARM_SECONDS: Final = 3.0
_TICK_SECONDS: Final = 0.2
_SETTLE_SECONDS: Final = 30.0
# The dead relay's lease, and then some for a slow machine.
_DRAIN_SECONDS: Final = LEASE_SECONDS + 30.0
# How long nothing more may arrive before the counting: a duplicate or a ghost would come behind the last event.
_QUIET_SECONDS: Final = 1.5
# What was committed right before the kill may be in the dead relay's hands, and waits for the takeover.
_IN_HAND_SECONDS: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the run came to. Latencies are ``{"p50": ms, "p99": ms}``, of commits in the time that their name says."""

    audit: Audit
    rate_per_second: float
    latency_ms: dict[str, float | None]
    latency_ms_during_takeover: dict[str, float | None]
    payments: PaymentsAudit | None

    @property
    def kept(self) -> bool:
        """Whether every promise was kept."""
        return self.audit.kept and self.payments is not None and self.payments.kept

    def as_json(self) -> dict[str, Any]:
        found = self.audit
        return {
            "committed": found.committed,
            "published": found.published,
            "lost": found.lost,
            "rolled_back_published": found.rolled_back_published,
            "out_of_order": found.out_of_order,
            "duplicates": found.duplicates,
            "rate_per_second": round(self.rate_per_second, 1),
            "latency_ms": self.latency_ms,
            "latency_ms_during_takeover": self.latency_ms_during_takeover,
            **({} if self.payments is None else self.payments.as_json()),
        }


class Scenario:
    """One run on given services, with a database and a topic of its own that are removed afterwards."""

    def __init__(self, services: Services, view: View, *, seconds: float, rate: float, writers: int, logs: Path) -> None:
        self._services = services
        self._view = view
        self._seconds = seconds
        self._rate = rate
        self._writers = writers
        self._logs = logs
        self._topic = f"orders-{uuid.uuid4().hex[:8]}"
        self._progress = Progress()

    async def run(self) -> Result:
        """Run it. Raises ``ServicesError`` when the run itself went wrong; a broken promise is a result."""
        brokers = self._services.bootstrap_servers
        async with database(self._services) as (url, applied), topics(brokers, [self._topic]):
            self._view.say(f"fencepost migrate: {applied} migrations applied; topic {self._topic} with {PARTITIONS} partitions")
            with Processes(self._logs) as processes:
                fleet = Fleet(processes, database_url=url, bootstrap_servers=brokers)
                fleet.start_missing()
                result = await self._deliver(url, fleet)
                # After it: its processes would share the cores with the latencies that were just measured.
                floor = ShopFloor(
                    self._services, self._view, processes=processes, fleet=fleet, database_url=url, seconds=self._seconds
                )
                return replace(result, payments=await floor.run())

    async def _deliver(self, url: str, fleet: Fleet) -> Result:
        """The first half: whether what was committed arrives."""
        service = OrderService(url, self._topic, writers=self._writers, rate=self._rate, seed=random.randrange(1 << 32))
        await service.prepare()
        connection = await asyncpg.connect(url)
        try:
            return await self._perform(service, fleet, LaneView(connection))
        finally:
            connection.terminate()

    async def _perform(self, service: OrderService, fleet: Fleet, lanes: LaneView) -> Result:
        async with Consumer(self._services.bootstrap_servers, self._topic) as consumer:
            await self._until_settled(fleet, lanes)
            watching = asyncio.create_task(self._watch(service, consumer, lanes))
            try:
                return await self._act(service, consumer, fleet, lanes)
            finally:
                watching.cancel()
                await asyncio.wait([watching])

    async def _act(self, service: OrderService, consumer: Consumer, fleet: Fleet, lanes: LaneView) -> Result:
        began = time.time()
        self._view.say(f"{self._writers} writers, a slow one and a bulk one write for {self._seconds:g} s")
        writing = asyncio.create_task(service.run(self._seconds))
        try:
            await asyncio.sleep(self._seconds * _KILL_AT)
            killed_at = await self._kill_one(fleet, lanes)
            taken_over_at = await self._until_taken_over(fleet, lanes)
            await writing
        finally:
            writing.cancel()
            await asyncio.wait([writing])
        self._view.say("the writers are done; waiting until the consumer has read everything")
        await self._until_drained(service, consumer, fleet)
        return self._result(service, consumer, began, Window(killed_at - _IN_HAND_SECONDS, taken_over_at))

    def _result(self, service: OrderService, consumer: Consumer, began: float, takeover: Window) -> Result:
        books, received_at = service.books, consumer.received_at
        ended = max(received_at.values(), default=began)
        warm = min(_WARM_SECONDS, self._seconds / 4)
        found = audit(books.commits, books.rolled_back, consumer.readings)
        return Result(
            audit=found,
            rate_per_second=found.published / max(ended - began, 0.001),
            latency_ms=summary_ms(latencies_ms(books.commits, received_at, Window(began + warm, takeover.begin))),
            latency_ms_during_takeover=summary_ms(latencies_ms(books.commits, received_at, takeover)),
            payments=None,
        )

    # -- steps ---------------------------------------------------------------------------------------------------

    async def _until_settled(self, fleet: Fleet, lanes: LaneView) -> None:
        count = await lanes.count()
        self._view.say(f"two relays start and share {count} lanes, each leased for {LEASE_SECONDS:g} s")
        share = count // len(RELAYS)
        deadline = time.monotonic() + _SETTLE_SECONDS
        while (held := await lanes.held()) != dict.fromkeys(RELAYS, share):
            fleet.check()
            self._must_be_before(deadline, f"the relays did not settle: they hold {held}")
            await asyncio.sleep(_TICK_SECONDS / 2)

    async def _kill_one(self, fleet: Fleet, lanes: LaneView) -> float:
        held = await lanes.held()
        victim = max(RELAYS, key=lambda name: held.get(name, 0))
        fleet.kill(victim)
        killed_at = time.time()
        self._progress.killed = victim
        self._view.say(f"kill -9 {victim}: {held.get(victim, 0)} lanes stand still until their leases end")
        return killed_at

    async def _until_taken_over(self, fleet: Fleet, lanes: LaneView) -> float:
        """The survivor holds every lane. Returns when that was."""
        count = await lanes.count()
        began = time.monotonic()
        deadline = began + LEASE_SECONDS + _SETTLE_SECONDS
        while max((await lanes.held()).values(), default=0) < count:
            fleet.check()
            self._must_be_before(deadline, "the survivor did not take over the dead relay's lanes")
            await asyncio.sleep(_TICK_SECONDS / 4)
        self._view.say(f"the survivor holds all {count} lanes, {time.monotonic() - began:.1f} s after the kill")
        return time.time()

    async def _until_drained(self, service: OrderService, consumer: Consumer, fleet: Fleet) -> None:
        """Everything has come and nothing more comes. What has not come by the deadline counts as lost."""
        wanted = {commit.event for commit in service.books.commits}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                while not (wanted <= consumer.received_at.keys() and await consumer.at_end()):
                    fleet.check()
                    consumer.check()
                    await asyncio.sleep(_TICK_SECONDS / 4)
        await asyncio.sleep(_QUIET_SECONDS)
        consumer.check()

    async def _watch(self, service: OrderService, consumer: Consumer, lanes: LaneView) -> None:
        while True:
            progress = self._progress
            progress.committed, progress.rolled_back = len(service.books.commits), len(service.books.rolled_back)
            progress.published = len(consumer.received_at)
            progress.lanes = dict.fromkeys(RELAYS, 0) | await lanes.held()
            self._view.show(progress)
            await asyncio.sleep(_TICK_SECONDS)

    @staticmethod
    def _must_be_before(deadline: float, what: str) -> None:
        if time.monotonic() > deadline:
            raise ServicesError(f"{what}; try again on a less busy machine")
