"""A service with one durable route and a bare one, which reads a row by its primary key. It ends at the signal that starts others.

Fencepost's connections are as many as by default, and the application's pool is one of ten.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any, Final

import asyncpg
from fastapi import Depends, FastAPI, Header, HTTPException

from benchmarks.route_workflows import NAME, Done, Order, place
from benchmarks.workers import run_worker
from benchmarks.workers.serving import serve
from fencepost.secrets import Secrets
from producer_sdk.http import Durable, Principal, load_route_settings

_POOL: Final = 10
_WAIT_SECONDS: Final = 240.0
_DEADLINE_SECONDS: Final = 300.0


async def principal(x_user: Annotated[str, Header()]) -> Principal:
    return Principal("bench", x_user)


async def route_server(kafka: str, database_url: str, port: int, secret: str) -> None:
    """Serve until told to end."""
    await serve(partial(application, database_url, secret), port)


def application(database_url: str, secret: str, started: asyncio.Event) -> FastAPI:
    """``POST /shops/{shop}/orders`` is durable, ``POST /bare/{shop}`` is not; models, dependency and status are the same."""
    durable = Durable(
        principal=principal,
        settings=load_route_settings({"database_url": database_url}),
        secrets=Secrets({1: secret.encode()}, write=[1]),
    )
    durable.workflow(NAME)(place)
    router = durable.router()
    pool: asyncpg.Pool[Any]

    @router.post("/shops/{shop}/orders", status_code=201)
    @durable.route(place, wait_seconds=_WAIT_SECONDS, request_deadline_seconds=_DEADLINE_SECONDS, run_id_header=True)
    async def orders(shop: int, order: Order) -> Order:
        return order

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        nonlocal pool
        async with asyncpg.create_pool(database_url, max_size=_POOL, server_settings={"application_name": "application"}) as pool:
            started.set()
            yield

    app = FastAPI(lifespan=lifespan)
    app.include_router(router)

    @app.post("/bare/{shop}", status_code=201)
    async def bare(shop: int, order: Order, who: Annotated[Principal, Depends(principal)]) -> Done:
        row = await pool.fetchrow("SELECT item, quantity, worked_seconds FROM orders WHERE shop = $1", shop)
        if row is None:
            raise HTTPException(404)
        return Done(**row)

    durable.install(app)
    return app


if __name__ == "__main__":
    run_worker(route_server)
