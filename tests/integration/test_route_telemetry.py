"""What durable routes say of themselves: metrics, spans and logs; and that none of it holds what is a client's."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from structlog.testing import capture_logs

from fencepost.devservices import Services
from tests.support.emptied import emptied
from tests.support.routes import DOMAIN, Counterpart, OutOfStock, Shop, bearer, slug
from tests.support.session import SharedServices

KEY, SCOPE, INPUT, MESSAGE = "key-7f3a", "user-9c1b", "item-2d4e", "message-8a6f"
SECRETS = (KEY, SCOPE, INPUT, MESSAGE)


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


def sample(shop: Shop, name: str, **labels: str) -> float | None:
    return shop.durable.site.metrics.registry.get_sample_value(name, labels)


async def test_logs_and_problems_are_clean(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """SEC-1, SEC-3, R23, R49, L12: success, conflict, failure, refusals and a handler's own error, at the most verbose level."""
    caplog.set_level(logging.DEBUG)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # the test's own client
    shop.failures["bad " + INPUT] = OutOfStock(MESSAGE)
    shop.failures["worse " + INPUT] = KeyError(MESSAGE)
    who = f"acme/{SCOPE}"
    with capture_logs() as logs:
        app = shop.app()
        async with shop.serving(app, raising=False) as http, shop.working():
            client = Counterpart(http)
            answers = [
                await client.order(KEY, INPUT, who=who),
                await client.order(KEY, "other " + INPUT, who=who),
                await client.order(KEY + "-2", "bad " + INPUT, who=who),
                await client.order(KEY + "-3", "worse " + INPUT, who=who),
                await client.order(KEY + "-4", INPUT, who=who, qty=INPUT),
                await client.order(f'"{KEY}', INPUT, who=who),
                await client.order(KEY + "-5", who=who, content=f'{{"{INPUT}": 1, "{INPUT}": 2}}'.encode()),
                await client.http.get(f"/operations/{KEY}", headers=bearer(who)),
            ]
            assert [slug(answer) for answer in answers[1:]] == [
                "idempotency-key-reused", "workflow-failed", "attempts-exhausted", "request-invalid", "idempotency-key-invalid",
                "body-invalid", "not-found",
            ]  # fmt: skip
            await shop.connection.execute("ALTER FUNCTION fencepost.find_key RENAME TO hidden")
            await client.order(KEY, INPUT, who=who)
            await shop.connection.execute("ALTER FUNCTION fencepost.hidden RENAME TO find_key")
    text = "\n".join([*map(str, logs), caplog.text, *(f"{answer.headers}{answer.text}" for answer in answers[1:])])
    assert [secret for secret in SECRETS if secret in text] == []
    assert any(line["event"] == "route_misconfigured" for line in logs)


async def test_metrics_by_route_and_outcome(shop: Shop) -> None:
    """L18"""
    shop.gate("lamp")
    async with shop.open() as client:
        first = asyncio.create_task(client.order())
        await shop.waiting()
        assert sample(shop, "fencepost_route_waiters") == 1
        shop.gate("lamp").set()
        await first
        await client.order()
        await client.order(item="sofa")
        assert sample(shop, "fencepost_route_listening") == 1
    answers = "fencepost_route_answers_total"
    assert sample(shop, answers, route="orders", outcome="result", replayed="false") == 1
    assert sample(shop, answers, route="orders", outcome="result", replayed="true") == 1
    assert sample(shop, answers, route="orders", outcome="idempotency-key-reused", replayed="false") == 1
    assert sample(shop, "fencepost_route_starts_total", route="orders") == 1
    assert sample(shop, "fencepost_route_waiters") == 0
    assert sample(shop, "fencepost_route_seconds_count", route="orders") == 3
    assert (sample(shop, "fencepost_route_read_lineages_count") or 0) >= 1


async def test_the_request_and_its_run_are_one_trace(shop: Shop) -> None:
    """R49, L10: route and outcome on the request's span, and the run carries its traceparent."""
    tracer = TracerProvider().get_tracer("test")
    async with shop.open() as client:
        with tracer.start_as_current_span("POST /orders") as span:
            assert (await client.order()).status_code == 201
    attributes = dict(getattr(span, "attributes", {}))
    assert attributes == {"fencepost.route": "orders", "fencepost.outcome": "result"}
    stored = await shop.connection.fetchval("SELECT traceparent FROM fencepost.runs")
    assert stored.split("-")[1] == trace.format_trace_id(span.get_span_context().trace_id)


async def test_a_mistyped_variable_is_told(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEPOST_ROUTES_MAX_WAITER", "5")
    with capture_logs() as logs:
        async with shop.serving(shop.app()) as http:
            assert isinstance(http, httpx.AsyncClient)
    assert [line["names"] for line in logs if line["event"] == "unknown_variables"] == [["FENCEPOST_ROUTES_MAX_WAITER"]]
