"""An application with durable routes as an author writes it, a worker beside it, and a client that speaks to it in this process.

Workflows wait for barriers that the test opens; the domain's table is written by the accepting handler.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final

import asyncpg
import httpx
from fastapi import APIRouter, FastAPI, Header, HTTPException
from pydantic import BaseModel

from consumer_sdk.handlers import Handlers
from consumer_sdk.worker import Worker
from consumer_sdk.worker_settings import load_worker_settings
from consumer_sdk.workflow_context import WorkflowContext
from fencepost.codec import PLAIN, PayloadCodec
from fencepost.retry import Retry
from fencepost.secrets import Secrets
from producer_sdk.http import Durable, Principal, RouteSettings, Tx, WorkflowFailure, load_route_settings
from tests.support.waiting import eventually

__all__ = [
    "DOMAIN",
    "SECRETS",
    "SOON",
    "Counterpart",
    "Order",
    "OrderIn",
    "OutOfStock",
    "PlaceOrder",
    "Shop",
    "arrived_ago",
    "bearer",
    "current_principal",
    "is_replay",
    "slug",
]

SECRETS: Final = Secrets({1: b"1" * 32}, write=[1])
SOON: Final = Retry(base_seconds=0.05, cap_seconds=0.05, jitter="none")
DOMAIN: Final = """
CREATE SCHEMA IF NOT EXISTS stage;
CREATE TABLE IF NOT EXISTS stage.orders (id serial PRIMARY KEY, item text);
TRUNCATE stage.orders;
"""
END_SECONDS: Final = 10.0


class OutOfStock(WorkflowFailure):
    """Mapped to 422."""


class OrderIn(BaseModel):
    item: str
    qty: int = 1


class PlaceOrder(BaseModel):
    user: str
    order: OrderIn
    row: int


class Order(BaseModel):
    id: int
    item: str


async def current_principal(authorization: Annotated[str, Header()]) -> Principal:
    """``Bearer tenant/user``, as an application's own dependency would say who asks."""
    scheme, _, who = authorization.partition(" ")
    if scheme != "Bearer":
        raise HTTPException(401)
    tenant, _, user = who.partition("/")
    return Principal(tenant, user)


def bearer(who: str = "acme/ada") -> dict[str, str]:
    return {"authorization": f"Bearer {who}"}


class Shop:
    """One application on one database. ``worked`` counts executions of each item; an item with a gate waits for it."""

    def __init__(
        self, database_url: str, connection: "asyncpg.Connection[Any]", *, secrets: Secrets = SECRETS, codec: PayloadCodec = PLAIN,
        **settings: object,
    ) -> None:  # fmt: skip
        self.database_url = database_url
        self.connection = connection
        self.settings: RouteSettings = load_route_settings({"database_url": database_url} | settings)
        self.durable = Durable(principal=current_principal, settings=self.settings, secrets=secrets, codec=codec)
        self.worked: Counter[str] = Counter()
        self.entered: Counter[str] = Counter()
        self.gates: dict[str, asyncio.Event] = {}
        self.failures: dict[str, Exception] = {}
        self.workers: list[tuple[Worker, asyncio.Task[None]]] = []
        self.workflow = self.durable.workflow("place_order", failures={OutOfStock: 422}, retry=SOON)(self._place_order)

    def gate(self, item: str) -> asyncio.Event:
        """Let the work on that item wait until the event is set."""
        return self.gates.setdefault(item, asyncio.Event())

    async def _place_order(self, _context: WorkflowContext, order: PlaceOrder) -> Order:
        item = order.order.item
        self.worked[item] += 1
        if item in self.gates:
            await self.gates[item].wait()
        if item in self.failures:
            raise self.failures[item]
        return Order(id=order.row, item=item)

    def orders(self, **options: Any) -> Any:
        """A handler for POST /orders: it writes a domain row in the accepting transaction."""

        async def orders(order: OrderIn, tx: Tx) -> PlaceOrder:
            self.entered[order.item] += 1
            row = await tx.fetchval("INSERT INTO stage.orders (item) VALUES ($1) RETURNING id", order.item)
            return PlaceOrder(user="ada", order=order, row=row)

        return self.durable.route(self.workflow, **options)(orders)

    def app(self, *, prepare: Callable[[FastAPI], None] = lambda _: None, **options: Any) -> FastAPI:
        """The application with POST /orders; ``options`` are the route's, ``prepare`` adds to it before the installation."""
        router = self.durable.router()
        router.post("/orders", status_code=201)(self.orders(**options))
        app = FastAPI()
        app.include_router(router)
        prepare(app)
        self.durable.install(app)
        return app

    @asynccontextmanager
    async def serving(self, app: FastAPI, *, ready: bool = True, raising: bool = True) -> AsyncIterator[httpx.AsyncClient]:
        """The application started up, and a client of it."""
        transport = httpx.ASGITransport(app, raise_app_exceptions=raising)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://shop", timeout=60) as client,
        ):
            if ready:
                await eventually(lambda: self.durable.runtime is not None and self.durable.runtime.watch.listening)
            yield client

    @asynccontextmanager
    async def working(self, **settings: object) -> AsyncIterator[Worker]:
        """A worker of the application's workflows, in this process."""
        chosen = {"worker_http_port": 0, "worker_poll_interval_ms": 50, "worker_stop_grace_seconds": 1}
        handlers = Handlers()
        handlers.include(self.durable)
        loaded = load_worker_settings(chosen | {"database_url": self.database_url} | settings)
        worker = Worker(handlers, loaded, secrets=SECRETS)
        task = asyncio.create_task(worker.run())
        try:
            await eventually(lambda: task.done() or not worker._problems, message="the worker is ready")
            yield worker
        finally:
            worker.stop()
            async with asyncio.timeout(END_SECONDS):
                await task

    @asynccontextmanager
    async def open(self, *, prepare: Callable[[FastAPI], None] = lambda _: None, **options: Any) -> AsyncIterator["Counterpart"]:
        """Application, worker and client at once."""
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(self.serving(self.app(prepare=prepare, **options)))
            await stack.enter_async_context(self.working())
            yield Counterpart(client)

    async def ended(self, state: str = "completed", runs: int = 1) -> None:
        """Until so many runs have ended like that."""

        async def so_many() -> bool:
            return int(await self.connection.fetchval("SELECT count(*) FROM fencepost.runs WHERE state = $1", state)) >= runs

        await eventually(so_many, message=f"{runs} runs are {state}")

    async def waiting(self, number: int = 1) -> None:
        """Until so many requests wait."""
        runtime = self.durable.runtime
        assert runtime is not None
        await eventually(lambda: runtime.waiters.taken == number, message=f"{number} requests wait")

    async def count(self, table: str) -> int:
        return int(await self.connection.fetchval(f"SELECT count(*) FROM {table}"))

    async def stored(self) -> dict[str, int]:
        """Rows of each table that a start writes."""
        tables = ("runs", "jobs", "run_events", "idempotency_keys", "lineages")
        return {table: await self.count(f"fencepost.{table}") for table in tables} | {"orders": await self.count("stage.orders")}


class Counterpart:
    """A client of POST /orders."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def order(
        self, key: str | None = "k-1", item: str = "lamp", *, who: str = "acme/ada", path: str = "/orders",
        headers: Mapping[str, str] | None = None, content: bytes | None = None, method: str = "POST", **body: Any,
    ) -> httpx.Response:  # fmt: skip
        sent = bearer(who) | ({} if key is None else {"idempotency-key": key}) | dict(headers or {})
        if content is None:
            return await self.http.request(method, path, headers=sent, json={"item": item, **body})
        return await self.http.request(method, path, headers={"content-type": "application/json"} | sent, content=content)


def is_replay(answer: httpx.Response) -> bool:
    """Whether both markers are there; neither may stand alone."""
    markers = {answer.headers.get(name) for name in ("idempotent-replayed", "x-idempotent-replayed")}
    assert markers in ({"true"}, {None}), markers
    return markers == {"true"}


def slug(answer: httpx.Response) -> str:
    """The problem's slug; the shape of every problem is checked on the way."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    body = answer.json()
    found = str(body["type"]).removeprefix("urn:fencepost:durable-route:")
    assert body["code"] == f"fencepost.durable_route.{found.replace('-', '_')}"
    assert body["status"] == answer.status_code
    assert answer.headers["cache-control"] == "no-store"
    assert f'problems#{found}>; rel="help"' in answer.headers["link"]
    return found


def arrived_ago(seconds: float) -> Callable[[FastAPI], None]:
    """Requests that have been on their way for so long when they reach the application's first middleware."""

    class Late:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                scope["fencepost.arrival"] -= seconds
            await self.app(scope, receive, send)

    return lambda app: app.add_middleware(Late)


def with_routes_arrived_ago(router: APIRouter, seconds: float) -> Callable[[FastAPI], None]:
    """The same, of an application with more routes."""

    def prepare(app: FastAPI) -> None:
        app.include_router(router)
        arrived_ago(seconds)(app)

    return prepare
