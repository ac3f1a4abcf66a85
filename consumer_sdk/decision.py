"""What an attempt's end means for its job. Pure: how it ended goes in, what to write comes out."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum

from consumer_sdk.classification import Failure, classify
from consumer_sdk.context import AttemptState
from consumer_sdk.encoding import MAX_OUTPUT_BYTES, encoded
from consumer_sdk.jobs import Completion, FailedAttempt, Release
from consumer_sdk.retry import Retry
from fencepost.errors import InvalidCommand

__all__ = ["Action", "Drop", "Ended", "Raised", "Returned", "StopReason", "WasCancelled", "asked_seconds", "decide"]


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
class Drop:
    """Nothing may be written any more."""


Ended = Returned | Raised | WasCancelled
Action = Completion | FailedAttempt | Release | Drop

# A failure by the worker's own hand; the run may be tried again within its budgets.
_OURS = {
    StopReason.ATTEMPT_DEADLINE: Failure(kind="retryable", code="attempt_deadline", error_class="fencepost.AttemptDeadline"),
    StopReason.NO_PROGRESS: Failure(kind="retryable", code="no_progress", error_class="fencepost.NoProgress"),
}
_CANCELLED = Failure(kind="terminal", code="cancelled", error_class="fencepost.Cancelled")
_HANDLER_CANCELLED = Failure(kind="retryable", code="handler_cancelled", error_class="asyncio.CancelledError")
_INVALID_OUTPUT = Failure(kind="terminal", code="invalid_output", error_class="fencepost.errors.InvalidCommand")


def decide(
    state: AttemptState, ended: Ended, reason: StopReason | None, *, retry: Retry, random: Callable[[], float]
) -> tuple[Action, Failure | None]:
    """What to write, and the failure that it records if it is one.

    A handler that returned has done its work, even if the worker had begun to stop it: only a lost lease or a cancellation
    takes that away, and the fence decides in the end. One that the worker stopped for its own sake has not failed, whatever it
    raised on the way out.
    """
    if reason is StopReason.LEASE_LOST:
        return Drop(), None
    if reason is StopReason.CANCEL_REQUESTED:
        return _failed(state, _CANCELLED, retry, random), _CANCELLED
    if isinstance(ended, Returned):
        return _completed(state, ended.output, retry, random)
    if reason is StopReason.STOPPING:
        return Release(key=state.claim.key, checkpoint=state.checkpoint, started_after_seconds=state.started_after), None
    failure = _failure(ended, reason)
    return _failed(state, failure, retry, random), failure


def _completed(state: AttemptState, output: object, retry: Retry, random: Callable[[], float]) -> tuple[Action, Failure | None]:
    try:
        return state.completion(encoded("output", output, most=MAX_OUTPUT_BYTES)), None
    except InvalidCommand:
        return _failed(state, _INVALID_OUTPUT, retry, random), _INVALID_OUTPUT


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
