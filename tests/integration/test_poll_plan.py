"""What a poll and a mark cost: buffers read, counted, not timed. Neither history nor backlog nor statistics change it.

The tables are built by one INSERT ... SELECT, and their statistics are taken at the worst moments.
"""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import asyncpg
import psycopg
import pytest

from fencepost.statements import load_statements
from relay.cursor import ORIGIN, Cursor
from relay.lane import Receipt
from relay.store import Store
from tests.support.waiting import eventually

SQL: Final = load_statements("relay", "statements.sql")
LANES: Final = 8
ROWS: Final = 50
WIDE: Final = 1 << 40
# Statements of these tests answer at once; one that waits for a writer's lock would fail here, not hang.
LOCK_TIMEOUT: Final = "2s"

FILL: Final = """
INSERT INTO fencepost.outbox (lane, record_bytes, event_id, topic, event_type, key, payload)
SELECT n %% 8, 256 + 1 + 20, gen_random_uuid(), 't', 'e', 'k', convert_to(repeat('x', 20), 'UTF8') FROM generate_series(1, %s) AS n
"""

Cursors = Mapping[int, Cursor]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Rows that a statement returned and the shared buffers that it touched for them."""

    rows: int
    buffers: int


@pytest.fixture
def connection(database_url: str) -> Iterator["psycopg.Connection[Any]"]:
    """A superuser's connection; rows are checked by other tests and are not what is measured here."""
    with psycopg.connect(database_url, autocommit=True) as opened:
        opened.execute("CREATE EXTENSION pg_stat_statements")
        opened.execute("ALTER TABLE fencepost.outbox SET (autovacuum_enabled = false)")
        opened.execute("ALTER TABLE fencepost.outbox DROP CONSTRAINT outbox_row_check")
        opened.execute(f"SET lock_timeout = '{LOCK_TIMEOUT}'")
        yield opened


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[Store]:
    opened = await Store.open(database_url, relay_id="relay-1", timeout_seconds=60)
    yield opened
    await opened.close()


def fill(connection: "psycopg.Connection[Any]", rows: int) -> None:
    connection.execute(FILL, (rows,))


def analyze(connection: "psycopg.Connection[Any]") -> None:
    connection.execute("ANALYZE fencepost.outbox, fencepost.receipts, fencepost.lanes")


def one(connection: "psycopg.Connection[Any]", sql: str) -> Any:
    row = connection.execute(sql.encode()).fetchone()
    assert row is not None
    return row[0]


def now(connection: "psycopg.Connection[Any]", *in_progress: int) -> str:
    """A snapshot of this moment, with these transactions in progress and none of other tests' on the same server.

    Each transaction in progress costs a poll three buffers a lane to look for its rows.
    """
    xmax = one(connection, "SELECT pg_snapshot_xmax(pg_current_snapshot())::text")
    return f"{min([*in_progress, int(xmax)])}:{xmax}:{','.join(map(str, sorted(in_progress)))}"


def at_the_end(connection: "psycopg.Connection[Any]", *in_progress: int) -> Cursors:
    """Every lane behind all rows that there are."""
    last = one(connection, "SELECT coalesce(max(id), 0) FROM fencepost.outbox")
    return {lane: Cursor(position=last, snapshot=now(connection, *in_progress)) for lane in range(LANES)}


def polled(connection: "psycopg.Connection[Any]", cursors: Cursors, *, rows: int = ROWS, size: int = WIDE) -> Cost:
    """Poll by the relay's own statement; a first poll of the session warms its caches and is not counted."""
    arguments = (
        list(cursors),
        [cursor.position for cursor in cursors.values()],
        [cursor.snapshot for cursor in cursors.values()],
        [cursor.target for cursor in cursors.values()],
        [cursor.late_position for cursor in cursors.values()],
        rows,
        size,
    )
    return _explained(connection, "poll", arguments)


def _explained(connection: "psycopg.Connection[Any]", name: str, arguments: tuple[object, ...]) -> Cost:
    statement = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {SQL[name]}"
    for number in range(len(arguments), 0, -1):
        statement = statement.replace(f"${number}", f"%({number})s")
    named = {str(number): argument for number, argument in enumerate(arguments, start=1)}
    for _ in range(2):
        row = connection.execute(statement.encode(), named).fetchone()
    assert row is not None
    plan = (json.loads(row[0]) if isinstance(row[0], str) else row[0])[0]["Plan"]
    return Cost(rows=plan["Actual Rows"], buffers=plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def within(cost: Cost, empty: Cost) -> bool:
    """The bound of the issue: half as much again as the empty table, and the few pages that a deeper index has."""
    depth = 2 * 3 * LANES
    return cost.rows == empty.rows and cost.buffers <= empty.buffers * 1.5 + depth


@pytest.fixture(params=["statistics of an empty table", "statistics of a full table", "no statistics"])
def statistics(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def fill_with(connection: "psycopg.Connection[Any]", rows: int, statistics: str) -> None:
    if statistics == "statistics of an empty table":
        analyze(connection)
    fill(connection, rows)
    if statistics == "statistics of a full table":
        analyze(connection)


def cost_of_nothing(connection: "psycopg.Connection[Any]") -> Cost:
    return polled(connection, at_the_end(connection))


def cost_of_a_batch_in_each_lane(connection: "psycopg.Connection[Any]") -> Cost:
    """A full batch of every lane, behind whatever the table holds."""
    cursors = at_the_end(connection)
    fill(connection, LANES * ROWS)
    return polled(connection, cursors)


def test_a_long_history_costs_a_poll_nothing(connection: "psycopg.Connection[Any]", statistics: str) -> None:
    """DB-3: nothing waits behind 200,000 delivered rows, then a batch in each lane does."""
    nothing, batch = cost_of_nothing(connection), cost_of_a_batch_in_each_lane(connection)
    fill_with(connection, 200_000, statistics)

    assert within(cost_of_nothing(connection), nothing)
    assert within(cost_of_a_batch_in_each_lane(connection), batch)


def test_a_long_backlog_costs_a_poll_nothing(connection: "psycopg.Connection[Any]", statistics: str) -> None:
    """DB-8: 200,000 rows wait."""
    batch = cost_of_a_batch_in_each_lane(connection)
    cursors = at_the_end(connection)
    fill_with(connection, 200_000, statistics)
    recent = {lane: Cursor(position=c.position, snapshot=now(connection)) for lane, c in cursors.items()}

    assert within(polled(connection, recent), batch)


def test_the_cost_is_flat_in_the_size_of_the_table(connection: "psycopg.Connection[Any]") -> None:
    """DB-3, DB-8: the same poll in the middle of tables of four sizes."""
    costs = {}
    for size in (1_000, 10_000, 50_000, 150_000):
        fill(connection, size - int(one(connection, "SELECT count(*) FROM fencepost.outbox")))
        middle = int(one(connection, "SELECT (min(id) + max(id)) / 2 FROM fencepost.outbox"))
        cursors = {lane: Cursor(position=middle, snapshot=now(connection)) for lane in range(LANES)}
        costs[size] = polled(connection, cursors)

    smallest = costs[1_000]
    assert smallest.rows == LANES * ROWS + 1
    assert all(within(cost, smallest) for cost in costs.values()), costs


def test_a_pre_outage_snapshot_does_not_read_the_backlog(connection: "psycopg.Connection[Any]", statistics: str) -> None:
    """After an outage the stored snapshot lies before every row: no heap page of the backlog is read for the late branch."""
    batch = cost_of_a_batch_in_each_lane(connection)
    before_the_outage = at_the_end(connection)
    fill_with(connection, 200_000, statistics)
    entries = int(one(connection, "SELECT pg_relation_size('fencepost.outbox_lane_xid_id_idx') / 8192"))

    cost = polled(connection, before_the_outage)

    assert cost.rows == batch.rows
    # Once through the xid index of what waits, and never to the table for it.
    assert cost.buffers <= batch.buffers * 1.5 + entries + 2 * 3 * LANES


def test_the_second_poll_after_an_outage_costs_no_more_than_any_other(connection: "psycopg.Connection[Any]") -> None:
    """The first poll's own snapshot becomes the cursor's: the look through the xid index happens once."""
    batch = cost_of_a_batch_in_each_lane(connection)
    fill(connection, 200_000)
    ids = connection.execute("SELECT lane, (array_agg(id ORDER BY id))[%s] FROM fencepost.outbox GROUP BY lane", (ROWS,)).fetchall()

    second = polled(connection, {lane: Cursor(position=last, snapshot=now(connection)) for lane, last in ids})

    assert within(second, batch)


def test_no_plan_of_a_poll_reads_the_table_or_sorts_the_backlog(connection: "psycopg.Connection[Any]", statistics: str) -> None:
    """DB-8: index scans only, whatever the statistics say."""
    fill_with(connection, 20_000, statistics)
    behind_all = at_the_end(connection)
    connection.execute("LOAD 'auto_explain'")
    connection.execute(
        "SET auto_explain.log_min_duration = 0; SET auto_explain.log_nested_statements = on; SET auto_explain.log_level = notice;"
        "SET auto_explain.log_format = json; SET client_min_messages = notice"
    )
    plans: list[str] = []
    connection.add_notice_handler(lambda notice: plans.append(notice.message_primary or ""))

    for cursors in ({0: ORIGIN}, behind_all):
        polled(connection, cursors)

    nodes = [node for plan in plans if "outbox" in plan for node in _nodes(json.loads(plan[plan.index("{") :])["Plan"])]
    scans = [node for node in nodes if node.get("Relation Name") == "outbox"]
    assert scans
    assert {node["Node Type"] for node in scans} <= {"Index Scan", "Index Only Scan"}
    assert {node["Index Name"] for node in scans} == {"outbox_pkey", "outbox_lane_xid_id_idx"}
    assert all("Heap Fetches" in node or "Index Cond" in node for node in scans)


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from _nodes(child)


def test_transactions_in_progress_cost_a_poll_a_look_each(connection: "psycopg.Connection[Any]") -> None:
    """Whoever is in progress in the stored snapshot is looked up, by lane, through the index: the same for any table."""
    bystanders = [int(one(connection, "SELECT pg_current_xact_id()::text")) for _ in range(100)]
    fill(connection, 50_000)
    nobody = polled(connection, at_the_end(connection))
    fill(connection, LANES)

    hundred = polled(connection, at_the_end(connection, *bystanders))

    assert hundred.rows == nobody.rows
    assert hundred.buffers <= nobody.buffers + 100 * 3 * LANES


def test_a_late_bulk_transaction_costs_each_poll_what_it_returns(connection: "psycopg.Connection[Any]", database_url: str) -> None:
    """A late set of 40,000 rows of one transaction that was in progress, drained in parts."""
    with psycopg.connect(database_url) as bulk:
        row = bulk.execute("SELECT pg_current_xact_id()::text").fetchone()
        assert row is not None
        bulk.execute(FILL, (40_000,))
        fill(connection, LANES)
        cursors = at_the_end(connection, int(row[0]))
        bulk.commit()
    target = now(connection)

    costs = []
    for done in (0, 10_000, 30_000):
        draining = {
            lane: Cursor(position=c.position, snapshot=c.snapshot, target=target, late_position=done) for lane, c in cursors.items()
        }
        costs.append(polled(connection, draining))

    assert all(cost.rows == LANES * (ROWS + 1) + 1 for cost in costs)
    assert max(cost.buffers for cost in costs) <= 6 * LANES * (ROWS + 1)


def test_a_late_set_beyond_xmax_costs_each_poll_no_more_than_the_set(connection: "psycopg.Connection[Any]") -> None:
    """Its transactions are unknown, so its rows are sorted by id: what remains of the set is read, and nothing of the history."""
    fill(connection, 100_000)
    before, snapshot = _pages(connection), now(connection)
    fill(connection, 40_000)
    position = int(one(connection, "SELECT max(id) FROM fencepost.outbox"))
    of_the_set = _pages(connection) - before

    draining = {lane: Cursor(position=position, snapshot=snapshot) for lane in range(LANES)}
    cost = polled(connection, draining)

    assert cost.rows == LANES * (ROWS + 1) + 1
    # Pages of the table are shared by the lanes: each lane touches all of them.
    assert cost.buffers <= LANES * of_the_set


def _pages(connection: "psycopg.Connection[Any]") -> int:
    return int(
        one(
            connection,
            "SELECT (pg_relation_size('fencepost.outbox') + pg_relation_size('fencepost.outbox_lane_xid_id_idx')) / 8192",
        )
    )


@pytest.mark.parametrize("row_limit", [1, 10, 1000])
def test_a_poll_is_cut_in_rows(connection: "psycopg.Connection[Any]", row_limit: int) -> None:
    """DB-8."""
    fill(connection, LANES * 2000)

    assert polled(connection, dict.fromkeys(range(LANES), ORIGIN), rows=row_limit).rows == LANES * row_limit + 1


@pytest.mark.parametrize(("byte_limit", "rows"), [(1, 1), (277, 1), (278, 2), (2770, 10), (2771, 11)])
def test_a_poll_is_cut_in_bytes_behind_the_row_that_reaches_the_bound(
    connection: "psycopg.Connection[Any]", byte_limit: int, rows: int
) -> None:
    """DB-8: rows of 277 bytes each; one always goes."""
    fill(connection, LANES * 100)

    assert polled(connection, {0: ORIGIN}, size=byte_limit).rows == rows + 1


# -- marks, and everything under transactions that stay open ----------------------------------------------------------------


def receipt(sequence: int, snapshot: str, *, lane: int = 0, generation: int = 1) -> Receipt:
    return Receipt(
        lane=lane, generation=generation, sequence=sequence, cursor=Cursor(position=sequence, snapshot=snapshot),
        first_id=sequence, last_id=sequence, row_count=1, late_count=0, offsets={}, partition_counts={},
    )  # fmt: skip


async def statistics_of(connection: "psycopg.Connection[Any]", name: str) -> Cost:
    """Calls and buffers of one of the relay's statements in this database since the last reset."""
    row = connection.execute(
        "SELECT sum(calls), sum(shared_blks_hit + shared_blks_read)::bigint FROM pg_stat_statements AS s"
        " JOIN pg_database AS d ON d.oid = s.dbid WHERE d.datname = current_database() AND toplevel AND query LIKE %s",
        (f"-- fencepost:{name}%",),
    ).fetchone()
    assert row is not None
    return Cost(rows=int(row[0] or 0), buffers=int(row[1] or 0))


def forget_statistics(connection: "psycopg.Connection[Any]") -> None:
    """Of this database only: other tests run on the same server."""
    connection.execute("SELECT pg_stat_statements_reset(0, oid, 0) FROM pg_database WHERE datname = current_database()")


async def buffers_a_mark(connection: "psycopg.Connection[Any]", store: Store, first: int, count: int) -> float:
    snapshot = now(connection)
    forget_statistics(connection)
    for sequence in range(first, first + count):
        assert await store.mark([receipt(sequence, snapshot)]) == {0}
    cost = await statistics_of(connection, "mark")
    assert cost.rows == count
    return cost.buffers / count


MANY_MARKS: Final = """
INSERT INTO fencepost.receipts (lane, sequence, generation, relay_id, position, snapshot, row_count, late_count, partitions)
SELECT 0, n, 1, 'relay-1', n, pg_current_snapshot(), 0, 0, '{}' FROM generate_series(%s::bigint, %s) AS n
"""


async def test_marks_and_polls_cost_the_same_under_a_transaction_held_open_for_100000_marks(
    database_url: str, connection: "psycopg.Connection[Any]", store: Store
) -> None:
    """DB-4: a pinned xmin horizon. Marks are inserts, so there is no chain of dead versions to walk."""
    await store.claim(3600, LANES, [])
    fill(connection, LANES * ROWS)
    mark_before = await buffers_a_mark(connection, store, 1, 50)
    poll_before = polled(connection, dict.fromkeys(range(LANES), ORIGIN))
    with psycopg.connect(database_url) as pin:
        pin.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        pin.execute("SELECT count(*) FROM fencepost.outbox")
        for first in range(51, 100_000, 2_500):
            connection.execute(MANY_MARKS, (first, min(first + 2_499, 100_000)))
            await store.renew({0: 1}, 3600)
        mark_under_pin = await buffers_a_mark(connection, store, 100_001, 50)
        poll_under_pin = polled(connection, dict.fromkeys(range(LANES), ORIGIN))
        forget_statistics(connection)
        cursors = await store.cursors([0])
        cursor_read = await statistics_of(connection, "cursors")

    assert mark_under_pin <= mark_before * 1.5 + 6
    assert within(poll_under_pin, poll_before)
    assert cursors[0][1] == 100_050
    assert cursor_read.buffers <= 100


async def test_a_claim_after_many_receipts_reads_only_the_newest(connection: "psycopg.Connection[Any]", store: Store) -> None:
    """DB-5: a start on a long history of receipts, with statistics taken while there were none."""
    analyze(connection)
    connection.execute(MANY_MARKS, (1, 50_000))
    forget_statistics(connection)

    cursors = await store.cursors(list(range(LANES)))

    assert cursors[0][1] == 50_000
    assert (await statistics_of(connection, "cursors")).buffers <= 200


async def test_an_open_writer_blocks_no_claim_no_poll_no_mark_no_renewal_no_release(
    database_url: str, connection: "psycopg.Connection[Any]", store: Store
) -> None:
    """WRITE-1: a service transaction that has enqueued in every lane and stays open. What waited for it would hang here."""
    with psycopg.connect(database_url) as writer:
        for number in range(64):
            writer.execute("SELECT fencepost.enqueue('t', 'e', %s, 'x')", (f"key-{number}".encode(),))
        connection.execute(f"ALTER ROLE CURRENT_USER IN DATABASE {connection.info.dbname} SET lock_timeout = '{LOCK_TIMEOUT}'")
        guarded = await Store.open(database_url, relay_id="relay-2", timeout_seconds=60)
        try:
            claimed = await guarded.claim(60, LANES, [])
            fill(connection, LANES)
            poll = await guarded.poll(dict.fromkeys(range(LANES), ORIGIN), row_limit=10, byte_limit=WIDE)
            marked = await guarded.mark([receipt(1, poll.snapshot, lane=lane) for lane in claimed])
            renewed = await guarded.renew(claimed, 60)
            await guarded.arm(list(claimed), 1000)
            await guarded.disarm(list(claimed))
            released = await guarded.release(claimed)
        finally:
            await guarded.close()

    assert len(claimed) == LANES
    assert {lane: len(rows) for lane, rows in poll.rows.items()} == dict.fromkeys(range(LANES), 1)
    assert marked == renewed.keys() == released == claimed.keys()


async def test_an_open_mark_blocks_no_writer(database_url: str, connection: "psycopg.Connection[Any]", store: Store) -> None:
    """WRITE-1, the other way round: a relay's transaction that hangs in a mark costs writers nothing."""
    claimed = await store.claim(60, LANES, [])
    hanging = await asyncpg.connect(database_url)
    try:
        await hanging.execute("BEGIN")
        await hanging.fetch("SELECT lane FROM fencepost.lanes WHERE lane = ANY ($1) FOR NO KEY UPDATE", list(claimed))
        for number in range(64):
            connection.execute("SELECT fencepost.enqueue('t', 'e', %s, 'x')", (f"key-{number}".encode(),))
    finally:
        await hanging.close()

    assert one(connection, "SELECT count(*) FROM fencepost.outbox") == 64


async def test_delivering_a_row_updates_none(connection: "psycopg.Connection[Any]", store: Store) -> None:
    """Written once, read once: neither outbox nor receipts see an update or a delete by poll and mark."""
    claimed = await store.claim(60, LANES, [])
    for sequence in range(1, 21):
        fill(connection, LANES)
        poll = await store.poll(dict.fromkeys(range(LANES), ORIGIN), row_limit=10, byte_limit=WIDE)
        assert await store.mark([receipt(sequence, poll.snapshot, lane=lane) for lane in claimed]) == claimed.keys()
    await store.close()  # a session reports its counts at the latest when it ends, which is after its client has gone
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'fencepost-relay'"
    await eventually(lambda: one(connection, sessions) == 0, message="the relay's sessions have ended")
    connection.execute("SELECT pg_stat_force_next_flush()")

    counts = connection.execute(
        "SELECT relname, n_tup_ins, n_tup_upd, n_tup_del FROM pg_stat_user_tables"
        " WHERE schemaname = 'fencepost' AND relname IN ('outbox', 'receipts') ORDER BY relname"
    ).fetchall()
    assert counts == [("outbox", 20 * LANES, 0, 0), ("receipts", 20 * LANES, 0, 0)]
