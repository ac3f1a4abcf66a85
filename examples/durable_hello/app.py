"""The smallest service with durable routes: orders that are placed once, answers that are streamed and resumed."""

from typing import Annotated
from uuid import uuid4

from fastapi import FastAPI, Header, HTTPException
from pydantic import BaseModel

from consumer_sdk import WorkflowContext
from producer_sdk.http import Durable, Principal, WorkflowFailure


class OutOfStock(WorkflowFailure):
    """The shop has none."""


class OrderIn(BaseModel):
    item: str
    quantity: int = 1


class PlaceOrder(BaseModel):
    order: str
    wanted: OrderIn


class Order(BaseModel):
    order: str
    item: str
    quantity: int


class Prompt(BaseModel):
    prompt: str


class Answer(BaseModel):
    answer: str


async def current_user(authorization: Annotated[str, Header()] = "") -> Principal:
    """Who asks. A real service looks at a session or a token here."""
    scheme, _, user = authorization.partition(" ")
    if scheme != "Bearer" or not user:
        raise HTTPException(401)
    return Principal("acme", user)


durable = Durable(principal=current_user)
router = durable.router()


@durable.workflow("place_order", failures={OutOfStock: 422})
async def place_order(context: WorkflowContext, order: PlaceOrder) -> Order:
    if order.wanted.item == "unicorn":
        raise OutOfStock(details={"available": 0})
    if order.wanted.item == "sofa":
        await context.sleep(5)  # it takes a while to find one
    return Order(order=order.order, item=order.wanted.item, quantity=order.wanted.quantity)


@router.post("/orders", status_code=201)
@durable.route(place_order, wait_seconds=2)
async def orders(order: OrderIn) -> PlaceOrder:
    return PlaceOrder(order=f"o-{uuid4().hex[:8]}", wanted=order)  # once per key: a retry does not get here


@durable.workflow("answer")
async def answer(context: WorkflowContext, prompt: Prompt) -> Answer:
    tokens = [prompt.prompt[start : start + 2] for start in range(0, len(prompt.prompt), 2)] + [" ", "world"]
    for token in tokens:
        await context.publish({"token": token})
    return Answer(answer="".join(tokens))


@router.post("/answers")
@durable.stream(answer)
async def answers(prompt: Prompt) -> Prompt:
    return prompt


app = FastAPI()
app.include_router(router)
durable.install(app)
