"""An application with a durable route whose work charges twice, once in each of two iterations, for processes that tests kill.

The provider is ``stage.charges``, which honours no key: what reaches it twice is charged twice.
"""

import os
from typing import Annotated, Any, Final

import asyncpg
from fastapi import FastAPI, Header, Response
from pydantic import BaseModel

from consumer_sdk import Absent, Applied, CallLimits, Effect, Handlers, WorkflowContext
from fencepost.retry import Retry
from producer_sdk.http import Durable, Principal, Tx

__all__ = ["SCHEMA", "app", "durable", "handlers"]

SCHEMA: Final = """
CREATE SCHEMA stage;
CREATE TABLE stage.orders (id serial PRIMARY KEY, item text);
CREATE TABLE stage.charges (key text, item text, period int, receipt serial);
GRANT USAGE ON SCHEMA stage TO PUBLIC;
GRANT ALL ON ALL TABLES IN SCHEMA stage TO PUBLIC;
GRANT ALL ON ALL SEQUENCES IN SCHEMA stage TO PUBLIC;
"""
_CHARGE: Final = "card.charge"
_LIMITS: Final = CallLimits(timeout_seconds=1, in_flight_seconds=0.001)
_SOON: Final = Retry(base_seconds=0.05, cap_seconds=0.2)


class Order(BaseModel):
    item: str


class Subscription(BaseModel):
    item: str
    row: int
    period: int = 0
    receipts: list[int] = []


async def current_principal(authorization: Annotated[str, Header()]) -> Principal:
    return Principal("acme", authorization)


durable = Durable(principal=current_principal)
router = durable.router()
handlers = Handlers()
handlers.include(durable)


@durable.workflow("subscribe", retry=_SOON, max_attempts=100)
async def subscribe(context: WorkflowContext, subscription: Subscription) -> Subscription:
    async def charge() -> int:
        async def call(effect: Effect) -> int:
            receipt = await _asked(
                "INSERT INTO stage.charges (key, item, period) VALUES ($1, $2, $3) RETURNING receipt",
                effect.key,
                subscription.item,
                subscription.period,
            )
            return int(receipt)

        return await context.once(_CHARGE, request={"item": subscription.item}, call=call, limits=_LIMITS)  # type: ignore[return-value]

    receipts = [*subscription.receipts, await context.step("charge", charge)]
    then = subscription.model_copy(update={"period": subscription.period + 1, "receipts": receipts})
    if subscription.period == 0:
        context.continue_as_new(then)
    return then


@handlers.reconciler(_CHARGE)
async def charge_state(effect: Effect) -> Applied | Absent:
    receipt = await _asked("SELECT receipt FROM stage.charges WHERE key = $1", effect.key)
    return Absent() if receipt is None else Applied(receipt)


@router.post("/subscriptions", status_code=201)
@durable.route(subscribe, wait_seconds=5)
async def subscriptions(order: Order, tx: Tx) -> Subscription:
    row = await tx.fetchval("INSERT INTO stage.orders (item) VALUES ($1) RETURNING id", order.item)
    return Subscription(item=order.item, row=row)


app = FastAPI()
app.include_router(router)


@app.get("/readyz", include_in_schema=False)
async def ready() -> Response:
    return Response(status_code=200 if durable.runtime is not None and durable.runtime.ready.is_set() else 503)


durable.install(app)


async def _asked(query: str, *arguments: object) -> Any:
    connection = await asyncpg.connect(os.environ["FENCEPOST_DATABASE_URL"])
    try:
        return await connection.fetchval(query, *arguments)
    finally:
        await connection.close()
