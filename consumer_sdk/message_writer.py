"""Writes what handlings of messages end in: outcomes in batches, dead letters whole, and the ledger's effects."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from consumer_sdk.consumer_metrics import ConsumerMetrics
from consumer_sdk.dead_lettering import copy_of
from consumer_sdk.delivery import Dead, Delivery
from consumer_sdk.effects import Call, CallLimits, EffectKey, Reconciler, RunFence
from consumer_sdk.identity import Identity
from consumer_sdk.late_ledger import LateLedger
from consumer_sdk.message_context import HandlingState
from consumer_sdk.message_store import MessageStore
from consumer_sdk.run_store import ROLE
from consumer_sdk.transactions import Transactions, open_effects
from fencepost.batching import Batcher
from fencepost.clock import lease_clock
from fencepost.codec import PayloadCodec
from fencepost.database import Statements
from fencepost.errors import LeaseLost, TransientError
from fencepost.secrets import Secrets

if TYPE_CHECKING:
    import asyncpg

__all__ = ["DeliveryState", "HandlerTransactions", "MessageWriter"]

_Answer = TypeVar("_Answer")

_MOST_CONNECTIONS: Final = 20
_NO_RUN: Final = RunFence(None, None, None)


class DeliveryState(HandlingState):
    """What the consumer and a handler's context share, with the delivery that it is about."""

    def __init__(self, delivery: Delivery, *, effect_run: str, effect_step: str, stopping: asyncio.Event) -> None:
        assert delivery.handler is not None
        super().__init__(
            tenant_id=delivery.identity.tenant_id,
            effect_run=effect_run,
            effect_step=effect_step,
            step=delivery.handler.step,
            attempt=delivery.attempts + 1,
            stopping=stopping,
        )
        self.delivery = delivery


class HandlerTransactions(Protocol):
    """Transactions for handlers, as ``Transactions`` begins them."""

    def begin(self, *, bounded: bool = True) -> "AbstractAsyncContextManager[asyncpg.Connection]": ...
    def begin_recorded(
        self, identity: Identity, *, holder: str, limit_seconds: float
    ) -> "AbstractAsyncContextManager[asyncpg.Connection | None]": ...
    def close(self) -> None: ...


class MessageWriter:
    """The writes of one consumer. ``TransientError`` where waiting helps. ``open_effects``: the ledger's statements, when they are
    first asked for."""

    def __init__(
        self,
        *,
        store: MessageStore,
        transactions: HandlerTransactions,
        open_effects: Callable[[], Awaitable[Statements]],
        consumer: str,
        holder: str,
        dead_letter_topic: str | None,
        reconcilers: Mapping[str, Reconciler],
        codec: PayloadCodec,
        secrets: Secrets | None,
        metrics: ConsumerMetrics,
    ) -> None:
        self.store = store
        self._consumer = consumer
        self._holder = holder
        self._dead_letter_topic = dead_letter_topic
        self._reconcilers = reconcilers
        self._metrics = metrics
        self._transactions = transactions
        self._ledger = LateLedger(open_effects, holder=holder, secrets=secrets, count=metrics.effect, codec=codec)
        self._recording = Batcher[Identity, bool](self._record_all)

    @classmethod
    def on(
        cls,
        database_url: str,
        *,
        concurrency: int,
        statement_seconds: float,
        longest_attempt_seconds: float,
        pooler: bool = False,
        **given: Any,
    ) -> "MessageWriter":
        """With connections of its own at a database, which open at first use. ``pooler``: one stands between."""
        connections = min(concurrency, _MOST_CONNECTIONS)

        effects = partial(open_effects, database_url, role=ROLE, size=connections, timeout_seconds=statement_seconds)
        transactions = Transactions(
            database_url,
            role=ROLE,
            size=connections + 1,
            limit_seconds=statement_seconds,
            longest_seconds=longest_attempt_seconds,
            own_sessions=not pooler,
        )
        return cls(transactions=transactions, open_effects=effects, **given)

    async def record(self, identity: Identity) -> bool:
        """Record a message as handled. False: it was already."""
        return await self._recording.put(identity)

    async def store_dead(self, delivery: Delivery, dead: Dead) -> bool:
        """Give a message up. False: it has an outcome already."""
        copy = copy_of(delivery, dead, topic=self._dead_letter_topic, consumer=self._consumer) if self._dead_letter_topic else None
        stored = self.store.store_dead(
            delivery.identity,
            delivery.record,
            dead,
            consumer=self._consumer,
            event_type=delivery.type,
            attempts=delivery.attempts,
            copy=copy,
        )
        return await self._timed("dead_letter", stored) is not None

    def transaction(self) -> "AbstractAsyncContextManager[asyncpg.Connection]":
        """A transaction whose first statement, which records messages, sets its bounds."""
        return self._transactions.begin(bounded=False)

    def ending(self, state: HandlingState) -> "AbstractAsyncContextManager[asyncpg.Connection | None]":
        """A transaction of the handler's in which the message is recorded as handled; None in place of the connection: it was
        already."""
        assert isinstance(state, DeliveryState)
        delivery = state.delivery
        if delivery.redrive is not None:
            return self._ending_redrive(delivery)
        assert delivery.handler is not None
        limit = delivery.handler.attempt_seconds
        return self._transactions.begin_recorded(delivery.identity, holder=self._holder, limit_seconds=limit)

    @asynccontextmanager
    async def _ending_redrive(self, delivery: Delivery) -> "AsyncIterator[asyncpg.Connection | None]":
        async with self.transaction() as connection:
            yield connection if await self.record_delivery(connection, delivery) else None

    async def record_within(self, connection: "asyncpg.Connection", state: HandlingState) -> bool:
        """Record the message as handled, in a transaction of its handler's. False: it was already."""
        assert isinstance(state, DeliveryState)
        return await self.record_delivery(connection, state.delivery)

    async def record_delivery(self, connection: "asyncpg.Connection", delivery: Delivery) -> bool:
        """The same for what a handler of batches is given."""
        assert delivery.handler is not None
        limit = delivery.handler.attempt_seconds
        if delivery.redrive is None:
            return bool(await self.store.record_within(connection, [delivery.identity], limit_seconds=limit))
        ended, recorded = await self.store.finish_redrive_within(
            connection, delivery.redrive, delivery.identity, limit_seconds=limit
        )  # fmt: skip
        if not ended:
            raise LeaseLost("the dead letter is in another hand; nothing was changed")
        return recorded

    async def once(self, key: EffectKey, *, request: object, call: Call, limits: CallLimits) -> object:
        """Make an outside effect of a message happen once."""
        ledger = await self._ledger.opened()
        reconciler = self._reconcilers.get(key.operation)
        return await ledger.once(key, _NO_RUN, request=request, call=call, limits=limits, reconciler=reconciler)

    async def answers(self) -> bool:
        """Whether the database answers."""
        try:
            await self.store.known([])
        except TransientError:
            return False
        return True

    async def close(self) -> None:
        """Close the connections."""
        self._transactions.close()
        await self._ledger.close()

    async def _record_all(self, identities: Sequence[Identity]) -> Sequence[bool]:
        new = set(await self._timed("record", self.store.record(identities)))
        answers = []
        for identity in identities:
            answers.append(identity in new)
            new.discard(identity)  # of two deliveries of one message in one batch, the first has handled it
        return answers

    async def _timed(self, statement: str, answer: Awaitable[_Answer]) -> _Answer:
        started = lease_clock()
        answered = await answer
        self._metrics.statement(statement, lease_clock() - started)
        return answered
