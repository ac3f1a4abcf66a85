"""What each failure means for the next attempt, as one table (J41 to J43, JOB-23). Each row says why.

Rows build errors of the real libraries where these are installed; aiohttp and psycopg2 are stood in for by classes of
their names.
"""

import asyncio
import pickle
import socket
import urllib.error
from email.message import Message
from http.client import RemoteDisconnected
from types import SimpleNamespace
from typing import Any

import asyncpg
import django.db
import httpx
import psycopg
import pydantic
import pytest
import requests
import sqlalchemy.exc
import urllib3
from hypothesis import given
from hypothesis import strategies as st

from consumer_sdk.classification import Ambiguous, Failure, Kind, Retryable, RetryLater, Terminal, classify, proven
from fencepost.errors import (
    ConfigurationError,
    EffectUnknown,
    IdempotencyConflict,
    InProgress,
    InvalidInput,
    PermanentError,
    RunEnded,
    RunErased,
    RunNotFound,
    TransactionRequired,
    TransientError,
)

SECRET = "sk-live-0123456789"

R: Kind = "retryable"
T: Kind = "terminal"
A: Kind = "ambiguous"


def postgres(state: str) -> Exception:
    """asyncpg's error for a SQLSTATE, as it builds it from the server's message."""
    error: Exception = asyncpg.PostgresError.new({"C": state, "M": SECRET})
    return error


def answered(status: int, method: str = "POST", **headers: str) -> httpx.HTTPStatusError:
    """httpx's error for an answer's status."""
    request = httpx.Request(method, "https://provider.test/")
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.HTTPStatusError(SECRET, request=request, response=httpx.Response(status, request=request, headers=named))


def sent(error: type[httpx.RequestError], method: str) -> httpx.RequestError:
    return error(SECRET, request=httpx.Request(method, "https://provider.test/"))


def foreign(package: str, names: str, base: type[Exception] = Exception, **attributes: object) -> Exception:
    """An error of a library that is not installed: ``names`` from its most general class to its own."""
    for name in names.split():
        base = type(name, (base,), {"__module__": f"{package}.exceptions"})
    error = base(SECRET)
    vars(error).update(attributes)
    return error


def because(outer: Exception, cause: BaseException) -> Exception:
    outer.__cause__ = cause
    return outer


def invalid_model() -> Exception:
    class Order(pydantic.BaseModel):
        amount: int

    try:
        Order.model_validate({"amount": SECRET})
    except pydantic.ValidationError as error:
        return error
    raise AssertionError


def requests_answer(status: int) -> Exception:
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError(SECRET, response=response)


def urllib_answer(status: int) -> Exception:
    headers = Message()
    headers["Retry-After"] = "5"
    return urllib.error.HTTPError("https://provider.test/", status, SECRET, headers, None)


def wrapped_by_sqlalchemy(original: Exception) -> Exception:
    return sqlalchemy.exc.DBAPIError("SELECT 1", {}, original)


TABLE: list[tuple[str, Exception, Kind, str]] = [
    # JOB-23
    ("the provider refused before it did anything", answered(429), R, "http_429"),
    ("the provider is not there now", answered(503), R, "http_503"),
    ("nobody listened, nothing was sent", ConnectionRefusedError(), R, "not_connected"),
    ("serialization failure: rolled back", postgres("40001"), R, "sqlstate_40001"),
    ("deadlock: rolled back", postgres("40P01"), R, "sqlstate_40p01"),
    ("invalid input stays invalid", InvalidInput("amount", "too large", "send less"), T, "invalid_input"),
    ("forbidden", answered(403), T, "http_403"),
    ("unsupported media", answered(415), T, "http_415"),
    ("a revoked entitlement, which only the handler can tell", Terminal("entitlement_revoked"), T, "entitlement_revoked"),
    ("the request was sent; its answer never came", sent(httpx.ReadTimeout, "POST"), A, "timeout"),
    # What an author says
    ("the handler knows that nothing happened", Retryable("accelerator_busy"), R, "accelerator_busy"),
    ("the handler asks for another time", RetryLater("shop_closed", seconds=30), R, "shop_closed"),
    ("the handler knows that it does not know", Ambiguous("commit_unknown"), A, "commit_unknown"),
    ("a word from the handler outweighs what made it speak", because(Terminal("no_route"), TimeoutError()), T, "no_route"),
    # HTTP by status
    ("the server never got the whole request", answered(408), R, "http_408"),
    ("too early: the server would not risk it", answered(425), R, "http_425"),
    ("payment required: an exhausted budget", answered(402), T, "http_402"),
    ("an invalid request stays invalid", answered(422), T, "http_422"),
    ("a redirect that nobody follows", answered(302), T, "http_302"),
    ("it broke, before or after the effect", answered(500), A, "http_500"),
    ("a gateway lost the answer", answered(502), A, "http_502"),
    ("a gateway did not wait for the answer", answered(504), A, "http_504"),
    ("a read has no effect that could have happened", answered(502, "GET"), R, "http_502"),
    ("a PUT may have one; its author knows whether twice is once", answered(502, "PUT"), A, "http_502"),
    ("the server will never do this", answered(501), T, "http_501"),
    ("requests: the response of an error counts as false", requests_answer(429), R, "http_429"),
    ("urllib: the error is the response", urllib_answer(503), R, "http_503"),
    ("aiohttp: the error has the status", foreign("aiohttp", "ClientResponseError", status=429), R, "http_429"),
    ("a number that is no HTTP status says nothing", foreign("grid", "GridError", status=7), R, "unexpected"),
    ("a success that raises says nothing about the effect", foreign("grid", "GridError", status=200), R, "unexpected"),
    # HTTP clients' own errors
    ("nothing was sent", sent(httpx.ConnectError, "POST"), R, "not_connected"),
    ("no connection in time, nothing was sent", sent(httpx.ConnectTimeout, "POST"), R, "connect_timeout"),
    ("no free connection, nothing was sent", sent(httpx.PoolTimeout, "POST"), R, "pool_timeout"),
    ("part of it was sent", sent(httpx.WriteTimeout, "POST"), A, "timeout"),
    ("it was sent", sent(httpx.ReadError, "POST"), A, "connection_lost"),
    ("part of it was sent, perhaps all", sent(httpx.WriteError, "POST"), A, "connection_lost"),
    ("it was sent; the server hung up", sent(httpx.RemoteProtocolError, "POST"), A, "connection_lost"),
    ("it was done; the answer cannot be read", sent(httpx.DecodingError, "POST"), A, "unreadable_answer"),
    ("a read may be read again", sent(httpx.ReadTimeout, "GET"), R, "timeout"),
    ("an error that does not know its request may be of any", httpx.ReadTimeout(SECRET), A, "timeout"),
    ("the client knows more than the reset below", because(httpx.ReadError(SECRET), ConnectionResetError()), A, "connection_lost"),
    ("requests: no connection in time", requests.ConnectTimeout(SECRET), R, "connect_timeout"),
    ("requests: it was sent", requests.ReadTimeout(SECRET), A, "timeout"),
    ("requests: one class for refused and lost", requests.ConnectionError(SECRET), A, "connection_lost"),
    ("urllib3: it was sent", urllib3.exceptions.ProtocolError(SECRET), A, "connection_lost"),
    ("http.client: it was sent; the server hung up", RemoteDisconnected(SECRET), A, "connection_lost"),
    ("urllib: the reason tells", urllib.error.URLError(ConnectionRefusedError()), R, "not_connected"),
    (
        "aiohttp: nothing was sent",
        foreign("aiohttp", "ClientConnectionError ClientOSError ClientConnectorError"), R, "not_connected",
    ),
    (
        "aiohttp: it was sent; the server hung up",
        foreign("aiohttp", "ClientConnectionError ServerConnectionError ServerDisconnectedError"), A, "connection_lost",
    ),
    (
        "aiohttp: it was sent; its answer never came",
        foreign("aiohttp", "ClientConnectionError ServerTimeoutError SocketTimeoutError", TimeoutError), A, "timeout",
    ),
    (
        "aiohttp: no connection in time",
        foreign("aiohttp", "ClientConnectionError ServerTimeoutError ConnectionTimeoutError", TimeoutError), R, "connect_timeout",
    ),
    ("a namesake in another package is not httpx's", foreign("grid", "ReadTimeout"), R, "unexpected"),
    # Sockets and the system
    ("a reset before a result was known", ConnectionResetError(), R, "connection_lost"),
    ("the peer went", BrokenPipeError(), R, "connection_lost"),
    ("no name, so no connection", socket.gaierror(-3, "try again"), R, "not_connected"),
    ("a deadline passed while something was on its way", TimeoutError(), A, "timeout"),
    ("a file that may not be opened will not be", PermissionError(), T, "permission_denied"),
    # PostgreSQL by SQLSTATE
    ("another holds the lock", postgres("55P03"), R, "sqlstate_55p03"),
    ("a lost connection; at COMMIT, who commits must say Ambiguous", postgres("08006"), R, "sqlstate_08006"),
    ("the server cannot tell whether it committed", postgres("08007"), A, "sqlstate_08007"),
    ("the server cannot tell whether the statement completed", postgres("40003"), A, "sqlstate_40003"),
    ("too many connections", postgres("53300"), R, "sqlstate_53300"),
    ("the server shuts down", postgres("57P01"), R, "sqlstate_57p01"),
    ("the server crashed and recovers", postgres("57P02"), R, "sqlstate_57p02"),
    ("the server starts", postgres("57P03"), R, "sqlstate_57p03"),
    ("a statement took too long and was rolled back", postgres("57014"), R, "sqlstate_57014"),
    ("the same row breaks the same constraint", postgres("23505"), T, "sqlstate_23505"),
    ("the same value is out of range again", postgres("22003"), T, "sqlstate_22003"),
    ("nobody grants a privilege between two attempts", postgres("42501"), T, "sqlstate_42501"),
    ("a migration may be under way", postgres("42P01"), R, "sqlstate_42p01"),
    ("psycopg", psycopg.errors.DeadlockDetected(SECRET), R, "sqlstate_40p01"),
    ("psycopg2", foreign("psycopg2", "Error", pgcode="40001"), R, "sqlstate_40001"),
    ("SQLAlchemy keeps the driver's error", wrapped_by_sqlalchemy(psycopg.errors.UniqueViolation()), T, "sqlstate_23505"),
    (
        "Django's is caused by the driver's",
        because(django.db.OperationalError(SECRET), psycopg.errors.SerializationFailure()), R, "sqlstate_40001",
    ),
    ("a pool's timeout is before any statement", sqlalchemy.exc.TimeoutError(SECRET), R, "unexpected"),
    ("no connection, so no state", psycopg.OperationalError(SECRET), R, "unexpected"),
    ("a state that is none", foreign("grid", "GridError", sqlstate=SECRET), R, "unexpected"),
    # Fencepost's own
    ("the environment's fault, and it passes", TransientError(SECRET), R, "transient"),
    ("Fencepost has read the driver's error already", because(TransientError(SECRET), postgres("25006")), R, "transient"),
    ("another transaction decides on this key", InProgress(SECRET), R, "idempotency_in_progress"),
    ("the key belongs to another request for good", IdempotencyConflict(SECRET), T, "idempotency_conflict"),
    ("the set-up is wrong until an operator mends it", ConfigurationError(SECRET), T, "configuration"),
    ("it cannot be done as it is", PermanentError(SECRET), T, "permanent"),
    ("runs do not appear", RunNotFound(SECRET), T, "run_not_found"),
    ("terminal states are final", RunEnded("completed"), T, "run_ended"),
    ("what was erased does not come back", RunErased(SECRET), T, "run_erased"),
    ("the code lacks a transaction", TransactionRequired(SECRET), T, "transaction_required"),
    # The rest
    ("a model refuses the same input again", invalid_model(), T, "invalid_input"),
    ("a ValueError may come of an answer as well as of the input", ValueError(SECRET), R, "unexpected"),
    ("bytes that are no text may be a proxy's error page", UnicodeDecodeError("utf-8", b"\xff", 0, 1, SECRET), R, "unexpected"),
    ("nobody knows it; attempts are bounded", KeyError(SECRET), R, "unexpected"),
    ("what wraps it says nothing; the cause does", because(RuntimeError(SECRET), answered(403)), T, "http_403"),
    ("a cancellation beneath is no failure to read", because(RuntimeError(SECRET), asyncio.CancelledError()), R, "unexpected"),
    ("of a group, terminal outweighs retryable", ExceptionGroup(SECRET, [KeyError(), PermissionError()]), T, "permission_denied"),
    (
        "of a group at any depth, ambiguous outweighs all",
        ExceptionGroup(SECRET, [PermissionError(), ExceptionGroup(SECRET, [TimeoutError(), KeyError()])]), A, "timeout",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "error", "kind", "code"), TABLE, ids=[row[0] for row in TABLE])
def test_a_failure_is_classified(reason: str, error: Exception, kind: Kind, code: str) -> None:
    failure = classify(error)

    assert (failure.kind, failure.code) == (kind, code), reason
    assert SECRET not in repr(failure)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), KeyboardInterrupt(), SystemExit(1), GeneratorExit()], ids=repr)
def test_a_cancellation_or_an_exit_is_no_failure(error: BaseException) -> None:
    with pytest.raises(TypeError, match="is not a failure"):
        classify(error)
    with pytest.raises(TypeError, match="is not a failure"):
        classify(BaseExceptionGroup("", [error, ValueError()]))


@pytest.mark.parametrize("status", [408, 425, 429, 503])
def test_a_providers_retry_after_comes_along_as_it_was_sent(status: int) -> None:
    assert classify(answered(status, retry_after="Wed, 21 Oct 2015 07:28:00 GMT")).retry_after == "Wed, 21 Oct 2015 07:28:00 GMT"


def test_retry_after_is_read_of_every_client_and_of_the_author() -> None:
    bare = SimpleNamespace(status_code=429, headers={"retry-after": "5"})

    assert classify(urllib_answer(429)).retry_after == "5"
    assert classify(foreign("aiohttp", "ClientResponseError", status=429, headers={"Retry-After": "5"})).retry_after == "5"
    assert classify(foreign("grid", "GridError", response=bare)).retry_after == "5"
    assert classify(Retryable("busy", retry_after=5)).retry_after == "5"
    assert classify(requests_answer(429)).retry_after is None


@pytest.mark.parametrize("value", ["9" * 101, b"5", 5, None])
def test_a_retry_after_that_is_no_bounded_text_is_left_out(value: object) -> None:
    assert classify(foreign("aiohttp", "ClientResponseError", status=429, headers={"Retry-After": value})).retry_after is None


def test_a_class_is_named_with_its_module_within_bounds_and_without_its_message() -> None:
    class Odd(Exception):
        pass

    Odd.__module__, Odd.__qualname__ = "shop\0", "x" * 300

    assert classify(answered(429)).error_class == "httpx.HTTPStatusError"
    assert classify(TimeoutError(SECRET)).error_class == "TimeoutError"
    assert classify(because(RuntimeError(SECRET), TimeoutError())).error_class == "RuntimeError"
    assert classify(Odd()).error_class == f"shop_.{'x' * 194}"


def test_a_circle_of_causes_and_a_deep_chain_end() -> None:
    one, other = ValueError(), KeyError()
    one.__cause__, other.__cause__ = other, one
    deep: Exception = PermissionError()
    for _ in range(10):
        deep = because(ValueError(), deep)

    assert classify(one).code == "unexpected"
    assert classify(deep).code == "unexpected"
    assert deep.__cause__ is not None
    assert classify(deep.__cause__).code == "permission_denied"


def test_an_error_whose_properties_fail_is_still_classified() -> None:
    class Hostile(Exception):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(SECRET)

    assert classify(Hostile()) == Failure(kind="retryable", code="unexpected", error_class=f"{__name__}.{Hostile.__qualname__}")


@pytest.mark.parametrize("code", ["", "Too Late", "x" * 65, "café", "a\n", "card-4711"])
@pytest.mark.parametrize("stated", [Retryable, Terminal, Ambiguous])
def test_a_code_is_a_bounded_name_and_a_refusal_does_not_quote_it(
    stated: type[Retryable | Terminal | Ambiguous], code: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        stated(code)

    assert str(refused.value) == "code: 1 to 64 of a-z 0-9 _; name the kind of failure, without values"


@pytest.mark.parametrize(
    "error",
    [Retryable("busy", retry_after="5"), RetryLater("closed", seconds=2.5), Terminal("refused"), Ambiguous("lost")],
    ids=repr,
)
def test_an_authors_word_survives_the_way_between_processes(error: Exception) -> None:
    arrived = pickle.loads(pickle.dumps(error))

    assert classify(arrived) == classify(error)
    assert vars(arrived) == vars(error)


@pytest.mark.parametrize(("seconds", "header"), [(0, "0"), (0.1, "1"), (30, "30"), (86_400, "86400")])
def test_later_is_a_time_that_a_runs_attempt_waits_as_well(seconds: float, header: str) -> None:
    error = RetryLater("closed", seconds=seconds)

    assert (error.seconds, classify(error).retry_after) == (seconds, header)


@pytest.mark.parametrize("seconds", [-0.1, 86_401, float("inf"), float("nan")])
def test_later_is_within_a_day(seconds: float) -> None:
    with pytest.raises(InvalidInput, match="seconds: must be a number from 0 to 86400; say when to try again"):
        RetryLater("closed", seconds=seconds)


@given(
    status=st.integers() | st.booleans() | st.text(),
    state=st.text(max_size=6) | st.integers(),
    header=st.text() | st.binary() | st.none(),
)
def test_whatever_an_error_carries_the_outcome_is_safe_and_bounded(status: object, state: object, header: object) -> None:
    failure = classify(foreign("grid", "GridError", status=status, sqlstate=state, headers={"Retry-After": header}))

    assert failure.kind in {"retryable", "terminal", "ambiguous"}
    assert failure.code.isascii()
    assert failure.code.replace("_", "").isalnum()
    assert len(failure.code) <= 64
    assert len(failure.retry_after or "") <= 100


PROVEN: list[tuple[str, Exception, Kind]] = [
    ("the author says so", Retryable("busy"), R),
    ("the author says so: not now", RetryLater("closed", seconds=30), R),
    ("the author says so", Terminal("declined"), T),
    ("the author's word, under what the client made of it", because(RuntimeError(), Retryable("busy")), R),
    ("refused", answered(402), T),
    ("refused before anything was done", answered(429), R),
    ("the provider meant it: it says when to come back", answered(503, Retry_After="5"), R),
    ("or a proxy that lost the provider in the middle", answered(503), A),
    ("an answer in the middle of things", answered(500), A),
    ("some say it of work that goes on", answered(408), A),
    ("an earlier call with this key may be at work", answered(409), A),
    ("see other: the effect has happened, perhaps", answered(303), A),
    ("a read has no effect", answered(500, "GET"), R),
    ("nothing was sent", ConnectionRefusedError(), R),
    ("it was sent, perhaps", ConnectionResetError(), A),
    ("it was sent, perhaps, whatever led there", because(ConnectionResetError(), Terminal("declined")), A),
    ("a mistake after the effect", KeyError("receipt"), A),
    ("not the provider's word", InvalidInput("amount", "too large", "send less"), A),
    ("not the provider's word", TransientError("database"), A),
    ("every member must prove it", ExceptionGroup("g", [answered(429), KeyError()]), A),
    ("every member proves it", ExceptionGroup("g", [answered(429), Retryable("busy")]), R),
]


@pytest.mark.parametrize(("why", "error", "kind"), PROVEN, ids=[f"{number} {why}" for number, (why, _, _) in enumerate(PROVEN)])
def test_what_a_failed_call_proves_about_its_effect(why: str, error: Exception, kind: Kind) -> None:
    """J43: what is not proven is ambiguous."""
    assert proven(error) == kind


def test_an_unknown_effect_is_asked_about_again_when_it_can_tell_more() -> None:
    failure = classify(EffectUnknown("on its way", retry_after="90"))
    assert (failure.kind, failure.code, failure.retry_after) == ("retryable", "effect_unknown", "90")
