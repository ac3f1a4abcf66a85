"""Orders that are paid for: placed with an event that asks for the charge, ended with an event that says how it went.

Nothing here looks whether an order has ended already. An order that is ended twice has two events to show for it: that it has one
is the consumer's doing alone.
"""

import asyncio
import itertools
import random
import time
import uuid
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import asyncpg
from pydantic import BaseModel, ConfigDict, Field

from producer_sdk import Event
from producer_sdk.asyncpg import enqueue

if TYPE_CHECKING:
    from asyncpg.pool import PoolConnectionProxy

    Connection: TypeAlias = asyncpg.Connection[Any] | PoolConnectionProxy[Any]

__all__ = [
    "CHARGE_REQUESTED", "ORDER_DECLINED", "ORDER_PAID", "ChargeRequested", "Shop", "create_orders", "mark_declined", "mark_paid",
    "place_order",
]  # fmt: skip

CHARGE_REQUESTED: Final = "payments.charge_requested"
ORDER_PAID: Final = "payments.order_paid"
ORDER_DECLINED: Final = "payments.order_declined"

_SCHEMA: Final = """
CREATE TABLE payment_orders (
    order_id         text        PRIMARY KEY,
    customer         text        NOT NULL,
    amount           integer     NOT NULL CHECK (amount > 0),
    state            text        NOT NULL DEFAULT 'placed' CHECK (state IN ('placed', 'paid', 'declined')),
    receipt          text,
    charged_by_token bigint,
    placed_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at         timestamptz,
    CHECK ((state = 'paid') = (receipt IS NOT NULL) AND (state = 'paid') = (charged_by_token IS NOT NULL)),
    CHECK ((state = 'placed') = (ended_at IS NULL))
)
"""
_PLACE: Final = "INSERT INTO payment_orders (order_id, customer, amount) VALUES ($1, $2, $3)"
_PAID: Final = """
UPDATE payment_orders SET state = 'paid', receipt = $2, charged_by_token = $3, ended_at = clock_timestamp() WHERE order_id = $1
"""
_DECLINED: Final = """
UPDATE payment_orders SET state = 'declined', receipt = NULL, charged_by_token = NULL, ended_at = clock_timestamp()
WHERE order_id = $1
"""

_CUSTOMERS: Final = 40
_MOST_AMOUNT: Final = 50_000
_ROLLBACK_SHARE: Final = 0.1


class ChargeRequested(BaseModel):
    """The payload of ``payments.charge_requested``. ``amount`` is in cents."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    order_id: str
    customer: str
    amount: int = Field(gt=0)


async def create_orders(connection: "Connection") -> None:
    """Create the shop's own table."""
    await connection.execute(_SCHEMA)


async def place_order(connection: "Connection", order: ChargeRequested, *, topic: str) -> None:
    """The order's row and the request to charge it, in the caller's transaction. A customer's orders are charged in their order."""
    await connection.execute(_PLACE, order.order_id, order.customer, order.amount)
    await enqueue(connection, Event.json(order.model_dump(), topic=topic, type=CHARGE_REQUESTED, key=order.customer))


async def mark_paid(connection: "Connection", order: ChargeRequested, *, receipt: str, token: int, topic: str) -> None:
    """End the order as paid, and say so. ``token`` is the fencing token that its charge was made under."""
    await connection.execute(_PAID, order.order_id, receipt, token)
    await _tell(connection, order, ORDER_PAID, topic, receipt)


async def mark_declined(connection: "Connection", order: ChargeRequested, *, topic: str) -> None:
    """End the order as declined, and say so."""
    await connection.execute(_DECLINED, order.order_id)
    await _tell(connection, order, ORDER_DECLINED, topic, None)


async def _tell(connection: "Connection", order: ChargeRequested, event_type: str, topic: str, receipt: str | None) -> None:
    said = {"order_id": order.order_id, "amount": order.amount, "receipt": receipt}
    await enqueue(connection, Event.json(said, topic=topic, type=event_type, key=order.customer))


class Shop:
    """Places ``rate`` orders a second, one after the other; a share of the transactions is rolled back."""

    def __init__(self, database_url: str, topic: str, *, rate: float, seed: int) -> None:
        self.placed: list[str] = []
        self.rolled_back: list[str] = []
        self._database_url = database_url
        self._topic = topic
        self._rate = rate
        self._dice = random.Random(seed)

    async def run(self, closing: asyncio.Event) -> None:
        """Place orders until ``closing`` is set. Where the database is slow, it makes up for it. An error ends it."""
        connection = await asyncpg.connect(self._database_url)
        try:
            began = time.monotonic()
            for number in itertools.count():
                await asyncio.sleep(max(0.0, began + number / self._rate - time.monotonic()))
                if closing.is_set():
                    return
                await self.place(connection)
        finally:
            await connection.close()

    async def place(self, connection: "Connection") -> None:
        """Place one order, or roll it back where the dice say so."""
        order = ChargeRequested(
            order_id=f"order-{uuid.uuid4().hex[:12]}",
            customer=f"customer-{self._dice.randrange(_CUSTOMERS):02d}",
            amount=self._dice.randint(1, _MOST_AMOUNT),
        )
        rolls_back = self._dice.random() < _ROLLBACK_SHARE
        transaction = connection.transaction()
        await transaction.start()
        try:
            await place_order(connection, order, topic=self._topic)
        except BaseException:
            await transaction.rollback()
            raise
        await (transaction.rollback() if rolls_back else transaction.commit())
        (self.rolled_back if rolls_back else self.placed).append(order.order_id)
