"""The service: ``POST /orders`` reserves stock, charges a card once and tells the world, whatever is killed on the way.

    uvicorn examples.durable_checkout.app:app
    fencepost worker run examples.durable_checkout.app:handlers

The handler runs once per Idempotency-Key, in the transaction that starts the run: the reservation is there with the run, or neither
is. The worker charges through the ledger of effects. The order's end, its event and the run's result are one commit.
"""

import os
from typing import Annotated, Any, Final, cast
from uuid import UUID, uuid4

from fastapi import Depends, FastAPI, Header, HTTPException
from pydantic import BaseModel, Field

from consumer_sdk import Absent, Applied, CallLimits, Effect, EffectFailed, Handlers, WorkflowContext
from demo.provider_client import ProviderClient
from producer_sdk import Event
from producer_sdk.asyncpg import enqueue
from producer_sdk.http import Durable, Principal, Retry, Tx, WorkflowFailure

__all__ = ["CHARGE", "ORDER_PAID", "PROVIDER_PORT", "SCHEMA", "TOPIC", "app", "durable", "handlers"]

#: The ledger's name of the effect.
CHARGE: Final = "card.charge"
ORDER_PAID: Final = "order.paid"
#: Environment: the provider's port, and the topic of the orders' events.
PROVIDER_PORT: Final = "CHECKOUT_PROVIDER_PORT"
TOPIC: Final = "CHECKOUT_TOPIC"

SCHEMA: Final = """
CREATE SCHEMA shop;
CREATE TABLE shop.stock (item text PRIMARY KEY, cents integer NOT NULL, available integer NOT NULL CHECK (available >= 0));
CREATE TABLE shop.orders (
    id       uuid    PRIMARY KEY,
    customer text    NOT NULL,
    item     text    NOT NULL REFERENCES shop.stock,
    quantity integer NOT NULL,
    state    text    NOT NULL CHECK (state IN ('reserved', 'out_of_stock', 'paid', 'declined')),
    receipt  text
);
-- No unique constraint: that each order is shipped once is the consumer's doing alone.
CREATE TABLE shop.shipments (order_id uuid NOT NULL REFERENCES shop.orders);
"""
_STOCK: Final = "SELECT cents, available FROM shop.stock WHERE item = $1 FOR UPDATE"
_TAKE: Final = "UPDATE shop.stock SET available = available - $2 WHERE item = $1"
_PLACE: Final = "INSERT INTO shop.orders (id, customer, item, quantity, state) VALUES ($1, $2, $3, $4, $5)"
_PAID: Final = "UPDATE shop.orders SET state = 'paid', receipt = $2 WHERE id = $1"
_DECLINED: Final = "UPDATE shop.orders SET state = 'declined' WHERE id = $1 AND state = 'reserved' RETURNING true"
_GIVE_BACK: Final = "UPDATE shop.stock SET available = available + $2 WHERE item = $1"

#: The provider charges nothing that reaches it later than its client waits; the second on top is for two clocks.
_LIMITS: Final = CallLimits(timeout_seconds=2.0, in_flight_seconds=1.0)
_REFUSED_CARD: Final = "http_402"
_RETRY: Final = Retry(base_seconds=0.2, cap_seconds=5.0)


class OutOfStock(WorkflowFailure):
    """There is less than the order wants."""


class CardDeclined(WorkflowFailure):
    """The provider refuses the card for good."""


class OrderIn(BaseModel):
    item: str
    quantity: int = Field(1, ge=1, le=100)


class PlaceOrder(BaseModel):
    """What the workflow is told. ``available``: how many there were."""

    order: UUID
    wanted: OrderIn
    cents: int
    available: int


class Order(BaseModel):
    order: UUID
    item: str
    quantity: int
    cents: int
    receipt: str


async def current_customer(authorization: Annotated[str, Header()]) -> Principal:
    """Who asks. A real shop looks at a session or a token here."""
    scheme, _, customer = authorization.partition(" ")
    if scheme != "Bearer" or not customer:
        raise HTTPException(401)
    return Principal("shop", customer)


durable = Durable(principal=current_customer)
router = durable.router()


@durable.workflow("place_order", failures={OutOfStock: 422, CardDeclined: 402}, retry=_RETRY, max_attempts=20)
async def place_order(context: WorkflowContext, order: PlaceOrder) -> Order:
    if order.available < order.wanted.quantity:
        raise OutOfStock(details={"available": order.available})

    async def charge(effect: Effect) -> Applied:
        return await _provider().charge(effect, order=str(order.order), amount=order.cents)

    try:
        charged = await context.once(CHARGE, request=order.model_dump(mode="json"), call=charge, limits=_LIMITS)
    except EffectFailed as error:
        if error.code != _REFUSED_CARD:
            raise
        await _give_back(context, order)
        raise CardDeclined from None
    return await _finish(context, order, receipt=cast(dict[str, Any], charged)["charge"])


@router.post("/orders", status_code=201)
@durable.route(place_order, wait_seconds=10)
async def orders(order: OrderIn, customer: Annotated[Principal, Depends(current_customer)], tx: Tx) -> PlaceOrder:
    """Place an order. Whatever takes longer than the wait is answered 202, and the same request again collects it."""
    stock = await tx.fetchrow(_STOCK, order.item)
    if stock is None:
        raise HTTPException(404, "no such item")  # nothing is written, and the key is free
    order_id, cents, available = uuid4(), stock["cents"] * order.quantity, stock["available"]
    enough = available >= order.quantity
    if enough:
        await tx.execute(_TAKE, order.item, order.quantity)
    await tx.execute(_PLACE, order_id, customer.id, order.item, order.quantity, "reserved" if enough else "out_of_stock")
    return PlaceOrder(order=order_id, wanted=order, cents=cents, available=available)


async def _finish(context: WorkflowContext, order: PlaceOrder, *, receipt: str) -> Order:
    """The order's row, its event and the run's result, in one commit."""
    done = Order(order=order.order, item=order.wanted.item, quantity=order.wanted.quantity, cents=order.cents, receipt=receipt)
    event = Event.json({"order": str(order.order)}, topic=os.environ[TOPIC], type=ORDER_PAID, key=str(order.order))
    async with context.transaction() as connection:
        await connection.execute(_PAID, order.order, receipt)
        await enqueue(connection, event)
        await context.complete(done)
    return done


async def _give_back(context: WorkflowContext, order: PlaceOrder) -> None:
    """End the reservation. An attempt that comes after one which was killed right behind this finds it ended."""
    async with context.transaction() as connection:
        if await connection.fetchval(_DECLINED, order.order):
            await connection.execute(_GIVE_BACK, order.wanted.item, order.wanted.quantity)


def _provider() -> ProviderClient:
    return ProviderClient(int(os.environ[PROVIDER_PORT]), timeout_seconds=_LIMITS.timeout_seconds)


handlers = Handlers()
handlers.include(durable)


@handlers.reconciler(CHARGE)
async def charge_state(effect: Effect) -> Applied | Absent | None:
    """Asked where a charge was sent and its answer got lost."""
    return await _provider().charge_state(effect)


app = FastAPI(title="Checkout")
app.include_router(router)
durable.install(app)
