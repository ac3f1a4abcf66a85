"""Runs that messages execute: the message's run is claimed by its id, and the handler is an attempt at it like any worker's.

The job's own budgets, delays and deadline decide then, not the message's. A run that somebody else holds is waited for.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, cast
from uuid import UUID

import structlog

from consumer_sdk.attempt import Attempt
from consumer_sdk.classification import Failure
from consumer_sdk.context import AttemptState, RunContext
from consumer_sdk.decision import StopReason
from consumer_sdk.delivery import Again, Dead
from consumer_sdk.effects import Reconciler
from consumer_sdk.handlers import Handler
from consumer_sdk.jobs import Claim
from consumer_sdk.lease_keeping import LeaseKeeper
from consumer_sdk.message import Message
from consumer_sdk.message_context import MessageContext
from consumer_sdk.message_decision import postponed
from consumer_sdk.message_handlers import MessageFunction, MessageHandler
from consumer_sdk.message_writer import DeliveryState, MessageWriter
from consumer_sdk.run_store import RunStore
from consumer_sdk.run_writer import RunWriter
from consumer_sdk.worker_metrics import WorkerMetrics
from consumer_sdk.worker_settings import WorkerSettings
from fencepost import __version__
from fencepost.clock import lease_clock
from fencepost.codec import PayloadCodec, lineage_codec
from fencepost.errors import TransientError
from fencepost.secrets import Secrets

__all__ = ["MessageRuns"]

_log = structlog.get_logger(__name__)

_WATCH_SECONDS: Final = 0.1
_REAP_MOST: Final = 100
# A holder may complete the run, or give it back, long before its lease ends.
_LOOK_SECONDS: Final = 2.0
_MOST_STATEMENT_SECONDS: Final = 10.0
_RETRY_SOON: Final = Again(0.2, spent=False)
_NOT_FOUND: Final = Dead("rejected", "fencepost.errors.RunNotFound", "run_not_found")
_NO_RUN: Final = Dead("rejected", "consumer_sdk.NoRun", "message_names_no_run")
_OTHER_WORKFLOW: Final = Dead("rejected", "consumer_sdk.OtherWorkflow", "run_of_another_workflow")


class MessageRuns:
    """``settings`` are a worker's: leases, margins, graces. ``execute`` returns None for a run that ended well."""

    def __init__(
        self,
        *,
        store: RunStore,
        settings: WorkerSettings,
        owner: str,
        reconcilers: Mapping[str, Reconciler],
        secrets: Secrets | None,
        codec: PayloadCodec,
        metrics: WorkerMetrics,
    ) -> None:
        self._store = store
        self._settings = settings
        self._codec = codec
        self._metrics = metrics
        self._writer = RunWriter(
            store=store,
            worker_id=owner,
            database_url=settings.database_url.get_secret_value(),
            lease_seconds=settings.worker_lease_seconds,
            concurrency=settings.worker_concurrency,
            reconcilers=reconcilers,
            secrets=secrets,
            metrics=metrics,
            pooler=settings.worker_wakeup == "poll",
        )
        self._keeper = LeaseKeeper(store, settings, metrics, answered=lambda: None)

    @classmethod
    async def open(
        cls,
        settings: WorkerSettings,
        *,
        owner: str,
        workflows: list[str],
        reconcilers: Mapping[str, Reconciler],
        secrets: Secrets | None,
        codec: PayloadCodec,
    ) -> "MessageRuns":
        """Connect, and check that the schema is there."""
        store = await RunStore.open(
            settings.database_url.get_secret_value(),
            worker_id=owner,
            timeout_seconds=min(settings.worker_lease_seconds / 3, _MOST_STATEMENT_SECONDS),
            pooler=settings.worker_wakeup == "poll",
        )
        metrics = WorkerMetrics(version=__version__, worker_id=owner, workflows=workflows)
        return cls(
            store=store, settings=settings, owner=owner, reconcilers=reconcilers, secrets=secrets, codec=codec, metrics=metrics
        )

    @property
    def registry(self) -> object:
        """The metrics of these runs, which are a worker's."""
        return self._metrics.registry

    async def run(self) -> None:
        """Keep the leases of what is at work, and reap what nobody can claim; until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keeper.renew_forever())
            group.create_task(self._watch())
            group.create_task(self._reap())

    async def close(self) -> None:
        """Close the connections."""
        await self._writer.close()
        await self._store.close()

    async def execute(
        self, handler: MessageHandler, message: Message[object], state: DeliveryState, writer: MessageWriter
    ) -> Again | Dead | None:
        """Claim the message's run and execute it. None: the run has ended, and the message with it."""
        run_id = _run_id(message.run_id)
        if run_id is None:
            return _NO_RUN
        assert handler.workflow is not None
        claimed_at = lease_clock()
        claim = await self._store.claim_run(
            handler.workflow,
            run_id,
            state.tenant_id,
            attempt_seconds=handler.attempt_seconds,
            lease_seconds=self._settings.worker_lease_seconds,
        )
        if claim is None:
            return await self._unclaimable(handler, run_id, state)
        return await self._attempted(handler, message, state, writer, claim, claimed_at)

    async def _unclaimable(self, handler: MessageHandler, run_id: UUID, state: DeliveryState) -> Again | Dead | None:
        """Why the run is not to be had: it has ended, somebody else is at it, or its time has not come."""
        found = await self._store.claimable(run_id, state.tenant_id)
        if found is None:
            return _NOT_FOUND
        if found.workflow != handler.workflow:
            return _OTHER_WORKFLOW
        if found.state in {"completed", "cancelled"}:
            return None
        if found.state == "dead":
            return Dead("run_failed", "fencepost.RunFailed", "run_failed")
        held = Failure(kind="retryable", code="run_held", error_class="consumer_sdk.RunHeld", retry_after=None)
        outcome = postponed(state.delivery, held, now=lease_clock())
        return (
            outcome
            if isinstance(outcome, Dead)
            else Again(max(outcome.after_seconds, min(found.wait_seconds, _LOOK_SECONDS)), spent=False)
        )

    async def _attempted(
        self,
        handler: MessageHandler,
        message: Message[object],
        state: DeliveryState,
        writer: MessageWriter,
        claim: Claim,
        claimed_at: float,
    ) -> Again | Dead | None:
        async def called(run: RunContext, _input: object) -> object:
            return await cast("MessageFunction", handler.function)(message, MessageContext(state, writer, run))

        codec = lineage_codec(self._codec, claim.data_key)
        with contextlib.suppress(ValueError):  # a data key that cannot be unwrapped: the attempt finds that out, and parks the run
            # The run's input is left alone, in whatever form it is: the message has its own payload.
            claim = replace(claim, input=codec.encode(b"null"))
        lease = AttemptState(claim, claimed_at=claimed_at, trusted_seconds=self._settings.trusted_seconds, codec=codec)
        executed = Handler(
            workflow=claim.workflow,
            function=called,
            model=None,
            retry=handler.retry,
            attempt_seconds=handler.attempt_seconds,
            progress_seconds=None,
        )
        attempt = Attempt(lease, handler=executed, writer=self._writer, metrics=self._metrics)
        self._keeper.add(attempt)
        try:
            await self._supervised(attempt, state)
        finally:
            self._keeper.attempts.pop(claim.key, None)
        return _outcome(attempt)

    async def _supervised(self, attempt: Attempt, state: DeliveryState) -> None:
        """Let it end by itself. Cancelled, because its partition or the consumer goes, it is given back without a failure."""
        running = asyncio.create_task(attempt.run())
        stopping = asyncio.create_task(state.stopping.wait())
        stopping.add_done_callback(lambda _: attempt.state.stopping.set())
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            attempt.stop(StopReason.STOPPING)
            await running
            raise
        finally:
            stopping.cancel()

    async def _watch(self) -> None:
        while True:
            self._keeper.watch()
            await asyncio.sleep(_WATCH_SECONDS)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(self._settings.worker_lease_seconds / 2)
            try:
                for reaped in await self._store.reap(limit=_REAP_MOST):
                    self._metrics.reaped(reaped.state)
                    _log.warning("job_reaped", run_id=str(reaped.run_id), state=reaped.state, reason=reaped.reason)
            except TransientError as error:
                self._metrics.database_error("maintain")
                _log.warning("maintenance_failed", error=str(error))


def _outcome(attempt: Attempt) -> Again | Dead | None:
    """What an attempt at the run means for the message."""
    if attempt.outcome in {"completed", "cancelled"}:
        return None
    if attempt.outcome == "dead":
        failure = attempt.failure
        assert failure is not None
        return Dead("ambiguous" if failure.kind == "ambiguous" else "run_failed", failure.error_class, failure.code)
    if attempt.outcome == "retried":
        return Again(attempt.retry_seconds or 0.0, spent=False)
    return _RETRY_SOON  # lost, or given back: whoever may claim it next does


def _run_id(text: str | None) -> UUID | None:
    try:
        return None if text is None else UUID(text)
    except ValueError:
        return None
