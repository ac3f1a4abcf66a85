"""Runs the example: ``python -m examples.durable_checkout [--orders N] [--json FILE]``.

Starts PostgreSQL and Kafka from packages, the server, a worker, a relay, a consumer and a provider; walks through the answers of
``POST /orders``; sends many orders, kills worker and server with -9 in the middle, starts them again; and counts.

Exit codes: 0 every answer is right, each paid order was charged once and shipped once; 1 otherwise; 2 the run itself went wrong.
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any, Final

import asyncpg
import httpx

from demo.ground import topics
from demo.provider_client import ProviderClient
from examples.consumer import create_topic
from examples.durable_checkout.app import PROVIDER_PORT, SCHEMA, TOPIC
from examples.durable_checkout.counting import STOCK, Numbers, Result, count
from examples.durable_checkout.crowd import Crowd
from examples.durable_checkout.walk import Walk
from examples.stage import Stage, open_stage, told
from fencepost.devservices import Services, ServicesError, free_port, start_services
from producer_sdk.command import RUNS_TOPIC
from producer_sdk.http.client import AsyncDurableClient, Patience

_APP: Final = "examples.durable_checkout.app:app"
_HANDLERS: Final = "examples.durable_checkout.app:handlers"
_SHIPPING: Final = "examples.durable_checkout.shipping:app"
_CUSTOMER: Final = {"Authorization": "Bearer ada"}
_PATIENCE: Final = Patience(timeout_seconds=90)
_SHIPPED: Final = "SELECT (SELECT count(*) FROM shop.orders WHERE state = 'paid') <= (SELECT count(*) FROM shop.shipments)"


async def run(services: Services, logs: Path, orders: int) -> Result:
    """The story, from its beginning to its numbers."""
    await create_topic(services.bootstrap_servers, RUNS_TOPIC)  # of every run's own events; others may use it as well
    topic, provider_port = f"checkout-{uuid.uuid4().hex[:8]}", free_port()
    variables = {PROVIDER_PORT: str(provider_port), TOPIC: topic}
    async with topics(services.bootstrap_servers, [topic]), open_stage(services, logs, variables=variables) as stage:
        connection = await asyncpg.connect(stage.database_url)
        try:
            await connection.execute(SCHEMA)
            await connection.executemany("INSERT INTO shop.stock VALUES ($1, $2, $3)", STOCK)
            stage.run("provider", "-m", "examples.durable_checkout.provider", str(provider_port), str(logs / "provider.book"))
            stage.relay(services.bootstrap_servers)
            stage.consume(_SHIPPING, services.bootstrap_servers, topic)
            await _open_the_shop(stage)
            return await _tell(stage, connection, ProviderClient(provider_port, timeout_seconds=5), orders)
        finally:
            await connection.close()


async def _tell(stage: Stage, connection: "asyncpg.Connection[Any]", provider: ProviderClient, orders: int) -> Result:
    async with httpx.AsyncClient(base_url=stage.url, headers=_CUSTOMER, timeout=30) as http:
        walk = Walk(http, told)
        await walk.go()
    told(f"Now {orders} orders at once")
    crowd = Crowd(stage, connection, orders)
    async with AsyncDurableClient(base_url=stage.url, headers=_CUSTOMER, patience=_PATIENCE) as client:
        await crowd.go(client, told, lambda: _open_the_shop(stage))

    async def all_are_shipped() -> bool:
        return bool(await connection.fetchval(_SHIPPED))

    await stage.until(all_are_shipped, "every paid order is shipped", seconds=60)
    return Result(
        exchanges=walk.exchanges,
        crowd=orders,
        answered=len({answer.content for answer in crowd.answers if answer.status == 201}),
        open_when_killed=crowd.open_when_killed,
        numbers=await count(connection, await provider.book()),
    )


async def _open_the_shop(stage: Stage) -> None:
    await asyncio.gather(stage.work(_HANDLERS), stage.serve(_APP))


def _show(numbers: Numbers) -> None:
    told(f"\norders {numbers.orders}: paid {numbers.paid}, declined {numbers.declined}, out of stock {numbers.out_of_stock}")
    told(f"  by the provider's own book: charged once {numbers.charged_once}, twice {numbers.charged_twice}, "
          f"for nothing {numbers.charged_for_nothing}")  # fmt: skip
    told(f"  by the consumer: shipped once {numbers.shipped_once}, twice {numbers.shipped_twice}")
    told(f"  stock and orders {'add' if numbers.stock_adds_up else 'do NOT add'} up")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.durable_checkout", description="A checkout on durable routes, with kills."
    )
    parser.add_argument("--orders", type=int, default=24, help="how many are placed at once; default 24")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers and the answers to this file")
    return parser.parse_args()


def main() -> int:
    options = _arguments()
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # the story says itself what went wrong
    told("starting PostgreSQL and Kafka; the first time, Kafka is downloaded\n")
    try:
        with tempfile.TemporaryDirectory(prefix="durable-checkout-") as logs, start_services() as services:
            result = asyncio.run(run(services, Path(logs), options.orders))
    except ServicesError as error:
        print(f"durable_checkout: {error}", file=sys.stderr)
        return 2
    if options.json:
        options.json.write_text(json.dumps(result.as_json(), indent=2) + "\n")
    _show(result.numbers)
    told("\nEvery order was charged once and shipped once." if result.kept else "\nA promise was broken: see above.")
    return 0 if result.kept else 1


if __name__ == "__main__":
    sys.exit(main())
