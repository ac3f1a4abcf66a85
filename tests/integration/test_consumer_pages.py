"""The first consumers that the pages show, run as they say: their modules, `fencepost consumer run`, the producers."""

import asyncio
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import asyncpg
import pytest

from fencepost.devservices import free_port
from fencepost.devservices.processes import Watchdog
from tests.support.relay_process import RelayFactory
from tests.support.service_process import ServiceProcess
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

pytestmark = pytest.mark.services

ROOT: Final = Path(__file__).parents[2]
GUIDES: Final = ROOT / "docs" / "guides"
README: Final = (ROOT / "README.md").read_text()
BLOCK: Final = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
#: The example producer, writing to a topic of the test's.
PRODUCE: Final = (
    "import asyncio, os, sys; from examples import producer; producer.TOPIC = sys.argv[1]; "
    "asyncio.run(producer.main(os.environ['FENCEPOST_DATABASE_URL'], 3, 0))"
)


async def python(arguments: list[str], directory: Path, environment: dict[str, str]) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=directory, env=environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, output.decode()
    return output.decode()


@pytest.fixture
async def environment(database_url: str, kafka: str, start_relay: RelayFactory) -> dict[str, str]:
    await start_relay(database_url, kafka).wait_ready()
    given = {"FENCEPOST_DATABASE_URL": database_url, "FENCEPOST_KAFKA_BOOTSTRAP_SERVERS": kafka, "PYTHONPATH": str(ROOT)}
    return os.environ | given


@pytest.fixture
async def orders(topic: TopicFactory) -> str:
    return await topic(partitions=3)


@pytest.fixture
def start(database_url: str, kafka: str, tmp_path: Path, watchdog: Watchdog) -> Iterator[Callable[..., ServiceProcess]]:
    """A page's module as a consumer: its source and its command, and settings beside those of the run's services."""
    started: list[ServiceProcess] = []

    def consumer(module: str, source: str, command: str, **settings: str) -> ServiceProcess:
        (tmp_path / f"{module}.py").write_text(source)
        port = free_port()
        started.append(
            ServiceProcess(
                ["-m", "fencepost", *command.split()],
                {"database_url": database_url, "kafka_bootstrap_servers": kafka, "consumer_http_port": port, **settings},
                http_port=port, log=tmp_path / "consumer.log", watchdog=watchdog, environment={"PYTHONPATH": str(ROOT)},
            )
        )  # fmt: skip
        return started[-1]

    yield consumer
    for process in started:
        if process.running:
            process.kill()


@pytest.fixture
def bills(start: Callable[..., ServiceProcess], orders: str) -> ServiceProcess:
    """README's, by README's command, on a topic of the test's."""
    [command] = re.findall(r"`fencepost (consumer run bills:app [^`]+)`", README)
    return start("bills", BLOCK.findall(README)[1], command.replace("--topics orders", f"--topics {orders}"))


async def test_readme_s_consumer_bills_the_order_of_readme_s_producer(
    bills: ServiceProcess, orders: str, tmp_path: Path, database_url: str, environment: dict[str, str]
) -> None:
    [table] = re.findall(r"`(CREATE TABLE [^`]+)`", README)
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute(table)
        await bills.wait_ready()
        producer = BLOCK.findall(README)[0].replace('topic="orders"', f'topic="{orders}"')
        await python(["-c", producer], tmp_path, environment)

        async def billed() -> bool:
            return [row["order_id"] for row in await connection.fetch("SELECT order_id FROM order_bills")] == ["o-1"]

        await eventually(billed, 30)
    finally:
        await connection.close()


@pytest.fixture
def billing(start: Callable[..., ServiceProcess], orders: str) -> ServiceProcess:
    source = BLOCK.findall((GUIDES / "consuming.md").read_text())[0]
    return start("billing", source, "consumer run billing:app", consumer_topics=orders, consumer_group=orders)


async def test_the_quickstart_bills_each_order_once_and_stops(
    billing: ServiceProcess, orders: str, tmp_path: Path, database_url: str, environment: dict[str, str]
) -> None:
    await python(["billing.py"], tmp_path, environment)
    await billing.wait_ready()
    await python(["-c", PRODUCE, orders], tmp_path, environment)
    connection = await asyncpg.connect(database_url)
    try:

        async def billed() -> bool:
            return sorted(row["order_id"] for row in await connection.fetch("SELECT order_id FROM bills")) == [1, 2, 3]

        await eventually(billed, 30)
    finally:
        await connection.close()

    async def counted() -> bool:
        return (await billing.metrics())['fencepost_consumer_messages_total{outcome="handled",type="order.placed"}'] == 3

    await eventually(counted)
    billing.terminate()
    assert await billing.wait() == 0
    assert billing.log.read_text().count("billed order") == 3
