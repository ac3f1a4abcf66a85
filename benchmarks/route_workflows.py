"""What the routes benchmark's server starts and its worker executes."""

import asyncio
import time
from typing import Final

from pydantic import BaseModel

from fencepost.workflows import Workflows

__all__ = ["NAME", "WORKFLOWS", "Done", "Order", "place", "workflows"]

NAME: Final = "place"
#: For ``fencepost worker run``.
WORKFLOWS: Final = "benchmarks.route_workflows:workflows"

workflows = Workflows()


class Order(BaseModel):
    item: str
    quantity: int = 1
    work_seconds: float = 0


class Done(BaseModel):
    item: str
    quantity: int
    worked_seconds: float


@workflows.workflow(NAME)
async def place(_context: object, order: Order) -> Done:
    """Works as long as it is told, and says how long that took."""
    began = time.monotonic()
    if order.work_seconds:
        await asyncio.sleep(order.work_seconds)
    return Done(item=order.item, quantity=order.quantity, worked_seconds=time.monotonic() - began)
