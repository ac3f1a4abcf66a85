"""Steps of workflows, through a worker on a real database: what is kept of them, when they run again, and what parks a run."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from json import loads
from typing import Any, Final
from uuid import UUID

import pytest
from pydantic import BaseModel

from consumer_sdk import Retryable, Terminal, Worker, WorkflowContext
from consumer_sdk.run_store import PLANNER
from consumer_sdk.steps import StepRecord
from consumer_sdk.workflow_store import WorkflowStore
from fencepost.devservices import Services
from fencepost.errors import InvalidInput, LeaseLost, TransientError
from fencepost.secrets import Secrets
from fencepost.statements import load_statements
from fencepost.workflows import Workflows
from tests.support.session import SharedServices
from tests.support.waiting import eventually
from tests.support.workflows import SOON, Hall, hall_on


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


class Invoice(BaseModel):
    number: int
    total: Decimal
    at: datetime


INVOICE: Final = Invoice(number=1, total=Decimal("1.50"), at=datetime(2026, 1, 2, tzinfo=UTC))


@dataclass
class Till:
    """What steps did, and errors that the workflow meets, one an attempt."""

    called: list[Any] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    async def note(self, value: Any) -> Any:
        self.called.append(value)
        return value

    def fail(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


async def test_a_step_that_returned_is_not_called_again(hall: Hall) -> None:
    till, workflows = Till(errors=[Retryable("busy"), Retryable("busy")]), Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, value: int) -> list[int]:
        first = await context.step("add", till.note, value)
        second = await context.step("add", till.note, first + 1)
        till.fail()
        return [first, second, await context.step("last", till.note, 0)]

    await hall.work(workflows)
    run = await hall.accept(7)

    assert await hall.output(run) == [7, 8, 0]
    assert till.called == [7, 8, 0]
    assert await hall.steps(run) == [(0, "add", 0), (0, "add", 1), (0, "last", 0)]
    assert len(await hall.runs.attempts(run)) == 3


async def test_a_step_that_raised_is_called_again(hall: Hall) -> None:
    till, workflows = Till(errors=[Retryable("busy"), Retryable("busy")]), Workflows()

    async def unsure(value: int) -> int:
        till.called.append(value)
        till.fail()
        return value

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, value: int) -> int:
        return await context.step("try", unsure, value)

    await hall.work(workflows)
    run = await hall.accept(7)

    assert await hall.output(run) == 7
    assert till.called == [7, 7, 7]
    assert await hall.steps(run) == [(0, "try", 0)]


async def test_a_result_is_what_the_function_says_it_returns_at_every_attempt(hall: Hall) -> None:
    seen: list[object] = []
    till, workflows = Till(errors=[Retryable("busy")]), Workflows()

    async def bill() -> Invoice:
        return INVOICE

    async def pair() -> tuple[UUID, set[int]]:
        return UUID(int=1), {1, 2}

    async def untold():  # type: ignore[no-untyped-def]
        return INVOICE

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, _value: None) -> None:
        seen.append((await context.step("bill", bill), await context.step("pair", pair), await context.step("untold", untold)))
        till.fail()

    await hall.work(workflows)
    await hall.reaches(await hall.accept(), "completed")

    plain = {"number": 1, "total": "1.50", "at": "2026-01-02T00:00:00Z"}
    assert seen == [(INVOICE, (UUID(int=1), {1, 2}), plain)] * 2


@pytest.mark.parametrize(
    "arguments",
    [(1, "a", 1.5, None, True), ({"a": [1, {"b": 2}]},), (Decimal("1.50"),), (INVOICE,)],
    ids=["scalars", "nested", "decimal", "model"],
)  # fmt: skip
async def test_the_same_arguments_are_the_same_step(hall: Hall, arguments: tuple[object, ...]) -> None:
    till, workflows = Till(errors=[Retryable("busy")]), Workflows()

    async def count(*given: object) -> int:
        till.called.append(given)
        return len(given)

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, _value: None) -> int:
        counted: int = await context.step("count", count, *arguments)
        till.fail()
        return counted

    await hall.work(workflows)

    assert await hall.output(await hall.accept()) == len(arguments)
    assert till.called == [arguments]


def drifting(till: Till, value: Any) -> Workflows:
    """A workflow whose step gets, at its second attempt, what it did not get at its first."""
    workflows = Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, _value: None) -> int:
        first: int = await context.step("note", till.note, 1 if not till.called else value)
        till.fail()
        after: int = await context.step("after", till.note, 10)
        return first + after

    return workflows


async def test_other_arguments_than_at_an_earlier_attempt_park_the_run(hall: Hall) -> None:
    till = Till(errors=[Retryable("busy")])
    worker = await hall.work(drifting(till, 2))
    run = await hall.accept()
    await hall.parked(run)

    job = await hall.job(run)
    assert (job["last_error_code"], job["attempts"]) == ("workflow_changed", 1)
    assert till.called == [1]
    assert [attempt["outcome"] for attempt in await hall.runs.attempts(run)] == ["failed", "released"]
    assert worker._metrics.registry.get_sample_value("fencepost_attempts_total", {"workflow": "order", "outcome": "parked"}) == 1


async def test_a_parked_run_goes_on_when_it_is_resumed_under_the_code_that_it_began_with(hall: Hall) -> None:
    till = Till(errors=[Retryable("busy")])
    worker = await hall.work(drifting(till, 2))
    run = await hall.accept()
    await hall.parked(run)
    await hall.stop(worker)

    await hall.work(drifting(till, 1))
    assert (
        await hall.connection.fetchval("SELECT outcome FROM fencepost.resume_run('acme', $1, 'ana', 'rolled back')", run)
        == "resumed"
    )

    assert await hall.output(run) == 11
    assert till.called == [1, 10]


async def test_a_change_parks_the_run_even_where_the_workflow_catches_it(hall: Hall) -> None:
    till, workflows = Till(errors=[Retryable("busy")]), Workflows()
    went_on: list[str] = []

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, _value: None) -> str:
        try:
            await context.step("note", till.note, len(till.called))
        except Exception:  # noqa: BLE001
            went_on.append("caught")
        else:
            till.fail()
        await context.step("after", till.note, "never")
        return "done"

    await hall.work(workflows)
    run = await hall.accept()
    await hall.parked(run)

    assert went_on == ["caught"]
    assert till.called == [0]


async def test_a_result_that_the_code_cannot_read_any_more_parks_the_run(hall: Hall) -> None:
    till, workflows = Till(errors=[Retryable("busy")]), Workflows()

    async def words() -> str:
        return "soon"

    async def moment() -> datetime:
        raise AssertionError("it is kept")

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, _value: None) -> None:
        await context.step("read", words if till.errors else moment)
        till.fail()

    await hall.work(workflows)
    run = await hall.accept()

    await hall.parked(run)


async def test_steps_that_run_at_once_are_told_apart_by_the_order_of_their_calls(hall: Hall) -> None:
    till, workflows = Till(errors=[Retryable("busy")]), Workflows()
    second_done = asyncio.Event()

    async def late_first(number: int) -> int:
        if number == 0:
            await second_done.wait()
        second_done.set()
        await till.note(number)
        return 10 * number

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, _value: None) -> list[int]:
        results = await asyncio.gather(*(context.step("each", late_first, number) for number in range(3)))
        till.fail()
        return results

    await hall.work(workflows)
    run = await hall.accept()

    assert await hall.output(run) == [0, 10, 20]
    assert till.called.index(0) > 0
    assert sorted(till.called) == [0, 1, 2]
    assert await hall.steps(run) == [(0, "each", 0), (0, "each", 1), (0, "each", 2)]


async def test_steps_that_run_at_once_and_are_called_in_another_order_park_the_run(hall: Hall) -> None:
    till, workflows = Till(errors=[Retryable("busy")]), Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, _value: None) -> list[int]:
        numbers = range(2) if till.errors else reversed(range(2))
        results = await asyncio.gather(*(context.step("each", till.note, number) for number in numbers))
        till.fail()
        return results

    await hall.work(workflows)
    await hall.parked(await hall.accept())

    assert sorted(till.called) == [0, 1]


async def inner(context: WorkflowContext, how: str) -> None:
    """What a step may not do."""
    match how:
        case "a step":
            await context.step("inner", Till().note, 1)
        case "a sleep":
            await context.sleep(1)
        case "an end":
            context.continue_as_new(None)


async def noted(value: Any) -> Any:
    return value


async def lied() -> int:
    return "seven"  # type: ignore[return-value]


async def heap() -> str:
    return "x" * 1_000_000


@pytest.mark.parametrize(
    "asked",
    [
        lambda context: context.step("outer", inner, context, "a step"),
        lambda context: context.step("", noted, 1),
        lambda context: context.step("x" * 257, noted, 1),
        lambda context: context.step("a\0b", noted, 1),
        lambda context: context.step("fencepost.sleep", noted, 1),
        lambda context: context.step("set", noted, {1, 2}),
        lambda context: context.step("bytes", noted, b"a"),
        lambda context: context.step("lied", lied),
        lambda context: context.step("heap", heap),
        lambda context: context.sleep(-1),
        lambda context: context.sleep(float("nan")),
        lambda context: context.sleep(367 * 86_400),
        lambda context: context.once("fencepost.step", request=1, call=noted),
    ],
    ids=[
        "an argument without a form", "an empty name", "a long name", "a name with U+0000", "a name of ours", "a set", "bytes",
        "another result than annotated", "a result that is too long", "a sleep back", "no sleep", "a sleep too long",
        "an operation of ours",
    ],
)  # fmt: skip
async def test_what_cannot_be_kept_is_refused_and_ends_the_run(hall: Hall, asked: Any) -> None:
    refusals: list[Exception] = []
    workflows = Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, _value: None) -> None:
        try:
            await asked(context)
        except InvalidInput as error:
            refusals.append(error)
            raise

    await hall.work(workflows)
    run = await hall.accept()
    await hall.reaches(run, "failed")

    assert (await hall.run(run))["error_code"] == "invalid_input"
    assert len(refusals) == 1
    assert await hall.ledger(run) == []


@pytest.mark.parametrize("how", ["a step", "a sleep", "an end"])
async def test_a_step_holds_no_step_no_sleep_and_does_not_end_the_run(hall: Hall, how: str) -> None:
    workflows = Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, _value: None) -> None:
        async def outer() -> None:
            await inner(context, how)

        await context.step("outer", outer)

    await hall.work(workflows)
    run = await hall.accept()
    await hall.reaches(run, "failed")

    assert (await hall.run(run))["error_code"] == "invalid_input"
    assert await hall.ledger(run) == []


# Who may keep a step


@dataclass
class Gate:
    """A step that waits: ``reached`` tells that it does, ``leave`` lets it go on."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    outcomes: list[object] = field(default_factory=list)

    async def wait(self) -> int:
        self.reached.set()
        await self.leave.wait()
        return 1


def gated(gate: Gate) -> Workflows:
    workflows = Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, _value: None) -> int:
        try:
            done: int = await context.step("wait", gate.wait)
        except BaseException as error:
            gate.outcomes.append(error)
            raise
        gate.outcomes.append(done)
        return done

    return workflows


async def test_a_stale_generation_keeps_nothing(hall: Hall) -> None:
    """JOB-6: another worker took the run over while the step ran."""
    first, second = Gate(), Gate()
    stale = await hall.work(gated(first), worker_concurrency=1)
    run = await hall.accept()
    await first.reached.wait()
    await hall.runs.expire_lease(run)
    await hall.work(gated(second))
    await second.reached.wait()

    first.leave.set()
    await eventually(lambda: first.outcomes)
    assert isinstance(first.outcomes[0], LeaseLost)
    assert await hall.ledger(run) == []
    assert stale._metrics.registry.get_sample_value("fencepost_stale_writes_refused_total", {"statement": "record_steps"}) == 1

    second.leave.set()
    assert await hall.output(run) == 1
    (kept,) = await hall.ledger(run)
    assert kept["run_generation"] == 2


async def test_a_run_that_is_cancelled_in_a_step_keeps_nothing_more_and_ends_as_cancelled(hall: Hall) -> None:
    """The worker does not listen and does not renew for minutes: it learns of it when the step is to be kept."""
    gate = Gate()
    await hall.work(gated(gate), worker_lease_seconds=3_600, worker_wakeup="poll")
    run = await hall.accept()
    await gate.reached.wait()

    assert await hall.runs.cancel(run) == "requested"
    gate.leave.set()
    await hall.reaches(run, "cancelled")

    assert isinstance(gate.outcomes[0], LeaseLost)
    assert await hall.ledger(run) == []


async def test_a_replay_of_a_dead_run_finds_its_steps(hall: Hall) -> None:
    """LEDGER-8: the lineage keeps what was done."""
    till, workflows = Till(errors=[Terminal("broken")]), Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, value: int) -> int:
        done: int = await context.step("add", till.note, value)
        till.fail()
        return done

    await hall.work(workflows)
    run = await hall.accept(7)
    await hall.reaches(run, "failed")
    outcome, replay = await hall.runs.replay(run)
    assert outcome == "replayed"
    assert replay is not None

    assert await hall.output(replay) == 7
    assert till.called == [7]


def doing_nothing() -> Workflows:
    workflows = Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(_context: WorkflowContext, _value: object) -> None: ...

    return workflows


# What it costs

FILL: Final = """
INSERT INTO fencepost.effects (run_key, tenant_id, iteration, step, occurrence, operation, state, run_id, run_generation, holder,
                               fingerprint, fingerprint_version, provider_key, result, finished_at)
SELECT 'run-' || n / 10, 'acme', 0, 's', n % 10, 'fencepost.step', 'succeeded', gen_random_uuid(), 1, 'w', sha256(n::text::bytea),
       1, '', '1', clock_timestamp()
FROM generate_series(1, 30000) AS n
"""


def nodes_of(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes_of(child)


def statements(worker: Worker, name: str) -> float:
    """How many of one statement the worker has sent."""
    return worker._metrics.registry.get_sample_value("fencepost_worker_statement_seconds_count", {"statement": name}) or 0.0


async def test_a_first_execution_writes_once_a_step_and_reads_nothing(hall: Hall) -> None:
    till, workflows = Till(), Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, value: int) -> int:
        for number in range(5):
            await context.step("note", till.note, number)
        return value

    worker = await hall.work(workflows)
    await hall.output(await hall.accept(7))

    assert (statements(worker, "record_steps"), statements(worker, "read_steps")) == (5, 0)


async def test_steps_of_many_runs_share_their_writes(hall: Hall) -> None:
    runs, ready, workflows = 40, asyncio.Event(), Workflows()
    waiting: list[int] = []

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, value: int) -> int:
        waiting.append(value)
        if len(waiting) == runs:
            ready.set()
        await ready.wait()
        return await context.step("note", noted, value)

    worker = await hall.work(workflows, worker_concurrency=runs)
    accepted = [await hall.accept(number) for number in range(runs)]
    assert [await hall.output(run) for run in accepted] == list(range(runs))

    assert statements(worker, "record_steps") <= 5


async def test_reading_steps_is_one_probe_of_the_key_for_each_however_many_there_are(hall: Hall) -> None:
    await hall.connection.execute(FILL)
    workflow_statements = load_statements("consumer_sdk", "workflows.sql")
    for name, value in PLANNER.items():
        await hall.connection.execute(f"SET {name} = '{value}'")
    arguments = "ARRAY['run-7', 'run-8'], ARRAY['acme', 'acme'], ARRAY[0, 0], ARRAY['s', 's'], ARRAY[3, 4]"
    await hall.connection.execute(f"PREPARE reading AS {workflow_statements['read_steps']}")

    plan = loads(await hall.connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE reading({arguments})"))[0]["Plan"]
    used = {node["Index Name"] for node in nodes_of(plan) if "Index Name" in node}
    assert used == {"effects_pkey"}
    assert plan["Actual Rows"] == 2
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] <= 2 * 6
    await hall.connection.execute("DEALLOCATE reading")


# Beside other parts


async def test_an_effect_happens_once_in_each_step_that_asks_for_it(hall: Hall) -> None:
    till, workflows = Till(errors=[Retryable("busy")] * 3), Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, _value: None) -> list[object]:
        async def charge(amount: int) -> object:
            receipt = await context.once("card.charge", request={"amount": amount}, call=hall.provider.charge)
            till.fail()  # after the effect, before the step has ended
            return receipt

        receipts = [await context.step("charge", charge, 10), await context.step("charge", charge, 10)]
        till.fail()
        return receipts

    await hall.work(workflows)
    run = await hall.accept()
    await hall.reaches(run, "completed")

    assert len(hall.provider.book) == 2
    effects = [(row["step"], row["occurrence"]) for row in await hall.ledger(run) if row["operation"] == "card.charge"]
    assert effects == [("charge", 0), ("charge", 1)]


async def test_a_step_is_found_again_after_its_secret_was_replaced(hall: Hall) -> None:
    old = secrets.token_bytes(32)
    gate, till = Gate(), Till()
    workflows = Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, value: int) -> int:
        done: int = await context.step("note", till.note, value)
        await gate.wait()
        return done

    before = await hall.work(workflows, secrets=Secrets({1: old}, write=[1]))
    run = await hall.accept(7)
    await gate.reached.wait()
    await hall.kill(before)
    gate.leave.set()
    await hall.work(workflows, secrets=Secrets({1: old, 2: secrets.token_bytes(32)}, write=[2]))

    assert await hall.output(run) == 7
    assert till.called == [7]


async def test_a_step_whose_secret_is_gone_parks_the_run(hall: Hall) -> None:
    till, gate, workflows = Till(), Gate(), Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, value: int) -> int:
        done: int = await context.step("note", till.note, value)
        await gate.wait()
        return done

    before = await hall.work(workflows)
    run = await hall.accept(7)
    await gate.reached.wait()
    await hall.kill(before)
    await hall.work(workflows, secrets=Secrets({2: secrets.token_bytes(32)}, write=[2]))

    await hall.parked(run)
    assert till.called == [7]


class Rot13:
    """A codec whose bytes nobody takes for plain ones."""

    def encode(self, payload: bytes) -> bytes:
        return b"x" + bytes(255 - byte for byte in payload)

    def decode(self, payload: bytes) -> bytes:
        if not payload.startswith(b"x"):
            raise ValueError("not ours")
        return bytes(255 - byte for byte in payload[1:])


@pytest.mark.parametrize("given_to", ["the worker", "the workflows"])
async def test_what_is_stored_went_through_the_codec_and_comes_back_through_it(hall: Hall, given_to: str) -> None:
    codec, till = Rot13(), Till(errors=[Retryable("busy")])
    workflows = Workflows(codec) if given_to == "the workflows" else Workflows()
    checkpoints: list[object] = []

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, value: str) -> str:
        done: str = await context.step("note", till.note, value)
        await context.once("card.charge", request=value, call=lambda _effect: noted("secret receipt"))
        checkpoints.append(context.checkpoint)
        context.progress("secret checkpoint")
        till.fail()
        return done

    await hall.work(workflows, codec=codec if given_to == "the worker" else None)
    run = await hall.runs.accept(data=codec.encode(b'"secret"'), max_attempts=20)
    await hall.reaches(run, "completed")

    row, job = await hall.run(run), await hall.job(run)
    assert codec.decode(row["output"]) == b'"secret"'
    assert codec.decode(job["checkpoint"]) == b'"secret checkpoint"'
    assert {codec.decode(kept["result"]) for kept in await hall.ledger(run)} == {b'"secret"', b'"secret receipt"'}
    assert checkpoints == [None, "secret checkpoint"]
    assert till.called == ["secret"]


async def test_an_input_that_the_codec_cannot_read_parks_the_run(hall: Hall) -> None:
    await hall.work(doing_nothing(), codec=Rot13())
    run = await hall.accept("plain")

    await hall.parked(run)


@pytest.mark.parametrize("error", [ValueError, KeyError, RuntimeError])
async def test_a_kept_step_that_the_codec_cannot_read_parks_the_run(hall: Hall, error: type[Exception]) -> None:
    """Whatever it raises: what its library does, for a key that is gone."""

    class LosesItsKey(Rot13):
        lost = False

        def decode(self, payload: bytes) -> bytes:
            if self.lost and b"receipt" in super().decode(payload):
                raise error("secret")
            return super().decode(payload)

    codec, till, workflows = LosesItsKey(), Till(errors=[Retryable("busy")]), Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, value: str) -> str:
        receipt = await context.step("first", _receipt, await context.step("note", till.note, value))
        codec.lost = True
        till.fail()
        return receipt

    await hall.work(workflows, codec=codec)
    run = await hall.runs.accept(data=codec.encode(b'"secret"'), max_attempts=20)

    await hall.parked(run)
    assert till.called == ["secret"]


async def _receipt(value: str) -> str:
    return f"{value} receipt"


class LosesAnswers(WorkflowStore):
    """Its first write of steps is done, and nobody hears of it."""

    lost = 0

    async def record(self, records: Sequence[StepRecord]) -> Mapping[int, bool]:
        recorded = await super().record(records)
        if not self.lost:
            self.lost += 1
            raise TransientError("record_steps: no answer")
        return recorded


async def test_a_write_without_an_answer_is_repeated_and_changes_nothing(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consumer_sdk.worker.WorkflowStore", LosesAnswers)
    till, workflows = Till(), Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, value: int) -> int:
        return await context.step("note", till.note, value)

    worker = await hall.work(workflows)
    run = await hall.accept(7)

    assert await hall.output(run) == 7
    assert till.called == [7]
    assert len(await hall.ledger(run)) == len(await hall.runs.attempts(run)) == 1
    assert statements(worker, "record_steps") == 1  # the one that was answered
