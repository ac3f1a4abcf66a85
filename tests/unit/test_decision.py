"""What an attempt's end means for its job: a table of how it ended and why it was stopped."""

import asyncio
import itertools
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

import pytest

from consumer_sdk.classification import Ambiguous, Retryable, Terminal
from consumer_sdk.context import AttemptState
from consumer_sdk.decision import Action, Drop, Ended, Left, Raised, Returned, StopReason, WasCancelled, decide
from consumer_sdk.encoding import MAX_OUTPUT_BYTES
from consumer_sdk.jobs import Claim, Completion, Continuation, FailedAttempt, JobKey, Release, Usage
from consumer_sdk.leaving import Continuing, GivenBack, Parked
from fencepost.errors import LeaseLost, WorkflowChanged, WorkflowFailure
from fencepost.retry import Retry
from fencepost.workflows import Workflow, Workflows
from tests.support.infinities import IN_MODELS, IN_PLAIN_VALUES


class OutOfStock(WorkflowFailure): ...


async def order(_context: object, number: int) -> int:
    return number


async def measure(_context: object, number: int) -> Any:
    return number


workflows: Final = Workflows()
workflows.workflow("order", version=2, max_attempts=7, deadline_seconds=60, failures={OutOfStock: 422})(order)
workflows.workflow("measure")(measure)
ORDER: Final = workflows.newest(order)
MEASURE: Final = workflows.newest(measure)

CLAIM: Final = Claim(
    key=JobKey(UUID(int=1), "acme", 3), attempt=2, max_attempts=5, workflow="report", workflow_version=1, input=b"{}",
    checkpoint=None, retry_delay_seconds=None, attempt_seconds=None, root_run_id=UUID(int=1), iteration=0, traceparent=None,
    created_at=datetime(2026, 1, 1, tzinfo=UTC),
)  # fmt: skip
RETRY: Final = Retry(base_seconds=1, cap_seconds=60, jitter="none")

RETURNED: Final = Returned({"a": 1})
UNFIT: Final = Returned(object())
BUSY: Final = Raised(Retryable("busy"))
REFUSED: Final = Raised(Terminal("refused"))
UNKNOWN: Final = Raised(Ambiguous("unknown"))
STALE: Final = Raised(LeaseLost("stale"))
STOPPED: Final = WasCancelled()
OTHERWISE: Final = Raised(WorkflowChanged("step: other arguments"))
SLEEPS: Final = Left(GivenBack(seconds=60.0))
PARKED: Final = Left(Parked(code="workflow_changed"))
CONTINUES: Final = Left(Continuing(workflow=ORDER, input=b"2"))

NO = None
LOST, CANCEL, DEADLINE, IDLE, STOP = (
    StopReason.LEASE_LOST, StopReason.CANCEL_REQUESTED, StopReason.ATTEMPT_DEADLINE, StopReason.NO_PROGRESS, StopReason.STOPPING,
)  # fmt: skip
REASONS: Final = (NO, LOST, CANCEL, DEADLINE, IDLE, STOP)

# What is written: a completion, nothing, a release, or a failure as (code, reason why there is no further attempt).
DONE, NOTHING, BACK = "completion", "nothing", "release"
LATER, PARK, NEXT = "release for later", "parking", "continuation"
CANCELLED: Final = ("cancelled", "not_retryable")
LATE: Final = ("attempt_deadline", None)
HANGS: Final = ("no_progress", None)
NOT_STORED: Final = ("invalid_output", "not_retryable")
ROWS: Final[tuple[tuple[str, Ended, tuple[object, ...]], ...]] = (
    #                        not stopped                      lost     cancelled  deadline     no progress  stopping
    ("returned", RETURNED, (DONE, NOTHING, CANCELLED, DONE, DONE, DONE)),
    ("unfit output", UNFIT, (NOT_STORED, NOTHING, CANCELLED, NOT_STORED, NOT_STORED, NOT_STORED)),
    ("retryable", BUSY, (("busy", None), NOTHING, CANCELLED, LATE, HANGS, BACK)),
    ("terminal", REFUSED, (("refused", "not_retryable"), NOTHING, CANCELLED, LATE, HANGS, BACK)),
    ("ambiguous", UNKNOWN, (("unknown", "ambiguous"), NOTHING, CANCELLED, LATE, HANGS, BACK)),
    ("stale", STALE, (("unexpected", None), NOTHING, CANCELLED, LATE, HANGS, BACK)),
    ("cancelled", STOPPED, (("handler_cancelled", None), NOTHING, CANCELLED, LATE, HANGS, BACK)),
    ("changed", OTHERWISE, (PARK, NOTHING, CANCELLED, LATE, HANGS, BACK)),
    ("sleeps", SLEEPS, (LATER, NOTHING, CANCELLED, LATER, LATER, LATER)),
    ("parked", PARKED, (PARK, NOTHING, CANCELLED, PARK, PARK, PARK)),
    ("continues", CONTINUES, (NEXT, NOTHING, CANCELLED, NEXT, NEXT, NEXT)),
)  # fmt: skip
TABLE: Final = [
    pytest.param(ended, reason, expected, id=f"{name}-{reason.value if reason else 'not stopped'}")
    for name, ended, row in ROWS
    for reason, expected in zip(REASONS, row, strict=True)
]


def state_of(claim: Claim = CLAIM) -> AttemptState:
    state = AttemptState(claim, claimed_at=100.0, trusted_seconds=20.0)
    state.started_after = 0.5
    return state


def decided(ended: Ended, reason: StopReason | None = None, *, state: AttemptState | None = None, retry: Retry = RETRY) -> Action:
    return decide(state or state_of(), ended, reason, retry=retry, random=lambda: 0.5)[0]


def told(action: Action) -> object:
    match action:
        case Completion():
            return DONE
        case Drop():
            return NOTHING
        case Release(parked_as=str()):
            return PARK
        case Release(delay_seconds=float()):
            return LATER
        case Release():
            return BACK
        case Continuation():
            return NEXT
        case FailedAttempt():
            return action.error_code, action.reason


@pytest.mark.parametrize(("ended", "reason", "expected"), TABLE)
def test_what_is_written(ended: Ended, reason: StopReason | None, expected: object) -> None:
    action, failure = decide(state_of(), ended, reason, retry=RETRY, random=lambda: 0.5)

    assert told(action) == expected
    assert (failure is not None) == isinstance(action, FailedAttempt)
    if isinstance(action, FailedAttempt):
        assert failure is not None
        assert (action.delay_seconds is None) == (action.reason is not None)
        assert (failure.code, failure.error_class) == (action.error_code, action.error_class)


# Workflows


class Stamps:
    """A codec whose bytes tell that it was asked."""

    def encode(self, payload: bytes) -> bytes:
        return b"<" + payload + b">"

    def decode(self, payload: bytes) -> bytes:
        return payload[1:-1]


def stamped() -> AttemptState:
    return AttemptState(CLAIM, claimed_at=100.0, trusted_seconds=20.0, codec=Stamps())


def test_a_continuation_has_the_limits_of_the_workflow_that_follows() -> None:
    action = decided(CONTINUES, state=stamped())

    assert isinstance(action, Continuation)
    assert (action.workflow, action.workflow_version, action.input) == ("order", 2, b"<2>")
    assert (action.max_attempts, action.deadline_seconds) == (7, 60)
    assert action.new_run_id.version == 7


def test_a_sleep_keeps_its_length_and_a_parked_run_its_reason() -> None:
    sleeps, parked = decided(SLEEPS), decided(PARKED)

    assert isinstance(sleeps, Release)
    assert isinstance(parked, Release)
    assert (sleeps.delay_seconds, sleeps.parked_as) == (60, None)
    assert (parked.delay_seconds, parked.parked_as) == (None, "workflow_changed")


def test_a_workflows_result_is_of_its_type_and_goes_through_the_codec() -> None:
    action, _ = decide(stamped(), Returned(3), None, retry=RETRY, random=lambda: 0.5, workflow=ORDER)
    refused, failure = decide(stamped(), Returned("three"), None, retry=RETRY, random=lambda: 0.5, workflow=ORDER)

    assert isinstance(action, Completion)
    assert action.output == b"<3>"
    assert isinstance(refused, FailedAttempt)
    assert failure is not None
    assert (refused.error_code, refused.reason, refused.failure) == ("invalid_output", "not_retryable", None)


@pytest.mark.parametrize("output", [*IN_PLAIN_VALUES.values(), *IN_MODELS.values()], ids=[*IN_PLAIN_VALUES, *IN_MODELS])
@pytest.mark.parametrize("workflow", [MEASURE, None], ids=["of a workflow", "of a handler"])
def test_an_output_with_an_infinity_or_a_nan_ends_the_run(workflow: Workflow | None, output: object) -> None:
    action, failure = decide(stamped(), Returned(output), None, retry=RETRY, random=lambda: 0.5, workflow=workflow)

    assert isinstance(action, FailedAttempt)
    assert failure is not None
    assert (action.error_code, action.reason, failure.code) == ("invalid_output", "not_retryable", "invalid_output")


@pytest.mark.parametrize("workflow", [ORDER, None], ids=["of a workflow", "of a handler"])
def test_a_mapped_failure_is_final_and_told(workflow: Workflow | None) -> None:
    """ROUTE-33."""
    action, failure = decide(
        stamped(), Raised(OutOfStock(details={"left": 0})), None, retry=RETRY, random=lambda: 0.5, workflow=workflow
    )

    assert isinstance(action, FailedAttempt)
    assert failure is not None
    assert action.delay_seconds is None
    if workflow is None:
        assert (action.error_code, action.failure) == ("workflow_failure", None)
    else:
        assert (action.error_code, action.failure) == (
            "out_of_stock", b'<{"type":"OutOfStock","details":{"left":0},"status":422}>',
        )  # fmt: skip


@pytest.mark.parametrize("reason", [DEADLINE, IDLE, STOP, CANCEL, LOST])
def test_a_failure_on_the_way_out_is_not_the_workflows_word(reason: StopReason) -> None:
    action, _ = decide(state_of(), Raised(OutOfStock()), reason, retry=RETRY, random=lambda: 0.5, workflow=ORDER)

    assert not isinstance(action, FailedAttempt) or action.failure is None


def test_the_table_is_whole() -> None:
    assert len(TABLE) == len(ROWS) * (len(StopReason) + 1)
    assert set(REASONS) == {None, *StopReason}


def test_every_action_names_the_generation_it_was_made_under() -> None:
    for ended, reason in itertools.product([row[1] for row in ROWS], REASONS):
        action = decided(ended, reason)
        assert isinstance(action, Drop) or action.key == CLAIM.key


def test_a_completion_holds_output_start_and_usage() -> None:
    state = state_of()
    state.usage = Usage(cost=2, detail={"tokens": 3})

    assert decided(RETURNED, state=state) == Completion(
        key=CLAIM.key, output=b'{"a":1}', started_after_seconds=0.5, usage=Usage(cost=2, detail={"tokens": 3})
    )


@pytest.mark.parametrize(
    ("ended", "reason"), [(BUSY, None), (STOPPED, DEADLINE), (REFUSED, None), (STOPPED, STOP), (STOPPED, CANCEL)]
)
def test_the_newest_checkpoint_goes_with_the_end(ended: Ended, reason: StopReason | None) -> None:
    """JOB-17."""
    state = state_of()
    state.checkpoint = b"3"
    action = decided(ended, reason, state=state)

    assert isinstance(action, FailedAttempt | Release)
    assert action.checkpoint == b"3"


@pytest.mark.parametrize(("attempt", "delay"), [(1, 1), (2, 2), (3, 4), (7, 60), (1000, 60)])
def test_the_delay_grows_with_the_attempts(attempt: int, delay: float) -> None:
    action = decided(BUSY, state=state_of(replace(CLAIM, attempt=attempt)))

    assert isinstance(action, FailedAttempt)
    assert action.delay_seconds == delay


def test_decorrelated_jitter_starts_from_the_stored_delay() -> None:
    """JOB-24."""
    retry = Retry(base_seconds=1, cap_seconds=20, jitter="decorrelated")
    action = decided(BUSY, state=state_of(replace(CLAIM, retry_delay_seconds=3.5)), retry=retry)

    assert isinstance(action, FailedAttempt)
    assert action.delay_seconds == 5.75


@pytest.mark.parametrize(("asked", "delay"), [("1", 2), ("40", 40), ("4000", 60), ("soon", 2)])
def test_a_provider_is_given_the_time_that_it_asks_for_within_the_policy(asked: str, delay: float) -> None:
    action = decided(Raised(Retryable("busy", retry_after=asked)))

    assert isinstance(action, FailedAttempt)
    assert action.delay_seconds == delay


@pytest.mark.parametrize(("size", "fits"), [(MAX_OUTPUT_BYTES, True), (MAX_OUTPUT_BYTES + 1, False)])
def test_an_output_has_a_bound(size: int, fits: bool) -> None:
    assert told(decided(Returned("x" * (size - 2)))) == (DONE if fits else NOT_STORED)


def test_no_message_goes_into_a_failure() -> None:
    secret = "marker-4711"
    for error in (RuntimeError(secret), ExceptionGroup(secret, [ValueError(secret)]), OSError(secret)):
        assert secret not in str(decide(state_of(), Raised(error), None, retry=RETRY, random=lambda: 0.5))


def test_a_cancellation_that_nobody_asked_for_is_tried_again() -> None:
    action = decided(WasCancelled())

    assert isinstance(action, FailedAttempt)
    assert (action.error_class, action.delay_seconds) == ("asyncio.CancelledError", 2)
    assert asyncio.CancelledError.__module__ == "asyncio.exceptions"
