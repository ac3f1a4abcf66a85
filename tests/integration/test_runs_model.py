"""Runs against their contract: whatever is called in whatever order, the database answers as the model does.

Three parts, all on a real PostgreSQL: a machine of calls that Hypothesis makes up and minimises, with handles that are kept
for ever; broken statements, each of which the machine must catch; and workers that call at once.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from uuid import UUID

import asyncpg
import psycopg
import pytest
from hypothesis import HealthCheck, Phase, currently_in_test_context, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from uuid_utils.compat import uuid7

from fencepost.errors import FencepostError
from producer_sdk import Secrets
from tests.support.runs_crowd import Caller, Record
from tests.support.runs_database import STATEMENTS, Calls, prepare
from tests.support.runs_model import HOUR, Handle, Model, Proposal, Run, Seen

TENANTS: Final = ("acme", "zeta")
WORKERS: Final = ("w1", "w2")
WORKFLOWS: Final = ("report", "send")
# With more runs alive, calls would meet less often.
MAX_ALIVE: Final = 3
# The phases of a rotation in which each process knows what any other wrote.
PHASES: Final = (
    Secrets({1: b"a" * 32}, write=[1]),
    Secrets({1: b"a" * 32, 2: b"b" * 32}, write=[1]),
    Secrets({1: b"a" * 32, 2: b"b" * 32}, write=[1, 2]),
)
SETTINGS: Final = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    database=None,
    print_blob=True,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)

Item = TypeVar("Item")


class Bench:
    """The calls of a test on one database, from code that is not asynchronous. One database for all examples of a test."""

    def __init__(self, url: str, statements: Mapping[str, str] = STATEMENTS) -> None:
        self._runner = asyncio.Runner()
        self._runner.run(prepare(url))
        self.calls = self._runner.run(Calls.open(url, workers=WORKERS, statements=statements))

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(call)

    def close(self) -> None:
        self.run(self.calls.close())
        self._runner.close()


turns = st.integers(0, 11)
workers = st.sampled_from(WORKERS)
leases = st.sampled_from([4 * HOUR, 4 * HOUR, 1 * HOUR])
checkpoints = st.sampled_from([None, b"c1", b"c2"])
costs = st.sampled_from([None, 1.0])
# Two in three of the calls under a lease are by who holds one, the others by anyone who ever did.
stale = st.sampled_from([False, False, True])

ALL_AT_ONCE: Final[dict[str, dict[str, Any]]] = {
    "renew": {"lease": 4 * HOUR, "checkpoint": b"c3"},
    "complete": {"output": b"[]", "cost": None},
    "fail": {"delay": 0, "reason": None, "error_code": "e3", "cost": None, "checkpoint": None},
    "release": {"checkpoint": None},
}


class Machine(RuleBasedStateMachine):
    """Each rule asks the model and the database, and wants one answer. ``turn`` picks among what there is."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self.bench = bench
        self.model = Model()
        self.handles: list[Handle] = []
        self.bench.run(bench.calls.empty())

    def both(self, verb: str, *arguments: Any, **options: Any) -> Any:
        """The answer of both."""
        self.model.tick()
        predicted = getattr(self.model, verb)(*arguments, **options)
        answer = self.bench.run(getattr(self.bench.calls, verb)(*arguments, **options))
        say(f"{verb} {arguments}: {answer}")
        assert answer == predicted, f"{verb} answered {answer}, not {predicted}"
        return answer

    def under_lease(self, verb: str, handles: list[Handle], **options: Any) -> None:
        """A call that names leases: it does nothing at all where none of them is held."""
        before = self.bench.run(self.bench.calls.everything())
        if not self.both(verb, handles, **options):
            assert self.bench.run(self.bench.calls.everything()) == before, f"{verb} changed a row without a lease"

    def alive(self) -> list[Run]:
        return [run for run in self.model.runs.values() if run.job in ("queued", "leased")]

    def handle(self, turn: int, stale: bool) -> Handle:
        """A lease that is held, taken now if there is none; or any that ever was."""
        if stale and self.handles:
            return pick(turn, self.handles)
        if not self.held():
            self.claim_all(pick(turn, WORKERS))
        if not self.held():
            self.begin(key=None)
            self.claim_all(pick(turn, WORKERS))
        return pick(turn, self.held())

    def held(self) -> list[Handle]:
        return [handle for handle in self.handles if self.model.holds(handle)]

    # Producers.

    @initialize(tenant=st.sampled_from(TENANTS), max_attempts=st.integers(1, 2))
    def begin(self, tenant: str = "acme", max_attempts: int = 2, key: str | None = "k1") -> None:
        """So that every example has a run."""
        self.propose(key, PHASES[0], 24 * HOUR, tenant_id=tenant, workflow="report", request="a", max_attempts=max_attempts)

    @precondition(lambda self: len(self.alive()) < MAX_ALIVE)
    @rule(
        tenant=st.sampled_from(TENANTS), workflow=st.sampled_from(WORKFLOWS), key=st.sampled_from([None, None, "k1", "k2"]),
        request=st.sampled_from(["a", "a", "b"]), delay=st.sampled_from([0, 0, 0, 2 * HOUR]), max_attempts=st.integers(1, 2),
        deadline=st.sampled_from([None, None, 1 * HOUR]), cost_limit=st.sampled_from([None, None, 2]),
        secrets=st.sampled_from(PHASES), retention=st.sampled_from([24 * HOUR, 1 * HOUR]),
    )  # fmt: skip
    def accept(
        self, tenant: str = "acme", workflow: str = "report", key: str | None = None, request: str = "a", delay: float = 0,
        max_attempts: int = 2, deadline: float | None = None, cost_limit: float | None = None, secrets: Secrets = PHASES[0],
        retention: float = 24 * HOUR,
    ) -> None:  # fmt: skip
        self.propose(
            key, secrets, retention, tenant_id=tenant, workflow=workflow, request=request, delay=delay, max_attempts=max_attempts,
            deadline=deadline, cost_limit=cost_limit,
        )  # fmt: skip

    def propose(self, key: str | None, secrets: Secrets, retention: float, **command: Any) -> None:
        self.both("accept", Proposal(run_id=uuid7(), **command), key, secrets=secrets, retention=retention)

    @rule(turn=turns, ended=st.sampled_from([False, False, False, True]), version=st.sampled_from([None, None, 0, 1]))
    def cancel(self, turn: int = 0, ended: bool = False, version: int | None = None) -> None:
        """``version``: not said, right, or one too high."""
        run = pick(turn, list(self.model.runs.values()) if ended else self.alive() or list(self.model.runs.values()))
        self.both("cancel", run.tenant_id, run.run_id, None if version is None else run.version + version)

    @rule(turn=turns)
    def cancel_as_another_tenant(self, turn: int) -> None:
        self.both("cancel", "nobody", pick(turn, list(self.model.runs)), None)

    # Workers.

    @precondition(lambda self: bool(self.alive()))
    @rule(
        worker=workers, workflows=st.sampled_from([WORKFLOWS, WORKFLOWS[:1]]), limit=st.sampled_from([1, 2, 100]),
        lease=leases, attempt_limit=st.sampled_from([None, 1 * HOUR]), last_tenant=st.sampled_from(["", *TENANTS]),
    )  # fmt: skip
    def claim(
        self, worker: str = "w1", workflows: Sequence[str] = WORKFLOWS, limit: int = 100, lease: float = 4 * HOUR,
        attempt_limit: float | None = None, last_tenant: str = "",
    ) -> None:  # fmt: skip
        terms: dict[str, Any] = {"workflows": workflows, "limit": limit, "lease": lease, "attempt_limit": attempt_limit}
        self.model.tick()
        answer = self.bench.run(self.bench.calls.claim(worker, last_tenant=last_tenant, **terms))
        say(f"claim: {answer}")
        assert answer == self.model.claim(worker, [handle.run_id for handle in answer], **terms)
        self.handles += answer

    # As rules of their own, because Hypothesis leaves any rule out of an example with some probability, and one without claims
    # would be dull.
    @precondition(lambda self: bool(self.alive()))
    @rule(worker=workers, attempt_limit=st.sampled_from([None, 1 * HOUR]))
    def claim_all(self, worker: str = "w1", attempt_limit: float | None = None) -> None:
        self.claim(worker, attempt_limit=attempt_limit)

    @precondition(lambda self: bool(self.alive()))
    @rule(worker=workers, last_tenant=st.sampled_from(["", *TENANTS]))
    def claim_one(self, worker: str = "w1", last_tenant: str = "") -> None:
        self.claim(worker, limit=1, last_tenant=last_tenant)

    @rule(turn=turns, stale=stale, lease=leases, checkpoint=checkpoints)
    def renew(self, turn: int = 0, stale: bool = False, lease: float = 4 * HOUR, checkpoint: bytes | None = None) -> None:
        self.under_lease("renew", [self.handle(turn, stale)], lease=lease, checkpoint=checkpoint)

    @rule(turn=turns, stale=stale, cost=costs)
    def complete(self, turn: int = 0, stale: bool = False, cost: float | None = None) -> None:
        self.under_lease("complete", [self.handle(turn, stale)], output=b"{}", cost=cost)

    @rule(turn=turns, stale=stale)
    def complete_with_effect(self, turn: int = 0, stale: bool = False) -> None:
        self.under_lease("complete_with_effect", [self.handle(turn, stale)])

    @rule(turn=turns, stale=stale, delay=st.sampled_from([0, 0, 1 * HOUR, 9 * HOUR]), cost=costs, checkpoint=checkpoints)
    def fail(
        self, turn: int = 0, stale: bool = False, delay: float = 0, cost: float | None = None, checkpoint: bytes | None = None
    ) -> None:
        options = {"reason": None, "error_code": "e1", "cost": cost, "checkpoint": checkpoint}
        self.under_lease("fail", [self.handle(turn, stale)], delay=delay, **options)

    @rule(turn=turns, stale=stale, reason=st.sampled_from([None, "gave_up"]))
    def fail_for_good(self, turn: int = 0, stale: bool = False, reason: str | None = None) -> None:
        options = {"error_code": "e2", "cost": None, "checkpoint": None}
        self.under_lease("fail", [self.handle(turn, stale)], delay=None, reason=reason, **options)

    @rule(turn=turns, stale=stale, checkpoint=checkpoints)
    def release(self, turn: int = 0, stale: bool = False, checkpoint: bytes | None = None) -> None:
        self.under_lease("release", [self.handle(turn, stale)], checkpoint=checkpoint)

    @rule(turn=turns, stale=stale)
    def append(self, turn: int = 0, stale: bool = False) -> None:
        self.under_lease("append", [self.handle(turn, stale)], event_type="workflow.step")

    @precondition(lambda self: bool(self.handles))
    @rule(turn=turns, worker=workers)
    def forge(self, turn: int = 0, worker: str = "w1") -> None:
        """A handle that was never given out: another worker's, under a name of its own."""
        forged = pick(turn, self.handles)._replace(worker=worker)
        if forged not in self.handles:
            self.handles.append(forged)

    @precondition(lambda self: bool(self.handles))
    @rule(turn=turns)
    def ask_how_it_stands(self, turn: int) -> None:
        self.both("standing", pick(turn, self.handles))

    @precondition(lambda self: bool(self.handles))
    @rule(worker=workers, verb=st.sampled_from(sorted(ALL_AT_ONCE)), newest_first=st.booleans())
    def all_at_once(self, worker: str, verb: str, newest_first: bool) -> None:
        """Every handle that a worker ever got, in one call: of each job one at most is held."""
        mine = [handle for handle in self.handles if handle.worker == worker]
        if mine:
            self.under_lease(verb, mine[::-1] if newest_first else mine, **ALL_AT_ONCE[verb])

    # Upkeep, operators, time.

    @precondition(lambda self: bool(self.alive()))
    @rule()
    def reap(self) -> None:
        self.both("reap")

    @precondition(lambda self: bool(self.model.due_keys()))
    @rule()
    def expire_keys(self) -> None:
        self.both("expire_keys")

    @precondition(lambda self: any(run.job == "dead" for run in self.model.runs.values()))
    @rule(turn=turns, dead=st.booleans(), limit=st.sampled_from([1, 3]), retention=st.sampled_from([20 * HOUR, 1000 * HOUR]))
    def replay(self, turn: int = 0, dead: bool = True, limit: int = 3, retention: float = 1000 * HOUR) -> None:
        run = pick(turn, [run for run in self.model.runs.values() if run.job == "dead" or not dead])
        self.both("replay", run.tenant_id, run.run_id, uuid7(), limit=limit, retention=retention)

    @precondition(lambda self: bool(self.alive()))
    @rule(hours=st.sampled_from([2, 2, 2, 30]))
    def pass_time(self, hours: int = 2) -> None:
        self.both("pass_time", hours * HOUR)

    @precondition(lambda self: any(run.job == "leased" for run in self.model.runs.values()))
    @rule(turn=turns)
    def expire_lease(self, turn: int = 0) -> None:
        self.both("expire_lease", pick(turn, [run.run_id for run in self.alive() if run.job == "leased"]))

    # What must hold after every one of them.

    @invariant()
    def everything_stands_as_the_model_says(self) -> None:
        assert self.bench.run(self.bench.calls.seen()) == {
            run_id: run.seen(self.model.now) for run_id, run in self.model.runs.items()
        }
        assert self.bench.run(self.bench.calls.key_rows()) == self.model.key_rows()
        assert self.bench.run(self.bench.calls.violations()) == []


def say(text: str) -> None:
    """To be read above the failure, which names no run."""
    if currently_in_test_context():
        note(f"    {text}")


def pick(turn: int, among: Sequence[Item]) -> Item:
    return among[turn % len(among)]


OpenBench = Callable[..., Bench]


@pytest.fixture
def open_bench(database_url: str) -> Iterator[OpenBench]:
    """Opens the bench of the test, with the right statements or with others."""
    opened: list[Bench] = []

    def open_one(statements: Mapping[str, str] = STATEMENTS) -> Bench:
        opened.append(Bench(database_url, statements))
        return opened[-1]

    yield open_one
    for bench in opened:
        bench.close()


def test_whatever_is_called_the_runs_stand_as_the_contract_says(open_bench: OpenBench) -> None:
    """JOB-5, JOB-6, JOB-7, JOB-10, JOB-18, JOB-21, KEY-10, KEY-18, J20 to J40: and a stale handle changes nothing, ever."""
    bench = open_bench()
    factory: Any = lambda: Machine(bench)  # noqa: E731 - Hypothesis reads the source of a lambda, and of no partial
    run_state_machine_as_test(factory, settings=SETTINGS)


def test_a_crowd_is_shared_by_its_tenants(open_bench: OpenBench) -> None:
    """J64: each tenant has its share of a claim, also of one that cannot be divided; the model judges."""
    machine = Machine(open_bench())
    for tenant in ("acme", "beta", "zeta") * 3:
        machine.accept(tenant=tenant)

    for limit in (4, 2, 3):
        machine.claim(limit=limit)


# -- broken statements, and the calls by which the machine finds each out --------------------------------------------------

Call = tuple[str, dict[str, Any]]


def call(verb: str, **arguments: Any) -> Call:
    return verb, arguments


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A wrong statement of the worker, or a wrong function of the database: ``right``, wherever it stands, became ``wrong``."""

    name: str
    right: str
    wrong: str = ""
    calls: Sequence[Call]

    def statements(self, url: str) -> Mapping[str, str]:
        """The worker's statements, with this one broken; or with the database's function broken, in this database only."""
        if self.name in STATEMENTS:
            return {**STATEMENTS, self.name: self._broken(STATEMENTS[self.name])}
        with psycopg.connect(url, autocommit=True) as connection:
            found = connection.execute("SELECT pg_get_functiondef(%s::regproc)", [f"fencepost.{self.name}"]).fetchone()
            assert found is not None
            connection.execute(self._broken(found[0]).encode())
        return STATEMENTS

    def _broken(self, text: str) -> str:
        assert self.right in text, f"{self.name} has changed: so must this broken model of it"
        return text.replace(self.right, self.wrong)


BEGIN: Final = call("begin", max_attempts=2)
CLAIM: Final = call("claim_all")
EXPIRE: Final = call("expire_lease")
BROKEN: Final = {
    "a completion under any generation": Broken(
        name="complete", right="j.lease_generation = h.generation", wrong="true",
        calls=[BEGIN, CLAIM, EXPIRE, CLAIM, call("complete", stale=True)],
    ),
    "a completion by anyone": Broken(
        name="complete", right="j.lease_owner = $1", wrong="$1::text IS NOT NULL",
        calls=[BEGIN, CLAIM, call("forge", worker="w2"), call("complete", turn=1, stale=True)],
    ),
    "a completion of what is being cancelled": Broken(
        name="complete", right="j.cancel_requested_at IS NULL", wrong="true",
        calls=[BEGIN, CLAIM, call("cancel"), call("complete")],
    ),
    "a renewal of an expired lease": Broken(
        name="renew", right="j.lease_expires_at > clock_timestamp()", wrong="true",
        calls=[BEGIN, CLAIM, EXPIRE, call("renew", stale=True)],
    ),
    "a renewal past the attempt's deadline": Broken(
        name="renew", right="(j.attempt_deadline_at > clock_timestamp()) IS NOT FALSE", wrong="true",
        calls=[BEGIN, call("claim_all", attempt_limit=1 * HOUR), call("pass_time"), call("renew")],
    ),
    "a claim of spent jobs": Broken(
        name="claim", right="j.attempts < j.max_attempts", wrong="true", calls=[BEGIN, CLAIM, EXPIRE, CLAIM, EXPIRE, CLAIM],
    ),
    "a claim that leaves the lost attempt open": Broken(
        name="claim", right="a.finished_at IS NULL", wrong="false", calls=[BEGIN, CLAIM, EXPIRE, CLAIM],
    ),
    "a claim of what nobody may attempt any more": Broken(
        name="claim", right="j.cancel_requested_at IS NULL", wrong="true",
        calls=[BEGIN, CLAIM, call("cancel"), EXPIRE, CLAIM],
    ),
    "a failure without the run's event": Broken(
        name="fail", right="FROM ended AS e", wrong="FROM ended AS e WHERE false", calls=[BEGIN, call("fail_for_good")],
    ),
    "a failure that forgets its attempt": Broken(
        name="fail", right="FROM finished AS f WHERE a.run_id", wrong="FROM finished AS f WHERE false AND a.run_id",
        calls=[BEGIN, call("fail")],
    ),
    "a release that counts": Broken(
        name="release", right="attempts = j.attempts - 1", wrong="attempts = j.attempts", calls=[BEGIN, call("release")],
    ),
    "a reaper that forgets cancellations": Broken(
        name="reap", right="WHEN j.cancel_requested_at IS NOT NULL THEN 'cancelled'",
        calls=[BEGIN, CLAIM, call("cancel"), EXPIRE, call("reap")],
    ),
    "an event under an expired lease": Broken(
        name="append_event", right="h.lease_expires_at > clock_timestamp()", wrong="true",
        calls=[BEGIN, CLAIM, EXPIRE, call("append", stale=True)],
    ),
    "a cancellation of any version": Broken(
        name="cancel_run", right="expected_version <> run.version", wrong="false", calls=[BEGIN, call("cancel", version=1)],
    ),
    "a key that is forgotten when it expires": Broken(
        name="accept", right="IF FOUND AND key.expired THEN", wrong="IF FOUND AND false THEN",
        calls=[BEGIN, call("pass_time", hours=30), call("accept", key="k1")],
    ),
    "a replay of what was replayed": Broken(
        name="replay_run", right="WHEN new_run_id IS NOT NULL THEN", wrong="WHEN false THEN",
        calls=[BEGIN, call("fail_for_good"), call("replay"), call("replay")],
    ),
}  # fmt: skip


def play(machine: Machine, calls: Sequence[Call]) -> None:
    for verb, arguments in calls:
        getattr(machine, verb)(**arguments)
        machine.everything_stands_as_the_model_says()


@pytest.mark.parametrize("name", BROKEN)
def test_the_machine_finds_out(database_url: str, open_bench: OpenBench, name: str) -> None:
    """The models that must fail, each by a few calls and no luck; the right statements pass by the same calls."""
    broken = BROKEN[name]
    play(Machine(open_bench()), broken.calls)
    machine = Machine(open_bench(broken.statements(database_url)))

    with pytest.raises((AssertionError, asyncpg.PostgresError)):
        play(machine, broken.calls)


# -- workers that call at once ---------------------------------------------------------------------------------------------

CROWD: Final = tuple(f"w{number}" for number in range(6))
# Nobody locks a job that it claims: two have it at once.
UNLOCKED: Final = {**STATEMENTS, "claim": STATEMENTS["claim"].replace("FOR UPDATE SKIP LOCKED", "")}


async def call_at_once(url: str, *, calls_each: int, statements: Mapping[str, str] = STATEMENTS) -> None:
    """Everyone calls; then what they were told must be true together, and of the rows."""
    seed = random.getrandbits(32)
    print(f"seed {seed}")
    await prepare(url)
    everyone = [await Calls.open(url, workers=[name], statements=statements) for name in CROWD]
    record = Record()
    callers = [Caller(calls, name, seed, record) for calls, name in zip(everyone, CROWD, strict=True)]
    working = [asyncio.create_task(caller.work(calls_each)) for caller in callers]
    try:
        await asyncio.gather(*working)
        seen = await everyone[0].seen()
        assert await everyone[0].violations() == []
    finally:
        for work in working:
            work.cancel()
        await asyncio.wait(working)
        for calls in everyone:
            await calls.close()
    check(record, seen)


def check(record: Record, seen: Mapping[UUID, Seen]) -> None:
    ended = f"{len(record.ended_attempts)} attempts and {len(record.ended_runs)} runs ended"
    print(f"{len(seen)} runs, {len(record.handles)} claims, {ended}")
    assert most(record.created) == 1, "a key began two runs"
    assert most(record.handles) == 1, "a generation was given out twice"
    assert most([handle for handle, _ in record.ended_attempts]) == 1, "an attempt ended twice"
    assert most([run_id for run_id, _ in record.ended_runs]) == 1, "a run ended twice"
    assert most(record.appended) == 1, "a sequence was given twice"
    for handle, outcome in record.ended_attempts:
        assert seen[handle.run_id].outcomes[handle.generation - 1] == outcome
    for run_id, job in record.ended_runs:
        assert seen[run_id].job == job
    for run_id, run in seen.items():
        assert run.effects == (run.output == b"effect"), f"{run_id} has {run.effects} effects"
    assert sum(run.generation for run in seen.values()) == len(record.handles), "a claim was told to nobody"


def most(told: Sequence[Hashable]) -> int:
    """How often the most frequent one was told."""
    return max(Counter(told).values())


@pytest.mark.parametrize("_", range(2))
async def test_workers_at_once_end_each_attempt_and_each_run_once(database_url: str, _: int) -> None:
    """JOB-6, JOB-18, JOB-19, KEY-16, J40: whoever comes first, one answer is true for all, and no call deadlocks."""
    await call_at_once(database_url, calls_each=300)


async def test_a_claim_that_locks_nothing_is_found_out(database_url: str) -> None:
    """The model that must fail, by as many calls as it takes and more."""
    with pytest.raises((AssertionError, asyncpg.PostgresError, FencepostError)):
        await call_at_once(database_url, calls_each=1000, statements=UNLOCKED)
