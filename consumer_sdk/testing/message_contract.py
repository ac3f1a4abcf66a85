"""The contract of a consumer's database as tests: a message is handled once, its dead letter is kept, and a redrive really runs.

Subclass it where pytest finds it, and say what to put to the test::

    class TestMyMessages(MessageContract):
        @asynccontextmanager
        async def opened(self) -> AsyncIterator[MessageHarness]:
            yield MemoryMessageHarness()

It needs pytest, and no plugin. For assertions that tell what they compared, put
``pytest.register_assert_rewrite("consumer_sdk.testing.message_contract")`` into a conftest.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from consumer_sdk.classification import Ambiguous, Retryable, Terminal
from consumer_sdk.delivery import Again, Dead, Outcome
from consumer_sdk.identity import Identity
from consumer_sdk.message import Message
from consumer_sdk.message_context import MessageContext
from consumer_sdk.message_handlers import MessageHandlers
from consumer_sdk.testing.builders import BuiltRecord, event, record
from consumer_sdk.testing.message_bench import (
    DUPLICATE,
    FAILURES,
    HANDLED,
    TYPE,
    Function,
    MessageBench,
    app_of,
    event_id,
    message_sentence,
    ping,
)
from consumer_sdk.testing.message_harness import MemoryMessageHarness, MessageHarness

__all__ = ["MemoryMessageHarness", "MessageContract", "MessageHarness"]

_BATCH: Final = 100
_POISON: Final = 37
_MOMENT_SECONDS: Final = 0.1


class MessageContract:
    """Subclass it and override ``opened``; ``limit_seconds`` bounds each test."""

    limit_seconds: float = 60.0

    def opened(self) -> AbstractAsyncContextManager[MessageHarness]:
        """A database to put to the test."""
        raise NotImplementedError

    # Once

    @message_sentence
    async def test_the_same_event_at_a_new_offset_is_a_duplicate(self, bench: MessageBench) -> None:
        """CONSUME-16 and CONSUME-26: published once more, with or without an effect inside the database."""
        calls: list[int] = []

        async def counts(message: Message[Any], context: MessageContext) -> None:
            calls.append(message.offset)

        for function in (bench.writes, counts):
            first, copy = ping(offset=50, event_id=(same := event_id(ping()))), ping(offset=57, event_id=same)
            app = app_of(function)
            assert [await bench.gets(app, one) for one in (first, copy, first)] == [HANDLED, DUPLICATE, DUPLICATE]
            row = await bench.outcome_row(first)
            assert row is not None
            assert (row["state"], row["error_code"]) == ("succeeded", None)
        assert await bench.written() == ["1"]
        assert calls == [50]

    @message_sentence
    async def test_each_step_and_each_consumer_handles_a_message_for_itself(self, bench: MessageBench) -> None:
        """CONSUME-9."""

        async def refuses(_message: Message[Any], _context: MessageContext) -> None:
            raise Terminal("refused")

        both, app = ping(), app_of(bench.writes, bench.writes, refuses)
        for consumer in (bench.consumer, f"{bench.consumer}-2"):
            for expected in ([HANDLED, HANDLED, Dead], [DUPLICATE, DUPLICATE, DUPLICATE]):
                attempts = await bench.member(app, consumer=consumer).tries(both)
                assert [_kind(one.outcome) for one in attempts] == expected
            assert len(await bench.letters(consumer)) == 1
        assert len(await bench.written()) == 4
        assert len(await bench.harness.rows(event_id(both))) == 6

    @message_sentence
    async def test_of_two_deliveries_at_once_one_is_handled_and_the_other_is_a_duplicate(self, bench: MessageBench) -> None:
        """CONSUME-10: both have begun before either writes."""
        for inside in (True, False):
            twice = ping()
            outcomes = await _at_once(bench, app_of(_meeting(bench, inside=inside)), twice)
            assert sorted(outcomes) == sorted([HANDLED, DUPLICATE])
            assert await bench.outcome_row(twice) is not None
        assert await bench.written() == ["1"]
        assert await bench.letters() == []

    @message_sentence
    async def test_who_waits_for_another_delivery_handles_the_message_if_that_one_fails(self, bench: MessageBench) -> None:
        inside, coming = asyncio.Event(), asyncio.Event()

        async def fails(_message: Message[Any], context: MessageContext) -> None:
            async with context.transaction() as connection:
                await bench.write(connection, "undone")
                inside.set()
                await coming.wait()
                raise Retryable("busy")

        async def comes(message: Message[Any], context: MessageContext) -> None:
            coming.set()
            await bench.writes(message, context)

        both, first = ping(), bench.member(app_of(fails), "m1")
        failing = asyncio.create_task(first.tries(both))
        await inside.wait()
        assert await bench.member(app_of(comes), "m2").gets(both) == HANDLED
        attempts = await failing
        assert _kind(attempts[0].outcome) is Again
        assert (await first.tries_again(attempts))[0].outcome == DUPLICATE
        assert await bench.written() == ["1"]

    # All or nothing

    @message_sentence
    async def test_a_transaction_that_fails_leaves_nothing_and_one_that_commits_leaves_all(self, bench: MessageBench) -> None:
        """LEDGER-10, with a failure of each class."""
        for error in FAILURES:
            one, before = ping(), await bench.written()
            member = bench.member(app_of(_failing_once(bench, error)))
            attempts = await member.tries(one)
            row = await bench.outcome_row(one)
            assert await bench.written() == before
            assert (row is None) == isinstance(attempts[0].outcome, Again), "what is given up has an outcome, and nothing else has"
            assert row is None or row["state"] == "failed"
            if row is None:
                assert (await member.tries_again(attempts))[0].outcome == HANDLED
                assert await bench.written() == [*before, "1"]
                assert await bench.outcome_row(one) is not None

    @message_sentence
    async def test_one_that_cannot_be_handled_costs_its_batch_nothing(self, bench: MessageBench) -> None:
        """CONSUME-22."""
        app = MessageHandlers()

        @app.batch_handler(TYPE, step="bulk", most=_BATCH)
        async def bulk(messages: Sequence[Message[Any]], connection: Any) -> None:
            for message in messages:
                await bench.write(connection, str(message.value))
            if any(message.value == _POISON for message in messages):
                raise Terminal("poison")

        batch = [ping(number, key=None) for number in range(_BATCH)]
        outcomes = [attempts[0].outcome for attempts in await bench.member(app).tries_all(batch)]
        assert [place for place, outcome in enumerate(outcomes) if outcome != HANDLED] == [_POISON]
        assert isinstance(outcomes[_POISON], Dead)
        assert sorted(map(int, await bench.written())) == [number for number in range(_BATCH) if number != _POISON]
        letter = await bench.dead_letter()
        assert (letter["payload"], letter["attempts"], letter["error_code"]) == (b"37", 1, "poison")
        again = await bench.member(app).tries_all(batch)
        assert {attempts[0].outcome for attempts in again} == {DUPLICATE}

    @message_sentence
    async def test_copies_in_one_batch_and_in_two_at_once_are_handled_once_and_their_neighbours_too(
        self, bench: MessageBench
    ) -> None:
        app, begun = MessageHandlers(), asyncio.Barrier(2)

        @app.batch_handler(TYPE, step="bulk", most=_BATCH)
        async def bulk(messages: Sequence[Message[Any]], connection: Any) -> None:
            for message in messages:
                await bench.write(connection, str(message.value))

        batch = [ping(number, key=None) for number in range(15)]
        assert await bench.gets(app, batch[0]) == HANDLED

        async def tried(holder: str, records: Sequence[BuiltRecord]) -> list[Outcome]:
            member = bench.member(app, holder)
            await begun.wait()
            return [attempts[0].outcome for attempts in await member.tries_all(records)]

        first, second = await asyncio.gather(tried("m1", batch[:10] + batch[:10]), tried("m2", batch[:4:-1] + batch[5:]))
        assert all(outcome in (HANDLED, DUPLICATE) for outcome in first + second)
        assert sorted(map(int, await bench.written())) == list(range(15))

    # Given up

    @message_sentence
    async def test_a_message_is_given_up_after_its_attempts_and_stays_given_up(self, bench: MessageBench) -> None:
        calls: list[int] = []

        async def fails(_message: Message[Any], context: MessageContext) -> None:
            calls.append(context.attempt)
            raise Retryable("busy")

        app = app_of(fails, attempts=3)
        lost = event(TYPE, b'{"a":1}', key="k-1", headers=[("mine", b"\xff")], topic="orders", partition=2, offset=9)
        assert (await bench.given_up(app, lost))[0] == "attempts_exhausted"
        assert calls == [1, 2, 3]
        letter = await bench.dead_letter()
        assert (letter["topic"], letter["partition"], letter["offset"]) == ("orders", 2, 9)
        assert (letter["key"], letter["payload"], letter["event_type"]) == (b"k-1", b'{"a":1}', TYPE)
        headers = zip(letter["header_names"], letter["header_values"], strict=True)
        assert list(headers) == [(name.encode(), value) for name, value in lost.headers]
        assert (letter["state"], letter["attempts"], letter["error_code"], letter["redrives"]) == ("dead", 3, "busy", 0)
        row = await bench.outcome_row(lost)
        assert row is not None
        assert (row["state"], row["error_code"]) == ("failed", "busy")
        assert await bench.gets(app, lost) == DUPLICATE
        assert (len(calls), len(await bench.letters())) == (3, 1)

    @message_sentence
    async def test_what_no_handler_takes_is_given_up_once(self, bench: MessageBench) -> None:
        app = app_of(bench.writes)
        refused = {
            "undecodable": record(b"\xff", topic=bench.consumer),
            "unknown_type": event(bench.consumer, 1),
            "tombstone": ping(None),
            "invalid_payload": ping(b"{"),
        }
        for reason, one in refused.items():
            outcome = await bench.gets(app, one)
            assert isinstance(outcome, Dead)
            assert outcome.reason == reason
            assert await bench.gets(app, one) == DUPLICATE
        assert [letter["reason"] for letter in await bench.letters()] == list(refused)
        assert await bench.written() == []

    @message_sentence
    async def test_a_message_that_ends_its_processes_is_given_up_in_the_end(self, bench: MessageBench) -> None:
        app, ending = app_of(bench.writes, attempts=2), ping()
        identity = Identity(event_id(ending), "acme", f"{bench.consumer}/step-1")
        trials = []
        for number in (1, 2):  # the process ends right after it has counted
            member = bench.member(app, f"m{number}")
            trials.append(await member.writer.store.begin_trial(identity))
        assert trials == [1, 2]
        assert await bench.member(app, "m3").gets(ending, suspect=True) == Dead(
            "attempts_exhausted", "consumer_sdk.ProcessEnded", "process_ended"
        )
        assert await bench.member(app, "m4").gets(ping(), suspect=True) == HANDLED
        assert await bench.written() == ["1"]

    # Effects

    @message_sentence
    async def test_a_failure_of_the_handler_erases_no_effect(self, bench: MessageBench) -> None:
        """LEDGER-1 and LEDGER-14: in each class of error, tried again, given up and redriven."""
        for number, error in enumerate(FAILURES, 1):
            charges = _Charging(bench, error)
            app, charged = app_of(charges, attempts=3, patience_seconds=100), ping(number)
            await bench.given_up(app, charged)
            assert await bench.gets(app, charged) == DUPLICATE
            assert await self._states(bench, charged) == [("succeeded", 1)]
            charges.error = None
            assert await bench.redriven(app) == HANDLED
            assert await self._states(bench, charged) == [("succeeded", 1)]
            assert all(receipt == charges.receipts[0] for receipt in charges.receipts)
            assert len(bench.provider.book) == number

    @staticmethod
    async def _states(bench: MessageBench, one: BuiltRecord) -> list[tuple[str, int]]:
        return [(row["state"], row["sends"]) for row in await bench.effects(one)]

    # Redrives

    @message_sentence
    async def test_a_redrive_runs_skips_what_was_done_and_ends_the_dead_letter(self, bench: MessageBench) -> None:
        """CONSUME-25, with the rest of the work inside a transaction and without one."""
        for number, inside in enumerate((True, False), 1):
            charges = _Charging(bench, Terminal("broken"), inside=inside)
            app, one = app_of(charges), ping(number)
            await bench.given_up(app, one)
            charges.error = None
            assert await bench.ask() == "redriving"
            member = bench.member(app)
            (claimed,) = await member.claims()
            assert await member.redrives(claimed) == HANDLED
            letter, row = await bench.dead_letter(), await bench.outcome_row(one)
            assert charges.letter_states == ["redriving"], "it is not marked before it is done"
            assert row is not None
            assert (letter["state"], letter["redrives"], letter["holder"]) == ("redriven", 1, None)
            assert (row["state"], row["error_code"], row["generation"]) == ("succeeded", None, 2)
            assert await bench.gets(app, one) == DUPLICATE
            assert await member.claims() == []
            assert len(bench.provider.book) == number
        assert await bench.written() == ["1"]

    @message_sentence
    async def test_a_redrive_that_fails_leaves_the_message_dead_and_may_be_asked_for_again(self, bench: MessageBench) -> None:
        errors: list[Exception] = [Terminal("first"), Retryable("second")]

        async def fails(message: Message[Any], context: MessageContext) -> None:
            async with context.transaction() as connection:
                await bench.write(connection, str(message.value))
                if errors:
                    raise errors.pop(0)

        app, one = app_of(fails, attempts=5), ping()
        await bench.given_up(app, one)
        outcome = await bench.redriven(app)
        assert isinstance(outcome, Dead), "a redrive is one attempt"
        letter = await bench.dead_letter()
        assert (letter["state"], letter["reason"], letter["error_code"]) == ("dead", "attempts_exhausted", "second")
        assert (letter["attempts"], letter["redrives"], letter["holder"]) == (2, 1, None)
        assert await bench.written() == []
        assert await bench.redriven(app) == HANDLED
        assert await bench.written() == ["1"]
        assert (await bench.dead_letter())["redrives"] == 2

    @message_sentence
    async def test_a_redrive_asked_for_twice_at_once_runs_once(self, bench: MessageBench) -> None:
        """LEDGER-11: two operators, then two processes."""
        await bench.given_up(app_of(_refuses), ping())
        app = app_of(bench.writes)
        assert sorted(await asyncio.gather(bench.ask(), bench.ask())) == ["not_dead", "redriving"]
        members = [bench.member(app, holder) for holder in ("m1", "m2")]
        claimed = await asyncio.gather(*(member.claims() for member in members))
        assert sorted(map(len, claimed)) == [0, 1]
        outcomes = [await member.redrives(letter) for member, letters in zip(members, claimed, strict=True) for letter in letters]
        assert outcomes == [HANDLED]
        assert await bench.written() == ["1"]
        assert await bench.ask() == "not_dead"

    @message_sentence
    async def test_a_hand_that_has_lapsed_changes_nothing(self, bench: MessageBench) -> None:
        """LEDGER-10 and LEDGER-11: taken over before it could commit. Whatever the first comes to, it is too late."""
        functions: tuple[Function, ...] = (bench.writes, _refuses)
        for number, function in enumerate(functions, 1):
            await bench.given_up(app_of(_refuses), ping(number))
            assert await bench.ask() == "redriving"
            late, next_one = bench.member(app_of(function), "m1"), bench.member(app_of(bench.writes), "m2")
            (lapsed,) = await late.claims(hold_seconds=60)
            assert await next_one.claims() == [], "it is in hand"
            await bench.harness.advance(61)
            (held,) = await next_one.claims()
            before = await bench.letters()
            await late.redrives(lapsed)
            assert await late.writer.store.release_redrive(lapsed.redrive) is False
            assert await bench.letters() == before
            assert len(await bench.written()) == number - 1
            assert await next_one.redrives(held) == HANDLED
            assert len(await bench.written()) == number

    @message_sentence
    async def test_a_redrive_that_is_given_back_is_free_at_once(self, bench: MessageBench) -> None:
        await bench.given_up(app_of(_refuses), ping())
        assert await bench.ask() == "redriving"
        first, second = (bench.member(app_of(bench.writes), holder) for holder in ("m1", "m2"))
        (claimed,) = await first.claims()
        assert await first.writer.store.release_redrive(claimed.redrive)
        (claimed,) = await second.claims()
        assert await second.redrives(claimed) == HANDLED

    @message_sentence
    async def test_an_ambiguous_message_is_redriven_only_when_somebody_has_looked(self, bench: MessageBench) -> None:
        async def doubts(_message: Message[Any], _context: MessageContext) -> None:
            raise Ambiguous("no_answer")

        await bench.given_up(app_of(doubts), ping())
        assert await bench.ask() == "ambiguous"
        assert (await bench.dead_letter())["state"] == "dead"
        assert await bench.redriven(app_of(bench.writes)) == HANDLED

    @message_sentence
    async def test_dead_letters_are_redriven_by_their_own_consumer(self, bench: MessageBench) -> None:
        await bench.given_up(app_of(_refuses), ping())
        assert await bench.ask() == "redriving"
        app = app_of(bench.writes)
        assert await bench.member(app, consumer=f"{bench.consumer}-2").claims() == []
        assert len(await bench.member(app).claims()) == 1


def _meeting(bench: MessageBench, *, inside: bool) -> Function:
    """A handler of which two wait for each other; then it writes, or does nothing inside the database.

    In its transaction it gives the other a moment to get in as well, which nobody must.
    """
    begun, both_in, entered = asyncio.Barrier(2), asyncio.Event(), []

    async def meets(message: Message[Any], context: MessageContext) -> None:
        await begun.wait()
        if not inside:
            return
        async with context.transaction() as connection:
            entered.append(message)
            if len(entered) == 2:
                both_in.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_MOMENT_SECONDS):
                    await both_in.wait()
            await bench.write(connection, str(message.value))

    return meets


def _failing_once(bench: MessageBench, error: Exception) -> Function:
    """A handler that fails behind its first write, the first time."""
    errors = [error]

    async def fails_once(message: Message[Any], context: MessageContext) -> None:
        async with context.transaction() as connection:
            await bench.write(connection, str(message.value))
            if errors:
                raise errors.pop()

    return fails_once


class _Charging:
    """A handler that has an outside effect, then fails for as long as it has an error, then does the rest."""

    def __init__(self, bench: MessageBench, error: Exception, *, inside: bool = True) -> None:
        self.error: Exception | None = error
        self.receipts: list[object] = []
        self.letter_states: list[str] = []
        self._bench = bench
        self._inside = inside

    async def __call__(self, message: Message[Any], context: MessageContext) -> None:
        self.receipts.append(await context.once("card.charge", request=1, call=self._bench.provider.charge))
        if self.error is not None:
            raise self.error
        self.letter_states.append((await self._bench.dead_letter())["state"])
        if self._inside:
            await self._bench.writes(message, context)


async def _refuses(_message: Message[Any], _context: MessageContext) -> None:
    raise Terminal("refused")


async def _at_once(bench: MessageBench, app: MessageHandlers, one: BuiltRecord) -> list[Outcome]:
    return list(await asyncio.gather(*(bench.member(app, holder).gets(one) for holder in ("m1", "m2"))))


def _kind(outcome: Outcome) -> object:
    return type(outcome) if isinstance(outcome, Again | Dead) else outcome
