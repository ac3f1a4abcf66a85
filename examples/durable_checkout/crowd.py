"""The second part of the story: many orders at once, and kill -9 for the worker and the server in the middle of their charges."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import asyncpg

from examples.stage import Stage
from producer_sdk.http.client import AsyncDurableClient, DurableAnswer

__all__ = ["Crowd"]

_ITEM: Final = "lamp"
#: So many charges of these orders are on their way or made when the processes are killed.
_KILL_AT: Final = 8
_OPEN: Final = "SELECT count(*) FROM fencepost.runs WHERE finished_at IS NULL"
_SENT: Final = "SELECT count(*) FROM fencepost.effects WHERE operation = 'card.charge'"


class Crowd:
    """``orders`` clients, each with an order. ``open_when_killed``: how many runs had not ended then."""

    def __init__(self, stage: Stage, connection: "asyncpg.Connection[Any]", orders: int) -> None:
        self.answers: list[DurableAnswer] = []
        self.open_when_killed = 0
        self._stage = stage
        self._connection = connection
        self._orders = orders

    async def go(self, client: AsyncDurableClient, told: Callable[[str], None], restart: Callable[[], Any]) -> None:
        """Place the orders, kill, ``restart``, and collect every answer. The clients send again by themselves."""
        before = await self._connection.fetchval(_SENT)
        sending = [
            asyncio.create_task(client.send("POST", "/orders", key=f"crowd-{number}", json={"item": _ITEM}))
            for number in range(self._orders)
        ]

        async def in_the_middle() -> bool:
            return bool(await self._connection.fetchval(_SENT) >= before + _KILL_AT)

        try:
            await self._stage.until(in_the_middle, "orders are being charged")
            self._stage.kill("worker", "server")
            self.open_when_killed = await self._connection.fetchval(_OPEN)
            told(f"kill -9: worker and server, with {self.open_when_killed} orders accepted and not done")
            await restart()
            told("both are started again; each client sends its request again, under its key")
            self.answers = await asyncio.gather(*sending)
        finally:
            for task in sending:
                task.cancel()
