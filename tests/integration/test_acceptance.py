"""Accepting a command on real PostgreSQL: all facts or none, one run a key, whatever happens at the same time."""

import asyncio
import hashlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any, TypeAlias
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID, uuid4

import asyncpg
import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uuid_utils.compat import uuid7

from fencepost.canonical_json import canonical_json
from fencepost.devservices import Services
from producer_sdk import (
    UNKEYED,
    Accepted,
    Cancellation,
    Command,
    ConfigurationError,
    IdempotencyConflict,
    IdempotencyError,
    InProgress,
    InvalidCommand,
    InvalidInput,
    KeyExpired,
    KeyInvalid,
    KeyMissing,
    RunChanged,
    RunEnded,
    RunNotFound,
    Scope,
    Secrets,
    Submission,
    TransactionRequired,
)
from producer_sdk.asyncpg import accept, accept_many, cancel, read_run
from producer_sdk.command_rules import MAX_INPUT_BYTES
from producer_sdk.identity import Unkeyed
from tests.support.runs import Held, Runs
from tests.support.session import SharedServices
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import eventually

Connection: TypeAlias = Any  # of asyncpg, or a pool's
Connect: TypeAlias = Callable[..., Any]

FIVE_TABLES = ("runs", "run_events", "jobs", "idempotency_keys", "outbox")
LEVELS = ("read committed", "repeatable read", "serializable")
STRICT = LEVELS[1:]
SECRETS = Secrets({1: b"1" * 32}, write=(1,))
SCOPE = Scope(tenant_id="acme", principal="ana", operation="POST /reports")
BOUND_SECONDS = 30


def command(**changes: Any) -> Command:
    """A command that may be accepted, with changes. Its workflow is that of `Runs`."""
    fields: dict[str, Any] = {"workflow": "report", "input": {"month": 1}, "max_attempts": 3} | changes
    return Command(**fields)


OTHER = {"input": {"month": 2}}


def new_key() -> str:
    return uuid4().hex


async def call(
    connection: Connection,
    key: str | Unkeyed,
    *,
    scope: Scope = SCOPE,
    secrets: Secrets = SECRETS,
    wait_seconds: float = 0,
    **changes: Any,
) -> Accepted:
    """Accept a command on a connection with an open transaction."""
    return await accept(connection, command(**changes), scope, key, secrets=secrets, wait_seconds=wait_seconds)


async def commit(connection: Connection, key: str | Unkeyed, **options: Any) -> Accepted:
    """Accept a command in a transaction of its own."""
    async with connection.transaction():
        return await call(connection, key, **options)


@pytest.fixture(scope="module")
def module_database_url(services: Services, shared_services: SharedServices) -> Iterator[str]:
    """One database with a business table for the tests that count by key: making one takes longer than such a test."""
    url = services.create_database(shared_services.template_url)
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE business (note text)")
    yield url
    services.drop_database(url)


@pytest.fixture
async def connect(module_database_url: str) -> AsyncIterator[Connect]:
    """Opens connections to the module's database."""
    opened: list[Connection] = []

    async def connect_one(url: str = module_database_url) -> Connection:
        opened.append(await asyncpg.connect(url))
        return opened[-1]

    yield connect_one
    for connection in opened:
        connection.terminate()


@pytest.fixture
async def connection(connect: Connect) -> Connection:
    return await connect()


@pytest.fixture
async def own(database_url: str, connect: Connect) -> Connection:
    """A connection to a database of the test's own, for tests that change or count whole tables."""
    return await connect(database_url)


async def counts(connection: Connection) -> dict[str, int]:
    return {table: await connection.fetchval(f"SELECT count(*) FROM fencepost.{table}") for table in FIVE_TABLES}


ONE_RUN = dict.fromkeys(FIVE_TABLES, 1)
NOTHING = dict.fromkeys(FIVE_TABLES, 0)


# All facts or none


async def test_acceptance_commits_four_facts_and_the_outbox_row(own: Connection) -> None:
    """J7."""
    made = command(delay_seconds=60, deadline_seconds=30.5, cost_limit=1.5, version=3, traceparent="00-1-2-01", topic="events")
    async with own.transaction():
        accepted = await accept(own, made, SCOPE, "k-1", secrets=SECRETS, key_retention_seconds=600)
        assert await counts(own) == ONE_RUN
    assert accepted == Accepted("created", made.run_id, "queued")
    assert await counts(own) == ONE_RUN
    run = await own.fetchrow("SELECT * FROM fencepost.runs")
    assert (run["run_id"], run["tenant_id"], run["root_run_id"], run["replay_of"]) == (made.run_id, "acme", made.run_id, None)
    assert (run["workflow"], run["workflow_version"], run["topic"], run["traceparent"]) == ("report", 3, "events", "00-1-2-01")
    assert (run["state"], run["version"], run["input"], run["output"]) == ("queued", 1, b'{"month":1}', None)
    event = await own.fetchrow("SELECT * FROM fencepost.run_events")
    assert (event["run_id"], event["sequence"], event["type"]) == (made.run_id, 1, "run_queued")
    job = await own.fetchrow(
        "SELECT *, available_at - $1 AS delay, deadline_at - available_at AS deadline FROM fencepost.jobs", run["created_at"]
    )
    assert (job["run_id"], job["state"], job["attempts"], job["max_attempts"]) == (made.run_id, "queued", 0, 3)
    assert (job["delay"], job["deadline"], str(job["cost_limit"])) == (timedelta(minutes=1), timedelta(seconds=30.5), "1.5")
    stored = await own.fetchrow("SELECT *, expires_at - created_at AS retention FROM fencepost.idempotency_keys")
    assert (stored["run_id"], stored["key_version"], stored["fingerprint_profile"]) == (made.run_id, 1, 1)
    assert stored["schema_version"] == 3
    assert abs(stored["retention"] - timedelta(minutes=10)) < timedelta(seconds=5)
    row = await own.fetchrow("SELECT * FROM fencepost.outbox")
    assert (row["topic"], row["event_type"], row["key"]) == ("events", "fencepost.run_queued", str(made.run_id).encode())
    assert (row["run_id"], row["tenant_id"], row["traceparent"]) == (str(made.run_id), "acme", "00-1-2-01")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("table", FIVE_TABLES)
async def test_a_fault_in_any_of_the_five_tables_leaves_nothing(own: Connection, table: str, level: str) -> None:
    """JOB-1."""
    await own.execute(
        f"""CREATE FUNCTION fault() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN RAISE EXCEPTION 'disk full' USING ERRCODE = 'disk_full'; END $$;
            CREATE TRIGGER fault AFTER INSERT ON fencepost.{table} FOR EACH STATEMENT EXECUTE FUNCTION fault()"""
    )
    async with begin(own, level):
        with pytest.raises(asyncpg.DiskFullError):
            await commit(own, "k-1")
        assert await counts(own) == NOTHING
    assert await counts(own) == NOTHING
    await own.execute(f"DROP TRIGGER fault ON fencepost.{table}")
    assert (await commit(own, "k-1")).created
    assert await counts(own) == ONE_RUN


async def test_the_callers_transaction_stays_the_callers(own: Connection) -> None:
    """JOB-2."""
    await own.execute("CREATE TABLE business (note text)")
    existing = await commit(own, UNKEYED)
    async with own.transaction():
        before = await own.fetchval("SELECT pg_current_xact_id()::text")
        await own.execute("INSERT INTO business VALUES ('order')")
        with pytest.raises(InvalidCommand):
            await commit(own, "k-1", run_id=existing.run_id)
        assert await own.fetchval("SELECT pg_current_xact_id()::text") == before
    assert await own.fetchval("SELECT count(*) FROM business") == 1
    assert (await counts(own))["runs"] == 1


async def test_a_rolled_back_acceptance_leaves_nothing_and_rings_nobody(
    own: Connection, connect: Connect, database_url: str
) -> None:
    """JOB-3. A notification sent afterwards arrives, so what was sent before would have."""
    heard: list[str] = []
    listener = await connect(database_url)
    for channel in ("fencepost_jobs", "fencepost_doorbell", "last"):
        await listener.add_listener(channel, lambda *said: heard.append(said[2]))
    for bell in ("jobs", *range(8)):
        await own.execute(f"SELECT setval('fencepost.doorbell_{bell}', (extract(epoch FROM now()) * 1000)::bigint + 600000)")
    transaction = own.transaction()
    await transaction.start()
    await call(own, "k-1")
    await transaction.rollback()
    await own.execute("NOTIFY last")
    await eventually(lambda: "last" in heard)
    assert heard == ["last"]
    assert await counts(own) == NOTHING

    assert (await commit(own, "k-1")).created
    await own.execute("NOTIFY last")
    await eventually(lambda: heard.count("last") == 2)
    assert sorted(heard[1:-1]) == ["fencepost_doorbell", "fencepost_jobs"]


async def test_an_acceptance_is_one_statement(own: Connection, connect: Connect, database_url: str) -> None:
    """Created, replayed and many: BEGIN and COMMIT are the caller's."""
    monitor = await connect(database_url)
    if "pg_stat_statements" not in await monitor.fetchval("SHOW shared_preload_libraries"):
        pytest.skip("the given PostgreSQL does not load pg_stat_statements")
    await monitor.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
    counting = """SELECT coalesce(sum(calls), 0)::int FROM pg_stat_statements JOIN pg_database ON oid = dbid
                  WHERE datname = current_database() AND query NOT LIKE '%pg_stat_statements%'"""

    async def sent(work: Any) -> int:
        before = await monitor.fetchval(counting)
        async with own.transaction():
            await work
        return int(await monitor.fetchval(counting) - before)

    await commit(own, UNKEYED)  # asyncpg asks for the types of the parameters, once a connection
    empty = await sent(asyncio.sleep(0))
    assert await sent(call(own, "k-1")) - empty == 1
    assert await sent(call(own, "k-1")) - empty == 1
    assert await sent(call(own, UNKEYED)) - empty == 1


# Replays and conflicts


async def test_a_replay_names_the_original_run(own: Connection) -> None:
    """KEY-10, J15."""
    proposed = [uuid7(), uuid7()]
    first = await commit(own, "k-1", run_id=proposed[0])
    second = await commit(own, "k-1", run_id=proposed[1])
    assert first == Accepted("created", proposed[0], "queued")
    assert second == Accepted("replayed", proposed[0], "queued")
    with pytest.raises(IdempotencyConflict):
        await commit(own, "k-1", **OTHER)
    assert await counts(own) == ONE_RUN
    assert await Runs(own).events(proposed[0]) == [(1, "run_queued")]


async def test_a_key_is_replayed_in_the_transaction_that_created_it(connection: Connection) -> None:
    key = new_key()
    async with connection.transaction():
        first = await call(connection, key)
        assert await call(connection, key) == Accepted("replayed", first.run_id, "queued")


async def test_a_retry_with_the_servers_new_times_is_a_replay(connection: Connection) -> None:
    """FINGERPRINT-16."""
    key = new_key()
    first = await commit(connection, key, input={"month": 1, "now": 1}, request={"month": 1})
    assert await commit(connection, key, input={"month": 1, "now": 2}, request={"month": 1}) == Accepted(
        "replayed", first.run_id, "queued"
    )
    assert await connection.fetchval("SELECT input FROM fencepost.runs WHERE run_id = $1", first.run_id) == b'{"month":1,"now":1}'


async def moved(runs: Runs, run_id: UUID, state: str) -> None:
    """Bring the one run of a tenant into a state, by what workers and operators do."""
    if state == "queued":
        return
    if state == "cancelled":
        assert await runs.cancel(run_id) == "cancelled"
        return
    held: Held = await runs.claim_one()
    match state:
        case "completed":
            assert await runs.complete(held, output=b'{"pages":3}')
        case "dead":
            assert await runs.fail(held, delay=None, reason="terminal", error_class="terminal", error_code="bad_month")


RUN_STATES = {"queued": "queued", "leased": "running", "completed": "completed", "dead": "failed", "cancelled": "cancelled"}


@pytest.mark.parametrize("state", RUN_STATES)
async def test_the_request_is_compared_in_every_state_of_the_run(own: Connection, state: str) -> None:
    """KEY-9."""
    first = await commit(own, "k-1")
    await moved(Runs(own), first.run_id, state)
    with pytest.raises(IdempotencyConflict):
        await commit(own, "k-1", **OTHER)
    assert await commit(own, "k-1") == Accepted("replayed", first.run_id, RUN_STATES[state])
    assert (await counts(own))["runs"] == 1


@pytest.mark.parametrize("how", ["past its time", "a tombstone"])
@pytest.mark.parametrize("changes", [{}, OTHER], ids=["same", "other"])
async def test_an_expired_key_starts_nothing(own: Connection, how: str, changes: dict[str, Any]) -> None:
    """KEY-18, J19."""
    await commit(own, "k-1")
    if how == "a tombstone":
        await own.execute(
            "UPDATE fencepost.idempotency_keys SET run_id = NULL, fingerprint = NULL, fingerprint_profile = NULL,"
            " schema_version = NULL"
        )
    else:
        await own.execute("UPDATE fencepost.idempotency_keys SET expires_at = clock_timestamp()")
    async with own.transaction():
        with pytest.raises(KeyExpired):
            await call(own, "k-1", **changes)
        await own.execute("SELECT 1")
    assert await counts(own) == ONE_RUN


async def test_no_key_is_no_shared_key(own: Connection) -> None:
    """KEY-5."""
    first, second = await commit(own, UNKEYED), await commit(own, UNKEYED)
    assert first.created
    assert second.created
    assert first.run_id != second.run_id
    assert await counts(own) == {**dict.fromkeys(FIVE_TABLES, 2), "idempotency_keys": 0}


async def test_a_key_that_cannot_be_used_sends_nothing(connection: Connection) -> None:
    async with connection.transaction():
        with pytest.raises(KeyMissing):
            await call(connection, None)  # type: ignore[arg-type]
        with pytest.raises(KeyInvalid):
            await call(connection, "")
        assert (await call(connection, new_key())).created


async def test_the_longest_key_in_the_longest_scope(connection: Connection) -> None:
    """KEY-4."""
    scope = Scope(tenant_id="t" * 256, principal="\U0001f600" * 3_000, operation="o" * 3_000)
    key = (new_key() * 8)[:255]
    first = await commit(connection, key, scope=scope)
    assert await commit(connection, key, scope=scope) == Accepted("replayed", first.run_id, "queued")


@pytest.mark.parametrize("part", ["tenant_id", "principal", "operation"])
async def test_a_key_belongs_to_its_whole_scope(connection: Connection, part: str) -> None:
    """KEY-6, KEY-7, J11."""
    key = new_key()
    values = {"tenant_id": "acme", "principal": "ana", "operation": "POST /reports"}
    first = await commit(connection, key)
    second = await commit(connection, key, scope=Scope(**(values | {part: "other"})))
    assert second.created
    assert first.run_id != second.run_id


@pytest.mark.parametrize("separator", [":", "/", "|", ",", " ", "\n", "\x1f", "\x01"])
async def test_parts_of_an_identity_do_not_run_together(connection: Connection, separator: str) -> None:
    """SEC-6."""
    tail = new_key()
    scopes = [
        Scope(tenant_id="acme", principal="a", operation=f"b{separator}c"),
        Scope(tenant_id="acme", principal=f"a{separator}b", operation="c"),
        Scope(tenant_id=f"acme{separator}a", principal="b", operation="c"),
    ]
    identities = [(scope, tail) for scope in scopes]
    if separator.isprintable():
        identities += [
            (Scope(tenant_id="acme", principal="p", operation="a"), f"b{separator}{tail}"),
            (Scope(tenant_id="acme", principal="p", operation=f"a{separator}b"), tail),
        ]
    accepted = [await commit(connection, key, scope=scope) for scope, key in identities]
    assert all(one.created for one in accepted)
    assert len({one.run_id for one in accepted}) == len(identities)


@pytest.mark.parametrize("parts", [("", "p", "o"), ("t", "", "o"), ("t", "p", ""), (None, "p", "o"), ("a\0b", "p", "o")])
def test_a_scope_is_mandatory_and_whole(parts: Sequence[Any]) -> None:
    """SEC-5."""
    with pytest.raises(InvalidInput):
        Scope(tenant_id=parts[0], principal=parts[1], operation=parts[2])


# At the same time


async def test_a_duplicate_of_an_open_transaction_learns_it_at_once_and_holds_nothing(own: Connection, database_url: str) -> None:
    """KEY-13. Nobody waits for the open transaction, which ends only after all of them: who did would run into the limit."""
    async with asyncpg.create_pool(database_url, min_size=10, max_size=10, server_settings={"lock_timeout": "5s"}) as pool:
        transaction = own.transaction()
        await transaction.start()
        await call(own, "k-1")

        async def twin() -> None:
            async with pool.acquire() as connection, connection.transaction():
                with pytest.raises(InProgress):
                    await call(connection, "k-1")
                held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
                assert await connection.fetchval(held) == 0

        async def stranger(key: str) -> None:
            async with pool.acquire() as connection:
                assert (await commit(connection, key)).created

        await asyncio.gather(*(twin() for _ in range(20)), *(stranger(f"other-{number}") for number in range(20)))
        assert pool.get_idle_size() == 10
        await transaction.commit()
        async with pool.acquire() as connection:
            assert (await commit(connection, "k-1")).outcome == "replayed"


async def test_waiting_for_an_open_transaction_is_bounded(connection: Connection, connect: Connect) -> None:
    """KEY-13."""
    key, other = new_key(), await connect()
    async with asyncio.timeout(BOUND_SECONDS), connection.transaction():
        await call(connection, key)
        async with other.transaction():
            with pytest.raises(InProgress):
                await call(other, key, wait_seconds=0.2)
            assert (await call(other, new_key())).created


@asynccontextmanager
async def waiting_twin(connection: Connection, monitor: Connection, key: str) -> AsyncIterator["asyncio.Task[Accepted]"]:
    """A second call with the key, which has tried and waits to try again."""
    task = asyncio.create_task(commit(connection, key, wait_seconds=BOUND_SECONDS))
    state = "SELECT state = 'idle in transaction' AND query LIKE '%fencepost:accept%' FROM pg_stat_activity WHERE pid = $1"
    await eventually(lambda: monitor.fetchval(state, connection.get_server_pid()), message="the twin has tried")
    yield task
    if not task.done():
        task.cancel()


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_a_duplicate_that_waits_gets_what_became_of_the_first(connect: Connect, end: str) -> None:
    """KEY-14."""
    key = new_key()
    first, second, monitor = [await connect() for _ in range(3)]
    transaction = first.transaction()
    await transaction.start()
    original = await call(first, key)
    async with waiting_twin(second, monitor, key) as twin, asyncio.timeout(BOUND_SECONDS):
        await (transaction.commit() if end == "commit" else transaction.rollback())
        accepted = await twin
    assert accepted.created == (end == "rollback")
    assert (accepted.run_id == original.run_id) == (end == "commit")
    assert (
        await monitor.fetchval("SELECT count(*) FROM fencepost.runs WHERE run_id = ANY($1)", [accepted.run_id, original.run_id])
        == 1
    )


class Abandoned(Exception):
    """The service gives its work up."""


class Ending:
    """Whether a transaction committed."""

    committed = True


@asynccontextmanager
async def begin(connection: Connection, level: str) -> AsyncIterator[Ending]:
    """A transaction of this level. SERIALIZABLE may refuse the COMMIT, and there only: that is the caller's to retry."""
    transaction = connection.transaction(isolation=level.replace(" ", "_"))
    await transaction.start()
    ending = Ending()
    try:
        yield ending
    except BaseException:
        await transaction.rollback()
        raise
    try:
        await transaction.commit()
    except asyncpg.SerializationError:
        assert level == "serializable"
        ending.committed = False


async def usable(connection: Connection) -> None:
    """The transaction takes a domain row and reads it."""
    await connection.execute("INSERT INTO business VALUES ('order')")
    assert await connection.fetchval("SELECT count(*) > 0 FROM business")


PAIRS = list(itertools.product(LEVELS, LEVELS))


@pytest.mark.parametrize(("winner", "loser"), PAIRS)
async def test_while_the_winner_is_open_the_loser_is_told_in_progress(connect: Connect, winner: str, loser: str) -> None:
    """KEY-15, the order in which both are open."""
    key = new_key()
    first, second = await connect(), await connect()
    async with begin(first, winner) as end:
        original = await call(first, key)
        async with begin(second, loser):
            with pytest.raises(InProgress):
                await call(second, key)
            await usable(second)
    again = await commit(second, key)
    assert (again.created, again.run_id == original.run_id) == (not end.committed, end.committed)


@pytest.mark.parametrize(("winner", "loser"), PAIRS)
async def test_after_the_winner_committed_a_loser_with_an_older_snapshot_is_told_so(
    connect: Connect, winner: str, loser: str
) -> None:
    """KEY-15, the order in which the winner ends before the loser asks."""
    key = new_key()
    first, second = await connect(), await connect()
    async with begin(second, loser):
        await second.fetchval("SELECT count(*) FROM fencepost.lanes")  # takes the snapshot, where one is taken
        async with begin(first, winner):
            original = await call(first, key)
        if loser == "read committed":
            assert await call(second, key) == Accepted("replayed", original.run_id, "queued")
        else:
            async with asyncio.timeout(BOUND_SECONDS):
                with pytest.raises(InProgress, match="in a new transaction"):
                    await call(second, key, wait_seconds=60)
        await usable(second)
    async with begin(second, loser):
        assert await call(second, key) == Accepted("replayed", original.run_id, "queued")


@pytest.mark.parametrize(("winner", "loser"), PAIRS)
async def test_a_winner_that_rolled_back_leaves_the_key_to_an_older_snapshot(connect: Connect, winner: str, loser: str) -> None:
    """KEY-14 under every level."""
    key = new_key()
    first, second = await connect(), await connect()
    async with begin(second, loser):
        await second.fetchval("SELECT count(*) FROM fencepost.lanes")
        with suppress(Abandoned):
            async with begin(first, winner):
                await call(first, key)
                with pytest.raises(InProgress):
                    await call(second, key)
                raise Abandoned
        assert (await call(second, key)).created
        await usable(second)


@pytest.mark.parametrize("level", LEVELS)
async def test_two_at_once_never_see_the_databases_own_conflict(connect: Connect, level: str) -> None:
    """KEY-15, with the loop of the guide: the whole transaction again after ``InProgress`` or a refused COMMIT."""
    connections = [await connect() for _ in range(2)]

    async def told(connection: Connection, key: str, barrier: asyncio.Barrier) -> str:
        for attempt in itertools.count():
            with suppress(InProgress):
                async with begin(connection, level) as end:
                    await connection.fetchval("SELECT count(*) FROM fencepost.lanes")  # takes the snapshot, where one is taken
                    if attempt == 0:
                        await barrier.wait()
                    outcome = (await call(connection, key, input=key)).outcome
                if end.committed:
                    return outcome
        raise AssertionError

    for _ in range(20):
        key, barrier = new_key(), asyncio.Barrier(2)
        async with asyncio.timeout(BOUND_SECONDS):
            outcomes = await asyncio.gather(*(told(connection, key, barrier) for connection in connections))
        assert sorted(outcomes) == ["created", "replayed"]
        runs = "SELECT count(*) FROM fencepost.runs WHERE convert_from(input, 'UTF8') = $1"
        assert await connections[0].fetchval(runs, f'"{key}"') == 1


@pytest.mark.parametrize("level", STRICT)
async def test_a_run_id_that_both_derived_from_the_key_changes_nothing(connect: Connect, level: str) -> None:
    """KEY-15: the winner's run id collides before its key does."""
    key, run_id = new_key(), uuid7()
    first, second = await connect(), await connect()
    async with begin(second, level):
        await second.fetchval("SELECT count(*) FROM fencepost.lanes")
        await commit(first, key, run_id=run_id)
        with pytest.raises(InProgress):
            await call(second, key, run_id=run_id)
        await usable(second)
    async with begin(second, level):
        with pytest.raises(InvalidCommand, match="run_id"):
            await commit(second, new_key(), run_id=run_id)
        await usable(second)


async def test_a_thousand_duplicates_from_two_event_loops_are_one_run(own: Connection, database_url: str) -> None:
    """KEY-16 without HTTP: 20 connections in two threads, all at the barrier before the first call."""
    barrier = threading.Barrier(2)
    answers: list[str] = []

    async def caller(connection: Connection, together: asyncio.Barrier) -> None:
        await together.wait()
        for _ in range(50):
            try:
                answers.append((await commit(connection, "k-1")).outcome)
            except InProgress as error:
                answers.append(error.code)

    async def half() -> None:
        connections = [await asyncpg.connect(database_url) for _ in range(10)]
        await asyncio.to_thread(barrier.wait, BOUND_SECONDS)
        together = asyncio.Barrier(10)
        await asyncio.gather(*(caller(connection, together) for connection in connections))
        for connection in connections:
            await connection.close()

    await asyncio.gather(*(asyncio.to_thread(asyncio.run, half()) for _ in range(2)))
    assert len(answers) == 1_000
    assert answers.count("created") == 1
    assert set(answers) <= {"created", "replayed", "idempotency_in_progress"}
    assert await counts(own) == ONE_RUN


async def test_an_answer_lost_after_the_commit_is_found_again(own: Connection, database_url: str, connect: Connect) -> None:
    """KEY-12: the network goes while the server commits."""
    await own.execute(
        """CREATE TABLE business (note text);
           CREATE FUNCTION wait_at_commit() RETURNS trigger LANGUAGE plpgsql AS
               $$ BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NULL; END $$;
           CREATE CONSTRAINT TRIGGER gate AFTER INSERT ON business DEFERRABLE INITIALLY DEFERRED
               FOR EACH ROW EXECUTE FUNCTION wait_at_commit()"""
    )
    made = command()
    async with TcpProxy(database_url) as proxy:
        client = await asyncpg.connect(proxy.url)

        async def serve() -> None:
            async with client.transaction():
                await client.execute("INSERT INTO business VALUES ('order')")
                await accept(client, made, SCOPE, "k-1", secrets=SECRETS)

        await own.execute("SELECT pg_advisory_lock(42)")
        service = asyncio.create_task(serve())
        waiting = "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 42 AND NOT granted)"
        await eventually(lambda: own.fetchval(waiting), message="the server is in the middle of the commit")
        proxy.silence()
        await own.execute("SELECT pg_advisory_unlock(42)")
        await eventually(lambda: own.fetchval("SELECT EXISTS (SELECT FROM fencepost.runs)"), message="the commit is done")
        assert not service.done()
        client.terminate()
        with pytest.raises(asyncpg.ConnectionDoesNotExistError):
            await service
    elsewhere = await connect(database_url)
    assert await commit(elsewhere, "k-1") == Accepted("replayed", made.run_id, "queued")
    assert await counts(own) == ONE_RUN


# Many in one call


def submissions(*keys: Any, **changes: Any) -> list[Submission]:
    return [Submission(command(**changes), SCOPE, key) for key in keys]


async def test_one_dead_key_inside_a_batch_spoils_no_other(own: Connection) -> None:
    """KEY-17."""
    dead = await commit(own, "dead")
    await moved(Runs(own), dead.run_id, "dead")
    async with own.transaction():
        batch = await accept_many(own, submissions("a", "dead", "b"), secrets=SECRETS)
        alone = await call(own, "dead")
    assert [type(one) for one in batch] == [Accepted] * 3
    assert [one.outcome for one in batch if isinstance(one, Accepted)] == ["created", "replayed", "created"]
    assert batch[1] == alone == Accepted("replayed", dead.run_id, "failed")
    assert (await read_run(own, dead.run_id, tenant_id="acme")).error_code == "bad_month"
    assert (await counts(own))["runs"] == 3


async def test_each_of_a_batch_has_its_own_outcome(own: Connection, connect: Connect, database_url: str) -> None:
    other = await connect(database_url)
    await commit(own, "taken", **OTHER)
    await commit(own, "old")
    await own.execute("UPDATE fencepost.idempotency_keys SET expires_at = clock_timestamp() WHERE run_id IN"
                      " (SELECT run_id FROM fencepost.runs WHERE input = '{\"month\":1}')")  # fmt: skip
    async with other.transaction():
        await call(other, "open")
        async with own.transaction():
            batch = await accept_many(own, submissions("new", "taken", "old", "open", "", "new", UNKEYED), secrets=SECRETS)
            assert (await call(own, "later")).created
    said = [one.code if isinstance(one, IdempotencyError) else one.outcome for one in batch]
    assert said == [
        "created", "idempotency_conflict", "idempotency_key_expired", "idempotency_in_progress", "idempotency_key_invalid",
        "replayed", "created",
    ]  # fmt: skip


async def test_an_empty_batch_is_no_statement_but_still_needs_a_transaction(connection: Connection) -> None:
    async with connection.transaction():
        assert await accept_many(connection, [], secrets=SECRETS) == []
    with pytest.raises(TransactionRequired):
        await accept_many(connection, [], secrets=SECRETS)


async def test_a_refusal_by_the_database_undoes_the_whole_batch(own: Connection) -> None:
    run_id = uuid7()
    with pytest.raises(InvalidCommand, match="run_id"):
        async with own.transaction():
            await accept_many(own, submissions("a", "b", run_id=run_id), secrets=SECRETS)
    assert await counts(own) == NOTHING


# Secrets in rotation


V1, V2 = b"1" * 32, b"2" * 32
PHASES = [
    Secrets({1: V1}, write=(1,)),
    Secrets({1: V1, 2: V2}, write=(1,)),
    Secrets({1: V1, 2: V2}, write=(1, 2)),
    Secrets({1: V1, 2: V2}, write=(2,)),
    Secrets({2: V2}, write=(2,)),
]
NEIGHBOURS = [order for pair in itertools.pairwise(range(len(PHASES))) for order in (pair, pair[::-1])]


@pytest.mark.parametrize(("before", "after"), NEIGHBOURS)
async def test_processes_of_neighbouring_phases_share_their_keys(own: Connection, before: int, after: int) -> None:
    """KEY-20, each pair of phases in both orders."""
    first = await commit(own, "k-1", secrets=PHASES[before])
    assert await commit(own, "k-1", secrets=PHASES[after]) == Accepted("replayed", first.run_id, "queued")
    with pytest.raises(IdempotencyConflict):
        await commit(own, "k-1", secrets=PHASES[after], **OTHER)
    assert (await counts(own))["runs"] == 1


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("one", "other"), NEIGHBOURS)
async def test_processes_of_neighbouring_phases_at_once_start_one_run(connect: Connect, one: int, other: int, level: str) -> None:
    """KEY-20, at once: while the first is open, and after it for a snapshot that is older."""
    key = new_key()
    first, second = await connect(), await connect()
    async with begin(second, level):
        await second.fetchval("SELECT count(*) FROM fencepost.lanes")
        async with begin(first, level):
            original = await call(first, key, secrets=PHASES[one])
            with pytest.raises(InProgress):
                await call(second, key, secrets=PHASES[other])
        if level == "read committed":
            assert await call(second, key, secrets=PHASES[other]) == Accepted("replayed", original.run_id, "queued")
        else:
            with pytest.raises(InProgress):
                await call(second, key, secrets=PHASES[other])
        await usable(second)
    assert await commit(second, key, secrets=PHASES[other]) == Accepted("replayed", original.run_id, "queued")


@pytest.mark.parametrize(("one", "other"), [pair for pair in NEIGHBOURS if pair[0] < pair[1]])
async def test_a_rolling_deploy_of_a_phase_starts_one_run_a_key(connect: Connect, one: int, other: int) -> None:
    """KEY-20, at once from a barrier."""
    connections = [await connect() for _ in range(4)]
    phases = [PHASES[one], PHASES[other]] * 2
    for _ in range(15):
        key, barrier = new_key(), asyncio.Barrier(len(connections))

        async def accepting(
            connection: Connection, secrets: Secrets, key: str = key, barrier: asyncio.Barrier = barrier
        ) -> Accepted:
            await barrier.wait()
            return await commit(connection, key, secrets=secrets, wait_seconds=BOUND_SECONDS)

        accepted = await asyncio.gather(*map(accepting, connections, phases))
        assert sorted(result.outcome for result in accepted) == ["created", "replayed", "replayed", "replayed"]
        assert len({result.run_id for result in accepted}) == 1


async def test_a_process_that_writes_two_versions_and_gets_one_lock_gives_it_back(connect: Connect) -> None:
    """KEY-13 in a rotation: who was told in progress is in nobody's way."""
    key = new_key()
    first, told, third = [await connect() for _ in range(3)]
    async with told.transaction():
        with suppress(Abandoned):
            async with begin(first, "read committed"):
                await call(first, key, secrets=PHASES[3])
                with pytest.raises(InProgress):
                    await call(told, key, secrets=PHASES[2])
                raise Abandoned
        assert (await commit(third, key, secrets=PHASES[2])).created


async def test_old_keys_live_through_the_whole_rotation(own: Connection) -> None:
    """KEY-20, FINGERPRINT-17: judged under the version that they were stored with, and no row is rewritten."""
    first = await commit(own, "k-1", secrets=PHASES[0])
    rows = await own.fetch("SELECT * FROM fencepost.idempotency_keys")
    for secrets in PHASES[1:4]:
        assert await commit(own, "k-1", secrets=secrets) == Accepted("replayed", first.run_id, "queued")
        with pytest.raises(IdempotencyConflict):
            await commit(own, "k-1", secrets=secrets, **OTHER)
    assert await own.fetch("SELECT * FROM fencepost.idempotency_keys") == rows


# Who may do and see what


async def test_nothing_stored_can_be_guessed(own: Connection) -> None:
    """SEC-2, J18."""
    key, request = "secret-key-1234", {"code": 1234}
    hidden = [
        key.encode(),
        *(hashlib.sha256(value).digest() for value in (key.encode(), canonical_json(request), b'{"code":1234}')),
    ]
    await commit(own, key, input={}, request=request)
    dump = await _dump(own)
    for value in hidden:
        assert value.hex() not in dump
        assert value.decode(errors="ignore") not in dump or len(value.decode(errors="ignore")) < 8
    stored = "SELECT key_hash, fingerprint FROM fencepost.idempotency_keys"
    before = await own.fetchrow(stored)
    await own.execute("TRUNCATE fencepost.runs CASCADE")
    await commit(own, key, input={}, request=request, secrets=Secrets({1: b"other" * 8}, write=(1,)))
    after = await own.fetchrow(stored)
    assert before["key_hash"] != after["key_hash"]
    assert before["fingerprint"] != after["fingerprint"]


async def _dump(connection: Connection) -> str:
    tables = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'fencepost'")
    rows = [await connection.fetch(f"SELECT t::text AS row FROM fencepost.{table['tablename']} AS t") for table in tables]
    return "\n".join(row["row"] for table in rows for row in table)


@pytest.fixture
async def producer(own: Connection, database_url: str, connect: Connect) -> AsyncIterator[Connection]:
    """A connection of a user who may log in and is a producer."""
    name = f"producer_{uuid4().hex}"
    await own.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{name}' IN ROLE fencepost_producer")
    parts = urlsplit(database_url)
    connection = await connect(urlunsplit(parts._replace(netloc=f"{name}:{name}@{parts.hostname}:{parts.port}")))
    yield connection
    await connection.close()
    await own.execute(f"DROP ROLE {name}")


async def test_the_producer_role_is_all_that_a_service_needs(producer: Connection, own: Connection) -> None:
    first = await commit(producer, "k-1")
    assert (await commit(producer, "k-1")).outcome == "replayed"
    async with begin(producer, "serializable"):
        assert (await call(producer, "k-2")).created
        assert len(await accept_many(producer, submissions("k-3", UNKEYED), secrets=SECRETS)) == 2
    assert (await read_run(producer, first.run_id, tenant_id="acme")).state == "queued"
    async with producer.transaction():
        await cancel(producer, first.run_id, tenant_id="acme", actor="ana", reason="test")
    assert (await counts(own))["runs"] == 4


async def test_the_producer_role_may_touch_no_table(producer: Connection, own: Connection) -> None:
    tables = [row["tablename"] for row in await own.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'fencepost'")]
    assert set(FIVE_TABLES) < set(tables)
    for table in tables:
        readable = "SELECT has_table_privilege($1, $2, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER')"
        if table not in ("migrations",):
            assert not await own.fetchval(readable, producer.get_settings().session_authorization, f"fencepost.{table}"), table
    for sql in (
        "SELECT fencepost.start_run",
        "SELECT fencepost.bind_key",
        "SELECT fencepost.append_run_event",
        "SELECT fencepost.ring_workers",
    ):
        name = sql.removeprefix("SELECT ")
        granted = "SELECT bool_or(has_function_privilege($1, p.oid, 'EXECUTE')) FROM pg_proc AS p WHERE p.oid::regproc::text = $2"
        assert await own.fetchval(granted, producer.get_settings().session_authorization, name) is False, name


async def test_a_user_without_the_role_is_an_operators_error(own: Connection) -> None:
    async with own.transaction():
        await own.execute("SET LOCAL ROLE pg_monitor")
        with pytest.raises(ConfigurationError, match="GRANT fencepost_producer"):
            await call(own, "k-1")


# Cancelling and reading


async def cancelled(connection: Connection, run_id: UUID, **options: Any) -> Cancellation:
    async with connection.transaction():
        return await cancel(connection, run_id, **({"tenant_id": "acme", "actor": "ana", "reason": "test"} | options))


async def test_a_queued_run_is_cancelled_at_once(own: Connection) -> None:
    run_id = (await commit(own, UNKEYED)).run_id
    assert await cancelled(own, run_id, expected_version=1) == Cancellation("cancelled", "cancelled", 2)
    assert await Runs(own).claim() == []
    run = await read_run(own, run_id, tenant_id="acme")
    assert (run.state, run.version, run.attempts) == ("cancelled", 2, 0)
    assert run.created_at <= run.cancel_requested_at <= run.finished_at  # type: ignore[operator]
    with pytest.raises(RunEnded) as caught:
        await cancelled(own, run_id)
    assert caught.value.state == "cancelled"


async def test_a_leased_run_is_asked_for(own: Connection) -> None:
    run_id = (await commit(own, UNKEYED)).run_id
    await Runs(own).claim_one()
    first = await cancelled(own, run_id)
    assert (first.outcome, first.state) == ("requested", "running")
    assert await cancelled(own, run_id) == first


async def test_a_run_that_changed_is_not_cancelled(own: Connection) -> None:
    run_id = (await commit(own, UNKEYED)).run_id
    await Runs(own).claim_one()
    with pytest.raises(RunChanged):
        await cancelled(own, run_id, expected_version=1)
    assert (await read_run(own, run_id, tenant_id="acme")).state == "running"


async def test_a_completed_run_shows_its_output(own: Connection) -> None:
    run_id = (await commit(own, UNKEYED)).run_id
    await moved(Runs(own), run_id, "completed")
    run = await read_run(own, run_id, tenant_id="acme")
    assert (run.state, run.output, run.json(), run.attempts) == ("completed", b'{"pages":3}', {"pages": 3}, 1)
    assert (run.workflow, run.error_code, run.run_id) == ("report", None, run_id)
    assert run.created_at <= run.started_at <= run.finished_at  # type: ignore[operator]
    assert run.created_at.utcoffset() == timedelta(0)
    assert "pages" not in repr(run)
    with pytest.raises(RunEnded):
        await cancelled(own, run_id)


async def test_a_run_without_output_says_so(own: Connection) -> None:
    run = await read_run(own, (await commit(own, UNKEYED)).run_id, tenant_id="acme")
    assert run.output is None
    with pytest.raises(ValueError, match="queued"):
        run.json()


async def test_another_tenants_run_does_not_exist(own: Connection) -> None:
    """SEC-4."""
    run_id = (await commit(own, "k-1")).run_id
    before = await _dump(own)
    said = set()
    for unknown, tenant in ((run_id, "other"), (uuid7(), "acme"), (uuid7(), "other")):
        with pytest.raises(RunNotFound) as reading:
            await read_run(own, unknown, tenant_id=tenant)
        with pytest.raises(RunNotFound) as cancelling:
            await cancelled(own, unknown, tenant_id=tenant)
        said |= {str(reading.value), str(cancelling.value)}
    assert len(said) == 1
    assert await _dump(own) == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("actor", ""), ("actor", " "), ("actor", "a" * 257), ("actor", None), ("reason", ""),
        ("reason", "r" * 2_001), ("reason", "a\0b"), ("tenant_id", ""), ("tenant_id", None), ("tenant_id", "a\0b"),
    ],
)  # fmt: skip
async def test_a_cancellation_says_who_and_why(own: Connection, field: str, value: Any) -> None:
    run_id = (await commit(own, UNKEYED)).run_id
    with pytest.raises(InvalidCommand) as caught:
        await cancelled(own, run_id, **{field: value})
    assert caught.value.field == field
    assert (await read_run(own, run_id, tenant_id="acme")).state == "queued"


@pytest.mark.parametrize("changes", [{"actor": ""}, {"reason": " "}, {"expected_version": "3"}, {"expected_version": 0}], ids=str)
async def test_a_cancellation_that_is_refused_leaves_the_transaction_usable(
    connection: Connection, changes: dict[str, Any]
) -> None:
    run_id = (await commit(connection, UNKEYED)).run_id
    async with connection.transaction():
        with pytest.raises(InvalidCommand):
            await cancel(connection, run_id, **({"tenant_id": "acme", "actor": "ana", "reason": "test"} | changes))
        await usable(connection)


@pytest.mark.parametrize("arguments", [("acme", "k"), (SCOPE, "k", "secret")], ids=["scope", "secrets"])
async def test_arguments_of_another_kind_are_named_and_nothing_is_sent(connection: Connection, arguments: tuple[Any, ...]) -> None:
    scope, key, *given = arguments
    async with connection.transaction():
        with pytest.raises(TypeError, match=r"^(scope|secrets) must be a "):
            await accept(connection, command(), scope, key, secrets=given[0] if given else SECRETS)
        await usable(connection)


# The rules of SDK and function


SECONDS = st.one_of(
    st.sampled_from([-1.0, 0.0, 0.0005, 0.001, 1.5, 366 * 86_400.0, 366 * 86_400 + 1.0]), st.integers(-2, 2).map(float)
)
CHARACTERS = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
FIELDS = st.fixed_dictionaries(
    {
        "workflow": st.one_of(
            st.just("report"), st.text(CHARACTERS, max_size=4), st.from_regex(r"[A-Za-z0-9_.:-]{1,9}", fullmatch=True),
            st.sampled_from(["w" * 200, "w" * 201, "a\n", "a b"]),
        ),
        "input_characters": st.sampled_from([0, MAX_INPUT_BYTES - 2, MAX_INPUT_BYTES - 1]),
    },
    optional={
        "version": st.integers(-1, 3),
        "topic": st.one_of(
            st.sampled_from([".", "..", "", "orders\n", "a b", "t" * 249, "t" * 250]), st.text(CHARACTERS, max_size=4)
        ),
        "delay_seconds": SECONDS,
        "max_attempts": st.sampled_from([-1, 0, 1, 999, 1_000, 1_001]),
        "deadline_seconds": st.one_of(st.none(), SECONDS),
        "cost_limit": st.one_of(st.none(), st.sampled_from([0, -1, 1, 0.1, 1e15, 1.1e15, float("nan"), float("inf")])),
        "traceparent": st.one_of(st.none(), st.sampled_from(["", "t", "t" * 256, "t" * 257, "\u00fc" * 128, "\u00fc" * 129])),
    },
)  # fmt: skip
REFUSAL = """SELECT fencepost.command_refusal('acme', gen_random_uuid(), %s::text, %s::integer, %s::text, %s::bytea,
    make_interval(secs => %s::double precision), %s::integer, make_interval(secs => %s::double precision), %s::numeric, %s::text)"""


def refused_by_python(fields: dict[str, Any]) -> set[str]:
    """The field that the SDK's rules refuse, which is the first one but for the input."""
    try:
        Command(**fields)
    except InvalidCommand as error:
        return {error.field}
    return set()


def refused_by_sql(connection: psycopg.Connection, fields: dict[str, Any]) -> set[str]:
    """The field that the function refuses."""
    values = {"version": 1, "topic": "t", "delay_seconds": 0, "max_attempts": 1, "deadline_seconds": None, "cost_limit": None}
    values |= {"traceparent": None} | fields
    values["input"] = f'"{values["input"]}"'.encode()
    names = (
        "workflow",
        "version",
        "topic",
        "input",
        "delay_seconds",
        "max_attempts",
        "deadline_seconds",
        "cost_limit",
        "traceparent",
    )
    row = connection.execute(REFUSAL.encode(), [values[name] for name in names]).fetchone()
    assert row is not None
    return set() if row[0] is None else {row[0].partition(":")[0]}


def test_the_sdk_and_the_function_refuse_the_same_commands_for_the_same_field(module_database_url: str) -> None:
    with psycopg.connect(module_database_url, autocommit=True) as connection:

        @settings(max_examples=300, deadline=None)
        @given(fields=FIELDS)
        def agree(fields: dict[str, Any]) -> None:
            fields["input"] = "s" * fields.pop("input_characters")
            assert refused_by_python(fields) == refused_by_sql(connection, fields)

        agree()


async def test_the_functions_refusal_is_a_refused_command(connection: Connection) -> None:
    """One of an older SDK on a newer schema, say."""
    made = command()
    object.__setattr__(made, "max_attempts", 2_000)
    object.__setattr__(made, "input", b"secret")
    with pytest.raises(InvalidCommand) as caught:
        async with connection.transaction():
            await accept(connection, made, SCOPE, new_key(), secrets=SECRETS)
    assert caught.value.field == "max_attempts"
    assert "secret" not in f"{caught.value} {caught.value.__cause__}"
