"""Workflows, through workers on a real database: timers, continue-as-new, versions, what a client is told, and what waiters hear.

Time passes by moving rows.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import timedelta
from json import loads
from typing import Any, Final
from uuid import UUID

import asyncpg
import pytest
from pydantic import BaseModel, Field

from consumer_sdk import Ambiguous, Handlers, Retryable, RunContext, Terminal, Worker, WorkflowContext, load_worker_settings
from consumer_sdk.run_store import ROLE
from consumer_sdk.workflow_store import WorkflowStore
from fencepost.codec import PLAIN
from fencepost.devservices import Services
from fencepost.errors import ConfigurationError, LeaseLost, TransientError, WorkflowFailure
from fencepost.workflows import Workflows
from tests.support.commands import user_of
from tests.support.session import SharedServices
from tests.support.waiting import eventually
from tests.support.workflows import SOON, Hall, hall_on, including

DAY: Final = 86_400.0


@pytest.fixture(scope="module")
def hall_url(services: Services, shared_services: SharedServices) -> Iterator[str]:
    """The module's database."""
    url = services.create_database(shared_services.template_url)
    yield url
    services.drop_database(url)


@pytest.fixture
async def hall(hall_url: str) -> AsyncIterator[Hall]:
    async with hall_on(hall_url) as hall:
        yield hall


class Order(BaseModel):
    item: str
    amount: int = Field(alias="theAmount")


class Receipt(BaseModel):
    total: int = Field(alias="theTotal")


class OutOfStock(WorkflowFailure): ...


class Closed(OutOfStock): ...


async def noted(value: Any) -> Any:
    return value


# In and out


async def test_input_and_result_are_of_the_workflows_types(hall: Hall) -> None:
    given: list[object] = []
    workflows = Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, order: Order) -> Receipt:
        given.append(order)
        return Receipt(theTotal=order.amount)

    await hall.work(workflows)
    run = await hall.accept({"item": "tea", "theAmount": 3})

    assert await hall.output(run) == {"theTotal": 3}
    assert given == [Order(item="tea", theAmount=3)]


@pytest.mark.parametrize("result", [None, {"total": 3}, Receipt.model_construct(total="three")], ids=["none", "other", "unchecked"])
async def test_a_result_of_another_type_ends_the_run(hall: Hall, result: Any) -> None:
    workflows = Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, _value: None) -> Receipt:
        return result  # type: ignore[no-any-return]

    await hall.work(workflows)
    run = await hall.accept()
    await hall.reaches(run, "failed")

    assert (await hall.run(run))["error_code"] == "invalid_output"


async def test_an_input_of_another_type_ends_the_run_after_one_attempt(hall: Hall) -> None:
    workflows = Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, order: Order) -> None: ...

    await hall.work(workflows)
    run = await hall.accept({"item": "tea"})
    await hall.reaches(run, "failed")

    assert (await hall.run(run))["error_code"] == "invalid_input"
    assert len(await hall.runs.attempts(run)) == 1


# What a client is told


@pytest.mark.parametrize(
    ("raised", "failure", "code"),
    [
        (OutOfStock("who reads this?", details={"left": 0}), ("OutOfStock", {"left": 0}, 422), "out_of_stock"),
        (Closed(), ("Closed", None, 422), "closed"),
        (KeyError("secret"), ("KeyError", None, 404), "key_error"),
        (ConnectionResetError(), ("ConnectionResetError", None, 502), "connection_reset_error"),
        (OutOfStock(details=object()), ("OutOfStock", None, 422), "out_of_stock"),
        (OutOfStock(details="x" * 200_000), ("OutOfStock", None, 422), "out_of_stock"),
        (ExceptionGroup("", [TransientError("away"), OutOfStock(), Closed()]), ("OutOfStock", None, 422), "out_of_stock"),
    ],
    ids=[
        "details", "by its base", "any exception", "one that would be retried", "details that JSON cannot hold", "long details",
        "together",
    ],
)  # fmt: skip
async def test_a_mapped_failure_ends_the_run_after_exactly_one_attempt(
    hall: Hall, raised: Exception, failure: tuple[str, object, int], code: str
) -> None:
    """ROUTE-33: whatever the retry policy says of such errors."""
    workflows = Workflows()

    @workflows.workflow("order", retry=SOON, failures={OutOfStock: 422, LookupError: 404, ConnectionError: 502})
    async def order(context: WorkflowContext, _value: None) -> None:
        raise raised

    worker = await hall.work(workflows)
    run = await hall.accept()
    await hall.reaches(run, "failed")

    row, job = await hall.run(run), await hall.job(run)
    count = worker._metrics.registry.get_sample_value
    await eventually(lambda: count("fencepost_attempts_total", {"workflow": "order", "outcome": "refused"}) == 1)
    assert count("fencepost_dead_jobs_total", {"workflow": "order", "reason": "not_retryable"}) == 0  # nobody is to be woken
    assert loads(row["failure"]) == dict(zip(("type", "details", "status"), failure, strict=True))
    assert (row["error_code"], job["dead_reason"], job["attempts"]) == (code, "not_retryable", 1)
    assert [event for _, event in await hall.runs.events(run)] == ["run_queued", "run_failed"]
    assert not await hall.connection.fetchval("SELECT count(*) FROM fencepost.runs AS r WHERE r::text LIKE '%who reads this%'")


@pytest.mark.parametrize(
    "raised",
    [TransientError("away"), LeaseLost("lost"), ExceptionGroup("", [LeaseLost("lost"), LeaseLost("lost")]), Retryable("busy")],
    ids=["transient", "lost", "a group", "unmapped"],
)
async def test_what_is_not_for_the_client_is_tried_again(hall: Hall, raised: Exception) -> None:
    workflows = Workflows()
    raising = [raised]

    @workflows.workflow(
        "order", retry=SOON, failures={OutOfStock: 422, Exception: 500} if not isinstance(raised, Retryable) else {}
    )
    async def order(context: WorkflowContext, _value: None) -> str:
        if raising:
            raise raising.pop()
        return "done"

    await hall.work(workflows)
    run = await hall.accept()

    assert await hall.output(run) == "done"
    assert (await hall.run(run))["failure"] is None


async def test_a_failure_beside_one_that_leaves_open_what_happened_is_not_for_the_client(hall: Hall) -> None:
    workflows = Workflows()

    @workflows.workflow("order", retry=SOON, failures={OutOfStock: 422})
    async def order(context: WorkflowContext, _value: None) -> None:
        raise ExceptionGroup("", [OutOfStock(), Ambiguous("sent")])

    await hall.work(workflows)
    run = await hall.accept()
    await hall.reaches(run, "failed")

    row = await hall.run(run)
    assert (row["error_code"], row["failure"], (await hall.job(run))["dead_reason"]) == ("sent", None, "ambiguous")


async def test_attempts_that_are_spent_tell_a_client_nothing(hall: Hall) -> None:
    """ROUTE-25: the end is told apart by its reason."""
    workflows = Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, _value: None) -> None:
        raise RuntimeError

    await hall.work(workflows)
    run = await hall.accept(max_attempts=2)
    await hall.reaches(run, "failed")

    assert (await hall.run(run))["failure"] is None
    assert (await hall.job(run))["dead_reason"] == "attempts_exhausted"


@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [
        ("cancelled", "cancelled", None), ("terminated", "failed", "cost_exhausted"), ("timed out", "failed", "deadline_exceeded"),
        ("dead", "failed", "attempts_exhausted"),
    ],
)  # fmt: skip
async def test_each_end_is_told_apart(hall: Hall, end: str, state: str, reason: str | None) -> None:
    """ROUTE-25: what the route makes its answers of."""
    workflows = Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, _value: None) -> None:
        context.use(cost=1)
        raise Retryable("busy")

    options: dict[str, Any] = {
        "cancelled": {"delay": timedelta(hours=1)}, "terminated": {"cost_limit": 1}, "timed out": {"delay": timedelta(hours=1)},
        "dead": {"max_attempts": 1},
    }  # fmt: skip
    run = await lineage_of(hall, await hall.accept(**options[end]))
    if end == "cancelled":
        await hall.runs.cancel(run)
    if end == "timed out":
        await hall.runs.pass_deadline(run)
    await hall.work(workflows, worker_lease_seconds=1, worker_lease_margin_seconds=0.1)
    await hall.reaches(run, state)

    found = await looked(hall, run)
    assert (found["state"], found["dead_reason"], found["failure"], found["parked"]) == (state, reason, None, False)


# Timers


def napping(*seconds: float, till: list[str] | None = None) -> Workflows:
    """Sleeps that long, one after the other, with a step between."""
    workflows, told = Workflows(), [] if till is None else till

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, _value: None) -> str:
        async def tell(what: str) -> None:
            told.append(what)

        for number, length in enumerate(seconds):
            await context.sleep(length)
            await context.step("tell", tell, f"woke {number}")
        return "rested"

    return workflows


async def test_a_long_sleep_lets_go_of_the_run_and_spends_no_attempt(hall: Hall) -> None:
    told: list[str] = []
    worker = await hall.work(napping(DAY, 2 * DAY, till=told))
    run = await hall.accept(max_attempts=1)

    await hall.sleeps(run)
    job = await hall.job(run)
    assert (job["attempts"], job["lease_owner"], job["last_error_code"]) == (0, None, None)
    left = await hall.connection.fetchval("SELECT available_at - clock_timestamp() FROM fencepost.jobs")
    assert timedelta(hours=23, minutes=59) < left <= timedelta(days=1)
    assert worker._metrics.registry.get_sample_value("fencepost_attempts_total", {"workflow": "order", "outcome": "released"}) == 1
    assert told == []

    await hall.wakes(run)
    await eventually(lambda: told == ["woke 0"])
    await hall.sleeps(run)
    await hall.wakes(run)
    assert await hall.output(run) == "rested"
    assert told == ["woke 0", "woke 1"]
    assert [row["operation"] for row in await hall.ledger(run)] == ["fencepost.timer", "fencepost.step"] * 2


async def test_a_run_that_is_executed_before_its_time_sleeps_on_to_the_time_that_was_set_first(hall: Hall) -> None:
    """A restart, a lost lease or an impatient operator do not move it."""
    worker = await hall.work(napping(DAY))
    run = await hall.accept()
    await hall.sleeps(run)
    (timer,) = await hall.ledger(run)
    await hall.stop(worker)

    await hall.connection.execute("UPDATE fencepost.jobs SET available_at = clock_timestamp() - interval '1 hour'")
    await hall.work(napping(DAY))
    await eventually(lambda: attempted_twice(hall, run))
    await hall.sleeps(run)

    (same,) = await hall.ledger(run)
    assert same["deadline_at"] == timer["deadline_at"]
    drift = await hall.connection.fetchval(
        "SELECT abs(extract(epoch FROM available_at - $1)) FROM fencepost.jobs", timer["deadline_at"]
    )
    assert drift < 1


async def attempted_twice(hall: Hall, run: UUID) -> bool:
    return len(await hall.runs.attempts(run)) >= 2


async def test_another_length_of_the_same_sleep_parks_the_run(hall: Hall) -> None:
    worker = await hall.work(napping(DAY))
    run = await hall.accept()
    await hall.sleeps(run)
    await hall.stop(worker)

    await hall.work(napping(2 * DAY))
    await hall.wakes(run)
    await hall.parked(run)


async def test_a_short_sleep_is_waited_for_and_leaves_nothing(hall: Hall) -> None:
    await hall.work(napping(0.01, 0))
    run = await hall.accept()

    assert await hall.output(run) == "rested"
    assert [row["operation"] for row in await hall.ledger(run)] == ["fencepost.step"] * 2
    assert len(await hall.runs.attempts(run)) == 1


async def test_a_run_that_sleeps_is_cancelled_at_once(hall: Hall) -> None:
    await hall.work(napping(DAY))
    run = await hall.accept()
    await hall.sleeps(run)

    assert await hall.runs.cancel(run) == "cancelled"


@pytest.mark.parametrize("how", ["caught", "caught and another raised", "caught and gone on", "in a finally"])
async def test_a_workflow_that_does_not_let_its_sleep_pass_ends_or_sleeps_all_the_same(hall: Hall, how: str) -> None:
    """What is swallowed without another call is told to its author; a call in between takes the workflow out again."""
    workflows, called = Workflows(), []

    async def step() -> None:
        called.append(how)

    @workflows.workflow("order", retry=SOON, failures={OutOfStock: 422})
    async def order(context: WorkflowContext, _value: None) -> str:
        try:
            await context.sleep(DAY)
        except Exception:  # noqa: BLE001
            if how == "caught and another raised":
                raise OutOfStock from None
            if how == "caught and gone on":
                await context.step("never", step)
        finally:
            if how == "in a finally":
                await context.step("at the end", step)
        return "done"

    await hall.work(workflows)
    run = await hall.accept()
    if how.startswith("caught") and how != "caught and gone on":
        await hall.reaches(run, "failed")
        row = await hall.run(run)
        assert (row["error_code"], row["failure"]) == ("invalid_input", None)
    else:
        await hall.sleeps(run)
    assert called == []


async def test_a_sleep_beside_other_branches_takes_the_workflow_out_when_they_have_ended(hall: Hall) -> None:
    workflows, ended = Workflows(), []

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, _value: None) -> str:
        async def branch() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("branch")

        async with asyncio.TaskGroup() as group:
            group.create_task(branch())
            group.create_task(context.sleep(DAY))
        return "rested"

    await hall.work(workflows)
    run = await hall.accept()
    await hall.sleeps(run)

    assert ended == ["branch"]


# Continue as new


def periods(hall: Hall, *, last: int) -> Workflows:
    """A subscription: charges once a period."""
    workflows = Workflows()

    @workflows.workflow("order", retry=SOON, max_attempts=7, deadline_seconds=3600)
    async def order(context: WorkflowContext, period: int) -> int:
        async def charge(amount: int) -> object:
            return await context.once("card.charge", request={"amount": amount}, call=hall.provider.charge)

        await context.step("charge", charge, 10)
        if period < last:
            context.continue_as_new(period + 1)
        return context.iteration

    return workflows


async def test_each_iteration_charges_once(hall: Hall) -> None:
    """X5: a period has its own steps and effects, and the lineage one root."""
    await hall.work(periods(hall, last=3))
    run = await hall.accept(0)
    newest = await hall.ended(run)

    lineage = await hall.lineage(run)
    assert [(row["iteration"], row["state"]) for row in lineage] == [
        (0, "continued"),
        (1, "continued"),
        (2, "continued"),
        (3, "completed"),
    ]
    assert {row["root_run_id"] for row in lineage} == {run}
    assert loads(newest["output"]) == 3
    assert len(hall.provider.book) == 4
    assert await hall.steps(run) == [(number, "charge", 0) for number in range(4)]
    assert [event for _, event in await hall.runs.events(run)] == ["run_queued", "run_continued"]
    job = await hall.job(newest["run_id"])
    assert (job["max_attempts"], job["attempts"]) == (7, 1)
    assert job["deadline_at"] is not None


async def test_a_replay_finds_what_was_charged_and_the_next_period_charges_its_own(hall: Hall) -> None:
    """L9, LEDGER-8 as X5 reads it: one charge an iteration, whichever runs of the lineage were at it."""
    workflows, broken = Workflows(), [Terminal("broken"), Retryable("busy"), Retryable("busy")]

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, period: int) -> int:
        async def charge() -> object:
            return await context.once("card.charge", request={"period": period}, call=hall.provider.charge)

        await context.step("charge", charge)
        if broken:
            raise broken.pop(0)
        if period == 0:
            context.continue_as_new(1)
        return period

    await hall.work(workflows)
    first = await hall.accept(0)
    await hall.reaches(first, "failed")
    _, replay = await hall.runs.replay(first)
    assert replay is not None
    await hall.ended(first)

    assert [(row["iteration"], row["state"]) for row in await hall.lineage(first)] == [
        (0, "failed"), (0, "continued"), (1, "completed"),
    ]  # fmt: skip
    charged = [row["iteration"] for row in await hall.ledger(first) if row["operation"] == "card.charge"]
    assert charged == [0, 1]
    assert len(hall.provider.book) == 2


class LosesAnswers(WorkflowStore):
    """Its first timer and its first continuation are done, and nobody hears of them."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._unheard = {"begin_timer", "continue_run"}

    async def _fetch(self, name: str, *arguments: object) -> Sequence[Any]:
        rows = await super()._fetch(name, *arguments)
        if name in self._unheard:
            self._unheard.remove(name)
            raise TransientError(f"{name}: no answer")
        return rows


async def test_a_timer_and_a_continuation_without_an_answer_happen_once(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consumer_sdk.worker.WorkflowStore", LosesAnswers)
    workflows = Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, number: int) -> int:
        if number == 0:
            await context.sleep(DAY)
            context.continue_as_new(1)
        return number

    worker = await hall.work(workflows)
    run = await hall.accept(0)
    await hall.sleeps(run)
    await hall.wakes(run)
    await hall.ended(run)

    assert [row["state"] for row in await hall.lineage(run)] == ["continued", "completed"]
    assert [attempt["outcome"] for attempt in await hall.runs.attempts(run)] == ["released", "completed"]
    assert len(await hall.ledger(run)) == 1
    counted = worker._metrics.registry.get_sample_value("fencepost_attempts_total", {"workflow": "order", "outcome": "continued"})
    assert counted == 1


async def test_a_user_with_the_role_of_consumers_may_do_all_of_it(hall: Hall) -> None:
    workflows, told = periods(hall, last=1), list[str]()

    @workflows.workflow("nap", retry=SOON)
    async def nap(context: WorkflowContext, _value: None) -> None:
        await context.publish({"a": 1})
        context.emit({"b": 2})
        await context.sleep(DAY)
        told.append("woke")

    async with user_of(ROLE, hall.database_url) as url:
        settings = load_worker_settings(
            {"database_url": url, "worker_http_port": 0, "worker_poll_interval_ms": 30, "worker_stop_grace_seconds": 1}
        )
        worker = Worker(including(workflows), settings, secrets=hall.secrets)
        working = asyncio.create_task(worker.run())
        run, sleeping = await hall.accept(0), await hall.accept(workflow="nap")
        await hall.ended(run)
        await hall.sleeps(sleeping)
        await hall.wakes(sleeping)
        await hall.reaches(sleeping, "completed")
        worker.stop()
        await working

    assert told == ["woke"]
    assert len(hall.provider.book) == 2


async def test_a_run_that_is_cancelled_does_not_continue(hall: Hall) -> None:
    reached, leave, workflows = asyncio.Event(), asyncio.Event(), Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, _value: int) -> None:
        reached.set()
        await leave.wait()
        context.continue_as_new(1)

    await hall.work(workflows, worker_lease_seconds=3_600, worker_wakeup="poll")  # it hears of nothing before it asks
    run = await hall.accept(0)
    await reached.wait()
    assert await hall.runs.cancel(run) == "requested"
    leave.set()
    await hall.reaches(run, "cancelled")

    assert len(await hall.lineage(run)) == 1


async def test_a_lineage_may_continue_as_another_workflow_or_version(hall: Hall) -> None:
    workflows = Workflows()

    @workflows.workflow("invoice", version=3)
    async def invoice(context: WorkflowContext, value: str) -> str:
        return f"invoice of {value}"

    @workflows.workflow("order", version=2, retry=SOON)
    async def order_2(context: WorkflowContext, value: str) -> None:
        context.continue_as_new(value.upper(), workflow=invoice)

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, value: str) -> None:
        context.continue_as_new(value * 2, workflow=order_2)

    await hall.work(workflows)
    newest = await hall.ended(await hall.accept("ab"))

    assert loads(newest["output"]) == "invoice of ABAB"
    assert [(row["workflow"], row["workflow_version"]) for row in await hall.lineage(newest["run_id"])] == [
        ("order", 1), ("order", 2), ("invoice", 3),
    ]  # fmt: skip


async def test_a_lineage_continues_under_the_version_that_it_has(hall: Hall) -> None:
    workflows = Workflows()

    async def count(context: WorkflowContext, number: int) -> str:
        if number < 2:
            context.continue_as_new(number + 1)
        return "old"

    workflows.workflow("order", retry=SOON)(count)

    @workflows.workflow("order", version=2, retry=SOON)
    async def order(context: WorkflowContext, number: int) -> str:
        return "new"

    await hall.work(workflows)
    newest = await hall.ended(await hall.accept(0))

    assert (loads(newest["output"]), newest["iteration"], newest["workflow_version"]) == ("old", 2, 1)


@pytest.mark.parametrize("how", ["unfit", "long", "a stranger"])
async def test_what_cannot_be_continued_ends_the_run(hall: Hall, how: str) -> None:
    workflows = Workflows()

    async def stranger(context: WorkflowContext, _value: str) -> None: ...

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, _value: str) -> None:
        if how == "a stranger":
            context.continue_as_new("x", workflow=stranger)
        context.continue_as_new(["unfit"] if how == "unfit" else "x" * 1_000_001)

    await hall.work(workflows)
    run = await hall.accept("x")
    await hall.reaches(run, "failed")

    assert (await hall.run(run))["error_code"] == ("configuration" if how == "a stranger" else "invalid_input")


async def test_the_newest_of_1_500_runs_is_one_indexed_read(hall: Hall) -> None:
    """R39, R44, ROUTE-26: what a look costs does not grow with the chain."""
    run = await lineage_of(hall, await hall.accept(0))
    await hall.connection.execute("ANALYZE fencepost.runs; ANALYZE fencepost.jobs; ANALYZE fencepost.lineages")
    short = await cost_of_a_look(hall, run)
    workflows = Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, number: int) -> int:
        if number < 1_500:
            context.continue_as_new(number + 1)
        return number

    worker = await hall.work(workflows, worker_poll_interval_ms=5)

    async def over() -> bool:
        return bool((await looked(hall, run))["state"] == "completed")

    await eventually(over, 120)
    await hall.stop(worker)
    # What a transaction in another database of this server has kept from being removed on the way is not the look's cost.
    await hall.connection.execute("VACUUM fencepost.runs, fencepost.jobs, fencepost.lineages")
    found = await looked(hall, run)
    assert (found["iteration"], loads(found["output"])) == (1_500, 1_500)
    assert len(await hall.lineage(run)) == 1_501
    assert await cost_of_a_look(hall, run) <= short + 6


async def lineage_of(hall: Hall, run: UUID) -> UUID:
    """The run as a key of a durable route has it."""
    await hall.connection.execute(
        "INSERT INTO fencepost.lineages (root_run_id, tenant_id, monitor_id, route, principal_hash, principal_version,"
        " newest_run_id) VALUES ($1, 'acme', gen_random_uuid(), 'orders', sha256('x'), 1, $1)", run,
    )  # fmt: skip
    return run


async def looked(hall: Hall, run: UUID) -> Any:
    row = await hall.connection.fetchrow("SELECT * FROM fencepost.read_lineages(ARRAY[$1::uuid], ARRAY['acme'])", run)
    assert row is not None
    return row


async def cost_of_a_look(hall: Hall, run: UUID) -> int:
    """Buffers, once plans are there."""
    for _ in range(7):
        await looked(hall, run)
    plan = loads(
        await hall.connection.fetchval(
            f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT * FROM fencepost.read_lineages(ARRAY['{run}'::uuid], ARRAY['acme'])"
        )
    )[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


# Versions


def of_version(version: int, *, name: str = "order") -> Workflows:
    workflows = Workflows()

    @workflows.workflow(name, version=version, retry=SOON)
    async def order(context: WorkflowContext, _value: None) -> str:
        return f"by version {version}"

    return workflows


async def test_a_run_is_executed_by_the_version_that_it_was_accepted_under(hall: Hall) -> None:
    workflows = Workflows()
    for version in (1, 2):

        @workflows.workflow("order", version=version, retry=SOON)
        async def order(context: WorkflowContext, _value: None) -> int:
            return context.workflow_version

    await hall.work(workflows)
    first, second = await hall.accept(), await hall.accept(version=2)

    assert (await hall.output(first), await hall.output(second)) == (1, 2)


async def test_a_version_that_is_registered_no_more_parks_its_runs_until_it_is_back(hall: Hall) -> None:
    worker = await hall.work(of_version(2))
    run = await hall.accept()
    await hall.parked(run)
    assert (await hall.job(run))["attempts"] == 0
    await hall.stop(worker)

    await hall.work(of_version(1))
    await hall.connection.execute("SELECT fencepost.resume_run('acme', $1, 'ana', 'it is back')", run)

    assert await hall.output(run) == "by version 1"


async def test_a_version_of_a_newer_deployment_is_left_to_its_workers(hall: Hall) -> None:
    """A rolling deploy: the old worker gives the run back without an attempt, and the new one executes it."""
    old = await hall.work(of_version(1))
    run = await hall.accept(version=2, max_attempts=1)
    await hall.sleeps(run)
    assert (await hall.job(run))["attempts"] == 0
    left = await hall.connection.fetchval("SELECT available_at - clock_timestamp() FROM fencepost.jobs")
    assert left <= timedelta(seconds=5)
    await hall.stop(old)

    await hall.work(of_version(2))
    await hall.runs.make_ready(run)

    assert await hall.output(run) == "by version 2"


async def test_a_plain_handler_executes_every_version(hall: Hall) -> None:
    handlers = Handlers()

    @handlers.handler("order", retry=SOON)
    async def order(context: RunContext, _value: None) -> int:
        return context.workflow_version

    await hall.work(handlers)

    assert await hall.output(await hall.accept(version=7)) == 7


async def test_each_version_has_its_own_time_limit(hall: Hall) -> None:
    workflows = Workflows()

    async def wait(context: WorkflowContext, _value: None) -> None:
        await asyncio.Event().wait()

    workflows.workflow("order", retry=SOON, attempt_seconds=0.05)(wait)

    @workflows.workflow("order", version=2, retry=SOON, attempt_seconds=60)
    async def order(context: WorkflowContext, _value: None) -> None: ...

    await hall.work(workflows)
    run = await hall.accept(max_attempts=1)
    await hall.reaches(run, "failed")

    assert (await hall.run(run))["error_code"] == "attempt_deadline"


# Registries


def test_a_registry_may_be_included_before_its_workflows_are_registered() -> None:
    workflows = Workflows()
    handlers = including(workflows)
    handlers.include(workflows)
    workflows.workflow("order")(nothing)

    assert list(handlers.executors) == ["order"]


async def nothing(context: WorkflowContext, _value: None) -> None: ...


async def plain(context: RunContext, _value: object) -> None: ...


def test_a_name_is_a_handlers_or_a_workflows() -> None:
    handlers = including(of_version(1))
    handlers.handler("order")(plain)

    with pytest.raises(ConfigurationError, match="workflow order: has a handler already"):
        assert handlers.executors


def test_two_registries_do_not_share_a_name() -> None:
    handlers = including(of_version(1))
    handlers.include(of_version(2))

    with pytest.raises(ConfigurationError, match="workflow order: has a handler already"):
        assert handlers.executors


def test_the_registries_of_one_worker_have_one_codec() -> None:
    class Stamps:
        encode = decode = bytes

    codec = Stamps()
    handlers = including(Workflows(codec))
    handlers.include(Workflows(codec))
    assert handlers.codec is codec
    assert Handlers().codec is PLAIN

    handlers.include(Workflows())
    with pytest.raises(ConfigurationError, match="different codecs"):
        _ = handlers.codec


def test_only_a_registry_is_included() -> None:
    with pytest.raises(ConfigurationError, match="include takes"):
        Handlers().include(nothing)  # type: ignore[arg-type]


# Kills


async def test_a_workers_death_costs_its_lease_and_nothing_else(hall: Hall) -> None:
    """KEY-11: one run, generation 2, no state for ever; what was kept is not done again."""
    reached, leave, workflows, called = asyncio.Event(), asyncio.Event(), Workflows(), []

    async def call() -> int:
        called.append(1)
        return 1

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, _value: None) -> int:
        done = await context.step("call", call)
        reached.set()
        await leave.wait()
        return done

    worker = await hall.work(workflows)
    run = await hall.accept()
    await reached.wait()
    await hall.kill(worker)
    leave.set()
    await hall.work(workflows)

    assert await hall.output(run) == 1
    assert called == [1]
    assert (await hall.job(run))["lease_generation"] == 2


# Rings


class Ears:
    """Hears which lineages have news."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def hear(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        self.heard += str(payload).split(",")


@pytest.fixture
async def ears(hall: Hall) -> AsyncIterator[Ears]:
    ears = Ears()
    connection = await asyncpg.connect(hall.database_url)
    await connection.add_listener("fencepost_lineages", ears.hear)
    await connection.execute("SELECT fencepost.arm_lineages(600000)")
    yield ears
    await connection.close()


def raising(error: Exception) -> Callable[[WorkflowContext, None], Any]:
    async def order(context: WorkflowContext, _value: None) -> None:
        raise error

    return order


async def continuing(context: WorkflowContext, value: int | None) -> None:
    if value is None:
        context.continue_as_new(1)
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("function", "state"),
    [
        (nothing, "completed"), (raising(OutOfStock()), "failed"), (continuing, "continued"),
    ],
    ids=["completed", "dead", "continued"],
)  # fmt: skip
async def test_whoever_waits_hears_of_each_end(hall: Hall, ears: Ears, function: Any, state: str) -> None:
    workflows = Workflows()
    workflows.workflow("order", retry=SOON, failures={OutOfStock: 422})(function)
    await hall.work(workflows)
    run = await hall.accept()
    await hall.reaches(run, state)

    await eventually(lambda: str(run) in ears.heard)


async def test_whoever_waits_hears_of_a_parked_run(hall: Hall, ears: Ears) -> None:
    await hall.work(of_version(2))
    run = await hall.accept()
    await hall.parked(run)

    await eventually(lambda: str(run) in ears.heard)


async def test_whoever_waits_hears_of_what_the_reaper_ends(hall: Hall, ears: Ears) -> None:
    run = await hall.accept(max_attempts=1)
    await hall.runs.claim_one()
    await hall.runs.expire_lease(run)
    await hall.work(of_version(1), worker_lease_seconds=1, worker_lease_margin_seconds=0.1)
    await hall.reaches(run, "failed")

    await eventually(lambda: str(run) in ears.heard)
