"""Every statement that moves a job, on real PostgreSQL: what it changes, whom it refuses, and what it does when two meet.

Time is moved by moving rows and races are held by locks. Models that are known to break are kept here: each shows that the
guard which the real statement has is needed.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import asyncpg
import pytest
from uuid_utils.compat import uuid7

from consumer_sdk.jobs import Claim, JobKey, Reaped, Release, Settled, Standing, Usage
from consumer_sdk.run_store import RunStore, Served
from fencepost.errors import TransientError
from tests.support.jobs import LEASE_SECONDS, SQL, STEPS, VERBS, Crew, Hand, break_step, completion, failed, fill
from tests.support.runs import LEASE, Held, Runs
from tests.support.waiting import eventually

TERMINAL: Final = ("run_completed", "run_failed", "run_cancelled")


@pytest.fixture
async def crew(database_url: str) -> AsyncIterator[Crew]:
    async with Crew.on(database_url) as crew:
        yield crew


async def job_of(crew: Crew, run_id: Any) -> Mapping[str, Any]:
    row = await crew.database.fetchrow("SELECT * FROM fencepost.jobs WHERE run_id = $1", run_id)
    assert row is not None
    return dict(row)


async def run_of(crew: Crew, run_id: Any) -> Mapping[str, Any]:
    row = await crew.database.fetchrow("SELECT * FROM fencepost.runs WHERE run_id = $1", run_id)
    assert row is not None
    return dict(row)


async def terminal(crew: Crew, run_id: Any) -> list[str]:
    return [kind for _, kind in await crew.runs.events(run_id) if kind in TERMINAL]


async def detail(crew: Crew, run_id: Any, kind: str) -> Any:
    text = await crew.database.fetchval("SELECT detail FROM fencepost.run_events WHERE run_id = $1 AND type = $2", run_id, kind)
    return json.loads(text)


# -- claims -----------------------------------------------------------------------------------------------------------------


async def test_a_claim_leaves_the_job_leased_and_the_run_running(crew: Crew) -> None:
    """JOB-5: one statement, with owner, expiry, generation and attempt; what it returns is what the handler needs."""
    run_id = await crew.runs.accept(data=b'{"n":1}')
    before = await crew.database.fetchval("SELECT clock_timestamp()")
    hand = await crew.hand("A")

    (claim,) = await hand.claims(attempt_seconds=7)

    after = await crew.database.fetchval("SELECT clock_timestamp()")
    job, run = await job_of(crew, run_id), await run_of(crew, run_id)
    assert (job["state"], job["lease_owner"], job["lease_generation"], job["attempts"]) == ("leased", "A", 1, 1)
    assert before < job["lease_expires_at"] - timedelta(seconds=LEASE_SECONDS) < after
    assert before < job["attempt_deadline_at"] - timedelta(seconds=7) < after
    assert (run["state"], run["version"], run["event_sequence"]) == ("running", 2, 1)
    assert before < run["started_at"] < after
    assert (claim.key.run_id, claim.key.tenant_id, claim.key.generation) == (run_id, "acme", 1)
    assert (claim.attempt, claim.max_attempts, claim.workflow, claim.workflow_version) == (1, 3, "report", 1)
    assert (claim.input, claim.checkpoint, claim.retry_delay_seconds, claim.iteration) == (b'{"n":1}', None, None, 0)
    assert (claim.root_run_id, claim.created_at) == (run_id, run["created_at"])
    assert claim.attempt_seconds == pytest.approx(7, abs=0.5)
    (attempt,) = await crew.runs.attempts(run_id)
    assert (attempt["generation"], attempt["number"], attempt["worker"], attempt["outcome"]) == (1, 1, "A", None)
    assert before < attempt["claimed_at"] < after


async def test_a_claim_takes_the_oldest_of_the_workflows_it_serves(crew: Crew) -> None:
    ids = [await crew.runs.accept() for _ in range(4)]
    await crew.runs.accept(workflow="other")
    await crew.runs.accept(delay=timedelta(hours=1))
    for age, run_id in zip((2, 4, 1, 3), ids, strict=True):
        await crew.database.execute(
            "UPDATE fencepost.jobs SET available_at = clock_timestamp() - $2::interval WHERE run_id = $1",
            run_id,
            timedelta(hours=age),
        )
    hand = await crew.hand()

    claimed = [key.run_id for _ in range(3) for key in await hand.claim(2)]

    assert claimed == [ids[1], ids[3], ids[0], ids[2]]


async def test_the_version_rises_with_each_change_of_the_runs_state(crew: Crew) -> None:
    """What a caller compares before it cancels: a retry is no change of the run, its end is one."""
    hand = await crew.hand()
    completed, failed_, retried = [await crew.runs.accept() for _ in range(3)]
    keys = {key.run_id: key for key in await hand.claim(3)}
    assert await hand.complete(keys[completed])
    assert await hand.fail(keys[failed_])
    assert await hand.retry(keys[retried])
    again = await hand.claim_one()
    assert (await run_of(crew, retried))["version"] == 2
    assert await crew.runs.cancel(retried, version=1) == "changed"
    assert await crew.runs.cancel(retried, version=2) == "requested"
    assert await hand.release(again)

    versions = [(await run_of(crew, run_id))["version"] for run_id in (completed, failed_, retried)]
    assert versions == [3, 3, 4]


async def test_a_checkpoint_stays_until_a_newer_one_comes(crew: Crew) -> None:
    """JOB-17's half in the database: neither a renewal nor a failure nor a stop without one takes it away."""
    run_id = await crew.runs.accept(max_attempts=9)
    hand = await crew.hand()
    key = await hand.claim_one()
    assert await hand.checkpoint(key)
    assert await hand.renew(key)
    for end in (hand.retry, hand.release):
        assert await end(key)
        (claim,) = await hand.claims()
        assert claim.checkpoint == b"of A"
        key = claim.key
    newer = Release(key=key, checkpoint=b"newer", started_after_seconds=0)
    assert await hand.store.release([newer])
    assert (await job_of(crew, run_id))["checkpoint"] == b"newer"


HALF_STATES: Final = {
    "leased without an owner": "jobs SET state = 'leased', lease_expires_at = clock_timestamp()",
    "leased without an expiry": "jobs SET state = 'leased', lease_owner = 'A'",
    "queued with an owner": "jobs SET lease_owner = 'A'",
    "queued with an expiry": "jobs SET lease_expires_at = clock_timestamp()",
    "queued with an attempt's deadline": "jobs SET attempt_deadline_at = clock_timestamp()",
    "queued with a cancellation requested": "jobs SET cancel_requested_at = clock_timestamp()",
    "queued and finished": "jobs SET finished_at = clock_timestamp()",
    "queued and dead": "jobs SET dead_reason = 'x'",
    "completed but not finished": "jobs SET state = 'completed'",
    "dead without a reason": "jobs SET state = 'dead', finished_at = clock_timestamp()",
    "cancelled but not finished": "jobs SET state = 'cancelled'",
    "a state that is none": "jobs SET state = 'paused'",
    "more attempts than allowed": "jobs SET attempts = 4, lease_generation = 4",
    "more attempts than claims": "jobs SET attempts = 1",
    "fewer attempts than none": "jobs SET attempts = -1",
    "no attempts allowed": "jobs SET max_attempts = 0",
    "a negative cost": "jobs SET cost_used = -1",
    "a run completed but not finished": "runs SET state = 'completed', started_at = clock_timestamp()",
    "a run finished but queued": "runs SET finished_at = clock_timestamp()",
    "a run failed without a code": "runs SET state = 'failed', finished_at = clock_timestamp()",
    "a run queued with a code": "runs SET error_code = 'x'",
    "a run queued with an output": "runs SET output = 'x'",
    "a run running that never started": "runs SET state = 'running'",
    "a run completed that never started": "runs SET state = 'completed', finished_at = clock_timestamp()",
    "a run's state that is none": "runs SET state = 'paused'",
    "an event of an unknown type": "run_events SET type = 'run_started'",
    "a workflow's event with a bad name": "run_events SET type = 'workflow.A b'",
    "an event before the first": "run_events SET sequence = 0",
}


async def refused(crew: Crew, change: str) -> bool:
    try:
        await crew.database.execute(change)
    except asyncpg.CheckViolationError:
        return True
    return False


async def test_half_states_cannot_be_written(crew: Crew) -> None:
    """JOB-5: the database refuses each, whoever writes it."""
    await crew.runs.accept()
    for name, change in HALF_STATES.items():
        assert await refused(crew, f"UPDATE fencepost.{change}"), name


HALF_ATTEMPTS: Final = {
    "an outcome before its end": "outcome = 'completed'",
    "an end without an outcome": "finished_at = clock_timestamp()",
    "an outcome that is none": "finished_at = clock_timestamp(), outcome = 'paused'",
    "a decision that is none": "decision = 'wait'",
    "a success with an error": "finished_at = clock_timestamp(), outcome = 'completed', error_code = 'x'",
    "number 0": "number = 0",
    "generation 0": "generation = 0",
}


async def test_half_attempts_cannot_be_written(crew: Crew) -> None:
    await crew.runs.accept()
    await (await crew.hand()).claim_one()
    for name, change in HALF_ATTEMPTS.items():
        assert await refused(crew, f"UPDATE fencepost.job_attempts SET {change}"), name


async def test_a_run_has_one_terminal_event(crew: Crew) -> None:
    """Whatever a statement believed: the second terminal event is refused by the table."""
    append = "SELECT fencepost.append_run_event('acme', $1, $2, '{}')"
    for first, second in itertools.product(TERMINAL, TERMINAL):
        run_id = await crew.runs.accept()
        await crew.database.fetchval(append, run_id, first)

        with pytest.raises(asyncpg.UniqueViolationError, match="run_events_terminal_key"):
            await crew.database.fetchval(append, run_id, second)


async def test_every_run_event_is_an_outbox_row_in_its_runs_order(crew: Crew) -> None:
    """JOB-19's other half: the topic tells the life of the run, keyed by it, so that one lane and one partition hold all of it."""
    run_id = await crew.runs.accept(topic="reports", tenant="acme")
    hand = await crew.hand()
    key = await hand.claim_one()
    assert await hand.store.append_event(key, "workflow.chunk", {"text": "é", "state": "lies", "run_id": "lies"}) == 2
    assert await hand.complete(key)

    rows = await crew.database.fetch(
        "SELECT o.*, fencepost.lane_of(o.key) AS keys_lane, convert_from(o.payload, 'UTF8') AS text"
        " FROM fencepost.outbox AS o ORDER BY id"
    )
    times = await crew.database.fetch("SELECT created_at FROM fencepost.run_events ORDER BY sequence")
    assert [row["event_type"] for row in rows] == ["fencepost.run_queued", "fencepost.workflow.chunk", "fencepost.run_completed"]
    assert [row["fencing_token"] for row in rows] == [None, 1, 1]
    for sequence, (row, time) in enumerate(zip(rows, times, strict=True), start=1):
        assert (row["topic"], row["key"], row["tenant_id"], row["run_id"]) == ("reports", str(run_id).encode(), "acme", str(run_id))
        assert (row["lane"], row["content_type"]) == (row["keys_lane"], "application/json")
        payload = json.loads(row["text"])
        assert datetime.fromisoformat(payload.pop("occurred_at")) == time["created_at"]
        assert {name: payload[name] for name in ("run_id", "tenant_id", "sequence", "workflow", "workflow_version")} == {
            "run_id": str(run_id), "tenant_id": "acme", "sequence": sequence, "workflow": "report", "workflow_version": 1,
        }  # fmt: skip
    assert [json.loads(row["text"])["type"] for row in rows] == ["run_queued", "workflow.chunk", "run_completed"]
    assert [json.loads(row["text"])["state"] for row in rows] == ["queued", "running", "completed"]
    assert json.loads(rows[1]["text"])["text"] == "é"


async def claim_until_empty(hand: Hand, limit: int) -> list[Sequence[Claim]]:
    batches: list[Sequence[Claim]] = []
    while batch := await hand.claims(limit):
        batches.append(batch)
    return batches


async def test_two_claimers_share_all_jobs_and_overlap_in_none(crew: Crew) -> None:
    """JOB-11: 1,000 jobs in batches of 7. Whoever waited for the other's locks would fail."""
    await fill(crew.database, 1000)
    await crew.database.execute(
        f"ALTER DATABASE {await crew.database.fetchval('SELECT current_database()')} SET lock_timeout = '5s'"
    )
    hands = [await crew.hand("A"), await crew.hand("B")]

    batches = list(itertools.chain.from_iterable(await asyncio.gather(*(claim_until_empty(hand, 7) for hand in hands))))

    claimed = [claim.key.run_id for batch in batches for claim in batch]
    assert max(map(len, batches)) <= 7
    assert (len(claimed), len(set(claimed))) == (1000, 1000)
    assert await crew.database.fetchval("SELECT count(*) FROM fencepost.jobs WHERE lease_generation <> 1") == 0


NESTED_LOOPS: Final = {
    "hashjoin": "off",
    "mergejoin": "off",
    "material": "off",
    "memoize": "off",
    "hashagg": "off",
    "bitmapscan": "off",
}
HASHES: Final = {"nestloop": "off", "indexscan": "off", "sort": "off"}


@pytest.mark.parametrize("plan", [{}, NESTED_LOOPS, HASHES], ids=["any plan", "nested loops", "hashes and scans"])
async def test_a_claim_of_five_leases_five(crew: Crew, plan: Mapping[str, str]) -> None:
    """JOB-12: whatever the plan and however many claim; each returns exactly what it leased."""
    await fill(crew.database, 500, tenants=3)
    await steer(crew, plan)
    hands = [await crew.hand(f"w{number}", pooler=True) for number in range(4)]

    shares = dict(
        zip((hand.worker_id for hand in hands), await asyncio.gather(*(claim_until_empty(h, 5) for h in hands)), strict=True)
    )

    assert max(len(batch) for batches in shares.values() for batch in batches) <= 5
    returned = {claim.key.run_id: owner for owner, batches in shares.items() for batch in batches for claim in batch}
    leased = {
        row[0]: row[1] for row in await crew.database.fetch("SELECT run_id, lease_owner FROM fencepost.jobs WHERE state = 'leased'")
    }
    assert len(returned) == 500
    assert returned == leased
    assert sum(len(batch) for batches in shares.values() for batch in batches) == 500


async def steer(crew: Crew, plan: Mapping[str, str]) -> None:
    """Settings of the planner for every session that follows."""
    database = await crew.database.fetchval("SELECT current_database()")
    for name, value in plan.items():
        await crew.database.execute(f"ALTER DATABASE {database} SET enable_{name} = {value}")


# -- a stale holder ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("successor", ["B", "A"], ids=["another worker", "the same name restarted"])
async def test_every_verb_of_a_stale_holder_changes_nothing(crew: Crew, successor: str) -> None:
    """JOB-6, JOB-7, JOB-8, JOB-33: ownership is the generation, not the name; nothing in any table moves."""
    run_id = await crew.runs.accept()
    a, b = await crew.hand("A"), await crew.hand(successor)
    old = await a.claim_one()
    await crew.runs.expire_lease(run_id)
    new = await b.claim_one()
    before = await crew.dump()

    for verb, act in VERBS.items():
        assert not await act(a, old), verb
        assert await crew.dump() == before, verb

    assert await a.standing(old) == Standing(state="leased", held=False, left_here=False, cancel_requested=False)
    assert await b.renew(new)
    assert await b.complete(new)
    assert await terminal(crew, run_id) == ["run_completed"]


async def test_no_verb_moves_a_job_that_has_ended(crew: Crew) -> None:
    """The generation is still the last one: an answer that was lost is not written twice."""
    ids = [await crew.runs.accept() for _ in range(4)]
    hand = await crew.hand()
    keys = await hand.claim(4)
    assert await hand.complete(keys[0])
    assert await hand.fail(keys[1])
    assert await crew.runs.cancel(keys[2].run_id) == "requested"
    assert await hand.release(keys[2])
    assert await hand.release(keys[3])
    before = await crew.dump()

    for key, (verb, act) in itertools.product(keys, VERBS.items()):
        assert not await act(hand, key), verb
        assert await crew.dump() == before, verb

    standings = [await hand.standing(key) for key in keys]
    assert [(standing.state, standing.left_here, standing.held) for standing in standings] == [
        ("completed", True, False), ("dead", True, False), ("cancelled", True, False), ("queued", True, False),
    ]  # fmt: skip
    assert len(ids) == 4


async def test_one_batch_keeps_what_is_held_and_refuses_what_is_lost(crew: Crew) -> None:
    """Several of each, of several tenants: what comes back is what changed."""
    for number in range(6):
        await crew.runs.accept(tenant=f"t{number % 2}")
    a = await crew.hand("A")
    keys = await a.claim(6)
    lost = keys[::2]
    for key in lost:
        await crew.runs.expire_lease(key.run_id)
    (again,) = await (await crew.hand("B")).claim(1)
    assert again.run_id in {key.run_id for key in lost}

    assert (await a.store.renew(dict.fromkeys(keys), lease_seconds=30)).keys() == set(keys) - set(lost)
    assert await a.store.complete([completion(key) for key in keys]) == set(keys) - set(lost)
    states = {row[0]: row[1] for row in await crew.database.fetch("SELECT run_id, state FROM fencepost.jobs")}
    assert {key.run_id for key in keys if states[key.run_id] == "completed"} == {key.run_id for key in keys if key not in lost}


async def test_a_batch_with_one_job_under_two_generations_writes_under_the_current_one_only(crew: Crew) -> None:
    run_id = await crew.runs.accept()
    hand = await crew.hand()
    old = await hand.claim_one()
    await crew.runs.expire_lease(run_id)
    new = await hand.claim_one()

    done = await hand.store.complete(
        [completion(old, output=b"old"), completion(new, output=b"new"), completion(old, output=b"older")]
    )

    assert done == {new}
    assert (await run_of(crew, run_id))["output"] == b"new"


# -- the clock --------------------------------------------------------------------------------------------------------------


def verbs_on(connection: Any) -> dict[str, Callable[[Runs, Any], Coroutine[Any, Any, bool]]]:
    """Verbs as single statements of one session, inside whatever transaction it has open."""

    async def append_event(runs: Runs, held: Any) -> bool:
        arguments = (runs.worker, held.run_id, held.tenant_id, held.generation, "workflow.chunk", "{}")
        return bool(await connection.fetch(SQL["append_event"], *arguments))

    async def guard(runs: Runs, held: Any) -> bool:
        return bool(await connection.fetch(SQL["guard"], runs.worker, held.run_id, held.tenant_id, held.generation))

    return {
        "renew": Runs.renew, "complete": Runs.complete, "fail": Runs.fail, "release": Runs.release,
        "append event": append_event, "guard": guard,
    }  # fmt: skip


async def test_a_long_transaction_does_not_freeze_the_clock(crew: Crew) -> None:
    """JOB-9: opened before the lease expired, still open after it; nobody else has claimed, and yet nothing is written."""
    run_id = await crew.runs.accept()
    held = await crew.runs.claim_one()
    late = Runs(await crew.connect())
    async with late.connection.transaction():
        begun = await late.connection.fetchval("SELECT now()")
        await crew.runs.expire_lease(run_id, by=timedelta(0))
        assert (await job_of(crew, run_id))["lease_expires_at"] > begun
        before = await crew.dump()

        for verb, act in verbs_on(late.connection).items():
            assert not await act(late, held), verb
    assert await crew.dump() == before


async def test_with_now_a_long_transaction_keeps_an_expired_lease(crew: Crew) -> None:
    """The broken model of JOB-9."""
    run_id = await crew.runs.accept()
    held = await crew.runs.claim_one()
    late = await crew.connect()
    async with late.transaction():
        await late.fetchval("SELECT now()")
        await crew.runs.expire_lease(run_id, by=timedelta(0))
        broken = SQL["renew"].replace("clock_timestamp()", "now()")
        assert await late.fetch(broken, "w1", [run_id], ["acme"], [held.generation], LEASE, [None])


#: The fence of these is a lock that is waited for; the others pass a locked row by, and the worker asks again.
WAITING: Final = ("complete within", "append event", "guard")


async def test_a_lease_that_ran_out_while_its_row_was_waited_for_is_lost(crew: Crew) -> None:
    """JOB-9: judged after the lock, by the time that it is then. The row stays as it is: only time passes."""
    hands = [await crew.hand("A") for _ in WAITING]
    for _ in WAITING:
        await crew.runs.accept()
    keys = await hands[0].claim(len(WAITING))
    await crew.database.execute("UPDATE fencepost.jobs SET lease_expires_at = clock_timestamp() + interval '1 s'")
    before = await crew.dump()

    holder = await crew.connect()
    async with holder.transaction():
        await holder.execute("SELECT FROM fencepost.jobs FOR UPDATE")
        late = [asyncio.ensure_future(VERBS[verb](hand, key)) for verb, hand, key in zip(WAITING, hands, keys, strict=True)]
        await crew.blocked(len(WAITING))
        assert await crew.database.fetchval("SELECT bool_and(lease_expires_at > clock_timestamp()) FROM fencepost.jobs")
        await eventually(
            lambda: crew.database.fetchval("SELECT bool_and(lease_expires_at < clock_timestamp()) FROM fencepost.jobs")
        )

    assert dict(zip(WAITING, await asyncio.gather(*late), strict=True)) == dict.fromkeys(WAITING, False)
    assert await crew.dump() == before


async def test_a_write_that_waited_for_a_take_over_changes_nothing(crew: Crew) -> None:
    """JOB-6: the lease was alive when the write began; the fence is looked at again on the row that it gets."""
    for _ in VERBS:
        await crew.runs.accept()
    hands = [await crew.hand("A") for _ in VERBS]
    keys = await hands[0].claim(len(VERBS))
    taking = await crew.connect()
    async with taking.transaction():
        await taking.execute("UPDATE fencepost.jobs SET lease_owner = 'B', lease_generation = 2, attempts = 2")
        late = [asyncio.ensure_future(act(hand, key)) for hand, key, act in zip(hands, keys, VERBS.values(), strict=True)]
        await crew.blocked(len(WAITING))
    # What the take-over left is what is there.
    assert dict(zip(VERBS, await asyncio.gather(*late), strict=True)) == dict.fromkeys(VERBS, False)
    assert await crew.database.fetchval("SELECT count(*) FROM fencepost.jobs WHERE state = 'leased' AND lease_owner = 'B'") == len(
        VERBS
    )
    assert await crew.database.fetchval("SELECT count(*) FROM fencepost.run_events") == len(VERBS)


async def test_a_batch_passes_by_a_row_that_somebody_holds_and_its_job_is_still_held(crew: Crew) -> None:
    """A transaction that stays open on one job holds up no other; the holder learns that nothing is lost."""
    for _ in range(3):
        await crew.runs.accept()
    hand = await crew.hand()
    keys = await hand.claim(3)
    holder = await crew.connect()
    async with holder.transaction():
        await holder.execute("SELECT FROM fencepost.jobs WHERE run_id = $1 FOR UPDATE", keys[1].run_id)
        for verb in VERBS.keys() - set(WAITING):
            assert not await VERBS[verb](hand, keys[1]), verb
        assert (await hand.store.renew(dict.fromkeys(keys), lease_seconds=30)).keys() == {keys[0], keys[2]}
        assert await hand.store.complete([completion(key) for key in keys]) == {keys[0], keys[2]}
        assert await hand.standing(keys[1]) == Standing(state="leased", held=True, left_here=False, cancel_requested=False)

    assert await hand.complete(keys[1])


async def test_an_attempt_past_its_own_deadline_is_not_renewed_but_may_end(crew: Crew) -> None:
    """JOB-35: renewing is not for ever."""
    run_id = await crew.runs.accept()
    hand = await crew.hand()
    key = (await hand.claims(attempt_seconds=60))[0].key
    assert await hand.renew(key)
    await crew.database.execute("UPDATE fencepost.jobs SET attempt_deadline_at = clock_timestamp()")

    assert not await hand.renew(key)
    assert await hand.settle(key, error_code="attempt_deadline") == Settled(state="queued", reason=None)
    assert await crew.runs.state(run_id) == ("running", "queued")


# -- broken models of the fence and of the claim ------------------------------------------------------------------------------


def without(sql: str, *guards: str) -> str:
    for guard in guards:
        assert guard in sql
        sql = sql.replace(guard, "")
    return sql


async def test_without_the_generation_a_restarted_name_completes_anothers_attempt(crew: Crew) -> None:
    """The broken model of JOB-7: run and owner are compared, as many queues do; the old process ends the new one's attempt."""
    run_id = await crew.runs.accept()
    old = await crew.runs.claim_one()
    await crew.runs.expire_lease(run_id)
    new = await crew.runs.claim_one()
    unfenced = without(SQL["complete"], " AND j.lease_generation = h.generation")

    rows = await crew.database.fetch(
        unfenced, "w1", [run_id], ["acme"], [old.generation], [b"stale"], [timedelta(0)], [None], [None]
    )

    assert len(rows) == 1
    assert (await run_of(crew, run_id))["output"] == b"stale"
    assert not await crew.runs.complete(new)


async def test_without_skip_locked_a_claim_waits_for_another(crew: Crew) -> None:
    """The broken model of JOB-11."""
    await crew.runs.accept()
    first, second = Runs(await crew.connect(), "A"), await crew.connect()
    broken = without(SQL["claim"], " SKIP LOCKED")
    async with first.connection.transaction():
        await first.claim()
        waiting = asyncio.ensure_future(second.fetch(broken, "B", 1, LEASE, ["report"], [None], [""]))
        await crew.blocked(1)
    assert await waiting == []


LIMIT_IN_A_SUBQUERY: Final = """
UPDATE fencepost.jobs SET state = 'leased', lease_owner = 'A', lease_expires_at = clock_timestamp() + interval '1 min',
    lease_generation = lease_generation + 1, attempts = attempts + 1
WHERE run_id IN (SELECT run_id FROM fencepost.jobs WHERE state = 'queued' AND workflow = 'report'
                 ORDER BY available_at, run_id LIMIT 5 FOR UPDATE SKIP LOCKED)
RETURNING run_id
"""


async def test_a_limit_in_a_subquery_leases_more_than_it_says(crew: Crew) -> None:
    """The broken model of JOB-12: under nested loops the subquery runs again for each row, each time behind what is locked."""
    await fill(crew.database, 50)
    await crew.database.execute("".join(f"SET enable_{name} = off;" for name in (*NESTED_LOOPS, "sort")))

    assert len(await crew.database.fetch(LIMIT_IN_A_SUBQUERY)) > 5


# -- budgets, delays, history ---------------------------------------------------------------------------------------------------


async def test_the_last_attempt_that_crashes_ends_the_run(crew: Crew) -> None:
    """JOB-10: three claims, none of which reports anything. No claim sees the job any more; the reaper ends it, once."""
    run_id = await crew.runs.accept(max_attempts=3)
    hand = await crew.hand()
    for generation in (1, 2, 3):
        assert (await hand.claim_one()).generation == generation
        await crew.runs.expire_lease(run_id)

    assert await hand.claim() == []
    assert await crew.runs.state(run_id) == ("running", "leased")
    assert await hand.store.reap(limit=10) == [
        Reaped(run_id=run_id, workflow="report", state="dead", reason="attempts_exhausted", root_run_id=run_id)
    ]
    assert await hand.store.reap(limit=10) == []

    assert await crew.runs.state(run_id) == ("failed", "dead")
    assert (await job_of(crew, run_id))["attempts"] == 3
    assert (await run_of(crew, run_id))["error_code"] == "lease_expired"
    assert await terminal(crew, run_id) == ["run_failed"]
    assert await detail(crew, run_id, "run_failed") == {
        "error_code": "lease_expired",
        "reason": "attempts_exhausted",
        "attempts": 3,
    }
    assert [(a["outcome"], a["decision"]) for a in await crew.runs.attempts(run_id)] == [
        ("lost", "retry"),
        ("lost", "retry"),
        ("lost", "dead"),
    ]
    await crew.database.execute("UPDATE fencepost.jobs SET available_at = clock_timestamp() - interval '1 day'")
    assert await hand.claim() == []


async def test_the_reaper_queues_again_what_may_go_on_and_takes_no_more_than_its_limit(crew: Crew) -> None:
    """A live lease is none of its business; an expired one becomes anybody's work."""
    for _ in range(5):
        await crew.runs.accept()
    hand = await crew.hand()
    keys = await hand.claim(5)
    for key in keys[:4]:
        await crew.runs.expire_lease(key.run_id)

    assert [len(await hand.store.reap(limit=3)) for _ in range(3)] == [3, 1, 0]

    states = await crew.database.fetch("SELECT state, count(*) FROM fencepost.jobs GROUP BY 1 ORDER BY 1")
    assert [tuple(row) for row in states] == [("leased", 1), ("queued", 4)]
    assert not await hand.complete(keys[0])
    assert {key.generation for key in await hand.claim(9)} == {2}


async def test_the_reaper_ends_a_cancelled_run_whose_worker_died(crew: Crew) -> None:
    run_id = await crew.runs.accept()
    hand = await crew.hand()
    await hand.claim_one()
    assert await crew.runs.cancel(run_id) == "requested"
    await crew.runs.expire_lease(run_id)

    assert await hand.claim() == []
    assert await hand.store.reap(limit=10) == [
        Reaped(run_id=run_id, workflow="report", state="cancelled", reason="cancelled", root_run_id=run_id)
    ]
    assert await crew.runs.state(run_id) == ("cancelled", "cancelled")
    assert await terminal(crew, run_id) == ["run_cancelled"]


@pytest.mark.parametrize("leased", [True, False], ids=["leased", "queued"])
async def test_the_reaper_ends_a_run_past_its_deadline(crew: Crew, leased: bool) -> None:
    run_id = await crew.runs.accept(deadline=timedelta(hours=1))
    hand = await crew.hand()
    if leased:
        await hand.claim_one()
        await crew.runs.expire_lease(run_id)
    await crew.runs.pass_deadline(run_id)

    assert await hand.claim() == []
    assert await hand.store.reap(limit=10) == [
        Reaped(run_id=run_id, workflow="report", state="dead", reason="deadline_exceeded", root_run_id=run_id)
    ]
    assert await crew.runs.state(run_id) == ("failed", "dead")
    assert (await run_of(crew, run_id))["error_code"] == "deadline_exceeded"
    assert await terminal(crew, run_id) == ["run_failed"]


async def test_a_budget_of_one_is_one_attempt(crew: Crew) -> None:
    """JOB-21 at its edge."""
    run_id = await crew.runs.accept(max_attempts=1)
    hand = await crew.hand()

    assert await hand.settle(await hand.claim_one()) == Settled(state="dead", reason="attempts_exhausted")
    assert await terminal(crew, run_id) == ["run_failed"]
    assert await hand.claim() == []


async def test_a_released_attempt_does_not_count_but_its_generation_does(crew: Crew) -> None:
    """JOB-32's half in the database: however often a worker stops, the budget is spent by attempts that ran."""
    run_id = await crew.runs.accept(max_attempts=1)
    hand = await crew.hand()
    for generation in (1, 2, 3):
        key = await hand.claim_one()
        assert (key.generation, (await job_of(crew, run_id))["attempts"]) == (generation, 1)
        assert await hand.release(key)
    assert await hand.complete(await hand.claim_one())
    assert [a["outcome"] for a in await crew.runs.attempts(run_id)] == ["released", "released", "released", "completed"]


async def test_a_delay_survives_the_restart_of_every_worker(crew: Crew) -> None:
    """JOB-20."""
    run_id = await crew.runs.accept()
    before = await crew.hand("before")
    await before.settle(await before.claim_one(), delay_seconds=600)
    await before.store.close()
    after = await crew.hand("after")

    assert await after.claim() == []
    assert await after.store.next_ready(["report"]) == pytest.approx(600, abs=30)
    assert (await job_of(crew, run_id))["attempts"] == 1
    await crew.runs.make_ready(run_id)
    (claim,) = await after.claims()
    assert (claim.attempt, claim.key.generation, claim.retry_delay_seconds) == (2, 2, 600)


async def test_every_attempt_leaves_its_own_evidence(crew: Crew) -> None:
    """JOB-22: a timeout, a 503 and a success on three workers."""
    run_id = await crew.runs.accept()
    hands = [await crew.hand(name) for name in ("w1", "w2", "w3")]
    failures = (("builtins.TimeoutError", "timeout", 1.5), ("httpx.HTTPStatusError", "http_503", 0.5))
    for hand, (error_class, code, cost) in zip(hands, failures, strict=False):
        key = await hand.claim_one()
        assert await hand.renew(key)
        failure = failed(
            key, error_class=error_class, error_code=code, usage=Usage(cost=cost, detail={"tokens": 7}), checkpoint=b"c"
        )
        assert (await hand.store.fail([failure]))[key].state == "queued"
    last = await hands[2].claim_one()
    assert await hands[2].complete(last)

    rows = await crew.runs.attempts(run_id)
    assert [(r["number"], r["generation"], r["worker"]) for r in rows] == [(1, 1, "w1"), (2, 2, "w2"), (3, 3, "w3")]
    assert [(r["outcome"], r["error_class"], r["error_code"], r["decision"]) for r in rows] == [
        ("failed", "builtins.TimeoutError", "timeout", "retry"), ("failed", "httpx.HTTPStatusError", "http_503", "retry"),
        ("completed", None, None, None),
    ]  # fmt: skip
    assert [float(r["cost"]) for r in rows[:2]] == [1.5, 0.5]
    assert [json.loads(r["usage"]) for r in rows[:2]] == [{"tokens": 7}] * 2
    assert all(r["claimed_at"] <= r["started_at"] <= r["finished_at"] for r in rows)
    assert [r["renewed_at"] is not None for r in rows] == [True, True, False]
    assert all(earlier["finished_at"] <= later["claimed_at"] for earlier, later in itertools.pairwise(rows))
    assert float((await job_of(crew, run_id))["cost_used"]) == 2


async def test_an_elapsed_budget_ends_the_run_before_the_wait(crew: Crew) -> None:
    """JOB-26: of 60 s, 50 are used. A delay of 20 s has no room, one of 5 has."""
    hand = await crew.hand()
    for delay, outcome in ((20, Settled(state="dead", reason="deadline_exceeded")), (5, Settled(state="queued", reason=None))):
        run_id = await crew.runs.accept(deadline=timedelta(seconds=60), max_attempts=100)
        key = await hand.claim_one()
        await crew.runs.pass_deadline(run_id, by=timedelta(seconds=-10))

        assert await hand.settle(key, delay_seconds=delay) == outcome

        late = await crew.database.fetchval(
            "SELECT count(*) FROM fencepost.jobs WHERE state = 'queued' AND available_at > deadline_at"
        )
        assert late == 0
    codes = await crew.database.fetch("SELECT error_code FROM fencepost.runs ORDER BY run_id")
    assert [row[0] for row in codes] == ["deadline_exceeded", None]


async def test_a_cost_budget_ends_the_run_at_the_failure_that_spends_it(crew: Crew) -> None:
    run_id = await crew.runs.accept(cost_limit=1.0, max_attempts=100)
    hand = await crew.hand()
    outcomes = [await hand.settle(await hand.claim_one(), usage=Usage(cost=0.4)) for _ in range(3)]

    assert outcomes == [Settled(state="queued", reason=None)] * 2 + [Settled(state="dead", reason="cost_exhausted")]
    assert (await run_of(crew, run_id))["error_code"] == "cost_exhausted"


@pytest.mark.parametrize("seconds", [1e13, 1e14, float("inf")], ids=["past the timestamps", "past the intervals", "for ever"])
async def test_a_delay_that_no_timestamp_holds_is_refused_and_changes_nothing(crew: Crew, seconds: float) -> None:
    """JOB-38: an overflow is an error, never a job that is ready at once or never again."""
    await crew.runs.accept()
    hand = await crew.hand()
    key = await hand.claim_one()
    before = await crew.dump()

    with pytest.raises((asyncpg.DataError, OverflowError)):
        await hand.settle(key, delay_seconds=seconds)

    assert await crew.dump() == before
    assert await hand.complete(key)


# -- atomicity ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", STEPS)
async def test_a_session_killed_in_the_middle_of_a_completion_leaves_all_running(crew: Crew, table: str) -> None:
    """JOB-18: killed at each of its writes; the next worker ends the run, with one terminal event."""
    run_id = await crew.runs.accept()
    a, b = await crew.hand("A"), await crew.hand("B")
    key = await a.claim_one()
    before = await crew.dump()
    await break_step(crew.database, table, "PERFORM pg_advisory_xact_lock(18); RETURN NEW;")
    blocker = await crew.connect()
    await blocker.execute("SELECT pg_advisory_lock(18)")

    completing = asyncio.ensure_future(a.complete(key))
    await crew.blocked(1)
    assert await crew.database.fetchval(
        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    )
    with pytest.raises(TransientError):
        await completing
    await blocker.execute("SELECT pg_advisory_unlock(18)")

    assert await crew.dump() == before
    assert await crew.runs.state(run_id) == ("running", "leased")
    await crew.runs.expire_lease(run_id)
    assert await b.complete(await b.claim_one())
    assert await crew.runs.state(run_id) == ("completed", "completed")
    assert await terminal(crew, run_id) == ["run_completed"]


@pytest.mark.parametrize("table", STEPS)
async def test_no_verb_is_half_written(crew: Crew, table: str) -> None:
    """JOB-18 for every way in which an attempt can end: whichever write fails, nothing of it is there."""
    hand = await crew.hand()
    await break_step(
        crew.database, table, "IF current_setting('tests.break', true) = 'on' THEN RAISE EXCEPTION 'broken'; END IF; RETURN NEW;"
    )
    database = await crew.database.fetchval("SELECT current_database()")
    ids = [await crew.runs.accept(max_attempts=1) for _ in range(5)]
    keys = {key.run_id: key for key in await hand.claim(5)}
    await crew.runs.cancel(ids[3])
    await crew.runs.expire_lease(ids[4])
    await crew.database.execute(f"ALTER DATABASE {database} SET tests.break = 'on'")
    broken = await crew.hand()
    before = await crew.dump()

    acts: list[Callable[[], Awaitable[object]]] = [
        lambda: broken.complete(keys[ids[0]]),
        lambda: broken.retry(keys[ids[1]]),
        lambda: broken.fail(keys[ids[2]]),
        lambda: broken.release(keys[ids[3]]),
        lambda: broken.store.reap(limit=9),
    ]
    for act in acts:
        with pytest.raises(asyncpg.RaiseError):
            await act()
        assert await crew.dump() == before


async def test_event_sequences_have_no_gap_whoever_rolls_back(crew: Crew) -> None:
    """JOB-19: 20 writers at once, every third rolls back."""
    run_id = await crew.runs.accept()
    writers = [await crew.connect() for _ in range(20)]

    async def append(number: int) -> None:
        transaction = writers[number].transaction()
        await transaction.start()
        await writers[number].execute("SELECT fencepost.append_run_event('acme', $1, 'workflow.chunk', '{}')", run_id)
        await (transaction.rollback() if number % 3 == 0 else transaction.commit())

    await asyncio.gather(*(append(number) for number in range(20)))

    assert [sequence for sequence, _ in await crew.runs.events(run_id)] == list(range(1, 15))
    assert await crew.database.fetchval("SELECT event_sequence FROM fencepost.runs") == 14
    published = await crew.database.fetch(
        "SELECT convert_from(payload, 'UTF8')::jsonb ->> 'sequence' AS sequence FROM fencepost.outbox ORDER BY id"
    )
    assert [int(row["sequence"]) for row in published] == list(range(1, 15))


@pytest.mark.parametrize(("end", "next_sequence"), [("COMMIT", 3), ("ROLLBACK", 2)])
async def test_the_next_sequence_is_drawn_when_the_one_before_it_has_ended(crew: Crew, end: str, next_sequence: int) -> None:
    """JOB-19: so sequences follow the order of commits."""
    run_id = await crew.runs.accept()
    append = "SELECT fencepost.append_run_event('acme', $1, 'workflow.chunk', '{}')"
    first, second = await crew.connect(), await crew.connect()
    await first.execute("BEGIN")
    assert await first.fetchval(append, run_id) == 2
    waiting = asyncio.ensure_future(second.fetchval(append, run_id))
    await crew.blocked(1)
    await first.execute(end)

    assert await waiting == next_sequence


# -- cancellation -------------------------------------------------------------------------------------------------------------


async def test_a_run_cancelled_before_its_claim_never_runs(crew: Crew) -> None:
    """JOB-28."""
    run_id = await crew.runs.accept()
    hand = await crew.hand()

    assert await crew.runs.cancel(run_id) == "cancelled"

    assert await hand.claim() == []
    assert await hand.store.reap(limit=9) == []
    assert await crew.runs.state(run_id) == ("cancelled", "cancelled")
    assert await crew.runs.events(run_id) == [(1, "run_queued"), (2, "run_cancelled")]
    assert await crew.runs.cancel(run_id) == "ended"
    assert await crew.runs.attempts(run_id) == []


async def test_a_claim_that_meets_a_cancellation_takes_nothing(crew: Crew) -> None:
    """JOB-28 at its edge: the cancellation is open, and then there; the claim neither waits nor takes the job."""
    run_id = await crew.runs.accept()
    hand = await crew.hand()
    operator = Runs(await crew.connect())
    async with operator.connection.transaction():
        assert await operator.cancel(run_id) == "cancelled"
        assert await hand.claim() == []
    assert await hand.claim() == []
    assert await crew.runs.state(run_id) == ("cancelled", "cancelled")


async def test_a_cancellation_that_meets_a_claim_becomes_a_request(crew: Crew) -> None:
    run_id = await crew.runs.accept()
    claimer, operator = Runs(await crew.connect(), "A"), Runs(await crew.connect())
    async with claimer.connection.transaction():
        held = await claimer.claim_one()
        cancelling = asyncio.ensure_future(operator.cancel(run_id))
        await crew.blocked(1)

    assert await cancelling == "requested"
    assert not await claimer.complete(held)
    assert await claimer.fail(held)
    assert await crew.runs.state(run_id) == ("cancelled", "cancelled")


RACES: Final = 10


@pytest.mark.parametrize("first", ["cancel", "complete within"])
async def test_cancel_against_complete_has_one_winner_each_time(crew: Crew, first: str) -> None:
    """JOB-29: both wait for the job's row in a known order and are let go together, many times over."""
    second = "complete within" if first == "cancel" else "cancel"
    hand, operator, referee = await crew.hand(), Runs(await crew.connect()), await crew.connect()
    for _ in range(RACES):
        run_id = await crew.runs.accept()
        key = await hand.claim_one()

        async def act(name: str, key: JobKey = key) -> str | bool:
            return await operator.cancel(key.run_id) if name == "cancel" else await hand.complete_within(key)

        async with referee.transaction():
            await referee.execute("SELECT FROM fencepost.jobs WHERE run_id = $1 FOR UPDATE", run_id)
            acts = {first: asyncio.create_task(act(first))}
            await crew.blocked(1)
            acts[second] = asyncio.create_task(act(second))
            await crew.blocked(2)
        told = {name: await task for name, task in acts.items()}

        won = first != "cancel"
        assert told == {"complete within": won, "cancel": "ended" if won else "requested"}
        await assert_one_end(crew, hand, key)


@pytest.mark.parametrize("first", ["cancel", "complete"])
async def test_cancel_against_a_workers_own_completion_has_one_winner_each_time(crew: Crew, first: str) -> None:
    """JOB-29: one holds the row in a transaction that is still open while the other comes."""
    hand = await crew.hand("A")
    holder = Runs(await crew.connect(), "A")
    other = Runs(await crew.connect())
    for _ in range(RACES):
        run_id = await crew.runs.accept()
        key = await hand.claim_one()
        async with holder.connection.transaction():
            if first == "cancel":
                assert await holder.cancel(run_id) == "requested"
                assert not await hand.complete(key)
                assert await hand.standing(key) == Standing(state="leased", held=True, left_here=False, cancel_requested=False)
            else:
                held = Held(run_id=run_id, tenant_id="acme", generation=key.generation, attempt=1)
                assert await holder.complete(held)
                cancelling = asyncio.create_task(other.cancel(run_id))
                await crew.blocked(1)
        if first == "cancel":
            assert not await hand.complete(key)
        else:
            assert await cancelling == "ended"
        await assert_one_end(crew, hand, key)


async def test_cancel_against_complete_in_any_order_has_one_winner(crew: Crew) -> None:
    """JOB-29: 40 runs, each cancelled and completed at once; who wins is chance, that one does is not."""
    ids = [await crew.runs.accept() for _ in range(40)]
    hand, operators = await crew.hand(), [Runs(await crew.connect()) for _ in range(4)]
    keys = await hand.claim(40)
    queues = [keys[place::4] for place in range(4)]

    async def cancel(operator: Runs, mine: Sequence[Any]) -> list[str]:
        return [await operator.cancel(key.run_id) for key in mine]

    async def complete(mine: Sequence[Any]) -> list[bool]:
        return [await hand.complete(key) for key in mine]

    cancelling = [asyncio.create_task(cancel(operator, queue)) for operator, queue in zip(operators, queues, strict=True)]
    completing = [asyncio.create_task(complete(queue)) for queue in queues]
    asked_of = [asked for task in cancelling for asked in await task]
    completed_of = [completed for task in completing for completed in await task]

    for asked, completed in zip(asked_of, completed_of, strict=True):
        assert asked == ("ended" if completed else "requested")
    for key in keys:
        await assert_one_end(crew, hand, key)
    assert len({key.run_id for key in keys} & set(ids)) == 40


async def assert_one_end(crew: Crew, hand: Hand, key: Any) -> None:
    """End the run as its worker would; then run, job and events agree, and one event says who won."""
    standing = await hand.standing(key)
    if standing.held:
        assert standing.cancel_requested
        assert await hand.settle(key, delay_seconds=None) == Settled(state="cancelled", reason="cancelled")
    (kind,) = await terminal(crew, key.run_id)
    ended = kind.removeprefix("run_")
    assert await crew.runs.state(key.run_id) == (ended, ended)
    winner = {"completed": "completion", "cancelled": "cancellation"}[ended]
    assert (await detail(crew, key.run_id, kind))["decided_by"] == winner
    assert (await run_of(crew, key.run_id))["state"] == ended


async def test_a_failure_that_meets_a_cancellation_asks_again_and_is_cancelled(crew: Crew) -> None:
    """Neither queued again nor dead: whoever was asked to stop has stopped."""
    run_id = await crew.runs.accept()
    hand, operator = await crew.hand(), Runs(await crew.connect())
    key = await hand.claim_one()
    async with operator.connection.transaction():
        assert await operator.cancel(run_id) == "requested"
        assert await hand.settle(key, delay_seconds=5) is None
        assert (await hand.standing(key)).held

    assert await hand.settle(key, delay_seconds=5) == Settled(state="cancelled", reason="cancelled")
    assert await crew.runs.state(run_id) == ("cancelled", "cancelled")
    assert await terminal(crew, run_id) == ["run_cancelled"]


# -- replays ------------------------------------------------------------------------------------------------------------------


async def dead_run(crew: Crew, hand: Hand, **command: Any) -> Any:
    run_id = await crew.runs.accept(max_attempts=3, **command)
    for _ in range(3):
        await hand.settle(await hand.claim_one())
    return run_id


async def rows_of(crew: Crew, run_id: Any) -> dict[str, list[str]]:
    """What belongs to a run, in every table, but the replays' own record."""
    return {table: [row for row in rows if str(run_id) in row] for table, rows in (await crew.dump()).items() if table in STEPS}


async def test_a_replay_of_dead_work_is_a_new_run(crew: Crew) -> None:
    """JOB-31: linked, audited, from the first attempt; the dead run's evidence is what it was."""
    hand = await crew.hand()
    dead = await dead_run(crew, hand, data=b'{"n":1}', topic="reports", cost_limit=9, deadline=timedelta(hours=2))
    evidence = {
        table: rows
        for table, rows in (await rows_of(crew, dead)).items()
        if table in ("jobs", "runs", "job_attempts", "run_events")
    }
    events = await crew.runs.events(dead)

    outcome, new = await crew.runs.replay(dead, actor="ana", reason="the provider is back")

    assert outcome == "replayed"
    assert await crew.runs.events(dead) == events
    old_run, run, job = await run_of(crew, dead), await run_of(crew, new), await job_of(crew, new)
    assert (run["replay_of"], run["root_run_id"], run["input"], run["topic"]) == (dead, dead, b'{"n":1}', "reports")
    assert (run["workflow"], run["workflow_version"], run["state"]) == (old_run["workflow"], old_run["workflow_version"], "queued")
    assert (job["attempts"], job["lease_generation"], job["max_attempts"], float(job["cost_limit"])) == (0, 0, 3, 9)
    assert job["deadline_at"] - job["available_at"] == pytest.approx(timedelta(hours=2), abs=timedelta(seconds=1))
    assert await detail(crew, new, "run_queued") == {"replay_of": str(dead)}
    audit = await crew.database.fetchrow("SELECT actor, command, reason, detail FROM fencepost.audit")
    assert audit is not None
    assert (audit["actor"], audit["command"], audit["reason"]) == ("ana", "runs replay", "the provider is back")
    assert json.loads(audit["detail"]) | {"replays_before": 0} == {
        "tenant_id": "acme", "run_id": str(dead), "new_run_id": str(new), "replays_before": 0, "replays_after": 1,
    }  # fmt: skip
    (claim,) = await hand.claims()
    assert (claim.key.run_id, claim.key.generation, claim.attempt, claim.root_run_id) == (new, 1, 1, dead)
    assert await hand.complete(claim.key)
    after = await rows_of(crew, dead)
    for table, rows in evidence.items():
        assert set(rows) <= set(after[table]), table
    assert [a["outcome"] for a in await crew.runs.attempts(dead)] == ["failed"] * 3


WRONG_REPLAYS: Final[Sequence[Mapping[str, Any]]] = (
    {"actor": ""}, {"actor": "  "}, {"actor": "a" * 257}, {"reason": ""}, {"reason": " "}, {"reason": "r" * 2001},
    {"limit": 0}, {"limit": 1001}, {"ledger_retention": timedelta(0)}, {"ledger_retention": timedelta(days=4000)},
)  # fmt: skip


async def test_a_replay_is_refused_with_its_reason_and_changes_nothing(crew: Crew) -> None:
    """JOB-31: not dead, another tenant's, unknown, replayed already, too old, and nobody who says who or why."""
    hand = await crew.hand()
    completed = await crew.runs.accept()
    assert await hand.complete(await hand.claim_one())
    cancelled = await crew.runs.accept()
    assert await crew.runs.cancel(cancelled) == "cancelled"
    replayed = await dead_run(crew, hand)
    _, new = await crew.runs.replay(replayed)
    assert await hand.complete(await hand.claim_one())
    old = await dead_run(crew, hand)
    await crew.database.execute("UPDATE fencepost.runs SET created_at = created_at - interval '31 days' WHERE run_id = $1", old)
    queued = await crew.runs.accept(delay=timedelta(hours=1))
    before = await crew.dump()

    assert await crew.runs.replay(completed) == ("not_dead", None)
    assert await crew.runs.replay(cancelled) == ("not_dead", None)
    assert await crew.runs.replay(queued) == ("not_dead", None)
    assert await crew.runs.replay(uuid7()) == ("not_found", None)
    assert await crew.runs.replay(old, tenant="other") == ("not_found", None)
    assert await crew.runs.replay(replayed) == ("already_replayed", new)
    assert await crew.runs.replay(old) == ("too_old", None)
    for wrong in WRONG_REPLAYS:
        with pytest.raises(asyncpg.CheckViolationError):
            await crew.runs.replay(old, **wrong)
    assert await crew.dump() == before


async def test_a_lineage_is_replayed_only_so_often(crew: Crew) -> None:
    """JOB-31, J49: each replay starts from the last dead run, and the budget is the lineage's."""
    hand = await crew.hand()
    root = run_id = await dead_run(crew, hand)
    for _ in range(3):
        outcome, new = await crew.runs.replay(run_id, limit=3)
        assert outcome == "replayed"
        for _ in range(3):
            await hand.settle(await hand.claim_one())
        run_id = new
    assert (await run_of(crew, run_id))["root_run_id"] == root

    assert await crew.runs.replay(run_id, limit=3) == ("budget_spent", None)
    assert (await crew.runs.replay(run_id, limit=4))[0] == "replayed"


async def test_the_age_of_a_lineage_is_its_first_runs(crew: Crew) -> None:
    """A young replay of an old run: the ledger's oldest rows are the root's."""
    hand = await crew.hand()
    root = await dead_run(crew, hand)
    _, new = await crew.runs.replay(root)
    for _ in range(3):
        await hand.settle(await hand.claim_one())
    await crew.database.execute("UPDATE fencepost.runs SET created_at = created_at - interval '31 days' WHERE run_id = $1", root)

    assert new is not None
    assert await crew.runs.replay(new) == ("too_old", None)


async def test_replays_of_one_run_at_once_make_one(crew: Crew) -> None:
    """JOB-31: all wait for the dead job's row, and are let go together."""
    dead = await dead_run(crew, await crew.hand())
    operators = [Runs(await crew.connect()) for _ in range(6)]
    referee = await crew.connect()
    async with referee.transaction():
        await referee.execute("SELECT FROM fencepost.jobs FOR UPDATE")
        replays = [asyncio.ensure_future(operator.replay(dead)) for operator in operators]
        await crew.blocked(6)
    answers = await asyncio.gather(*replays)

    assert sorted(outcome for outcome, _ in answers) == ["already_replayed"] * 5 + ["replayed"]
    assert len({new for _, new in answers}) == 1
    assert await crew.database.fetchval("SELECT count(*) FROM fencepost.runs") == 2
    assert await crew.database.fetchval("SELECT count(*) FROM fencepost.audit") == 1


async def test_replays_of_one_lineage_at_once_keep_the_budget(crew: Crew) -> None:
    """Only the last run of a lineage can be replayed, so two cannot pass the budget side by side."""
    hand = await crew.hand()
    root = await dead_run(crew, hand)
    _, second = await crew.runs.replay(root)
    for _ in range(3):
        await hand.settle(await hand.claim_one())
    operators = [Runs(await crew.connect()) for _ in range(6)]
    targets = [root, second] * 3
    assert second is not None

    answers = await asyncio.gather(*(o.replay(t, limit=2) for o, t in zip(operators, targets, strict=True) if t is not None))

    assert sorted(outcome for outcome, _ in answers) == ["already_replayed"] * 5 + ["replayed"]


# -- fairness -----------------------------------------------------------------------------------------------------------------


class Rounds:
    """A worker's turns: the tenant that was served last goes back into the next claim."""

    def __init__(self, hand: Hand) -> None:
        self.hand = hand
        self.last = ""

    async def claim(self, limit: int) -> list[str]:
        """Tenants of the claimed jobs."""
        claims = await self.hand.claims(limit, after=self.last)
        self.last = next((claim.round_ended_at for claim in claims if claim.round_ended_at is not None), self.last)
        return [claim.key.tenant_id for claim in claims]


@pytest.mark.parametrize("served_before", ["", "b"])
async def test_one_tenants_flood_does_not_hold_up_another(crew: Crew, served_before: str) -> None:
    """JOB-36: 10,000 jobs of A, all older than B's one; workers with 10 slots."""
    await fill(crew.database, 10_000, tenant="a")
    await crew.runs.accept(tenant="b")
    rounds = Rounds(await crew.hand())
    rounds.last = served_before

    served = [tenant for _ in range(10) for tenant in await rounds.claim(10)]

    assert len(served) == 100
    assert served.count("b") == 1
    assert served.index("b") < 20


async def test_fifty_floods_are_all_served_in_one_round(crew: Crew) -> None:
    await fill(crew.database, 50 * 40, tenants=50)
    rounds = Rounds(await crew.hand())

    for _ in range(2):
        assert len({tenant for _ in range(5) for tenant in await rounds.claim(10)}) == 50


async def test_tenants_with_nothing_ready_cost_no_slot(crew: Crew) -> None:
    """Their next attempts lie in the future: every slot goes to who has work now."""
    await fill(crew.database, 500, tenants=50, tenant="later", ready_in=timedelta(hours=1))
    await fill(crew.database, 100, tenant="now")
    rounds = Rounds(await crew.hand())

    assert [await rounds.claim(10) for _ in range(10)] == [["now"] * 10] * 10


async def test_many_tenants_with_nothing_ready_starve_nobody(crew: Crew) -> None:
    """However many of them stand before it in the order of turns, a tenant with work is served."""
    await fill(crew.database, 3_000, tenants=3_000, tenant="later", ready_in=timedelta(hours=1))
    await fill(crew.database, 100, tenant="now")
    rounds = Rounds(await crew.hand())

    served = [tenant for _ in range(10) for tenant in await rounds.claim(10)]

    assert served == ["now"] * 100


async def test_a_tenant_behind_many_idle_ones_and_a_flood_is_reached(crew: Crew) -> None:
    """The look at tenants is bounded for each claim and goes on where it ended: a round over all is a bounded number of claims."""
    await fill(crew.database, 2_000, tenants=2_000, tenant="idle", ready_in=timedelta(hours=1))
    await fill(crew.database, 1_000, tenant="flood")
    await crew.runs.accept(tenant="zoe")
    rounds = Rounds(await crew.hand())

    served = [await rounds.claim(10) for _ in range(25)]

    assert "zoe" in {tenant for claim in served for tenant in claim}
    assert {len(claim) for claim in served} == {10}


async def test_a_round_over_more_tenants_than_one_look_serves_each_once(crew: Crew) -> None:
    """500 tenants with a flood each: after 50 claims of 10 every one of them has had one job."""
    await fill(crew.database, 500 * 4, tenants=500)
    rounds = Rounds(await crew.hand())

    served = [tenant for _ in range(50) for tenant in await rounds.claim(10)]

    assert len(served) == len(set(served)) == 500


async def test_what_is_ready_of_several_workflows_shares_the_slots(crew: Crew) -> None:
    """Two floods and a single job: the single one is served, what its share leaves is filled up, and no slot is taken twice."""
    for workflow, jobs in (("one", 300), ("two", 300), ("three", 1)):
        await fill(crew.database, jobs, workflow=workflow, tenant="a")
    store: RunStore = (await crew.hand()).store
    served = [Served(workflow=name, attempt_seconds=None, last_tenant="") for name in ("one", "two", "three")]

    claims = await store.claim(served, limit=10, lease_seconds=30)

    assert len(claims) == 10
    assert {claim.workflow for claim in claims} == {"one", "two", "three"}
