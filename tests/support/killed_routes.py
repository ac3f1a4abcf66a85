"""An application with durable routes for processes of their own, that tests kill: how far its runs may go, the rows of
``stage.gates`` say, which neither routes nor worker know.

``POST /orders`` waits for one gate, charges once and answers; ``POST /answers`` streams ``WORDS``, each behind its gate.
"""

import asyncio
import os
from typing import Annotated, Any, ClassVar, Final

import asyncpg
from fastapi import FastAPI, Header, Response
from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send

from consumer_sdk import WorkflowContext
from fencepost.retry import Retry
from producer_sdk.http import Durable, Principal, Tx
from producer_sdk.http.headers import KEY_HEADER, field_values

__all__ = ["SCHEMA", "WORDS", "app", "durable"]

WORDS: Final = ("Zwölf ", "Boxkämpfer ", "jagen ", "Viktor ", "quer ", "über ", "den ", "großen ", "Sylter ", "Deich. ", "😀")
SCHEMA: Final = """
CREATE SCHEMA stage;
CREATE TABLE stage.gates (name text PRIMARY KEY);
CREATE TABLE stage.orders (id serial PRIMARY KEY, item text);
CREATE TABLE stage.charges (item text, called text);
GRANT USAGE ON SCHEMA stage TO PUBLIC;
GRANT ALL ON ALL TABLES IN SCHEMA stage TO PUBLIC;
GRANT ALL ON ALL SEQUENCES IN SCHEMA stage TO PUBLIC;
"""
_POLL_SECONDS: Final = 0.02
_SOON: Final = Retry(base_seconds=0.05, cap_seconds=0.05, jitter="none")


class Order(BaseModel):
    item: str


class Receipt(BaseModel):
    item: str
    row: int


class PlacedOrder(BaseModel):
    item: str
    row: int


class Prompt(BaseModel):
    prompt: str


async def current_principal(authorization: Annotated[str, Header()]) -> Principal:
    return Principal("acme", authorization)


durable = Durable(principal=current_principal)
router = durable.router()


@durable.workflow("place_order", retry=_SOON)
async def place_order(context: WorkflowContext, order: PlacedOrder) -> Receipt:
    async def charge() -> None:
        await _execute("INSERT INTO stage.charges VALUES ($1, $2)", order.item, "step")

    await context.step("charge", charge)
    await _opened("order")
    return Receipt(item=order.item, row=order.row)


@durable.workflow("answer", retry=_SOON)
async def answer(context: WorkflowContext, prompt: Prompt) -> str:
    async def write() -> str:
        await _execute("INSERT INTO stage.charges VALUES ($1, $2)", prompt.prompt, "step")
        for number, word in enumerate(WORDS):
            await _opened(str(number))
            await context.publish(word)
        return "".join(WORDS)

    return str(await context.step("write", write))


@router.post("/orders", status_code=201)
@durable.route(place_order, wait_seconds=10)
async def orders(order: Order, tx: Tx) -> PlacedOrder:
    row = await tx.fetchval("INSERT INTO stage.orders (item) VALUES ($1) RETURNING id", order.item)
    return PlacedOrder(item=order.item, row=row)


@router.post("/answers")
@durable.stream(answer)
async def answers(prompt: Prompt) -> Prompt:
    return prompt


class Arrivals:
    """Knows the keys whose requests this process has taken."""

    keys: ClassVar[set[str]] = set()

    def __init__(self, inner: ASGIApp) -> None:
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            Arrivals.keys.update(field_values(scope["headers"], KEY_HEADER))
        await self._inner(scope, receive, send)


app = FastAPI()
app.include_router(router)


@app.get("/readyz", include_in_schema=False)
async def ready() -> Response:
    return Response(status_code=200 if durable.runtime is not None else 503)


@app.get("/arrivals", include_in_schema=False)
async def arrivals() -> int:
    return len(Arrivals.keys)


app.add_middleware(Arrivals)
durable.install(app)


async def _execute(statement: str, *arguments: Any) -> None:
    connection = await asyncpg.connect(os.environ["FENCEPOST_DATABASE_URL"])
    try:
        await connection.execute(statement, *arguments)
    finally:
        await connection.close()


async def _opened(gate: str) -> None:
    connection = await asyncpg.connect(os.environ["FENCEPOST_DATABASE_URL"])
    try:
        while not await connection.fetchval("SELECT count(*) FROM stage.gates WHERE name = $1", gate):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)
    finally:
        connection.terminate()
