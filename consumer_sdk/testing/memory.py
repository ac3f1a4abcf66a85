"""A consumer's database in memory: the ledger, messages, dead letters, and the transactions that handlers ask for.

It stands where pools and transactions stand, so that the consumer's own code runs on it.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

from consumer_sdk.effect_store import EFFECT_STATEMENTS
from consumer_sdk.identity import Identity
from consumer_sdk.testing.clock import Clock
from consumer_sdk.testing.dead_letter import DeadLetter
from consumer_sdk.testing.memory_effects import MemoryEffects
from consumer_sdk.testing.memory_messages import MemoryMessages, MemoryTransaction
from consumer_sdk.testing.recorder import RecordedCall, Recorder

__all__ = ["Memory", "MemoryTransactions"]


class Memory:
    """What is kept between deliveries. Its ``clock`` stands still until a test moves it.

    ``calls`` is what handlers asked of their connections in transactions that committed, in that order; ``answers`` is what their
    queries find, by query. ``effects`` is the ledger, ``dead_letters`` what was given up.
    """

    def __init__(self, messages: MemoryMessages | None = None) -> None:
        self.messages = MemoryMessages(MemoryEffects()) if messages is None else messages
        self.effects = self.messages.effects
        self.calls: list[RecordedCall] = []
        self.answers: dict[str, Any] = {}
        self._transactions: dict[int, MemoryTransaction] = {}
        self._busy: dict[int, asyncio.Lock] = {}

    @property
    def clock(self) -> Clock:
        """The time of leases, calls and dead letters."""
        return self.effects.clock

    @property
    def dead_letters(self) -> Sequence[DeadLetter]:
        """All of them, oldest first, whatever became of them."""
        return self.messages.dead_letters

    def redrive(self, letter: DeadLetter, *, effects_checked: bool = False) -> str:
        """Ask for a dead letter to be handled anew, as an operator does: ``redriving``, or why not. Then ``redrive(app, ...)``."""
        return self.messages.redrive(letter.dead_letter_id, effects_checked=effects_checked)

    async def fetch(self, name: str, *arguments: Any) -> Sequence[Any]:
        """The rows that a statement of ``effects.sql`` or ``messages.sql`` answers with."""
        return await (self.effects if name in EFFECT_STATEMENTS else self.messages).fetch(name, *arguments)

    async def fetch_on(self, connection: Any, name: str, *arguments: Any) -> Sequence[Any]:
        """The same in the transaction that a handler has on the connection."""
        return await self.messages.fetch_in(self._transactions[id(connection)], name, *arguments)

    async def close(self) -> None:
        """Nothing is open."""

    @asynccontextmanager
    async def transaction_on(self, connection: Any) -> AsyncIterator[None]:
        """A transaction on this connection, of which there is one at a time."""
        async with (
            self._busy.setdefault(id(connection), asyncio.Lock()),
            self.messages.transaction() as transaction,
            _own_transaction(connection),
        ):
            self._transactions[id(connection)] = transaction
            try:
                yield
            finally:
                del self._transactions[id(connection)]


class MemoryTransactions:
    """Transactions for handlers: on ``connection`` if there is one, else each on a ``Recorder``."""

    def __init__(self, memory: Memory, connection: Any = None) -> None:
        self._memory = memory
        self._connection = connection

    @asynccontextmanager
    async def begin(self, *, bounded: bool = True) -> AsyncIterator[Any]:
        """The connection, in a transaction that commits together with the message's row."""
        if self._connection is not None:
            async with self._memory.transaction_on(self._connection):
                yield self._connection
            return
        recorder = Recorder(self._memory.answers)
        async with self._memory.transaction_on(recorder):
            yield recorder
        self._memory.calls += recorder.calls

    @asynccontextmanager
    async def begin_recorded(self, identity: Identity, *, holder: str, limit_seconds: float) -> AsyncIterator[Any]:
        """The same with the message's row written, or None in place of the connection if it was there."""
        async with self.begin() as connection:
            rows = await self._memory.fetch_on(connection, "record_messages", *([part] for part in identity), holder)
            yield connection if rows else None

    def close(self) -> None:
        """Nothing is open."""


def _own_transaction(connection: Any) -> AbstractAsyncContextManager[Any]:
    """The connection's own transaction, where it has such a thing: what a handler wrote is undone if it fails."""
    begin = getattr(connection, "transaction", None)
    begun: Any = begin() if callable(begin) else None
    if inspect.iscoroutine(begun):  # a mock that answers everything
        begun.close()
    return begun if hasattr(begun, "__aenter__") else nullcontext()
