"""Starts of different keys do not meet, whatever isolation level the database begins transactions with, and whatever a handler sets
for the connection that they share."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import asyncpg
import pytest
from fastapi import FastAPI

from producer_sdk.http import Tx
from tests.support.routes import DOMAIN, OrderIn, PlaceOrder, Shop, bearer

pytestmark = pytest.mark.services

STARTS: Final = 8
MEETING_SECONDS: Final = 20.0


@pytest.fixture
async def shop(database_url: str) -> AsyncIterator[Shop]:
    connection = await asyncpg.connect(database_url)
    await connection.execute(DOMAIN)
    name = await connection.fetchval("SELECT current_database()")
    await connection.execute(f"ALTER DATABASE \"{name}\" SET default_transaction_isolation = 'serializable'")
    yield Shop(database_url, connection)
    await connection.close()


def app_of(shop: Shop, orders: Callable[..., Awaitable[PlaceOrder]]) -> FastAPI:
    router = shop.durable.router()
    router.post("/orders", status_code=201)(shop.durable.route(shop.workflow, wait_seconds=0)(orders))
    app = FastAPI()
    app.include_router(router)
    shop.durable.install(app)
    return app


async def test_starts_of_different_keys_do_not_cancel_each_other_under_a_default_of_serializable(shop: Shop) -> None:
    """All have looked their keys up before the first one writes: PostgreSQL would see them in each other's way."""
    all_here = asyncio.Barrier(STARTS)
    levels: set[str] = set()

    async def orders(order: OrderIn, tx: Tx) -> PlaceOrder:
        levels.add(await tx.fetchval("SHOW transaction_isolation"))
        async with asyncio.timeout(MEETING_SECONDS):
            await all_here.wait()
        return PlaceOrder(user="ada", order=order, row=1)

    async with shop.serving(app_of(shop, orders)) as http:
        sent = [
            http.post("/orders", json={"item": f"book {n}"}, headers=bearer() | {"idempotency-key": f"k-{n}"})
            for n in range(STARTS)
        ]
        answers = await asyncio.gather(*sent)
    assert [answer.status_code for answer in answers] == [202] * STARTS
    assert levels == {"read committed"}
    assert await shop.connection.fetchval("SELECT count(*) FROM fencepost.runs") == STARTS


async def test_what_a_handler_sets_for_the_session_is_not_the_next_one_s(shop: Shop) -> None:
    """Another tenant's search path or role would be the next request's, and Fencepost's own statements would have it as well."""
    own = Shop(shop.database_url, shop.connection, routes_start_connections=1)
    seen: list[object] = []

    async def orders(order: OrderIn, tx: Tx) -> PlaceOrder:
        found = await tx.fetchrow("SELECT pg_backend_pid(), current_user, current_setting('search_path')")
        seen.append(found)
        await tx.execute("SET search_path = pg_temp; SET ROLE pg_monitor; SET LOCAL ROLE NONE")
        return PlaceOrder(user="ada", order=order, row=1)

    async with own.serving(app_of(own, orders)) as http:
        for n in range(2):
            headers = bearer() | {"idempotency-key": f"k-{n}"}
            assert (await http.post("/orders", json={"item": "book"}, headers=headers)).status_code == 202
    assert seen[0] == seen[1]
