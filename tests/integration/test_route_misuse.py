"""A durable route that is put together wrongly says so; one that refuses says nothing but its refusal."""

from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from fastapi import FastAPI, HTTPException

from fencepost.devservices import Services
from fencepost.errors import ConfigurationError
from producer_sdk.http import Tx
from tests.support.emptied import emptied
from tests.support.routes import DOMAIN, Counterpart, OrderIn, PlaceOrder, Shop
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


async def test_a_refusal_leaves_no_warning_of_its_connection(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """An HTTPException is an everyday answer."""

    async def refusing(order: OrderIn, tx: Tx) -> PlaceOrder:
        raise HTTPException(404)

    async with shop.serving(installed(shop, refusing)) as http:
        assert (await Counterpart(http).order()).status_code == 404
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []
