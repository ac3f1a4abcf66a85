"""What a handler sees of its run: identity, fence, deadline, cancellation, and the ways to report and to commit.

Everything that writes names the generation it was made under. A handler that has lost its lease changes nothing.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Final, Protocol
from uuid import UUID

from consumer_sdk.classification import Ambiguous
from consumer_sdk.effects import Call, CallLimits, EffectKey
from consumer_sdk.encoding import MAX_OUTPUT_BYTES, encoded
from consumer_sdk.jobs import Claim, Completion, Usage
from fencepost.clock import lease_clock
from fencepost.codec import PLAIN, PayloadCodec
from fencepost.errors import InvalidCommand, LeaseLost, TransactionRequired, TransientError

if TYPE_CHECKING:
    import asyncpg

__all__ = ["MAX_CHECKPOINT_BYTES", "AttemptState", "RunContext", "RunWriter"]

MAX_CHECKPOINT_BYTES: Final = 100_000
_DEFAULT_LIMITS: Final = CallLimits()
_MAX_EVENT_BYTES: Final = 100_000
_MOST_USED: Final = 1e15
_MOST_NAMES: Final = 50
_USED: Final = re.compile(r"[a-z0-9_]{1,50}")


class RunWriter(Protocol):
    """The worker, as far as a context needs it."""

    async def complete(self, completion: Completion, *, trusted_until: float) -> None: ...
    async def complete_within(self, connection: "asyncpg.Connection", completion: Completion) -> None: ...
    async def guard_within(self, connection: "asyncpg.Connection", claim: Claim) -> None: ...
    async def append_event(self, claim: Claim, event_type: str, detail: Mapping[str, object]) -> int: ...
    async def save_checkpoint(self, state: "AttemptState") -> None: ...
    def transaction(self) -> "AbstractAsyncContextManager[asyncpg.Connection]": ...
    async def once(self, state: "AttemptState", key: EffectKey, *, request: object, call: Call, limits: CallLimits) -> object: ...


class AttemptState:
    """What the worker and a handler's context share of one attempt. ``codec`` is that of the run's lineage."""

    def __init__(self, claim: Claim, *, claimed_at: float, trusted_seconds: float, codec: PayloadCodec = PLAIN) -> None:
        self.claim = claim
        self.codec = codec
        self.claimed_at = claimed_at
        self._trusted_seconds = trusted_seconds
        self.renewed(claimed_at)
        self.known_at = lease_clock()
        self.started_after = 0.0
        self.progressed_at = claimed_at
        self.checkpoint: bytes | None = None
        self.saved_checkpoint: bytes | None = None
        self.usage = Usage()
        self.completed = False
        self.completing = False
        self.over = False
        self.cancelled = asyncio.Event()
        self.stopping = asyncio.Event()

    def renewed(self, asked_at: float) -> None:
        """The lease was claimed or renewed by a statement that began at ``asked_at`` on the lease clock."""
        self.renewed_at = asked_at
        self.trusted_until = asked_at + self._trusted_seconds

    @property
    def deadline(self) -> float | None:
        """When the attempt must have ended, on the lease clock; None without a limit."""
        seconds = self.claim.attempt_seconds
        return None if seconds is None else self.claimed_at + seconds

    @property
    def unsaved_checkpoint(self) -> bytes | None:
        """The newest checkpoint, if it is not known to be stored."""
        return None if self.checkpoint is self.saved_checkpoint else self.checkpoint

    def completion(self, output: bytes) -> Completion:
        return Completion(
            key=self.claim.key, output=self.codec.encode(output), started_after_seconds=self.started_after, usage=self.usage
        )


class RunContext:
    """One attempt of one run, as its handler sees it."""

    def __init__(self, state: AttemptState, writer: RunWriter) -> None:
        self._state = state
        self._writer = writer
        self._transaction: asyncpg.Connection | None = None
        self._in_transaction = False
        self._fenced = False

    @property
    def run_id(self) -> UUID:
        return self._state.claim.key.run_id

    @property
    def tenant_id(self) -> str:
        return self._state.claim.key.tenant_id

    @property
    def root_run_id(self) -> UUID:
        """First run of the lineage: the same for a run and its replays."""
        return self._state.claim.root_run_id

    @property
    def workflow_version(self) -> int:
        return self._state.claim.workflow_version

    @property
    def fencing_token(self) -> int:
        """The lease's generation: pass it to whatever can refuse an older one."""
        return self._state.claim.key.generation

    @property
    def attempt(self) -> int:
        """1 at the first attempt."""
        return self._state.claim.attempt

    @property
    def traceparent(self) -> str | None:
        """W3C trace context of the acceptance."""
        return self._state.claim.traceparent

    @property
    def codec(self) -> PayloadCodec:
        """What the payloads of this run are stored through. With a ``DataKeyCodec`` it is the lineage's: what a handler
        encodes with it, for an event or a row of its own, nobody can read any more once the lineage was erased."""
        return self._state.codec

    @property
    def checkpoint(self) -> object:
        """What the last checkpoint of an earlier attempt held; None if there was none."""
        stored = self._state.claim.checkpoint
        return None if stored is None else json.loads(self._state.codec.decode(stored))

    @property
    def cancelled(self) -> bool:
        """Whether the run's cancellation was requested. The handler is cancelled as well."""
        return self._state.cancelled.is_set()

    @property
    def completes(self) -> bool:
        """Whether the transaction that is open completes the run."""
        return self._fenced

    @property
    def stopping(self) -> asyncio.Event:
        """Set when the worker stops: finish, or save a checkpoint and return soon. What is left is given back."""
        return self._state.stopping

    @property
    def trusted_seconds(self) -> float:
        """How long the lease may still be trusted without another renewal; by the local clock, margin taken off."""
        return self._state.trusted_until - lease_clock()

    @property
    def remaining_seconds(self) -> float | None:
        """Until the attempt's deadline; None without one."""
        deadline = self._state.deadline
        return None if deadline is None else deadline - lease_clock()

    def progress(self, checkpoint: object = None) -> None:
        """Report progress, and a checkpoint from which a later attempt can go on. It is stored with the next renewal, and at
        the latest with the attempt's end, whichever way it ends; call ``save`` to have it stored now.

        Raises ``InvalidCommand`` for a checkpoint over 100,000 bytes or one that JSON cannot hold.
        """
        self._state.progressed_at = lease_clock()
        if checkpoint is not None:
            self._state.checkpoint = self._state.codec.encode(encoded("checkpoint", checkpoint, most=MAX_CHECKPOINT_BYTES))

    async def save(self, checkpoint: object) -> None:
        """Store a checkpoint now. Raises ``LeaseLost`` if the run is no longer held."""
        self._refuse_after_completion()
        self.progress(checkpoint)
        await self._writer.save_checkpoint(self._state)

    def use(self, *, cost: float = 0, **detail: float) -> None:
        """Add to what this attempt used: ``cost`` counts against the command's ``cost_limit``, the rest is kept as evidence.

        Raises ``InvalidCommand`` for what is not a number from 0 to 1e15.
        """
        for name, amount in {"cost": cost, **detail}.items():
            if type(amount) not in (int, float) or not 0 <= amount <= _MOST_USED or not _USED.fullmatch(name):
                limit = "must be plain numbers from 0 to 1e15 under short names of a-z 0-9 _"
                raise InvalidCommand("usage", limit, "convert it first")
        usage = self._state.usage
        amounts = dict(usage.detail or {})
        if len(amounts.keys() | detail.keys()) > _MOST_NAMES:
            raise InvalidCommand("usage", f"must have at most {_MOST_NAMES} names", "add up what belongs together")
        for name, amount in detail.items():
            amounts[name] = amounts.get(name, 0) + amount
        self._state.usage = Usage(cost=(usage.cost or 0) + cost, detail=amounts or None)

    async def event(self, name: str, detail: Mapping[str, object] | None = None) -> int:
        """Append ``workflow.<name>`` to the run's story, and so to its topic; its sequence. Raises ``LeaseLost``."""
        self._refuse_after_completion()
        encoded("detail", detail or {}, most=_MAX_EVENT_BYTES)
        return await self._writer.append_event(self._state.claim, f"workflow.{name}", detail or {})

    async def once(
        self,
        operation: str,
        *,
        request: object,
        call: Call,
        limits: CallLimits = _DEFAULT_LIMITS,
        step: str | None = None,
        occurrence: int = 0,
    ) -> object:
        """Make an outside effect happen once for this run, its retries and its replays, and return its result.

        ``call`` gets an ``Effect``: pass its ``key`` as the provider's idempotency key. ``request`` is what the effect is for;
        the same operation with another request raises ``EffectMismatch``. ``step`` defaults to the workflow; a step that runs
        more than once numbers its ``occurrence``.

        Raises ``EffectFailed`` for a refusal, this time's or a recorded one; ``EffectUnknown`` while nobody knows the answer;
        ``LeaseLost``; and what ``call`` raised, where it surely did nothing. Register a reconciler for operations whose answer
        can get lost.
        """
        self._refuse_after_completion()
        if self._in_transaction:
            raise TransactionRequired("a call must not hold a transaction open: make it before or after")
        claim = self._state.claim
        key = EffectKey(str(claim.root_run_id), self.tenant_id, claim.iteration, step or claim.workflow, occurrence, operation)
        return await self._writer.once(self._state, key, request=request, call=call, limits=limits)

    async def complete(self, output: object = None) -> None:
        """Complete the run now, instead of by the handler's return. Raises ``LeaseLost`` if it is no longer held.

        Inside ``transaction()`` the completion commits with the transaction's writes, as its last statement.
        """
        self._refuse_after_completion()
        completion = self._state.completion(self._encoded_output(output))
        if self._transaction is None:
            self._state.completing = True
            try:
                await self._writer.complete(completion, trusted_until=self._state.trusted_until)
                self._state.completed = True
            finally:
                self._state.completing = False
        else:
            self._state.completing = True  # before the statement, which takes the row that a renewal would ask for
            await self._writer.complete_within(self._transaction, completion)
            self._fenced = True

    @asynccontextmanager
    async def transaction(self) -> "AsyncIterator[asyncpg.Connection]":
        """A transaction in the runs' database: what is written in it commits only if the run is still held then.

        The fence is the last statement: ``complete``, or a check that the lease still holds. Keep it short: it is no place
        for calls to anything outside the database.
        """
        self._refuse_after_completion()
        if self._in_transaction:
            raise TransactionRequired("this attempt is in a transaction already; use its connection, or end it first")
        self._in_transaction = True
        try:
            async with self._writer.transaction() as connection:
                self._transaction = connection
                yield connection
                if not self._fenced:
                    await self._writer.guard_within(connection, self._state.claim)
            self._state.completed = self._fenced
        except Ambiguous as error:
            if self._fenced and error.code == "commit_unknown":
                # The job's row tells whether the completion took place, and everything else with it.
                raise TransientError("transaction: no answer to the commit") from error
            raise
        finally:
            self._transaction, self._in_transaction = None, False
            self._fenced = self._state.completing = False

    def _encoded_output(self, output: object) -> bytes:
        return encoded("output", output, most=MAX_OUTPUT_BYTES)

    def _refuse_after_completion(self) -> None:
        """An attempt that has ended writes no more, whatever its handler left running. And an open transaction holds the job's row
        from the completion on: another connection would wait for it in vain."""
        if self._state.over or self._state.completed:
            raise LeaseLost("the attempt has ended; nothing was changed")
        if self._state.completing:
            raise TransactionRequired("the run is being completed, as the last thing of its attempt; do this before")
