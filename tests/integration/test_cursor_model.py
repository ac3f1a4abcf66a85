"""THE test of the snapshot cursor: whatever writers do, every committed row is published once, in order per key.

Three parts, all on a real PostgreSQL and without Kafka: directed interleavings, with the broken cursors that must lose
rows by them; interleavings that Hypothesis makes up and minimises, one statement after another over a few connections;
and writers that run at once, bounded in transactions, not in seconds.
"""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any, Final, Self
from uuid import uuid4

import asyncpg
import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from relay.cursor import Batch, Cursor, advance
from relay.lane import Receipt
from relay.store import Poll, Store

LANES: Final = 8
# Four keys of one lane and one of another.
KEYS: Final = ("a", "f", "j", "o", "d")
FAR_AWAY: Final = 1 << 40
# More than any of these tests needs to come to rest.
ROUNDS: Final = 1_000
# What `position` alone amounts to: a snapshot behind which no transaction lies.
NO_SNAPSHOT: Final = "9223372036854775806:9223372036854775806:"

Advance = Callable[..., Batch]


@dataclass(frozen=True, kw_only=True)
class Tally:
    """What a consumer got against what writers committed."""

    lost: int
    twice: int
    extra: int
    inversions: int

    @classmethod
    def of(cls, committed: Mapping[str, Sequence[str]], published: Sequence[tuple[str, str]]) -> Self:
        """Events by key in the order in which they were written; (key, event) in the order of publishing."""
        seen = Counter(event for _, event in published)
        written = {event: place for events in committed.values() for place, event in enumerate(events)}
        by_key: dict[str, list[int]] = defaultdict(list)
        for key, event in published:
            if event in written:
                by_key[key].append(written[event])
        return cls(
            lost=len(written.keys() - seen.keys()),
            twice=sum(count > 1 for count in seen.values()),
            extra=len(seen.keys() - written.keys()),
            inversions=sum(later <= earlier for places in by_key.values() for earlier, later in pairwise(places)),
        )


NOTHING_WRONG: Final = Tally(lost=0, twice=0, extra=0, inversions=0)


class Reader:
    """A relay without Kafka: it polls, takes rows for published, and marks them, by the real statements."""

    def __init__(self, store: Store, generations: Mapping[int, int], *, advance_by: Advance = advance) -> None:
        self._store = store
        self._generations = generations
        self._advance = advance_by
        self.cursors: dict[int, Cursor] = {}
        self._sequences: dict[int, int] = {}
        self.published: list[tuple[str, str]] = []
        self.late = 0
        self.drains = 0
        self._more = False

    @classmethod
    async def open(cls, url: str, *, advance_by: Advance = advance) -> Self:
        store = await Store.open(url, relay_id="reader", timeout_seconds=60)
        reader = cls(store, await store.claim(3600, LANES, []), advance_by=advance_by)
        await reader.take_over()
        return reader

    async def close(self) -> None:
        await self._store.close()

    async def take_over(self) -> None:
        """Begin again from what was marked, as a successor does."""
        known = await self._store.cursors(list(range(LANES)))
        self.cursors = {lane: cursor for lane, (cursor, _) in known.items()}
        self._sequences = {lane: sequence for lane, (_, sequence) in known.items()}

    async def round(self, row_limit: int = 1000, byte_limit: int = FAR_AWAY) -> int:
        """Poll every lane once, publish and mark what it found; how many rows that were, or -1 if a lane has more."""
        poll = await self._store.poll(self.cursors, row_limit=row_limit, byte_limit=byte_limit)
        receipts = [receipt for lane in self.cursors if (receipt := self._publish(lane, poll, row_limit, byte_limit))]
        if receipts:
            assert await self._store.mark(receipts) == {receipt.lane for receipt in receipts}
        return -1 if self._more else sum(receipt.row_count for receipt in receipts)

    def _publish(self, lane: int, poll: Poll, row_limit: int, byte_limit: int) -> Receipt | None:
        cursor = self.cursors[lane]
        batch = self._advance(cursor, poll.rows.get(lane, ()), poll.snapshot, row_limit=row_limit, byte_limit=byte_limit)
        self.cursors[lane] = batch.cursor
        self._more = batch.more or (lane > 0 and self._more)
        self.drains += batch.cursor.target is not None and cursor.target is None
        if not batch.rows:
            return None
        self.late += batch.late_count
        self._sequences[lane] += 1
        self.published += [(row["key"].decode(), row["event_id"]) for row in batch.rows]
        return Receipt(
            lane=lane, generation=self._generations[lane], sequence=self._sequences[lane], cursor=batch.cursor,
            first_id=batch.rows[0]["id"], last_id=batch.rows[-1]["id"], row_count=len(batch.rows), late_count=batch.late_count,
            offsets={}, partition_counts={},
        )  # fmt: skip

    async def drain(self, row_limit: int = 1000, byte_limit: int = FAR_AWAY) -> None:
        """Poll until a round finds nothing and says that there is no more."""
        for _ in range(ROUNDS):
            if not await self.round(row_limit, byte_limit):
                return
        raise AssertionError(f"the cursor does not come to rest: {self.cursors}")


# -- directed interleavings, and the broken cursors that must lose rows by them -------------------------------------------


class Writers:
    """Connections of services, each named by its use; one statement at a time, so the order is the test's."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connections: dict[str, psycopg.Connection[Any]] = {}
        self.committed: dict[str, list[str]] = defaultdict(list)

    def __getitem__(self, name: str) -> "psycopg.Connection[Any]":
        if name not in self._connections:
            self._connections[name] = psycopg.connect(self._url, autocommit=True)
        return self._connections[name]

    def begin(self, name: str, *, early_xid: bool = False) -> int:
        """A transaction, with its number drawn at once or at its first write; 0 while it has none."""
        self[name].execute("BEGIN")
        row = self[name].execute("SELECT pg_current_xact_id()::text").fetchone() if early_xid else None
        return int(row[0]) if row else 0

    def enqueue(self, name: str, key: str = "a", count: int = 1) -> None:
        """Events that the test expects to be published."""
        for _ in range(count):
            event = str(uuid4())
            self[name].execute("SELECT fencepost.enqueue('t', 'e', %s, 'x', event_id => %s)", (key.encode(), event))
            self.committed[key].append(event)

    def commit(self, name: str) -> None:
        self[name].execute("COMMIT")

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


@pytest.fixture
def writers(database_url: str) -> Iterator[Writers]:
    opened = Writers(database_url)
    yield opened
    opened.close()


OpenReader = Callable[..., Awaitable[Reader]]


@pytest.fixture
async def open_reader(database_url: str) -> AsyncIterator[OpenReader]:
    """Opens the relay of the test, with the right cursor or with another."""
    opened: list[Reader] = []

    async def open_one(advance_by: Advance = advance) -> Reader:
        opened.append(await Reader.open(database_url, advance_by=advance_by))
        return opened[-1]

    yield open_one
    for reader in opened:
        await reader.close()


def break_poll(database_url: str, right: str, wrong: str) -> None:
    """Replace a part of the poll in this test's own database by a broken one."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        found = connection.execute("SELECT pg_get_functiondef('fencepost.poll'::regproc)").fetchone()
        assert found is not None
        assert right in found[0], "the poll has changed: so must this broken model of it"
        connection.execute(found[0].replace(right, wrong).encode())


def by_position_alone(cursor: Cursor, rows: Sequence[Any], _snapshot: str, **limits: int) -> Batch:
    """Broken: `id > last`."""
    return advance(cursor, rows, NO_SNAPSHOT, **limits)


def to_the_latest_snapshot(cursor: Cursor, rows: Sequence[Any], snapshot: str, **limits: int) -> Batch:
    """Broken: a late set that is drained ends at the snapshot of its last poll, not at the fixed target."""
    batch = advance(cursor, rows, snapshot, **limits)
    if cursor.target is not None and batch.cursor.target is None:
        return replace(batch, cursor=replace(batch.cursor, snapshot=snapshot))
    return batch


async def low_id_commits_late(writers: Writers, reader: Reader) -> None:
    """ORDER-4: A has the lower id, B is delivered, then A commits."""
    writers.begin("A")
    writers.enqueue("A", "a")
    writers.enqueue("B", "a")
    await reader.drain()
    assert len(reader.published) == 1
    writers.commit("A")
    await reader.drain()


async def transaction_beyond_xmax(writers: Writers, reader: Reader) -> None:
    """U drew its transaction first and its id last; T lies between. When U is delivered, T is in no xip: it is >= xmax.

    Another test's transaction that completes in between would put T into the xip, so the premise is checked, and the
    interleaving is tried again where it does not hold.
    """
    for _ in range(100):
        writers.begin("U", early_xid=True)
        beyond = writers.begin("T", early_xid=True)
        writers.enqueue("T", "a")
        writers.enqueue("U", "a")
        writers.commit("U")
        await reader.round()  # once: a mark is a transaction as well, and the next poll would see T in the xip
        seen = {cursor.snapshot for cursor in reader.cursors.values()}
        writers.commit("T")
        await reader.drain()
        if all(int(snapshot.split(":")[1]) <= beyond for snapshot in seen):
            return
    raise AssertionError("other transactions kept completing")


async def late_set_beyond_xmax(writers: Writers, reader: Reader) -> None:
    """As above, with more rows of T than a batch holds, and with V, beyond xmax as well, that commits while T is drained."""
    for _ in range(100):
        writers.begin("U", early_xid=True)
        beyond = writers.begin("T", early_xid=True)
        writers.begin("V")
        writers.enqueue("V", "a")
        writers.enqueue("T", "a", count=9)
        writers.enqueue("V", "a")
        writers.enqueue("U", "a")
        writers.commit("U")
        await reader.round()
        seen = {cursor.snapshot for cursor in reader.cursors.values()}
        writers.commit("T")
        await reader.round(row_limit=3)
        writers.commit("V")
        await reader.drain(row_limit=3)
        if all(int(snapshot.split(":")[1]) <= beyond for snapshot in seen):
            return
    raise AssertionError("other transactions kept completing")


async def late_set_larger_than_a_batch(writers: Writers, reader: Reader) -> None:
    """Open transactions below the position: one's rows are drained in parts, and meanwhile one before and one behind it commit."""
    writers.begin("first")
    writers.enqueue("first", "a")
    writers.begin("bulk")
    writers.enqueue("bulk", "a", count=9)
    writers.begin("last")
    writers.enqueue("last", "a")
    writers.enqueue("other", "a")
    await reader.drain()
    writers.commit("bulk")
    await reader.round(row_limit=3)
    assert reader.drains == 1
    writers.commit("first")
    writers.commit("last")
    await reader.drain(row_limit=3)


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A wrong cursor, and the interleaving by which it loses rows."""

    interleaving: Callable[[Writers, Reader], Awaitable[None]]
    advance_by: Advance = advance
    right: str = ""
    wrong: str = ""


BROKEN: Final = {
    "id > last alone": Broken(interleaving=low_id_commits_late, advance_by=by_position_alone),
    "without xid >= xmax": Broken(
        interleaving=transaction_beyond_xmax,
        right="o.xid >= pg_snapshot_xmax(c.snapshot)",
        wrong="o.xid >= '18446744073709551615'::xid8",
    ),
    "latest snapshot in place of the target": Broken(
        interleaving=late_set_larger_than_a_batch,
        advance_by=to_the_latest_snapshot,
        right="(x.xid, c.target)",
        wrong="(x.xid, pg_current_snapshot())",
    ),
}


def overlapping_keys(committed: Mapping[str, Sequence[str]], published: Sequence[tuple[str, str]]) -> Tally:
    """The tally without the order within a key: the writers above overlap in theirs (ORDER-5)."""
    return replace(Tally.of(committed, published), inversions=0)


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_cursor_loses_rows(database_url: str, writers: Writers, open_reader: OpenReader, name: str) -> None:
    """ORDER-4, ORDER-5: the models that must fail, each by one interleaving and no luck."""
    broken = BROKEN[name]
    if broken.right:
        break_poll(database_url, broken.right, broken.wrong)
    reader = await open_reader(broken.advance_by)

    await broken.interleaving(writers, reader)

    found = overlapping_keys(writers.committed, reader.published)
    assert found.lost > 0
    assert found == replace(NOTHING_WRONG, lost=found.lost)


@pytest.mark.parametrize(
    "interleaving", [low_id_commits_late, transaction_beyond_xmax, late_set_beyond_xmax, late_set_larger_than_a_batch]
)
async def test_the_cursor_publishes_each_of_these_rows_once(
    writers: Writers, open_reader: OpenReader, interleaving: Callable[[Writers, Reader], Awaitable[None]]
) -> None:
    """ORDER-4, ORDER-5: the same interleavings, and what would come twice if late sets were drained without their bounds."""
    reader = await open_reader()

    await interleaving(writers, reader)

    assert overlapping_keys(writers.committed, reader.published) == NOTHING_WRONG


async def test_a_late_row_is_published_once_and_counted_once(database_url: str, writers: Writers, open_reader: OpenReader) -> None:
    """ORDER-4."""
    reader = await open_reader()

    await low_id_commits_late(writers, reader)

    assert reader.late == 1
    assert [event for _, event in reader.published] == writers.committed["a"][::-1]
    assert await delivered(database_url) == {event for _, event in reader.published}


async def test_a_row_whose_id_is_older_than_its_transaction_is_not_lost(
    database_url: str, writers: Writers, open_reader: OpenReader
) -> None:
    """ORDER-4, the variant: A draws its id, another row is delivered, and only then A has a transaction id at all."""
    reader = await open_reader()
    writers.begin("A")
    row = writers["A"].execute("SELECT nextval('fencepost.outbox_id_seq')").fetchone()
    assert row is not None
    writers.enqueue("B", "a")
    await reader.drain()

    event = str(uuid4())
    writers["A"].execute(
        "INSERT INTO fencepost.outbox (id, event_id, topic, event_type, key) VALUES (%s, %s, 't', 'e', 'a')", (row[0], event)
    )
    writers.commit("A")
    await reader.drain()

    assert [found for _, found in reader.published] == [*writers.committed["a"], event]


async def test_a_stuck_writer_delays_only_its_own_rows(open_reader: OpenReader, writers: Writers) -> None:
    """WRITE-1: rows around an open transaction flow, of its lane as well."""
    reader = await open_reader()
    writers.begin("stuck")
    writers.enqueue("stuck", "a")
    for _ in range(20):
        writers.enqueue("other", "a")
        await reader.drain()

    assert [event for _, event in reader.published] == writers.committed["a"][1:]


async def test_a_bulk_transaction_that_commits_late_is_drained_in_bounded_batches(
    database_url: str, writers: Writers, open_reader: OpenReader
) -> None:
    """A late set of 500 rows and batches of 20: no batch is larger, nothing overtakes within the set."""
    reader = await open_reader()
    writers.begin("bulk")
    writers.enqueue("bulk", "a", count=500)
    writers.enqueue("other", "b")
    writers.enqueue("other", "a")
    await reader.drain()
    writers.commit("bulk")
    sizes = []
    while True:
        before = len(reader.published)
        if not await reader.round(row_limit=20):
            break
        sizes.append(len(reader.published) - before)

    assert max(sizes) == 20
    assert reader.late == 500
    assert [event for key, event in reader.published if key == "a"] == [writers.committed["a"][-1], *writers.committed["a"][:-1]]


async def test_rolled_back_ids_leave_harmless_gaps(database_url: str, writers: Writers, open_reader: OpenReader) -> None:
    """ORDER-6: every third enqueue is rolled back, some of them in savepoints."""
    reader = await open_reader()
    for number in range(1000):
        key = KEYS[number % len(KEYS)]
        if number % 3:
            writers.enqueue("writer", key)
            continue
        in_savepoint = number % 2
        writers.begin("writer")
        writers["writer"].execute("SAVEPOINT s" if in_savepoint else "SELECT 1")
        writers.enqueue("writer", key)
        writers.committed[key].pop()
        writers["writer"].execute("ROLLBACK TO s" if in_savepoint else "ROLLBACK")
        if in_savepoint:
            writers.commit("writer")
        if number % 30 == 0:
            await reader.round(row_limit=7)
    await reader.drain(row_limit=7)

    assert Tally.of(writers.committed, reader.published) == NOTHING_WRONG
    assert (await waiting(database_url), reader.late) == (0, 0)


async def delivered(database_url: str) -> set[str]:
    connection = await asyncpg.connect(database_url)
    try:
        rows = await connection.fetch("SELECT event_id::text FROM fencepost.delivery WHERE delivered")
    finally:
        await connection.close()
    return {row["event_id"] for row in rows}


async def waiting(database_url: str) -> int:
    connection = await asyncpg.connect(database_url)
    try:
        return int(await connection.fetchval("SELECT count(*) FROM fencepost.delivery WHERE NOT delivered"))
    finally:
        await connection.close()


# -- interleavings that Hypothesis makes up and minimises -------------------------------------------------------------------

CONNECTIONS: Final = 3
connections = st.integers(0, CONNECTIONS - 1)
keys = st.sampled_from(KEYS)


@dataclass
class Transaction:
    """What one connection has written in its open transaction, savepoint by savepoint."""

    events: list[tuple[str, str]] = field(default_factory=list)
    savepoints: list[int] = field(default_factory=list)
    # Held to the end, also over a rollback to a savepoint: the model never lets two writers of one key overlap.
    keys: set[str] = field(default_factory=set)


class Bench:
    """A database with connections, for many examples one after the other."""

    def __init__(self, url: str) -> None:
        self.runner = asyncio.Runner()
        self.connections = [psycopg.connect(url, autocommit=True) for _ in range(CONNECTIONS)]
        self.reader = self.runner.run(Reader.open(url))

    def execute(self, connection: int, sql: str, *arguments: object) -> None:
        self.connections[connection].execute(sql.encode(), arguments or None)

    def ask(self, sql: str) -> list[Any]:
        return self.connections[0].execute(sql.encode()).fetchall()

    def reset(self) -> None:
        """After an example that failed: no transaction is left, and the relay starts behind every row."""
        for connection in self.connections:
            connection.execute("ROLLBACK" if connection.info.transaction_status else "SELECT 1")
        for (name,) in self.ask("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"):
            self.execute(0, f"ROLLBACK PREPARED '{name}'")
        self.execute(0, "DELETE FROM fencepost.outbox")

    def close(self) -> None:
        self.runner.run(self.reader.close())
        self.runner.close()
        for connection in self.connections:
            connection.close()


class Interleaving:
    """Steps of a few connections and of one relay. A step that does not apply does nothing, so shrinking stays easy."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.reader = bench.reader
        self.bench.runner.run(self.reader.drain())
        self.reader.published.clear()
        self.open: dict[int, Transaction] = {}
        self.prepared: dict[str, Transaction] = {}
        self.committed: dict[str, list[str]] = defaultdict(list)
        self.written: dict[str, int] = {}

    def begin(self, connection: int, early_xid: bool) -> None:
        if connection not in self.open:
            self.open[connection] = Transaction()
            self.bench.execute(connection, "BEGIN")
            if early_xid:
                self.bench.execute(connection, "SELECT pg_current_xact_id()")

    def enqueue(self, connection: int, key: str, size: int) -> None:
        transaction = self._transaction_with(connection, key)
        if transaction is not None:
            event = self._new_event(transaction, key)
            self.bench.execute(
                connection, "SELECT fencepost.enqueue('t', 'e', %s, %s, event_id => %s)", key.encode(), b"x" * size, event
            )

    def insert_plainly(self, connection: int, key: str, count: int) -> None:
        """By SQL of the service's own: here the transaction id is drawn before the row's id, in the functions after it."""
        transaction = self._transaction_with(connection, key)
        if transaction is not None:
            events = [self._new_event(transaction, key) for _ in range(count)]
            self.bench.execute(
                connection,
                "INSERT INTO fencepost.outbox (event_id, topic, event_type, key)"
                " SELECT event, 't', 'e', %s FROM unnest(%s::uuid[]) AS event",
                key.encode(),
                events,
            )

    def savepoint(self, connection: int) -> None:
        transaction = self.open.get(connection)
        if transaction is not None:
            transaction.savepoints.append(len(transaction.events))
            self.bench.execute(connection, f"SAVEPOINT s{len(transaction.savepoints)}")

    def rollback_to_savepoint(self, connection: int) -> None:
        transaction = self.open.get(connection)
        if transaction is not None and transaction.savepoints:
            self.bench.execute(connection, f"ROLLBACK TO s{len(transaction.savepoints)}")
            del transaction.events[transaction.savepoints[-1] :]

    def release_savepoint(self, connection: int) -> None:
        transaction = self.open.get(connection)
        if transaction is not None and transaction.savepoints:
            self.bench.execute(connection, f"RELEASE s{len(transaction.savepoints)}")
            transaction.savepoints.pop()

    def end(self, connection: int, how: str) -> None:
        transaction = self.open.pop(connection, None)
        if transaction is None:
            return
        name = uuid4().hex
        self.bench.execute(connection, f"PREPARE TRANSACTION '{name}'" if how == "PREPARE" else how)
        if how == "COMMIT":
            self._keep(transaction)
        elif how == "PREPARE":
            self.prepared[name] = transaction

    def end_prepared(self, choice: int, kept: bool) -> None:
        idle = [connection for connection in range(CONNECTIONS) if connection not in self.open]
        if not self.prepared or not idle:
            return
        name = list(self.prepared)[choice % len(self.prepared)]
        transaction = self.prepared.pop(name)
        self.bench.execute(idle[0], f"{'COMMIT' if kept else 'ROLLBACK'} PREPARED '{name}'")
        if kept:
            self._keep(transaction)

    def poll(self, row_limit: int, byte_limit: int) -> None:
        self.bench.runner.run(self.reader.round(row_limit, byte_limit))

    def hand_over(self) -> None:
        """What was marked is what a successor finds, and what the delivered view says."""
        self.bench.runner.run(self.reader.take_over())
        if 0 not in self.open:
            marked = self.bench.ask("SELECT event_id::text FROM fencepost.delivery WHERE delivered")
            assert {event for (event,) in marked} & self.written.keys() == {event for _, event in self.reader.published}

    def check(self) -> None:
        """Nothing was published twice, before its commit or out of order."""
        assert replace(Tally.of(self.committed, self.reader.published), lost=0) == NOTHING_WRONG

    def finish(self) -> None:
        """Every transaction ends well, and the relay comes to rest: now nothing may be missing."""
        for connection in list(self.open):
            self.end(connection, "COMMIT")
        for _ in range(len(self.prepared)):
            self.end_prepared(0, kept=True)
        self.bench.runner.run(self.reader.drain(row_limit=3))
        assert Tally.of(self.committed, self.reader.published) == NOTHING_WRONG

    def _transaction_with(self, connection: int, key: str) -> Transaction | None:
        """The connection's transaction, begun if need be, unless another holds the key: writers of one key follow one another."""
        self.begin(connection, early_xid=False)
        mine = self.open[connection]
        others = [*self.prepared.values(), *(other for other in self.open.values() if other is not mine)]
        if any(key in other.keys for other in others):
            return None
        mine.keys.add(key)
        return mine

    def _new_event(self, transaction: Transaction, key: str) -> str:
        event = str(uuid4())
        self.written[event] = len(self.written)
        transaction.events.append((key, event))
        return event

    def _keep(self, transaction: Transaction) -> None:
        for key, event in transaction.events:
            self.committed[key].append(event)


Step = tuple[str, tuple[Any, ...]]


def step(weight: int, name: str, *arguments: "st.SearchStrategy[Any]") -> "list[st.SearchStrategy[Step]]":
    """A step of `Interleaving` by name, as often among the others as its weight says."""
    return [st.tuples(st.just(name), st.tuples(*arguments))] * weight


STEPS: Final = st.one_of(
    *step(2, "begin", connections, st.booleans()),
    *step(5, "enqueue", connections, keys, st.sampled_from([1, 50, 400])),
    *step(3, "insert_plainly", connections, keys, st.integers(2, 12)),
    *step(2, "savepoint", connections),
    *step(1, "rollback_to_savepoint", connections),
    *step(1, "release_savepoint", connections),
    *step(5, "end", connections, st.sampled_from(["COMMIT", "COMMIT", "COMMIT", "ROLLBACK", "PREPARE"])),
    *step(1, "end_prepared", st.integers(0, 100), st.booleans()),
    *step(5, "poll", st.sampled_from([1, 1, 2, 2, 3, 50]), st.sampled_from([1, 600, 2000, FAR_AWAY, FAR_AWAY, FAR_AWAY])),
    *step(1, "hand_over"),
)
# Lists of lists: one list of 60 steps on average could not be shrunk to a few.
INTERLEAVINGS: Final = st.lists(st.lists(STEPS, max_size=20), min_size=10, max_size=10)


@pytest.fixture
def bench(database_url: str) -> Iterator[Bench]:
    opened = Bench(database_url)
    yield opened
    opened.close()


@settings(
    max_examples=100,
    deadline=None,
    database=None,
    print_blob=True,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
@given(interleaving=INTERLEAVINGS)
def test_no_interleaving_loses_repeats_or_reorders_a_row(bench: Bench, interleaving: list[list[Step]]) -> None:
    """ORDER-4, ORDER-5, ORDER-6: early ids and xids, savepoints, prepared transactions, any bounds, any hand-over."""
    run = Interleaving(bench)
    try:
        for name, arguments in chain.from_iterable(interleaving):
            getattr(run, name)(*arguments)
            run.check()
        run.finish()
    finally:
        bench.reset()


# -- writers that run at once -----------------------------------------------------------------------------------------------

CHATTY: Final = 6
TRANSACTIONS: Final = 50
AGGREGATES: Final = 12
BULK_PARTS: Final = 6
AGGREGATE_TABLE: Final = """
CREATE TABLE aggregate (key text PRIMARY KEY, version int NOT NULL DEFAULT 0);
INSERT INTO aggregate SELECT 'k' || n FROM generate_series(0, 99) AS n;
"""
ENQUEUE: Final = "SELECT fencepost.enqueue('t', 'e', $1, $2, event_id => $3)"


class Progress:
    """How many transactions have committed: what long transactions wait for, in place of time."""

    def __init__(self) -> None:
        self._commits = 0
        self._over = False
        self._changed = asyncio.Condition()

    async def committed(self) -> None:
        await self._tell(over=False)

    async def over(self) -> None:
        """Nobody commits any more: nobody need wait."""
        await self._tell(over=True)

    async def _tell(self, *, over: bool) -> None:
        async with self._changed:
            self._commits += not over
            self._over = self._over or over
            self._changed.notify_all()

    async def further(self, commits: int) -> None:
        """Wait until others have committed so often more."""
        async with self._changed:
            wanted = self._commits + commits
            await self._changed.wait_for(lambda: self._over or self._commits >= wanted)


class Load:
    """Writers as services have them. What they committed is kept in the order of each aggregate's versions."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._seed = seed
        self.progress = Progress()
        self.versions: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self.deadlocks = 0

    @property
    def committed(self) -> dict[str, list[str]]:
        return {key: [event for _, event in sorted(versions)] for key, versions in self.versions.items()}

    async def run(self) -> None:
        others = [
            asyncio.create_task(work)
            for work in (self._long(), self._bulk(90), self._bulk(91), self._two_phase(92), self._two_phase(93))
        ]
        await asyncio.gather(*(self._chatty(number) for number in range(CHATTY)))
        await self.progress.over()
        await asyncio.gather(*others)

    async def _connect(self) -> "asyncpg.Connection[asyncpg.Record]":
        connection = await asyncpg.connect(self._url)
        await connection.execute("SET synchronous_commit = off; SET deadlock_timeout = '20ms'")
        return connection

    async def _write(self, connection: "asyncpg.Connection[asyncpg.Record]", key: str, mine: list[tuple[str, int, str]]) -> None:
        """An aggregate's next version and its event, as a service writes them: the row's lock serialises the key."""
        version = await connection.fetchval("UPDATE aggregate SET version = version + 1 WHERE key = $1 RETURNING version", key)
        event = str(uuid4())
        await connection.execute(ENQUEUE, key.encode(), b"x" * (version % 500), event)
        mine.append((key, version, event))

    async def _keep(self, mine: Sequence[tuple[str, int, str]]) -> None:
        for key, version, event in mine:
            self.versions[key].append((version, event))
        await self.progress.committed()

    async def _chatty(self, number: int) -> None:
        choice = random.Random(f"{self._seed}/{number}")
        connection = await self._connect()
        for _ in range(TRANSACTIONS):
            transaction = connection.transaction()
            await transaction.start()
            mine: list[tuple[str, int, str]] = []
            try:
                await self._chat(connection, choice, mine)
            except asyncpg.DeadlockDetectedError:
                self.deadlocks += 1
                await transaction.rollback()
                continue
            if choice.random() < 0.15:
                await transaction.rollback()
            else:
                await transaction.commit()
                await self._keep(mine)
        await connection.close()

    async def _chat(
        self, connection: "asyncpg.Connection[asyncpg.Record]", choice: random.Random, mine: list[tuple[str, int, str]]
    ) -> None:
        if choice.random() < 0.5:
            await connection.execute("SELECT pg_current_xact_id()")
        # Not in the order of keys: some of these deadlock.
        for key in choice.sample(range(AGGREGATES), choice.choice([1, 1, 2, 3])):
            if choice.random() < 0.3:
                await self._in_savepoint(connection, f"k{key}", mine, kept=choice.random() < 0.5)
            else:
                await self._write(connection, f"k{key}", mine)

    async def _in_savepoint(
        self, connection: "asyncpg.Connection[asyncpg.Record]", key: str, mine: list[tuple[str, int, str]], *, kept: bool
    ) -> None:
        savepoint = connection.transaction()
        await savepoint.start()
        inside: list[tuple[str, int, str]] = []
        await self._write(connection, key, inside)
        if kept:
            await savepoint.commit()
            mine.extend(inside)
        else:
            await savepoint.rollback()

    async def _long(self) -> None:
        """Open from the first to the last of the others."""
        connection = await self._connect()
        mine: list[tuple[str, int, str]] = []
        async with connection.transaction():
            await self._write(connection, "k99", mine)
            await self.progress.further(CHATTY * TRANSACTIONS + 1)
            await self._write(connection, "k99", mine)
        await self._keep(mine)
        await connection.close()

    async def _bulk(self, number: int) -> None:
        """Transactions of many rows that stay open while others commit: late sets far larger than a batch."""
        choice = random.Random(f"{self._seed}/{number}")
        connection = await self._connect()
        for _ in range(3):
            mine: list[tuple[str, int, str]] = []
            async with connection.transaction():
                for _ in range(BULK_PARTS):
                    for _ in range(choice.choice([1, 10, 60])):
                        await self._write(connection, f"k{number}", mine)
                    await self.progress.further(choice.choice([1, 5]))
            await self._keep(mine)
        await connection.close()

    async def _two_phase(self, number: int) -> None:
        connection = await self._connect()
        for attempt in range(8):
            name = uuid4().hex
            mine: list[tuple[str, int, str]] = []
            await connection.execute("BEGIN")
            await self._write(connection, f"k{number}", mine)
            await connection.execute(f"PREPARE TRANSACTION '{name}'")
            await self.progress.further(5)
            if attempt % 4:
                await connection.execute(f"COMMIT PREPARED '{name}'")
                await self._keep(mine)
            else:
                await connection.execute(f"ROLLBACK PREPARED '{name}'")
        await connection.close()


@pytest.mark.parametrize("_", range(3))
async def test_writers_at_once_lose_repeat_and_reorder_nothing(database_url: str, open_reader: OpenReader, _: int) -> None:
    """ORDER-2, ORDER-4, ORDER-6: early xids, rollbacks, deadlocks, savepoints, two phases, long and bulk transactions."""
    seed = random.getrandbits(32)
    print(f"seed {seed}")
    connection = await asyncpg.connect(database_url)
    await connection.execute(AGGREGATE_TABLE)
    await connection.close()
    load = Load(database_url, seed)
    reader = await open_reader()
    choice = random.Random(seed)

    writing = asyncio.create_task(load.run())
    while not writing.done():
        await reader.round(choice.choice([1, 3, 7, 50]), choice.choice([700, 5000, FAR_AWAY]))
        if choice.random() < 0.1:
            await reader.take_over()
    await writing
    await reader.drain(row_limit=50)

    print(f"{len(reader.published)} rows, {reader.late} late, {reader.drains} sets drained, {load.deadlocks} deadlocks")
    assert Tally.of(load.committed, reader.published) == NOTHING_WRONG
    assert reader.late > 0
    assert await waiting(database_url) == 0


async def test_the_victim_of_a_deadlock_publishes_nothing(database_url: str, open_reader: OpenReader) -> None:
    """Two writers that take two keys crosswise: one of them is rolled back by PostgreSQL, the other's rows go."""
    reader = await open_reader()
    setup = await asyncpg.connect(database_url)
    await setup.execute(AGGREGATE_TABLE)
    await setup.close()
    both_hold_one = asyncio.Barrier(2)
    committed: list[str] = []

    async def write(first: str, second: str) -> None:
        connection = await asyncpg.connect(database_url)
        await connection.execute("SET deadlock_timeout = '20ms'")
        events = [str(uuid4()), str(uuid4())]
        try:
            async with connection.transaction():
                for key, event in zip((first, second), events, strict=True):
                    await connection.execute("UPDATE aggregate SET version = version + 1 WHERE key = $1", key)
                    await connection.execute(ENQUEUE, key.encode(), b"", event)
                    if key == first:
                        await both_hold_one.wait()
            committed.extend(events)
        finally:
            await connection.close()

    outcomes = await asyncio.gather(write("k1", "k2"), write("k2", "k1"), return_exceptions=True)
    await reader.drain()

    assert [type(outcome) for outcome in outcomes if outcome] == [asyncpg.DeadlockDetectedError]
    assert sorted(event for _, event in reader.published) == sorted(committed)
