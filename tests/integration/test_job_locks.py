"""Who waits for whom on the rows of runs, and that nobody waits in a circle.

One lock order for all: a job's row, its run's row, what hangs below; several jobs by their keys, or passing by what is locked.
"""

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import asyncpg
import pytest

from consumer_sdk.jobs import Claim, JobKey, Release
from fencepost.errors import TransientError
from tests.support.jobs import SQL, Crew, Hand, completion, failed, fill
from tests.support.runs import LEASE, Runs, new_key

JOBS: Final = 30
SESSIONS: Final = 6
ROUNDS: Final = 4
ACTS: Final = 15


@pytest.fixture
async def crew(database_url: str) -> AsyncIterator[Crew]:
    """Sessions find a deadlock at once, and a wait that never ends is a failure and not a hang."""
    async with Crew.on(database_url) as crew:
        name = await crew.database.fetchval("SELECT current_database()")
        await crew.database.execute(
            f"ALTER DATABASE {name} SET deadlock_timeout = '10ms'; ALTER DATABASE {name} SET lock_timeout = '20s'"
        )
        yield crew


async def deadlocks(crew: Crew) -> int:
    await crew.database.execute("SELECT pg_stat_force_next_flush()")
    return int(await crew.database.fetchval("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"))


# -- everything at once -------------------------------------------------------------------------------------------------------


class Actor:
    """One session that does anything to any of the jobs, in any order; all actors are one worker, so all leases are theirs."""

    def __init__(self, hand: Hand, dice: random.Random, keys: dict[Any, JobKey]) -> None:
        self.hand = hand
        self.runs = Runs(hand.connection, "A")
        self.dice = dice
        self.keys = keys
        self.acts: Sequence[Callable[[list[JobKey]], Awaitable[object]]] = (
            self.renew, self.renew, self.complete, self.complete_within, self.fail, self.release, self.append,
            self.cancel, self.reap, self.replay, self.claim, self.claim,
        )  # fmt: skip

    async def act(self) -> None:
        some = self.dice.sample(sorted(self.keys.values()), k=min(len(self.keys), self.dice.randint(2, 12)))
        await self.dice.choice(self.acts)(some)

    async def renew(self, some: list[JobKey]) -> None:
        await self.hand.store.renew(dict.fromkeys(some, b"checkpoint"), lease_seconds=30)

    async def complete(self, some: list[JobKey]) -> None:
        await self.hand.store.complete([completion(key) for key in some[:4]])

    async def complete_within(self, some: list[JobKey]) -> None:
        await self.hand.complete_within(some[0])

    async def fail(self, some: list[JobKey]) -> None:
        delays = [self.dice.choice((0.0, 0.0, 0.0, None)) for _ in some]
        await self.hand.store.fail([failed(key, delay_seconds=delay) for key, delay in zip(some, delays, strict=True)])

    async def release(self, some: list[JobKey]) -> None:
        await self.hand.store.release([Release(key=key, checkpoint=None, started_after_seconds=0) for key in some])

    async def append(self, some: list[JobKey]) -> None:
        await self.hand.append_event(some[0])

    async def cancel(self, some: list[JobKey]) -> None:
        await self.runs.cancel(some[0].run_id)

    async def reap(self, some: list[JobKey]) -> None:
        await self.hand.connection.execute(
            "UPDATE fencepost.jobs SET lease_expires_at = clock_timestamp() WHERE state = 'leased' AND run_id = $1", some[0].run_id
        )
        await self.hand.store.reap(limit=10)

    async def replay(self, some: list[JobKey]) -> None:
        for key in some:
            await self.runs.replay(key.run_id)

    async def claim(self, some: list[JobKey]) -> None:
        self.keys.update({key.run_id: key for key in await self.hand.claim(len(some))})


async def test_no_order_of_statements_deadlocks(crew: Crew) -> None:
    """Six sessions do anything to the same thirty jobs, batches in shuffled orders. No 40P01, and nothing half done."""
    seed = secrets.randbits(32)
    keys: dict[Any, JobKey] = {}
    actors = [Actor(await crew.hand("A"), random.Random(seed + number), keys) for number in range(SESSIONS)]

    async def play(actor: Actor) -> None:
        for _ in range(ACTS):
            await actor.act()

    for _ in range(ROUNDS):
        for _ in range(JOBS):
            await crew.runs.accept(max_attempts=1000)
        keys.clear()
        keys.update({key.run_id: key for key in await actors[0].hand.claim(JOBS)})
        await asyncio.gather(*(play(actor) for actor in actors))

    assert await deadlocks(crew) == 0, f"seed {seed}"
    await assert_whole(crew)


async def assert_whole(crew: Crew) -> None:
    """Run, job, events and attempts of each run tell the same story."""
    wrong = await crew.database.fetch(
        """
        SELECT r.run_id, r.state, j.state, e.events, e.terminal
        FROM fencepost.runs AS r JOIN fencepost.jobs AS j USING (run_id, tenant_id)
        CROSS JOIN LATERAL (
            SELECT count(*) AS events, max(v.sequence) AS last,
                   max(v.type) FILTER (WHERE v.type IN ('run_completed', 'run_failed', 'run_cancelled')) AS terminal
            FROM fencepost.run_events AS v WHERE v.run_id = r.run_id) AS e
        CROSS JOIN LATERAL (
            SELECT count(*) FILTER (WHERE a.finished_at IS NULL) AS open, count(*) AS all
            FROM fencepost.job_attempts AS a WHERE a.run_id = r.run_id) AS a
        WHERE e.events <> e.last OR e.last <> r.event_sequence
           OR (r.finished_at IS NULL) <> (j.finished_at IS NULL)
           OR e.terminal IS DISTINCT FROM CASE WHEN r.finished_at IS NOT NULL THEN 'run_' || r.state END
           OR (j.state = 'dead') <> (r.state = 'failed')
           OR a.open <> CASE j.state WHEN 'leased' THEN 1 ELSE 0 END OR a.all <> j.lease_generation
        """
    )
    assert wrong == []


# -- batches that meet ----------------------------------------------------------------------------------------------------------

PASSING_BY: Final = "ORDER BY j.run_id, j.tenant_id FOR UPDATE OF j SKIP LOCKED"
ORDERED: Final = "ORDER BY j.run_id, j.tenant_id FOR UPDATE OF j"
AS_GIVEN: Final = "ORDER BY array_position($2::uuid[], j.run_id) FOR UPDATE OF j"


async def meet(crew: Crew, locks: str, *, waiting: int) -> list[BaseException]:
    """Two renewals name the same three jobs in opposite orders; each has what it can get while the middle one is held.

    The errors that they end in.
    """
    assert PASSING_BY in SQL["renew"]
    sql = SQL["renew"].replace(PASSING_BY, locks)
    for _ in range(3):
        await crew.runs.accept()
    low, middle, high = sorted(held.run_id for held in await crew.runs.claim(3))
    referee, one, other = await crew.connect(), await crew.connect(), await crew.connect()
    async with referee.transaction():
        await referee.execute("SELECT FROM fencepost.jobs WHERE run_id = $1 FOR UPDATE", middle)
        both = [
            asyncio.ensure_future(session.fetch(sql, "w1", runs, ["acme"] * 3, [1] * 3, LEASE, [None] * 3))
            for session, runs in ((one, [low, middle, high]), (other, [high, middle, low]))
        ]
        if waiting:
            await crew.blocked(waiting)
        else:
            await asyncio.wait(both)
    ends = await asyncio.gather(*both, return_exceptions=True)
    return [end for end in ends if isinstance(end, BaseException)]


async def test_batches_in_opposite_orders_pass_each_other_by(crew: Crew) -> None:
    """Neither waits, for the held job or for the other: what it could not get is asked for again."""
    assert await meet(crew, PASSING_BY, waiting=0) == []
    assert await deadlocks(crew) == 0


async def test_batches_that_wait_in_one_order_do_not_deadlock(crew: Crew) -> None:
    """The other half of the lock clause is enough against a circle too; it is the waiting that it does not spare."""
    assert await meet(crew, ORDERED, waiting=2) == []


async def test_batches_that_wait_in_the_order_they_were_given_deadlock(crew: Crew) -> None:
    """The broken model: the order of the caller, and waiting."""
    (error,) = await meet(crew, AS_GIVEN, waiting=2)
    assert isinstance(error, asyncpg.DeadlockDetectedError)


@pytest.mark.parametrize("statement", ["renew", "complete", "fail", "release"])
def test_every_batch_passes_by_what_is_locked(statement: str) -> None:
    assert SQL[statement].count(PASSING_BY) == SQL[statement].count("FOR UPDATE") == 1


async def test_a_run_locked_before_its_job_deadlocks_with_a_completion(crew: Crew) -> None:
    """The broken model of the order of tables: somebody who takes the run first and then its job."""
    run_id = await crew.runs.accept()
    held = await crew.runs.claim_one()
    wrong, right = await crew.connect(), Runs(await crew.connect())
    await wrong.execute("BEGIN")
    await wrong.execute("SELECT FROM fencepost.runs WHERE run_id = $1 FOR UPDATE", run_id)
    completing = asyncio.ensure_future(right.complete(held))
    await crew.blocked(1)
    locking = asyncio.ensure_future(wrong.execute("SELECT FROM fencepost.jobs WHERE run_id = $1 FOR UPDATE", run_id))

    ends = await asyncio.gather(completing, locking, return_exceptions=True)

    assert [type(error) for error in ends if isinstance(error, BaseException)] == [asyncpg.DeadlockDetectedError]


# -- claims wait for nobody -----------------------------------------------------------------------------------------------------


async def test_an_open_producer_blocks_no_claim(crew: Crew) -> None:
    """JOB-13: it has accepted, in the same tenant and workflow, and stays open. Its run is not there yet for anybody."""
    for _ in range(5):
        await crew.runs.accept()
    producer, hand = Runs(await crew.connect()), await crew.hand()
    async with producer.connection.transaction():
        open_run = await producer.accept(key=new_key())
        claimed = await hand.claim(10)
        assert await hand.store.complete([completion(key) for key in claimed]) == set(claimed)
        assert await hand.store.reap(limit=10) == []
    assert len(claimed) == 5
    assert open_run not in {key.run_id for key in claimed}
    assert (await hand.claim_one()).run_id == open_run


OPEN: Final[dict[str, Callable[[Runs, JobKey], Awaitable[object]]]] = {
    "a claim": lambda runs, _: runs.claim(2),
    "a cancellation": lambda runs, key: runs.cancel(key.run_id),
    "a row lock": lambda runs, key: runs.connection.execute("SELECT FROM fencepost.jobs WHERE run_id = $1 FOR UPDATE", key.run_id),
    "a replay": lambda runs, key: runs.replay(key.run_id),
}


@pytest.mark.parametrize("opened", OPEN)
async def test_a_claim_waits_for_no_transaction_that_holds_a_job(crew: Crew, opened: str) -> None:
    """Whatever it does to one job, the others are claimed, and reaped, beside it."""
    ids = [await crew.runs.accept() for _ in range(6)]
    hand, holder = await crew.hand("B"), Runs(await crew.connect(), "A")
    async with holder.connection.transaction():
        await OPEN[opened](holder, JobKey(ids[0], "acme", 0))
        claimed = await hand.claim(10)
        assert await hand.store.reap(limit=10) == []
        renewed = await hand.store.renew(dict.fromkeys(claimed), lease_seconds=30)

    assert renewed.keys() == set(claimed)
    assert len(claimed) == (4 if opened == "a claim" else 5)
    assert opened == "a claim" or ids[0] not in {key.run_id for key in claimed}


async def test_claims_in_a_crowd_pass_each_other_by(crew: Crew) -> None:
    """The fair branch too: two claims stay open, a third takes others."""
    await fill(crew.database, 200, tenants=5)
    first, second, third = [Runs(await crew.connect(), name) for name in ("A", "B", "C")]
    async with first.connection.transaction(), second.connection.transaction():
        claims = [{held.run_id for held in await runs.claim(10)} for runs in (first, second, third)]

    assert [len(claim) for claim in claims] == [10, 10, 10]
    assert len(set().union(*claims)) == 30


async def test_an_expired_lease_is_claimed_beside_a_holder_who_still_writes(crew: Crew) -> None:
    """The late holder's transaction has the row: the claim passes by, and takes the job when it is over."""
    run_id = await crew.runs.accept()
    late, hand = Runs(await crew.connect(), "A"), await crew.hand("B")
    held = await late.claim_one()
    async with late.connection.transaction():
        assert await late.connection.fetch(SQL["guard"], "A", run_id, "acme", held.generation)
        await late.connection.execute("UPDATE fencepost.jobs SET lease_expires_at = clock_timestamp()")
        assert await hand.claim() == []
    claims: Sequence[Claim] = await hand.claims()

    assert [claim.key.generation for claim in claims] == [2]


async def test_the_reaper_passes_by_what_is_held_and_ends_the_rest(crew: Crew) -> None:
    """Two expired leases and two jobs past their deadlines, one of each held by somebody."""
    ids = [await crew.runs.accept(max_attempts=1) for _ in range(2)]
    hand, holder = await crew.hand("B"), await crew.connect()
    await hand.claim(2)
    ids += [await crew.runs.accept(deadline=timedelta(hours=1)) for _ in range(2)]
    for expired, late in zip(ids[:2], ids[2:], strict=True):
        await crew.runs.expire_lease(expired)
        await crew.runs.pass_deadline(late)
    async with holder.transaction():
        await holder.execute("SELECT FROM fencepost.jobs WHERE run_id = ANY ($1) FOR UPDATE", [ids[0], ids[2]])
        assert [reaped.state for reaped in await hand.store.reap(limit=10)] == ["dead", "dead"]

    assert [await crew.runs.state(run_id) for run_id in (ids[1], ids[3])] == [("failed", "dead")] * 2
    assert [await crew.runs.state(run_id) for run_id in (ids[0], ids[2])] == [("running", "leased"), ("queued", "queued")]


async def test_a_wait_that_does_not_end_is_a_passing_fault(crew: Crew) -> None:
    """A guard behind a lock that stays: the database gives up, and the worker learns that waiting helps."""
    await crew.runs.accept()
    name = await crew.database.fetchval("SELECT current_database()")
    await crew.database.execute(f"ALTER DATABASE {name} SET lock_timeout = '50ms'")
    hand = await crew.hand()
    key = await hand.claim_one()
    holder = await crew.connect()
    async with holder.transaction():
        await holder.execute("SELECT FROM fencepost.jobs FOR UPDATE")
        with pytest.raises(TransientError):
            await hand.append_event(key)
    assert await hand.append_event(key)


async def test_an_open_cancellation_holds_up_nothing_but_its_own_run(crew: Crew) -> None:
    """Nor does it lose what it is told: when it commits, the holder's next renewal says so."""
    ids = [await crew.runs.accept() for _ in range(3)]
    hand, operator = await crew.hand(), Runs(await crew.connect())
    keys = await hand.claim(3)
    async with operator.connection.transaction():
        assert await operator.cancel(ids[0]) == "requested"
        assert (await hand.store.renew(dict.fromkeys(keys), lease_seconds=30)).keys() == {
            key for key in keys if key.run_id != ids[0]
        }
    told = await hand.store.renew(dict.fromkeys(keys), lease_seconds=30)

    assert told == {key: key.run_id == ids[0] for key in keys}
