"""Books a shipment for each paid order, once: ``fencepost consumer run examples.durable_checkout.shipping:app``."""

from uuid import UUID

from pydantic import BaseModel

from consumer_sdk import Message, MessageContext, MessageHandlers
from examples.durable_checkout.app import ORDER_PAID

__all__ = ["app"]

app = MessageHandlers()


class OrderPaid(BaseModel):
    order: UUID


@app.handler(ORDER_PAID, model=OrderPaid, step="ship")
async def ship(message: Message[OrderPaid], context: MessageContext) -> None:
    async with context.transaction() as connection:
        await connection.execute("INSERT INTO shop.shipments (order_id) VALUES ($1)", message.value.order)
