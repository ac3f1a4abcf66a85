"""A handler's author delivers messages in a test, and sees what became of them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from pydantic import BaseModel

from consumer_sdk import Effect, Message, MessageContext, MessageHandlers, Retryable, RetryLater, Terminal
from consumer_sdk.testing import Again, Dead, Done, Memory, Recorder, event, handle, handle_many, message, record, redrive
from consumer_sdk.testing.memory_effects import MemoryEffects
from consumer_sdk.testing.memory_messages import MemoryMessages, MemoryTransaction
from fencepost.errors import ConfigurationError

HANDLED, DUPLICATE = Done("handled"), Done("duplicate")
INSERT = "INSERT INTO orders VALUES ($1)"


class Order(BaseModel):
    order: str


def order(name: str = "o-1", **options: Any) -> Any:
    return event("order.placed", {"order": name}, **options)


def app_that(function: Any, **options: Any) -> MessageHandlers:
    app = MessageHandlers()
    app.handler("order.placed", step="store", model=Order, **options)(function)
    return app


async def stores(placed: Message[Order], context: MessageContext) -> None:
    async with context.transaction() as connection:
        await connection.execute(INSERT, placed.value.order)


def failing(*errors: Exception) -> Any:
    """Stores, and fails behind it, an error an attempt."""
    left = list(errors)

    async def fails(placed: Message[Order], context: MessageContext) -> None:
        async with context.transaction() as connection:
            await connection.execute(INSERT, placed.value.order)
            if left:
                raise left.pop(0)

    return fails


# -- outcomes -------------------------------------------------------------------------------------------------------------


async def test_a_message_is_handled_and_its_redelivery_is_a_duplicate() -> None:
    app, memory, placed = app_that(stores), Memory(), order()
    assert [(await handle(app, placed, memory=memory)).outcome for _ in range(2)] == [HANDLED, DUPLICATE]
    assert [(call.query, call.arguments) for call in memory.calls] == [(INSERT, ("o-1",))]


async def test_messages_of_one_run_find_its_effect_however_they_spell_its_id() -> None:
    run, memory, calls = "0199c0de-0000-7000-8000-0000000000aB", Memory(), []

    async def charges(_placed: Message[Order], context: MessageContext) -> None:
        async def call(effect: Effect) -> str:
            calls.append(effect.key)
            return "receipt"

        await context.once("provider.charge", request={"amount": 7}, call=call)

    app = app_that(charges)
    for spelled in (run, run.upper(), run.lower()):
        assert (await handle(app, order(run_id=spelled), memory=memory)).outcome == HANDLED
    assert len(calls) == 1
    assert {key.run_key for key in memory.effects.rows() if key.operation == "provider.charge"} == {run.lower()}


async def test_of_many_deliveries_at_once_one_is_handled() -> None:
    app, memory, placed = app_that(stores), Memory(), order()
    handled = await asyncio.gather(*(handle(app, placed, memory=memory) for _ in range(5)))
    assert sorted(one.outcome for one in handled) == sorted([HANDLED, *[DUPLICATE] * 4])
    assert len(memory.calls) == 1


async def test_what_a_failed_transaction_did_is_forgotten_and_the_error_is_told() -> None:
    memory, error = Memory(), Retryable("busy")
    handled = await handle(app_that(failing(error)), order(), memory=memory)
    assert isinstance(handled.outcome, Again)
    assert (handled.outcome.spent, handled.error, memory.calls, handled.dead_letters) == (True, error, [], [])
    again = await handled.again()
    assert (again.outcome, again.error, len(memory.calls)) == (HANDLED, None, 1)


async def test_a_message_that_fails_to_the_end_is_a_dead_letter() -> None:
    memory = Memory()
    handled = await handle(app_that(failing(*(Retryable("busy") for _ in range(3))), attempts=3), order(), memory=memory)
    ended = await handled.to_the_end()
    assert isinstance(ended.outcome, Dead)
    assert (ended.outcome.reason, ended.outcome.error_code) == ("attempts_exhausted", "busy")
    assert [(letter.attempts, letter.payload) for letter in ended.dead_letters] == [(3, b'{"order":"o-1"}')]
    assert ended.dead_letters == list(memory.dead_letters)


async def test_a_redrive_handles_a_dead_letter_anew() -> None:
    app, memory, placed = app_that(failing(Terminal("closed"))), Memory(), order()
    await handle(app, placed, memory=memory)
    assert await redrive(app, memory=memory) == [], "nobody has asked for it"
    assert memory.redrive(memory.dead_letters[0]) == "redriving"
    (step,) = await redrive(app, memory=memory)
    assert (step.step, step.outcome, step.error, memory.dead_letters[0].state) == ("store", HANDLED, None, "redriven")
    assert memory.redrive(memory.dead_letters[0]) == "not_dead"
    assert (await handle(app, placed, memory=memory)).outcome == DUPLICATE


async def test_a_dead_letter_that_is_too_old_is_not_handled_anew() -> None:
    app, memory = app_that(failing(Terminal("closed"))), Memory()
    await handle(app, order(), memory=memory)
    memory.redrive(memory.dead_letters[0])
    memory.clock.advance(8 * 86_400)
    (step,) = await redrive(app, memory=memory)
    assert isinstance(step.outcome, Dead)
    assert step.outcome.reason == "too_old"


async def test_effects_of_the_message_are_shown_and_happen_once() -> None:
    calls: list[str] = []

    async def charges(_placed: Message[Order], context: MessageContext) -> None:
        async def charge(effect: Effect) -> object:
            calls.append(effect.key)
            return {"receipt": 1}

        await context.once("card.charge", request={"amount": 1}, call=charge)
        raise Retryable("busy")

    memory = Memory()
    await handle(app_that(charges), order(), memory=memory)
    handled = await (await handle(app_that(charges), order(run_id="r-1"), memory=memory)).again()
    assert [(key.run_key, row.state, row.sends) for key, row in handled.effects.items()] == [("r-1", "succeeded", 1)]
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (record(b"\xff"), "undecodable"),
        (event("unheard.of", 1), "unknown_type"),
        (event("order.placed"), "tombstone"),
        (event("order.placed", {"odd": 1}), "invalid_payload"),
    ],
    ids=["undecodable", "unknown_type", "tombstone", "invalid_payload"],
)
async def test_what_no_handler_takes_is_a_dead_letter(given: Any, reason: str) -> None:
    handled = await handle(app_that(stores), given, memory=Memory())
    assert isinstance(handled.outcome, Dead)
    assert handled.outcome.reason == reason
    assert [letter.reason for letter in handled.dead_letters] == [reason]


async def test_a_type_that_is_ignored_has_no_outcome() -> None:
    app = app_that(stores)
    app.ignore("order.seen")
    handled = await handle(app, event("order.seen", 1), memory=Memory())
    assert handled.ignored
    assert "ignored" in repr(handled)
    with pytest.raises(AssertionError, match="0 handlers"):
        _ = handled.outcome


async def test_each_handler_of_a_message_is_a_step() -> None:
    app = app_that(stores)
    app.handler("order.placed", step="mail")(failing_mail)
    handled = await handle(app, order(), memory=Memory())
    assert [(one.step, type(one.outcome)) for one in handled.steps] == [("store", Done), ("mail", Dead)]
    with pytest.raises(AssertionError, match="2 handlers"):
        _ = handled.outcome


async def failing_mail(_placed: Message[Any], _context: MessageContext) -> None:
    raise Terminal("refused")


async def test_two_consumers_handle_a_message_each_for_itself() -> None:
    app, memory, placed = app_that(stores), Memory(), order()
    for consumer in ("billing", "shipping"):
        assert (await handle(app, placed, memory=memory, consumer=consumer)).outcome == HANDLED


async def test_nothing_is_tried_behind_a_message_of_its_key_that_is_to_be_tried_again() -> None:
    app, memory = app_that(failing(Retryable("busy"))), Memory()
    orders = [order("o-1", key="a"), order("o-2", key="a"), order("o-3", key="b")]
    first, second, third = await handle_many(app, orders, memory=memory)
    assert isinstance(first.outcome, Again)
    assert (second.outcome, third.outcome) == (Again(0.0, spent=False), HANDLED)
    assert [(await one.again()).outcome for one in (first, second)] == [HANDLED, HANDLED]
    assert [call.arguments for call in memory.calls] == [("o-3",), ("o-1",), ("o-2",)]


async def test_a_batch_keeps_the_order_of_each_key_and_leaves_no_message_out() -> None:
    app, batches = MessageHandlers(), list[list[str]]()

    @app.batch_handler("order.placed", step="bulk", model=Order, most=3)
    async def bulk(orders: Sequence[Message[Order]], connection: Any) -> None:
        batches.append([placed.value.order for placed in orders])
        await connection.executemany(INSERT, [(placed.value.order,) for placed in orders])

    @app.handler("order.paid", step="note")
    async def note(paid: Message[Any], _context: MessageContext) -> None:
        batches.append([paid.value])

    memory = Memory()
    records = [order("1", key="a"), event("order.paid", "2", key="a"), order("3", key="a"), *(order(key=None) for _ in range(3))]
    handled = await handle_many(app, records, memory=memory)
    assert {one.outcome for one in handled} == {HANDLED}
    assert batches == [["1", "o-1", "o-1"], ["2"], ["3", "o-1"]]
    assert [len(call.arguments) for call in memory.calls] == [3, 2]


# -- what is given --------------------------------------------------------------------------------------------------------


async def test_a_message_is_delivered_as_its_record() -> None:
    seen: list[Message[Any]] = []

    async def sees(placed: Message[Any], _context: MessageContext) -> None:
        seen.append(placed)

    app, memory = app_that(sees), Memory()
    for options in ({}, {"schema_version": 1, "headers": [("mine", b"1")], "run_id": "r", "key": None, "tenant_id": None}):
        given = message("order.placed", {"order": "o-1"}, **options)  # type: ignore[arg-type]
        assert (await handle(app, given, memory=memory)).outcome == HANDLED
        assert seen[-1].with_value(None) == given.with_value(None)
        assert (await handle(app, given, memory=memory)).outcome == DUPLICATE


async def test_a_handler_with_a_workflow_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match=r"type order\.placed, step store: .*PostgreSQL"):
        await handle(app_that(stores, workflow="order"), order(), memory=Memory())


class EndedBeforeItCouldSay(MemoryMessages):
    """Of a process that ends nobody hears that a trial has ended."""

    async def end_trial(self, transaction: MemoryTransaction, *trial: Any) -> Sequence[Any]:
        return []


async def test_a_message_that_fails_as_often_without_ending_its_process_is_not_counted() -> None:
    app, memory, failed = app_that(failing(*(Retryable("busy") for _ in range(3))), attempts=2), Memory(), order()
    for _ in range(3):
        assert isinstance((await handle(app, failed, memory=memory, suspect=True)).outcome, Again)
    assert (await handle(app, failed, memory=memory, suspect=True)).outcome == HANDLED


async def test_a_message_that_ends_its_processes_is_given_up() -> None:
    app, deadly = app_that(failing(*(Retryable("busy") for _ in range(9))), attempts=2), order()
    memory = Memory(EndedBeforeItCouldSay(MemoryEffects()))
    for _ in range(2):
        assert isinstance((await handle(app, deadly, memory=memory, suspect=True)).outcome, Again)
    handled = await handle(app, deadly, memory=memory, suspect=True)
    assert isinstance(handled.outcome, Dead)
    assert handled.outcome.error_code == "process_ended"


# -- time -----------------------------------------------------------------------------------------------------------------


async def test_the_clock_moves_by_what_a_message_is_told_to_wait_and_by_nothing_else() -> None:
    memory = Memory()
    start = memory.clock.now()
    handled = await handle(app_that(failing(RetryLater("closed", seconds=90))), order(), memory=memory)
    assert memory.clock.now() == start
    assert handled.outcome == Again(90, spent=False)
    assert (await handled.again()).outcome == HANDLED
    assert (memory.clock.now() - start).total_seconds() == 90


async def test_patience_ends_without_anybody_having_waited() -> None:
    app = app_that(failing(*(RetryLater("closed", seconds=60) for _ in range(99))), patience_seconds=200)
    ended = await (await handle(app, order(), memory=Memory())).to_the_end()
    assert isinstance(ended.outcome, Dead)
    assert (ended.outcome.reason, ended.dead_letters[0].attempts) == ("patience_exhausted", 1)


async def test_a_message_that_never_ends_is_told() -> None:
    async def waits(_placed: Message[Order], _context: MessageContext) -> None:
        raise RetryLater("closed", seconds=0)

    handled = await handle(app_that(waits), order(), memory=Memory())
    with pytest.raises(AssertionError, match="1000 attempts"):
        await handled.to_the_end()


# -- connections ----------------------------------------------------------------------------------------------------------


class Book:
    """A connection of the test's own."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.told: list[str] = []

    async def execute(self, _query: str, line: str) -> None:
        self.lines.append(line)
        await asyncio.sleep(0)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        self.told.append("begin")
        try:
            yield
        except BaseException:
            self.told.append("rollback")
            raise
        self.told.append("commit")


async def test_a_given_connection_is_handed_out_in_a_transaction_of_its_own() -> None:
    memory, book, app = Memory(), Book(), app_that(failing(Retryable("busy")))
    handled = await handle(app, order(), memory=memory, connection=book)
    assert book.told == ["begin", "rollback"]
    assert (await handled.again()).outcome == HANDLED
    assert book.told == ["begin", "rollback", "begin", "commit"]
    assert (book.lines, memory.calls) == (["o-1", "o-1"], [])


async def test_transactions_on_one_connection_come_one_after_the_other() -> None:
    memory, book, app = Memory(), Book(), app_that(stores)
    handled = await asyncio.gather(*(handle(app, order(str(n)), memory=memory, connection=book) for n in range(5)))
    assert {one.outcome for one in handled} == {HANDLED}
    assert book.told == ["begin", "commit"] * 5


@pytest.mark.parametrize("connection", [AsyncMock(), SimpleNamespace(execute=AsyncMock())], ids=["answers everything", "executes"])
async def test_a_mock_will_do_for_a_connection(connection: Any) -> None:
    assert (await handle(app_that(stores), order(), memory=Memory(), connection=connection)).outcome == HANDLED
    connection.execute.assert_awaited_once_with(INSERT, "o-1")


async def test_a_recorder_answers_what_it_is_told_to_and_keeps_what_succeeded() -> None:
    recorder = Recorder({"SELECT 1": 7})
    assert recorder.is_in_transaction()
    assert [await recorder.fetchval("SELECT 1"), await recorder.fetch("SELECT 2"), await recorder.fetchrow("SELECT 3")] == [
        7,
        [],
        None,
    ]
    with contextlib.suppress(Terminal):
        async with recorder.transaction():
            await recorder.execute("undone")
            raise Terminal("refused")
    async with recorder.transaction():
        await recorder.copy_records_to_table("orders", records=[("o-1",)], columns=["name"])
    assert [(call.method, call.query) for call in recorder.calls] == [
        ("fetchval", "SELECT 1"), ("fetch", "SELECT 2"), ("fetchrow", "SELECT 3"), ("copy_records_to_table", "orders"),
    ]  # fmt: skip
    assert recorder.calls[-1].arguments == (("o-1",),)


async def test_an_answer_reaches_the_handler() -> None:
    seen: list[object] = []

    async def reads(_placed: Message[Order], context: MessageContext) -> None:
        async with context.transaction() as connection:
            seen.append(await connection.fetchval("SELECT limit"))

    memory = Memory()
    memory.answers["SELECT limit"] = 100
    assert (await handle(app_that(reads), order(), memory=memory)).outcome == HANDLED
    assert seen == [100]
