"""The error tree. A class says who must act.

- ``FencepostError``
    - ``ConfigurationError``: an operator; nothing starts.
    - ``InvalidInput``: the caller's code; nothing was written. Names field, limit and remedy.
        - ``InvalidEvent``: an event that may not be enqueued.
            - ``DuplicateEvent``: an event id that the outbox already holds.
        - ``InvalidCommand``: a command that may not be accepted.
        - ``InvalidJson``: a text or value that canonical JSON cannot hold.
    - ``IdempotencyError``: the client that sent the key; nothing was started. Each has a ``code``.
        - ``KeyMissing``, ``KeyInvalid``: send a key, a well-formed one.
        - ``InProgress``: another transaction is accepting this key; try again. The transaction is still usable.
        - ``IdempotencyConflict``: the key belongs to another request; take a new key.
        - ``KeyExpired``: the key was used once and its answer is gone; nothing runs a second time.
    - ``RunNotFound``: no such run in this tenant.
    - ``RunChanged``: the run's version is not the one that the caller expected; read it again.
    - ``RunErased``: the run's lineage was erased; what was said in it is gone for good.
    - ``RunEnded``: the run is already in a terminal state, which the error names.
    - ``ReplayRefused``: the run may not be run anew; the message says why.
    - ``EffectError``: what the ledger says of an outside effect; nothing was sent.
        - ``EffectUnknown``: it was sent and its answer is not known; reconcile it, nothing repeats until then.
        - ``EffectMismatch``: it was recorded for another request; the handler's code changed under a run.
        - ``EffectFailed``: the provider refused it for good; the answer is recorded and stands.
    - ``WorkflowFailure``: the client; the workflow refused, and says why in a type and details.
    - ``WorkflowChanged``: an operator; the code is not what the run began under, so the run is parked.
    - ``AlreadyHandled``: nobody; another delivery of the message was faster, and this one did nothing.
    - ``TransactionRequired``: the producer's code; the event would not share the domain rows' fate.
    - ``TransientError``: nobody; wait and try again.
    - ``PermanentError``: this row; it cannot be published as it is.
    - ``LeaseLost``: nobody; drop the work, count it, go on.
    - ``InvariantViolated``: us; the process ends and its leases run out.
"""

from typing import ClassVar

__all__ = [
    "AlreadyHandled",
    "ConfigurationError",
    "DuplicateEvent",
    "EffectError",
    "EffectFailed",
    "EffectMismatch",
    "EffectUnknown",
    "FencepostError",
    "IdempotencyConflict",
    "IdempotencyError",
    "InProgress",
    "InvalidCommand",
    "InvalidEvent",
    "InvalidInput",
    "InvalidJson",
    "InvariantViolated",
    "KeyExpired",
    "KeyInvalid",
    "KeyMissing",
    "LeaseLost",
    "PermanentError",
    "ReplayRefused",
    "RunChanged",
    "RunEnded",
    "RunErased",
    "RunNotFound",
    "TransactionRequired",
    "TransientError",
    "WorkflowChanged",
    "WorkflowFailure",
]


class FencepostError(Exception):
    """Root of every error that Fencepost raises on purpose."""


class ConfigurationError(FencepostError):
    """The set-up cannot work; the message names the setting and the remedy. An operator acts; nothing starts."""


class InvalidInput(FencepostError, ValueError):
    """Refused before anything was stored. ``field`` is what is wrong, ``limit`` what it must keep, ``remedy`` what to do."""

    def __init__(self, field: str, limit: str, remedy: str) -> None:
        super().__init__(f"{field}: {limit}; {remedy}")
        self.field = field
        self.limit = limit
        self.remedy = remedy


class InvalidEvent(InvalidInput):
    """An event may not be written."""


class DuplicateEvent(InvalidEvent):
    """The outbox already holds a row with this event id; consumers would take the two for one event."""


class InvalidCommand(InvalidInput):
    """A command may not be accepted."""


class InvalidJson(InvalidInput):
    """A text is not JSON that every reader understands alike (RFC 7493, I-JSON), or a value has no such form."""


class IdempotencyError(FencepostError):
    """The idempotency key decides; nothing was started. ``code`` is stable and safe to show."""

    code: ClassVar[str] = "idempotency_error"


class KeyMissing(IdempotencyError):
    """No key was given where one is needed."""

    code = "idempotency_key_missing"


class KeyInvalid(IdempotencyError):
    """The key is empty, too long, or holds what a key may not hold."""

    code = "idempotency_key_invalid"


class InProgress(IdempotencyError):
    """Another transaction is accepting this key. The caller's transaction is still usable; try again, in a new one if it
    is REPEATABLE READ or SERIALIZABLE."""

    code = "idempotency_in_progress"


class IdempotencyConflict(IdempotencyError):
    """The key belongs to a run that another request started."""

    code = "idempotency_conflict"


class KeyExpired(IdempotencyError):
    """The key is past its retention. It started a run once, whose answer it no longer gives; nothing runs again."""

    code = "idempotency_key_expired"


class RunNotFound(FencepostError):
    """The tenant has no such run. Another tenant's run gives the same answer."""


class RunChanged(FencepostError):
    """The run has another version than the caller expected; nothing was changed."""


class RunEnded(FencepostError):
    """The run is in a terminal state; nothing was changed. ``state`` is completed, failed, cancelled or continued."""

    def __init__(self, state: str) -> None:
        super().__init__(f"the run is already {state}")
        self.state = state


class RunErased(FencepostError):
    """The run's lineage was erased: its payloads and its data key are gone, and nothing brings them back."""


class ReplayRefused(FencepostError):
    """Dead work may not be run anew; nothing was changed."""


class EffectError(FencepostError):
    """The ledger stands between the handler and an outside effect; nothing was sent."""


class EffectUnknown(EffectError):
    """The effect was sent and nobody knows its answer. It is not repeated until a reconciler or a person has said what happened.

    ``retry_after``: whole seconds after which asking again may tell more, as a Retry-After header; None if nobody can say.
    """

    def __init__(self, message: str, *, retry_after: str | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EffectMismatch(EffectError):
    """The effect is recorded for another request than this one; the record is unchanged."""


class EffectFailed(EffectError):
    """The provider refused the effect for good, now or at an earlier attempt. ``code`` is what the failure was recorded as."""

    def __init__(self, code: str) -> None:
        super().__init__(f"the provider refused the effect: {code}")
        self.code = code


class WorkflowFailure(FencepostError):
    """A workflow's refusal that its client is told of: by the name of its class and by ``details``, a value that JSON can hold. Its
    message stays in the process."""

    def __init__(self, message: str = "", *, details: object = None) -> None:
        super().__init__(message or type(self).__name__)
        self.details = details


class WorkflowChanged(FencepostError):
    """The workflow's code is not what the run began under: a version that is not registered, or a step with other arguments. The
    run is parked; a person decides (``fencepost runs resume``)."""


class AlreadyHandled(FencepostError):
    """Another delivery of this message has been handled; this one's transaction does nothing. Let it pass: it is no failure."""


class TransactionRequired(FencepostError):
    """The connection has no transaction that the event could commit with, or has one that can write nothing."""


class TransientError(FencepostError):
    """The environment's fault, and it passes: wait and try again. No attempt of any row is spent."""


class PermanentError(FencepostError):
    """This row cannot be published as it is; waiting does not help."""


class LeaseLost(FencepostError):
    """A write named a generation that no longer holds the lease; it changed nothing."""


class InvariantViolated(FencepostError):
    """A state that must not exist. The process ends: a lease expires safely, a wrong write does not."""
