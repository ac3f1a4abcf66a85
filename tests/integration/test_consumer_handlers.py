"""What handlers do wrong, and what that costs: their own attempt, nobody else's, and never the consumer."""

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest

from consumer_sdk import LeaseLost, Message, MessageContext, MessageHandlers, Retry, Retryable, RetryLater, Terminal
from fencepost.errors import AlreadyHandled, ConfigurationError, TransactionRequired
from tests.support.consumers import SECRETS, Ping, Stage, sample, stage
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

pytestmark = pytest.mark.services

SOON: Final = Retry(base_seconds=0.05, cap_seconds=0.05, jitter="none")
MESSAGES: Final = "fencepost_consumer_messages_total"


@pytest.fixture
async def one(database_url: str, kafka: str, topic: TopicFactory) -> AsyncIterator[Stage]:
    async with stage(database_url, kafka, topic) as made:
        yield made


def handling(function: Any, **options: Any) -> MessageHandlers:
    app = MessageHandlers()
    app.handler("ping", model=Ping, step="handle", **({"retry": SOON} | options))(function)
    return app


async def write(connection: Any, message: Message[Ping]) -> None:
    await connection.execute("INSERT INTO seen VALUES ($1, $2)", message.event_id, message.value.n)


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt, GeneratorExit])
async def test_a_handler_that_ends_the_process_ends_its_attempt(one: Stage, end: type[BaseException]) -> None:
    """sys.exit() in a library, say: two attempts, a dead letter, and the next message of the key is handled."""
    handled, attempts = list[int](), list[int]()

    async def ending(message: Message[Ping], context: MessageContext) -> None:
        if message.value.n == 0:
            attempts.append(context.attempt)
            sys.exit(3) if end is SystemExit else raising(end)
        handled.append(message.value.n)

    await one.send({"n": 0})
    await one.send({"n": 1})
    async with one.running(handling(ending, attempts=2)):
        await one.until_committed({0: 2})
    (letter,) = await one.dead()
    assert (attempts, handled) == ([1, 2], [1])
    assert (letter["reason"], letter["attempts"]) == ("attempts_exhausted", 2)
    assert letter["error_class"].endswith("HandlerExited")


async def test_a_handler_that_takes_too_long_fails_its_attempt(one: Stage) -> None:
    attempts: list[int] = []

    async def hang(_message: Message[Ping], context: MessageContext) -> None:
        attempts.append(context.attempt)
        if context.attempt == 1:
            await asyncio.Event().wait()

    await one.send({"n": 0})
    async with one.running(handling(hang, attempt_seconds=0.2)):
        await one.until_committed({0: 1})
    assert attempts == [1, 2]
    assert await one.dead() == []


async def test_a_transaction_that_takes_too_long_is_undone_and_fails_its_attempt(one: Stage) -> None:
    """The statement is bounded by the server too, so that nothing of it is left when the next attempt comes."""
    attempts: list[int] = []

    async def slow(message: Message[Ping], context: MessageContext) -> None:
        attempts.append(context.attempt)
        async with context.transaction() as connection:
            await write(connection, message)
            if context.attempt == 1:
                await connection.execute("SELECT pg_sleep(60)")

    await one.send({"n": 0})
    async with one.running(handling(slow, attempt_seconds=0.3)):
        await one.until_committed({0: 1})
    assert attempts == [1, 2]
    assert await one.seen() == [0]


async def test_a_handler_that_swallows_its_cancellation_does_not_keep_the_consumer(one: Stage) -> None:
    """It is left behind: nothing of it is committed, and the next process handles the message."""
    app_hangs, calls, release = asyncio.Event(), Counter[int](), asyncio.Event()

    async def stubborn(message: Message[Ping], _context: MessageContext) -> None:
        calls[message.value.n] += 1
        app_hangs.set()
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()

    app = handling(stubborn)
    await one.send({"n": 0})
    async with one.running(app, consumer_stop_grace_seconds=0):
        await app_hangs.wait()
    assert await one.committed() == {0: 0}
    assert (await one.outcomes(), await one.dead()) == ({}, [])
    release.set()
    async with one.running(app):
        await one.until_committed({0: 1})
    assert calls == {0: 2}


async def test_a_handler_may_clean_up_when_the_consumer_stops(one: Stage) -> None:
    """It is told, and what it ends within the grace counts."""

    async def finishing(message: Message[Ping], context: MessageContext) -> None:
        await one.connection.execute("INSERT INTO seen VALUES ('begun', $1)", -1)
        await context.stopping.wait()
        async with context.transaction() as connection:
            await write(connection, message)

    event = await one.send({"n": 0})
    async with one.running(handling(finishing), consumer_stop_grace_seconds=10):
        await eventually(one.seen)
    assert await one.outcomes() == {event: "succeeded"}
    assert await one.committed() == {0: 1}


async def test_what_fails_inside_a_transaction_leaves_nothing_but_a_spent_attempt(one: Stage) -> None:
    attempts: list[int] = []

    async def failing(message: Message[Ping], context: MessageContext) -> None:
        attempts.append(context.attempt)
        async with context.transaction() as connection:
            await write(connection, message)
            if context.attempt < 3:
                assert await one.seen() == []
                raise ValueError

    event = await one.send({"n": 0})
    async with one.running(handling(failing, attempts=3)):
        await one.until_committed({0: 1})
    assert attempts == [1, 2, 3]
    assert await one.seen() == [0]
    assert await one.outcomes() == {event: "succeeded"}


@pytest.mark.parametrize("state", ["40001", "40P01", "53300", "57P03"])
async def test_conflicts_and_a_database_in_trouble_spend_no_attempt(one: Stage, state: str) -> None:
    """CONSUME-20: what PostgreSQL asks to try again is nobody's failure."""
    attempts: list[int] = []

    async def conflicting(message: Message[Ping], context: MessageContext) -> None:
        attempts.append(context.attempt)
        async with context.transaction() as connection:
            await write(connection, message)
            if len(attempts) < 4:
                await connection.execute(f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{state}'; END $$")

    await one.send({"n": 0})
    async with one.running(handling(conflicting, attempts=1)):
        await one.until_committed({0: 1})
    assert attempts == [1, 1, 1, 1]
    assert await one.seen() == [0]
    assert await one.dead() == []


@pytest.mark.parametrize("then", ["commits", "goes on"])
async def test_a_session_that_is_ended_under_a_handler_spends_no_attempt(one: Stage, then: str) -> None:
    """CONSUME-20: as a failover ends it, whether the handler notices or only its commit does."""
    attempts: list[int] = []

    async def write_it(message: Message[Ping], context: MessageContext) -> None:
        attempts.append(context.attempt)
        async with context.transaction() as connection:
            await write(connection, message)
            if len(attempts) == 1:
                pid = await connection.fetchval("SELECT pg_backend_pid()")
                assert await one.connection.fetchval("SELECT pg_terminate_backend($1, 5000)", pid)
                if then == "goes on":
                    await connection.execute("SELECT 1")

    await one.send({"n": 0})
    async with one.running(handling(write_it, attempts=1)):
        await one.until_committed({0: 1})
    assert attempts == [1, 1]
    assert await one.seen() == [0]


async def test_calls_are_made_before_the_transaction_and_nothing_after_it(one: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEPOST_IDEMPOTENCY_SECRETS", SECRETS)
    refused, calls, kept = list[str](), list[str](), list[MessageContext]()

    async def call(_effect: Any) -> None:
        calls.append("called")

    async def misuse(message: Message[Ping], context: MessageContext) -> None:
        kept.append(context)
        with contextlib.suppress(ConfigurationError):
            await context.complete()
            refused.append("completion without a run went through")
        async with context.transaction() as connection:
            await write(connection, message)
            for attempt in (context.once("card.charge", request=1, call=call), nested(context)):
                try:
                    await attempt
                except TransactionRequired as error:
                    refused.append(type(error).__name__)
        try:
            await context.once("card.charge", request=1, call=call)
        except TransactionRequired as error:
            refused.append(type(error).__name__)

    await one.send({"n": 0})
    async with one.running(handling(misuse)):
        await one.until_committed({0: 1})
        with pytest.raises(LeaseLost):
            await kept[0].once("card.charge", request=1, call=call)
        with pytest.raises(LeaseLost):
            await nested(kept[0])
    assert refused == ["TransactionRequired"] * 3
    assert calls == []
    assert await one.seen() == [0]


async def test_a_transaction_of_a_message_that_was_handled_meanwhile_is_refused_before_it_writes(one: Stage) -> None:
    """CONSUME-10: AlreadyHandled ends the handler, and counts as a duplicate; whoever swallows it changes nothing."""
    told: list[str] = []

    async def late(message: Message[Ping], context: MessageContext) -> None:
        await one.connection.execute(
            "INSERT INTO fencepost.effects (run_key, tenant_id, iteration, step, occurrence, operation, state, holder, finished_at)"
            " VALUES ($1, '', 0, $2, 0, 'fencepost.message', 'succeeded', 'other', now())",
            message.event_id,
            f"{one.topic}/handle",
        )
        try:
            async with context.transaction() as connection:
                told.append("written")
                await write(connection, message)
        except AlreadyHandled:
            told.append("already")
            if message.value.n == 1:
                raise

    for number in range(2):
        await one.send({"n": number})
    async with one.running(handling(late)) as consumer:
        await one.until_committed({0: 2})
        assert sample(consumer, MESSAGES, type="ping", outcome="duplicate") == 2
    assert told == ["already", "already"]
    assert await one.seen() == []


@pytest.mark.parametrize(
    ("error", "reason", "attempts"),
    [(Terminal("no"), "rejected", 1), (Retryable("busy"), "attempts_exhausted", 2), (KeyError("n"), "attempts_exhausted", 2)],
    ids=["terminal", "retryable", "unknown"],
)
async def test_an_error_is_what_its_class_says(one: Stage, error: Exception, reason: str, attempts: int) -> None:
    async def failing(_message: Message[Ping], _context: MessageContext) -> None:
        raise error

    await one.send({"n": 0})
    async with one.running(handling(failing, attempts=2)) as consumer:
        await one.until_committed({0: 1})
        assert sample(consumer, MESSAGES, type="ping", outcome="retried") == attempts - 1
    (letter,) = await one.dead()
    assert (letter["reason"], letter["attempts"]) == (reason, attempts)


async def test_what_is_put_off_lets_other_keys_by_and_its_own_wait(one: Stage) -> None:
    """CONSUME-19, CONSUME-23: RetryLater holds its key, not a slot."""
    order, free = list[str](), asyncio.Event()

    async def later(message: Message[Ping], _context: MessageContext) -> None:
        assert message.key is not None
        name = f"{message.key.decode()}{message.value.n}"
        if name == "a0" and not free.is_set():
            raise RetryLater("not_now", seconds=0.1)
        order.append(name)

    for key, number in (("a", 0), ("a", 1), ("b", 0), ("b", 1)):
        await one.send({"n": number}, key=key)
    async with one.running(handling(later), consumer_concurrency=1) as consumer:
        await eventually(lambda: order == ["b0", "b1"])
        await eventually(lambda: sample(consumer, MESSAGES, type="ping", outcome="postponed") >= 3)
        assert await one.committed() == {0: 0}
        free.set()
        await one.until_committed({0: 4})
    assert order == ["b0", "b1", "a0", "a1"]


async def test_nothing_secret_is_told_of_a_failure(one: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither payload nor key nor the words of an error reach log or dead letter's reason."""

    async def failing(_message: Message[Ping], _context: MessageContext) -> None:
        raise ValueError("s3cr3t")

    await one.send({"n": 424242}, key="k3y")
    async with one.running(handling(failing, attempts=2)):
        await one.until_committed({0: 1})
    (letter,) = await one.dead()
    log = "".join(capsys.readouterr())
    assert "attempt_failed" in log
    assert [word for word in ("s3cr3t", "424242", "k3y") if word in log] == []
    assert "s3cr3t" not in f"{letter['reason']} {letter['error_class']} {letter['error_code']}"


async def nested(context: MessageContext) -> None:
    async with context.transaction():
        pass


def raising(end: type[BaseException]) -> None:
    raise end
