"""Chunks past their retention are deleted, in order and in bounded steps; reading and storing cost the same whatever is stored."""

import json
import uuid
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, Final

import asyncpg
import pytest

from tests.support.chunks import Frame, Streams

pytestmark = pytest.mark.services

WEEK: Final = timedelta(days=7)
FORGET: Final = "SELECT fencepost.forget_chunks($1, $2)"
# The lineage of $1, and all that hangs on it, is as much older.
AGE: Final = """
WITH runs AS (
    UPDATE fencepost.runs SET created_at = created_at - $2::interval, started_at = started_at - $2, finished_at = finished_at - $2
    WHERE root_run_id = $1
), streams AS (UPDATE fencepost.streams SET kept_since = kept_since - $2::interval WHERE root_run_id = $1)
UPDATE fencepost.chunks SET created_at = created_at - $2::interval WHERE root_run_id = $1
"""
# $1 streams of $2 chunks of ended runs, from $3 ago on, and nothing known of them to the planner.
FILL: Final = """
WITH ids AS (SELECT gen_random_uuid() AS id, clock_timestamp() - $3::interval + n * interval '1 ms' AS at
             FROM generate_series(1, $1::integer) AS n),
runs AS (
    INSERT INTO fencepost.runs (run_id, tenant_id, root_run_id, workflow, workflow_version, topic, state, started_at, finished_at,
                                input)
    SELECT id, 'acme', id, 'report', 1, 't', 'completed', at, at, '' FROM ids
),
streams AS (INSERT INTO fencepost.streams (root_run_id, tenant_id, iteration, kept_since) SELECT id, 'acme', 0, at FROM ids)
INSERT INTO fencepost.chunks (root_run_id, tenant_id, attempt, "offset", iteration, step, occurrence, data, created_at)
SELECT id, 'acme', 0, o, 0, 'answer', 0, '{"t":"word"}', at FROM ids, generate_series(0, $2::integer - 1) AS o
"""
READ: Final = "SELECT * FROM fencepost.read_chunks($1, $2, $3, $4, $5, 1000000)"


@pytest.fixture
async def streams(database_url: str) -> AsyncIterator[Streams]:
    async with Streams.on(database_url) as streams:
        for table in ("chunks", "streams", "runs"):
            await streams.database.execute(f"ALTER TABLE fencepost.{table} SET (autovacuum_enabled = false)")
        yield streams


async def published(streams: Streams, chunks: int = 5) -> uuid.UUID:
    """A run that has published and ended."""
    run_id = await streams.crew.runs.accept()
    execution = await streams.execute()
    await execution.publish(*range(chunks), step="answer")
    await execution.complete()
    return run_id


async def buffers(connection: "asyncpg.Connection[Any]", query: str, *arguments: object) -> int:
    """Pages that one call touches."""
    plan = json.loads(await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {query}", *arguments))[0]["Plan"]
    return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])


# -- what is forgotten, and what is not --------------------------------------------------------------------------------------


async def test_chunks_are_kept_for_as_long_after_the_end_of_their_lineage(streams: Streams) -> None:
    """STREAM-6: deleted in order, batch by batch; the stored result stays, and so does the attempt that readers are told of."""
    old, young = await published(streams), await published(streams)
    await streams.database.execute(AGE, old, WEEK)
    await streams.database.execute(AGE, young, WEEK - timedelta(minutes=1))

    assert await streams.database.fetchval(FORGET, WEEK, 3) == 3
    assert await streams.all(old) == [Frame(0, 3, 3), Frame(0, 4, 4)]
    assert await streams.database.fetchval(FORGET, WEEK, 3) == 2
    assert await streams.database.fetchval(FORGET, WEEK, 3) == 0

    assert await streams.all(old) == []
    assert len(await streams.all(young)) == 5
    assert await streams.attempt(old) == 0
    assert await streams.database.fetchval("SELECT output FROM fencepost.runs WHERE run_id = $1", old) == b"{}"


async def test_a_lineage_of_which_one_run_lives_is_kept(streams: Streams) -> None:
    run_id = await streams.crew.runs.accept()
    execution = await streams.execute()
    await execution.publish("a", step="answer")
    assert await execution.hand.fail(execution.claim.key)
    await streams.database.execute(AGE, run_id, WEEK * 2)
    assert (await streams.crew.runs.replay(run_id))[0] == "replayed"

    assert await streams.database.fetchval(FORGET, WEEK, 100) == 0
    assert await streams.all(run_id) == [Frame(0, 0, "a")]


async def test_of_a_living_lineage_earlier_iterations_are_forgotten(streams: Streams) -> None:
    """One that continues as new for ever does not keep its chunks for ever."""
    run_id = await streams.crew.runs.accept()
    first = await streams.execute()
    await first.publish("a", "b")
    key = first.claim.key
    await streams.database.execute(
        "SELECT fencepost.continue_run('A', $1, $2, $3, fencepost.uuid_v7(), 'report', 1, '{}', 3, NULL, interval '0', NULL, NULL)",
        key.tenant_id, key.run_id, key.generation,
    )  # fmt: skip
    second = await streams.execute()
    await second.publish("c")
    await streams.database.execute(AGE, run_id, WEEK * 2)

    assert await streams.database.fetchval(FORGET, WEEK, 100) == 2
    assert await streams.all(run_id) == [Frame(1, 0, "c")]
    assert await streams.database.fetchval(FORGET, WEEK, 100) == 0
    await second.publish("d")
    assert await streams.all(run_id) == [Frame(1, 0, "c"), Frame(1, 1, "d")]


async def test_a_replay_of_what_was_forgotten_gives_no_place_twice(streams: Streams) -> None:
    run_id = await streams.crew.runs.accept()
    dead = await streams.execute()
    await dead.publish("a", step="one")
    await dead.record("one")
    assert await dead.hand.fail(dead.claim.key)
    await streams.database.execute(AGE, run_id, WEEK * 2)
    assert await streams.database.fetchval(FORGET, WEEK, 100) == 1
    assert (await streams.crew.runs.replay(run_id))[0] == "replayed"

    again = await streams.execute()
    await again.publisher.carry("one", 0)
    await again.publish("b", step="two")
    await again.complete()

    assert await streams.all(run_id) == [Frame(1, 0, "b")]
    await streams.database.execute(AGE, run_id, WEEK * 2)
    assert await streams.database.fetchval(FORGET, WEEK, 100) == 1


async def test_a_stream_that_must_stay_is_looked_at_again_an_hour_later(streams: Streams) -> None:
    """Those that live long are not in the way of the others."""
    living = await streams.crew.runs.accept()
    execution = await streams.execute()
    await execution.publish("a")
    await streams.database.execute(AGE, living, WEEK * 3)
    old = await published(streams, 1)
    await streams.database.execute(AGE, old, WEEK * 2)

    assert await streams.database.fetchval(FORGET, WEEK, 1) == 0
    assert await streams.database.fetchval(FORGET, WEEK, 1) == 1
    assert await streams.all(old) == []
    await execution.complete()
    await streams.database.execute(AGE, living, timedelta(minutes=50))
    await streams.database.execute("UPDATE fencepost.runs SET finished_at = finished_at - $1::interval", WEEK)
    assert await streams.database.fetchval(FORGET, WEEK, 1) == 0
    await streams.database.execute(AGE, living, timedelta(minutes=10))
    assert await streams.database.fetchval(FORGET, WEEK, 1) == 1


async def test_two_at_once_do_not_wait_for_one_another(streams: Streams) -> None:
    one, other = await published(streams), await published(streams)
    for run_id in (one, other):
        await streams.database.execute(AGE, run_id, WEEK)
    first = await streams.crew.connect()
    async with first.transaction():
        assert await first.fetchval(FORGET, WEEK, 5) == 5
        assert await streams.database.fetchval(FORGET, WEEK, 100) == 0  # the first has both at hand

    assert await streams.database.fetchval(FORGET, WEEK, 100) == 5
    assert await streams.all(one) == await streams.all(other) == []


# -- what it costs -----------------------------------------------------------------------------------------------------------


async def test_a_batch_reads_what_it_deletes(streams: Streams) -> None:
    """100,000 old chunks and 100,000 young ones, and no statistics of them."""
    await streams.database.execute(FILL, 1_000, 100, WEEK * 2)
    await streams.database.execute(FILL, 1_000, 100, timedelta(hours=1))

    cost = await buffers(streams.database, FORGET, WEEK, 1_000)

    assert cost <= 6 * 1_000
    assert await streams.database.fetchval("SELECT count(*) FROM fencepost.chunks") == 199_000
    # Nothing to do costs next to nothing.
    assert await buffers(streams.database, FORGET, timedelta(days=3_650), 1_000) <= 20


async def test_a_reader_reads_what_it_gets(streams: Streams) -> None:
    """200,000 chunks of others, no statistics: a page costs what is in it, and no news costs a probe a stream."""
    await streams.database.execute(FILL, 2_000, 100, timedelta(hours=1))
    roots = [row[0] for row in await streams.database.fetch("SELECT root_run_id FROM fencepost.streams LIMIT 50")]
    tenants, attempts = ["acme"] * 50, [0] * 50
    session = await streams.crew.connect()
    for _ in range(8):  # the session settles on its plans
        assert len(await session.fetch(READ, roots[:1], ["acme"], [0], [-1], 10)) == 10

    page = await buffers(session, READ, roots[:1], ["acme"], [0], [-1], 100)
    resumed = await buffers(session, READ, roots[:1], ["acme"], [0], [89], 256)
    nothing_new = await buffers(session, READ, roots, tenants, attempts, [99] * 50, 256)

    assert page <= 130
    assert resumed <= 30
    assert nothing_new <= 50 * 6
    rows = await session.fetch(READ, roots[:2], tenants[:2], [0, 0], [97, 98], 256)
    assert [(row["place"], row["offset"]) for row in rows] == [(1, 98), (1, 99), (2, 99)]


async def test_lineages_are_read_by_their_keys(streams: Streams) -> None:
    await streams.database.execute(FILL, 2_000, 100, timedelta(hours=1))
    await streams.database.execute(
        "INSERT INTO fencepost.jobs (run_id, tenant_id, workflow, available_at, max_attempts, state, finished_at, lease_generation,"
        " attempts) SELECT run_id, tenant_id, workflow, created_at, 3, 'completed', finished_at, 1, 1 FROM fencepost.runs"
    )
    await streams.database.execute(
        "INSERT INTO fencepost.lineages (root_run_id, tenant_id, monitor_id, route, principal_hash, principal_version,"
        " newest_run_id) SELECT run_id, tenant_id, gen_random_uuid(), 'r', sha256('p'), 1, run_id FROM fencepost.runs"
    )
    roots = [row[0] for row in await streams.database.fetch("SELECT root_run_id FROM fencepost.streams LIMIT 50")]
    session = await streams.crew.connect()
    query = "SELECT * FROM fencepost.read_lineages($1, $2)"
    for _ in range(8):
        assert len(await session.fetch(query, roots, ["acme"] * 50)) == 50

    assert await buffers(session, query, roots, ["acme"] * 50) <= 50 * 24


@pytest.mark.parametrize("through", ["direct", "pooler"])
async def test_storing_and_opening_cost_the_same_whatever_is_stored(streams: Streams, through: str) -> None:
    """200,000 chunks of others and no statistics: an execution's statements read its own."""
    await streams.database.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
    await streams.database.execute(FILL, 2_000, 100, timedelta(hours=1))
    run_id = await streams.crew.runs.accept()
    await streams.writer(pooler=through == "pooler")
    first = await streams.execute()
    await first.publish(*range(20), step="one")
    await first.record("one")
    await first.publish("x", step="two")
    await first.fail()
    await streams.database.execute("SELECT pg_stat_statements_reset(0, oid, 0) FROM pg_database WHERE datname = current_database()")

    second = await streams.execute()
    await second.publisher.carry("one", 0)
    await second.publish(*range(20), step="two")

    rows = await streams.database.fetch(
        "SELECT substring(query FROM '^-- fencepost:(\\w+)') AS name,"
        " sum(shared_blks_hit + shared_blks_read)::bigint / sum(calls)::bigint AS buffers"
        " FROM pg_stat_statements AS s JOIN pg_database AS d ON d.oid = s.dbid"
        " WHERE d.datname = current_database() AND toplevel AND query LIKE '-- fencepost:%' GROUP BY 1"
    )
    found = {row["name"]: row["buffers"] for row in rows}
    bounds = {"open_stream": 60, "carry_chunks": 200, "publish_chunks": 25}
    assert {name: found[name] for name in bounds if found[name] > bounds[name]} == {}
    assert len(await streams.all(run_id)) == 61
