"""Everybody who serves the payments is killed, frozen, cut off: each order is charged once or declined, and ended by one event.

The provider honours no key, so its own book shows every call that got through. A consumer that does without the ledger fails.
"""

import asyncio
import contextlib
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import asyncpg
import pytest

from demo.payments import Shop, create_orders
from demo.payments_audit import PaymentsAudit, audit_payments
from demo.payments_consumer import CHARGE
from demo.payments_evidence import gather_evidence
from demo.payments_faults import CONSUMERS, PaymentsFaults
from demo.payments_services import HANDLERS, PaymentsServices
from demo.payments_state import PaymentsState
from demo.processes import Processes
from demo.relays import Fleet, LaneView
from fencepost.devservices import Services
from tests.support.kafka_proxy import KafkaProxy
from tests.support.tcp_proxy import TcpProxy
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

ROOT: Final = Path(__file__).resolve().parents[2]
CARELESS: Final = "tests.support.careless_payments:app"
ORDERS_A_SECOND: Final = 15.0
OUTAGE_SECONDS: Final = (1.0, 4.0)
END_SECONDS: Final = 60.0
PUBLISH_SECONDS: Final = 20.0

Fault = Callable[[], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Trade:
    """A shop that places orders, and what stands between it and the money."""

    shop: Shop
    state: PaymentsState
    faults: PaymentsFaults
    database: TcpProxy
    broker: KafkaProxy
    audit: Callable[[], Awaitable[PaymentsAudit]]
    chance: random.Random

    @contextlib.asynccontextmanager
    async def placing(self) -> AsyncIterator[None]:
        """The shop is open for as long as the block lasts."""
        closing = asyncio.Event()
        placing = asyncio.create_task(self.shop.run(closing))
        try:
            yield
        finally:
            closing.set()
            await placing

    async def lose_the_broker(self) -> None:
        """Nobody reaches it for a while, relays or consumers."""
        await self.faults.until_calling()
        self.broker.welcoming.clear()
        await self.broker.cut()
        await self._outage("the broker")
        self.broker.welcoming.set()

    async def lose_the_database(self) -> None:
        """Nobody but the shop reaches it for a while."""
        await self.faults.until_calling()
        await self.database.refuse()
        await self._outage("the database")
        await self.database.accept()

    def in_some_order(self) -> Sequence[Fault]:
        faults: list[Fault] = [*self.faults.all, self.lose_the_broker, self.lose_the_database]
        return self.chance.sample(faults, len(faults))

    async def ended(self) -> PaymentsAudit:
        """What it came to: counted when every order has ended, and every end is published or late."""
        await eventually(self.state.ended, END_SECONDS, message="every order has ended, and no charge is open")

        async def told() -> bool:
            return (await self.audit()).completed_once == len(self.shop.placed)

        with contextlib.suppress(AssertionError):
            await eventually(told, PUBLISH_SECONDS)
        return await self.audit()

    async def _outage(self, what: str) -> None:
        seconds = self.chance.uniform(*OUTAGE_SECONDS)
        print(f"{what} is away for {seconds:.1f} s")
        await asyncio.sleep(seconds)


Opened = Callable[[str], "contextlib.AbstractAsyncContextManager[Trade]"]


@pytest.fixture
def opened(services: Services, database_url: str, topic: TopicFactory, tmp_path: Path) -> Opened:
    """Opens a trade with consumers of these handlers."""

    @contextlib.asynccontextmanager
    async def open_trade(handlers: str) -> AsyncIterator[Trade]:
        async with contextlib.AsyncExitStack() as stack:
            brokers = services.bootstrap_servers
            database = await stack.enter_async_context(TcpProxy(database_url))
            broker = await stack.enter_async_context(KafkaProxy(brokers))
            connection, looking = await connected(stack, database_url), await connected(stack, database_url)
            await create_orders(connection)
            seed, ends, requests = secrets.randbits(32), await topic(partitions=6), await topic(partitions=6)
            print(f"seed {seed}")
            processes = stack.enter_context(Processes(tmp_path))
            # In a thread: until they have ended, they speak to the proxies of this loop.
            stack.push_async_callback(asyncio.to_thread, processes.stop_all)
            fleet = Fleet(processes, database_url=database.url, bootstrap_servers=broker.address)
            fleet.start_missing()
            staff = PaymentsServices(
                processes,
                database_url=database.url,
                bootstrap_servers=broker.address,
                requests=requests,
                ends=ends,
                seed=seed,
                handlers=handlers,
                environment={"PYTHONPATH": str(ROOT)},
            )
            staff.start_provider()
            for name in CONSUMERS[:2]:
                staff.start_consumer(name)
            await staff.until_ready(CONSUMERS[:2])
            state, lanes = PaymentsState(looking), LaneView(connection)

            async def audit() -> PaymentsAudit:
                provider = staff.provider
                found = await gather_evidence(connection, provider, operation=CHARGE, bootstrap_servers=brokers, topic=ends)
                return audit_payments(found)

            yield Trade(
                shop=Shop(database_url, requests, rate=ORDERS_A_SECOND, seed=seed),
                state=state,
                faults=PaymentsFaults(processes=processes, fleet=fleet, staff=staff, state=state, lanes=lanes, say=print),
                database=database,
                broker=broker,
                audit=audit,
                chance=random.Random(seed),
            )

    return open_trade


async def connected(stack: contextlib.AsyncExitStack, database_url: str) -> "asyncpg.Connection[Any]":
    connection = await asyncpg.connect(database_url)
    stack.push_async_callback(connection.close)
    return connection


async def test_each_order_is_charged_and_ended_once_whatever_becomes_of_everybody(opened: Opened) -> None:
    """LEDGER-2, 3, 4, 7, 9; CONSUME-2, 4, 20: every fault once, in an order of chance, in the middle of calls."""
    async with opened(HANDLERS) as trade:
        async with trade.placing():
            for fault in trade.in_some_order():
                await fault()

        audit = await trade.ended()

        assert audit.kept, audit
        assert audit.orders == len(trade.shop.placed)
        assert audit.reconciled > 0
        assert (await trade.state.counts()).dead_letters == 0


async def test_a_consumer_without_the_ledger_fails_the_audit(opened: Opened) -> None:
    """What the audit is worth: the provider's moods alone make such a consumer charge twice."""
    async with opened(CARELESS) as trade:

        async def charged_twice() -> bool:
            return (await trade.audit()).charged_twice > 0

        async with trade.placing():
            await eventually(charged_twice, 60, message="an order is charged twice")

        assert not (await trade.audit()).kept
