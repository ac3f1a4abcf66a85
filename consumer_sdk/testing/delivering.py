"""Runs a message through its handlers as the consumer does, without Kafka and without PostgreSQL.

It needs ``fencepost[consumer]``, as the consumer does, and is imported when it is first asked for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from consumer_sdk.consumer_metrics import ConsumerMetrics
from consumer_sdk.delivery import Again, Outcome
from consumer_sdk.effects import EffectKey
from consumer_sdk.identity import Identity
from consumer_sdk.message import Message, Record
from consumer_sdk.message_handlers import MessageHandlers
from consumer_sdk.message_store import MessageStore
from consumer_sdk.message_writer import MessageWriter
from consumer_sdk.testing.builders import event
from consumer_sdk.testing.dead_letter import DeadLetter
from consumer_sdk.testing.effect_row import EffectRow
from consumer_sdk.testing.memory import Memory, MemoryTransactions
from consumer_sdk.testing.memory_ledger import TEST_SECRETS
from consumer_sdk.testing.memory_messages import MESSAGE
from consumer_sdk.testing.stepwise import Attempt, StepwiseConsumer
from fencepost.wire import SCHEMA_VERSION

__all__ = ["Handled", "Step", "handle", "handle_many", "redrive"]

_HOLDER: Final = "test"
_MOST_ROUNDS: Final = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What became of a message at one handler: ``Done``, ``Again`` or ``Dead``, and what the handler raised, where that decided.

    ``step`` is the handler's; it is empty where none takes the message.
    """

    step: str
    outcome: Outcome
    error: Exception | None


class Handled:
    """What became of a message, at each of its handlers. No step at all: the message is of a type that is ignored."""

    def __init__(self, consumer: StepwiseConsumer, memory: Memory, attempts: Sequence[Attempt]) -> None:
        self._consumer = consumer
        self._memory = memory
        self._attempts = attempts

    @property
    def steps(self) -> Sequence[Step]:
        """In the order in which the handlers were registered."""
        return [_step(one.delivery.identity, one.outcome, one.error) for one in self._attempts]

    @property
    def outcome(self) -> Outcome:
        """Of a message with one handler."""
        return self._only.outcome

    @property
    def error(self) -> Exception | None:
        """What the handler of a message with one handler raised."""
        return self._only.error

    @property
    def ignored(self) -> bool:
        """Whether the message is of a type that is passed over."""
        return not self._attempts

    @property
    def dead_letters(self) -> Sequence[DeadLetter]:
        """The dead letters of this message."""
        own = {one.delivery.identity for one in self._attempts}
        return [one for one in self._memory.dead_letters if Identity(one.run_key, one.tenant_id, one.step) in own]

    @property
    def effects(self) -> Mapping[EffectKey, EffectRow]:
        """What the ledger knows of the message's outside effects, or of those of the run that it names."""
        runs = {one.delivery.identity.run_key for one in self._attempts}
        runs |= {one.delivery.message.run_id or "" for one in self._attempts if one.delivery.message is not None}
        known = self._memory.effects.rows()
        return {key: row for key, row in known.items() if key.run_key in runs and key.operation != MESSAGE}

    async def again(self) -> "Handled":
        """Try the next time what is to be tried again. The time that it was told to wait passes: the memory's clock moves by it."""
        return Handled(self._consumer, self._memory, await self._consumer.again(self._attempts))

    async def to_the_end(self) -> "Handled":
        """Try until each step is handled or given up."""
        handled = self
        for _ in range(_MOST_ROUNDS):
            if not any(isinstance(one.outcome, Again) for one in handled._attempts):
                return handled
            handled = await handled.again()
        raise AssertionError(f"after {_MOST_ROUNDS} attempts the message is still to be tried again")

    @property
    def _only(self) -> Step:
        steps = self.steps
        if len(steps) != 1:
            raise AssertionError(f"the message has {len(steps)} handlers that take it; look at .steps")
        return steps[0]

    def __repr__(self) -> str:
        return f"Handled({', '.join(f'{one.step}: {one.outcome}' for one in self.steps) or 'ignored'})"


async def handle(
    app: MessageHandlers,
    message: Record | Message[Any],
    *,
    memory: Memory,
    connection: Any = None,
    consumer: str = "test",
    suspect: bool = False,
) -> Handled:
    """Deliver a message: one attempt at each of its handlers, unless it has been handled before.

    ``memory`` keeps what is known between deliveries. ``connection`` is what ``context.transaction()`` hands out: anything, and
    where it has a ``transaction()`` as asyncpg's connections have, that is begun and ended with the message's own; without one it
    is a ``Recorder``, and ``memory.calls`` is what it was asked. ``consumer`` is the consumer's name in the ledger. ``suspect``:
    the process that handled the message before has ended in the middle of it.

    Each call is a delivery of its own, with attempts of its own: ``Handled.again`` is the next attempt of one. Raises
    ``ConfigurationError`` for a handler with a workflow.
    """
    (handled,) = await handle_many(app, [message], memory=memory, connection=connection, consumer=consumer, suspect=suspect)
    return handled


async def handle_many(
    app: MessageHandlers,
    messages: Sequence[Record | Message[Any]],
    *,
    memory: Memory,
    connection: Any = None,
    consumer: str = "test",
    suspect: bool = False,
) -> Sequence[Handled]:
    """Deliver messages together, as one fetch brings them: those of a batch handler share transactions, and of a key none is tried
    behind one that is to be tried again. What became of each, in order; otherwise as ``handle``."""
    own = _consumer(app, memory, connection, consumer)
    received = await own.receive([_record(one) for one in messages], suspect=suspect)
    return [Handled(own, memory, attempts) for attempts in received]


async def redrive(app: MessageHandlers, *, memory: Memory, connection: Any = None, consumer: str = "test") -> Sequence[Step]:
    """Handle the dead letters anew that ``memory.redrive`` asked for: one attempt each, oldest first."""
    own = _consumer(app, memory, connection, consumer)
    return [_step(letter.identity, *await own.redrive(letter)) for letter in await own.claim()]


def _consumer(app: MessageHandlers, memory: Memory, connection: Any, consumer: str) -> StepwiseConsumer:
    async def passed(seconds: float) -> None:
        memory.clock.advance(seconds)

    def writer(metrics: ConsumerMetrics) -> MessageWriter:
        return memory_writer(app, memory, metrics, connection=connection, consumer=consumer)

    return StepwiseConsumer(app, writer, consumer=consumer, passed=passed)


def memory_writer(
    app: MessageHandlers, memory: Memory, metrics: ConsumerMetrics, *, connection: Any, consumer: str, holder: str = _HOLDER
) -> MessageWriter:
    """The consumer's writes, into memory."""

    async def effects() -> Memory:
        return memory

    return MessageWriter(
        store=MessageStore(memory, holder),
        transactions=MemoryTransactions(memory, connection),
        open_effects=effects,
        consumer=consumer,
        holder=holder,
        dead_letter_topic=None,
        reconcilers=app.reconcilers,
        codec=app.codec,
        secrets=TEST_SECRETS,
        metrics=metrics,
    )


def _step(identity: Identity, outcome: Outcome, error: Exception | None) -> Step:
    return Step(step=identity.step.partition("/")[2], outcome=outcome, error=error)


def _record(given: Record | Message[Any]) -> Record:
    """A message as the record that it was read from; of a topic with an adapter of its own only the record will do."""
    if not isinstance(given, Message):
        return given
    headers = [(name, value) for name, value in given.headers if name != SCHEMA_VERSION]
    versioned = given.schema_version != 1 or len(headers) < len(given.headers)
    return event(
        given.type, given.payload, topic=given.topic, partition=given.partition, offset=given.offset, key=given.key,
        headers=headers, event_id=given.event_id, source=given.source, time=given.time, sequence=given.sequence,
        schema_version=given.schema_version if versioned else None, content_type=given.content_type, tenant_id=given.tenant_id,
        run_id=given.run_id, step=given.step, operation=given.operation, fencing_token=given.fencing_token,
        traceparent=given.traceparent, tracestate=given.tracestate,
    )  # fmt: skip
