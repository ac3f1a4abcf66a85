"""The consumer's tables in memory keep the contract that is shipped, and broken ones do not."""

import asyncio
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

import pytest

from consumer_sdk.identity import Identity
from consumer_sdk.testing import DeadLetter, EffectRow, Memory, MemoryEffects, MemoryMessages
from consumer_sdk.testing.memory_messages import MemoryTransaction, message_key
from consumer_sdk.testing.message_contract import MemoryMessageHarness, MessageContract, MessageHarness


class TestMemoryMessages(MessageContract):
    """The tables in memory keep the contract."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[MessageHarness]:
        yield MemoryMessageHarness()


# -- broken tables, each of which the contract must catch -----------------------------------------------------------------


class ForgetsOutcomes(MemoryMessages):
    """Handles whatever comes."""

    def _row(self, transaction: MemoryTransaction, identity: Identity) -> EffectRow | None:
        return None


class IdentityWithoutStep(MemoryMessages):
    """Takes what one step has handled for handled by all."""

    def _row(self, transaction: MemoryTransaction, identity: Identity) -> EffectRow | None:
        rows = {**self.effects.rows(), **transaction.rows}
        own = (identity.run_key, identity.tenant_id)
        return next((row for key, row in rows.items() if (key.run_key, key.tenant_id) == own and row.fingerprint is None), None)


class ReadsThenWrites(MemoryMessages):
    """Waits for no other transaction."""

    async def _hold(self, transaction: MemoryTransaction, row: Hashable) -> None:
        await asyncio.sleep(0)


class RecordsAtOnce(MemoryMessages):
    """Has a message handled when its transaction begins."""

    async def _inserted(self, transaction: MemoryTransaction, identity: Identity, holder: str, **error: Any) -> bool:
        new = await super()._inserted(transaction, identity, holder, **error)
        if new:
            self.effects.keep(message_key(identity), transaction.rows[message_key(identity)])
        return new


class RecordsAllOrNone(MemoryMessages):
    """Leaves a batch alone because one of it was handled before."""

    async def record_messages(self, transaction: MemoryTransaction, *given: Any) -> Sequence[Any]:
        new = await super().record_messages(transaction, *given)
        return new if len(new) == len(set(zip(*given[:3], strict=True))) else []


class KeepsNoLetter(MemoryMessages):
    """Gives up, and keeps nothing."""

    async def store_dead_letter(self, transaction: MemoryTransaction, *given: Any) -> Sequence[Any]:
        stored = await super().store_dead_letter(transaction, *given)
        transaction.letters.clear()
        return stored


class GivesUpAgain(MemoryMessages):
    """Keeps the dead letter without its outcome."""

    async def store_dead_letter(self, transaction: MemoryTransaction, *given: Any) -> Sequence[Any]:
        stored = await super().store_dead_letter(transaction, *given)
        transaction.rows.clear()
        return stored


class CutsHeaders(MemoryMessages):
    """Keeps payloads only."""

    def _commit(self, transaction: MemoryTransaction) -> None:
        cut = {number: replace(letter, header_names=(), header_values=()) for number, letter in transaction.letters.items()}
        transaction.letters.update(cut)
        super()._commit(transaction)


class SwallowsRedrives(MemoryMessages):
    """Takes a dead letter for a message that has been handled."""

    async def _overwritten(self, transaction: MemoryTransaction, identity: Identity, holder: str) -> bool:
        return await self._inserted(transaction, identity, holder)


class MarksBeforeItIsDone(MemoryMessages):
    """Calls a dead letter redriven when it is taken in hand."""

    async def claim_redrives(self, transaction: MemoryTransaction, *given: Any) -> Sequence[Any]:
        claimed = await super().claim_redrives(transaction, *given)
        marked = {number: replace(letter, state="redriven") for number, letter in transaction.letters.items()}
        transaction.letters.update(marked)
        return claimed


class ClaimsInTwos(MemoryMessages):
    """Gives into one hand what is in another."""

    async def claim_redrives(
        self, transaction: MemoryTransaction, holder: str, consumer: str, hold: timedelta, most: int
    ) -> Sequence[Any]:
        return await super().claim_redrives(transaction, holder, consumer, timedelta(seconds=-1), most)


class ClaimsForAll(MemoryMessages):
    """Gives one consumer what another gave up."""

    async def claim_redrives(self, transaction: MemoryTransaction, holder: str, consumer: str, *given: Any) -> Sequence[Any]:
        of = next((letter.consumer for letter in self.dead_letters), consumer)
        return await super().claim_redrives(transaction, holder, of, *given)


class IgnoresGenerations(MemoryMessages):
    """Lets whoever had a dead letter in hand write, whoever has it by now."""

    async def _in_hand(self, transaction: MemoryTransaction, dead_letter_id: UUID, generation: int) -> DeadLetter | None:
        now = next((letter.generation for letter in self.dead_letters if letter.dead_letter_id == dead_letter_id), generation)
        return await super()._in_hand(transaction, dead_letter_id, now)


class KeepsWhatIsGivenBack(MemoryMessages):
    """Frees a hand by its time only."""

    async def release_redrive(self, transaction: MemoryTransaction, *given: Any) -> Sequence[Any]:
        released = await super().release_redrive(transaction, *given)
        transaction.letters.clear()
        return released


class LeavesFailedRedrives(MemoryMessages):
    """Forgets that a redrive failed."""

    async def fail_redrive(self, transaction: MemoryTransaction, *given: Any) -> Sequence[Any]:
        failed = await super().fail_redrive(transaction, *given)
        transaction.letters.clear()
        return failed


class AsksTwice(MemoryMessages):
    """Takes every wish for the first."""

    def redrive(self, dead_letter_id: UUID, *, effects_checked: bool = False) -> str:
        super().redrive(dead_letter_id, effects_checked=effects_checked)
        return "redriving"


class RedrivesWhatIsAmbiguous(MemoryMessages):
    """Does not care whether anybody has looked."""

    def redrive(self, dead_letter_id: UUID, *, effects_checked: bool = False) -> str:
        return super().redrive(dead_letter_id, effects_checked=True)


class CountsNoTrials(MemoryMessages):
    """Begins a message that ends its process for ever."""

    async def begin_trial(self, transaction: MemoryTransaction, *identity: str) -> Sequence[Any]:
        return [{"trials": 1}]


BROKEN: Final[Mapping[type[MemoryMessages], str]] = {
    ForgetsOutcomes: "test_the_same_event_at_a_new_offset_is_a_duplicate",
    IdentityWithoutStep: "test_each_step_and_each_consumer_handles_a_message_for_itself",
    ReadsThenWrites: "test_of_two_deliveries_at_once_one_is_handled_and_the_other_is_a_duplicate",
    RecordsAtOnce: "test_a_transaction_that_fails_leaves_nothing_and_one_that_commits_leaves_all",
    RecordsAllOrNone: "test_copies_in_one_batch_and_in_two_at_once_are_handled_once_and_their_neighbours_too",
    KeepsNoLetter: "test_one_that_cannot_be_handled_costs_its_batch_nothing",
    GivesUpAgain: "test_what_no_handler_takes_is_given_up_once",
    CutsHeaders: "test_a_message_is_given_up_after_its_attempts_and_stays_given_up",
    SwallowsRedrives: "test_a_redrive_runs_skips_what_was_done_and_ends_the_dead_letter",
    MarksBeforeItIsDone: "test_a_redrive_runs_skips_what_was_done_and_ends_the_dead_letter",
    ClaimsInTwos: "test_a_redrive_asked_for_twice_at_once_runs_once",
    ClaimsForAll: "test_dead_letters_are_redriven_by_their_own_consumer",
    IgnoresGenerations: "test_a_hand_that_has_lapsed_changes_nothing",
    KeepsWhatIsGivenBack: "test_a_redrive_that_is_given_back_is_free_at_once",
    LeavesFailedRedrives: "test_a_redrive_that_fails_leaves_the_message_dead_and_may_be_asked_for_again",
    AsksTwice: "test_a_redrive_asked_for_twice_at_once_runs_once",
    RedrivesWhatIsAmbiguous: "test_an_ambiguous_message_is_redriven_only_when_somebody_has_looked",
    CountsNoTrials: "test_a_message_that_ends_its_processes_is_given_up_in_the_end",
}


class WritesAtOnce(MemoryMessageHarness):
    """What a handler writes is there before its transaction commits, and whether it does or not."""

    async def write(self, connection: Any, line: str) -> None:
        await super().write(connection, line)
        self.memory.calls.append(connection.calls.pop())


def put_to_the_test(harness: MessageHarness) -> MessageContract:
    class Contract(MessageContract):
        limit_seconds = 5.0

        @asynccontextmanager
        async def opened(self) -> AsyncIterator[MessageHarness]:
            yield harness

    return Contract()


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_the_contract_catches_broken_tables(broken: type[MemoryMessages]) -> None:
    contract = put_to_the_test(MemoryMessageHarness(Memory(broken(MemoryEffects()))))
    with pytest.raises((AssertionError, ValueError, TimeoutError)):
        getattr(contract, BROKEN[broken])()


def test_the_contract_catches_writes_that_do_not_share_the_outcomes_fate() -> None:
    with pytest.raises(AssertionError):
        put_to_the_test(WritesAtOnce()).test_a_transaction_that_fails_leaves_nothing_and_one_that_commits_leaves_all()


def test_a_database_that_hangs_is_caught_by_the_clock() -> None:
    class Hangs(MemoryMessages):
        async def fetch(self, name: str, *arguments: Any) -> Any:
            await asyncio.Event().wait()

    contract = put_to_the_test(MemoryMessageHarness(Memory(Hangs(MemoryEffects()))))
    contract.limit_seconds = 0.05
    with pytest.raises(TimeoutError):
        contract.test_the_same_event_at_a_new_offset_is_a_duplicate()
