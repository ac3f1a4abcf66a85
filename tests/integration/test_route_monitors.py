"""Monitors of operations: who may ask, what they are told, and cancellation."""

from collections.abc import AsyncIterator, Iterator
from uuid import uuid4

import httpx
import pytest

from fencepost.devservices import Services
from tests.support.emptied import emptied
from tests.support.routes import DOMAIN, Counterpart, OutOfStock, Shop, bearer, is_replay, slug
from tests.support.session import SharedServices

PASSWORD = "hunter2"


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


async def ask(client: Counterpart, location: str, who: str = "acme/ada") -> httpx.Response:
    return await client.http.get(location, headers=bearer(who))


async def cancel(client: Counterpart, location: str, who: str = "acme/ada") -> httpx.Response:
    return await client.http.post(f"{location}/cancel", headers=bearer(who))


async def test_the_monitor_exists_at_once(shop: Shop) -> None:
    """ROUTE-17, L3, 9.2-7: while it waits, while it runs, and at the end 200 with the route's own bytes."""
    shop.gate("lamp")
    async with shop.serving(shop.app(wait_seconds=0)) as http:
        client = Counterpart(http)
        location = (await client.order()).headers["location"]
        queued = await ask(client, location)
        assert (queued.status_code, queued.json()) == (200, {"state": "pending"})
        async with shop.working():
            await shop_running(shop)
            running = await ask(client, location)
            assert (running.status_code, running.json()) == (200, {"state": "running"})
            assert (running.headers["retry-after"], running.headers["cache-control"]) == ("1", "no-store")
            shop.gate("lamp").set()
            await shop.ended()
        ended, replay = await ask(client, location), await client.order()
    assert (ended.status_code, ended.content) == (200, replay.content)
    assert ended.headers["cache-control"] == "no-store"
    assert is_replay(ended)


async def shop_running(shop: Shop) -> None:
    await shop.ended("running")


async def test_a_failure_on_the_monitor(shop: Shop) -> None:
    """SEC-3, L13: the same problem as the route's, without the message."""
    shop.failures["lamp"] = OutOfStock(PASSWORD, details={"left": 0})
    async with shop.open(wait_seconds=0) as client:
        location = (await client.order()).headers["location"]
        await shop.ended("failed")
        shown, replay = await ask(client, location), await client.order()
    assert (slug(shown), shown.status_code, shown.content) == ("workflow-failed", 422, replay.content)
    assert PASSWORD not in shown.text


@pytest.mark.parametrize("who", ["acme/bob", "zoo/ada", "zoo/bob"])
async def test_anothers_operation_does_not_exist(shop: Shop, who: str) -> None:
    """SEC-4: read and cancel give the answer for a random id; nothing changes."""
    async with shop.serving(shop.app(wait_seconds=0)) as http:
        client = Counterpart(http)
        location = (await client.order()).headers["location"]
        for path in (location, f"/operations/{uuid4()}", "/operations/not-an-id"):
            answers = [await ask(client, path, who), await cancel(client, path, who)]
            assert {(slug(answer), answer.status_code) for answer in answers} == {("not-found", 404)}
            assert len({answer.content for answer in answers}) == 1
        assert (await ask(client, location)).json() == {"state": "pending"}
    assert await shop.connection.fetchval("SELECT state FROM fencepost.runs") == "queued"


async def test_the_run_id_is_no_monitor_id(shop: Shop) -> None:
    """SEC-4"""
    async with shop.open(run_id_header=True) as client:
        run_id = (await client.order()).headers["fencepost-run-id"]
        assert slug(await ask(client, f"/operations/{run_id}")) == "not-found"


async def test_who_is_nobody_is_not_told_anything(shop: Shop) -> None:
    """L3: the application's own dependency refuses."""
    async with shop.open(wait_seconds=0) as client:
        location = (await client.order()).headers["location"]
        assert (await client.http.get(location, headers={"authorization": "Basic x"})).status_code == 401


async def test_a_secret_that_is_known_no_longer(shop: Shop) -> None:
    """L20: whose digest nobody can compare is nobody's."""
    async with shop.serving(shop.app(wait_seconds=0)) as http:
        client = Counterpart(http)
        location = (await client.order()).headers["location"]
        await shop.connection.execute("UPDATE fencepost.lineages SET principal_version = 9")
        assert slug(await ask(client, location)) == "not-found"


async def test_cancelling_what_nobody_works_on(shop: Shop) -> None:
    """R48, T6: it ends at once; asked again it tells the end; and the key's answer is final."""
    async with shop.serving(shop.app(wait_seconds=0)) as http:
        client = Counterpart(http)
        location = (await client.order()).headers["location"]
        first = await cancel(client, location)
        assert (first.status_code, first.json()) == (200, {"state": "cancelled"})
        again, answer = await cancel(client, location), await client.order()
    assert slug(again) == slug(answer) == "cancelled"
    assert "retry-after" not in answer.headers
    assert await shop.connection.fetchval("SELECT actor FROM fencepost.audit WHERE command = 'runs cancel'") == "ada"


async def test_cancelling_what_is_worked_on(shop: Shop) -> None:
    """T6: its worker is told, and the run ends as cancelled."""
    shop.gate("lamp")
    async with shop.open(wait_seconds=0) as client:
        location = (await client.order()).headers["location"]
        await shop.ended("running")
        asked = await cancel(client, location)
        assert (asked.status_code, asked.json()) == (202, {"state": "cancelling"})
        await shop.ended("cancelled")
        assert slug(await client.order()) == "cancelled"


async def test_cancelling_what_has_ended(shop: Shop) -> None:
    """The end stands, and is told."""
    async with shop.open() as client:
        first = await client.order()
        location = f"/operations/{await shop.connection.fetchval('SELECT monitor_id FROM fencepost.lineages')}"
        told = await cancel(client, location)
    assert (told.status_code, told.content) == (200, first.content)


async def test_a_prefix_and_a_root_path(shop: Shop) -> None:
    """ROUTE-17: Location leads to the monitor wherever the application is served."""
    shop.durable.site = type(shop.durable.site)(prefix="/durable", metrics=shop.durable.site.metrics)
    app = shop.app(wait_seconds=0)
    async with shop.serving(app) as _:
        transport = httpx.ASGITransport(app, root_path="/shop")
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as http:
            client = Counterpart(http)
            location = (await client.order(path="/shop/orders")).headers["location"]
            assert location.startswith("/shop/durable/operations/")
            assert (await ask(client, location)).json() == {"state": "pending"}
            missing = await client.order(None, path="/shop/orders")
            assert "</shop/durable/problems#" in missing.headers["link"]
            page = await http.get("/shop/durable/problems")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/markdown; charset=utf-8")
    assert "idempotency-key-missing" in page.text


async def test_a_monitor_without_a_database(shop: Shop) -> None:
    """ROUTE-32: 503 with Retry-After."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(shop.app()), base_url="http://shop") as http:
        answer = await ask(Counterpart(http), f"/operations/{uuid4()}")
    assert (slug(answer), answer.headers["retry-after"]) == ("unavailable", "1")
