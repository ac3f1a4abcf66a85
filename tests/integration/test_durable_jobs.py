"""The ten repository tests of durable jobs on real PostgreSQL, and its exercises. Each says in its name what it proves.

Time is moved by moving rows, races are held by locks: nothing sleeps.
"""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import asyncpg
import pytest
from uuid_utils.compat import uuid7

from consumer_sdk.jobs import JobKey, Settled, Standing
from fencepost.errors import IdempotencyConflict
from fencepost.retry import Retry
from producer_sdk import Command, Scope, Secrets
from producer_sdk import asyncpg as producer
from tests.support.jobs import LEASE_SECONDS, SQL, STEPS, VERBS, Crew, Hand, break_step
from tests.support.runs import Runs, new_key

SECRETS: Final = Secrets({1: secrets.token_bytes(32)}, write=[1])
SCOPE: Final = Scope(tenant_id="acme", principal="ana", operation="POST /reports")


@pytest.fixture
async def crew(database_url: str) -> AsyncIterator[Crew]:
    async with Crew.on(database_url) as crew:
        yield crew


async def counts(crew: Crew) -> dict[str, int]:
    return {table: len(rows) for table, rows in (await crew.dump()).items() if rows}


# -- the ten ----------------------------------------------------------------------------------------------------------------


async def test_migration_and_atomic_first_event(crew: Crew) -> None:
    """The schema is there, and acceptance commits run, first event, job, key and outbox row together or not at all."""
    open_session = Runs(await crew.connect())
    transaction = open_session.connection.transaction()
    await transaction.start()
    run_id = await open_session.accept(key=new_key())

    assert await counts(crew) == {}
    await transaction.commit()
    assert await counts(crew) == {"runs": 1, "run_events": 1, "jobs": 1, "idempotency_keys": 1, "outbox": 1}
    assert await crew.runs.events(run_id) == [(1, "run_queued")]
    assert await crew.runs.state(run_id) == ("queued", "queued")


async def test_a_duplicate_run_rolls_back_whole(crew: Crew) -> None:
    """A run id that is taken: no second event, job, key or outbox row is left of it, and the first run is as it was."""
    run_id = await crew.runs.accept(key=new_key())
    before = await crew.dump()

    with pytest.raises(asyncpg.UniqueViolationError):
        await crew.runs.accept(run_id=run_id, key=new_key(), data=b'{"another": true}')

    assert await crew.dump() == before


@pytest.mark.parametrize("table", STEPS)
async def test_projection_and_event_are_atomic(crew: Crew, table: str) -> None:
    """Whichever of its writes fails, a completion is not there: neither the run's state nor the event, nor anything else."""
    run_id = await crew.runs.accept()
    hand = await crew.hand()
    key = await hand.claim_one()
    before = await crew.dump()
    await break_step(crew.database, table, "RAISE EXCEPTION 'broken';")

    with pytest.raises(asyncpg.RaiseError):
        await hand.complete(key)

    assert await crew.dump() == before
    await crew.database.execute(f"DROP TRIGGER break_{table} ON fencepost.{table}")
    assert await hand.complete(key)
    assert await crew.runs.state(run_id) == ("completed", "completed")
    assert await crew.runs.events(run_id) == [(1, "run_queued"), (2, "run_completed")]


async def test_concurrent_event_sequences_are_unique(crew: Crew) -> None:
    run_id = await crew.runs.accept()
    hands = [await crew.hand("A") for _ in range(4)]
    key = await hands[0].claim_one()

    appended = await asyncio.gather(*(hand.store.append_event(key, "workflow.chunk", {}) for hand in hands for _ in range(5)))

    assert sorted(sequence or 0 for sequence in appended) == list(range(2, 22))
    assert [sequence for sequence, _ in await crew.runs.events(run_id)] == list(range(1, 22))


async def test_no_event_is_an_orphan(crew: Crew) -> None:
    """An event belongs to a run of its own tenant, whichever way it is written."""
    run_id = await crew.runs.accept(tenant="acme")
    before = await crew.dump()
    insert = "INSERT INTO fencepost.run_events (run_id, tenant_id, sequence, type) VALUES ($1, $2, 9, 'workflow.chunk')"

    for missing, tenant in ((uuid7(), "acme"), (run_id, "other")):
        with pytest.raises(asyncpg.ForeignKeyViolationError):
            await crew.database.execute(insert, missing, tenant)
        append = "SELECT fencepost.append_run_event($2, $1, 'workflow.chunk', '{}')"
        assert await crew.database.fetchval(append, missing, tenant) is None

    assert await crew.dump() == before


INVALID: Final[Mapping[str, Mapping[str, Any]]] = {
    "an empty workflow": {"workflow": " "},
    "a workflow with a space": {"workflow": "two words"},
    "a tenant too long": {"tenant": "t" * 257},
    "a topic that Kafka refuses": {"topic": "a/b"},
    "no attempts": {"max_attempts": 0},
    "negative attempts": {"max_attempts": -1},
    "attempts without end": {"max_attempts": 1001},
    "a negative delay": {"delay": timedelta(seconds=-1)},
    "a delay past the bound": {"delay": timedelta(days=367)},
    "a deadline at once": {"deadline": timedelta(0)},
    "a deadline past the bound": {"deadline": timedelta(days=367)},
    "no cost at all": {"cost_limit": 0},
    "a cost that is not a number": {"cost_limit": float("nan")},
    "a cost without bound": {"cost_limit": float("inf")},
    "an input too large": {"data": b"x" * 1_000_001},
    "a key that expires at once": {"retention": timedelta(0)},
}


async def test_an_invalid_domain_is_rejected(crew: Crew) -> None:
    """JOB-38: impossible numbers and names are refused by the database itself, and nothing is stored."""
    for wrong, command in INVALID.items():
        with pytest.raises(asyncpg.CheckViolationError, match="fencepost: "):
            await crew.runs.accept(key=new_key(), **command)
        assert await counts(crew) == {}, wrong


async def test_a_replay_is_idempotent_and_a_mismatch_conflicts(crew: Crew) -> None:
    """J15: the same request with another proposed run id finds the first run; another request under its key is refused."""

    async def accept(report: int) -> Any:
        command = Command(workflow="report", input={"report": report}, run_id=uuid7())
        async with crew.database.transaction():
            return await producer.accept(crew.database, command, SCOPE, "key-1", secrets=SECRETS)

    first, second = await accept(1), await accept(1)
    before = await crew.dump()

    assert (first.outcome, second.outcome, second.run_id) == ("created", "replayed", first.run_id)
    assert await crew.runs.events(first.run_id) == [(1, "run_queued")]
    with pytest.raises(IdempotencyConflict) as conflict:
        await accept(2)
    assert conflict.value.code == "idempotency_conflict"
    assert await crew.dump() == before
    assert await counts(crew) == {"runs": 1, "run_events": 1, "jobs": 1, "idempotency_keys": 1, "outbox": 1}


async def test_an_expired_lease_is_recovered_and_the_stale_worker_fenced(crew: Crew) -> None:
    run_id = await crew.runs.accept()
    a, b = await crew.hand("A"), await crew.hand("B")
    first = await a.claim_one()
    assert await b.claim() == []
    await crew.runs.expire_lease(run_id)
    second = await b.claim_one()

    assert (first.generation, second.generation) == (1, 2)
    assert not await a.complete(first)
    assert await crew.runs.state(run_id) == ("running", "leased")
    assert await b.complete(second)
    assert await crew.runs.events(run_id) == [(1, "run_queued"), (2, "run_completed")]
    history = [(attempt["worker"], attempt["outcome"]) for attempt in await crew.runs.attempts(run_id)]
    assert history == [("A", "lost"), ("B", "completed")]


async def test_the_current_generation_renews(crew: Crew) -> None:
    """From when it renews, by the database's clock; it stays the same lease, and everybody else is refused."""
    run_id = await crew.runs.accept()
    a, b = await crew.hand("A"), await crew.hand("B")
    key = await a.claim_one()
    await crew.runs.expire_lease(run_id, by=timedelta(seconds=-3))
    before = await crew.database.fetchval("SELECT clock_timestamp()")

    assert await a.renew(key)

    job = await crew.database.fetchrow("SELECT * FROM fencepost.jobs")
    assert job is not None
    assert job["lease_expires_at"] - job["lease_renewed_at"] == pytest.approx(
        timedelta(seconds=LEASE_SECONDS), abs=timedelta(seconds=1)
    )
    assert before < job["lease_renewed_at"] < await crew.database.fetchval("SELECT clock_timestamp()")
    assert (job["lease_owner"], job["lease_generation"], job["attempts"]) == ("A", 1, 1)
    for hand, wrong in (
        (a, key._replace(generation=0)),
        (a, key._replace(generation=2)),
        (b, key),
        (a, key._replace(tenant_id="x")),
    ):
        assert not await hand.renew(wrong)
    await crew.runs.expire_lease(run_id)
    assert not await a.renew(key)


async def test_the_retry_schedule_and_the_exact_attempt_budget(crew: Crew) -> None:
    """JOB-21: ready again when the delay is over and not before; the last attempt's failure ends job and run in one commit."""
    run_id = await crew.runs.accept(max_attempts=3)
    hand = await crew.hand()
    for attempt, delay in ((1, 10), (2, 20)):
        key = await hand.claim_one()
        before = await crew.database.fetchval("SELECT clock_timestamp()")
        assert await hand.settle(key, delay_seconds=delay) == Settled(state="queued", reason=None)
        after = await crew.database.fetchval("SELECT clock_timestamp()")
        ready = await crew.database.fetchval("SELECT available_at FROM fencepost.jobs")
        assert before <= ready - timedelta(seconds=delay) <= after
        assert await hand.claim() == []
        assert (await crew.runs.state(run_id), key.generation) == (("running", "queued"), attempt)
        await crew.runs.make_ready(run_id)

    last = await hand.claim_one()
    assert await hand.settle(last, delay_seconds=30) == Settled(state="dead", reason="attempts_exhausted")

    assert await crew.runs.state(run_id) == ("failed", "dead")
    assert await crew.runs.events(run_id) == [(1, "run_queued"), (2, "run_failed")]
    assert await crew.database.fetchval("SELECT error_code FROM fencepost.runs") == "unavailable"
    commits = "SELECT count(DISTINCT xmin::text) FROM {} AS x(xmin)".format(
        "(SELECT xmin FROM fencepost.jobs UNION ALL SELECT xmin FROM fencepost.runs"
        " UNION ALL SELECT xmin FROM fencepost.run_events WHERE type = 'run_failed')"
    )
    assert await crew.database.fetchval(commits) == 1
    await crew.runs.make_ready(run_id)
    assert await hand.claim() == []
    assert len(await crew.runs.attempts(run_id)) == 3


# -- exercise: the tenant in every key and predicate -------------------------------------------------------------------------

RUN_TABLES: Final = ("runs", "jobs", "run_events", "job_attempts", "idempotency_keys", "job_replays")
# These look at the queue of all tenants on purpose, or at no table.
OF_ALL_TENANTS: Final = {"arm", "next_ready", "queue_depth"}
MIGRATIONS: Final = ("0008_pre_acceptance.sql", "0009_pre_run_control.sql")


def functions() -> dict[str, str]:
    """The SQL functions of runs, by name, without comments."""
    found: dict[str, str] = {}
    for name in MIGRATIONS:
        text = re.sub(r"--[^\n]*", "", Path(str(files("migrations") / "sql" / name)).read_text(encoding="utf-8"))
        for function in re.finditer(r"CREATE FUNCTION fencepost\.(\w+).*?\n\$\$;", text, re.DOTALL):
            found[function[1]] = function[0]
    return found


STATEMENTS: Final = {name: re.sub(r"--[^\n]*", "", sql) for name, sql in SQL.items()} | functions()


@pytest.mark.parametrize("name", sorted(STATEMENTS))
def test_every_statement_on_runs_names_the_tenant(name: str) -> None:
    """J63: whatever compares a run's id, or a key's hash, compares the tenant beside it; whatever inserts, writes it."""
    # What a statement has locked itself it may leave out by the id alone.
    sql = re.sub(r"AND \(j\.run_id = ANY \([^=]*?\) IS NOT TRUE", "", STATEMENTS[name])
    for alias, rest in re.findall(r"(\w+)\.(?:run_id|key_hash|root_run_id) = (?=([^;]{0,160}))", sql):
        assert f"{alias}.tenant_id = " in rest
    for inserted in re.findall(rf"INSERT INTO fencepost\.(?:{'|'.join(RUN_TABLES)}) (?:AS \w+ )?\(([^)]*)\)", sql):
        assert "tenant_id" in inserted
    if name not in OF_ALL_TENANTS and re.search(rf"fencepost\.(?:{'|'.join(RUN_TABLES)})\b", sql):
        assert "tenant_id" in sql


async def test_every_key_and_reference_holds_the_tenant(crew: Crew) -> None:
    rows = await crew.database.fetch(
        "SELECT c.conrelid::regclass::text || ' ' || c.conname AS name, array_agg(a.attname::text) AS columns"
        " FROM pg_constraint AS c JOIN pg_attribute AS a ON a.attrelid = c.conrelid AND a.attnum = ANY (c.conkey)"
        " WHERE c.contype IN ('p', 'u', 'f') AND c.conrelid::regclass::text = ANY ($1) GROUP BY 1"
        " UNION ALL SELECT i.indexrelid::regclass::text, array_agg(a.attname::text)"
        " FROM pg_index AS i JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)"
        " WHERE i.indisunique AND i.indrelid::regclass::text = ANY ($1) GROUP BY 1",
        [f"fencepost.{table}" for table in RUN_TABLES],
    )
    assert len(rows) > 2 * len(RUN_TABLES)
    assert {row["name"]: True for row in rows} == {row["name"]: "tenant_id" in row["columns"] for row in rows}


async def twins(crew: Crew, hand: Hand, workflow: str = "report") -> tuple[JobKey, JobKey]:
    """One run id in two tenants, both leased to one worker under one generation: nothing but the tenant tells them apart."""
    run_id = uuid7()
    for tenant in ("acme", "other"):
        await crew.runs.accept(tenant=tenant, run_id=run_id, workflow=workflow, key=new_key(), max_attempts=1)
    ours, theirs = sorted(await hand.claim(2, workflow=workflow), key=lambda key: key.tenant_id)
    assert ours == theirs._replace(tenant_id="acme")
    return ours, theirs


async def of_tenant(crew: Crew, tenant: str) -> dict[str, list[str]]:
    return {table: [row for row in rows if tenant in row] for table, rows in (await crew.dump()).items()}


async def test_a_verb_moves_the_run_of_its_own_tenant_only(crew: Crew) -> None:
    hand = await crew.hand()
    for verb, act in VERBS.items():
        ours, _ = await twins(crew, hand, workflow=verb.replace(" ", "-"))
        theirs_before = await of_tenant(crew, "other")

        assert await act(hand, ours), verb

        assert await of_tenant(crew, "other") == theirs_before, verb


async def test_reap_cancel_and_replay_move_the_run_of_their_own_tenant_only(crew: Crew) -> None:
    ours, _ = await twins(crew, await crew.hand())
    theirs_before = await of_tenant(crew, "other")

    assert await crew.runs.cancel(ours.run_id, tenant="acme") == "requested"
    await crew.database.execute(
        "UPDATE fencepost.jobs SET lease_expires_at = clock_timestamp(), cancel_requested_at = NULL WHERE tenant_id = 'acme'"
    )
    assert await crew.runs.reap() == [(ours.run_id, "dead", "attempts_exhausted")]
    assert (await crew.runs.replay(ours.run_id, tenant="acme"))[0] == "replayed"

    assert await of_tenant(crew, "other") == theirs_before
    assert await crew.runs.cancel(ours.run_id, tenant="third") == "not_found"
    assert await crew.runs.replay(ours.run_id, tenant="other") == ("not_dead", None)


# -- exercise: cancelled, and the race with completed -------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["cancel", "complete within"])
async def test_cancel_and_complete_have_one_winner(crew: Crew, first: str) -> None:
    """JOB-29: both wait for the job's row, in this order. The row is the referee, and the loser is told."""
    run_id = await crew.runs.accept()
    hand = await crew.hand()
    key = await hand.claim_one()
    operator = Runs(await crew.connect())
    acts: dict[str, Callable[[], Awaitable[object]]] = {
        "cancel": lambda: operator.cancel(run_id),
        "complete within": lambda: hand.complete_within(key),
    }
    second = "complete within" if first == "cancel" else "cancel"

    referee = await crew.connect()
    async with referee.transaction():
        await referee.execute("SELECT FROM fencepost.jobs FOR UPDATE")
        tasks = {first: asyncio.ensure_future(acts[first]())}
        await crew.blocked(1)
        tasks[second] = asyncio.ensure_future(acts[second]())
        await crew.blocked(2)
    told = {act: await task for act, task in tasks.items()}

    if first == "complete within":
        assert told == {"complete within": True, "cancel": "ended"}
        assert await crew.runs.state(run_id) == ("completed", "completed")
    else:
        assert told == {"complete within": False, "cancel": "requested"}
        assert await hand.standing(key) == Standing(state="leased", held=True, left_here=False, cancel_requested=True)
        assert await hand.settle(key, delay_seconds=None) == Settled(state="cancelled", reason="cancelled")
        assert await crew.runs.state(run_id) == ("cancelled", "cancelled")
    terminal = [row for row in await crew.runs.events(run_id) if row[1] in ("run_completed", "run_cancelled", "run_failed")]
    assert len(terminal) == 1
    decided_by = "SELECT detail ->> 'decided_by' FROM fencepost.run_events WHERE sequence = $1"
    assert await crew.database.fetchval(decided_by, terminal[0][0]) == (
        "completion" if first == "complete within" else "cancellation"
    )


# -- exercise: SKIP LOCKED with two independent connections ----------------------------------------------------------------


async def test_a_claim_passes_by_what_another_connection_is_claiming(crew: Crew) -> None:
    """The first claim's transaction stays open: the second waits for nothing and takes nothing twice."""
    for _ in range(5):
        await crew.runs.accept()
    first = Runs(await crew.connect(), "A")
    second = await crew.hand("B")

    async with first.connection.transaction():
        taken = {held.run_id for held in await first.claim(3)}
        left = {key.run_id for key in await second.claim(10)}

    assert (len(taken), len(left)) == (3, 2)
    assert not taken & left
    owners = await crew.database.fetch("SELECT lease_owner, count(*) FROM fencepost.jobs GROUP BY 1 ORDER BY 1")
    assert [tuple(row) for row in owners] == [("A", 3), ("B", 2)]


# -- exercise: a pause past expiry -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reclaimed", [True, False], ids=["reclaimed", "only expired"])
async def test_a_worker_that_paused_past_expiry_appends_no_effect(crew: Crew, reclaimed: bool) -> None:
    """J57: whatever it tries when it wakes, and whether or not somebody else works on the job by then."""
    run_id = await crew.runs.accept()
    a, b = await crew.hand("A"), await crew.hand("B")
    old = await a.claim_one()
    await crew.runs.expire_lease(run_id)
    if reclaimed:
        await b.claim_one()
    before = await crew.dump()

    for verb, act in VERBS.items():
        assert not await act(a, old), verb
        assert await crew.dump() == before, verb


# -- exercise: decorrelated jitter and a total deadline ---------------------------------------------------------------------


async def test_decorrelated_delays_are_kept_and_end_at_the_total_deadline(crew: Crew) -> None:
    """JOB-24 through the database: the previous delay comes back with each claim; JOB-26: no attempt past the deadline."""
    policy = Retry(base_seconds=1, cap_seconds=20, jitter="decorrelated")
    run_id = await crew.runs.accept(max_attempts=1000, deadline=timedelta(seconds=30))
    hand = await crew.hand()
    elapsed, delays, outcome = 0.0, list[float](), None
    while outcome is None or outcome.state == "queued":
        (claim,) = await hand.claims()
        delays.append(policy.delay(claim.attempt - 1, claim.retry_delay_seconds, random=lambda: 0.5))
        outcome = await hand.settle(claim.key, delay_seconds=delays[-1])
        # The delay passes: everything that lies ahead comes nearer.
        await crew.database.execute(
            "UPDATE fencepost.jobs SET available_at = available_at - $1::interval, deadline_at = deadline_at - $1::interval",
            timedelta(seconds=delays[-1]),
        )
        elapsed += delays[-1]

    assert delays == [2, 3.5, 5.75, 9.125, 14.1875]
    assert elapsed - delays[-1] < 30 < elapsed
    assert outcome == Settled(state="dead", reason="deadline_exceeded")
    assert await crew.runs.state(run_id) == ("failed", "dead")
    assert await crew.database.fetchval("SELECT error_code FROM fencepost.runs") == "deadline_exceeded"
