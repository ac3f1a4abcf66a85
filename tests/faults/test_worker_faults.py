"""Workers as processes, and what happens to them: kills, freezes, signals, a database that goes away, handlers that don't end.

Handlers play the scripts of tests/support/worker_handlers.py: they wait at gates, and the tests read what they noted.
"""

import random
import re
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from json import dumps
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import asyncpg
import httpx
import pytest

from fencepost.devservices import Services
from fencepost.devservices.processes import Watchdog
from tests.support.emptied import emptied
from tests.support.runs import Runs
from tests.support.service_process import Setting
from tests.support.session import SharedServices
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import eventually
from tests.support.worker_handlers import Stage
from tests.support.worker_process import HANDLERS, WorkerFactory, WorkerProcess

SCRIPT: Final = "script"
#: A lease that a test can wait out.
SHORT: Final[dict[str, Setting]] = {"lease_seconds": 1, "lease_margin_seconds": 0.3, "poll_interval_ms": 100}
#: A lease that no test waits out: whatever needs its end fails.
LONG: Final[dict[str, Setting]] = {"lease_seconds": 120, "lease_margin_seconds": 3, "poll_interval_ms": 100}
IDLE_LOOKS: Final = 10
CLI_SECONDS: Final = 30
WAITS: Final = """
SELECT count(*) FROM pg_locks
WHERE locktype = 'advisory' AND NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
HANG_UP: Final = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE application_name = 'fencepost-listen' AND datname = current_database()
"""

Steps = list[list[Any]]


class Theatre(Stage):
    """Runs with scripts, and the stage on which handlers play them."""

    def __init__(self, connection: "asyncpg.Connection[Any]") -> None:
        super().__init__(connection)
        self.runs = Runs(connection, workflow=SCRIPT)

    async def accept(self, attempts: dict[str, Steps], **options: Any) -> UUID:
        return await self.runs.accept(data=dumps(attempts).encode(), **options)

    async def noted(self, note: str, run_id: UUID | None = None, times: int = 1) -> None:
        """Wait until the handlers have noted it so often."""

        async def found() -> bool:
            return (await self.notes(run_id)).count(note) >= times

        await eventually(found, 20, message=f"a handler notes {note!r}")

    async def reaches(self, run_id: UUID, state: str) -> None:
        async def reached() -> bool:
            return (await self.runs.state(run_id))[0] == state

        await eventually(reached, 20, message=f"the run is {state}")

    async def outcomes(self, run_id: UUID) -> list[str | None]:
        return [attempt["outcome"] for attempt in await self.runs.attempts(run_id)]

    async def ends(self, run_id: UUID) -> list[str]:
        """The terminal events: never more than one."""
        return [kind for _, kind in await self.runs.events(run_id) if kind in {"run_completed", "run_failed", "run_cancelled"}]

    async def job(self, run_id: UUID) -> dict[str, Any]:
        row = await self.connection.fetchrow("SELECT * FROM fencepost.jobs WHERE run_id = $1", run_id)
        assert row is not None
        return dict(row)


@pytest.fixture(scope="module")
def theatre_url(services: Services, shared_services: SharedServices) -> Iterator[str]:
    """The module's database."""
    url = services.create_database(shared_services.template_url)
    yield url
    services.drop_database(url)


@pytest.fixture
async def theatre(theatre_url: str) -> AsyncIterator[Theatre]:
    connection = await emptied(theatre_url)
    theatre = Theatre(connection)
    await theatre.build()
    yield theatre
    await connection.close()


@pytest.fixture
def start_worker(tmp_path: Path, watchdog: Watchdog) -> Iterator[WorkerFactory]:
    """Starts workers; those left at the end are killed."""
    workers: list[WorkerProcess] = []

    def start(database_url: str, *, stage_url: str | None = None, handlers: str = HANDLERS, **settings: Setting) -> WorkerProcess:
        log = tmp_path / f"worker-{len(workers) + 1}.log"
        workers.append(
            WorkerProcess(
                database_url, stage_url=stage_url or database_url, handlers=handlers, log=log, watchdog=watchdog, **settings
            )
        )
        return workers[-1]

    yield start
    for worker in workers:
        worker.kill()


async def metric(worker: WorkerProcess, name: str) -> float:
    return (await worker.metrics()).get(name, 0.0)


# -- crashes and freezes -------------------------------------------------------------------------------------------------


async def test_a_run_whose_every_worker_is_killed_is_dead_after_its_last_attempt(
    theatre_url: str, theatre: Theatre, start_worker: WorkerFactory
) -> None:
    """JOB-10."""
    run = await theatre.accept({"*": [["wait", "never"]]}, max_attempts=3)
    for attempt in (1, 2, 3):
        worker = start_worker(theatre_url, **LONG)
        await theatre.noted("waits for never", run, times=attempt)
        worker.kill()
        await theatre.runs.expire_lease(run)
    start_worker(theatre_url, **SHORT)
    await theatre.reaches(run, "failed")

    job = await theatre.job(run)
    assert (job["attempts"], job["lease_generation"], job["dead_reason"]) == (3, 3, "attempts_exhausted")
    assert await theatre.outcomes(run) == ["lost"] * 3
    assert await theatre.ends(run) == ["run_failed"]
    code = await theatre.connection.fetchval("SELECT error_code FROM fencepost.runs WHERE run_id = $1", run)
    assert code == "lease_expired"
    assert len(await theatre.notes(run)) == 3


async def test_a_worker_killed_anywhere_leaves_no_half_of_a_completion(
    theatre_url: str, theatre: Theatre, start_worker: WorkerFactory
) -> None:
    """JOB-18: run, job and event agree after each kill, and recovery ends every run once."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    runs = [
        await theatre.accept(
            {"*": [["event", "began"], ["effect"]] if number % 2 else [["save", 1], ["return", number]]}, max_attempts=50
        )
        for number in range(150)
    ]
    for kill in range(3):
        worker = start_worker(theatre_url, concurrency=20, **LONG)
        target = len(runs) * (kill + chance.random()) / 4

        async def some_completed(least: float = target) -> bool:
            return bool(
                await theatre.connection.fetchval("SELECT count(*) FROM fencepost.jobs WHERE finished_at IS NOT NULL") > least
            )

        await eventually(some_completed, 20, message="some runs are completed")
        worker.kill()
        assert await halves(theatre) == []
        await theatre.connection.execute(
            "UPDATE fencepost.jobs SET lease_expires_at = clock_timestamp() - interval '1 s' WHERE state = 'leased'"
        )
    start_worker(theatre_url, concurrency=20, **LONG)

    async def all_ended() -> bool:
        return bool(await theatre.connection.fetchval("SELECT count(*) FROM fencepost.jobs WHERE state <> 'completed'") == 0)

    await eventually(all_ended, 30, message="all runs are completed")
    assert await halves(theatre) == []
    doubled = await theatre.connection.fetch("SELECT run_id FROM stage.effects GROUP BY run_id HAVING count(*) > 1")
    assert doubled == []
    assert await theatre.connection.fetchval("SELECT count(*) FROM stage.effects") == len(runs) // 2


async def halves(theatre: Theatre) -> list[UUID]:
    """Runs whose state, job and events disagree."""
    rows = await theatre.connection.fetch(
        "SELECT r.run_id FROM fencepost.runs AS r JOIN fencepost.jobs AS j USING (run_id, tenant_id) CROSS JOIN LATERAL ("
        "  SELECT count(*) FILTER (WHERE e.type = 'run_completed') AS completions, count(*) AS events, max(e.sequence) AS last,"
        "         (SELECT count(*) FROM fencepost.outbox AS o WHERE o.run_id = r.run_id::text) AS records"
        "  FROM fencepost.run_events AS e WHERE e.run_id = r.run_id) AS e "
        "WHERE NOT ((r.state = 'completed') = (j.state = 'completed') AND e.completions = (r.state = 'completed')::integer"
        "           AND e.events = e.last AND e.last = r.event_sequence AND e.records = e.events)"
    )
    return [row["run_id"] for row in rows]


async def test_a_frozen_worker_that_wakes_up_after_its_lease_changes_nothing(
    theatre_url: str, theatre: Theatre, start_worker: WorkerFactory
) -> None:
    """J57: pause past expiry, another takes over, the old generation appends no effect."""
    steps: Steps = [["wait", "gate"], ["event", "late"], ["effect"]]
    tries: Steps = [["wait", "gate"], ["return", "stale"]]
    writes = await theatre.accept({"1": steps, "2": [["effect"]]})
    returns = await theatre.accept({"1": tries, "2": [["return", "fresh"]]})
    frozen = start_worker(theatre_url, **LONG)
    await theatre.noted("waits for gate", times=2)
    frozen.pause()
    for run in (writes, returns):
        await theatre.runs.expire_lease(run)
    start_worker(theatre_url, **LONG)
    for run in (writes, returns):
        await theatre.reaches(run, "completed")
    await theatre.open("gate")
    frozen.resume()

    async def both_lost() -> bool:
        found = await frozen.metrics()
        return (found.get("fencepost_leases_lost_total"), found["fencepost_active_attempts"]) == (2, 0)

    await eventually(both_lost, message="the woken worker knows that it lost")
    for run in (writes, returns):
        assert await theatre.runs.events(run) == [(1, "run_queued"), (2, "run_completed")]
        assert await theatre.outcomes(run) == ["lost", "completed"]
    assert await theatre.effects(writes) == [2]
    output = await theatre.connection.fetchval("SELECT output FROM fencepost.runs WHERE run_id = $1", returns)
    assert output == b'"fresh"'
    assert frozen.running


async def test_an_attempt_that_goes_on_after_its_limit_changes_nothing(
    theatre_url: str, theatre: Theatre, start_worker: WorkerFactory
) -> None:
    """JOB-16: the limit ended the attempt, its step went on, and the result is the next attempt's."""
    run = await theatre.runs.accept(
        workflow="limited",
        data=dumps({"1": [["ignore", "late"], ["effect"]], "2": [["effect"], ["return", "second"]]}).encode(),
    )
    worker = start_worker(theatre_url, cancel_grace_seconds=0, **SHORT)
    await theatre.reaches(run, "completed")
    await theatre.open("late")
    await theatre.noted("saw late", run)

    async def lost() -> bool:
        return await metric(worker, "fencepost_leases_lost_total") == 1

    await eventually(lost, message="the first attempt is lost")
    assert await theatre.effects(run) == [2]
    assert await theatre.ends(run) == ["run_completed"]
    assert await theatre.outcomes(run) == ["lost", "completed"]


async def test_a_handler_that_blocks_the_loop_longer_than_its_lease_loses_it(
    theatre_url: str, theatre: Theatre, start_worker: WorkerFactory
) -> None:
    run = await theatre.accept({"1": [["block", 1.5], ["effect"]], "*": [["effect"]]})
    worker = start_worker(theatre_url, **SHORT)
    await theatre.reaches(run, "completed")

    assert await theatre.effects(run) == [2]
    assert await theatre.outcomes(run) == ["lost", "completed"]
    assert worker.running


# -- a database that goes away ---------------------------------------------------------------------------------------------


class VanishingProxy(TcpProxy):
    """A database that goes away: what is connected hears nothing more, who connects is refused."""

    def vanish(self) -> None:
        self.silence()
        self._server.close()


async def test_without_the_database_a_handler_ends_before_its_lease_does(
    theatre_url: str, theatre: Theatre, start_worker: WorkerFactory
) -> None:
    """JOB-34: by the worker's own clock, and nothing is written after that."""
    async with VanishingProxy(theatre_url) as proxy:
        run = await theatre.accept({"1": [["wait", "gate"], ["effect"]], "*": [["effect"]]})
        worker = start_worker(proxy.url, stage_url=theatre_url, lease_seconds=3, lease_margin_seconds=1, poll_interval_ms=100)
        await theatre.noted("waits for gate", run)
        proxy.vanish()
        await theatre.noted("cancelled", run)
        job = await theatre.job(run)
        left = await theatre.connection.fetchval("SELECT $1::timestamptz > clock_timestamp()", job["lease_expires_at"])
        assert left, "the handler was cancelled only after its lease"
        assert (job["state"], job["lease_generation"]) == ("leased", 1)
        await theatre.open("gate")
        await theatre.runs.expire_lease(run)
        start_worker(theatre_url, **LONG)
        await theatre.reaches(run, "completed")
        assert await metric(worker, "fencepost_leases_lost_total") == 1

    assert worker.running
    assert await theatre.effects(run) == [2]
    assert await theatre.outcomes(run) == ["lost", "completed"]


async def test_a_short_outage_is_ridden_out_and_the_completion_is_written_once(
    theatre_url: str, theatre: Theatre, start_worker: WorkerFactory
) -> None:
    """JOB-34: inside of the lease nothing is lost."""
    async with TcpProxy(theatre_url) as proxy:
        run = await theatre.accept({"1": [["wait", "gate"], ["return", 7]]})
        worker = start_worker(
            proxy.url, stage_url=theatre_url, lease_seconds=9, lease_margin_seconds=1, poll_interval_ms=100, wakeup="poll"
        )
        await theatre.noted("waits for gate", run)
        proxy.silence()
        await theatre.open("gate")
        await theatre.reaches(run, "completed")

        assert await metric(worker, 'fencepost_attempts_total{outcome="completed",workflow="script"}') == 1
        assert await metric(worker, 'fencepost_worker_database_errors_total{statement="complete"}') >= 1
    assert await theatre.outcomes(run) == ["completed"]
    assert await theatre.ends(run) == ["run_completed"]


async def test_a_completion_whose_answer_was_lost_is_completed_once(
    theatre_url: str, theatre: Theatre, start_worker: WorkerFactory
) -> None:
    """J43 of the worker itself: the row lock lets the statement begin, the cut takes its answer away, the repetition finds out."""
    async with TcpProxy(theatre_url) as proxy:
        run = await theatre.accept({"1": [["wait", "gate"], ["return", 7]]})
        worker = start_worker(
            proxy.url, stage_url=theatre_url, lease_seconds=9, lease_margin_seconds=1, poll_interval_ms=100, wakeup="poll"
        )
        await theatre.noted("waits for gate", run)
        await theatre.connection.execute(
            "CREATE FUNCTION stage.hold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "PERFORM pg_advisory_xact_lock(20); RETURN NULL; END $$; "
            "CREATE TRIGGER hold AFTER INSERT ON fencepost.run_events FOR EACH ROW EXECUTE FUNCTION stage.hold()"
        )
        await theatre.connection.execute("SELECT pg_advisory_lock(20)")
        await theatre.open("gate")

        await eventually(lambda: waits_for_advisory_lock(theatre), message="the completion is on its way")
        proxy.silence()
        await theatre.connection.execute("SELECT pg_advisory_unlock(20)")
        await theatre.reaches(run, "completed")

        async def told() -> bool:
            return await metric(worker, 'fencepost_attempts_total{outcome="completed",workflow="script"}') == 1

        await eventually(told, message="the worker learned that it is completed")
        assert await metric(worker, "fencepost_leases_lost_total") == 0
    assert await theatre.outcomes(run) == ["completed"]
    assert await theatre.ends(run) == ["run_completed"]


@pytest.mark.parametrize("wakeup", ["listen", "poll"])
async def test_a_handlers_transaction_on_a_silent_network_ends(
    theatre_url: str, theatre: Theatre, start_worker: WorkerFactory, wakeup: str
) -> None:
    """Its slot is free again: no wait of a handler's connection is without a bound."""
    await theatre.connection.execute(
        "CREATE FUNCTION stage.hold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "PERFORM pg_advisory_xact_lock(21); RETURN NULL; END $$; "
        "CREATE TRIGGER hold AFTER INSERT ON stage.effects FOR EACH ROW EXECUTE FUNCTION stage.hold()"
    )
    async with TcpProxy(theatre_url) as proxy:
        run = await theatre.accept({"1": [["effect"]], "*": [["effect"]]})
        await theatre.connection.execute("SELECT pg_advisory_lock(21)")
        worker = start_worker(proxy.url, stage_url=theatre_url, concurrency=1, wakeup=wakeup, **SHORT)

        await eventually(lambda: waits_for_advisory_lock(theatre), message="the handler's statement is on its way")
        proxy.silence()
        await theatre.connection.execute("SELECT pg_advisory_unlock(21)")
        await theatre.reaches(run, "completed")
    assert len(await theatre.effects(run)) == 1
    assert worker.running


async def test_a_commit_of_a_handlers_whose_answer_was_lost_is_completed_once(
    theatre_url: str, theatre: Theatre, start_worker: WorkerFactory
) -> None:
    """The transaction holds the job's row until the server has decided, so nobody takes the run over meanwhile."""
    await theatre.connection.execute(
        "CREATE FUNCTION stage.hold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "PERFORM pg_advisory_xact_lock(22); RETURN NULL; END $$; "
        "CREATE CONSTRAINT TRIGGER hold AFTER INSERT ON stage.effects DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION stage.hold()"
    )
    async with TcpProxy(theatre_url) as proxy:
        run = await theatre.accept({"*": [["effect"]]})
        await theatre.connection.execute("SELECT pg_advisory_lock(22)")
        worker = start_worker(proxy.url, stage_url=theatre_url, lease_seconds=2, lease_margin_seconds=0.6, poll_interval_ms=100)
        await eventually(lambda: waits_for_advisory_lock(theatre), message="the commit is on its way")
        proxy.silence()
        await theatre.connection.execute("SELECT pg_advisory_unlock(22)")
        await theatre.reaches(run, "completed")

        async def is_over() -> bool:
            return await metric(worker, "fencepost_active_attempts") == 0

        await eventually(is_over, message="the handler ended")
    assert await theatre.effects(run) == [1]
    assert await theatre.outcomes(run) == ["completed"]
    assert await theatre.ends(run) == ["run_completed"]
    assert worker.running


async def waits_for_advisory_lock(theatre: Theatre) -> bool:
    return bool(await theatre.connection.fetchval(WAITS))


async def test_a_worker_starts_before_its_database_does(theatre_url: str, theatre: Theatre, start_worker: WorkerFactory) -> None:
    async with TcpProxy(theatre_url) as proxy:
        url = proxy.url
    run = await theatre.accept({})
    worker = start_worker(url, stage_url=theatre_url, **LONG)
    await eventually(lambda: worker.logged("database_unreachable"), message="the worker says that it waits")
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{worker.url}/livez")).status_code == 200
        answer = await client.get(f"{worker.url}/readyz")
    assert (answer.status_code, answer.json()["problems"]) == (503, ["database: no answer"])
    worker.terminate()

    assert await worker.wait() == 0
    assert await theatre.runs.state(run) == ("queued", "queued")


# -- wake-ups ------------------------------------------------------------------------------------------------------------------


async def test_a_terminated_listener_costs_one_poll_and_comes_back(
    theatre_url: str, theatre: Theatre, start_worker: WorkerFactory
) -> None:
    """JOB-37."""
    worker = start_worker(theatre_url, lease_seconds=120, poll_interval_ms=2_000)
    await worker.wait_ready()

    async def listening() -> bool:
        return await metric(worker, "fencepost_worker_listening") == 1

    await eventually(listening, message="the worker listens")
    await theatre.connection.execute(HANG_UP)
    first = await theatre.accept({})
    await theatre.reaches(first, "completed")
    await eventually(listening, message="the worker listens again")

    async def rung() -> bool:
        before = await metric(worker, 'fencepost_worker_wakeups_total{kind="ring"}')
        await theatre.reaches(await theatre.accept({}), "completed")
        return await metric(worker, 'fencepost_worker_wakeups_total{kind="ring"}') > before

    await eventually(rung, message="a job rings again")
    assert worker.running


async def test_an_idle_worker_asks_little_and_a_lost_listener_does_not_change_that(
    theatre_url: str, theatre: Theatre, start_worker: WorkerFactory
) -> None:
    """JOB-37: no busy loop."""
    await count_statements(theatre)
    worker = start_worker(theatre_url, lease_seconds=120, poll_interval_ms=100)
    await worker.wait_ready()
    await theatre.connection.execute(HANG_UP)
    before, polls = await calls(theatre), await metric(worker, 'fencepost_worker_wakeups_total{kind="poll"}')

    async def looked() -> bool:
        return await metric(worker, 'fencepost_worker_wakeups_total{kind="poll"}') >= polls + IDLE_LOOKS

    await eventually(looked, message="the idle worker looked some times")
    after, looks = await calls(theatre), await metric(worker, 'fencepost_worker_wakeups_total{kind="poll"}') - polls
    rings = await metric(worker, 'fencepost_worker_wakeups_total{kind="ring"}')
    assert after["claim"] - before.get("claim", 0) <= looks + rings + 3
    assert after["next_ready"] - before.get("next_ready", 0) <= looks + rings + 3
    for statement in ("renew", "complete", "fail", "release", "reap"):
        assert after.get(statement, 0) == before.get(statement, 0), f"{statement} ran on an idle worker"


async def test_a_sleeping_workers_flag_is_renewed_before_it_runs_out(
    theatre_url: str, theatre: Theatre, start_worker: WorkerFactory
) -> None:
    """With a poll interval longer than the flag lives, a job still rings."""
    worker = start_worker(theatre_url, lease_seconds=120, poll_interval_ms=60_000)
    await worker.wait_ready()

    async def flag() -> int:
        return int(await theatre.connection.fetchval("SELECT last_value FROM fencepost.doorbell_jobs"))

    async def now() -> int:
        return int(await theatre.connection.fetchval("SELECT extract(epoch FROM clock_timestamp()) * 1000"))

    await eventually(lambda: is_later(flag, now), message="the bell is armed")
    first = await flag()

    async def renewed() -> bool:
        return await flag() > first

    await eventually(renewed, message="the flag was renewed")
    assert await now() < first
    await theatre.reaches(await theatre.accept({}), "completed")
    assert await metric(worker, 'fencepost_worker_wakeups_total{kind="poll"}') <= 1


async def is_later(left: Any, right: Any) -> bool:
    return bool(await left() > await right())


async def count_statements(theatre: Theatre) -> None:
    try:
        await theatre.connection.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
    except asyncpg.PostgresError as error:
        pytest.skip(f"this server counts no statements: {error}")


async def calls(theatre: Theatre) -> dict[str, int]:
    """Statement -> how often it ran in this database."""
    rows = await theatre.connection.fetch(
        "SELECT substring(query FROM '-- fencepost:(\\w+)') AS name, sum(calls)::int AS calls FROM pg_stat_statements"
        " WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database()) GROUP BY 1"
    )
    return {row["name"]: row["calls"] for row in rows if row["name"]}


# -- stops -----------------------------------------------------------------------------------------------------------------------


async def test_a_stopped_worker_finishes_what_is_short_and_gives_back_the_rest(
    theatre_url: str, theatre: Theatre, start_worker: WorkerFactory
) -> None:
    """JOB-32, a tenth as long: lease 3 s, grace 2 s."""
    short = await theatre.accept({"1": [["wait", "short"], ["return", 1]]})
    long = await theatre.accept({"*": [["progress", {"page": 3}], ["wait", "long"]]})
    worker = start_worker(theatre_url, lease_seconds=3, lease_margin_seconds=0.3, stop_grace_seconds=2, poll_interval_ms=100)
    await theatre.noted("waits for short")
    await theatre.noted("waits for long")
    began = time.monotonic()
    worker.terminate()
    await eventually(lambda: worker.logged("worker_stopping"))
    late = await theatre.accept({})
    await theatre.open("short")
    code = await worker.wait()

    assert (code, time.monotonic() - began < 3) == (0, True)
    assert await theatre.runs.state(short) == ("completed", "completed")
    assert await theatre.runs.state(late) == ("queued", "queued")
    job = await theatre.job(long)
    assert (job["state"], job["attempts"], job["last_error_code"], job["checkpoint"]) == ("queued", 0, None, b'{"page":3}')
    assert await theatre.outcomes(long) == ["released"]
    assert await theatre.notes(long) == ["waits for long", "cancelled"]


@pytest.mark.parametrize("steps", [[["ignore", "never"]], [["thread", 60]]], ids=["ignores", "thread"])
async def test_a_handler_that_does_not_end_does_not_hold_up_a_stop(
    theatre_url: str, theatre: Theatre, start_worker: WorkerFactory, steps: Steps
) -> None:
    """The process ends in time with exit code 0; what could not be given back runs out."""
    run = await theatre.accept({"*": steps})
    worker = start_worker(theatre_url, stop_grace_seconds=1, lease_seconds=30, poll_interval_ms=100)
    await eventually(lambda: theatre.notes(run), message="the handler runs")
    began = time.monotonic()
    worker.terminate()
    code = await worker.wait(15)

    assert code == 0
    assert time.monotonic() - began < 4
    if steps[0][0] == "ignore":
        assert worker.logged("handlers_did_not_end")
        assert (await theatre.job(run))["state"] == "leased"
    else:
        assert (await theatre.job(run))["state"] == "queued"
    assert await theatre.ends(run) == []


async def test_a_task_that_a_handler_left_does_not_hold_up_a_stop(
    theatre_url: str, theatre: Theatre, start_worker: WorkerFactory
) -> None:
    """Nor a call that the ledger has left to itself: the loop would wait for either at its end, without a bound."""
    run = await theatre.accept({"*": [["stray"]]})
    worker = start_worker(theatre_url, stop_grace_seconds=1, **LONG)

    async def completed() -> bool:
        return await theatre.runs.state(run) == ("completed", "completed")

    await eventually(completed)
    worker.terminate()
    assert await worker.wait(15) == 0


async def test_a_second_signal_does_not_spoil_a_stop(theatre_url: str, theatre: Theatre, start_worker: WorkerFactory) -> None:
    run = await theatre.accept({"1": [["wait", "gate"]]})
    worker = start_worker(theatre_url, stop_grace_seconds=5, **LONG)
    await theatre.noted("waits for gate", run)
    worker.terminate()
    await eventually(lambda: worker.logged("worker_stopping"))
    worker.terminate()
    await theatre.open("gate")

    assert await worker.wait() == 0
    assert await theatre.runs.state(run) == ("completed", "completed")


async def test_a_stop_without_a_database_ends_in_time(theatre_url: str, theatre: Theatre, start_worker: WorkerFactory) -> None:
    async with TcpProxy(theatre_url) as proxy:
        run = await theatre.accept({"*": [["wait", "gate"]]})
        worker = start_worker(
            proxy.url, stage_url=theatre_url, lease_seconds=3, lease_margin_seconds=1, stop_grace_seconds=1, wakeup="poll"
        )
        await theatre.noted("waits for gate", run)
    began = time.monotonic()
    worker.terminate()

    assert await worker.wait() == 0
    assert time.monotonic() - began < 6
    assert (await theatre.job(run))["state"] == "leased"


# -- faults and wrong set-ups ----------------------------------------------------------------------------------------------------


async def test_a_state_that_must_not_exist_ends_the_process_and_leases_run_out(
    theatre_url: str, theatre: Theatre, start_worker: WorkerFactory
) -> None:
    """A generation that went back: exit code 1, and nothing more is written."""
    run = await theatre.accept({"1": [["wait", "gate"], ["return", 1]]})
    bystander = await theatre.accept({"*": [["wait", "other"]]})
    worker = start_worker(theatre_url, **LONG)
    await theatre.noted("waits for gate", run)
    await theatre.noted("waits for other", bystander)
    await theatre.connection.execute("UPDATE fencepost.jobs SET lease_generation = 0, attempts = 0 WHERE run_id = $1", run)
    await theatre.open("gate")

    assert await worker.wait() == 1
    assert (await theatre.job(bystander))["state"] == "leased"
    assert await theatre.ends(run) == []


async def test_sys_exit_in_a_handler_ends_its_attempt_and_not_the_process(
    theatre_url: str, theatre: Theatre, start_worker: WorkerFactory
) -> None:
    waits = await theatre.accept({"1": [["wait", "gate"], ["return", 1]]})
    worker = start_worker(theatre_url, **LONG)
    await theatre.noted("waits for gate", waits)
    for kind in ("exit", "interrupt", "base_group", "generator"):
        run = await theatre.accept({"*": [["fail", kind]]}, max_attempts=1)
        await theatre.reaches(run, "failed")
    await theatre.open("gate")
    await theatre.reaches(waits, "completed")

    assert worker.running
    assert await theatre.outcomes(waits) == ["completed"]


async def test_no_secret_of_a_run_stands_in_a_table_a_log_or_a_metric(
    theatre_url: str, theatre: Theatre, start_worker: WorkerFactory
) -> None:
    """SEC-1: whatever a handler's errors quote."""
    secret = f"marker-{secrets.token_hex(8)}"
    worker = start_worker(theatre_url, log_level="debug", **LONG)
    scripts: list[Steps] = [
        [["fail", "error", secret]], [["fail", "group", secret]], [["fail", "base_group", secret]], [["forget", secret]],
        [["event", secret]], [["wrong step", secret]],
    ]  # fmt: skip
    runs = [await theatre.accept({"*": steps}, max_attempts=2) for steps in scripts]
    runs.append(await theatre.runs.accept(data=f'{{"{secret}"'.encode()))
    runs.append(await theatre.runs.accept(data=f'["{secret}"]'.encode(), max_attempts=1))

    async def all_ended() -> bool:
        return all([await theatre.ends(run) for run in runs])

    await eventually(all_ended, message="all runs ended")
    text = str(await worker.metrics())
    worker.terminate()
    assert await worker.wait() == 0

    assert secret not in worker.log.read_text()
    assert worker.logged("loop_error"), "the forgotten task is told, by its class"
    assert secret not in text
    for table in ("jobs", "job_attempts", "run_events", "idempotency_keys", "audit"):
        rows = await theatre.connection.fetch(f"SELECT t::text AS row FROM fencepost.{table} AS t")
        assert secret not in str([row["row"] for row in rows]), table
    errors = await theatre.connection.fetch("SELECT error_code FROM fencepost.runs")
    assert secret not in str(errors)
    payloads = await theatre.connection.fetch("SELECT convert_from(payload, 'UTF8') AS payload FROM fencepost.outbox")
    assert secret not in str([row["payload"] for row in payloads])


def test_help_tells_how_to_name_the_handlers() -> None:
    done = command("worker", "run", "--help")

    assert done.returncode == 0
    for word in ("HANDLERS", "module:attribute", "Example", "SIGTERM", "FENCEPOST_DATABASE_URL"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("place", "remedy"),
    [
        ("nothing", "module:attribute"),
        (":handlers", "module:attribute"),
        ("module:", "module:attribute"),
        ("there.is.none:handlers", "there is no module there"),
        (".relative:handlers", "full name"),
        ("json:handlers", "json has nothing named handlers; name a consumer_sdk.Handlers, a consumer_sdk.Workflows or"),
        ("json:dumps", "json:dumps is of type builtins.function; name a consumer_sdk.Handlers, a consumer_sdk.Workflows or"),
    ],
)
def test_handlers_that_cannot_be_found_are_told_in_one_line(place: str, remedy: str) -> None:
    done = command("worker", "run", place, FENCEPOST_DATABASE_URL="postgresql://user@127.0.0.1:1/database")

    assert done.returncode == 2
    assert remedy in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_address_is_told_in_one_line() -> None:
    done = command("worker", "run", HANDLERS)

    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "FENCEPOST_DATABASE_URL (or --database-url) is required" in done.stderr


def test_a_missing_schema_ends_with_its_remedy(empty_database_url: str) -> None:
    done = command("worker", "run", HANDLERS, FENCEPOST_DATABASE_URL=empty_database_url, FENCEPOST_WORKER_HTTP_PORT="0")

    assert done.returncode == 2
    assert re.search("run `fencepost migrate`", done.stderr)


def command(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """``fencepost`` with nothing of this process's environment but the path."""
    root = Path(__file__).resolve().parents[2]
    kept = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), "COLUMNS": "200", "HOME": str(root), **environment}
    return subprocess.run(
        [sys.executable, "-m", "fencepost", *arguments], capture_output=True, text=True, env=kept, timeout=CLI_SECONDS, check=False
    )
