"""A handler's transaction: three round trips, within bounds, and no connection is used again whose state is not known."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

import asyncpg
import pytest

from consumer_sdk import transactions as module
from consumer_sdk.identity import Identity
from consumer_sdk.message_store import MessageStore
from consumer_sdk.run_store import ROLE
from consumer_sdk.transactions import Transactions
from fencepost.errors import TransientError
from tests.support.waiting import eventually

pytestmark = pytest.mark.services

PING: Final = Identity("0199c0de-0000-7000-8000-000000000001", "", "billing/charge")
BOUNDS: Final = ("statement_timeout", "idle_in_transaction_session_timeout")
ROW: Final = "SELECT count(*) FROM fencepost.effects WHERE operation = 'fencepost.message' AND run_key = $1"


@pytest.fixture
async def database(database_url: str) -> AsyncIterator["asyncpg.Connection[Any]"]:
    connection = await asyncpg.connect(database_url)
    await connection.execute("CREATE TABLE written (line text)")
    yield connection
    await connection.close()


@pytest.fixture
async def transactions(database_url: str, database: object) -> AsyncIterator[Transactions]:
    own = Transactions(database_url, role=ROLE, size=2, limit_seconds=10)
    yield own
    own.close()


def recorded(transactions: Transactions, identity: Identity = PING, *, limit_seconds: float = 10) -> Any:
    return transactions.begin_recorded(identity, holder="c/1", limit_seconds=limit_seconds)


async def rows(database: Any, identity: Identity = PING) -> int:
    return int(await database.fetchval(ROW, identity.run_key))


async def pid_of(transactions: Transactions) -> int:
    async with transactions.begin() as connection:
        return int(await connection.fetchval("SELECT pg_backend_pid()"))


async def test_a_message_with_one_write_costs_three_round_trips(transactions: Transactions, database: Any) -> None:
    asked: list[str] = []
    async with transactions.begin() as connection:
        connection.add_query_logger(lambda query: asked.append(query.query))
    await eventually(lambda: asked == ["COMMIT"])  # the driver tells a moment later
    async with recorded(transactions) as connection:
        await connection.execute("INSERT INTO written VALUES ($1)", "a")
    await eventually(lambda: asked[-1] == "COMMIT" and len(asked) > 1)
    begun, written, ended = asked[1:]
    assert begun.startswith("BEGIN;")
    assert "fencepost.record_message(" in begun
    assert (written, ended) == ("INSERT INTO written VALUES ($1)", "COMMIT")
    assert await rows(database) == 1


async def test_a_message_that_was_handled_gives_no_connection_and_leaves_its_own_ready(
    transactions: Transactions, database: Any
) -> None:
    async with recorded(transactions) as connection:
        pid = await connection.fetchval("SELECT pg_backend_pid()")
    async with recorded(transactions) as connection:
        assert connection is None
    assert (await rows(database), await pid_of(transactions)) == (1, pid)


@pytest.mark.parametrize("conforming", ["on", "off"])
async def test_whatever_a_message_is_called_it_is_one_row_of_that_name(
    transactions: Transactions, database: Any, conforming: str
) -> None:
    name = await database.fetchval("SELECT current_database()")
    await database.execute(f'ALTER DATABASE "{name}" SET standard_conforming_strings = {conforming}')
    odd = Identity("it's \\' \\\\ %s $1; --\n", "ä€𝄞", "a/b'\\")
    for expected in (True, False):
        async with recorded(transactions, odd) as connection:
            assert (connection is not None) == expected
    row = await database.fetchrow("SELECT run_key, tenant_id, step FROM fencepost.effects")
    assert Identity(*row) == odd


async def test_the_bounds_are_the_transaction_s(transactions: Transactions) -> None:
    async with recorded(transactions, limit_seconds=7) as connection:
        assert await connection.fetchval("SHOW statement_timeout") == "7s"
        assert await connection.fetchval("SHOW idle_in_transaction_session_timeout") == "7s"
    async with transactions.begin(bounded=False) as connection:
        assert await connection.fetchval("SHOW statement_timeout") == "0"
    async with transactions.begin() as connection:
        assert await connection.fetchval("SHOW statement_timeout") == "10s"


async def test_a_handler_has_no_commit_of_its_own(transactions: Transactions, database: Any) -> None:
    """By habit of other drivers' it would keep the message's row, and half of the effects."""

    async def commits() -> None:
        async with recorded(transactions) as connection:
            await connection.execute("INSERT INTO written VALUES ($1)", "a")
            await connection.commit()

    with pytest.raises(AttributeError):
        await commits()
    assert await rows(database) == 0
    assert await database.fetchval("SELECT count(*) FROM written") == 0


async def by_prepared(connection: Any, setting: str) -> None:
    await (await connection.prepare(setting)).fetch()


async def by_cursor(connection: Any) -> None:
    async for _ in connection.cursor("SELECT set_config('search_path', 'other', false)"):
        pass


@pytest.mark.parametrize(
    "way",
    [
        lambda connection: connection.execute("SET search_path = other"),
        lambda connection: connection.execute("SELECT 1; -- now\n  set session search_path to other"),
        lambda connection: connection.execute("SELECT set_config('search_path', $1, false)", "other"),
        lambda connection: connection.fetchval("select Set_Config('search_path', 'other', false)"),
        lambda connection: connection.execute("DO $$ BEGIN PERFORM SET_CONFIG('search_path', 'other', false); END $$"),
        lambda connection: connection.executemany("SELECT set_config('search_path', $1, false)", [["other"]]),
        lambda connection: by_prepared(connection, "SET search_path = other"),
        by_cursor,
    ],
    ids=["SET", "among others", "set_config", "fetched", "DO", "many", "prepared", "cursor"],
)
async def test_however_it_is_set_it_is_undone(database_url: str, database: Any, way: Any) -> None:
    own = Transactions(database_url, role=ROLE, size=1, limit_seconds=10, own_sessions=True)
    await database.execute("CREATE SCHEMA other")
    for _ in range(2):
        async with own.begin() as connection:
            assert await connection.fetchval("SHOW search_path") == '"$user", public'
            await way(connection)
            assert await connection.fetchval("SHOW search_path") == "other"
    own.close()


async def test_where_nothing_is_set_nothing_is_undone(transactions: Transactions, database: Any) -> None:
    """It would be five statements more for each message. The SET of an UPDATE is none, and what is set for the transaction is no
    more behind it. So does Fencepost for batches."""
    asked: list[str] = []
    async with transactions.begin() as connection:
        connection.add_query_logger(lambda query: asked.append(query.query))
        await connection.execute("UPDATE written SET line = 'reset'")
        await connection.execute("UPDATE written SET line = $1", "set")
        await connection.execute("SET LOCAL work_mem = '1MB'; SET CONSTRAINTS ALL IMMEDIATE")
        await connection.fetch("SELECT set_config('work_mem', $1, true), Set_Config( 'lock_timeout', '1s' , TRUE )", "1MB")
    async with transactions.begin() as connection:
        await connection.execute("SET work_mem = '1MB'")
    async with transactions.begin():
        pass
    begun = [query for query in asked if query.startswith("BEGIN")]
    await eventually(lambda: asked[-1] == "COMMIT")
    assert ["RESET" in query for query in begun] == [False, True]


@pytest.mark.parametrize("how", ["committed", "undone", "handled before"])
async def test_what_a_handler_sets_for_the_session_is_not_the_next_one_s(database_url: str, database: Any, how: str) -> None:
    """Another tenant's search path or role would be the next message's. What the session began with stays: its bounds too."""
    own = Transactions(database_url, role=ROLE, size=1, limit_seconds=10, longest_seconds=60, own_sessions=True)
    await database.execute("CREATE SCHEMA other")
    names = ("search_path", "work_mem", "statement_timeout", "transaction_isolation", "transaction_read_only")
    seen = "SELECT current_user, " + ", ".join(f"current_setting('{name}')" for name in names)
    async with recorded(own, limit_seconds=60) as connection:
        pid, before = await connection.fetchval("SELECT pg_backend_pid()"), await connection.fetchrow(seen)
    with contextlib.suppress(ValueError):
        async with recorded(own, PING._replace(run_key="set"), limit_seconds=60) as connection:
            await connection.execute(
                "SET search_path = other; SET ROLE pg_monitor; SET statement_timeout = 0; SET work_mem = '1MB';"
                "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE, READ ONLY"
            )
            assert await connection.fetchrow(seen) != before
            if how == "undone":
                raise ValueError
    if how == "handled before":
        async with recorded(own, limit_seconds=60) as nothing:
            assert nothing is None
    async with recorded(own, PING._replace(run_key="next"), limit_seconds=60) as connection:
        assert (await connection.fetchval("SELECT pg_backend_pid()"), await connection.fetchrow(seen)) == (pid, before)
    own.close()


async def test_behind_a_pooler_a_role_is_undone_and_nothing_that_the_pooler_has_set(transactions: Transactions) -> None:
    async with recorded(transactions) as connection:
        user = await connection.fetchval("SELECT current_user")
        await connection.execute("SET application_name = 'the pooler''s client'; SET ROLE pg_monitor")
    async with recorded(transactions, PING._replace(run_key="next")) as connection:
        assert await connection.fetchval("SELECT current_user") == user
        assert await connection.fetchval("SHOW application_name") == "the pooler's client"


async def test_who_waits_for_another_delivery_waits_no_longer_than_its_bound(transactions: Transactions, database: Any) -> None:
    async with recorded(transactions):
        with pytest.raises(TransientError, match="statement timeout"):
            async with recorded(transactions, limit_seconds=0.2):
                raise AssertionError("nobody knows yet whether the message is handled")
    assert await rows(database) == 1


async def test_where_sessions_are_its_own_a_transaction_sets_only_another_bound(database_url: str) -> None:
    own = Transactions(database_url, role=ROLE, size=1, limit_seconds=10, longest_seconds=60, own_sessions=True)
    asked: list[str] = []
    for number, limit in enumerate((60, 7, 60)):
        async with recorded(own, PING._replace(run_key=f"ping-{number}"), limit_seconds=limit) as connection:
            bounds = [await connection.fetchval(f"SHOW {name}") for name in BOUNDS]
            if not number:
                connection.add_query_logger(lambda query: asked.append(query.query))
        assert bounds == (["1min"] * 2 if limit == 60 else ["7s"] * 2)
    await eventually(lambda: sum(one.startswith("BEGIN") for one in asked) == 2)
    assert ["SET LOCAL" in one for one in asked if one.startswith("BEGIN")] == [True, False]
    own.close()


@pytest.mark.parametrize("own_sessions", [True, False])
async def test_a_handler_that_may_take_months_gets_the_longest_bound_of_the_database_and_costs_no_other_its_own(
    database_url: str, own_sessions: bool
) -> None:
    """Messages one by one, and batches. PostgreSQL refuses more than 24 days, and a connection whose session asks for them."""
    months, longest = 90 * 86_400.0, f"{2**31 - 1}ms"
    own = Transactions(database_url, role=ROLE, size=1, limit_seconds=10, longest_seconds=months, own_sessions=own_sessions)
    store = await MessageStore.open(database_url, holder="c/1", timeout_seconds=10)
    for number, (limit, bound) in enumerate(((7, "7s"), (months, longest))):
        async with recorded(own, PING._replace(run_key=f"ping-{number}"), limit_seconds=limit) as connection:
            assert [await connection.fetchval(f"SHOW {name}") for name in BOUNDS] == [bound] * 2
        async with own.begin(bounded=False) as connection:
            await store.record_within(connection, [PING._replace(run_key=f"batch-{number}")], limit_seconds=limit)
            assert [await connection.fetchval(f"SHOW {name}") for name in BOUNDS] == [bound] * 2
    await store.close()
    own.close()


async def test_a_statement_may_take_as_long_as_its_handler_may(database_url: str) -> None:
    own = Transactions(database_url, role=ROLE, size=1, limit_seconds=1, longest_seconds=60)
    async with own.begin() as connection:
        assert connection._config.command_timeout > 60  # type: ignore[attr-defined]  # the driver's bound
    own.close()


async def test_a_handler_s_own_transaction_is_a_savepoint(transactions: Transactions, database: Any) -> None:
    async with recorded(transactions) as connection:
        await connection.execute("INSERT INTO written VALUES ('kept')")
        inner = connection.transaction()
        await inner.start()
        await connection.execute("INSERT INTO written VALUES ('undone')")
        await inner.rollback()
    assert [row["line"] for row in await database.fetch("SELECT line FROM written")] == ["kept"]


async def test_a_statement_that_failed_and_was_passed_over_commits_nothing_and_says_so(
    transactions: Transactions, database: Any
) -> None:
    """PostgreSQL answers such a COMMIT with ROLLBACK, and without an error: the message would be taken for handled."""

    async def passes_over() -> None:
        async with recorded(transactions) as connection:
            with contextlib.suppress(asyncpg.UndefinedTableError):
                await connection.execute("INSERT INTO nowhere VALUES (1)")

    with pytest.raises(asyncpg.InFailedSQLTransactionError):
        await passes_over()
    assert await rows(database) == 0


@pytest.mark.parametrize("word", ["ROLLBACK", "COMMIT"])
async def test_a_handler_that_ends_the_transaction_itself_is_told_so(transactions: Transactions, database: Any, word: str) -> None:
    """Else a message whose row was undone would be taken for handled: PostgreSQL answers a COMMIT outside of a transaction with
    COMMIT. One whose row was committed is a duplicate at its next try."""

    async def ends_it() -> None:
        async with recorded(transactions) as connection:
            await connection.execute(word)

    with pytest.raises(asyncpg.NoActiveSQLTransactionError):
        await ends_it()
    assert await rows(database) == (word == "COMMIT")


@pytest.mark.parametrize(
    "script",
    [
        "ROLLBACK; BEGIN", "COMMIT; BEGIN", "COMMIT AND CHAIN", "rollback /* now */ and chain", "-- first\nEND; START TRANSACTION",
        "SELECT 1; ABORT; BEGIN; SELECT 2", "ROLLBACK;; BEGIN",
    ],
)  # fmt: skip
async def test_a_handler_that_puts_another_transaction_in_its_place_is_told_so(
    transactions: Transactions, database: Any, script: str
) -> None:
    """The message's row may be undone, and the COMMIT of the other transaction would be taken for its own."""

    async def replaces_it(*, by_parts: bool) -> None:
        async with recorded(transactions) as connection:
            for part in script.split(";") if by_parts and script.count(";") == 1 else [script]:
                await connection.execute(part)
            await connection.execute("INSERT INTO written VALUES ('late')")

    for by_parts in (False, True):
        with pytest.raises((asyncpg.NoActiveSQLTransactionError, TransientError)):
            await replaces_it(by_parts=by_parts)
        await database.execute("DELETE FROM fencepost.effects")
    assert await database.fetchval("SELECT count(*) FROM written") == 0


async def test_a_chain_by_fetch_is_noticed_as_well(transactions: Transactions, database: Any) -> None:
    async def chains() -> None:
        async with recorded(transactions) as connection:
            await connection.fetch("ROLLBACK AND CHAIN")

    with pytest.raises(asyncpg.NoActiveSQLTransactionError):
        await chains()


@pytest.mark.parametrize(
    "script",
    [
        "SAVEPOINT a; ROLLBACK TO a", "SAVEPOINT a; ROLLBACK WORK TO SAVEPOINT a; RELEASE a", "SELECT '; COMMIT; '",
        "DO $$ BEGIN PERFORM 1; END $$", "CREATE TEMP TABLE ended (begin_at int); DROP TABLE ended",
    ],
)  # fmt: skip
async def test_what_only_looks_like_an_end_is_none(transactions: Transactions, database: Any, script: str) -> None:
    async with recorded(transactions) as connection:
        await connection.execute(script)
    assert await rows(database) == 1


async def test_what_a_handler_keeps_of_its_connection_does_not_reach_into_the_next_transaction(transactions: Transactions) -> None:
    async with transactions.begin() as kept:
        statement = await kept.prepare("SELECT 1")
        pid = await kept.fetchval("SELECT pg_backend_pid()")
    async with transactions.begin() as connection:
        assert await connection.fetchval("SELECT pg_backend_pid()") == pid
        with pytest.raises(asyncpg.InterfaceError, match="released"):
            await kept.execute("SELECT 1")
        with pytest.raises(asyncpg.InterfaceError, match="released"):
            await statement.fetchval()


@pytest.mark.parametrize("moment", ["statement", "body", "begin"])
async def test_a_connection_that_was_cut_short_is_never_used_again(transactions: Transactions, database: Any, moment: str) -> None:
    pid, reached = await pid_of(transactions), asyncio.Event()

    async def work() -> None:
        async with recorded(transactions) as connection:
            reached.set()
            if moment == "statement":
                await connection.execute("SELECT pg_sleep(60)")
            await asyncio.Event().wait()

    async def waits() -> bool:
        query = "SELECT count(*) FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock'"
        return bool(await database.fetchval(query, pid))

    held = database.transaction()
    await held.start()
    if moment == "begin":  # another delivery holds the message's row
        await database.fetchval("SELECT fencepost.record_message($1, $2, $3, 'c/2')", *PING)
    task = asyncio.create_task(work())
    await (eventually(waits) if moment == "begin" else reached.wait())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await held.rollback()
    assert reached.is_set() == (moment != "begin")
    assert await pid_of(transactions) != pid
    await eventually(lambda: _gone(database, pid))
    assert await rows(database) == 0


async def _gone(database: Any, pid: int) -> bool:
    return not await database.fetchval("SELECT count(*) FROM pg_stat_activity WHERE pid = $1", pid)


async def test_a_server_that_became_a_reader_is_left(transactions: Transactions) -> None:
    pid = await pid_of(transactions)
    with pytest.raises(TransientError, match="25006"):
        async with transactions.begin() as connection:
            await connection.execute("SET TRANSACTION READ ONLY; INSERT INTO written VALUES ('a')")
    assert await pid_of(transactions) != pid


async def test_there_are_no_more_connections_than_asked_for(transactions: Transactions) -> None:
    async with transactions.begin(), transactions.begin():
        third = asyncio.create_task(pid_of(transactions))
        done, _ = await asyncio.wait([third], timeout=0.2)
        assert not done
    assert await third


async def test_connections_that_nobody_needs_are_closed(
    transactions: Transactions, database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.1)
    pid = await pid_of(transactions)
    await eventually(lambda: _gone(database, pid))
    assert await pid_of(transactions) != pid


async def test_after_the_end_nothing_begins(transactions: Transactions, database: Any) -> None:
    async with transactions.begin() as connection:
        pid = await connection.fetchval("SELECT pg_backend_pid()")
    transactions.close()
    with pytest.raises(TransientError, match="closed"):
        await pid_of(transactions)
    await eventually(lambda: _gone(database, pid))
