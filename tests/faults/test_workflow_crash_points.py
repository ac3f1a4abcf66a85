"""A worker ends after each write of a workflow with steps, an effect, a chunk, a timer and a continue-as-new; another goes on.

Whatever the point, each iteration is charged once, and the result is that of a worker that never ended.
"""

import base64
import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import pytest

from consumer_sdk import workflow_context
from fencepost.devservices import Services, free_port
from fencepost.devservices.processes import Watchdog
from fencepost.secrets import Secrets
from tests.support.crashing_workflow import CALL, SCHEMA, handlers
from tests.support.run_invariants import violations
from tests.support.service_process import ServiceProcess, Setting
from tests.support.session import SharedServices
from tests.support.waiting import eventually
from tests.support.workflows import Hall, hall_on

pytestmark = pytest.mark.services

ROOT: Final = Path(__file__).resolve().parents[2]
UNTIL_THE_TIMER: Final = (
    "claim", "record_steps", "publish_chunks", "reserve_effect", "send_effect", CALL, "finish_effect", "record_steps",
    "begin_timer", "release",
)  # fmt: skip
AFTER_IT: Final = ("claim", "publish_chunks", "begin_timer")
WRITES: Final = (*UNTIL_THE_TIMER, *AFTER_IT, "continue_run", *UNTIL_THE_TIMER, *AFTER_IT, "complete")
_SECRET: Final = secrets.token_bytes(32)
_PASS: Final = """
UPDATE fencepost.effects SET held_until = held_until - interval '1 hour', deadline_at = deadline_at - interval '1 hour',
    sent_at = sent_at - interval '1 hour' WHERE state IN ('reserved', 'sent')
"""


@pytest.fixture(scope="module")
def hall_url(services: Services, shared_services: SharedServices) -> Iterator[str]:
    url = services.create_database(shared_services.template_url)
    yield url
    services.drop_database(url)


@pytest.fixture
async def hall(hall_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hall]:
    monkeypatch.setenv("FENCEPOST_DATABASE_URL", hall_url)
    monkeypatch.setattr(workflow_context, "_SHORT_SECONDS", 0.0)
    async with hall_on(hall_url) as hall:
        hall.secrets = Secrets({1: _SECRET}, write=[1])
        await hall.connection.execute(SCHEMA)
        yield hall


@pytest.fixture
def start(hall_url: str, tmp_path: Path, watchdog: Watchdog) -> Iterator[Callable[[int], ServiceProcess]]:
    """Starts a worker that ends after so many writes."""
    started: list[ServiceProcess] = []

    def start(nth: int) -> ServiceProcess:
        port = free_port()
        environment = {"PYTHONPATH": str(ROOT), "FENCEPOST_IDEMPOTENCY_SECRETS": f"1:{base64.b64encode(_SECRET).decode()}"}
        settings: dict[str, Setting] = {"database_url": hall_url, "worker_http_port": port, "worker_poll_interval_ms": 30}
        started.append(
            ServiceProcess(
                ("-m", "tests.support.crashing_workflow", str(nth)), settings, http_port=port, log=tmp_path / "worker.log",
                watchdog=watchdog, environment=environment,
            )
        )  # fmt: skip
        return started[-1]

    yield start
    for process in started:
        process.kill()


async def told(hall: Hall, run: UUID) -> tuple[Any, list[int], list[str]]:
    """The result, the periods that were charged, and the states of the lineage's runs."""
    newest = await hall.ended(run)
    charged = await hall.connection.fetch("SELECT period FROM public.charges ORDER BY receipt")
    return json.loads(newest["output"]), [row["period"] for row in charged], [row["state"] for row in await hall.lineage(run)]


async def test_these_are_the_writes_of_the_workflow(hall: Hall, start: Callable[[int], ServiceProcess]) -> None:
    run = await hall.accept(0)
    start(0)
    await told(hall, run)

    async def written() -> tuple[str, ...]:
        return tuple(row["name"] for row in await hall.connection.fetch("SELECT name FROM public.writes ORDER BY id"))

    await eventually(lambda: as_many_as_meant(written), message="every write is noted")
    assert in_order(await written()) == WRITES


def in_order(noted: tuple[str, ...]) -> tuple[str, ...]:
    """A write is numbered after its commit: the claim of what it has made ready may have its number before."""
    names = list(noted)
    for place in range(1, len(names)):
        if names[place - 1] == "claim" and names[place] in {"release", "continue_run"}:
            names[place - 1], names[place] = names[place], names[place - 1]
    return tuple(names)


async def as_many_as_meant(written: Callable[[], Any]) -> bool:
    return len(await written()) >= len(WRITES)


@pytest.mark.parametrize("nth", range(1, len(WRITES) + 1), ids=lambda nth: f"{nth}-{WRITES[nth - 1]}")
async def test_each_iteration_is_charged_once_whatever_the_write_after_which_the_worker_ends(
    hall: Hall, start: Callable[[int], ServiceProcess], nth: int
) -> None:
    run = await hall.accept(0)
    assert await start(nth).wait(60) == -9
    await hall.connection.execute(_PASS)
    await hall.connection.execute(
        "UPDATE fencepost.jobs SET lease_expires_at = clock_timestamp() - interval '1 second' WHERE state = 'leased'"
    )
    await hall.work(handlers)

    assert await told(hall, run) == ({"period": 1, "amount": 20, "receipt": 2}, [0, 1], ["continued", "completed"])
    assert await hall.steps(run) == [(0, "charge", 0), (0, "reckon", 0), (1, "charge", 0), (1, "reckon", 0)]
    assert await violations(hall.connection) == []
