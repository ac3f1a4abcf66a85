"""The messages of the consumer benchmark, their handlers, and the one domain row that each of them comes to."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from pydantic import BaseModel

from consumer_sdk import Message, MessageContext, MessageHandlers

if TYPE_CHECKING:
    import asyncpg

__all__ = ["INSERT_ORDER", "SCHEMA", "TYPE", "Order", "batched", "one_by_one", "slow"]

TYPE: Final = "order.changed"
#: No constraint of its own tells duplicates, so a message that is handled twice is two rows. Who has no ledger has the inbox.
SCHEMA: Final = """
CREATE TABLE orders (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, event_id text NOT NULL, order_id text NOT NULL, amount integer NOT NULL
);
CREATE TABLE inbox (event_id text PRIMARY KEY)
"""
INSERT_ORDER: Final = "INSERT INTO orders (event_id, order_id, amount) VALUES ($1, $2, $3)"
_INSERT_ORDERS: Final = (
    "INSERT INTO orders (event_id, order_id, amount) SELECT * FROM unnest($1::text[], $2::text[], $3::integer[])"
)
_SLOW_SECONDS: Final = 0.25


class Order(BaseModel):
    """The payload."""

    order_id: str
    amount: int
    note: str


batched = MessageHandlers()
one_by_one = MessageHandlers()
slow = MessageHandlers()


@batched.batch_handler(TYPE, model=Order, step="store")
async def _store_many(messages: Sequence[Message[Order]], connection: "asyncpg.Connection") -> None:
    await connection.execute(
        _INSERT_ORDERS,
        [message.event_id for message in messages],
        [message.value.order_id for message in messages],
        [message.value.amount for message in messages],
    )


@one_by_one.handler(TYPE, model=Order, step="store")
async def _store_one(message: Message[Order], context: MessageContext) -> None:
    async with context.transaction() as connection:
        await connection.execute(INSERT_ORDER, message.event_id, message.value.order_id, message.value.amount)


@slow.handler(TYPE, model=Order, step="wait")
async def _wait(_message: Message[Order], _context: MessageContext) -> None:
    await asyncio.sleep(_SLOW_SECONDS)
