"""Durable routes under middlewares that keep or collect answers: found by what they do, and met by failing closed."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from structlog.testing import capture_logs

from fencepost.devservices import Services
from tests.support.emptied import emptied
from tests.support.routes import DOMAIN, Counterpart, Shop, arrived_ago, is_replay, slug
from tests.support.session import SharedServices

NOTHING = {"runs": 0, "jobs": 0, "run_events": 0, "idempotency_keys": 0, "lineages": 0, "orders": 0}


class Collecting:
    """Reads a whole answer before it passes it on, as layers do that sign or compress."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        messages: list[Any] = []

        async def collect(message: Any) -> None:
            messages.append(message)

        await self.app(scope, receive, collect)
        await self.answered(scope, messages)
        for message in messages:
            await send(message)

    async def answered(self, scope: Any, messages: list[Any]) -> None: ...


class Caching(Collecting):
    """Keeps every 2xx by its key, and answers with it for ever: an idempotency layer. An in-flight lock, it has none."""

    def __init__(self, app: Any) -> None:
        super().__init__(app)
        self.kept: dict[Any, list[Any]] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and self.name(scope) in self.kept:
            for message in self.kept[self.name(scope)]:
                await send(message)
            return
        await super().__call__(scope, receive, send)

    async def answered(self, scope: Any, messages: list[Any]) -> None:
        if 200 <= messages[0]["status"] < 300:
            self.kept[self.name(scope)] = messages

    @staticmethod
    def name(scope: Any) -> Any:
        return scope["path"], dict(scope["headers"]).get(b"idempotency-key")


class Refusing:
    """Lets nobody in without a token of its own."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or b"x-token" in dict(scope["headers"]):
            await self.app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 403, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})


class Raising:
    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and "fencepost.probe" in scope:
            raise RuntimeError
        await self.app(scope, receive, send)


@pytest.fixture(scope="module")
def routes_url(services: Services, shared_services: SharedServices) -> Iterator[str]:
    url = services.create_database(shared_services.template_url)
    yield url
    services.drop_database(url)


@pytest.fixture
async def shop(routes_url: str) -> AsyncIterator[Shop]:
    connection = await emptied(routes_url)
    await connection.execute(DOMAIN)
    yield Shop(routes_url, connection)
    await connection.close()


def streaming(shop: Shop) -> Any:
    """POST /stream beside POST /orders."""
    router = shop.durable.router()

    @router.post("/stream/{shop:int}")
    @shop.durable.stream(shop.workflow, name="stream")
    async def stream(shop: int) -> Any:
        raise AssertionError("nothing may be started")

    return router


async def test_under_a_response_cache(shop: Shop) -> None:
    """ROUTE-19, X2, C1, C3, C5, C9, R33: 409 while it is pending, never a 202 that would be kept; the retry gets the result."""
    shop.gate("lamp")
    with capture_logs() as logs:
        async with shop.open(prepare=lambda app: app.add_middleware(Caching), wait_seconds=0.2) as client:
            pending = await client.order()
            assert (slug(pending), pending.status_code, pending.headers["retry-after"]) == ("in-progress", 409, "1")
            assert pending.headers["location"].startswith("/operations/")
            assert slug(await client.order(item="table")) == "idempotency-key-reused"
            shop.gate("lamp").set()
            await shop.ended()
            collected = await client.order()
            assert (collected.status_code, is_replay(collected)) == (201, True)
    assert [line["routes"] for line in logs if line["event"] == "answers_are_cached"] == [["orders"]]
    assert [line["event"] for line in logs].count("answers_are_cached_for_all") == 1
    assert (await shop.stored())["runs"] == 1


async def test_a_cache_takes_half_of_the_time(shop: Shop) -> None:
    """R33: of a deadline of 10 s it counts 5; 2.8 s have passed, and 2 s stay for the answer."""
    shop.gate("lamp")

    def prepare(app: FastAPI) -> None:
        app.add_middleware(Caching)
        arrived_ago(2.8)(app)

    async with shop.open(prepare=prepare, wait_seconds=30, request_deadline_seconds=10) as client:
        async with asyncio.timeout(4):
            assert slug(await client.order()) == "in-progress"
        shop.gate("lamp").set()


@pytest.mark.parametrize("layer", [Caching, Collecting])
async def test_a_stream_under_a_collecting_layer(shop: Shop, layer: Any) -> None:
    """STREAM-18, S37, C9: 500 misconfigured as a plain answer, nothing stored; the start-up says which route."""

    def prepare(app: FastAPI) -> None:
        app.include_router(streaming(shop))
        app.add_middleware(layer)

    with capture_logs() as logs:
        async with shop.open(prepare=prepare) as client:
            answer = await client.order(path="/stream/7")
            assert (slug(answer), answer.status_code) == ("misconfigured", 500)
            assert await shop.stored() == NOTHING
            assert (await client.order()).status_code == 201
    assert [line["routes"] for line in logs if line["event"] == "streams_are_collected"] == [["stream"]]


async def test_harmless_middlewares_are_not_taken_for_caches(shop: Shop) -> None:
    """ROUTE-19: compression, hosts, and a function middleware; pending stays 202."""
    shop.gate("lamp")

    def prepare(app: FastAPI) -> None:
        app.include_router(streaming(shop))
        app.add_middleware(GZipMiddleware, minimum_size=1)
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=["shop", "localhost"])

        @app.middleware("http")
        async def passing(request: Any, call_next: Any) -> Any:
            return await call_next(request)

    async with shop.open(prepare=prepare, wait_seconds=0.2) as client:
        assert (shop.durable.cached, shop.durable.collected) == (frozenset(), frozenset())
        assert (await client.order()).status_code == 202
        shop.gate("lamp").set()
        await shop.ended()
        assert (await client.order()).status_code == 201


@pytest.mark.parametrize(("layer", "event"), [(Refusing, "probe_not_answered"), (Raising, "probe_failed")])
async def test_a_probe_that_does_not_get_through(shop: Shop, layer: Any, event: str) -> None:
    """C9: nothing is known then, which the start-up says, and the application starts."""
    with capture_logs() as logs:
        async with shop.serving(shop.app(prepare=lambda app: app.add_middleware(layer), wait_seconds=0)) as http:
            answer = await Counterpart(http).order(headers={"x-token": "t"})
    assert answer.status_code == 202
    assert [line["route"] for line in logs if line["event"] == event] == ["orders"]


async def test_a_probe_starts_nothing(shop: Shop) -> None:
    """C9: it ends in the route class, before principal, handler and database."""
    async with shop.open():
        assert await shop.stored() == NOTHING
        assert not shop.entered
