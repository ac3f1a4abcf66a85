"""What consumers keep of messages, in memory: statements of ``messages.sql``, one method each, and transactions around them.

A message's row stands among the ledger's effects, as it does in the database. A statement inside a transaction sees its own writes,
others see them once it commits, and who wants the same row waits until then.
"""

import asyncio
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from uuid_utils.compat import uuid7

from consumer_sdk.effects import EffectKey
from consumer_sdk.identity import Identity
from consumer_sdk.testing.dead_letter import DeadLetter
from consumer_sdk.testing.effect_row import EffectRow
from consumer_sdk.testing.memory_effects import MemoryEffects

__all__ = ["MESSAGE", "MemoryMessages", "MemoryTransaction", "message_key"]

#: The operation of a message's own row.
MESSAGE: Final = "fencepost.message"


class MemoryTransaction:
    """What one transaction has written, and which rows it holds until it ends."""

    def __init__(self) -> None:
        self.rows: dict[EffectKey, EffectRow] = {}
        self.letters: dict[UUID, DeadLetter] = {}
        self.trials: dict[Identity, int] = {}
        self.ended = asyncio.Event()


class MemoryMessages:
    """The tables of messages, dead letters and trials, beside the ``effects`` whose clock they share."""

    def __init__(self, effects: MemoryEffects) -> None:
        self.effects = effects
        self._letters: dict[UUID, DeadLetter] = {}
        self._trials: dict[Identity, int] = {}
        self._held: dict[Hashable, MemoryTransaction] = {}

    async def fetch(self, name: str, *arguments: Any) -> Sequence[Any]:
        """The rows that the statement ``name`` answers with, in a transaction of its own."""
        async with self.transaction() as transaction:
            return await self.fetch_in(transaction, name, *arguments)

    async def fetch_in(self, transaction: MemoryTransaction, name: str, *arguments: Any) -> Sequence[Any]:
        """The same in a transaction that goes on."""
        await asyncio.sleep(0)
        answer: Sequence[Any] = await getattr(self, name)(transaction, *arguments)
        return answer

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[MemoryTransaction]:
        """Commits what is written in it, or forgets it if the block raises."""
        transaction = MemoryTransaction()
        try:
            yield transaction
            self._commit(transaction)
        finally:
            self._held = {row: holder for row, holder in self._held.items() if holder is not transaction}
            transaction.ended.set()

    @property
    def dead_letters(self) -> Sequence[DeadLetter]:
        """All of them, oldest first, whatever became of them."""
        return tuple(self._letters.values())

    def redrive(self, dead_letter_id: UUID, *, effects_checked: bool = False) -> str:
        """Ask for a dead letter to be handled anew, as an operator does: ``redriving``, or ``not_found``, ``not_dead``, or
        ``ambiguous`` unless somebody has checked what became of its effects."""
        letter = self._letters.get(dead_letter_id)
        if letter is None:
            return "not_found"
        if letter.state != "dead":
            return "not_dead"
        if letter.reason == "ambiguous" and not effects_checked:
            return "ambiguous"
        self._letters[dead_letter_id] = replace(letter, state="redriving", redrives=letter.redrives + 1)
        return "redriving"

    # The statements, with the parameters of messages.sql. Those that bound a transaction's silence bound nothing here.

    async def known_messages(
        self, transaction: MemoryTransaction, run_keys: Sequence[str], tenants: Sequence[str], steps: Sequence[str]
    ) -> Sequence[Any]:
        wanted = enumerate(zip(run_keys, tenants, steps, strict=True), 1)
        return [{"n": n} for n, parts in wanted if self._row(transaction, Identity(*parts)) is not None]

    async def record_messages(
        self,
        transaction: MemoryTransaction,
        run_keys: Sequence[str],
        tenants: Sequence[str],
        steps: Sequence[str],
        holder: str,
        *_bounds: str,
    ) -> Sequence[Any]:
        # In one order, as there, so that no two batches wait for each other.
        identities = sorted({Identity(*parts) for parts in zip(run_keys, tenants, steps, strict=True)})
        return [one for one in identities if await self._inserted(transaction, one, holder)]

    async def store_dead_letter(
        self, transaction: MemoryTransaction, run_key: str, tenant_id: str, step: str, holder: str, consumer: str, topic: str,
        partition: int, offset: int, recorded_at: datetime, event_type: str | None, key: bytes | None, payload: bytes | None,
        header_names: Sequence[bytes], header_values: Sequence[bytes | None], reason: str, error_class: str, error_code: str,
        attempts: int, *_copy: object,
    ) -> Sequence[Any]:  # fmt: skip
        identity = Identity(run_key, tenant_id, step)
        if not await self._inserted(transaction, identity, holder, error_class=error_class, error_code=error_code):
            return [{"dead_letter_id": None}]
        letter = DeadLetter(
            dead_letter_id=uuid7(), run_key=run_key, tenant_id=tenant_id, step=step, consumer=consumer, topic=topic,
            partition=partition, offset=offset, recorded_at=recorded_at, event_type=event_type, key=key, payload=payload,
            header_names=header_names, header_values=header_values, reason=reason, error_class=error_class,
            error_code=error_code, attempts=attempts, created_at=self.effects.clock.now(),
        )  # fmt: skip
        transaction.letters[letter.dead_letter_id] = letter
        return [{"dead_letter_id": letter.dead_letter_id}]

    async def claim_redrives(
        self, transaction: MemoryTransaction, holder: str, consumer: str, hold: timedelta, most: int
    ) -> Sequence[Any]:
        now = self.effects.clock.now()
        claimed: list[DeadLetter] = []
        for letter in self._letters.values():
            free = letter.held_until is None or letter.held_until <= now
            wanted = letter.consumer == consumer and letter.state == "redriving" and letter.dead_letter_id not in self._held
            if free and wanted and len(claimed) < most:
                claimed.append(replace(letter, generation=letter.generation + 1, holder=holder, held_until=now + hold))
        transaction.letters.update({letter.dead_letter_id: letter for letter in claimed})
        return [asdict(letter) for letter in claimed]

    async def finish_redrive(
        self,
        transaction: MemoryTransaction,
        dead_letter_id: UUID,
        generation: int,
        run_key: str,
        tenant_id: str,
        step: str,
        holder: str,
        *_bounds: str,
    ) -> Sequence[Any]:
        letter = await self._in_hand(transaction, dead_letter_id, generation)
        if letter is None:
            return [{"ended": False, "recorded": False}]
        transaction.letters[dead_letter_id] = replace(letter, state="redriven", holder=None, held_until=None)
        return [{"ended": True, "recorded": await self._overwritten(transaction, Identity(run_key, tenant_id, step), holder)}]

    async def fail_redrive(
        self,
        transaction: MemoryTransaction,
        dead_letter_id: UUID,
        generation: int,
        reason: str,
        error_class: str,
        error_code: str,
        more: int,
    ) -> Sequence[Any]:
        letter = await self._in_hand(transaction, dead_letter_id, generation)
        if letter is None:
            return []
        transaction.letters[dead_letter_id] = replace(
            letter, state="dead", holder=None, held_until=None, reason=reason, error_class=error_class,
            error_code=error_code,
            attempts=letter.attempts + more,
        )  # fmt: skip
        return [{"dead_letter_id": dead_letter_id}]

    async def release_redrive(self, transaction: MemoryTransaction, dead_letter_id: UUID, generation: int) -> Sequence[Any]:
        letter = await self._in_hand(transaction, dead_letter_id, generation)
        if letter is None:
            return []
        transaction.letters[dead_letter_id] = replace(letter, holder=None, held_until=None)
        return [{"dead_letter_id": dead_letter_id}]

    async def begin_trial(self, transaction: MemoryTransaction, *identity: str) -> Sequence[Any]:
        of = Identity(*identity)
        await self._hold(transaction, ("trial", of))
        transaction.trials[of] = self._trials.get(of, 0) + 1
        return [{"trials": transaction.trials[of]}]

    async def end_trial(self, transaction: MemoryTransaction, *trial: Any) -> Sequence[Any]:
        *identity, trials, left = trial
        of = Identity(*identity)
        await self._hold(transaction, ("trial", of))
        if self._trials.get(of, 0) == trials:
            transaction.trials[of] = left
        return []

    async def oldest_remembered(self, _transaction: MemoryTransaction, retention: timedelta) -> Sequence[Any]:
        return [{"oldest": self.effects.clock.now() - retention}]

    # What the statements do to a row.

    async def _inserted(
        self,
        transaction: MemoryTransaction,
        identity: Identity,
        holder: str,
        *,
        error_class: str | None = None,
        error_code: str | None = None,
    ) -> bool:
        """Whether the message had no outcome. Another transaction that may be about to give it one is waited for."""
        await self._hold(transaction, identity)
        if self._row(transaction, identity) is not None:
            return False
        now, state = self.effects.clock.now(), "succeeded" if error_code is None else "failed"
        transaction.rows[message_key(identity)] = EffectRow(
            state=state, holder=holder, created_at=now, finished_at=now, error_class=error_class, error_code=error_code
        )
        return True

    async def _overwritten(self, transaction: MemoryTransaction, identity: Identity, holder: str) -> bool:
        """Whether nobody had handled the message: it had no outcome, or had been given up."""
        await self._hold(transaction, identity)
        row = self._row(transaction, identity)
        if row is None:
            return await self._inserted(transaction, identity, holder)
        if row.state != "failed":
            return False
        transaction.rows[message_key(identity)] = replace(
            row, state="succeeded", generation=row.generation + 1, holder=holder, error_class=None, error_code=None,
            finished_at=self.effects.clock.now(),
        )  # fmt: skip
        return True

    async def _in_hand(self, transaction: MemoryTransaction, dead_letter_id: UUID, generation: int) -> DeadLetter | None:
        """The dead letter, if it is still redriven under that generation."""
        await self._hold(transaction, dead_letter_id)
        letter = transaction.letters.get(dead_letter_id, self._letters.get(dead_letter_id))
        return letter if letter is not None and (letter.state, letter.generation) == ("redriving", generation) else None

    async def _hold(self, transaction: MemoryTransaction, row: Hashable) -> None:
        while (holder := self._held.get(row)) is not None and holder is not transaction:
            await holder.ended.wait()
        self._held[row] = transaction

    def _row(self, transaction: MemoryTransaction, identity: Identity) -> EffectRow | None:
        key = message_key(identity)
        return transaction.rows.get(key) or self.effects.row(key)

    def _commit(self, transaction: MemoryTransaction) -> None:
        for key, row in transaction.rows.items():
            self.effects.keep(key, row)
        self._letters.update(transaction.letters)
        self._trials.update(transaction.trials)


def message_key(identity: Identity) -> EffectKey:
    """Where the ledger keeps a message's own row."""
    return EffectKey(identity.run_key, identity.tenant_id, 0, identity.step, 0, MESSAGE)
