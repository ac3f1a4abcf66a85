"""What a failure means for a message. Pure: the error and the message's history go in, an outcome comes out."""

import random as _random
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from consumer_sdk.classification import Failure, RetryLater, classify
from consumer_sdk.decision import asked_seconds
from consumer_sdk.delivery import Again, Dead, Delivery
from consumer_sdk.ledger import LedgerUnusable
from fencepost.errors import ConfigurationError, LeaseLost, TransientError
from fencepost.retry import Retry

__all__ = ["ENVIRONMENT", "decide_failure", "failure_of", "is_environment", "is_refused", "postponed"]

#: How to wait for an environment that is away: soon at first, then every few seconds, for as long as it takes.
ENVIRONMENT: Final = Retry(base_seconds=0.2, cap_seconds=5)
# Connection, resources, operator intervention and system errors of PostgreSQL; 57014 is a statement that took too long.
_ENVIRONMENT_STATES: Final = ("sqlstate_08", "sqlstate_53", "sqlstate_57", "sqlstate_58")
_CANCELLED_STATE: Final = "sqlstate_57014"
#: asyncpg's words for a connection that has gone under a handler, told by name as all drivers' errors are.
_LOST_CONNECTIONS: Final = frozenset({"ConnectionDoesNotExistError", "InternalClientError"})
_CONFLICT_STATE: Final = "sqlstate_40"
# Who may connect, and to what. A handler's statements do not come to these.
_REFUSED_STATES: Final = ("28", "3D")


def failure_of(error: Exception) -> Failure:
    """As ``classify``; what another delivery took over has a code of its own, since it is nobody's failure."""
    failure = classify(error)
    return replace(failure, code="lease_lost") if isinstance(error, LeaseLost) else failure


def is_environment(error: Exception, failure: Failure) -> bool:
    """Whether nobody is at fault: then no attempt is spent."""
    if isinstance(error, TransientError) or _is_lost(error):
        return True
    return failure.kind != "ambiguous" and failure.code.startswith(_ENVIRONMENT_STATES) and failure.code != _CANCELLED_STATE


def is_refused(error: Exception) -> bool:
    """Whether the database lets this process in no more, as after its password was changed, or the ledger's secrets are missing.
    No message is at fault, and those that follow would fare alike: an operator acts, and the consumer ends."""
    state = getattr(error.__cause__, "sqlstate", None) or ""
    return isinstance(error, LedgerUnusable) or (isinstance(error, ConfigurationError) and state.startswith(_REFUSED_STATES))


def _is_lost(error: Exception) -> bool:
    """asyncpg raises InterfaceError for a closed connection, and for faults of the handler's code; only its words tell."""
    name = type(error).__name__
    return name in _LOST_CONNECTIONS or (name == "InterfaceError" and any(word in str(error) for word in ("closed", "connection")))


def decide_failure(
    delivery: Delivery, error: Exception, *, now: float, environment: bool, random: Callable[[], float] = _random.random
) -> Again | Dead:
    """``now`` is on the lease clock; ``environment``: the database does not answer, whatever the error says."""
    handler = delivery.handler
    assert handler is not None
    failure = failure_of(error)
    if environment:
        return Again(ENVIRONMENT.delay(delivery.postponed, random=random), spent=False)
    if is_environment(error, failure):
        return postponed(delivery, failure, now=now, random=random)  # it answers by now, so this has an end
    if isinstance(error, RetryLater):
        return postponed(delivery, failure, now=now, seconds=error.seconds)
    if isinstance(error, LeaseLost) or (failure.kind != "ambiguous" and failure.code.startswith(_CONFLICT_STATE)):
        return postponed(delivery, failure, now=now, random=random)
    if failure.kind == "retryable":
        return _retried(delivery, failure, random)
    return Dead("rejected" if failure.kind == "terminal" else "ambiguous", failure.error_class, failure.code)


def postponed(
    delivery: Delivery,
    failure: Failure,
    *,
    now: float,
    seconds: float | None = None,
    random: Callable[[], float] = _random.random,
) -> Again | Dead:
    """Not now, and no attempt spent; but not for ever. ``seconds``: how long somebody has asked to wait."""
    assert delivery.handler is not None
    delay = ENVIRONMENT.delay(delivery.postponed, random=random) if seconds is None else seconds
    waited = now - (now if delivery.first_tried_at is None else delivery.first_tried_at)
    if waited + delay > delivery.handler.patience_seconds:
        return Dead("patience_exhausted", failure.error_class, failure.code)
    return Again(delay, spent=False)


def _retried(delivery: Delivery, failure: Failure, random: Callable[[], float]) -> Again | Dead:
    handler = delivery.handler
    assert handler is not None
    if delivery.attempts + 1 >= handler.attempts:
        return Dead("attempts_exhausted", failure.error_class, failure.code)
    delay = handler.retry.delay(delivery.attempts, delivery.delay_seconds, random=random)
    return Again(max(delay, asked_seconds(failure, handler.retry) or 0.0), spent=True)
