"""Every adapter accepts, cancels and reads alike: in the caller's transaction, and a refusal leaves it to the caller."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from typing import Any
from uuid import uuid4

import asyncpg
import psycopg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine
from uuid_utils.compat import uuid7

import producer_sdk.asyncpg
import producer_sdk.psycopg
import producer_sdk.sqlalchemy
from examples.encrypting_codec import EncryptingCodec
from fencepost.devservices import Services
from producer_sdk import (
    UNKEYED,
    Accepted,
    Cancellation,
    Command,
    ConfigurationError,
    IdempotencyConflict,
    InProgress,
    InvalidCommand,
    KeyExpired,
    KeyMissing,
    RunChanged,
    RunEnded,
    RunNotFound,
    Scope,
    Secrets,
    TransactionRequired,
)
from producer_sdk.identity import Unkeyed
from tests.support.session import SharedServices
from tests.support.waiting import eventually
from tests.support.writers import SELF_BEGINNING, WRITERS, Writer

Open = Callable[..., Writer]

SECRETS = Secrets({1: b"1" * 32}, write=(1,))
SCOPE = Scope(tenant_id="acme", principal="ana", operation="POST /reports")
DATA_KEYS = EncryptingCodec({1: b"2" * 32}, write=1)
BY = {"tenant_id": "acme", "actor": "ana", "reason": "test"}
OTHER: dict[str, Any] = {"input": {"month": 2}}
FIVE_TABLES = ("runs", "run_events", "jobs", "idempotency_keys", "outbox")


def command(**changes: Any) -> Command:
    """A command that may be accepted, with changes."""
    fields: dict[str, Any] = {"workflow": "report", "input": {"month": 1}} | changes
    return Command(**fields)


def call(writer: Writer, key: str | Unkeyed, *, wait_seconds: float = 0, **changes: Any) -> Accepted:
    """Accept a command in the open transaction."""
    return writer.accept(command(**changes), SCOPE, key, secrets=SECRETS, wait_seconds=wait_seconds)


def commit(writer: Writer, key: str | Unkeyed, **options: Any) -> Accepted:
    """Accept a command in a transaction of its own."""
    with writer.transaction():
        return call(writer, key, **options)


@pytest.fixture(scope="module")
def module_database_url(services: Services, shared_services: SharedServices) -> Iterator[str]:
    """One database with a business table for all tests here: making one takes longer than such a test."""
    url = services.create_database(shared_services.template_url)
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE business (note text)")
    yield url
    services.drop_database(url)


@pytest.fixture
def database_url(module_database_url: str) -> str:
    """The module's database, emptied."""
    with psycopg.connect(module_database_url) as connection:
        connection.execute("TRUNCATE fencepost.outbox, fencepost.runs, business CASCADE")
    return module_database_url


@pytest.fixture
def key() -> str:
    return uuid4().hex


@pytest.fixture(params=WRITERS)
def open_writer(request: pytest.FixtureRequest, database_url: str) -> Iterator[Open]:
    """Opens connections of each adapter."""
    opened: list[Writer] = []

    def open_one(**options: Any) -> Writer:
        opened.append(WRITERS[request.param](database_url, **options))
        return opened[-1]

    yield open_one
    for writer in opened:
        writer.close()


@pytest.fixture
def writer(open_writer: Open) -> Writer:
    return open_writer()


def value(url: str, sql: str, *parameters: object) -> Any:
    with psycopg.connect(url) as connection:
        row = connection.execute(sql.encode(), parameters).fetchone()
    assert row is not None
    return row[0]


def counts(url: str) -> list[int]:
    """Rows of the five tables."""
    return [value(url, f"SELECT count(*) FROM fencepost.{table}") for table in FIVE_TABLES]


def orders(url: str) -> int:
    return int(value(url, "SELECT count(*) FROM business"))


def place_order(writer: Writer) -> None:
    writer.execute("INSERT INTO business VALUES ('order')")


class Abandoned(Exception):
    """The service gives its work up."""


@contextmanager
def rolled_back(part: AbstractContextManager[object]) -> Iterator[None]:
    """A transaction or savepoint that the service rolls back."""
    with suppress(Abandoned), part:
        yield
        raise Abandoned


def test_a_run_commits_with_the_domain_rows(writer: Writer, database_url: str, key: str) -> None:
    made = command(cost_limit=1.5, deadline_seconds=0.5, delay_seconds=1, traceparent="00-1-2-01")
    with writer.transaction():
        place_order(writer)
        accepted = writer.accept(made, SCOPE, key, secrets=SECRETS, key_retention_seconds=60)
        assert counts(database_url) == [0] * 5
    assert accepted == Accepted("created", made.run_id, "queued")
    assert counts(database_url) == [1] * 5
    assert orders(database_url) == 1


def test_a_rollback_leaves_nothing(writer: Writer, database_url: str, key: str) -> None:
    with rolled_back(writer.transaction()):
        place_order(writer)
        call(writer, key)
    assert counts(database_url) == [0] * 5
    assert orders(database_url) == 0
    assert commit(writer, key).created


def test_an_equal_request_is_replayed_and_another_one_is_a_conflict(writer: Writer, database_url: str, key: str) -> None:
    first = commit(writer, key)
    with writer.transaction():
        place_order(writer)
        assert call(writer, key) == Accepted("replayed", first.run_id, "queued")
        with pytest.raises(IdempotencyConflict):
            call(writer, key, **OTHER)
        place_order(writer)
    assert counts(database_url) == [1] * 5
    assert orders(database_url) == 2


def test_a_new_run_keeps_its_data_key_and_a_replay_keeps_none(writer: Writer, database_url: str, key: str) -> None:
    """SEC-9: by every driver, in the transaction that accepts; without a codec that has data keys there is none."""
    count = "SELECT count(*) FROM fencepost.data_keys"
    with suppress(RuntimeError), writer.transaction():
        call(writer, key, codec=DATA_KEYS)
        raise RuntimeError
    assert value(database_url, count) == 0
    first = command(codec=DATA_KEYS)
    with writer.transaction():
        accepted = writer.accept(first, SCOPE, key, secrets=SECRETS)
    assert commit(writer, key, codec=DATA_KEYS).run_id == accepted.run_id == first.run_id
    assert commit(writer, UNKEYED).created
    assert bytes(value(database_url, "SELECT wrapped FROM fencepost.data_keys")) == first.data_key
    assert value(database_url, count) == 1


def test_an_expired_key_starts_nothing(writer: Writer, database_url: str, key: str) -> None:
    commit(writer, key)
    with writer.transaction():
        writer.execute("UPDATE fencepost.idempotency_keys SET expires_at = clock_timestamp()")
        with pytest.raises(KeyExpired):
            call(writer, key)
    assert counts(database_url) == [1] * 5


def test_a_run_without_a_key_is_a_run_of_its_own(writer: Writer, database_url: str) -> None:
    assert commit(writer, UNKEYED).run_id != commit(writer, UNKEYED).run_id
    with writer.transaction(), pytest.raises(KeyMissing):
        call(writer, None)  # type: ignore[arg-type]
    assert counts(database_url) == [2, 2, 2, 0, 2]


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_key_that_another_transaction_accepts_leaves_the_transaction_usable(
    open_writer: Open, database_url: str, key: str, level: str
) -> None:
    first, second = open_writer(), open_writer()
    with first.transaction():
        original = call(first, key)
        with second.transaction():
            second.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
            with pytest.raises(InProgress):
                call(second, key)
            with pytest.raises(InProgress):
                call(second, key, wait_seconds=0.05)
            place_order(second)
    assert orders(database_url) == 1
    assert commit(second, key, wait_seconds=1) == Accepted("replayed", original.run_id, "queued")


def test_a_connection_that_would_commit_alone_is_refused_but_may_read(open_writer: Open, database_url: str, key: str) -> None:
    run_id = commit(open_writer(), key).run_id
    writer = open_writer(autocommit=True)
    with pytest.raises(TransactionRequired, match="autocommit"):
        call(writer, uuid4().hex)
    with pytest.raises(TransactionRequired, match="autocommit"):
        writer.cancel(run_id, **BY)
    assert writer.read_run(run_id, tenant_id="acme").state == "queued"
    assert counts(database_url) == [1] * 5


@pytest.mark.parametrize("name", SELF_BEGINNING)
def test_a_library_that_begins_by_itself_needs_no_begin(name: str, database_url: str, key: str) -> None:
    writer = WRITERS[name](database_url)
    call(writer, key)
    writer.execute("COMMIT")
    assert counts(database_url) == [1] * 5
    writer.close()


def test_an_aborted_transaction_is_refused_and_says_what_to_do(writer: Writer, database_url: str, key: str) -> None:
    with rolled_back(writer.transaction()):
        with pytest.raises(Exception, match="division by zero"):
            writer.execute("SELECT 1 / 0")
        with pytest.raises(TransactionRequired, match=r"aborted.*roll back"):
            call(writer, key)
        with pytest.raises(TransactionRequired, match=r"aborted.*roll back"):
            writer.cancel(uuid7(), **BY)
    assert counts(database_url) == [0] * 5


def test_a_read_only_transaction_is_refused_and_says_what_to_do(writer: Writer, key: str) -> None:
    with rolled_back(writer.transaction()):
        writer.execute("SET TRANSACTION READ ONLY")
        with pytest.raises(TransactionRequired, match=r"read-only.*primary"):
            call(writer, key)


def test_a_run_id_that_is_taken_undoes_only_its_savepoint(writer: Writer, database_url: str, key: str) -> None:
    first = commit(writer, key)
    with writer.transaction():
        place_order(writer)
        with pytest.raises(InvalidCommand) as caught, writer.savepoint():
            call(writer, uuid4().hex, run_id=first.run_id)
        place_order(writer)
    assert caught.value.field == "run_id"
    assert caught.value.__cause__ is not None
    assert orders(database_url) == 2
    assert counts(database_url) == [1] * 5


def test_a_refusal_by_the_function_undoes_only_its_savepoint(writer: Writer, database_url: str, key: str) -> None:
    forged = command(input={"code": "secret"})
    object.__setattr__(forged, "max_attempts", 2_000)
    with writer.transaction():
        place_order(writer)
        with pytest.raises(InvalidCommand) as caught, writer.savepoint():
            writer.accept(forged, SCOPE, key, secrets=SECRETS)
    assert (caught.value.field, caught.value.limit) == ("max_attempts", "must be from 1 to 1000")
    assert caught.value.remedy
    assert "secret" not in f"{caught.value} {caught.value.__cause__}"
    assert orders(database_url) == 1


@pytest.mark.parametrize("name", WRITERS)
def test_a_database_without_the_schema_is_an_operators_error(name: str, empty_database_url: str, key: str) -> None:
    writer = WRITERS[name](empty_database_url)
    with pytest.raises(ConfigurationError, match="fencepost migrate"), writer.transaction():
        call(writer, key)
    writer.close()


def test_a_user_without_the_producer_role_is_an_operators_error(writer: Writer, key: str) -> None:
    with rolled_back(writer.transaction()):
        writer.execute("SET LOCAL ROLE pg_monitor")  # any role that nobody made a producer
        with pytest.raises(ConfigurationError, match="GRANT fencepost_producer"):
            call(writer, key)


def test_the_producer_role_is_all_that_a_service_needs(writer: Writer, database_url: str, key: str) -> None:
    with writer.transaction():
        writer.execute("SET LOCAL ROLE fencepost_producer")
        run_id = call(writer, key).run_id
        assert writer.read_run(run_id, tenant_id="acme").state == "queued"
        assert writer.cancel(run_id, **BY).outcome == "cancelled"
    assert value(database_url, "SELECT actor FROM fencepost.audit ORDER BY id DESC LIMIT 1") == "ana"


def test_a_run_is_cancelled_once_and_read_in_utc(writer: Writer, database_url: str, key: str) -> None:
    run_id = commit(writer, key).run_id
    with writer.transaction():
        with pytest.raises(RunChanged):
            writer.cancel(run_id, expected_version=7, **BY)
        assert writer.cancel(run_id, expected_version=1, **BY) == Cancellation("cancelled", "cancelled", 2)
        with pytest.raises(RunEnded):
            writer.cancel(run_id, **BY)
    with writer.transaction():
        writer.execute("SET LOCAL TIME ZONE 'Asia/Kathmandu'")
        run = writer.read_run(run_id, tenant_id="acme")
    assert (run.run_id, run.state, run.version, run.output) == (run_id, "cancelled", 2, None)
    assert run.created_at == value(database_url, "SELECT created_at FROM fencepost.runs")
    assert str(run.created_at.tzinfo) == "UTC"


def test_a_completed_run_shows_its_output(writer: Writer, database_url: str, key: str) -> None:
    run_id = commit(writer, key).run_id
    with writer.transaction():
        writer.execute("UPDATE fencepost.runs SET state = 'completed', output = '[3]', started_at = now(), finished_at = now()")
    with writer.transaction():
        run = writer.read_run(run_id, tenant_id="acme")
        assert call(writer, key) == Accepted("replayed", run_id, "completed")
    assert (run.output, run.json()) == (b"[3]", [3])


def test_another_tenants_run_does_not_exist(writer: Writer, key: str) -> None:
    """SEC-4."""
    run_id = commit(writer, key).run_id
    with writer.transaction():
        for unknown, tenant in ((run_id, "other"), (uuid7(), "acme")):
            with pytest.raises(RunNotFound):
                writer.read_run(unknown, tenant_id=tenant)
            with pytest.raises(RunNotFound):
                writer.cancel(unknown, **(BY | {"tenant_id": tenant}))
        assert writer.read_run(run_id, tenant_id="acme").state == "queued"


@asynccontextmanager
async def psycopg_acceptance(url: str) -> AsyncIterator[Callable[..., Any]]:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        yield lambda *given, **options: producer_sdk.psycopg.accept_async(connection, *given, **options)


@asynccontextmanager
async def sqlalchemy_acceptance(url: str, driver: str) -> AsyncIterator[Callable[..., Any]]:
    engine = create_async_engine(sqlalchemy.make_url(url).set(drivername=f"postgresql+{driver}"))
    async with engine.begin() as connection:
        yield lambda *given, **options: producer_sdk.sqlalchemy.accept_async(connection, *given, **options)
    await engine.dispose()


@pytest.mark.parametrize("library", ["psycopg", "sqlalchemy on psycopg", "sqlalchemy on asyncpg"])
async def test_a_duplicate_that_waits_leaves_the_event_loop_to_others(library: str, database_url: str, key: str) -> None:
    """KEY-14. The first transaction ends on the same event loop."""
    opened = psycopg_acceptance(database_url) if library == "psycopg" else sqlalchemy_acceptance(database_url, library.split()[-1])
    first, monitor = await asyncpg.connect(database_url), await asyncpg.connect(database_url)
    waiting = """SELECT EXISTS (SELECT FROM pg_stat_activity WHERE state = 'idle in transaction' AND pid <> $1
                                AND datname = current_database() AND query LIKE '%fencepost:accept%')"""
    async with opened as accepting:
        async with asyncio.timeout(30), first.transaction():
            original = await producer_sdk.asyncpg.accept(first, command(), SCOPE, key, secrets=SECRETS)
            second = asyncio.create_task(accepting(command(), SCOPE, key, secrets=SECRETS, wait_seconds=30))
            await eventually(lambda: monitor.fetchval(waiting, first.get_server_pid()), message="the second has tried")
        assert await second == Accepted("replayed", original.run_id, "queued")
    await first.close()
    await monitor.close()
