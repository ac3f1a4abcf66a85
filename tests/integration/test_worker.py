"""The worker in this process, on a real PostgreSQL: what its handlers see, what it writes, and what it never does.

Handlers wait for events that the test sets; time passes by moving rows.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from datetime import timedelta
from decimal import Decimal
from functools import partial
from json import loads
from typing import Any, Final
from uuid import UUID

import asyncpg
import httpx
import pytest
from pydantic import BaseModel, field_validator
from structlog.testing import capture_logs

from consumer_sdk import lease_keeping
from consumer_sdk.classification import Ambiguous, Retryable, Terminal
from consumer_sdk.context import RunContext
from consumer_sdk.encoding import MAX_OUTPUT_BYTES
from consumer_sdk.handlers import Handlers
from consumer_sdk.worker import Worker
from consumer_sdk.worker_settings import load_worker_settings
from fencepost.devservices import Services
from fencepost.errors import ConfigurationError, InvalidCommand, LeaseLost, TransactionRequired
from fencepost.retry import Retry
from tests.support.emptied import emptied
from tests.support.runs import Runs
from tests.support.session import SharedServices
from tests.support.waiting import eventually

WORKFLOW: Final = "report"
SOON: Final = Retry(base_seconds=0.05, cap_seconds=0.05, jitter="none")
END_SECONDS: Final = 10.0
QUICK: Final = {"worker_http_port": 0, "worker_poll_interval_ms": 50, "worker_stop_grace_seconds": 1}
#: Longer than any test: whoever waits for it fails.
LONG_POLL: Final = {"worker_poll_interval_ms": 60_000}
IN_TRANSACTION: Final = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'fencepost%'
  AND (state LIKE 'idle in transaction%' OR backend_xmin IS NOT NULL)
"""

FLOOD: Final = """
SELECT fencepost.accept('a', gen_random_uuid(), $1, 1, 'runs', '{}', '0', 3, NULL, NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL)
"""


class Shop:
    """A database, a connection that looks at it, and workers."""

    def __init__(self, database_url: str, connection: "asyncpg.Connection[Any]") -> None:
        self.database_url = database_url
        self.connection = connection
        self.runs = Runs(connection, workflow=WORKFLOW)
        self._running: dict[Worker, asyncio.Task[None]] = {}

    async def start(self, handlers: Handlers, **settings: object) -> Worker:
        """A worker that looks for jobs every 50 ms and stops quickly, unless told otherwise; returned when it is ready."""
        chosen = QUICK | {"database_url": self.database_url} | settings
        worker = Worker(handlers, load_worker_settings(chosen))
        task = self._running[worker] = asyncio.create_task(worker.run())
        await eventually(lambda: task.done() or not worker._problems, message="the worker is ready")
        return worker

    async def stop(self, worker: Worker) -> None:
        """Stop in order; raises what the worker raises."""
        worker.stop()
        async with asyncio.timeout(END_SECONDS):
            await self._running.pop(worker)

    def has_ended(self, worker: Worker) -> bool:
        """Whether the worker ended by itself."""
        return self._running[worker].done()

    def has_ended_some(self, worker: Worker, attempts: int) -> bool:
        """Whether so many attempts have ended, or the worker has."""
        return self.has_ended(worker) or sum(outcomes(worker).values()) >= attempts

    async def close(self) -> None:
        for worker in list(self._running):
            with contextlib.suppress(Exception):
                await self.stop(worker)

    async def reaches(self, run_id: UUID, state: str) -> None:
        """Wait for the run's state."""

        async def reached() -> bool:
            return (await self.runs.state(run_id))[0] == state

        await eventually(reached, message=f"the run is {state}")

    async def job(self, run_id: UUID) -> Mapping[str, Any]:
        row = await self.connection.fetchrow("SELECT * FROM fencepost.jobs WHERE run_id = $1", run_id)
        assert row is not None
        return dict(row)

    async def run(self, run_id: UUID) -> Mapping[str, Any]:
        row = await self.connection.fetchrow("SELECT * FROM fencepost.runs WHERE run_id = $1", run_id)
        assert row is not None
        return dict(row)


@pytest.fixture(scope="module")
def shop_url(services: Services, shared_services: SharedServices) -> Iterator[str]:
    """The module's database."""
    url = services.create_database(shared_services.template_url)
    yield url
    services.drop_database(url)


@pytest.fixture
async def shop(shop_url: str) -> AsyncIterator[Shop]:
    connection = await emptied(shop_url)
    shop = Shop(shop_url, connection)
    yield shop
    await shop.close()
    await connection.close()


class Barrier:
    """A handler that waits: ``reached`` tells that it does, ``leave`` lets it go on."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.leave = asyncio.Event()
        self.cancelled = 0
        self.contexts: list[RunContext] = []

    async def wait(self, context: RunContext) -> None:
        self.contexts.append(context)
        self.reached.set()
        try:
            await self.leave.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def arrived(self) -> RunContext:
        async with asyncio.timeout(END_SECONDS):
            await self.reached.wait()
        return self.contexts[-1]


def handled(function: Callable[[RunContext, Any], Any], workflow: str = WORKFLOW, **options: Any) -> Handlers:
    """Handlers with one handler, that retries soon."""
    handlers = Handlers()
    handlers.handler(workflow, **({"retry": SOON} | options))(function)
    return handlers


def sample(worker: Worker, name: str, **labels: str) -> float:
    return worker._metrics.registry.get_sample_value(name, labels) or 0.0


def outcomes(worker: Worker) -> dict[str, float]:
    """Attempts by outcome, those that happened."""
    names = ("completed", "retried", "dead", "cancelled", "released", "lost")
    found = {name: sample(worker, "fencepost_attempts_total", workflow=WORKFLOW, outcome=name) for name in names}
    return {name: count for name, count in found.items() if count}


# -- what is executed -----------------------------------------------------------------------------------------------------


async def test_a_run_is_executed_and_keeps_its_output(shop: Shop) -> None:
    """JOB-4."""

    async def report(context: RunContext, value: Any) -> object:
        return {"of": value["of"], "attempt": context.attempt, "token": context.fencing_token, "tenant": context.tenant_id}

    worker = await shop.start(handled(report))
    run = await shop.runs.accept(data=b'{"of": "may"}')
    await shop.reaches(run, "completed")

    row = await shop.run(run)
    assert loads(row["output"]) == {"of": "may", "attempt": 1, "token": 1, "tenant": "acme"}
    assert await shop.runs.events(run) == [(1, "run_queued"), (2, "run_completed")]
    (attempt,) = await shop.runs.attempts(run)
    assert attempt["outcome"] == "completed"
    assert attempt["worker"] == worker.worker_id
    assert attempt["claimed_at"] <= attempt["started_at"] <= attempt["finished_at"]
    await eventually(lambda: outcomes(worker) == {"completed": 1})


async def test_a_workflow_without_a_handler_is_left_alone(shop: Shop) -> None:
    async def report(_context: RunContext, _value: Any) -> None: ...

    await shop.start(handled(report))
    other = await shop.runs.accept(workflow="elsewhere")
    own = await shop.runs.accept()
    await shop.reaches(own, "completed")

    assert await shop.runs.state(other) == ("queued", "queued")
    assert (await shop.job(other))["lease_generation"] == 0


async def test_a_worker_without_handlers_does_not_start() -> None:
    with pytest.raises(ConfigurationError, match="no handlers"):
        Worker(Handlers(), load_worker_settings({"database_url": "postgresql://user@host/database"}))


async def test_no_more_attempts_run_at_once_than_the_bound(shop: Shop) -> None:
    active = most = 0
    gate = asyncio.Semaphore(0)

    async def report(_context: RunContext, _value: Any) -> None:
        nonlocal active, most
        active += 1
        most = max(most, active)
        await gate.acquire()
        active -= 1

    runs = [await shop.runs.accept() for _ in range(20)]
    worker = await shop.start(handled(report), worker_concurrency=3)
    await eventually(lambda: active == 3, message="three handlers run")
    leased = await shop.connection.fetchval("SELECT count(*) FROM fencepost.jobs WHERE state = 'leased'")
    assert leased == 3  # a worker does not hoard what it has no hands for
    for _ in runs:
        gate.release()
    await eventually(lambda: outcomes(worker) == {"completed": 20})

    assert most == 3


async def test_two_workers_call_each_handler_once(shop: Shop) -> None:
    """JOB-11."""
    called: Counter[UUID] = Counter()

    async def report(context: RunContext, _value: Any) -> None:
        called[context.run_id] += 1
        await asyncio.sleep(0)

    runs = [await shop.runs.accept(tenant=f"tenant-{number % 7}") for number in range(1000)]
    workers = [await shop.start(handled(report), worker_concurrency=20) for _ in range(2)]

    def all_done() -> bool:
        return sum(outcomes(worker).get("completed", 0) for worker in workers) == len(runs)

    await eventually(all_done, 30, message="all runs are completed")

    assert called == Counter(runs)
    assert all(outcomes(worker).keys() <= {"completed"} for worker in workers)
    ends = await shop.connection.fetch("SELECT count(*) FROM fencepost.run_events WHERE type = 'run_completed' GROUP BY run_id")
    assert [row["count"] for row in ends] == [1] * len(runs)


async def test_a_tenant_with_one_job_does_not_wait_behind_a_flood(shop: Shop) -> None:
    """JOB-36."""
    order: list[str] = []

    async def report(context: RunContext, _value: Any) -> None:
        order.append(context.tenant_id)

    await shop.connection.executemany(FLOOD, [(WORKFLOW,)] * 1_000)
    await shop.runs.accept(tenant="b")
    await shop.start(handled(report), worker_concurrency=10)
    await eventually(lambda: "b" in order, message="the small tenant's job ran")

    assert order.index("b") < 100


# -- transactions and leases ---------------------------------------------------------------------------------------------


async def test_no_transaction_spans_a_handler(shop: Shop) -> None:
    """JOB-14."""
    first, second = Barrier(), Barrier()

    async def report(context: RunContext, _value: Any) -> None:
        await first.wait(context)
        async with context.transaction() as connection:
            await connection.execute("SELECT 1")
        await context.save(1)
        await second.wait(context)

    worker = await shop.start(handled(report), worker_lease_seconds=3, worker_lease_margin_seconds=0.3)
    run = await shop.runs.accept()
    for barrier in (first, second):
        await barrier.arrived()
        renewals = sample(worker, "fencepost_worker_statement_seconds_count", statement="renew")
        for _ in range(20):
            await eventually(lambda: shop_is_idle(shop), message="no connection of the worker is in a transaction")
        await eventually(
            lambda before=renewals: sample(worker, "fencepost_worker_statement_seconds_count", statement="renew") > before  # type: ignore[misc]
        )
        barrier.leave.set()
    await shop.reaches(run, "completed")


async def shop_is_idle(shop: Shop) -> bool:
    return bool(await shop.connection.fetchval(IN_TRANSACTION) == 0)


async def test_a_long_handler_keeps_its_lease(shop: Shop) -> None:
    barrier = Barrier()

    async def report(context: RunContext, _value: Any) -> None:
        await barrier.wait(context)

    worker = await shop.start(handled(report), worker_lease_seconds=3, worker_lease_margin_seconds=0.3)
    run = await shop.runs.accept()
    context = await barrier.arrived()
    claimed_until = (await shop.job(run))["lease_expires_at"]

    async def outlived() -> bool:
        return bool(await shop.connection.fetchval("SELECT clock_timestamp() > $1::timestamptz + interval '0.5 s'", claimed_until))

    await eventually(outlived, message="the first lease would be over")
    assert context.trusted_seconds > 0
    barrier.leave.set()
    await shop.reaches(run, "completed")

    (attempt,) = await shop.runs.attempts(run)
    assert attempt["generation"] == 1
    assert attempt["renewed_at"] is not None
    assert outcomes(worker) == {"completed": 1}


async def test_a_holder_whose_lease_was_taken_is_cancelled_and_writes_nothing(shop: Shop) -> None:
    """JOB-8, JOB-33: the job is another worker's now."""
    barrier = Barrier()
    refused: list[str] = []

    async def report(context: RunContext, _value: Any) -> None:
        try:
            await barrier.wait(context)
        except asyncio.CancelledError:
            for verb in (lambda: context.save(9), lambda: context.event("late"), lambda: context.complete("stale")):
                try:
                    await verb()
                except LeaseLost:
                    refused.append("LeaseLost")
            with contextlib.suppress(LeaseLost):
                async with context.transaction() as connection:
                    await connection.execute("CREATE TABLE stale_wrote_this ()")
            raise

    worker = await shop.start(
        handled(report), worker_lease_seconds=1, worker_lease_margin_seconds=0.3, worker_concurrency=1
    )  # without a free slot it claims nothing, and the other gets the job
    run = await shop.runs.accept()
    await barrier.arrived()
    await shop.runs.expire_lease(run)
    other = Runs(shop.connection, "other", workflow=WORKFLOW)
    held = await other.claim_soon()
    await eventually(lambda: outcomes(worker) == {"lost": 1}, message="the attempt ended as lost")

    assert refused == ["LeaseLost"] * 3
    assert held.generation == 2
    job = await shop.job(run)
    assert (job["lease_owner"], job["lease_generation"], job["checkpoint"]) == ("other", 2, None)
    assert await shop.runs.events(run) == [(1, "run_queued")]
    assert await shop.connection.fetchval("SELECT to_regclass('stale_wrote_this')") is None
    assert sample(worker, "fencepost_leases_lost_total") == 1
    for statement in ("renew", "append_event", "complete", "guard"):
        assert sample(worker, "fencepost_stale_writes_refused_total", statement=statement) == 1
    assert await other.complete(held)
    assert await shop.runs.events(run) == [(1, "run_queued"), (2, "run_completed")]


async def test_a_stopping_worker_does_not_release_what_it_lost(shop: Shop) -> None:
    """JOB-33."""
    barrier = Barrier()

    async def report(context: RunContext, _value: Any) -> None:
        await barrier.wait(context)

    # Without a free slot it claims nothing, and the other gets the job.
    worker = await shop.start(handled(report), worker_stop_grace_seconds=0.4, worker_concurrency=1)
    run = await shop.runs.accept()
    await barrier.arrived()
    await shop.runs.expire_lease(run)
    other = Runs(shop.connection, "other", workflow=WORKFLOW)
    worker.stop()
    held = await other.claim_soon()
    await shop.stop(worker)

    job = await shop.job(run)
    assert (job["lease_owner"], job["lease_generation"], job["attempts"]) == ("other", 2, 2)
    assert outcomes(worker) == {"lost": 1}
    assert await other.complete(held)


async def test_a_handler_that_blocks_the_loop_longer_than_the_lease_writes_nothing_stale(shop: Shop) -> None:
    """Every attempt of that worker loses its lease, and each is refused; the next attempts go on."""
    barrier = Barrier()
    blocked: list[int] = []

    async def report(context: RunContext, value: Any) -> object:
        if value["blocks"] and context.attempt == 1:
            await barrier.arrived()
            blocked.append(1)
            time.sleep(1.5)  # noqa: ASYNC251 - what a handler should not do
        elif context.attempt == 1:
            await barrier.wait(context)
        return context.attempt

    worker = await shop.start(handled(report), worker_lease_seconds=1, worker_lease_margin_seconds=0.3)
    waiting = await shop.runs.accept(data=b'{"blocks": false}')
    blocking = await shop.runs.accept(data=b'{"blocks": true}')
    await eventually(lambda: blocked, message="the loop was blocked")
    for run in (waiting, blocking):
        await shop.reaches(run, "completed")
        assert (await shop.run(run))["output"] == b"2"
        assert [attempt["outcome"] for attempt in await shop.runs.attempts(run)] == ["lost", "completed"]
        assert await shop.runs.events(run) == [(1, "run_queued"), (2, "run_completed")]
    await eventually(lambda: outcomes(worker) == {"lost": 2, "completed": 2})


async def test_a_completion_in_an_open_transaction_does_not_cost_other_attempts_their_leases(shop: Shop) -> None:
    """Its row is locked until the handler commits, and renewals of others must not wait for it."""
    others, held_open = Barrier(), Barrier()

    async def report(context: RunContext, value: Any) -> None:
        if value["completes"]:
            async with context.transaction():
                await context.complete()
                await held_open.wait(context)
        else:
            await others.wait(context)

    worker = await shop.start(handled(report), worker_lease_seconds=6, worker_lease_margin_seconds=0.2)
    waiting = await shop.runs.accept(data=b'{"completes": false}')
    context = await others.arrived()
    completing = await shop.runs.accept(data=b'{"completes": true}')
    await held_open.arrived()
    until = (await shop.job(waiting))["lease_expires_at"]

    async def renewed_past() -> bool:
        return bool((await shop.job(waiting))["lease_expires_at"] > until) or context.trusted_seconds < 0

    await eventually(renewed_past, message="the other attempt was renewed or is lost")
    assert context.trusted_seconds > 0
    held_open.leave.set()
    others.leave.set()
    for run in (waiting, completing):
        await shop.reaches(run, "completed")
    assert outcomes(worker) == {"completed": 2}


# -- failure ---------------------------------------------------------------------------------------------------------------


class Invoice(BaseModel):
    number: int

    @field_validator("number")
    @classmethod
    def _strange(cls, number: int) -> int:
        if number == 13:
            raise KeyError("a validator of the author's own")
        return number


async def test_an_input_that_does_not_fit_ends_the_run_and_not_the_worker(shop: Shop) -> None:
    called: list[Invoice] = []

    async def report(_context: RunContext, value: Invoice) -> None:
        called.append(value)

    worker = await shop.start(handled(report, model=Invoice))
    inputs = [b'{"number": "secret-1"}', b"{", b"\xff", b"[" * 100_000, b'{"number": 13}', b""]
    runs = [await shop.runs.accept(data=data) for data in inputs]
    for run in runs:
        await shop.reaches(run, "failed")
        assert (await shop.run(run))["error_code"] == "invalid_input"
        assert (await shop.job(run))["dead_reason"] == "not_retryable"
    good = await shop.runs.accept(data=b'{"number": 1}')
    await shop.reaches(good, "completed")

    assert called == [Invoice(number=1)]
    assert sample(worker, "fencepost_attempt_failures_total", workflow=WORKFLOW, kind="terminal") == len(runs)
    assert sample(worker, "fencepost_dead_jobs_total", workflow=WORKFLOW, reason="not_retryable") == len(runs)


async def test_deep_json_without_a_model_is_invalid_input(shop: Shop) -> None:
    async def report(_context: RunContext, _value: Any) -> None: ...

    await shop.start(handled(report))
    run = await shop.runs.accept(data=b"[" * 100_000 + b"]" * 100_000)
    await shop.reaches(run, "failed")

    assert (await shop.run(run))["error_code"] == "invalid_input"


class Unspeakable:
    """A value whose serializer fails in its own way."""

    def model_dump_json(self) -> str:
        raise KeyError("of the author's own")


async def test_an_output_that_cannot_be_stored_ends_the_run_and_not_the_worker(shop: Shop) -> None:
    outputs = [object(), float("nan"), "\ud800", "x" * MAX_OUTPUT_BYTES, Unspeakable(), Decimal("1.5"), {1: {2: {3, 4}}}]

    async def report(_context: RunContext, number: int) -> object:
        return outputs[number]

    worker = await shop.start(handled(report))
    for number in range(len(outputs)):
        run = await shop.runs.accept(data=str(number).encode())
        await shop.reaches(run, "failed")
        assert (await shop.run(run))["error_code"] == "invalid_output"
    await eventually(lambda: outcomes(worker) == {"dead": len(outputs)})


async def test_the_largest_output_is_kept(shop: Shop) -> None:
    async def report(_context: RunContext, _value: Any) -> object:
        return "x" * (MAX_OUTPUT_BYTES - 2)

    await shop.start(handled(report))
    run = await shop.runs.accept()
    await shop.reaches(run, "completed")

    assert len((await shop.run(run))["output"]) == MAX_OUTPUT_BYTES


class Odd(BaseException):
    """Neither an error nor a cancellation."""


async def test_whatever_a_handler_raises_ends_its_attempt_and_not_the_worker(shop: Shop) -> None:
    errors = [
        Odd("secret"), GeneratorExit(), SystemExit("secret"), KeyboardInterrupt(), BaseExceptionGroup("secret", [Odd("secret")]),
        ExceptionGroup("secret", [ValueError("secret"), Retryable("busy")]), asyncio.CancelledError("secret"), StopIteration(1),
        RecursionError("secret"), MemoryError("secret"), TypeError("secret"),
    ]  # fmt: skip

    async def report(_context: RunContext, number: int) -> None:
        raise errors[number]

    worker = await shop.start(handled(report))
    for number, error in enumerate(errors):
        run = await shop.runs.accept(data=str(number).encode(), max_attempts=1)
        await eventually(partial(shop.has_ended_some, worker, number + 1), message="the attempt ended")
        assert not shop.has_ended(worker), f"{type(error).__name__} ended the worker"
        (attempt,) = await shop.runs.attempts(run)
        assert attempt["outcome"] == "failed"
        assert "secret" not in str(attempt)
    assert outcomes(worker) == {"dead": len(errors)}


async def test_the_exact_budget_and_each_attempts_own_evidence(shop: Shop) -> None:
    """JOB-21, JOB-22."""
    calls: list[int] = []

    async def report(context: RunContext, _value: Any) -> None:
        calls.append(context.attempt)
        raise {1: Retryable("busy"), 2: RuntimeError("secret"), 3: ConnectionRefusedError("secret")}[context.attempt]

    worker = await shop.start(handled(report))
    run = await shop.runs.accept(max_attempts=3)
    await shop.reaches(run, "failed")

    assert calls == [1, 2, 3]
    assert (await shop.run(run))["error_code"] == "not_connected"
    assert (await shop.job(run))["dead_reason"] == "attempts_exhausted"
    assert await shop.runs.events(run) == [(1, "run_queued"), (2, "run_failed")]
    attempts = await shop.runs.attempts(run)
    assert [(a["number"], a["generation"], a["outcome"], a["error_code"], a["decision"]) for a in attempts] == [
        (1, 1, "failed", "busy", "retry"),
        (2, 2, "failed", "unexpected", "retry"),
        (3, 3, "failed", "not_connected", "dead"),
    ]
    assert [a["error_class"] for a in attempts] == [
        "consumer_sdk.classification.Retryable",
        "RuntimeError",
        "ConnectionRefusedError",
    ]
    assert all(a["started_at"] and a["finished_at"] for a in attempts)
    await eventually(lambda: outcomes(worker) == {"retried": 2, "dead": 1})


@pytest.mark.parametrize(("error", "reason"), [(Terminal("refused"), "not_retryable"), (Ambiguous("unknown"), "ambiguous")])
async def test_what_may_not_be_repeated_is_not(shop: Shop, error: Exception, reason: str) -> None:
    async def report(_context: RunContext, _value: Any) -> None:
        raise error

    await shop.start(handled(report))
    run = await shop.runs.accept()
    await shop.reaches(run, "failed")

    assert (await shop.job(run))["dead_reason"] == reason
    assert len(await shop.runs.attempts(run)) == 1


async def test_a_provider_is_not_asked_before_its_retry_after(shop: Shop) -> None:
    async def report(_context: RunContext, _value: Any) -> None:
        raise Retryable("busy", retry_after=40)

    await shop.start(handled(report, retry=Retry(base_seconds=0.05, cap_seconds=60)))
    run = await shop.runs.accept()

    async def retried() -> bool:
        return bool((await shop.job(run))["retry_delay"])

    await eventually(retried)
    assert (await shop.job(run))["retry_delay"] == timedelta(seconds=40)


async def test_checkpoints_in_a_burst_before_a_failure_are_kept(shop: Shop) -> None:
    """JOB-17."""
    seen: list[object] = []

    async def report(context: RunContext, _value: Any) -> None:
        seen.append(context.checkpoint)
        if context.attempt == 1:
            for checkpoint in (1, 2, 3):
                context.progress(checkpoint)
            raise Retryable("busy")

    await shop.start(handled(report))
    run = await shop.runs.accept()
    await shop.reaches(run, "completed")

    assert seen == [None, 3]


async def test_a_checkpoint_is_kept_when_the_attempt_is_given_back(shop: Shop) -> None:
    """JOB-17, at a release."""
    barrier = Barrier()

    async def report(context: RunContext, _value: Any) -> None:
        context.progress({"page": 7})
        await barrier.wait(context)

    worker = await shop.start(handled(report), worker_stop_grace_seconds=0.4)
    run = await shop.runs.accept()
    await barrier.arrived()
    await shop.stop(worker)

    assert (await shop.job(run))["checkpoint"] == b'{"page":7}'
    assert outcomes(worker) == {"released": 1}


async def test_only_a_stored_checkpoint_outlives_a_lost_lease(shop: Shop) -> None:
    barrier = Barrier()
    seen: list[object] = []

    async def report(context: RunContext, _value: Any) -> None:
        seen.append(context.checkpoint)
        if context.attempt == 1:
            await context.save("stored")
            context.progress("lost")
            await barrier.wait(context)

    await shop.start(handled(report), worker_lease_seconds=3, worker_lease_margin_seconds=1)
    run = await shop.runs.accept()
    await barrier.arrived()
    await shop.runs.expire_lease(run)
    await shop.reaches(run, "completed")

    assert seen == [None, "stored"]


@pytest.mark.parametrize("ends_by", ["return", "failure"])
async def test_what_a_handler_left_running_changes_nothing_after_its_end(shop: Shop, ends_by: str) -> None:
    refused: list[str] = []
    left: list[asyncio.Task[None]] = []
    over = asyncio.Event()

    async def go_on(context: RunContext) -> None:
        await over.wait()
        for verb in (lambda: context.save(9), lambda: context.event("late"), lambda: context.complete("late")):
            try:
                await verb()
            except LeaseLost:
                refused.append("LeaseLost")

    async def report(context: RunContext, _value: Any) -> str:
        left.append(asyncio.create_task(go_on(context)))
        if ends_by == "failure":
            raise Retryable("busy")
        return "in time"

    await shop.start(handled(report, retry=Retry(base_seconds=600, cap_seconds=600)))
    run = await shop.runs.accept()

    async def ended() -> bool:
        return (await shop.runs.attempts(run))[0]["finished_at"] is not None if left else False

    await eventually(ended, message="the attempt ended")
    before = dict(await shop.job(run)), dict(await shop.run(run)), await shop.runs.events(run)
    over.set()
    await asyncio.wait(left)

    assert refused == ["LeaseLost"] * 3
    assert (dict(await shop.job(run)), dict(await shop.run(run)), await shop.runs.events(run)) == before


async def test_an_unsaved_checkpoint_is_stored_with_the_next_renewal(shop: Shop) -> None:
    barrier = Barrier()

    async def report(context: RunContext, _value: Any) -> None:
        context.progress(5)
        await barrier.wait(context)

    await shop.start(handled(report), worker_lease_seconds=1, worker_lease_margin_seconds=0.3)
    run = await shop.runs.accept()
    await barrier.arrived()

    async def stored() -> bool:
        return bool((await shop.job(run))["checkpoint"] == b"5")

    await eventually(stored, message="the renewal kept the checkpoint")
    barrier.leave.set()
    await shop.reaches(run, "completed")


# -- budgets ---------------------------------------------------------------------------------------------------------------


async def test_usage_adds_up_and_the_cost_limit_ends_the_run(shop: Shop) -> None:
    async def report(context: RunContext, _value: Any) -> None:
        context.use(cost=2.5, tokens=100)
        context.use(cost=2.5, tokens=50, pages=1)
        raise Retryable("busy")

    await shop.start(handled(report))
    run = await shop.runs.accept(cost_limit=10, max_attempts=9)
    await shop.reaches(run, "failed")

    assert (await shop.run(run))["error_code"] == "cost_exhausted"
    job = await shop.job(run)
    assert (job["cost_used"], job["dead_reason"], job["attempts"]) == (10, "cost_exhausted", 2)
    assert [(a["cost"], loads(a["usage"])) for a in await shop.runs.attempts(run)] == [(5, {"tokens": 150, "pages": 1})] * 2


async def test_the_usage_of_a_success_is_kept(shop: Shop) -> None:
    async def report(context: RunContext, _value: Any) -> None:
        context.use(cost=0.1, tokens=7)

    await shop.start(handled(report))
    run = await shop.runs.accept()
    await shop.reaches(run, "completed")

    (attempt,) = await shop.runs.attempts(run)
    assert (attempt["cost"], loads(attempt["usage"])) == (Decimal("0.1"), {"tokens": 7})
    assert (await shop.job(run))["cost_used"] == Decimal("0.1")


async def test_usage_that_cannot_be_stored_is_refused_where_it_is_reported(shop: Shop) -> None:
    """One bad item must not spoil the batch that it is written in."""
    usages: list[dict[str, Any]] = [
        {"pages": Decimal(3)}, {"cost": float("nan")}, {"cost": -1}, {"cost": "3"}, {"cost": 1e300}, {"cost": 1j}, {"a\0": 1},
        {"\ud800": 1}, {"x" * 10_000: 1}, {"pages": True}, {f"n{number}": 1 for number in range(1_000)},
    ]  # fmt: skip
    refused: list[str] = []

    async def report(context: RunContext, _value: Any) -> None:
        for usage in usages:
            with pytest.raises(InvalidCommand, match="usage") as raised:
                context.use(**usage)
            refused.append(str(raised.value))
        context.use(cost=1, pages=2)

    await shop.start(handled(report))
    run = await shop.runs.accept()
    await shop.reaches(run, "completed")

    assert len(refused) == len(usages)
    (attempt,) = await shop.runs.attempts(run)
    assert (attempt["cost"], loads(attempt["usage"])) == (1, {"pages": 2})


async def test_an_attempt_past_its_limit_ends_with_a_deadline_code(shop: Shop) -> None:
    """JOB-35."""
    barrier = Barrier()

    async def report(context: RunContext, _value: Any) -> None:
        assert context.remaining_seconds is not None
        if context.attempt == 1:
            await barrier.wait(context)

    worker = await shop.start(handled(report, attempt_seconds=0.3), worker_lease_seconds=3, worker_lease_margin_seconds=1)
    run = await shop.runs.accept()
    await shop.reaches(run, "completed")

    assert barrier.cancelled == 1
    first, second = await shop.runs.attempts(run)
    assert (first["outcome"], first["error_code"], first["error_class"]) == (
        "failed",
        "attempt_deadline",
        "fencepost.AttemptDeadline",
    )
    assert second["outcome"] == "completed"
    await eventually(lambda: outcomes(worker) == {"retried": 1, "completed": 1})


async def test_a_handler_that_tidies_up_past_its_limit_still_ends_with_a_deadline_code(shop: Shop) -> None:
    """JOB-35: the refused renewal meanwhile is no lost lease."""
    tidying, tidied = asyncio.Event(), asyncio.Event()

    async def report(context: RunContext, _value: Any) -> None:
        if context.attempt == 1:
            try:
                await asyncio.Event().wait()
            finally:
                tidying.set()
                with contextlib.suppress(asyncio.CancelledError):
                    await tidied.wait()

    worker = await shop.start(handled(report, attempt_seconds=0.3), worker_lease_seconds=3, worker_lease_margin_seconds=1)
    run = await shop.runs.accept()
    async with asyncio.timeout(END_SECONDS):
        await tidying.wait()
    claimed = (await shop.job(run))["lease_expires_at"]

    async def past_a_renewal() -> bool:
        return bool(await shop.connection.fetchval("SELECT clock_timestamp() > $1::timestamptz - interval '1.7 s'", claimed))

    await eventually(past_a_renewal, message="a renewal was due")
    tidied.set()
    await shop.reaches(run, "completed")

    first, *_ = await shop.runs.attempts(run)
    assert (first["outcome"], first["error_code"]) == ("failed", "attempt_deadline")
    await eventually(lambda: outcomes(worker) == {"retried": 1, "completed": 1})


async def test_a_handler_that_does_not_end_is_told_of_once_and_holds_its_slot_only(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease runs out, and the run goes on."""
    monkeypatch.setattr(lease_keeping, "_PATIENCE_SECONDS", 0.1)
    let_go = asyncio.Event()

    async def report(context: RunContext, _value: Any) -> None:
        while context.fencing_token == 1 and not let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await let_go.wait()

    leases = {"worker_lease_seconds": 1, "worker_lease_margin_seconds": 0.2, "worker_cancel_grace_seconds": 0}
    with capture_logs() as logs:
        worker = await shop.start(handled(report, attempt_seconds=0.3), worker_concurrency=2, **leases)
        run = await shop.runs.accept()
        await shop.reaches(run, "completed")
        let_go.set()
        await shop.stop(worker)

    told = [entry for entry in logs if entry["event"] == "handler_does_not_end"]
    assert [(entry["run_id"], entry["stopped_for"]) for entry in told] == [(str(run), "attempt_deadline")]
    assert outcomes(worker) == {"completed": 1, "lost": 1}


async def test_an_attempt_without_progress_ends(shop: Shop) -> None:
    """JOB-35."""
    barrier = Barrier()

    async def report(context: RunContext, _value: Any) -> None:
        if context.attempt == 1:
            await barrier.wait(context)

    await shop.start(handled(report, progress_seconds=0.3))
    run = await shop.runs.accept()
    await shop.reaches(run, "completed")

    assert [a["error_code"] for a in await shop.runs.attempts(run)] == ["no_progress", None]


async def test_an_attempt_that_reports_progress_goes_on(shop: Shop) -> None:
    async def report(context: RunContext, _value: Any) -> None:
        for _ in range(8):
            context.progress()
            await asyncio.sleep(0.1)

    await shop.start(handled(report, progress_seconds=0.5))
    run = await shop.runs.accept()
    await shop.reaches(run, "completed")

    assert len(await shop.runs.attempts(run)) == 1


async def test_the_runs_deadline_ends_a_hanging_attempt_for_good(shop: Shop) -> None:
    """JOB-35: renewals succeed up to it, and none after it."""
    barrier = Barrier()

    async def report(context: RunContext, _value: Any) -> None:
        await barrier.wait(context)

    await shop.start(handled(report), worker_lease_seconds=3, worker_lease_margin_seconds=0.3)
    run = await shop.runs.accept(deadline=timedelta(seconds=3))
    await shop.reaches(run, "failed")

    assert barrier.cancelled == 1
    assert (await shop.run(run))["error_code"] == "deadline_exceeded"
    (attempt,) = await shop.runs.attempts(run)
    assert attempt["renewed_at"] < attempt["claimed_at"] + timedelta(seconds=3)
    assert attempt["error_code"] == "attempt_deadline"


# -- cancellation ------------------------------------------------------------------------------------------------------------


async def test_a_cancelled_run_wakes_its_owner_at_once(shop: Shop) -> None:
    """JOB-30: renewals come every ten seconds, the end comes in a moment."""
    barrier = Barrier()

    async def report(context: RunContext, _value: Any) -> None:
        await barrier.wait(context)

    worker = await shop.start(handled(report), **LONG_POLL)
    await eventually(lambda: sample(worker, "fencepost_worker_listening") == 1)
    run = await shop.runs.accept()
    context = await barrier.arrived()
    began = time.monotonic()
    assert await shop.runs.cancel(run) == "requested"
    await shop.reaches(run, "cancelled")

    assert time.monotonic() - began < 6
    assert barrier.cancelled == 1
    assert context.cancelled
    assert await shop.runs.events(run) == [(1, "run_queued"), (2, "run_cancel_requested"), (3, "run_cancelled")]
    (attempt,) = await shop.runs.attempts(run)
    assert attempt["outcome"] == "cancelled"
    await eventually(lambda: outcomes(worker) == {"cancelled": 1})
    assert sample(worker, "fencepost_attempt_failures_total", workflow=WORKFLOW, kind="terminal") == 0


async def test_a_handler_that_returns_after_it_was_cancelled_is_cancelled_all_the_same(shop: Shop) -> None:
    """JOB-30."""
    barrier = Barrier()

    async def report(context: RunContext, _value: Any) -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await barrier.wait(context)
        return "done anyway"

    await shop.start(handled(report), **LONG_POLL)
    run = await shop.runs.accept()
    await barrier.arrived()
    await shop.runs.cancel(run)
    await shop.reaches(run, "cancelled")

    assert (await shop.run(run))["output"] is None


async def test_a_completion_that_meets_a_cancellation_is_refused(shop: Shop) -> None:
    """JOB-29, JOB-30: nobody told the worker before it wrote."""
    barrier = Barrier()

    async def report(context: RunContext, _value: Any) -> str:
        await barrier.wait(context)
        return "too late"

    worker = await shop.start(handled(report), worker_wakeup="poll")
    run = await shop.runs.accept()
    await barrier.arrived()
    assert await shop.runs.cancel(run) == "requested"
    barrier.leave.set()
    await shop.reaches(run, "cancelled")

    assert (await shop.run(run))["output"] is None
    assert [kind for _, kind in await shop.runs.events(run)] == ["run_queued", "run_cancel_requested", "run_cancelled"]
    await eventually(lambda: outcomes(worker) == {"cancelled": 1})
    assert sample(worker, "fencepost_leases_lost_total") == 0


async def test_an_explicit_completion_that_meets_a_cancellation_is_refused(shop: Shop) -> None:
    barrier = Barrier()
    raised: list[Exception] = []

    async def report(context: RunContext, _value: Any) -> None:
        await barrier.wait(context)
        try:
            await context.complete("too late")
        except LeaseLost as error:
            raised.append(error)
            raise

    worker = await shop.start(handled(report), worker_wakeup="poll")
    run = await shop.runs.accept()
    await barrier.arrived()
    assert await shop.runs.cancel(run) == "requested"
    barrier.leave.set()
    await shop.reaches(run, "cancelled")

    assert len(raised) == 1
    await eventually(lambda: outcomes(worker) == {"cancelled": 1})


async def test_a_failure_that_meets_a_cancellation_ends_as_cancelled(shop: Shop) -> None:
    """JOB-29: a cancellation that is about to commit holds the job's row, and the failure tries again."""
    barrier = Barrier()

    async def report(context: RunContext, _value: Any) -> None:
        await barrier.wait(context)
        raise Retryable("busy")

    worker = await shop.start(handled(report), worker_wakeup="poll")
    run = await shop.runs.accept()
    await barrier.arrived()
    async with shop.connection.transaction():
        assert await shop.runs.cancel(run) == "requested"
        barrier.leave.set()
        await eventually(lambda: sample(worker, "fencepost_worker_database_errors_total", statement="fail") > 0)
    await shop.reaches(run, "cancelled")

    await eventually(lambda: outcomes(worker) == {"cancelled": 1})


async def test_cancel_and_complete_agree_on_one_winner(shop: Shop) -> None:
    """JOB-29: many times, at once."""
    barriers: dict[UUID, asyncio.Event] = {}

    async def report(context: RunContext, _value: Any) -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await barriers.setdefault(context.run_id, asyncio.Event()).wait()
        return "won"

    worker = await shop.start(handled(report), worker_concurrency=40)
    runs = [await shop.runs.accept() for _ in range(40)]
    await eventually(lambda: len(barriers) == len(runs))
    for number, run in enumerate(runs):
        if number % 2:
            barriers[run].set()
            await asyncio.sleep(0)
        said = asyncio.create_task(shop.runs.cancel(run))
        await asyncio.sleep(0)
        barriers[run].set()
        outcome = await said
        await shop.reaches(run, "completed" if outcome == "ended" else "cancelled")
        terminal = [kind for _, kind in await shop.runs.events(run) if kind in {"run_completed", "run_cancelled"}]
        assert terminal == (["run_completed"] if outcome == "ended" else ["run_cancelled"])
    await eventually(lambda: sum(outcomes(worker).values()) == len(runs))
    assert outcomes(worker).keys() <= {"completed", "cancelled"}


# -- what a handler commits itself -----------------------------------------------------------------------------------------------


@pytest.fixture
async def ledger(shop: Shop) -> str:
    await shop.connection.execute("CREATE TABLE ledger (run_id uuid, note text, CHECK (note <> 'bad'))")
    return "INSERT INTO ledger VALUES ($1, $2)"


async def notes(shop: Shop) -> list[str]:
    return [row["note"] for row in await shop.connection.fetch("SELECT note FROM ledger ORDER BY note")]


async def test_a_domain_write_and_the_completion_commit_together(shop: Shop, ledger: str) -> None:
    barrier = Barrier()

    async def report(context: RunContext, _value: Any) -> str:
        async with context.transaction() as connection:
            await connection.execute(ledger, context.run_id, "paid")
            await context.complete("by transaction")
            await barrier.wait(context)
        return "by return"

    worker = await shop.start(handled(report))
    run = await shop.runs.accept()
    await barrier.arrived()
    assert (await shop.runs.state(run), await notes(shop)) == (("running", "leased"), [])
    barrier.leave.set()
    await shop.reaches(run, "completed")

    assert await notes(shop) == ["paid"]
    assert (await shop.run(run))["output"] == b'"by transaction"'
    assert len(await shop.runs.events(run)) == 2
    await eventually(lambda: outcomes(worker) == {"completed": 1})


async def test_a_failure_after_the_completion_in_a_transaction_takes_both_back(shop: Shop, ledger: str) -> None:
    async def report(context: RunContext, _value: Any) -> None:
        if context.attempt == 1:
            async with context.transaction() as connection:
                await connection.execute(ledger, context.run_id, "taken back")
                await context.complete()
                raise Retryable("busy")

    await shop.start(handled(report))
    run = await shop.runs.accept()
    await shop.reaches(run, "completed")

    assert await notes(shop) == []
    assert [a["outcome"] for a in await shop.runs.attempts(run)] == ["failed", "completed"]


async def test_an_error_after_a_completion_changes_nothing(shop: Shop) -> None:
    async def report(context: RunContext, _value: Any) -> None:
        await context.complete("done")
        raise RuntimeError("afterwards")

    worker = await shop.start(handled(report))
    run = await shop.runs.accept()
    await shop.reaches(run, "completed")

    assert (await shop.run(run))["output"] == b'"done"'
    await eventually(lambda: outcomes(worker) == {"completed": 1})
    assert len(await shop.runs.attempts(run)) == 1


async def test_a_completed_run_is_completed_once(shop: Shop) -> None:
    async def report(context: RunContext, _value: Any) -> str:
        await context.complete("first")
        with pytest.raises(LeaseLost):
            await context.event("late")
        return "second"

    await shop.start(handled(report))
    run = await shop.runs.accept()
    await shop.reaches(run, "completed")

    assert (await shop.run(run))["output"] == b'"first"'
    assert len(await shop.runs.events(run)) == 2


async def test_two_transactions_one_after_the_other(shop: Shop, ledger: str) -> None:
    async def report(context: RunContext, _value: Any) -> None:
        async with context.transaction() as connection:
            await connection.execute(ledger, context.run_id, "first")
        async with context.transaction() as connection:
            await connection.execute(ledger, context.run_id, "second")
            await context.complete()

    await shop.start(handled(report))
    run = await shop.runs.accept()
    await shop.reaches(run, "completed")

    assert await notes(shop) == ["first", "second"]


async def test_two_transactions_at_once_are_refused(shop: Shop, ledger: str) -> None:
    """A completion must never leave the transaction that its author put it in."""
    raised: list[Exception] = []

    async def report(context: RunContext, _value: Any) -> None:
        async with context.transaction() as outer:
            await outer.execute(ledger, context.run_id, "outer")
            try:
                async with context.transaction() as inner:
                    await inner.execute(ledger, context.run_id, "inner")
            except TransactionRequired as error:
                raised.append(error)
            await context.complete()
            raise Terminal("refused")

    await shop.start(handled(report))
    run = await shop.runs.accept()
    await shop.reaches(run, "failed")

    assert len(raised) == 1
    assert await notes(shop) == []


async def test_a_stale_holders_domain_write_is_rolled_back(shop: Shop, ledger: str) -> None:
    """The guard is the last statement of a transaction that completes nothing."""
    barrier = Barrier()

    async def report(context: RunContext, _value: Any) -> None:
        if context.attempt == 1:
            async with context.transaction() as connection:
                await connection.execute(ledger, context.run_id, "stale")
                await barrier.wait(context)

    worker = await shop.start(handled(report))
    run = await shop.runs.accept()
    await barrier.arrived()
    await shop.runs.expire_lease(run)
    await shop.reaches(run, "completed")
    barrier.leave.set()
    await eventually(lambda: outcomes(worker) == {"lost": 1, "completed": 1})

    assert await notes(shop) == []
    assert sample(worker, "fencepost_stale_writes_refused_total", statement="guard") == 1


async def test_a_constraint_of_the_authors_fails_the_attempt_alone(shop: Shop, ledger: str) -> None:
    async def report(context: RunContext, _value: Any) -> None:
        async with context.transaction() as connection:
            await connection.execute(ledger, context.run_id, "bad")

    await shop.start(handled(report))
    run = await shop.runs.accept()
    await shop.reaches(run, "failed")

    assert (await shop.run(run))["error_code"] == "sqlstate_23514"


async def test_a_workflows_events_stand_in_the_runs_story(shop: Shop) -> None:
    sequences: list[int] = []

    async def report(context: RunContext, _value: Any) -> None:
        sequences.append(await context.event("page_written", {"page": 1}))
        sequences.extend(await asyncio.gather(*(context.event("page_written") for _ in range(10))))

    await shop.start(handled(report))
    run = await shop.runs.accept()
    await shop.reaches(run, "completed")

    assert sorted(sequences) == list(range(2, 13))
    assert await shop.runs.events(run) == [
        (1, "run_queued"),
        *((number, "workflow.page_written") for number in range(2, 13)),
        (13, "run_completed"),
    ]
    row = await shop.connection.fetchrow("SELECT * FROM fencepost.run_events WHERE run_id = $1 AND sequence = 2", run)
    assert row is not None
    assert (loads(row["detail"])["page"], row["fencing_token"]) == (1, 1)


async def test_an_event_that_cannot_be_stored_fails_its_attempt_alone(shop: Shop) -> None:
    events: list[tuple[str, Any]] = [
        ("Bad Name", {}), ("", {}), ("x" * 101, {}), ("fine", {"a": "\0"}), ("fine", {"a": object()}),
        ("fine", {"a": "x" * 100_001}),
    ]  # fmt: skip

    async def report(context: RunContext, number: int) -> None:
        await context.event(*events[number])

    worker = await shop.start(handled(report))
    for number in range(len(events)):
        run = await shop.runs.accept(data=str(number).encode())
        await shop.reaches(run, "failed")
        assert await shop.runs.events(run) == [(1, "run_queued"), (2, "run_failed")]
    await eventually(lambda: outcomes(worker) == {"dead": len(events)})


# -- waiting for work, probes, a stop ----------------------------------------------------------------------------------------------


async def test_an_idle_worker_is_rung(shop: Shop) -> None:
    async def report(_context: RunContext, _value: Any) -> None: ...

    worker = await shop.start(handled(report), **LONG_POLL)
    await eventually(lambda: armed(shop), message="the bell is armed")
    for _ in range(3):
        run = await shop.runs.accept()
        await shop.reaches(run, "completed")

    assert sample(worker, "fencepost_worker_wakeups_total", kind="poll") == 0


async def armed(shop: Shop) -> bool:
    until = await shop.connection.fetchval("SELECT last_value FROM fencepost.doorbell_jobs")
    return bool(await shop.connection.fetchval("SELECT $1 > extract(epoch FROM clock_timestamp()) * 1000", until))


async def test_a_delayed_job_is_claimed_when_it_is_due(shop: Shop) -> None:
    async def report(_context: RunContext, _value: Any) -> None: ...

    await shop.start(handled(report), **LONG_POLL)
    await eventually(lambda: armed(shop))
    run = await shop.runs.accept(delay=timedelta(seconds=0.5))
    await shop.reaches(run, "completed")

    (attempt,) = await shop.runs.attempts(run)
    job = await shop.job(run)
    assert timedelta(0) <= attempt["claimed_at"] - job["available_at"] < timedelta(seconds=1)


async def test_the_probes_and_the_metrics_answer(shop: Shop) -> None:
    async def report(_context: RunContext, _value: Any) -> None: ...

    worker = await shop.start(handled(report), worker_name="press")
    run = await shop.runs.accept()
    await shop.reaches(run, "completed")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{worker.http_port}") as client:
        for path in ("/livez", "/readyz"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()) == (200, {"status": "ok", "problems": []})
        text = (await client.get("/metrics")).text

    assert f'fencepost_attempts_total{{outcome="completed",workflow="{WORKFLOW}"}} 1.0' in text
    assert "fencepost_worker_slots 10.0" in text
    assert worker.worker_id.startswith("press/")


async def test_a_stop_lets_short_work_end_and_gives_long_work_back(shop: Shop) -> None:
    """JOB-32: nothing failed, the attempt is given back, nothing more is claimed."""
    short, long = Barrier(), Barrier()

    async def report(context: RunContext, value: Any) -> None:
        barrier = short if value["short"] else long
        stopping = asyncio.create_task(context.stopping.wait())
        waiting = asyncio.create_task(barrier.wait(context))
        await asyncio.wait([stopping, waiting], return_when=asyncio.FIRST_COMPLETED)
        if value["short"]:
            barrier.leave.set()
        stopping.cancel()
        await waiting

    # No slot is free, so no claim is on its way when the stop comes: what that one brings would be executed.
    settings = {"worker_lease_seconds": 3, "worker_lease_margin_seconds": 0.3, "worker_stop_grace_seconds": 2}
    worker = await shop.start(handled(report), worker_concurrency=2, **settings)
    finishes, waits = await shop.runs.accept(data=b'{"short": true}'), await shop.runs.accept(data=b'{"short": false}')
    await short.arrived()
    await long.arrived()
    began = time.monotonic()
    worker.stop()
    late = await shop.runs.accept(data=b'{"short": true}')
    await shop.stop(worker)

    assert time.monotonic() - began < 2.5
    assert (await shop.runs.state(finishes))[0] == "completed"
    assert await shop.runs.state(waits) == ("running", "queued")
    job = await shop.job(waits)
    assert (job["attempts"], job["lease_generation"], job["last_error_code"]) == (0, 1, None)
    assert [a["outcome"] for a in await shop.runs.attempts(waits)] == ["released"]
    assert (await shop.job(late))["lease_generation"] == 0
    assert outcomes(worker) == {"completed": 1, "released": 1}
    assert len(await shop.runs.events(waits)) == 1


async def test_a_released_job_is_another_workers_at_once(shop: Shop) -> None:
    barrier = Barrier()

    async def report(context: RunContext, _value: Any) -> int:
        if context.fencing_token == 1:
            await barrier.wait(context)
        return context.attempt

    first = await shop.start(handled(report), worker_stop_grace_seconds=0.4, **LONG_POLL)
    run = await shop.runs.accept()
    await barrier.arrived()
    await shop.start(handled(report), **LONG_POLL)
    await shop.stop(first)
    await shop.reaches(run, "completed")

    assert (await shop.run(run))["output"] == b"1"  # the attempt was given back


async def test_a_run_that_is_cancelled_while_the_worker_stops_ends_as_cancelled(shop: Shop) -> None:
    barrier = Barrier()

    async def report(context: RunContext, _value: Any) -> None:
        await barrier.wait(context)

    worker = await shop.start(handled(report), worker_wakeup="poll", worker_stop_grace_seconds=0.4)
    run = await shop.runs.accept()
    await barrier.arrived()
    await shop.runs.cancel(run)
    await shop.stop(worker)

    assert await shop.runs.state(run) == ("cancelled", "cancelled")


async def test_what_expired_with_its_attempts_spent_is_reaped(shop: Shop) -> None:
    """JOB-10: by any worker, of whatever workflow."""

    async def report(_context: RunContext, _value: Any) -> None: ...

    run = await shop.runs.accept(workflow="elsewhere", max_attempts=1)
    await shop.runs.claim_one(workflow="elsewhere")
    await shop.runs.expire_lease(run)
    worker = await shop.start(handled(report), worker_lease_seconds=1, worker_lease_margin_seconds=0.3)
    await shop.reaches(run, "failed")

    assert (await shop.run(run))["error_code"] == "lease_expired"
    await eventually(lambda: sample(worker, "fencepost_reaped_jobs_total", state="dead") == 1)
    assert sample(worker, "fencepost_dead_jobs_total", workflow="(other)", reason="attempts_exhausted") == 1


async def test_the_gauges_show_the_queue(shop: Shop) -> None:
    barrier = Barrier()

    async def report(context: RunContext, _value: Any) -> None:
        await barrier.wait(context)

    for _ in range(4):
        await shop.runs.accept()
    worker = await shop.start(handled(report), worker_concurrency=1)
    await barrier.arrived()
    await eventually(lambda: sample(worker, "fencepost_active_attempts") == 1)

    assert sample(worker, "fencepost_ready_jobs", workflow=WORKFLOW) in {3, 4}
    assert sample(worker, "fencepost_oldest_ready_seconds", workflow=WORKFLOW) >= 0
    assert sample(worker, "fencepost_claim_jobs_sum") == 1
    barrier.leave.set()


# -- wrong set-ups ---------------------------------------------------------------------------------------------------------------


async def test_a_database_without_the_schema_is_told_with_its_remedy(empty_database_url: str) -> None:
    async def report(_context: RunContext, _value: Any) -> None: ...

    worker = Worker(handled(report), load_worker_settings({"database_url": empty_database_url, "worker_http_port": 0}))
    with pytest.raises(ConfigurationError, match="fencepost migrate"):
        await worker.run()


async def test_a_user_without_rights_is_told_which_role_to_grant(shop: Shop) -> None:
    async def report(_context: RunContext, _value: Any) -> None: ...

    name = "nobody_" + str(time.monotonic_ns())
    await shop.connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'x'")
    try:
        url = shop.database_url.replace(shop.database_url.split("//")[1].split("@")[0], f"{name}:x")
        worker = Worker(handled(report), load_worker_settings({"database_url": url, "worker_http_port": 0}))
        with pytest.raises(ConfigurationError, match="grant fencepost_consumer"):
            await worker.run()
    finally:
        await shop.connection.execute(f"DROP ROLE {name}")


async def test_the_consumer_role_is_enough(shop: Shop) -> None:
    """Every statement of a worker's life under the least rights."""

    async def report(context: RunContext, value: Any) -> None:
        await context.event("began")
        await context.save(1)
        if context.attempt == 1:
            raise Retryable("busy")
        async with context.transaction():
            await context.complete()

    name = "worker_" + str(time.monotonic_ns())
    await shop.connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'x' IN ROLE fencepost_consumer")
    try:
        url = shop.database_url.replace(shop.database_url.split("//")[1].split("@")[0], f"{name}:x")
        worker = await shop.start(handled(report), database_url=url, worker_lease_seconds=1, worker_lease_margin_seconds=0.3)
        spent = await shop.runs.accept(workflow="elsewhere", max_attempts=1)
        await shop.runs.claim_one(workflow="elsewhere")
        await shop.runs.expire_lease(spent)
        run = await shop.runs.accept()
        await shop.reaches(run, "completed")
        await shop.reaches(spent, "failed")
        await shop.stop(worker)
    finally:
        await shop.connection.execute(f"DROP ROLE {name}")


async def test_a_port_that_is_taken_is_told(shop: Shop) -> None:
    async def report(_context: RunContext, _value: Any) -> None: ...

    first = await shop.start(handled(report))
    second = Worker(handled(report), load_worker_settings({"database_url": shop.database_url, "worker_http_port": first.http_port}))
    with pytest.raises(ConfigurationError, match="FENCEPOST_WORKER_HTTP_PORT"):
        await second.run()
