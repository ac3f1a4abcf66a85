"""The payments example end to end: a shop, a provider in a bad mood, and whoever serves them killed, frozen and rebalanced."""

import asyncio
import contextlib
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import asyncpg

from demo.ground import topics
from demo.payments import Shop, create_orders
from demo.payments_audit import PaymentsAudit, audit_payments
from demo.payments_consumer import CHARGE
from demo.payments_evidence import gather_evidence
from demo.payments_faults import CONSUMERS, PaymentsFaults
from demo.payments_services import PROVIDER, PaymentsServices
from demo.payments_state import PaymentsState
from demo.processes import Processes
from demo.relays import RELAYS, Fleet, LaneView
from demo.view import PaymentsProgress, View
from fencepost.devservices import Services

__all__ = ["ShopFloor"]

_STAYING: Final = CONSUMERS[:2]
_ORDERS_A_SECOND: Final = 15.0
_CALM_SECONDS: Final = 1.0
_SETTLE_SECONDS: Final = 60.0
_PUBLISH_SECONDS: Final = 20.0
# How long nothing more may come before the counting: a second end of an order would come behind the first.
_QUIET_SECONDS: Final = 1.0
_TICK_SECONDS: Final = 0.25


class ShopFloor:
    """The payments part of a run, on the run's relays. It lasts ``seconds``, and as long as it takes to go through every fault."""

    def __init__(
        self, services: Services, view: View, *, processes: Processes, fleet: Fleet, database_url: str, seconds: float
    ) -> None:
        name, seed = uuid.uuid4().hex[:8], secrets.randbits(32)
        self._requests, self._ends = f"payments-{name}", f"payments-ended-{name}"
        self._bootstrap_servers = services.bootstrap_servers
        self._view = view
        self._processes = processes
        self._fleet = fleet
        self._database_url = database_url
        self._seconds = seconds
        self._shop = Shop(database_url, self._requests, rate=_ORDERS_A_SECOND, seed=seed)
        self._staff = PaymentsServices(
            processes,
            database_url=database_url,
            bootstrap_servers=services.bootstrap_servers,
            requests=self._requests,
            ends=self._ends,
            seed=seed,
        )

    async def run(self) -> PaymentsAudit:
        """Place orders and disturb whoever handles them, wait until all have ended, and audit."""
        async with self._looking() as (connection, state), topics(self._bootstrap_servers, [self._requests, self._ends]):
            await create_orders(connection)
            try:
                await self._open()
                async with self._watched(state):
                    await self._trade(self._faults(state, LaneView(connection)))
                    await self._until_ended(state)
                return await self._audit(connection)
            finally:
                await asyncio.to_thread(self._processes.stop, PROVIDER, *CONSUMERS)

    def _faults(self, state: PaymentsState, lanes: LaneView) -> PaymentsFaults:
        return PaymentsFaults(
            processes=self._processes, fleet=self._fleet, staff=self._staff, state=state, lanes=lanes, say=self._view.say
        )

    async def _open(self) -> None:
        self._fleet.start_missing()
        self._staff.start_provider()
        for name in _STAYING:
            self._staff.start_consumer(name)
        await self._staff.until_ready(_STAYING)

    async def _trade(self, faults: PaymentsFaults) -> None:
        self._view.say(
            f"a shop places {_ORDERS_A_SECOND:g} orders a second; {' and '.join(_STAYING)} charge them at a provider that"
        )
        self._view.say("honours no key, declines, is overloaded, fails before and after it has charged, hangs, hangs up")
        closing, until = asyncio.Event(), time.monotonic() + self._seconds
        placing = asyncio.create_task(self._shop.run(closing))
        try:
            await self._disturb(faults)
            while time.monotonic() < until:
                await self._disturb(faults)
            closing.set()
            await placing
        finally:
            placing.cancel()
            await asyncio.wait([placing])
        self._view.say(f"the shop has placed {len(self._shop.placed)} orders; waiting until each has ended")

    async def _disturb(self, faults: PaymentsFaults) -> None:
        for fault in faults.all:
            await fault()
            await asyncio.sleep(_CALM_SECONDS)

    # -- the end -------------------------------------------------------------------------------------------------

    async def _until_ended(self, state: PaymentsState) -> None:
        """What has not ended by the deadline is told by the audit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_SECONDS):
                while not await state.ended():
                    self._processes.check()
                    await asyncio.sleep(_TICK_SECONDS)

    async def _audit(self, connection: "asyncpg.Connection[asyncpg.Record]") -> PaymentsAudit:
        """Counted again until the relays have published the last end of an order, and once more after a while."""
        deadline = time.monotonic() + _PUBLISH_SECONDS
        found = await self._counted(connection)
        while not found.kept and time.monotonic() < deadline:
            await asyncio.sleep(_TICK_SECONDS)
            found = await self._counted(connection)
        await asyncio.sleep(_QUIET_SECONDS)
        return await self._counted(connection)

    async def _counted(self, connection: "asyncpg.Connection[asyncpg.Record]") -> PaymentsAudit:
        return audit_payments(
            await gather_evidence(
                connection,
                self._staff.provider,
                operation=CHARGE,
                bootstrap_servers=self._bootstrap_servers,
                topic=self._ends,
            )
        )

    # -- what is shown -------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _watched(self, state: PaymentsState) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._watch(state))
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait([watching])
            await self._show(state)

    async def _watch(self, state: PaymentsState) -> None:
        while True:
            await self._show(state)
            await asyncio.sleep(_TICK_SECONDS)

    async def _show(self, state: PaymentsState) -> None:
        names = (*RELAYS, PROVIDER, *CONSUMERS)
        states = {name: self._processes.state(name) for name in names}
        self._view.show_payments(PaymentsProgress(counts=await state.counts(), states=states))

    @asynccontextmanager
    async def _looking(self) -> "AsyncIterator[tuple[asyncpg.Connection[asyncpg.Record], PaymentsState]]":
        connection, looking = await asyncpg.connect(self._database_url), await asyncpg.connect(self._database_url)
        try:
            yield connection, PaymentsState(looking)
        finally:
            connection.terminate()
            looking.terminate()
