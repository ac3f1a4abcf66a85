"""Migrations are applied once, in order, whole or not at all; and the roles that they make can do their work and no more."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg
import psycopg
import pytest
from psycopg import sql
from typer.testing import CliRunner

from fencepost.cli import app
from fencepost.devservices import Services
from fencepost.errors import ConfigurationError
from fencepost.statements import load_statements
from migrations import Migration, load_migrations, migrate, migration_states
from relay.cursor import Cursor
from relay.lane import Receipt
from relay.store import Store

PASSWORD: Final = "pw"
LANES: Final = 8


def titles(migrations: Sequence[Migration]) -> list[str]:
    return [migration.title for migration in migrations]


ALL: Final = titles(load_migrations())


def extra(number: int, text: str, name: str = "more") -> Migration:
    """A migration of a later version."""
    return Migration(number=number, phase="pre", name=name, sql=text, checksum=hashlib.sha256(text.encode()).hexdigest())


def ask(url: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(statement.encode()).fetchall()


def tell(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement.encode())


def ledger(url: str) -> list[str]:
    return [title for (title,) in ask(url, "SELECT title FROM fencepost.migrations ORDER BY number")]


def schema_exists(url: str) -> bool:
    return bool(ask(url, "SELECT to_regnamespace('fencepost') IS NOT NULL")[0][0])


# -- the runner -------------------------------------------------------------------------------------------------------------


async def test_an_empty_database_gets_every_migration_and_a_current_one_gets_none(empty_database_url: str) -> None:
    assert titles(await migrate(empty_database_url)) == ALL
    assert titles(await migrate(empty_database_url)) == []
    assert ledger(empty_database_url) == ALL


async def test_two_migrations_at_once_apply_each_file_once(empty_database_url: str) -> None:
    done = await asyncio.gather(*(migrate(empty_database_url) for _ in range(3)))

    assert sorted(titles(applied) for applied in done) == [[], [], ALL]
    assert ledger(empty_database_url) == ALL


async def test_databases_of_one_server_can_be_migrated_at_once(services: Services) -> None:
    """Roles belong to the server, not to the database: the runs meet there, and none of them fails."""
    urls = [services.create_database() for _ in range(4)]
    try:
        assert [titles(applied) for applied in await asyncio.gather(*map(migrate, urls))] == [ALL] * 4
    finally:
        for url in urls:
            services.drop_database(url)


async def test_a_run_waits_for_the_one_before_it(empty_database_url: str) -> None:
    """With the lock held by somebody else nothing is written; once it is free the run goes on."""
    holder = await asyncpg.connect(empty_database_url)
    await holder.execute("SELECT pg_advisory_lock(hashtext('fencepost.migrations'))")
    started = asyncio.Event()
    running = asyncio.create_task(migrate(empty_database_url, progress=lambda _: started.set()))
    waiting = (
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    while not await holder.fetchval(waiting):
        assert not running.done()

    assert (started.is_set(), schema_exists(empty_database_url)) == (False, False)
    await holder.close()
    assert titles(await running) == ALL


async def test_a_dry_run_writes_nothing(empty_database_url: str) -> None:
    assert titles(await migrate(empty_database_url, dry_run=True)) == ALL
    assert not schema_exists(empty_database_url)


async def test_a_dry_run_shows_only_what_is_pending(database_url: str) -> None:
    shipped = [*load_migrations(), extra(9000, "CREATE TABLE fencepost.more (id int)")]

    assert titles(await migrate(database_url, migrations=shipped, dry_run=True)) == ["9000_pre_more"]
    assert ledger(database_url) == ALL


async def test_a_changed_file_is_refused_and_nothing_is_applied(database_url: str) -> None:
    changed = [replace(load_migrations()[0], checksum="0" * 64), *load_migrations()[1:], extra(9000, "SELECT 1")]

    for dry_run in (True, False):
        with pytest.raises(ConfigurationError, match=f"{ALL[0]}.*differs"):
            await migrate(database_url, migrations=changed, dry_run=dry_run)
    assert ledger(database_url) == ALL


async def test_a_database_that_is_ahead_is_refused(database_url: str) -> None:
    await migrate(database_url, migrations=[*load_migrations(), extra(9000, "CREATE TABLE fencepost.more (id int)")])

    with pytest.raises(ConfigurationError, match=r"9000.*newer version"):
        await migrate(database_url)
    with pytest.raises(ConfigurationError, match="9000"):
        await migration_states(database_url)


async def test_a_migration_that_fails_leaves_nothing_of_itself(database_url: str) -> None:
    """What came before it stays applied; after a repair the run goes on from there."""
    good = extra(9000, "CREATE TABLE fencepost.good (id int)", "good")
    bad = extra(9001, "CREATE TABLE fencepost.half (id int); SELECT 1 / 0", "bad")

    with pytest.raises(Exception, match="division by zero"):
        await migrate(database_url, migrations=[*load_migrations(), good, bad])

    assert ledger(database_url) == [*ALL, "9000_pre_good"]
    assert ask(database_url, "SELECT to_regclass('fencepost.good') IS NOT NULL, to_regclass('fencepost.half') IS NULL") == [
        (True, True)
    ]
    repaired = replace(bad, sql="CREATE TABLE fencepost.half (id int)")
    assert titles(await migrate(database_url, migrations=[*load_migrations(), good, repaired])) == ["9001_pre_bad"]


async def test_a_file_without_transaction_may_build_an_index_concurrently(database_url: str) -> None:
    concurrent = extra(9000, "-- no transaction\nCREATE INDEX CONCURRENTLY more ON fencepost.relays (name)")

    assert titles(await migrate(database_url, migrations=[*load_migrations(), concurrent])) == ["9000_pre_more"]


async def test_states_show_when_each_was_applied(database_url: str, empty_database_url: str) -> None:
    applied, pending = await migration_states(database_url), await migration_states(empty_database_url)

    assert all(state.applied_at is not None and state.applied_at.endswith("Z") for state in applied)
    assert [state.applied_at for state in pending] == [None] * len(ALL)
    assert not schema_exists(empty_database_url)


async def test_a_database_that_does_not_answer_is_a_configuration_error(database_url: str) -> None:
    for url in (f"{database_url}_missing", "postgresql://postgres@127.0.0.1:1/postgres"):
        with pytest.raises(ConfigurationError, match="FENCEPOST_DATABASE_URL"):
            await migrate(url)


def test_the_command_previews_applies_and_shows(empty_database_url: str) -> None:
    def run(*arguments: str) -> Any:
        done = CliRunner().invoke(app(), ["migrate", "--database-url", empty_database_url, "--json", *arguments])
        assert done.exit_code == 0, done.output
        return json.loads(done.output)

    assert run("--dry-run") == {"dry_run": True, "migrations": ALL}
    assert run() == {"dry_run": False, "migrations": ALL}
    assert run() == {"dry_run": False, "migrations": []}
    assert [state["migration"] for state in run("--status")] == ALL


def test_files_are_numbered_without_gaps_and_their_checksums_are_of_their_bytes() -> None:
    shipped = load_migrations()

    assert [migration.number for migration in shipped] == list(range(1, len(shipped) + 1))
    assert all(hashlib.sha256(migration.sql.encode()).hexdigest() == migration.checksum for migration in shipped)


# -- roles ------------------------------------------------------------------------------------------------------------------

Login = Callable[..., str]


@pytest.fixture
def login(services: Services) -> Iterator[Login]:
    """Makes users of the server: `url = login(database_url, "fencepost_relay")` is an address with the rights of that role."""
    made: list[str] = []

    def make(url: str, *roles: str, attributes: str = "") -> str:
        name = f"user_{uuid4().hex[:12]}"
        with psycopg.connect(services.database_url, autocommit=True) as connection:
            connection.execute(f"CREATE ROLE {name} LOGIN {attributes} PASSWORD '{PASSWORD}'".encode())
            made.append(name)
            for role in roles:
                connection.execute(sql.SQL("GRANT {} TO {}").format(sql.Identifier(role), sql.Identifier(name)))
        parts = urlsplit(url)
        return urlunsplit(parts._replace(netloc=f"{name}:{PASSWORD}@{parts.hostname}:{parts.port}"))

    yield make
    with psycopg.connect(services.database_url, autocommit=True) as connection:
        for name in made:
            connection.execute(f"DROP ROLE {name}".encode())


def user_of(url: str) -> str:
    return str(urlsplit(url).username)


PRODUCER_MAY_NOT: Final = (
    "SELECT * FROM fencepost.outbox",
    "INSERT INTO fencepost.outbox (topic, event_type, payload) VALUES ('t', 'e', 'x')",
    "UPDATE fencepost.outbox SET topic = 't'",
    "DELETE FROM fencepost.outbox",
    "TRUNCATE fencepost.outbox",
    "SELECT * FROM fencepost.lanes",
    "SELECT * FROM fencepost.receipts",
    "SELECT * FROM fencepost.delivery",
    "SELECT * FROM fencepost.migrations",
    "SELECT nextval('fencepost.outbox_id_seq')",
    "SELECT setval('fencepost.doorbell_0', 1)",
    "SELECT fencepost.ring(0)",
    "SELECT * FROM fencepost.poll('{0}', '{0}', '{1:1:}', '{NULL}', '{0}', 1, 1)",
    "SELECT fencepost.rebase('me', 'because')",
    "CREATE TABLE fencepost.mine (id int)",
    "CREATE FUNCTION fencepost.lane_count() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
)
RELAY_MAY_NOT: Final = (
    "INSERT INTO fencepost.outbox (topic, event_type, payload) VALUES ('t', 'e', 'x')",
    "UPDATE fencepost.outbox SET topic = 't'",
    "DELETE FROM fencepost.outbox",
    "TRUNCATE fencepost.outbox",
    "SELECT fencepost.enqueue('t', 'e', NULL, 'x')",
    "INSERT INTO fencepost.lanes (lane) VALUES (99)",
    "DELETE FROM fencepost.lanes",
    "UPDATE fencepost.receipts SET position = 0",
    "DELETE FROM fencepost.receipts",
    "UPDATE fencepost.installation SET installation_id = gen_random_uuid()",
    "INSERT INTO fencepost.migrations (number, title, checksum) VALUES (1, '', '')",
    "SELECT nextval('fencepost.outbox_id_seq')",
    "SELECT setval('fencepost.outbox_id_seq', 1)",
    "SELECT fencepost.rebase('me', 'because')",
    "CREATE TABLE fencepost.mine (id int)",
)
OPERATOR_MAY_NOT: Final = (
    "SELECT fencepost.enqueue('t', 'e', NULL, 'x')",
    "INSERT INTO fencepost.outbox (topic, event_type, payload) VALUES ('t', 'e', 'x')",
    "DELETE FROM fencepost.outbox",
    "UPDATE fencepost.lanes SET lease_owner = NULL",
    "DELETE FROM fencepost.receipts",
    "DELETE FROM fencepost.relays",
    "SELECT setval('fencepost.doorbell_0', 1)",
    "DELETE FROM fencepost.audit",
    "UPDATE fencepost.audit SET actor = 'somebody else'",
)
NOBODY_MAY_NOT: Final = (
    "SELECT fencepost.enqueue('t', 'e', NULL, 'x')",
    "SELECT fencepost.lane_count()",
    "SELECT * FROM fencepost.outbox",
    "SELECT * FROM fencepost.poll('{0}', '{0}', '{1:1:}', '{NULL}', '{0}', 1, 1)",
)
MAY_NOT: Final = {
    "fencepost_producer": PRODUCER_MAY_NOT,
    "fencepost_relay": RELAY_MAY_NOT,
    "fencepost_operator": OPERATOR_MAY_NOT,
    "": NOBODY_MAY_NOT,
}


@pytest.mark.parametrize("role", MAY_NOT)
def test_a_role_may_not_do_what_is_not_its_work(database_url: str, login: Login, role: str) -> None:
    """The producer only enqueues, the relay neither writes nor deletes an event, the operator only looks, nobody does nothing."""
    with psycopg.connect(login(database_url, *filter(None, [role])), autocommit=True) as connection:
        for statement in MAY_NOT[role]:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement.encode())


def test_a_producer_enqueues_and_needs_no_other_right(database_url: str, login: Login) -> None:
    tell(database_url, "SELECT setval('fencepost.doorbell_' || n, 9223372036854775807) FROM generate_series(0, 7) AS n")

    with psycopg.connect(login(database_url, "fencepost_producer")) as connection:
        connection.execute("SELECT fencepost.enqueue('t', 'e', 'k', 'x')")
        connection.execute("SELECT fencepost.enqueue_many('{t,t}', '{e,e}', '{k,NULL}', '{x,y}', ARRAY[fencepost.uuid_v7(), NULL])")
        connection.execute("LISTEN fencepost_doorbell")

    assert ask(database_url, "SELECT count(*) FROM fencepost.outbox") == [(3,)]


def test_a_producers_own_objects_do_not_stand_in_for_those_of_the_functions(database_url: str, login: Login) -> None:
    """The functions run with their owner's rights, so their search path is pinned."""
    url = login(database_url, "fencepost_producer")
    tell(database_url, "CREATE SCHEMA theirs")
    tell(database_url, f"GRANT ALL ON SCHEMA theirs TO {user_of(url)}")
    try:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET search_path = theirs, pg_catalog")
            for function in ("octet_length(bytea)", "sha256(bytea)", "nextval(regclass)", "clock_timestamp()"):
                body = "RETURNS int LANGUAGE plpgsql AS $$ BEGIN RAISE 'taken over'; END $$"
                connection.execute(f"CREATE FUNCTION theirs.{function} {body}".encode())
            connection.execute("SELECT fencepost.enqueue('t', 'e', 'k', 'x')")
    finally:
        tell(database_url, "DROP SCHEMA theirs CASCADE")

    assert ask(database_url, "SELECT topic FROM fencepost.outbox") == [("t",)]


RECEIPT: Final = Receipt(
    lane=0, generation=1, sequence=1, cursor=Cursor(position=1, snapshot="10:10:"), first_id=1, last_id=1, row_count=1,
    late_count=0, offsets={}, partition_counts={},
)  # fmt: skip
RELAY_STATEMENTS: Final[dict[str, Callable[[Store], Any]]] = {
    "installation": lambda store: store.installation(),
    "join": lambda store: store.join("relay", "1", 60, {}),
    "fleet": lambda store: store.fleet([]),
    "claim": lambda store: store.claim(60, LANES, []),
    "cursors": lambda store: store.cursors([0]),
    "poll": lambda store: store.poll({0: Cursor(position=0, snapshot="1:1:")}, row_limit=1, byte_limit=1),
    "mark": lambda store: store.mark([RECEIPT]),
    "marked_already": lambda store: store.marked_already([RECEIPT]),
    "renew": lambda store: store.renew({0: 1}, 60),
    "arm": lambda store: store.arm([0, 1], 1000),
    "disarm": lambda store: store.disarm([0, 1]),
    "flushed": lambda store: store.flushed(),
    "backlog": lambda store: store.backlog({0: 0}, 10),
    "horizon": lambda store: store.horizon(),
    "release": lambda store: store.release({0: 1}),
    "leave": lambda store: store.leave(),
}


async def every_statement(url: str) -> None:
    store = await Store.open(url, relay_id="relay", timeout_seconds=30)
    try:
        for run in RELAY_STATEMENTS.values():
            await run(store)
    finally:
        await store.close()


def test_every_statement_of_the_relay_is_tried_below() -> None:
    # Arming draws a transaction id by a second statement.
    assert RELAY_STATEMENTS.keys() | {"transaction_id"} == load_statements("relay", "statements.sql").keys()


async def test_a_relay_runs_every_one_of_its_statements_with_its_role(database_url: str, login: Login) -> None:
    tell(database_url, "SELECT fencepost.enqueue('t', 'e', 'k', 'x')")

    await every_statement(login(database_url, "fencepost_relay"))


async def test_an_operator_sees_everything(database_url: str, login: Login) -> None:
    url = login(database_url, "fencepost_operator")

    for view in (
        "outbox", "lanes", "relays", "receipts", "cursors", "delivery", "installation", "migrations", "audit", "retention_wishes",
        "forgetting",
    ):  # fmt: skip
        ask(url, f"SELECT * FROM fencepost.{view}")


async def test_an_owner_without_superuser_can_migrate_and_the_roles_work(
    services: Services, empty_database_url: str, login: Login
) -> None:
    """As on managed servers: the database's owner may create roles and grant what it owns, and nothing of the server's."""
    owner = login(empty_database_url, attributes="CREATEROLE")
    database = urlsplit(empty_database_url).path.lstrip("/")
    tell(services.database_url, f"ALTER DATABASE {database} OWNER TO {user_of(owner)}")
    try:
        assert titles(await migrate(owner)) == ALL
        with psycopg.connect(login(owner, "fencepost_producer")) as connection:
            connection.execute("SELECT fencepost.enqueue('t', 'e', 'k', 'x')")
        await every_statement(login(owner, "fencepost_relay"))
    finally:
        tell(services.database_url, f"ALTER DATABASE {database} OWNER TO CURRENT_USER")
        tell(empty_database_url, f"REASSIGN OWNED BY {user_of(owner)} TO CURRENT_USER; DROP OWNED BY {user_of(owner)}")


async def test_a_migration_without_the_rights_for_it_is_a_configuration_error(empty_database_url: str, login: Login) -> None:
    """The remedy is an operator's: no traceback, and nothing is left half done."""
    with pytest.raises(ConfigurationError, match="permission denied"):
        await migrate(login(empty_database_url))

    assert not schema_exists(empty_database_url)
