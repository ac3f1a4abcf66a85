"""Runs against their contract: whatever is called in whatever order, the database answers as the model does.

Three parts, all on a real PostgreSQL: a machine of calls that Hypothesis makes up and minimises, with handles that are kept
for ever; broken statements, each of which the machine must catch; and workers that call at once.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import asyncpg
import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, invariant, multiple, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from uuid_utils.compat import uuid7

from producer_sdk import Secrets
from tests.support.runs_database import STATEMENTS, Calls, prepare
from tests.support.runs_model import HOUR, Handle, Model, Proposal

TENANTS: Final = ("acme", "zeta")
WORKERS: Final = ("w1", "w2")
WORKFLOWS: Final = ("report", "send")
# With more runs, calls would meet less often.
MAX_RUNS: Final = 5
# The phases of a rotation in which each process knows what any other wrote.
PHASES: Final = (
    Secrets({1: b"a" * 32}, write=[1]),
    Secrets({1: b"a" * 32, 2: b"b" * 32}, write=[1]),
    Secrets({1: b"a" * 32, 2: b"b" * 32}, write=[1, 2]),
)
SETTINGS: Final = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    database=None,
    print_blob=True,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


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


workers = st.sampled_from(WORKERS)
tenants = st.sampled_from(TENANTS)
leases = st.sampled_from([1 * HOUR, 4 * HOUR])
checkpoints = st.sampled_from([None, b"c1", b"c2"])
costs = st.sampled_from([None, 1.0])


class Machine(RuleBasedStateMachine):
    """Each rule asks the model and the database, and wants one answer."""

    runs = Bundle("runs")
    handles = Bundle("handles")

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self.bench = bench
        self.model = Model()
        self.bench.run(bench.calls.empty())
        self.kept: dict[str, list[Handle]] = {worker: [] for worker in WORKERS}

    def both(self, verb: str, *arguments: Any, **options: Any) -> Any:
        """The answer of both."""
        self.model.tick()
        predicted = getattr(self.model, verb)(*arguments, **options)
        answer = self.bench.run(getattr(self.bench.calls, verb)(*arguments, **options))
        assert answer == predicted, f"{verb} answered {answer}, not {predicted}"
        return answer

    def under_lease(self, verb: str, handles: list[Handle], **options: Any) -> None:
        """A call that names leases: it does nothing at all where none of them is held."""
        before = self.bench.run(self.bench.calls.everything())
        if not self.both(verb, handles, **options):
            assert self.bench.run(self.bench.calls.everything()) == before, f"{verb} changed a row without a lease"

    # Producers.

    @precondition(lambda self: len(self.model.runs) < MAX_RUNS)
    @rule(
        target=runs, tenant=tenants, workflow=st.sampled_from(WORKFLOWS), key=st.sampled_from([None, "k1", "k2"]),
        request=st.sampled_from(["a", "a", "b"]), delay=st.sampled_from([0, 0, 0, 2 * HOUR]), max_attempts=st.integers(1, 3),
        deadline=st.sampled_from([None, None, 5 * HOUR]), cost_limit=st.sampled_from([None, None, 2]),
        secrets=st.sampled_from(PHASES), retention=st.sampled_from([24 * HOUR, 2 * HOUR]),
    )  # fmt: skip
    def accept(
        self, tenant: str, workflow: str, key: str | None, request: str, delay: float, max_attempts: int, deadline: float | None,
        cost_limit: float | None, secrets: Secrets, retention: float,
    ) -> Any:  # fmt: skip
        proposal = Proposal(
            run_id=uuid7(), tenant_id=tenant, workflow=workflow, request=request, delay=delay, max_attempts=max_attempts,
            deadline=deadline, cost_limit=cost_limit,
        )  # fmt: skip
        outcome, run_id = self.both("accept", proposal, key, secrets=secrets, retention=retention)
        return run_id if outcome == "created" else multiple()

    @rule(run_id=runs, stranger=st.sampled_from([False, False, False, True]), version=st.sampled_from([None, 0, 1]))
    def cancel(self, run_id: Any, stranger: bool, version: int | None) -> None:
        """``version``: not said, right, or one too high."""
        run = self.model.runs[run_id]
        tenant = "nobody" if stranger else run.tenant_id
        self.both("cancel", tenant, run_id, None if version is None else run.version + version)

    # Workers.

    @rule(
        target=handles, worker=workers, workflows=st.sampled_from([WORKFLOWS, WORKFLOWS[:1]]), limit=st.sampled_from([1, 2, 100]),
        lease=leases, attempt_limit=st.sampled_from([None, None, 3 * HOUR]), last_tenant=st.sampled_from(["", *TENANTS]),
    )  # fmt: skip
    def claim(
        self, worker: str, workflows: tuple[str, ...], limit: int, lease: float, attempt_limit: float | None, last_tenant: str
    ) -> MultipleResults[Handle]:
        self.model.tick()
        terms: dict[str, Any] = {"workflows": workflows, "limit": limit, "lease": lease, "attempt_limit": attempt_limit}
        answer = self.bench.run(self.bench.calls.claim(worker, last_tenant=last_tenant, **terms))
        assert answer == self.model.claim(worker, [handle.run_id for handle in answer], **terms)
        self.kept[worker] += answer
        return multiple(*answer)

    @rule(handle=handles, lease=leases, checkpoint=checkpoints)
    def renew(self, handle: Handle, lease: float, checkpoint: bytes | None) -> None:
        self.under_lease("renew", [handle], lease=lease, checkpoint=checkpoint)

    @rule(handle=handles, cost=costs)
    def complete(self, handle: Handle, cost: float | None) -> None:
        self.under_lease("complete", [handle], output=b"{}", cost=cost)

    @rule(handle=handles, delay=st.sampled_from([0, 0, 1 * HOUR, 9 * HOUR]), cost=costs, checkpoint=checkpoints)
    def fail(self, handle: Handle, delay: float, cost: float | None, checkpoint: bytes | None) -> None:
        self.under_lease("fail", [handle], delay=delay, reason=None, error_code="e1", cost=cost, checkpoint=checkpoint)

    @rule(handle=handles, reason=st.sampled_from([None, "gave_up"]))
    def fail_for_good(self, handle: Handle, reason: str | None) -> None:
        self.under_lease("fail", [handle], delay=None, reason=reason, error_code="e2", cost=None, checkpoint=None)

    @rule(handle=handles, checkpoint=checkpoints)
    def release(self, handle: Handle, checkpoint: bytes | None) -> None:
        self.under_lease("release", [handle], checkpoint=checkpoint)

    @rule(handle=handles)
    def append(self, handle: Handle) -> None:
        before = self.bench.run(self.bench.calls.everything())
        if self.both("append", handle, "workflow.step") is None:
            assert self.bench.run(self.bench.calls.everything()) == before

    @rule(handle=handles)
    def ask_how_it_stands(self, handle: Handle) -> None:
        self.both("standing", handle)

    @precondition(lambda self: any(self.kept.values()))
    @rule(worker=workers, verb=st.sampled_from(["renew", "complete", "fail", "release"]), newest_first=st.booleans())
    def all_at_once(self, worker: str, verb: str, newest_first: bool) -> None:
        """Every handle that a worker ever got, in one call: of each job one at most is held."""
        options: dict[str, dict[str, Any]] = {
            "renew": {"lease": 1 * HOUR, "checkpoint": b"c3"},
            "complete": {"output": b"[]", "cost": None},
            "fail": {"delay": 0, "reason": None, "error_code": "e3", "cost": None, "checkpoint": None},
            "release": {"checkpoint": None},
        }
        if self.kept[worker]:
            self.under_lease(verb, self.kept[worker][:: -1 if newest_first else 1], **options[verb])

    # Upkeep, operators, time.

    @rule()
    def reap(self) -> None:
        self.both("reap")

    @rule()
    def expire_keys(self) -> None:
        self.both("expire_keys")

    @precondition(lambda self: any(run.state == "failed" for run in self.model.runs.values()))
    @rule(target=runs, run_id=runs, limit=st.sampled_from([1, 3]), retention=st.sampled_from([20 * HOUR, 1000 * HOUR]))
    def replay(self, run_id: Any, limit: int, retention: float) -> Any:
        tenant = self.model.runs[run_id].tenant_id
        outcome, new_id = self.both("replay", tenant, run_id, uuid7(), limit=limit, retention=retention)
        return new_id if outcome == "replayed" else multiple()

    @rule(hours=st.sampled_from([2, 4, 30]))
    def pass_time(self, hours: int) -> None:
        self.both("pass_time", hours * HOUR)

    @rule(run_id=runs)
    def expire_lease(self, run_id: Any) -> None:
        if self.model.runs[run_id].job == "leased":
            self.both("expire_lease", run_id)

    # What must hold after every one of them.

    @invariant()
    def everything_stands_as_the_model_says(self) -> None:
        assert self.bench.run(self.bench.calls.seen()) == {
            run_id: run.seen(self.model.now) for run_id, run in self.model.runs.items()
        }
        assert self.bench.run(self.bench.calls.key_rows()) == self.model.key_rows()
        assert self.bench.run(self.bench.calls.violations()) == []


def drive(bench: Bench, how: settings) -> None:
    factory: Any = lambda: Machine(bench)  # noqa: E731 - Hypothesis reads where it is written
    run_machine(factory, settings=how)


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
    drive(bench, SETTINGS)
