"""What a handler may do, and when: one transaction as its last act, calls outside of it, and nothing after the end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

from consumer_sdk.classification import Ambiguous
from consumer_sdk.effects import CallLimits, EffectKey
from consumer_sdk.message_context import HandlingState, MessageContext
from fencepost.errors import (
    AlreadyHandled,
    ConfigurationError,
    InvalidInput,
    LeaseLost,
    TransactionRequired,
    TransientError,
)

LIMITS: Final = CallLimits(timeout_seconds=3)


class Transactions:
    """Transactions that remember how they ended, and may fail at their commit."""

    def __init__(self, journal: list[str], commit_error: Exception | None) -> None:
        self._journal = journal
        self._commit_error = commit_error

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        self._journal.append("begin")
        try:
            yield "connection"
        except BaseException:
            self._journal.append("rollback")
            raise
        if self._commit_error is not None:
            raise self._commit_error
        self._journal.append("commit")


class Consumer:
    """The consumer behind a context. ``new``: nobody has handled the message before."""

    def __init__(self, *, new: bool = True, commit_error: Exception | None = None) -> None:
        self.journal: list[str] = []
        self.asked: list[tuple[EffectKey, object, CallLimits]] = []
        self._new = new
        self._transactions = Transactions(self.journal, commit_error)

    @asynccontextmanager
    async def ending(self, state: HandlingState) -> AsyncIterator[Any]:
        async with self._transactions.begin() as connection:
            yield connection if await self.record_within(connection, state) else None

    async def once(self, key: EffectKey, *, request: object, call: Any, limits: CallLimits) -> object:
        self.asked.append((key, request, limits))
        return await call(None)

    async def record_within(self, connection: Any, _state: HandlingState) -> bool:
        assert connection == "connection"
        self.journal.append("record")
        return self._new


class Run:
    """The run behind a message."""

    def __init__(self, journal: list[str]) -> None:
        self.journal = journal
        self.completes = False
        self.transaction = Transactions(journal, None).begin
        self.asked: list[dict[str, Any]] = []

    async def once(self, operation: str, **given: Any) -> object:
        self.asked.append({"operation": operation} | given)
        return "of the run"

    async def complete(self, output: object) -> None:
        self.completes = True
        self.journal.append(f"complete {output}")


def state(**given: Any) -> HandlingState:
    options: dict[str, Any] = {
        "tenant_id": "acme", "effect_run": "e-1", "effect_step": "billing/charge", "step": "charge", "attempt": 2,
        "stopping": asyncio.Event(),
    }  # fmt: skip
    return HandlingState(**options | given)


def context(consumer: Consumer | None = None, run: Any = None, of: HandlingState | None = None) -> MessageContext:
    return MessageContext(of or state(), consumer or Consumer(), run)


async def answers(_effect: Any) -> object:
    return "receipt"


# Who it is


def test_a_context_tells_its_attempt_its_tenant_and_that_the_consumer_stops() -> None:
    own = state()
    of = context(of=own)

    assert (of.attempt, of.tenant_id, of.run, of.stopping) == (2, "acme", None, own.stopping)
    assert context(of=state(tenant_id="")).tenant_id is None


# Effects


async def test_an_effect_belongs_to_the_message_and_the_step() -> None:
    consumer = Consumer()
    result = await context(consumer).once("card", request={"amount": 3}, call=answers, limits=LIMITS, occurrence=4)

    assert result == "receipt"
    assert consumer.asked == [(EffectKey("e-1", "acme", 0, "billing/charge", 4, "card"), {"amount": 3}, LIMITS)]


async def test_an_effect_of_a_run_s_message_is_the_run_s() -> None:
    consumer, run = Consumer(), Run([])
    assert await context(consumer, run).once("card", request=1, call=answers, limits=LIMITS) == "of the run"

    assert run.asked == [
        {"operation": "card", "request": 1, "call": answers, "limits": LIMITS, "step": "charge", "occurrence": 0}
    ]  # fmt: skip
    assert consumer.asked == []


@pytest.mark.parametrize("operation", ["fencepost.", "fencepost.message"])
async def test_operations_of_ours_are_not_the_handler_s(operation: str) -> None:
    """A handler's effect under the name of the message's own row would make it look handled."""
    with pytest.raises(InvalidInput, match=r"operation: must not begin with fencepost\.; name it after the provider"):
        await context().once(operation, request=1, call=answers)


async def test_no_call_is_made_within_a_transaction() -> None:
    consumer = Consumer()
    of = context(consumer)
    with pytest.raises(TransactionRequired, match="make it before"):
        async with of.transaction():
            await of.once("card", request=1, call=answers)

    assert (consumer.asked, consumer.journal) == ([], ["begin", "record", "rollback"])


# The transaction


async def test_the_message_s_row_is_written_before_the_handler_writes_and_commits_with_it() -> None:
    consumer, own = Consumer(), state()
    async with context(consumer, of=own).transaction() as connection:
        assert connection is not None
        consumer.journal.append("write")
        assert not own.recorded

    assert consumer.journal == ["begin", "record", "write", "commit"]
    assert (own.recorded, own.duplicate) == (True, False)


async def test_of_two_deliveries_the_slower_one_writes_nothing() -> None:
    """CONSUME-10."""
    consumer, own, reached = Consumer(new=False), state(), False
    with pytest.raises(AlreadyHandled):
        async with context(consumer, of=own).transaction():
            reached = True

    assert not reached
    assert consumer.journal == ["begin", "record", "rollback"]
    assert (own.recorded, own.duplicate) == (False, True)


async def test_a_handler_that_raises_in_the_transaction_undoes_it_and_may_begin_another() -> None:
    consumer, own = Consumer(), state()
    of = context(consumer, of=own)
    with pytest.raises(RuntimeError):
        async with of.transaction():
            raise RuntimeError
    assert not own.recorded

    async with of.transaction():
        pass
    assert own.recorded
    assert consumer.journal == ["begin", "record", "rollback", "begin", "record", "commit"]


async def test_a_commit_without_an_answer_is_nobody_s_failure() -> None:
    """The message's own row tells whether it was committed: it is looked up before the next attempt."""
    own = state()
    with pytest.raises(TransientError, match="no answer to the commit"):
        async with context(Consumer(commit_error=Ambiguous("commit_unknown")), of=own).transaction():
            pass

    assert not own.recorded


async def test_another_doubt_of_the_handler_s_stays_one() -> None:
    with pytest.raises(Ambiguous, match="no_answer"):
        async with context().transaction():
            raise Ambiguous("no_answer")


async def test_a_transaction_has_no_other_in_it() -> None:
    of = context()
    async with of.transaction():
        with pytest.raises(TransactionRequired, match="use its connection"):
            async with of.transaction():
                pass


# With a run


async def test_a_transaction_that_completes_the_run_handles_the_message() -> None:
    consumer, own = Consumer(), state()
    of = context(consumer, Run(consumer.journal), own)
    async with of.transaction():
        await of.complete("done")

    assert consumer.journal == ["begin", "complete done", "record", "commit"]
    assert own.recorded


async def test_a_transaction_that_does_not_complete_the_run_is_one_of_several() -> None:
    consumer, own = Consumer(), state()
    of = context(consumer, Run(consumer.journal), own)
    for _ in range(2):
        async with of.transaction():
            pass

    assert consumer.journal == ["begin", "commit"] * 2
    assert not own.recorded


async def test_a_message_that_another_delivery_handled_completes_no_run() -> None:
    consumer, own = Consumer(new=False), state()
    of = context(consumer, Run(consumer.journal), own)
    with pytest.raises(AlreadyHandled):
        async with of.transaction():
            await of.complete("done")

    assert consumer.journal[-1] == "rollback"
    assert (own.recorded, own.duplicate) == (False, True)


async def test_without_a_run_there_is_none_to_complete() -> None:
    with pytest.raises(ConfigurationError, match="register the handler with workflow="):
        await context().complete()


# After the end


async def _once(of: MessageContext) -> None:
    await of.once("card", request=1, call=answers)


async def _transaction(of: MessageContext) -> None:
    async with of.transaction():
        pass


AFTER: Final = pytest.mark.parametrize("act", [_once, _transaction], ids=["once", "transaction"])


@AFTER
async def test_after_the_commit_nothing_more_is_done(act: Any) -> None:
    """The outcome is committed as the last thing: what came after it would be lost with the process."""
    consumer = Consumer()
    of = context(consumer)
    await _transaction(of)
    before = list(consumer.journal)
    with pytest.raises(TransactionRequired, match="do this before"):
        await act(of)

    assert (consumer.journal, consumer.asked) == (before, [])


@AFTER
async def test_a_task_that_outlives_its_attempt_changes_nothing(act: Any) -> None:
    """CONSUME-6."""
    consumer, own = Consumer(), state()
    of = context(consumer, of=own)
    own.over = True
    with pytest.raises(LeaseLost, match="the attempt has ended; nothing was changed"):
        await act(of)

    assert (consumer.journal, consumer.asked) == ([], [])
