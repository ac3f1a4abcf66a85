"""What the contract of messages needs of a database that is put to the test, and the harness of the one in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol
from uuid import UUID

from consumer_sdk.consumer_metrics import ConsumerMetrics
from consumer_sdk.message_handlers import MessageHandlers
from consumer_sdk.message_writer import MessageWriter
from consumer_sdk.testing.delivering import memory_writer
from consumer_sdk.testing.memory import Memory

__all__ = ["MemoryMessageHarness", "MessageHarness"]


class MessageHarness(Protocol):
    """A database of consumers, what their handlers write in it, and its time."""

    def writer(self, app: MessageHandlers, metrics: ConsumerMetrics, *, consumer: str, holder: str) -> MessageWriter:
        """The writes of a consumer, which its holder is another process of."""
        ...

    async def write(self, connection: Any, line: str) -> None:
        """What a handler does in its transaction."""
        ...

    async def written(self) -> Sequence[str]:
        """The lines that are committed."""
        ...

    async def rows(self, run_key: str) -> Sequence[Mapping[str, Any]]:
        """The ledger's rows of a message: its own, and those of its effects."""
        ...

    async def letters(self, consumer: str) -> Sequence[Mapping[str, Any]]:
        """The dead letters of a consumer, oldest first."""
        ...

    async def ask(self, dead_letter_id: UUID, *, effects_checked: bool) -> str:
        """Ask for a dead letter to be handled anew, as an operator does; the outcome."""
        ...

    async def advance(self, seconds: float) -> None:
        """Let time pass for dead letters in hand."""
        ...


class MemoryMessageHarness:
    """Of ``Memory``."""

    def __init__(self, memory: Memory | None = None) -> None:
        self.memory = Memory() if memory is None else memory

    def writer(self, app: MessageHandlers, metrics: ConsumerMetrics, *, consumer: str, holder: str) -> MessageWriter:
        return memory_writer(app, self.memory, metrics, connection=None, consumer=consumer, holder=holder)

    async def write(self, connection: Any, line: str) -> None:
        await connection.execute("write", line)

    async def written(self) -> Sequence[str]:
        return [call.arguments[0] for call in self.memory.calls]

    async def rows(self, run_key: str) -> Sequence[Mapping[str, Any]]:
        known = self.memory.effects.rows()
        return [asdict(row) | key._asdict() for key, row in known.items() if key.run_key == run_key]

    async def letters(self, consumer: str) -> Sequence[Mapping[str, Any]]:
        return [asdict(letter) for letter in self.memory.dead_letters if letter.consumer == consumer]

    async def ask(self, dead_letter_id: UUID, *, effects_checked: bool) -> str:
        return self.memory.messages.redrive(dead_letter_id, effects_checked=effects_checked)

    async def advance(self, seconds: float) -> None:
        self.memory.clock.advance(seconds)
