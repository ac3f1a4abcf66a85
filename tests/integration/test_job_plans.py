"""What a job costs the database: statements, buffers and WAL, counted, not timed. Neither history nor backlog changes it.

Costs are read from pg_stat_statements, so they are those of the worker's own sessions with whatever plans they chose.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import asyncpg
import pytest

from consumer_sdk.jobs import JobKey
from examples.encrypting_codec import EncryptingCodec
from fencepost.codec import PLAIN, PayloadCodec
from fencepost.devservices import Services
from producer_sdk import Command, Scope, Secrets
from producer_sdk import asyncpg as producer
from tests.support.jobs import Crew, Hand, completion, failed, fill
from tests.support.session import SharedServices, in_a_thread
from tests.support.waiting import eventually

HISTORY: Final = 200_000
BACKLOG: Final = 200_000
BATCH: Final = 10
ROUNDS: Final = 12
TABLES: Final = ("runs", "jobs", "run_events", "job_attempts")
STATEMENTS: Final = ("claim", "renew", "complete", "fail", "release", "reap", "next_ready", "queue_depth")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of all calls of one statement."""

    calls: int
    buffers: int
    wal_bytes: int

    @property
    def buffers_a_call(self) -> float:
        return self.buffers / self.calls


@pytest.fixture
async def crew(database_url: str) -> AsyncIterator[Crew]:
    async with Crew.on(database_url) as crew:
        await prepare(crew.database)
        yield crew


async def prepare(database: "asyncpg.Connection[Any]") -> None:
    """Statistics are taken when a test says so."""
    await database.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
    for table in TABLES:
        await database.execute(f"ALTER TABLE fencepost.{table} SET (autovacuum_enabled = false)")


@pytest.fixture(scope="module")
def filled_url(services: Services, shared_services: SharedServices) -> Iterator[str]:
    """200,000 finished jobs and 200,000 of the future, with the statistics of empty tables. Cloned, and not connected to."""
    url = services.create_database(shared_services.template_url)
    in_a_thread(lambda: _fill(url))
    yield url
    services.drop_database(url)


def _fill(url: str) -> None:
    async def work() -> None:
        async with Crew.on(url) as crew:
            await prepare(crew.database)
            await analyze(crew)
            await fill(crew.database, HISTORY, finished=True, tenants=100)
            await fill(crew.database, BACKLOG, ready_in=timedelta(days=1), tenants=100)

    asyncio.run(work())


async def analyze(crew: Crew) -> None:
    for table in TABLES:  # a vacuum by the server in the middle would move what is read
        await crew.database.execute(f"ALTER TABLE fencepost.{table} SET (autovacuum_enabled = off)")
    await crew.database.execute("ANALYZE " + ", ".join(f"fencepost.{table}" for table in TABLES))


@pytest.fixture
async def full_crew(services: Services, filled_url: str) -> AsyncIterator[Crew]:
    url = services.create_database(filled_url)
    async with Crew.on(url) as crew:
        yield crew
    services.drop_database(url)


async def forget(crew: Crew) -> None:
    """Of this database only: other tests run on the same server."""
    await crew.database.execute("SELECT pg_stat_statements_reset(0, oid, 0) FROM pg_database WHERE datname = current_database()")


async def costs(crew: Crew) -> Mapping[str, Cost]:
    """Of the statements since the last reset, by name. Full pages, which follow checkpoints, are left out of the WAL."""
    rows = await crew.database.fetch(
        "SELECT substring(query FROM '^-- fencepost:(\\w+)') AS name, sum(calls)::bigint AS calls,"
        " sum(shared_blks_hit + shared_blks_read)::bigint AS buffers, sum(wal_bytes - wal_fpi * 8192)::bigint AS wal_bytes"
        " FROM pg_stat_statements AS s JOIN pg_database AS d ON d.oid = s.dbid"
        " WHERE d.datname = current_database() AND toplevel AND query LIKE '-- fencepost:%' GROUP BY 1"
    )
    return {row["name"]: Cost(calls=row["calls"], buffers=row["buffers"], wal_bytes=row["wal_bytes"]) for row in rows}


async def live(crew: Crew, hand: Hand, *, tenants: int = 1) -> None:
    """One round: a batch of jobs becomes ready and goes through everything that a worker does."""
    await fill(crew.database, BATCH, tenants=tenants)
    keys = await hand.claim(BATCH)
    while len(keys) < BATCH:
        keys += await hand.claim(BATCH - len(keys))
    assert len(await hand.store.renew(dict.fromkeys(keys, b"checkpoint"), lease_seconds=30)) == BATCH
    retried, expired, released = keys[0], keys[1], keys[2]
    assert await hand.store.fail([failed(retried, delay_seconds=86_400)])
    await expire(crew, expired)
    assert len(await hand.store.reap(limit=100)) == 1
    assert await hand.release(released)
    again = await hand.claim(2)
    assert len(await hand.store.complete([completion(key) for key in (*keys[3:], *again)])) == BATCH - 1
    await hand.store.next_ready(["report"])
    await hand.store.queue_depth(["report"], most=1000)


async def expire(crew: Crew, key: JobKey) -> None:
    await crew.database.execute("UPDATE fencepost.jobs SET lease_expires_at = clock_timestamp() WHERE run_id = $1", key.run_id)


async def cost_of_living(crew: Crew, *, pooler: bool = False) -> Mapping[str, Cost]:
    """After enough rounds for the sessions to have settled on their plans. Nothing of what the rounds leave is removed."""
    hand = await crew.hand(pooler=pooler)
    async with held_back(crew):
        await live(crew, hand)
        await forget(crew)
        for _ in range(ROUNDS):
            await live(crew, hand)
        found = await costs(crew)
    await hand.store.close()
    await eventually(lambda: _gone(crew), message="the worker's sessions have ended, and reported")
    return found


@asynccontextmanager
async def held_back(crew: Crew) -> AsyncIterator[None]:
    """Versions of rows that are over stay where they are, and are read. Transactions of other tests, in other databases of this
    server, have that effect now and then: of two measurements each would have a cost of its own."""
    connection = await crew.connect()
    async with connection.transaction():
        await connection.execute("SELECT pg_current_xact_id()")
        yield


async def _gone(crew: Crew) -> bool:
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'fencepost-worker'"
    return bool(await crew.database.fetchval(sessions) == 0)


async def table_scans(crew: Crew) -> Mapping[str, int]:
    rows = await crew.database.fetch(
        "SELECT relname::text AS name, seq_scan FROM pg_stat_user_tables WHERE schemaname = 'fencepost' AND relname = ANY ($1)",
        TABLES,
    )
    return {row["name"]: row["seq_scan"] for row in rows}


# -- plans ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("statistics", ["of empty tables", "of full tables"])
async def test_neither_history_nor_backlog_costs_a_job_anything(crew: Crew, full_crew: Crew, statistics: str) -> None:
    """J64: 200,000 finished jobs and 200,000 of the future, just filled or analyzed since: a few pages of deeper indexes."""
    if statistics == "of full tables":
        await analyze(full_crew)
    empty = await cost_of_living(crew)
    scans_before = await table_scans(full_crew)
    full = await cost_of_living(full_crew)

    assert empty.keys() == full.keys() == set(STATEMENTS)
    assert {name: cost.calls for name, cost in full.items()} == {name: cost.calls for name, cost in empty.items()}
    dear = {name: (empty[name].buffers_a_call, cost.buffers_a_call) for name, cost in full.items() if not within(cost, empty[name])}
    assert dear == {}
    assert await table_scans(full_crew) == scans_before


def within(cost: Cost, empty: Cost) -> bool:
    """Half as much again, and a level more of each index for each row that a batch touches."""
    return cost.buffers_a_call <= empty.buffers_a_call * 1.5 + 4 * BATCH


async def test_behind_a_pooler_analyzed_tables_cost_the_same(crew: Crew, full_crew: Crew) -> None:
    """No settings of the session there: the planner finds the indexes by itself once it knows the tables."""
    await analyze(full_crew)
    empty = await cost_of_living(crew, pooler=True)
    scans_before = await table_scans(full_crew)
    full = await cost_of_living(full_crew, pooler=True)

    dear = {name: (empty[name].buffers_a_call, cost.buffers_a_call) for name, cost in full.items() if not within(cost, empty[name])}
    assert dear == {}
    assert await table_scans(full_crew) == scans_before


async def test_a_claim_in_a_crowd_reads_what_it_takes(full_crew: Crew) -> None:
    """50,000 ready jobs of 100 tenants more: a claim looks at a tenant a slot, not at the crowd."""
    await fill(full_crew.database, 50_000, tenants=100)
    hand = await full_crew.hand()
    await hand.claim(BATCH)
    await forget(full_crew)

    for _ in range(ROUNDS):
        assert len(await hand.claim(BATCH)) == BATCH

    assert (await costs(full_crew))["claim"].buffers_a_call <= 100 * BATCH


async def test_expired_leases_are_found_among_many_live_ones(full_crew: Crew) -> None:
    """20,000 leases, one of them expired at a time: a claim and the reaper read that one."""
    await full_crew.database.execute(
        "UPDATE fencepost.jobs SET state = 'leased', lease_owner = 'B', lease_generation = 1, attempts = 1,"
        " lease_expires_at = clock_timestamp() + interval '1 h'"
        " WHERE ctid IN (SELECT ctid FROM fencepost.jobs WHERE state = 'queued' LIMIT 20000)"
    )
    await full_crew.database.execute("VACUUM fencepost.jobs")  # or what the update left is read as well, while somebody may see it
    hand = await full_crew.hand()
    rows = await full_crew.database.fetch("SELECT run_id FROM fencepost.jobs WHERE state = 'leased' LIMIT 4")
    for place, row in enumerate(rows):
        if place == 2:  # the first of each warmed the session
            await forget(full_crew)
        await expire(full_crew, JobKey(row["run_id"], "", 1))
        assert len(await hand.claim() if place % 2 else await hand.store.reap(limit=100)) == 1

    found = await costs(full_crew)
    assert max(found["claim"].buffers, found["reap"].buffers) <= 200


# -- statements and bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [PLAIN, EncryptingCodec({1: b"k" * 32}, write=1)], ids=["plain", "with data keys"])
async def test_a_batch_of_jobs_is_two_statements_and_an_acceptance_one(crew: Crew, codec: PayloadCodec) -> None:
    """One statement is one round trip: one a job to accept, two a batch to run it. Data keys go along."""
    scope = Scope(tenant_id="acme", principal="ana", operation="POST /reports")
    secrets = Secrets({1: b"s" * 32}, write=[1])
    hand = await crew.hand()
    await forget(crew)
    for number in range(100):
        async with crew.database.transaction():
            command = Command(workflow="report", input={"n": number}, codec=codec)
            await producer.accept(crew.database, command, scope, f"key-{number}", secrets=secrets)
    keys = await hand.claim(100)
    assert len(await hand.store.complete([completion(key) for key in keys])) == 100

    rows = await crew.database.fetch(
        "SELECT query, calls FROM pg_stat_statements AS s JOIN pg_database AS d ON d.oid = s.dbid"
        " WHERE d.datname = current_database() AND toplevel AND query LIKE '%fencepost%' AND query NOT LIKE '%pg_stat_statements%'"
    )
    assert {name: cost.calls for name, cost in (await costs(crew)).items() if name in ("claim", "complete")} == {
        "claim": 1,
        "complete": 1,
    }
    assert [row["calls"] for row in rows if "fencepost.accept" in row["query"]] == [100]
    assert sum(row["calls"] for row in rows) == 102


async def test_a_jobs_bytes_of_wal_are_bounded(crew: Crew) -> None:
    """From its claim to its end, in batches of 100, with its event and its outbox row: what replicas and archives carry for it."""
    hand = await crew.hand()
    for _ in range(2):  # the first batch grows the files
        await forget(crew)
        for _ in range(100):
            await crew.runs.accept()
        keys = await hand.claim(100)
        assert len(await hand.store.renew(dict.fromkeys(keys), lease_seconds=30)) == 100
        assert len(await hand.store.complete([completion(key) for key in keys])) == 100
    found = await costs(crew)

    bounds = {"claim": 1600, "renew": 600, "complete": 2600}
    spent = {name: found[name].wal_bytes / 100 for name in bounds}
    assert {name: spent[name] for name in bounds if spent[name] > bounds[name]} == {}
