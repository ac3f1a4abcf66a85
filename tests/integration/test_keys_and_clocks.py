"""Two contracts that span producers and workers: a worker's death does not hold a key, and only one clock counts."""

import re
from importlib.resources import files
from pathlib import Path
from typing import Final

import asyncpg
import pytest

from producer_sdk import Accepted, Command, Scope, Secrets
from producer_sdk.asyncpg import accept
from tests.support.runs import Runs

SECRETS: Final = Secrets({1: b"1" * 32}, write=(1,))
SCOPE: Final = Scope(tenant_id="acme", principal="ana", operation="POST /reports")
MIGRATIONS: Final = ("0007_pre_runs.sql", "0008_pre_acceptance.sql", "0009_pre_run_control.sql", "0010_pre_effects.sql")
# What reads this machine's wall clock. Leases and delays are durations; the database makes times of them.
WALL_CLOCK: Final = re.compile(r"time\.time\(|datetime\.now\(|datetime\.utcnow\(|time\.time_ns\(")
# A provider's HTTP date is not the database's time either; and a diagnosis tells how far this machine's clock is off.
MAY_READ_IT: Final = {"decision.py", "stuck_leases.py"}


async def _accepted(connection: "asyncpg.Connection[asyncpg.Record]") -> Accepted:
    async with connection.transaction():
        return await accept(connection, Command(workflow="report", input={"month": 11}), SCOPE, "k-1", secrets=SECRETS)


async def test_a_workers_death_does_not_hold_its_key(database_url: str) -> None:
    """KEY-11: the next lease is generation 2, and every retry finds the same run until it has its answer."""
    connection = await asyncpg.connect(database_url)
    try:
        runs = Runs(connection)
        first = await _accepted(connection)
        await runs.by("died").claim_one()
        assert (await _accepted(connection)) == Accepted(outcome="replayed", run_id=first.run_id, state="running")
        await runs.expire_lease(first.run_id)
        second = runs.by("took over")
        held = await second.claim_one()

        assert held.generation == 2
        assert (await _accepted(connection)).state == "running"
        assert await second.complete(held)
        assert (await _accepted(connection)) == Accepted(outcome="replayed", run_id=first.run_id, state="completed")
        assert await connection.fetchval("SELECT count(*) FROM fencepost.runs") == 1
    finally:
        await connection.close()


async def test_each_attempt_tells_where_its_trace_is(database_url: str) -> None:
    """J47: the trace of the acceptance, also for the attempt after a lost lease."""
    connection = await asyncpg.connect(database_url)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    command = Command(workflow="report", input={}, traceparent=trace)
    try:
        async with connection.transaction():
            run_id = (await accept(connection, command, SCOPE, "k-2", secrets=SECRETS)).run_id
        runs = Runs(connection)
        await runs.claim_one()
        await runs.expire_lease(run_id)
        await runs.by("took over").claim_one()
        assert await connection.fetchval("SELECT array_agg(traceparent) FROM fencepost.job_attempts") == [trace, trace]
    finally:
        await connection.close()


@pytest.mark.parametrize(("package", "file"), [("consumer_sdk", "runs.sql"), ("consumer_sdk", "effects.sql")])
def test_no_statement_of_a_worker_takes_a_time_or_the_transactions_own(package: str, file: str) -> None:
    """JOB-15: only the database's clock counts, and not the one that stands still in a transaction."""
    text = re.sub(r"--.*", "", files(package).joinpath(file).read_text())
    taken = re.findall(r"\$\d+::timestamptz", text)
    assert taken == []
    assert re.findall(r"\b(?:now\(\)|current_timestamp|transaction_timestamp|statement_timestamp)", text, re.IGNORECASE) == []


@pytest.mark.parametrize("file", MIGRATIONS)
def test_no_function_of_runs_takes_a_time_or_the_transactions_own(file: str) -> None:
    text = re.sub(r"--.*", "", files("migrations").joinpath("sql", file).read_text())
    signatures = re.findall(r"CREATE (?:OR REPLACE )?FUNCTION fencepost\.(\w+)\((.*?)\)\s*(?:RETURNS|LANGUAGE)", text, re.DOTALL)
    takes_a_time = [name for name, parameters in signatures if re.search(r"(?<!OUT )\b(?!OUT\b)\w+ timestamptz", parameters)]
    # ready_tenants is called by the claim alone, with the time that the claim has read from the database.
    assert [name for name in takes_a_time if name not in {"ready_tenants", "read_run"}] == []
    assert re.findall(r"\b(?:now\(\)|current_timestamp)", text, re.IGNORECASE) == []


def test_no_module_of_a_worker_reads_the_wall_clock() -> None:
    package = Path(str(files("consumer_sdk")))
    readers = {path.name for path in package.glob("*.py") if WALL_CLOCK.search(path.read_text())}
    assert readers <= MAY_READ_IT, "a time of this machine must not decide about leases and delays"
