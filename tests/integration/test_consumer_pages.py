"""The first consumers that the pages show, run as they say: their modules, `fencepost consumer run`, the producers."""

import asyncio
import os
import re
import sys
from collections.abc import Iterator
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
def bills(database_url: str, kafka: str, orders: str, tmp_path: Path, watchdog: Watchdog) -> Iterator[ServiceProcess]:
    """README's, by README's command, on a topic of the test's."""
    (tmp_path / "bills.py").write_text(BLOCK.findall(README)[1])
    [command] = re.findall(r"`fencepost (consumer run bills:app [^`]+)`", README)
    port = free_port()
    process = ServiceProcess(
        ["-m", "fencepost", *command.replace("--topics orders", f"--topics {orders}").split()],
        {"database_url": database_url, "kafka_bootstrap_servers": kafka, "consumer_http_port": port},
        http_port=port, log=tmp_path / "consumer.log", watchdog=watchdog, environment={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    yield process
    if process.running:
        process.kill()


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
def billing(database_url: str, kafka: str, orders: str, tmp_path: Path, watchdog: Watchdog) -> Iterator[ServiceProcess]:
    (tmp_path / "billing.py").write_text(BLOCK.findall((GUIDES / "consuming.md").read_text())[0])
    port = free_port()
    process = ServiceProcess(
        ["-m", "fencepost", "consumer", "run", "billing:app"],
        {
            "database_url": database_url, "kafka_bootstrap_servers": kafka, "consumer_topics": orders,
            "consumer_group": orders, "consumer_http_port": port,
        },
        http_port=port, log=tmp_path / "consumer.log", watchdog=watchdog, environment={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    yield process
    if process.running:
        process.kill()


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
