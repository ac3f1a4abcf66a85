"""A durable route that is put together wrongly says so; one that refuses says nothing but its refusal."""

from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import pytest
import structlog
from fastapi import FastAPI, HTTPException

from fencepost.devservices import Services
from fencepost.errors import ConfigurationError, TransactionRequired
from producer_sdk.http import Tx
from tests.support.emptied import emptied
from tests.support.routes import DOMAIN, Counterpart, OrderIn, PlaceOrder, Shop, slug
from tests.support.session import SharedServices


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


def installed(shop: Shop, handler: Callable[..., object]) -> FastAPI:
    router = shop.durable.router()
    router.post("/orders")(shop.durable.route(shop.workflow, wait_seconds=0)(handler))
    app = FastAPI()
    app.include_router(router)
    shop.durable.install(app)
    return app


def decorated_the_other_way_round(shop: Shop, app: FastAPI) -> None:
    async def orders(order: OrderIn) -> PlaceOrder:
        return PlaceOrder(user="ada", order=order, row=1)

    router = shop.durable.router()
    shop.durable.route(shop.workflow)(router.post("/orders")(orders))
    app.include_router(router)


def on_the_application(shop: Shop, app: FastAPI) -> None:
    app.post("/orders")(shop.orders())


@pytest.mark.parametrize("declare", [decorated_the_other_way_round, on_the_application])
async def test_a_durable_handler_on_an_ordinary_route_ends_the_start_up(
    shop: Shop, declare: Callable[[Shop, FastAPI], None]
) -> None:
    """Its requests would be answered, and nothing would be durable."""
    app = FastAPI()
    declare(shop, app)
    shop.durable.install(app)
    with pytest.raises(ConfigurationError, match="route orders: "):
        async with app.router.lifespan_context(app):
            pass


def never_installed(shop: Shop) -> FastAPI:
    router = shop.durable.router()
    router.post("/orders")(shop.orders())
    app = FastAPI()
    app.include_router(router)
    return app


def mounted(shop: Shop) -> FastAPI:
    outer = FastAPI()
    outer.mount("/", shop.app())
    return outer


@pytest.mark.parametrize("served", [never_installed, mounted])
async def test_routes_whose_start_up_has_never_run_are_unavailable_and_the_log_says_why_once(
    shop: Shop, served: Callable[[Shop], FastAPI]
) -> None:
    with structlog.testing.capture_logs() as logs:
        async with shop.serving(served(shop), ready=False) as http:
            answers = [await Counterpart(http).order() for _ in range(2)]
    assert [(slug(answer), answer.status_code) for answer in answers] == [("unavailable", 503)] * 2
    (told,) = [line for line in logs if line["event"] == "durable_not_installed"]
    assert "durable.install(app)" in told["remedy"]


async def test_an_application_that_has_ended_is_unavailable(shop: Shop) -> None:
    """Another process may be there already: the client comes again."""
    app = shop.app()
    async with shop.serving(app):
        pass
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as http:
        assert slug(await Counterpart(http).order()) == "unavailable"


@pytest.mark.parametrize("script", ["COMMIT", "ROLLBACK", "COMMIT; BEGIN", "ROLLBACK AND CHAIN"])
async def test_a_handler_that_ends_the_accepting_transaction_starts_nothing(shop: Shop, script: str) -> None:
    """JOB-2, L16: the run would be accepted in another one, without the handler's writes, or beside them."""
    ending = [True]

    async def orders(order: OrderIn, tx: Tx) -> PlaceOrder:
        row = await tx.fetchval("INSERT INTO stage.orders (item) VALUES ($1) RETURNING id", order.item)
        if ending[0]:
            await tx.execute(script)
        return PlaceOrder(user="ada", order=order, row=row)

    async with shop.serving(installed(shop, orders)) as http:
        with pytest.raises(TransactionRequired):
            await Counterpart(http).order()
        assert await shop.count("fencepost.runs") == 0
        ending[0] = False
        assert (await Counterpart(http).order()).status_code == 202


async def test_a_refusal_leaves_no_warning_of_its_connection(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """An HTTPException is an everyday answer."""

    async def refusing(order: OrderIn, tx: Tx) -> PlaceOrder:
        raise HTTPException(404)

    async with shop.serving(installed(shop, refusing)) as http:
        assert (await Counterpart(http).order()).status_code == 404
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []
