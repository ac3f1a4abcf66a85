"""The ledger forgets what is past its retention, and nothing that could still be needed. What it costs is counted, not timed."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Final

import asyncpg
import pytest

from consumer_sdk import Handlers, RunContext, Worker, load_worker_settings
from consumer_sdk.forgetting import forget_old
from consumer_sdk.message_store import MessageStore
from consumer_sdk.run_store import PLANNER
from tests.support.commands import user_of
from tests.support.runs import Runs
from tests.support.waiting import eventually

pytestmark = pytest.mark.services

WEEK: Final = timedelta(days=7)
MONTH: Final = timedelta(days=30)
INSERT: Final = """
INSERT INTO fencepost.effects (run_key, tenant_id, iteration, step, occurrence, operation, state, holder, created_at, finished_at)
VALUES ($1, 'acme', 0, 's', 0, 'fencepost.message', 'succeeded', 'h', clock_timestamp() - $2::interval,
        clock_timestamp() - $2::interval)
"""
# $1 rows under names that begin with $2, from $3 ago on, a millisecond after one another.
FILL: Final = """
INSERT INTO fencepost.effects (run_key, tenant_id, iteration, step, occurrence, operation, state, holder, created_at, finished_at)
SELECT $2 || n, 'acme', 0, 's', 0, 'fencepost.message', 'succeeded', 'h', at, at
FROM (SELECT n, clock_timestamp() - $3::interval + n * interval '1 ms' AS at FROM generate_series(1, $1::integer) AS n) AS g
"""
OF_RUN: Final = """
INSERT INTO fencepost.effects (run_key, tenant_id, iteration, step, occurrence, operation, state, run_id, run_generation, holder,
                               fingerprint, fingerprint_version, provider_key, created_at, finished_at)
SELECT $1::uuid::text, 'acme', 0, 's', n, 'charge', 'succeeded', $1, 1, 'h', sha256('x'), 1, 'k', at, at
FROM (SELECT n, clock_timestamp() - interval '60 days' + n * interval '1 ms' AS at FROM generate_series(1, $2::integer) AS n) AS g
"""
# $1 finished runs of the lineage $2; null: each its own.
RUNS: Final = """
INSERT INTO fencepost.runs (run_id, tenant_id, root_run_id, workflow, workflow_version, topic, state, started_at, finished_at,
                            input)
SELECT id, 'acme', coalesce($2, id), 'order', 1, 't', 'completed', now(), now(), ''
FROM (SELECT fencepost.uuid_v7() AS id FROM generate_series(1, $1::integer)) AS g
RETURNING run_id
"""
LETTERS: Final = """
INSERT INTO fencepost.dead_letters (run_key, tenant_id, step, consumer, topic, "partition", "offset", recorded_at, header_names,
                                    header_values, reason, error_class, error_code, attempts, state)
SELECT name, 'acme', 's', 'c', 't', 0, 0, now(), '{}', '{}', 'rejected', 'X', 'x', 1, $2 FROM unnest($1::text[]) AS g(name)
"""
FORGET: Final = "SELECT fencepost.forget_effects($1, $2)"
#: What a row may cost at most: its index entry, its page, three probes of what may hold it back, and its deletion.
A_ROW: Final = 16
#: What a call costs whatever is in the ledger: its place, the retention that was asked for, and the way down the index.
A_CALL: Final = 60


@pytest.fixture
async def connection(database_url: str) -> AsyncIterator["asyncpg.Connection[Any]"]:
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


@pytest.fixture(params=["direct", "through a pooler"])
async def session(request: pytest.FixtureRequest, database_url: str) -> AsyncIterator["asyncpg.Connection[Any]"]:
    """A session as consumers and workers have it, which has known the ledger empty, and has its plans from then."""
    settings = PLANNER if request.param == "direct" else {}
    session = await asyncpg.connect(database_url, server_settings=settings)
    for _ in range(6):
        await session.fetchval(FORGET, WEEK, 1_000)
    yield session
    await session.close()


@asynccontextmanager
async def working(database_url: str, **settings: object) -> AsyncIterator[Worker]:
    """A worker with nothing to do, for as long as the block lasts."""
    handlers = Handlers()

    @handlers.handler("order")
    async def order(_context: RunContext, _input: object) -> None: ...

    worker = Worker(handlers, load_worker_settings({"database_url": database_url, "worker_http_port": 0, **settings}))
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        worker.stop()
        async with asyncio.timeout(10):
            await task


async def kept(connection: "asyncpg.Connection[Any]") -> set[str]:
    return {row["run_key"] for row in await connection.fetch("SELECT run_key FROM fencepost.effects")}


async def buffers(connection: "asyncpg.Connection[Any]", most: int) -> int:
    """Pages that one call touches, found or read, whatever it deletes."""
    explained = await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {FORGET}", WEEK, most)
    plan = json.loads(explained)[0]["Plan"]
    return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])


async def next_pass(connection: "asyncpg.Connection[Any]") -> None:
    """An hour goes by since the last pass began, and what is left of it is done."""
    await connection.execute("UPDATE fencepost.forgetting SET begun_at = begun_at - interval '61 minutes'")
    assert await connection.fetchval(FORGET, WEEK, 10_000) == 0


# -- what is forgotten, and what is not -----------------------------------------------------------------------------------


async def test_only_what_is_old_and_over_is_forgotten(database_url: str, connection: "asyncpg.Connection[Any]") -> None:
    """X6: not what is younger, of a living run, or of a dead letter that may be redriven. By the consumer's role."""
    runs = Runs(connection)
    living, ended = await runs.accept(), await runs.accept()
    await connection.execute("SELECT fencepost.cancel_run('acme', $1, 'me', 'why')", ended)
    for run_id in (living, ended):
        await connection.execute(OF_RUN, run_id, 1)
    for name, age in (("young", timedelta(days=6)), ("old", timedelta(days=8)), ("open", WEEK * 2), ("closed", WEEK * 2)):
        await connection.execute(INSERT, name, age)
    await connection.execute(LETTERS, ["open"], "dead")
    await connection.execute(LETTERS, ["closed"], "discarded")
    async with user_of("fencepost_consumer", database_url) as url:
        store = await MessageStore.open(url, holder="h", timeout_seconds=10)
        forgotten = await store.forget(WEEK, limit=100)
        assert await store.forget(WEEK, limit=100) == 0
        await store.close()
        user = await asyncpg.connect(url)
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await user.execute("DELETE FROM fencepost.effects")
        await user.close()
    assert forgotten == 3
    assert await kept(connection) == {str(living), "young", "open"}


async def test_a_replay_that_is_alive_keeps_the_effects_of_its_lineage(connection: "asyncpg.Connection[Any]") -> None:
    root = await connection.fetchval(RUNS, 1, None)
    replay = await connection.fetchval(RUNS, 1, root)
    await connection.execute(OF_RUN, root, 3)
    await connection.execute("UPDATE fencepost.runs SET state = 'running', finished_at = NULL WHERE run_id = $1", replay)
    assert await connection.fetchval(FORGET, WEEK, 100) == 0
    await connection.execute("UPDATE fencepost.runs SET state = 'completed', finished_at = now() WHERE run_id = $1", replay)
    await next_pass(connection)
    assert await connection.fetchval(FORGET, WEEK, 100) == 3


async def test_what_is_not_over_is_kept_however_old(connection: "asyncpg.Connection[Any]") -> None:
    """An effect whose answer nobody knows, and one whose end is younger than its beginning."""
    await connection.execute(INSERT, "lately", WEEK * 2)
    await connection.execute("UPDATE fencepost.effects SET finished_at = clock_timestamp()")
    await connection.execute(OF_RUN, uuid.uuid4(), 1)
    await connection.execute(
        "UPDATE fencepost.effects SET state = 'unknown', finished_at = NULL, deadline_at = created_at WHERE operation = 'charge'"
    )
    assert await connection.fetchval(FORGET, WEEK, 100) == 0
    assert len(await kept(connection)) == 2


async def test_a_batch_of_forgetting_is_bounded(connection: "asyncpg.Connection[Any]") -> None:
    await connection.execute(FILL, 5, "m", WEEK * 2)
    assert await connection.fetchval(FORGET, WEEK, 3) == 3
    assert len(await kept(connection)) == 2


async def test_batches_follow_one_another_until_nothing_is_left(database_url: str, connection: "asyncpg.Connection[Any]") -> None:
    await connection.execute(FILL, 2_500, "m", WEEK * 2)
    await connection.execute(LETTERS, ["m1", "m1200"], "dead")
    store, told = await MessageStore.open(database_url, holder="h", timeout_seconds=30), list[int]()
    await forget_old(store, retention_days=7, told=told.append)
    await store.close()
    assert told == [999, 999, 500]
    assert await kept(connection) == {"m1", "m1200"}


async def test_rows_of_one_moment_are_forgotten_as_others_are(database_url: str, connection: "asyncpg.Connection[Any]") -> None:
    """As an import writes them: more than a batch, some of them held back, and others behind them."""
    await connection.execute(FILL, 2_500, "m", WEEK * 2)
    await connection.execute(LETTERS, [f"m{number}" for number in range(1, 101)], "dead")
    await connection.execute("UPDATE fencepost.effects SET created_at = now() - interval '14 days'")
    await connection.execute(FILL, 10, "later", WEEK * 1.5)
    store, told = await MessageStore.open(database_url, holder="h", timeout_seconds=30), list[int]()
    await forget_old(store, retention_days=7, told=told.append)
    await store.close()
    assert sum(told) == 2_410
    assert len(await kept(connection)) == 100


async def test_rows_of_one_moment_that_are_all_held_back_are_passed(connection: "asyncpg.Connection[Any]") -> None:
    await connection.execute(FILL, 50, "m", WEEK * 2)
    await connection.execute(LETTERS, [f"m{number}" for number in range(1, 51)], "dead")
    await connection.execute("UPDATE fencepost.effects SET created_at = now() - interval '14 days'")
    await connection.execute(FILL, 10, "later", WEEK * 1.5)
    assert await connection.fetchval(FORGET, WEEK, 10) == 10


# -- several at once ------------------------------------------------------------------------------------------------------


async def test_of_two_who_forget_at_once_one_goes_away(database_url: str, connection: "asyncpg.Connection[Any]") -> None:
    """Neither waits for the other; nothing is left out."""
    await connection.execute(FILL, 5, "m", WEEK * 2)
    other = await asyncpg.connect(database_url)
    async with connection.transaction():
        assert await connection.fetchval(FORGET, WEEK, 3) == 3
        assert await asyncio.wait_for(other.fetchval(FORGET, WEEK, 3), 10) == 0
    assert await other.fetchval(FORGET, WEEK, 3) == 2
    await other.close()


async def test_a_row_in_another_hand_is_not_waited_for(database_url: str, connection: "asyncpg.Connection[Any]") -> None:
    await connection.execute(FILL, 3, "m", WEEK * 2)
    other = await asyncpg.connect(database_url)
    async with other.transaction():
        await other.execute("UPDATE fencepost.effects SET finished_at = clock_timestamp() WHERE run_key = 'm2'")
        assert await asyncio.wait_for(connection.fetchval(FORGET, WEEK, 100), 10) == 2
    await next_pass(connection)
    assert await connection.fetchval(FORGET, WEEK, 100) == 0
    assert await kept(connection) == {"m2"}
    await other.close()


async def test_the_longest_retention_that_a_service_names_decides(connection: "asyncpg.Connection[Any]") -> None:
    """Services share a ledger: one with the default must not take from another what it still needs."""
    await connection.execute(FILL, 5, "m", WEEK * 2)
    assert await connection.fetchval(FORGET, MONTH, 100) == 0
    assert await connection.fetchval(FORGET, WEEK, 100) == 0
    await connection.execute("UPDATE fencepost.retention_wishes SET asked_at = asked_at - interval '8 days' WHERE age > $1", WEEK)
    assert await connection.fetchval(FORGET, WEEK, 100) == 5


async def test_a_service_that_remembers_for_ever_says_so(database_url: str, connection: "asyncpg.Connection[Any]") -> None:
    await connection.execute(FILL, 5, "m", WEEK * 52)
    store, told = await MessageStore.open(database_url, holder="h", timeout_seconds=30), list[int]()
    for days in (0, 7):
        await forget_old(store, retention_days=days, told=told.append)
    await store.close()
    assert told == []
    assert len(await kept(connection)) == 5


async def test_workers_forget_as_consumers_do(
    database_url: str, connection: "asyncpg.Connection[Any]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody consumes, nobody else would. More than one batch, in one round."""
    monkeypatch.setattr("consumer_sdk.worker.FORGET_SECONDS", 0.2)
    await connection.execute(FILL, 2_500, "old", timedelta(days=31))
    await connection.execute(FILL, 5, "young", timedelta(days=29))
    async with working(database_url) as worker:
        await eventually(lambda: worker._metrics.registry.get_sample_value("fencepost_forgotten_effects_total") == 2_500)
    assert len(await kept(connection)) == 5


async def test_a_worker_that_remembers_for_ever_keeps_others_from_forgetting(
    database_url: str, connection: "asyncpg.Connection[Any]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumer_sdk.worker.FORGET_SECONDS", 0.2)
    await connection.execute(FILL, 5, "m", WEEK * 52)

    async def named() -> bool:
        return bool(await connection.fetchval("SELECT count(*) FROM fencepost.retention_wishes"))

    async with working(database_url, ledger_retention_days=0):
        await eventually(named, message="the worker has named its retention")
    assert await connection.fetchval(FORGET, WEEK, 100) == 0


# -- what it costs --------------------------------------------------------------------------------------------------------


async def test_looking_for_what_is_old_costs_nothing_where_nothing_is(session: "asyncpg.Connection[Any]") -> None:
    await session.execute(FILL, 20_000, "m", timedelta(days=1))
    assert await buffers(session, 1_000) <= A_CALL


@pytest.mark.parametrize("statistics", ["of empty tables", "of full tables"])
async def test_a_batch_costs_what_its_rows_cost_whatever_else_the_tenant_has(
    session: "asyncpg.Connection[Any]", statistics: str
) -> None:
    runs = [row["run_id"] for row in await session.fetch(RUNS, 5_000, None)]
    await session.execute(FILL, 5_000, "m", timedelta(days=1))
    for run_id in runs[:200]:
        await session.execute(OF_RUN, run_id, 1)
    if statistics == "of full tables":
        await session.execute("ANALYZE fencepost.runs, fencepost.effects, fencepost.dead_letters")
    assert await buffers(session, 1_000) <= A_CALL + 200 * A_ROW
    assert await session.fetchval("SELECT count(*) FROM fencepost.effects") == 5_000


async def test_a_long_lineage_is_read_once_for_all_of_its_rows(session: "asyncpg.Connection[Any]") -> None:
    """1,000 runs and 500 effects: not 500,000 looks."""
    root = await session.fetchval(RUNS, 1, None)
    await session.fetch(RUNS, 1_000, root)
    await session.execute(OF_RUN, root, 500)
    assert await buffers(session, 1_000) <= A_CALL + 500 * A_ROW + 2 * 1_000
    assert await kept(session) == set()


async def test_what_is_held_back_is_passed_and_not_read_again_by_every_call(session: "asyncpg.Connection[Any]") -> None:
    """10,000 rows that wait for an operator, and 100 behind them that do not."""
    await session.execute(FILL, 10_000, "held", MONTH)
    await session.execute(LETTERS, [f"held{number}" for number in range(1, 10_001)], "dead")
    await session.execute(FILL, 100, "free", WEEK * 2)
    costs = [await buffers(session, 500) for _ in range(6)]
    assert max(costs) <= A_CALL + 4 * 500 * A_ROW
    assert len(await kept(session)) == 10_000
    assert await buffers(session, 500) <= A_CALL

    await session.execute("UPDATE fencepost.dead_letters SET state = 'discarded' WHERE run_key IN ('held1', 'held10000')")
    assert await session.fetchval(FORGET, WEEK, 10_000) == 0
    await next_pass(session)
    assert await session.fetchval(FORGET, WEEK, 10_000) == 2
