"""Leases on a real PostgreSQL: each write names the generation it was made under, and a stale holder changes nothing.

Time is the database's and is moved by moving rows; waiting is on locks and barriers.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Final

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.errors import TransientError
from fencepost.statements import load_statements
from relay.cursor import Cursor
from relay.lane import Receipt
from relay.share import Fleet, Plan, plan, quota
from relay.store import Store
from tests.support.waiting import eventually

SQL: Final = load_statements("relay", "statements.sql")
LANES: Final = 8
LEASE: Final = 60.0
SNAPSHOT: Final = "10:10:"

OpenStore = Callable[[str], Awaitable[Store]]


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


@pytest.fixture
async def open_store(database_url: str) -> AsyncIterator[OpenStore]:
    """Opens relays' stores by relay id."""
    opened: list[Store] = []

    async def open_one(relay_id: str, timeout_seconds: float = 30) -> Store:
        opened.append(await Store.open(database_url, relay_id=relay_id, timeout_seconds=timeout_seconds))
        return opened[-1]

    yield open_one
    for store in opened:
        await store.close()


def receipt(lane: int, generation: int, sequence: int = 1, *, position: int = 1) -> Receipt:
    return Receipt(
        lane=lane, generation=generation, sequence=sequence, cursor=Cursor(position=position, snapshot=SNAPSHOT),
        first_id=position, last_id=position, row_count=1, late_count=0,
        offsets={"orders": {3: (7, 9)}}, partition_counts={"orders": 12},
    )  # fmt: skip


def receipts_of(claimed: Mapping[int, int], sequence: int = 1, *, position: int = 1) -> list[Receipt]:
    return [receipt(lane, generation, sequence, position=position) for lane, generation in claimed.items()]


async def expire(database: Any, *lanes: int) -> None:
    """Let the database's time run past these leases; with none given, past all."""
    await database.execute(
        "UPDATE fencepost.lanes SET lease_expires_at = clock_timestamp() - interval '1 ms'"
        " WHERE lease_owner IS NOT NULL AND (cardinality($1::int[]) = 0 OR lane = ANY ($1))",
        list(lanes),
    )


async def lane_rows(database: Any) -> list[tuple[Any, ...]]:
    rows = await database.fetch("SELECT lane, lease_owner, lease_generation, lease_expires_at FROM fencepost.lanes ORDER BY lane")
    return [tuple(row) for row in rows]


async def generations(database: Any) -> list[int]:
    return [row[2] for row in await lane_rows(database)]


async def waiting_for_a_lock(database: Any) -> bool:
    return bool(
        await database.fetchval(
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')"
        )
    )


# -- a stale owner changes nothing ------------------------------------------------------------------------------------------


async def test_a_former_owners_mark_renewal_and_release_change_nothing(database: Any, open_store: OpenStore) -> None:
    """LEASE-2: A published, but its lanes have gone to B, which has marked meanwhile."""
    a, b = await open_store("A"), await open_store("B")
    held_by_a = await a.claim(LEASE, LANES, [])
    await expire(database)
    held_by_b = await b.claim(LEASE, LANES, [])
    assert await b.mark(receipts_of(held_by_b, position=5)) == held_by_b.keys()
    before, cursors = await lane_rows(database), await b.cursors(list(range(LANES)))

    assert await a.mark(receipts_of(held_by_a, sequence=2, position=99)) == frozenset()
    assert await a.renew(held_by_a, LEASE) == {}
    assert await a.release(held_by_a) == frozenset()

    assert await lane_rows(database) == before
    assert await b.cursors(list(range(LANES))) == cursors


async def test_an_expired_lease_is_lost_though_nobody_took_the_lane(database: Any, open_store: OpenStore) -> None:
    a = await open_store("A")
    held = await a.claim(LEASE, LANES, [])
    await expire(database)

    assert await a.mark(receipts_of(held)) == frozenset()
    assert await a.renew(held, LEASE) == {}
    assert await database.fetchval("SELECT count(*) FROM fencepost.receipts") == 0


async def test_only_the_lanes_that_were_lost_are_refused(database: Any, open_store: OpenStore) -> None:
    """One statement marks many lanes: what is still held is written, and the missing ones name the loss."""
    a = await open_store("A")
    held = await a.claim(LEASE, LANES, [])
    await expire(database, 2, 5)

    kept = frozenset(range(LANES)) - {2, 5}
    assert await a.mark(receipts_of(held)) == kept
    assert (await a.renew(held, LEASE)).keys() == kept
    assert {row["lane"] for row in await database.fetch("SELECT lane FROM fencepost.receipts")} == kept


async def test_an_older_generation_of_the_same_owner_is_refused(database: Any, open_store: OpenStore) -> None:
    """A relay that lost a lane and claimed it again must not act on what it planned before."""
    a = await open_store("A")
    old = await a.claim(LEASE, LANES, [])
    await expire(database)
    new = await a.claim(LEASE, LANES, [])

    assert await a.mark(receipts_of(old)) == frozenset()
    assert await a.renew(old, LEASE) == {}
    assert await a.release(old) == frozenset()
    assert await a.mark(receipts_of(new)) == new.keys()


async def test_receipts_of_two_generations_in_one_statement_write_only_the_newer_ones(database: Any, open_store: OpenStore) -> None:
    """A mark never falls back to what an older generation planned, whatever it is given."""
    a = await open_store("A")
    old = await a.claim(LEASE, 1, [])
    await expire(database)
    new = await a.claim(LEASE, 1, [])

    await a.mark([*receipts_of(old, 1, position=99), *receipts_of(new, 2, position=5)])

    found = await database.fetch("SELECT generation, position FROM fencepost.receipts")
    assert [tuple(row) for row in found] == [(new[0], 5)]


async def test_the_same_name_after_a_restart_is_another_owner(database: Any, open_store: OpenStore) -> None:
    """LEASE-3: the nonce of each start tells them apart; the new process waits for the lease like anyone else."""
    dead, started = await open_store("relay-0:nonce-1"), await open_store("relay-0:nonce-2")
    held_by_dead = await dead.claim(LEASE, LANES, [])

    assert await started.claim(LEASE, LANES, []) == {}
    await expire(database)
    held = await started.claim(LEASE, LANES, [])

    assert await dead.mark(receipts_of(held_by_dead)) == frozenset()
    assert held == {lane: generation + 1 for lane, generation in held_by_dead.items()}


# -- claims -----------------------------------------------------------------------------------------------------------------


async def test_the_generation_rises_by_one_at_each_claim_and_is_never_reset(database: Any, open_store: OpenStore) -> None:
    stores = [await open_store(name) for name in ("A", "B", "C")]
    for number in range(9):
        store = stores[number % 3]
        held = await store.claim(LEASE, LANES, [])
        assert set(held.values()) == {number + 1}
        if number % 2:
            assert await store.release(held) == held.keys()
        else:
            await expire(database)

    assert await generations(database) == [9] * LANES


async def test_renewals_marks_and_releases_leave_the_generation_alone(database: Any, open_store: OpenStore) -> None:
    a = await open_store("A")
    held = await a.claim(LEASE, LANES, [])
    await a.mark(receipts_of(held))
    await a.renew(held, LEASE)
    await a.release(held)

    assert await generations(database) == [1] * LANES


async def test_a_live_lease_is_not_claimed(database: Any, open_store: OpenStore) -> None:
    """LEASE-9."""
    a, b = await open_store("A"), await open_store("B")
    await a.claim(LEASE, LANES, [])
    before = await lane_rows(database)

    assert await b.claim(LEASE, LANES, []) == {}
    assert await lane_rows(database) == before


async def test_relays_that_claim_at_once_get_disjoint_lanes(database: Any, open_store: OpenStore) -> None:
    """LEASE-5: the generation of each lane rose by one, so no lane had two owners."""
    stores = [await open_store(f"relay-{number}") for number in range(4)]

    claims = await asyncio.gather(*(store.claim(LEASE, 3, []) for store in stores))

    lanes = [lane for claim in claims for lane in claim]
    assert len(lanes) == len(set(lanes))
    for store, claim in zip(stores, claims, strict=True):
        more = await store.claim(LEASE, LANES - len(lanes), list(claim))
        lanes += more
    assert sorted(lanes) == list(range(LANES))
    assert await generations(database) == [1] * LANES


async def test_a_claim_passes_by_what_another_claim_is_taking(database_url: str, open_store: OpenStore) -> None:
    """LEASE-5, with the other claim held open: nobody waits, and nothing is taken twice."""
    b = await open_store("B")
    other = await asyncpg.connect(database_url)
    try:
        async with other.transaction():
            taken = {row["lane"] for row in await other.fetch(SQL["claim"], "A", LEASE, 3, [])}
            left = await b.claim(LEASE, LANES, [])
    finally:
        await other.close()

    assert len(taken) == 3
    assert left.keys() == set(range(LANES)) - taken


async def test_lanes_that_cannot_be_taken_do_not_hide_those_that_can(database: Any, open_store: OpenStore) -> None:
    """LEASE-13: 64 lanes, 50 of them held by live owners; the orphans lie at the end, and more is free than is wanted."""
    await database.execute("INSERT INTO fencepost.lanes (lane) SELECT generate_series(8, 63)")
    await database.execute(
        "UPDATE fencepost.lanes SET lease_owner = 'live', lease_expires_at = clock_timestamp() + interval '1 hour'"
        " WHERE lane NOT IN (61, 63)"
    )
    relay = await open_store("relay")

    assert (await relay.fleet([])).free == 2
    assert (await relay.claim(LEASE, 16, [])).keys() == {61, 63}


async def test_expiry_is_told_by_the_clock_not_by_the_start_of_a_transaction(database_url: str, database: Any) -> None:
    """In a transaction now() stands still: a lease that ended since its begin would still look alive."""
    await database.execute(SQL["claim"].replace("$1", "'A'").replace("$2", "60").replace("$3", "1").replace("$4", "'{}'"))
    late = await asyncpg.connect(database_url)
    try:
        transaction = late.transaction()
        await transaction.start()
        begun = await late.fetchval("SELECT now()")
        # After the transaction began, before the statement below.
        await database.execute("UPDATE fencepost.lanes SET lease_expires_at = clock_timestamp() WHERE lane = 0")
        assert await database.fetchval("SELECT lease_expires_at > $1 FROM fencepost.lanes WHERE lane = 0", begun)

        renewed = await late.fetch(SQL["renew"], "A", [0], [1], LEASE)
        free = await late.fetchval(SQL["fleet"], "B", [], column=2)
        claimed = await late.fetch(SQL["claim"], "B", LEASE, 1, list(range(1, LANES)))
        await transaction.rollback()
    finally:
        await late.close()

    assert (renewed, free, [row["lane"] for row in claimed]) == ([], LANES, [0])


# -- marks and claims that meet ---------------------------------------------------------------------------------------------


async def test_a_lane_in_the_middle_of_a_mark_is_not_claimed_and_its_mark_is_in_the_successors_cursor(
    database_url: str, database: Any, open_store: OpenStore
) -> None:
    """The mark locks the lane's row: a claim passes it by, even the owner's own, until the mark is there to be read."""
    a, b = await open_store("A"), await open_store("B")
    held = await a.claim(LEASE, 1, [])
    others = list(range(1, LANES))
    marking = await asyncpg.connect(database_url)
    try:
        async with marking.transaction():
            assert await marking.fetch(SQL["mark"], "A", *_mark_arguments(receipts_of(held, position=42)))
            # A lane of its own that is not among those held is free to a relay: only the lock keeps it away here.
            assert await a.claim(LEASE, 1, others) == {}
    finally:
        await marking.close()

    await expire(database, 0)
    claimed = await b.claim(LEASE, 1, others)
    cursors = await b.cursors(list(claimed))
    assert (claimed, cursors[0]) == ({0: 2}, (Cursor(position=42, snapshot=SNAPSHOT), 1))


def _mark_arguments(receipts: Sequence[Receipt]) -> tuple[Any, ...]:
    return (
        [r.lane for r in receipts], [r.generation for r in receipts], [r.sequence for r in receipts],
        [r.cursor.position for r in receipts], [r.cursor.snapshot for r in receipts], [r.cursor.target for r in receipts],
        [r.cursor.late_position for r in receipts], [r.first_id for r in receipts], [r.last_id for r in receipts],
        [r.row_count for r in receipts], [r.late_count for r in receipts], ["{}" for _ in receipts],
    )  # fmt: skip


@pytest.mark.parametrize("name", ["mark", "renew", "release"])
async def test_a_write_that_waited_for_a_take_over_changes_nothing(
    database_url: str, database: Any, open_store: OpenStore, name: str
) -> None:
    """The other order: the lease is alive when the write begins, it waits for the claim, and its fence is looked at again."""
    a = await open_store("A")
    held = await a.claim(LEASE, 1, [])
    late_writes: dict[str, Callable[[], Coroutine[Any, Any, Collection[int]]]] = {
        "mark": lambda: a.mark(receipts_of(held)),
        "renew": lambda: a.renew(held, LEASE),
        "release": lambda: a.release(held),
    }
    taking = await asyncpg.connect(database_url)
    transaction = taking.transaction()
    await transaction.start()
    await taking.execute("UPDATE fencepost.lanes SET lease_owner = 'B', lease_generation = 2 WHERE lane = 0")
    writing = asyncio.create_task(late_writes[name]())
    await eventually(lambda: waiting_for_a_lock(database), message="the write waits for the lane's row")
    await transaction.commit()
    await taking.close()

    assert not await writing
    assert await database.fetchval("SELECT count(*) FROM fencepost.receipts") == 0
    assert (await lane_rows(database))[0][:3] == (0, "B", 2)


async def test_a_mark_without_an_answer_is_found_by_its_receipt(open_store: OpenStore) -> None:
    """The connection broke after the server wrote: the mark is not repeated, and what was not written is."""
    a = await open_store("A")
    held = await a.claim(LEASE, 2, [])
    written, unwritten = receipt(0, held[0]), receipt(1, held[1])
    await a.mark([written])

    assert await a.marked_already([written, unwritten]) == {(0, 1)}
    assert await a.mark([unwritten]) == {1}


async def test_another_owners_receipt_of_the_same_number_is_no_answer(database: Any, open_store: OpenStore) -> None:
    a, b = await open_store("A"), await open_store("B")
    of_a = await a.claim(LEASE, 1, [])
    await expire(database, 0)
    of_b = await b.claim(LEASE, 1, list(range(1, LANES)))
    await b.mark(receipts_of(of_b))

    assert await a.marked_already(receipts_of(of_a)) == frozenset()
    assert await b.marked_already(receipts_of(of_b)) == {(0, 1)}


async def test_a_mark_that_is_repeated_while_its_first_try_still_runs_is_tried_again_later(
    database_url: str, database: Any, open_store: OpenStore
) -> None:
    """The first try hangs in the server, unanswered; the second waits behind it. Neither is a fault of the set-up."""
    a = await open_store("A")
    held = await a.claim(LEASE, 1, [])
    first_try = await asyncpg.connect(database_url)
    transaction = first_try.transaction()
    await transaction.start()
    await first_try.fetch(SQL["mark"], "A", *_mark_arguments(receipts_of(held)))
    assert await a.marked_already(receipts_of(held)) == frozenset()
    second_try = asyncio.create_task(a.mark(receipts_of(held)))
    await eventually(lambda: waiting_for_a_lock(database), message="the second try waits for the first")
    await transaction.commit()
    await first_try.close()

    with pytest.raises(TransientError, match="mark"):
        await second_try
    assert await a.marked_already(receipts_of(held)) == {(0, 1)}


async def test_two_relays_that_mark_and_renew_the_same_lanes_in_any_order_do_not_deadlock(open_store: OpenStore) -> None:
    """Rows are locked in the order of lanes, whatever the order of the arrays."""
    a = await open_store("A")
    held = await a.claim(LEASE, LANES, [])
    backwards = dict(reversed(list(held.items())))

    for sequence in range(1, 40):
        marked, renewed, again = await asyncio.gather(
            a.mark(receipts_of(backwards, sequence)), a.renew(held, LEASE), a.renew(backwards, LEASE)
        )
        assert marked == renewed.keys() == again.keys() == held.keys()


async def test_a_mark_waits_for_no_flush(database: Any, open_store: OpenStore) -> None:
    """synchronous_commit is off for the mark's own transaction, and stays as it was for the session."""
    a = await open_store("A")
    held = await a.claim(LEASE, 1, [])
    async with a._statements._pool.acquire() as connection:
        await connection.fetch(SQL["mark"], "A", *_mark_arguments(receipts_of(held)))
        assert await connection.fetchval("SHOW synchronous_commit") == "on"


async def test_a_renewal_tells_the_newest_mark_of_each_lane(database: Any, open_store: OpenStore) -> None:
    """Marks commit asynchronously: by this their owner learns that a crash of the server took some back."""
    a = await open_store("A")
    held = await a.claim(LEASE, 2, [])
    for sequence in (1, 2):
        await a.mark([receipt(0, held[0], sequence)])
    assert await a.renew(held, LEASE) == {0: 2, 1: 0}

    await database.execute("DELETE FROM fencepost.receipts WHERE sequence = 2")

    assert await a.renew(held, LEASE) == {0: 1, 1: 0}


async def test_a_receipt_says_where_the_rows_went(database: Any, open_store: OpenStore) -> None:
    a = await open_store("A")
    held = await a.claim(LEASE, 1, [])
    await a.mark(receipts_of(held, position=7))

    row = await database.fetchrow(
        "SELECT relay_id, generation, first_id, last_id, partitions::text AS partitions FROM fencepost.receipts"
    )
    assert tuple(row) == ("A", 1, 7, 7, '{"orders": {"count": 12, "offsets": {"3": [7, 9]}}}')


# -- the fleet --------------------------------------------------------------------------------------------------------------


async def test_a_relay_that_stopped_renewing_is_no_member(database: Any, open_store: OpenStore) -> None:
    a, b = await open_store("A"), await open_store("B")
    await a.join("relay", "1", LEASE, {})
    await b.join("relay", "1", LEASE, {})
    assert (await a.fleet([])).members == ["A", "B"]

    await database.execute("UPDATE fencepost.relays SET expires_at = clock_timestamp() WHERE relay_id = 'A'")

    assert (await b.fleet([])).members == ["B"]


async def test_joining_again_keeps_the_seniority(database: Any, open_store: OpenStore) -> None:
    """Quotas hang on the order of members: a renewal must not turn it over."""
    a, b = await open_store("A"), await open_store("B")
    for store in (a, b, a, a):
        await store.join("relay", "1", LEASE, {})

    assert (await b.fleet([])).members == ["A", "B"]


async def test_leaving_and_releasing_wake_the_others(database: Any, open_store: OpenStore) -> None:
    a = await open_store("A")
    await a.join("relay", "1", LEASE, {})
    held = await a.claim(LEASE, LANES, [])
    heard: asyncio.Queue[str] = asyncio.Queue()
    await database.add_listener("fencepost_lanes", lambda *_: heard.put_nowait("woken"))

    await a.release(held)
    assert await asyncio.wait_for(heard.get(), 10) == "woken"
    await a.leave()
    assert await asyncio.wait_for(heard.get(), 10) == "woken"
    assert (await a.fleet([])).members == []


async def test_a_released_lane_is_free_at_once(open_store: OpenStore) -> None:
    """LEASE-14."""
    a, b = await open_store("A"), await open_store("B")
    held = await a.claim(LEASE, LANES, [])
    await a.release(held)

    assert (await b.claim(LEASE, LANES, [])).keys() == held.keys()


members = st.lists(st.text("abcdef", min_size=1, max_size=4), unique=True, min_size=1, max_size=12)


@given(members, st.integers(1, 64))
def test_quotas_add_up_to_all_lanes_and_are_fair(names: list[str], lanes: int) -> None:
    quotas = [quota(name, Fleet(members=names, lanes=lanes, free=0)) for name in names]

    assert sum(quotas) == lanes
    assert max(quotas) - min(quotas) <= 1


@given(members, st.integers(1, 64))
def test_a_relay_that_is_no_member_gives_everything_up(names: list[str], lanes: int) -> None:
    assert plan("nobody", lanes, Fleet(members=names, lanes=lanes, free=lanes)) == Plan(release=lanes)


class FleetModel:
    """Relays that plan one after the other, each on what the database says at that moment."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.members: list[str] = []
        self.owned: dict[str, int] = {}
        self.moves = 0

    @property
    def free(self) -> int:
        return self.lanes - sum(self.owned.values())

    def join(self, name: str) -> None:
        self.members.append(name)
        self.owned[name] = 0

    def leave(self, name: str) -> None:
        self.members.remove(name)
        del self.owned[name]

    def look(self, name: str) -> None:
        wanted = plan(name, self.owned[name], Fleet(members=self.members, lanes=self.lanes, free=self.free))
        self.owned[name] += wanted.claim - wanted.release
        self.moves += wanted.claim + wanted.release

    def settle(self, order: Sequence[str]) -> int:
        """Rounds until nobody plans anything."""
        for rounds in range(10):
            before = self.moves
            for name in order:
                self.look(name)
            if self.moves == before:
                return rounds
        raise AssertionError(f"no rest after 10 rounds: {self.owned}")


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 100)), min_size=1, max_size=25), st.integers(1, 64), st.randoms())
def test_a_fleet_settles_in_two_rounds_and_then_plans_nothing(changes: list[tuple[bool, int]], lanes: int, order: Any) -> None:
    """LEASE-8: relays join and leave; whoever looks first, every lane has an owner, and nobody moves any more."""
    fleet = FleetModel(lanes)
    for number, (joins, choice) in enumerate(changes):
        if joins or not fleet.members:
            fleet.join(f"relay-{number}")
        else:
            fleet.leave(fleet.members[choice % len(fleet.members)])
        looking = list(fleet.members)
        order.shuffle(looking)
        assert fleet.settle(looking) <= 2
        assert not fleet.members or fleet.free == 0
        assert max(fleet.owned.values(), default=0) - min(fleet.owned.values(), default=0) <= 1


@given(st.integers(1, 12), st.integers(1, 64))
def test_a_join_moves_no_more_lanes_than_the_newcomer_gets(relays: int, lanes: int) -> None:
    """No ping-pong: what the others give up goes to the newcomer, and nothing else moves."""
    fleet = FleetModel(lanes)
    for number in range(relays):
        fleet.join(f"relay-{number}")
    fleet.settle(fleet.members)
    before, fleet.moves = dict(fleet.owned), 0

    fleet.join("newcomer")
    fleet.settle(fleet.members)

    given_up = sum(before[name] - fleet.owned[name] for name in before)
    assert all(fleet.owned[name] <= before[name] for name in before)
    assert fleet.moves == 2 * given_up == 2 * fleet.owned["newcomer"]
