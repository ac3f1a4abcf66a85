"""What an attempt's end means for its job. Pure: how it ended goes in, what to write comes out."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Final

from uuid_utils.compat import uuid7

from consumer_sdk.classification import Failure, classify
from consumer_sdk.context import AttemptState
from consumer_sdk.encoding import MAX_OUTPUT_BYTES, encoded, encoded_as
from consumer_sdk.jobs import Completion, Continuation, FailedAttempt, Release
from consumer_sdk.leaving import Continuing, GivenBack, Parked, Way
from consumer_sdk.told_failures import ToldFailure, told_failure
from fencepost.errors import InvalidCommand, WorkflowChanged
from fencepost.retry import Retry
from fencepost.workflows import Workflow

__all__ = [
    "CHANGED",
    "Action",
    "Drop",
    "Ended",
    "Left",
    "Raised",
    "Returned",
    "StopReason",
    "WasCancelled",
    "asked_seconds",
    "decide",
]

#: Why a run is parked whose workflow changed under it.
CHANGED: Final = Parked(code="workflow_changed")


class StopReason(Enum):
    """Why the worker ended an attempt that had not ended by itself."""

    LEASE_LOST = "lease_lost"
    CANCEL_REQUESTED = "cancel_requested"
    ATTEMPT_DEADLINE = "attempt_deadline"
    NO_PROGRESS = "no_progress"
    STOPPING = "stopping"


@dataclass(frozen=True)
class Returned:
    """The handler returned."""

    output: object


@dataclass(frozen=True)
class Raised:
    """The handler raised."""

    error: BaseException


@dataclass(frozen=True)
class WasCancelled:
    """The handler ended by ``asyncio.CancelledError``."""


@dataclass(frozen=True)
class Left:
    """A workflow's attempt ended before the workflow did."""

    way: Way


@dataclass(frozen=True)
class Drop:
    """Nothing may be written any more."""


Ended = Returned | Raised | WasCancelled | Left
Action = Completion | Continuation | FailedAttempt | Release | Drop

# A failure by the worker's own hand; the run may be tried again within its budgets.
_OURS = {
    StopReason.ATTEMPT_DEADLINE: Failure(kind="retryable", code="attempt_deadline", error_class="fencepost.AttemptDeadline"),
    StopReason.NO_PROGRESS: Failure(kind="retryable", code="no_progress", error_class="fencepost.NoProgress"),
}
_CANCELLED = Failure(kind="terminal", code="cancelled", error_class="fencepost.Cancelled")
_HANDLER_CANCELLED = Failure(kind="retryable", code="handler_cancelled", error_class="asyncio.CancelledError")
_INVALID_OUTPUT = Failure(kind="terminal", code="invalid_output", error_class="fencepost.errors.InvalidCommand")


def decide(
    state: AttemptState,
    ended: Ended,
    reason: StopReason | None,
    *,
    retry: Retry,
    random: Callable[[], float],
    workflow: Workflow | None = None,
) -> tuple[Action, Failure | None]:
    """What to write, and the failure that it records if it is one.

    ``workflow`` is what was executed, where that is no plain handler: its result has a type, and some of its failures are for its
    client. A handler that returned has done its work, even if the worker had begun to stop it: only a lost lease or a cancellation
    takes that away, and the fence decides in the end. One that the worker stopped for its own sake has not failed, whatever it
    raised on the way out.
    """
    if reason is StopReason.LEASE_LOST:
        return Drop(), None
    if reason is StopReason.CANCEL_REQUESTED:
        return _failed(state, _CANCELLED, retry, random), _CANCELLED
    if isinstance(ended, Returned):
        return _completed(state, ended.output, workflow, retry, random)
    if isinstance(ended, Left):
        return _left(state, ended.way), None
    if reason is StopReason.STOPPING:
        return _released(state), None
    if reason is None and isinstance(ended, Raised):
        if isinstance(ended.error, WorkflowChanged):
            return _left(state, CHANGED), None
        told = told_failure(workflow, ended.error)
        if told is not None:
            return _refused(state, told, retry, random), told.failure
    failure = _failure(ended, reason)
    return _failed(state, failure, retry, random), failure


def _completed(
    state: AttemptState, output: object, workflow: Workflow | None, retry: Retry, random: Callable[[], float]
) -> tuple[Action, Failure | None]:
    try:
        if workflow is None:
            return state.completion(encoded("output", output, most=MAX_OUTPUT_BYTES)), None
        return state.completion(encoded_as("output", workflow.result, output, most=MAX_OUTPUT_BYTES)), None
    except InvalidCommand:
        return _failed(state, _INVALID_OUTPUT, retry, random), _INVALID_OUTPUT


def _left(state: AttemptState, way: Way) -> Action:
    if isinstance(way, GivenBack):
        return replace(_released(state), delay_seconds=way.seconds)
    if isinstance(way, Parked):
        return replace(_released(state), parked_as=way.code)
    return _continued(state, way)


def _released(state: AttemptState) -> Release:
    return Release(key=state.claim.key, checkpoint=state.checkpoint, started_after_seconds=state.started_after)


def _continued(state: AttemptState, way: Continuing) -> Continuation:
    following = way.workflow
    return Continuation(
        key=state.claim.key,
        new_run_id=uuid7(),
        workflow=following.name,
        workflow_version=following.version,
        input=state.codec.encode(way.input),
        max_attempts=following.max_attempts,
        deadline_seconds=following.deadline_seconds,
        started_after_seconds=state.started_after,
        usage=state.usage,
    )


def _refused(state: AttemptState, told: ToldFailure, retry: Retry, random: Callable[[], float]) -> FailedAttempt:
    """The workflow's word to its client: the run ends here, whatever the policy says of such errors."""
    return replace(_failed(state, told.failure, retry, random), failure=state.codec.encode(told.payload))


def _failure(ended: Raised | WasCancelled, reason: StopReason | None) -> Failure:
    if reason in _OURS:
        return _OURS[reason]
    return classify(ended.error) if isinstance(ended, Raised) else _HANDLER_CANCELLED


def _failed(state: AttemptState, failure: Failure, retry: Retry, random: Callable[[], float]) -> FailedAttempt:
    return FailedAttempt(
        key=state.claim.key,
        delay_seconds=_delay(state, failure, retry, random),
        reason={"terminal": "not_retryable", "ambiguous": "ambiguous"}.get(failure.kind),
        error_class=failure.error_class,
        error_code=failure.code,
        checkpoint=state.checkpoint,
        started_after_seconds=state.started_after,
        usage=state.usage,
    )


def _delay(state: AttemptState, failure: Failure, retry: Retry, random: Callable[[], float]) -> float | None:
    if failure.kind != "retryable":
        return None
    delay = retry.delay(state.claim.attempt - 1, state.claim.retry_delay_seconds, random=random)
    return max(delay, asked_seconds(failure, retry) or 0.0)


def asked_seconds(failure: Failure, retry: Retry) -> float | None:
    """How long a provider has asked to wait, within the policy; None if it has not, or in no way that can be read."""
    return None if failure.retry_after is None else retry.retry_after_seconds(failure.retry_after, now=datetime.now(UTC))
