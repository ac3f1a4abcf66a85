"""Messages that execute runs of the consumer's own database: claimed by id, fenced, completed together with the message."""

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from json import loads
from typing import Any, Final
from uuid import UUID, uuid4

import pytest

from consumer_sdk import LeaseLost, Message, MessageContext, MessageHandlers, Retry, Retryable, Terminal
from producer_sdk import Event
from producer_sdk.asyncpg import enqueue
from tests.support.consumers import SECRETS, Stage, sample, stage
from tests.support.runs import Runs
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

pytestmark = pytest.mark.services

REPORT: Final = "report"
TYPE: Final = "report.asked"
SOON: Final = Retry(base_seconds=0.05, cap_seconds=0.05, jitter="none")
POSTPONED: Final = {"type": TYPE, "outcome": "postponed"}
MESSAGES: Final = "fencepost_consumer_messages_total"

Handle = Callable[[Message[Any], MessageContext], Any]


@pytest.fixture
async def one(database_url: str, kafka: str, topic: TopicFactory) -> AsyncIterator[Stage]:
    async with stage(database_url, kafka, topic) as made:
        yield made


@pytest.fixture
def runs(one: Stage) -> Runs:
    return Runs(one.connection, workflow=REPORT)


def executing(function: Handle, **options: Any) -> MessageHandlers:
    app = MessageHandlers()
    app.handler(TYPE, step="execute", workflow=REPORT, **({"retry": SOON} | options))(function)
    return app


def counting() -> tuple[MessageHandlers, list[int]]:
    """An app that notes the run's attempt, and returns it."""
    attempts: list[int] = []

    async def count(_message: Message[Any], context: MessageContext) -> int:
        assert context.run is not None
        attempts.append(context.run.attempt)
        return context.run.attempt

    return executing(count), attempts


async def ask(made: Stage, run_id: object, *, tenant: str = "acme", key: str | None = None, event_id: str | None = None) -> str:
    """The message that says: this run is to go on."""
    headers = {"ce_tenantid": tenant} | ({} if run_id is None else {"ce_runid": str(run_id)})
    return await made.send({}, type=TYPE, key=key or str(run_id), headers=headers, event_id=event_id)


async def writing(message: Message[Any], context: MessageContext, topic: str = "reports") -> None:
    """A row, an event and the completion, in one transaction."""
    async with context.transaction() as connection:
        await connection.execute("INSERT INTO seen VALUES ($1, 1)", message.event_id)
        await enqueue(connection, Event(topic=topic, type="report.written", key="k", payload=b"{}"))
        await context.complete({"pages": 3})


async def written(made: Stage) -> tuple[int, int]:
    """(domain rows, events) of ``writing``."""
    events = await made.connection.fetchval("SELECT count(*) FROM fencepost.outbox WHERE event_type = 'report.written'")
    return len(await made.seen()), events


async def output(made: Stage, run_id: UUID) -> Any:
    return loads(await made.connection.fetchval("SELECT output FROM fencepost.runs WHERE run_id = $1", run_id))


async def test_a_run_ends_with_what_its_handler_returns_and_its_message_with_it(one: Stage, runs: Runs) -> None:
    app, attempts = counting()
    run = await runs.accept()
    event = await ask(one, run)
    async with one.running(app):
        await one.until_committed({0: 1})
    assert await runs.state(run) == ("completed", "completed")
    assert await output(one, run) == 1
    assert await one.outcomes() == {event: "succeeded"}
    assert attempts == [1]


async def test_completion_message_row_domain_row_and_event_are_one_commit(one: Stage, runs: Runs) -> None:
    """LEDGER-10: all four exist once, however often the message comes."""
    run = await runs.accept()
    event = await ask(one, run)
    await ask(one, run, event_id=event)
    async with one.running(executing(writing)):
        await one.until_committed({0: 2})
    assert await written(one) == (1, 1)
    assert await output(one, run) == {"pages": 3}
    assert await one.outcomes() == {event: "succeeded"}


async def test_of_a_run_that_was_taken_over_before_the_commit_nothing_exists(one: Stage, runs: Runs) -> None:
    """LEDGER-10: LeaseLost; no domain row, event, completion or outcome. The message waits for the new holder."""
    raised, other = list[Exception](), runs.by("w2")

    async def overtaken(message: Message[Any], context: MessageContext) -> None:
        assert context.run is not None
        await runs.expire_lease(context.run.run_id)
        (held,) = await other.claim(lease=timedelta(seconds=3))
        try:
            await writing(message, context)
        except LeaseLost as error:
            raised.append(error)
            assert (await written(one), await one.outcomes()) == ((0, 0), {})
            assert await other.complete(held)
            raise

    run = await runs.accept()
    event = await ask(one, run)
    async with one.running(executing(overtaken)):
        await one.until_committed({0: 1})
    assert len(raised) == 1
    assert await written(one) == (0, 0)
    assert await one.outcomes() == {event: "succeeded"}
    assert [attempt["outcome"] for attempt in await runs.attempts(run)] == ["lost", "completed"]


async def test_a_handler_that_did_not_complete_what_it_committed_is_not_taken_for_done(one: Stage, runs: Runs) -> None:
    """The run is what the message is about: it does not stay queued while its message counts as handled."""

    async def half(message: Message[Any], context: MessageContext) -> None:
        async with context.transaction() as connection:
            await connection.execute("INSERT INTO seen VALUES ($1, 1)", message.event_id)
        raise Retryable("after_the_transaction")

    run = await runs.accept(max_attempts=2)
    await ask(one, run)
    async with one.running(executing(half)):
        await one.until_committed({0: 1})
    assert (await runs.state(run))[0] in {"completed", "failed"}


async def test_a_run_that_somebody_holds_is_waited_for(one: Stage, runs: Runs) -> None:
    """No attempt of the run's and none of the message's; other keys go on meanwhile."""
    app, attempts = counting()
    run, free = await runs.accept(), await runs.accept(delay=timedelta(hours=1))
    await runs.claim_one(lease=timedelta(seconds=3))
    await runs.make_ready(free)
    await ask(one, run)
    await ask(one, free)
    async with one.running(app) as consumer:
        await eventually(lambda: sample(consumer, MESSAGES, **POSTPONED) >= 1 and attempts == [1])
        assert await runs.state(run) == ("running", "leased")
        assert await one.committed() == {0: 0}
        await one.until_committed({0: 2})
    assert attempts == [1, 2]
    assert await one.dead() == []


async def test_a_run_that_its_holder_gives_back_is_taken_soon(one: Stage, runs: Runs) -> None:
    """Long before the lease that it was held under would have ended."""
    app, attempts = counting()
    run = await runs.accept()
    held = await runs.claim_one(lease=timedelta(minutes=10))
    await ask(one, run)
    async with one.running(app) as consumer:
        await eventually(lambda: sample(consumer, MESSAGES, **POSTPONED) >= 1)
        assert await runs.release(held)
        await one.until_committed({0: 1})
    assert len(attempts) == 1


async def test_a_run_that_is_held_for_longer_than_the_patience_is_a_dead_letter(one: Stage, runs: Runs) -> None:
    async def never(_message: Message[Any], _context: MessageContext) -> None:
        raise AssertionError

    run = await runs.accept()
    await runs.claim_one(lease=timedelta(milliseconds=500))
    await one.connection.execute("UPDATE fencepost.jobs SET max_attempts = 1")  # so that nobody can claim it later either
    await ask(one, run)
    async with one.running(executing(never, patience_seconds=0.2)):
        await one.until_committed({0: 1})
    (letter,) = await one.dead()
    assert (letter["reason"], letter["error_code"]) == ("patience_exhausted", "run_held")


@pytest.mark.parametrize("state", ["completed", "cancelled"])
async def test_a_run_that_is_over_needs_no_handler(one: Stage, runs: Runs, state: str) -> None:
    app, attempts = counting()
    run = await runs.accept()
    if state == "completed":
        assert await runs.complete(await runs.claim_one())
    else:
        await runs.cancel(run)
    event = await ask(one, run)
    async with one.running(app):
        await one.until_committed({0: 1})
    assert attempts == []
    assert (await runs.state(run))[0] == state
    assert await one.outcomes() == {event: "succeeded"}
    assert await one.dead() == []


@pytest.mark.parametrize(
    ("case", "reason", "code"),
    [
        ("dead", "run_failed", "run_failed"),
        ("of another workflow", "rejected", "run_of_another_workflow"),
        ("of another tenant", "rejected", "run_not_found"),
        ("missing", "rejected", "run_not_found"),
        ("unnamed", "rejected", "message_names_no_run"),
        ("misnamed", "rejected", "message_names_no_run"),
    ],
)
async def test_a_run_that_cannot_be_executed_is_a_dead_letter_that_says_why(
    one: Stage, runs: Runs, case: str, reason: str, code: str
) -> None:
    app, attempts = counting()
    run: object = await runs.accept(workflow="other" if case == "of another workflow" else None, max_attempts=1)
    if case == "dead":
        await runs.fail(await runs.claim_one(), delay=None, reason="terminal")
    elif case in ("missing", "unnamed", "misnamed"):
        run = {"missing": uuid4(), "unnamed": None, "misnamed": "the first one"}[case]
    await ask(one, run, tenant="umbrella" if case == "of another tenant" else "acme")
    async with one.running(app):
        await one.until_committed({0: 1})
    (letter,) = await one.dead()
    assert (letter["reason"], letter["error_code"]) == (reason, code)
    assert attempts == []


async def test_the_jobs_own_budget_decides_how_often_a_run_is_tried(one: Stage, runs: Runs) -> None:
    """Not the message's, which spends none: the job is dead after its two attempts, and then the message is."""
    attempts: list[int] = []

    async def busy(_message: Message[Any], context: MessageContext) -> None:
        assert context.run is not None
        attempts.append(context.run.attempt)
        raise Retryable("busy")

    run = await runs.accept(max_attempts=2)
    await ask(one, run)
    async with one.running(executing(busy, attempts=1)):
        await one.until_committed({0: 1})
    (letter,) = await one.dead()
    assert attempts == [1, 2]
    assert (letter["reason"], letter["error_code"]) == ("run_failed", "busy")
    assert await runs.state(run) == ("failed", "dead")


async def test_a_handler_that_takes_too_long_fails_an_attempt_of_the_run(one: Stage, runs: Runs) -> None:
    attempts: list[int] = []

    async def hang(_message: Message[Any], context: MessageContext) -> None:
        assert context.run is not None
        attempts.append(context.run.attempt)
        if len(attempts) == 1:
            await asyncio.Event().wait()

    run = await runs.accept(max_attempts=2)
    await ask(one, run)
    async with one.running(executing(hang, attempt_seconds=0.2)):
        await one.until_committed({0: 1})
    assert attempts == [1, 2]
    assert await runs.state(run) == ("completed", "completed")


async def test_a_cancelled_run_cancels_its_handler_and_ends_its_message(
    one: Stage, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FENCEPOST_WORKER_LEASE_SECONDS", "1")
    monkeypatch.setenv("FENCEPOST_WORKER_LEASE_MARGIN_SECONDS", "0.3")
    ended = list[str]()

    async def wait(_message: Message[Any], context: MessageContext) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            assert context.run is not None
            ended.append("cancelled" if context.run.cancelled else "stopped")
            raise

    run = await runs.accept()
    event = await ask(one, run)
    async with one.running(executing(wait)):
        await eventually(lambda: _state_is(runs, run, "running"))
        assert await runs.cancel(run) == "requested"
        await one.until_committed({0: 1})
    assert ended == ["cancelled"]
    assert await runs.state(run) == ("cancelled", "cancelled")
    assert await one.outcomes() == {event: "succeeded"}


async def test_a_consumer_that_stops_gives_the_run_back_without_a_failure(one: Stage, runs: Runs) -> None:
    """CONSUME-3: the next process goes on with it at once."""
    attempts, leave = list[int](), asyncio.Event()

    async def wait(_message: Message[Any], context: MessageContext) -> None:
        assert context.run is not None
        attempts.append(context.run.attempt)
        await leave.wait()

    run = await runs.accept(max_attempts=1)
    await ask(one, run)
    async with one.running(executing(wait), consumer_stop_grace_seconds=0):
        await eventually(lambda: attempts)
    assert await runs.state(run) == ("running", "queued")
    assert await one.outcomes() == {}
    leave.set()
    async with one.running(executing(wait)):
        await one.until_committed({0: 1})
    assert attempts == [1, 1]
    assert await runs.state(run) == ("completed", "completed")


async def test_a_replayed_run_is_found_by_its_message(one: Stage, runs: Runs) -> None:
    """The message names the run that failed; what takes its place is what is executed now."""
    mended, executed = asyncio.Event(), list[UUID]()

    async def report(_message: Message[Any], context: MessageContext) -> None:
        assert context.run is not None
        executed.append(context.run.run_id)
        if not mended.is_set():
            raise Terminal("broken")

    run = await runs.accept()
    event = await ask(one, run)
    async with one.running(executing(report)):
        await one.until_committed({0: 1})
        (letter,) = await one.dead()
        outcome, replay = await runs.replay(run)
        assert (outcome, letter["reason"]) == ("replayed", "run_failed")
        assert replay is not None
        mended.set()
        await one.connection.execute("SELECT fencepost.redrive_dead_letter($1, false, 'ana', 'mended')", letter["dead_letter_id"])
        await eventually(lambda: _outcome_is(one, event, "succeeded"))
    assert executed == [run, replay]
    assert await runs.state(replay) == ("completed", "completed")
    assert [letter["state"] for letter in await one.dead()] == ["redriven"]


async def test_two_messages_of_one_run_and_a_replay_share_its_effects(
    one: Stage, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LEDGER-8: the lineage keeps them, whichever message brings it here."""
    monkeypatch.setenv("FENCEPOST_IDEMPOTENCY_SECRETS", SECRETS)
    calls, results = list[str](), list[object]()

    async def charge(_message: Message[Any], context: MessageContext) -> None:
        async def call(effect: Any) -> str:
            calls.append(effect.key)
            return "receipt"

        results.append(await context.once("card.charge", request={"amount": 10}, call=call))
        if len(results) == 1:
            raise Terminal("after_the_charge")

    run = await runs.accept()
    await ask(one, run)
    async with one.running(executing(charge)):
        await one.until_committed({0: 1})
        _, replay = await runs.replay(run)
        await ask(one, replay)
        await one.until_committed({0: 2})
    row = await one.connection.fetchrow("SELECT run_key, step, sends FROM fencepost.effects WHERE operation = 'card.charge'")
    assert row is not None
    assert tuple(row) == (str(run), "execute", 1)
    assert results == ["receipt", "receipt"]
    assert len(calls) == 1


async def test_two_consumers_that_hold_one_run_execute_it_once(one: Stage, runs: Runs) -> None:
    """Two events of one run at once: one claims it, the other waits, and finds it completed."""
    reached, leave, calls = asyncio.Event(), asyncio.Event(), list[str]()

    async def wait(message: Message[Any], _context: MessageContext) -> None:
        calls.append(message.event_id)
        reached.set()
        await leave.wait()

    run = await runs.accept()
    events = [await ask(one, run, key=key) for key in ("a", "b")]
    async with one.running(executing(wait)) as consumer:
        await reached.wait()
        await eventually(lambda: sample(consumer, MESSAGES, **POSTPONED) >= 1)
        leave.set()
        await one.until_committed({0: 2})
    assert len(calls) == 1
    assert await one.outcomes() == dict.fromkeys(events, "succeeded")
    assert len(await runs.attempts(run)) == 1


async def _state_is(runs: Runs, run_id: UUID, state: str) -> bool:
    return (await runs.state(run_id))[0] == state


async def _outcome_is(made: Stage, event: str, state: str) -> bool:
    return (await made.outcomes()).get(event) == state
