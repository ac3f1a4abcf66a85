"""Workers are killed and frozen while they charge orders at a provider that hangs up, is late, and answers 500 after it charged.

The provider honours no idempotency key: its book shows every call that got through. The ledger alone keeps it at one an order.
"""

import base64
import random
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import asyncpg
import httpx
import pytest

from fencepost.devservices import free_port
from fencepost.devservices.processes import Watchdog
from tests.support.effect_handlers import PROVIDER_URL, WORKFLOW
from tests.support.runs import Runs
from tests.support.service_process import ServiceProcess
from tests.support.waiting import eventually

ROOT: Final = Path(__file__).resolve().parents[2]
ORDERS: Final = 40
KILLS: Final = 5
ATTEMPTS: Final = 200
SETTINGS: Final = {"lease_seconds": 1.5, "lease_margin_seconds": 0.4, "poll_interval_ms": 100, "concurrency": 8}


@pytest.fixture
async def runs(database_url: str) -> AsyncIterator[Runs]:
    connection = await asyncpg.connect(database_url)
    yield Runs(connection, workflow=WORKFLOW)
    await connection.close()


@pytest.fixture
def provider_url(watchdog: Watchdog) -> Iterator[str]:
    port, seed = free_port(), secrets.randbits(32)
    print(f"provider's seed {seed}")
    arguments = [sys.executable, "-m", "tests.support.provider_process", str(port), str(seed)]
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(arguments, cwd=ROOT, stdin=nothing, stdout=nothing, stderr=nothing)
    try:
        watchdog.guard(process.pid, signal.SIGKILL)
        yield f"http://127.0.0.1:{port}"
        watchdog.release(process.pid)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
async def provider(provider_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """The provider, as a client sees it."""
    async with httpx.AsyncClient(base_url=provider_url) as client:

        async def answers() -> bool:
            try:
                return (await client.get("/book")).is_success
            except httpx.HTTPError:
                return False

        await eventually(answers, 20, message="the provider answers")
        yield client


@pytest.fixture
def start_worker(database_url: str, tmp_path: Path, watchdog: Watchdog) -> Iterator[Callable[[httpx.AsyncClient], ServiceProcess]]:
    """Starts workers; those left at the end are killed."""
    workers: list[ServiceProcess] = []
    secret = f"1:{base64.b64encode(secrets.token_bytes(32)).decode()}"

    def start(provider: httpx.AsyncClient) -> ServiceProcess:
        port = free_port()
        settings = {f"worker_{name}": value for name, value in (SETTINGS | {"http_port": port}).items()}
        environment = {"PYTHONPATH": str(ROOT), PROVIDER_URL: str(provider.base_url), "FENCEPOST_IDEMPOTENCY_SECRETS": secret}
        workers.append(
            ServiceProcess(
                ("-m", "fencepost", "worker", "run", "tests.support.effect_handlers:handlers"),
                {**settings, "database_url": database_url},
                http_port=port, log=tmp_path / f"worker-{len(workers) + 1}.log", watchdog=watchdog, environment=environment,
            )
        )  # fmt: skip
        return workers[-1]

    yield start
    for worker in workers:
        worker.kill()


async def test_each_order_is_charged_once_whatever_becomes_of_the_workers(
    runs: Runs, provider: httpx.AsyncClient, start_worker: Callable[[httpx.AsyncClient], ServiceProcess]
) -> None:
    """LEDGER-2, 3, 4, 7, 9, 12, 13: SIGKILL and SIGSTOP past the lease at random moments; each order is in the book once."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for number in range(ORDERS):
        await runs.accept(data=f'{{"id": "o-{number}"}}'.encode(), max_attempts=ATTEMPTS)
    frozen, working = start_worker(provider), start_worker(provider)
    for kill in range(KILLS):
        if kill == 1:
            await some_sent(runs, chance.randint(1, 3))
            frozen.pause()
        await some_sent(runs, chance.randint(1, 5))
        working.kill()
        working = start_worker(provider)
        await working.wait_ready()
    frozen.resume()
    await ended(runs)

    book = (await provider.get("/book")).json()
    assert book["charges"] == {f"o-{number}": 1 for number in range(ORDERS)}
    assert book["keys"] == ORDERS
    effects = await runs.connection.fetch(
        "SELECT state, count(*) AS effects, max(sends) AS sends FROM fencepost.effects GROUP BY 1"
    )
    assert {row["state"] for row in effects} <= {"succeeded", "applied"}
    assert sum(row["effects"] for row in effects) == ORDERS
    print({row["state"]: (row["effects"], row["sends"]) for row in effects})


async def some_sent(runs: Runs, least: int) -> None:
    """Wait until calls are out: that is when a kill hurts."""

    async def sent() -> bool:
        return int(await runs.connection.fetchval(_OUT)) >= least or await left(runs) == 0

    await eventually(sent, 15, message="calls are out")


_OUT: Final = "SELECT count(*) FROM fencepost.effects WHERE state = 'sent' AND deadline_at > clock_timestamp()"


async def left(runs: Runs) -> int:
    return int(await runs.connection.fetchval("SELECT count(*) FROM fencepost.runs WHERE finished_at IS NULL"))


async def ended(runs: Runs) -> None:
    async def all_ended() -> bool:
        return await left(runs) == 0

    await eventually(all_ended, 30, message="every run has ended")
    states: list[Any] = await runs.connection.fetch("SELECT state, count(*) FROM fencepost.runs GROUP BY 1")
    assert [tuple(row) for row in states] == [("completed", ORDERS)]
