"""What a failure means for a message: a table of errors, and what bounds each of them."""

import math
from dataclasses import replace
from typing import Any, Final

import asyncpg
import pytest

from consumer_sdk.calling import HandlerExited
from consumer_sdk.classification import Ambiguous, Retryable, RetryLater, Terminal, classify
from consumer_sdk.delivery import Again, Dead, DeadReason, Delivery
from consumer_sdk.identity import Identity
from consumer_sdk.in_hand import AttemptDeadline
from consumer_sdk.message_decision import ENVIRONMENT, decide_failure, failure_of, postponed
from consumer_sdk.message_handlers import MessageHandler, MessageHandlers
from consumer_sdk.testing import event
from fencepost.errors import (
    EffectFailed,
    EffectMismatch,
    EffectUnknown,
    InvalidInput,
    LeaseLost,
    PermanentError,
    TransientError,
)
from fencepost.retry import Retry

SECRET: Final = "marker-4711"
NOW: Final = 1_000.0
RETRY: Final = Retry(base_seconds=1, cap_seconds=60, jitter="none")

UNSPENT: Final = Again(0.1, spent=False)  # the environment's first pause, at its shortest
SPENT: Final = Again(1.0, spent=True)


async def _handler(_message: Any, _context: Any) -> None: ...


def handler(**options: Any) -> MessageHandler:
    app = MessageHandlers()
    given: dict[str, Any] = {"retry": RETRY, "attempts": 3, "patience_seconds": 100}
    app.handler("order.placed", step="store", **given | options)(_handler)
    return app.all[0]


def delivery(of: MessageHandler | None = None, **history: Any) -> Delivery:
    return Delivery(
        record=event("order.placed", {}),
        message=None,
        handler=of or handler(),
        identity=Identity("e-1", "acme", "billing/store"),
        arrival=None,
        **{"first_tried_at": NOW} | history,
    )


def decided(error: Exception, of: Delivery | None = None, *, now: float = NOW, environment: bool = False) -> Again | Dead:
    return decide_failure(of or delivery(), error, now=now, environment=environment, random=lambda: 0.0)


def postgres(state: str) -> Exception:
    return asyncpg.PostgresError.new({"C": state, "M": SECRET})


TABLE: Final[list[tuple[str, Exception, Again | DeadReason]]] = [
    # Nobody's fault, and not now: nothing is spent, but patience is (CONSUME-20).
    ("the database did not answer", TransientError(SECRET), UNSPENT),
    ("a handler's connection was lost", postgres("08006"), UNSPENT),
    ("it is closed by now", asyncpg.InterfaceError("connection is closed"), UNSPENT),
    ("the driver has lost its state", asyncpg.InternalClientError("got result for unknown protocol state 3"), UNSPENT),
    ("the server shuts down", postgres("57P01"), UNSPENT),
    ("it starts up", postgres("57P03"), UNSPENT),
    ("it has too many connections", postgres("53300"), UNSPENT),
    ("its disk is full", postgres("53100"), UNSPENT),
    ("its disk is broken", postgres("58030"), UNSPENT),
    ("the handler asks for a time", RetryLater("closed", seconds=30), Again(30, spent=False)),
    ("another hand has it", LeaseLost(SECRET), UNSPENT),
    ("a serialization failure", postgres("40001"), UNSPENT),
    ("a deadlock", postgres("40P01"), UNSPENT),
    # An attempt.
    ("the handler says that nothing happened", Retryable("busy"), SPENT),
    ("nobody knows this error", RuntimeError(SECRET), SPENT),
    ("the attempt took too long", AttemptDeadline(), SPENT),
    ("the handler tried to end the process", HandlerExited(SECRET), SPENT),
    ("a statement took too long", postgres("57014"), SPENT),
    ("nothing was sent", ConnectionRefusedError(SECRET), SPENT),
    ("the handler passes too few arguments", asyncpg.InterfaceError("the server expects 1 argument, 0 were passed"), SPENT),
    ("the effect's answer is not known yet", EffectUnknown(SECRET), SPENT),
    # Given up at once.
    ("the handler rejects it", Terminal("refused"), "rejected"),
    ("a constraint forbids it", postgres("23505"), "rejected"),
    ("the data fit no column", postgres("22001"), "rejected"),
    ("the handler's input is wrong", InvalidInput("amount", "too large", "send less"), "rejected"),
    ("it can never work", PermanentError(SECRET), "rejected"),
    ("the provider has refused", EffectFailed("card_declined"), "rejected"),
    ("the effect was another request's", EffectMismatch(SECRET), "rejected"),
    ("an effect may have happened", Ambiguous("no_answer"), "ambiguous"),
    ("a request was sent, and its answer never came", TimeoutError(SECRET), "ambiguous"),
    ("08007: whether it committed is not known", postgres("08007"), "ambiguous"),
    ("40003: whether it was done is not known", postgres("40003"), "ambiguous"),
]


@pytest.mark.parametrize(("error", "expected"), [pytest.param(error, expected, id=name) for name, error, expected in TABLE])
def test_what_a_failure_means(error: Exception, expected: Again | DeadReason) -> None:
    outcome = decided(error)

    if isinstance(expected, Again):
        assert outcome == expected
    else:
        failure = classify(error)
        assert outcome == Dead(expected, failure.error_class, failure.code)


@pytest.mark.parametrize("error", [error for _, error, _ in TABLE], ids=[name for name, *_ in TABLE])
def test_while_the_database_is_away_nothing_is_given_up_whatever_the_error_says(error: Exception) -> None:
    """CONSUME-20: an outage has no end."""
    worn = delivery(attempts=2, postponed=5_000, first_tried_at=-math.inf)

    assert decided(error, worn, now=1e9, environment=True) == Again(2.5, spent=False)


def test_an_outage_is_asked_after_soon_and_then_every_few_seconds() -> None:
    pauses = [decided(TransientError("away"), delivery(postponed=count), environment=True) for count in range(7)]

    assert pauses == [Again(seconds, spent=False) for seconds in (0.1, 0.2, 0.4, 0.8, 1.6, 2.5, 2.5)]
    assert ENVIRONMENT.cap_seconds == 5


# Attempts


@pytest.mark.parametrize(("spent", "ends"), [(0, False), (1, False), (2, True)])
def test_attempts_are_bounded(spent: int, ends: bool) -> None:
    """CONSUME-19."""
    outcome = decided(RuntimeError(SECRET), delivery(attempts=spent))

    assert outcome == (Dead("attempts_exhausted", "RuntimeError", "unexpected") if ends else Again(2.0**spent, spent=True))


def test_a_handler_of_one_attempt_has_no_other() -> None:
    assert isinstance(decided(Retryable("busy"), delivery(handler(attempts=1))), Dead)


def test_decorrelated_jitter_starts_from_the_delay_before() -> None:
    drawn = delivery(handler(retry=Retry(base_seconds=1, cap_seconds=20, jitter="decorrelated")), attempts=1, delay_seconds=3.0)

    assert decide_failure(drawn, Retryable("busy"), now=NOW, environment=False, random=lambda: 0.5) == Again(5.0, spent=True)


@pytest.mark.parametrize(("asked", "delay"), [("0", 1), ("40", 40), ("4000", 60), ("soon", 1)])
def test_a_provider_is_given_the_time_that_it_asks_for_within_the_policy(asked: str, delay: float) -> None:
    assert decided(Retryable("busy", retry_after=asked)) == Again(delay, spent=True)


def test_an_unknown_effect_is_asked_after_when_that_may_tell_more() -> None:
    assert decided(EffectUnknown("on its way", retry_after="25")) == Again(25, spent=True)


# Patience


PATIENT: Final = [RetryLater("closed", seconds=10), LeaseLost(SECRET), postgres("40001"), TransientError(SECRET)]


@pytest.mark.parametrize("error", PATIENT, ids=lambda error: type(error).__name__)
def test_while_the_database_answers_patience_is_bounded(error: Exception) -> None:
    assert isinstance(decided(error, now=NOW + 50), Again)

    failure = failure_of(error)
    assert decided(error, now=NOW + 100) == Dead("patience_exhausted", failure.error_class, failure.code)


def test_what_another_delivery_took_over_is_told_by_its_own_code() -> None:
    assert (failure_of(LeaseLost(SECRET)).code, failure_of(RuntimeError(SECRET)).code) == ("lease_lost", "unexpected")


def test_what_a_handler_asks_for_has_to_end_within_its_patience() -> None:
    assert decided(RetryLater("closed", seconds=100)) == Again(100, spent=False)
    assert isinstance(decided(RetryLater("closed", seconds=100.5)), Dead)
    assert isinstance(decided(RetryLater("closed", seconds=100), now=NOW + 0.1), Dead)


def test_without_patience_only_now_will_do() -> None:
    impatient = delivery(handler(patience_seconds=0))

    assert decided(RetryLater("closed", seconds=0), impatient) == Again(0, spent=False)
    assert isinstance(decided(RetryLater("closed", seconds=1), impatient), Dead)


@pytest.mark.parametrize("attempts", [0, 2])
@pytest.mark.parametrize("error", PATIENT, ids=lambda error: type(error).__name__)
def test_waiting_spends_no_attempt(error: Exception, attempts: int) -> None:
    outcome = decided(error, delivery(attempts=attempts))

    assert isinstance(outcome, Again)
    assert not outcome.spent


def test_a_message_that_was_never_tried_has_waited_for_nothing() -> None:
    failure = classify(Retryable("held"))

    assert postponed(delivery(first_tried_at=None), failure, now=1e9, seconds=100) == Again(100, spent=False)


def test_a_redrive_is_one_attempt_and_has_no_patience() -> None:
    """CONSUME-25."""
    redriven = delivery(attempts=2, first_tried_at=-math.inf)

    assert [decided(error, replace(redriven)) for error in (Retryable("busy"), RetryLater("closed", seconds=0))] == [
        Dead("attempts_exhausted", "consumer_sdk.classification.Retryable", "busy"),
        Dead("patience_exhausted", "consumer_sdk.classification.RetryLater", "closed"),
    ]


def test_no_message_goes_into_an_outcome() -> None:
    for _, error, _ in TABLE:
        for attempts in (0, 2):
            assert SECRET not in str(decided(error, delivery(attempts=attempts)))
