"""Which failures of a workflow its client is told of, and what is kept of them. Pure; messages are kept nowhere."""

import re
from dataclasses import dataclass
from typing import Final

import structlog

from consumer_sdk.classification import Failure, classify
from consumer_sdk.encoding import encoded
from fencepost.errors import InvalidCommand, InvariantViolated, LeaseLost, TransientError, WorkflowChanged, WorkflowFailure
from fencepost.workflows import Workflow

__all__ = ["ToldFailure", "told_failure"]

_log = structlog.get_logger(__name__)

MAX_DETAILS_BYTES: Final = 100_000
_MOST_CODE: Final = 64
_WORD: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_UNSAFE: Final = re.compile(r"[^a-z0-9_]+")
# They are not the workflow's word, even where `failures` names a class that is theirs as well.
_NEVER_TOLD: Final = (LeaseLost, TransientError, WorkflowChanged, InvariantViolated)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToldFailure:
    """``payload`` is what a client may know, as JSON: the class's name, details, and the HTTP status."""

    failure: Failure
    payload: bytes


def told_failure(workflow: Workflow | None, error: BaseException) -> ToldFailure | None:
    """What a client is told of the error; None if it is not for the client.

    Of errors that were raised together the first that is for the client decides, as long as no other leaves open what happened.
    """
    if workflow is None:
        return None
    errors = _members(error)
    told = [one for one in errors if isinstance(one, Exception) and _is_told(workflow, one)]
    if not told or any(_decides(one) for one in errors if one not in told):
        return None
    name, status = type(told[0]).__name__, workflow.status_of(told[0])
    failure = Failure(kind="terminal", code=_code(name), error_class=classify(told[0]).error_class)
    return ToldFailure(failure=failure, payload=_payload(told[0], name, status))


def _is_told(workflow: Workflow, error: Exception) -> bool:
    return not isinstance(error, _NEVER_TOLD) and workflow.status_of(error) is not None


def _decides(error: BaseException) -> bool:
    """Whether an error that the client is not told of weighs more than one that it is."""
    if not isinstance(error, Exception) or (isinstance(error, _NEVER_TOLD) and not isinstance(error, TransientError)):
        return True
    return classify(error).kind == "ambiguous"


def _members(error: BaseException) -> list[BaseException]:
    """The errors of a group, at any depth; the error itself if it is none."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [member for one in error.exceptions for member in _members(one)]


def _payload(error: Exception, name: str, status: int | None) -> bytes:
    details = error.details if isinstance(error, WorkflowFailure) else None
    most = MAX_DETAILS_BYTES + _MOST_CODE
    try:
        return encoded("details", {"type": name, "details": details, "status": status}, most=most)
    except InvalidCommand as refused:
        _log.warning("failure_details_refused", type=name, limit=refused.limit, remedy=refused.remedy)
        return encoded("details", {"type": name, "details": None, "status": status}, most=most)


def _code(name: str) -> str:
    """``OutOfStock`` as ``out_of_stock``: what tables, logs and metrics hold."""
    code = _UNSAFE.sub("_", _WORD.sub("_", name).lower()).strip("_")
    return code[:_MOST_CODE] or "workflow_failure"
