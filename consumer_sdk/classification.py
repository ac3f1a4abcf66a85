"""What a failure means for the next attempt. Pure, and blind to messages: they may quote inputs, keys and addresses.

- retryable: nothing happened, or what happened was undone. Try again, after a delay, within the budgets.
- terminal: the next attempt would fail alike. Give up now.
- ambiguous: an effect may have happened. Find out what did (ledger, status endpoint) before anything is repeated.

Drivers and clients are told by their attributes and by the names of their classes, so none is imported. The first error
that is known decides, from the one raised down its causes. What nobody knows is retryable: attempts are bounded.

One thing no error tells: a connection lost during COMMIT looks like any lost connection. Who commits knows, and raises
``Ambiguous``.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from functools import partial
from typing import ClassVar, Final, Literal

from fencepost.errors import (
    ConfigurationError,
    EffectFailed,
    EffectMismatch,
    EffectUnknown,
    IdempotencyError,
    InProgress,
    InvalidInput,
    PermanentError,
    ReplayRefused,
    RunEnded,
    RunErased,
    RunNotFound,
    TransactionRequired,
    TransientError,
    WorkflowFailure,
)

__all__ = ["Ambiguous", "Failure", "Kind", "RetryLater", "Retryable", "Terminal", "classify", "proven"]

Kind = Literal["retryable", "terminal", "ambiguous"]

_MAX_CLASS_LENGTH: Final = 200
_MAX_RETRY_AFTER_LENGTH: Final = 100
_MOST_LATER_SECONDS: Final = 86_400
_MAX_CAUSES: Final = 10
_MAX_MEMBERS: Final = 100
_CODE: Final = re.compile(r"[a-z0-9_]{1,64}")
_SQLSTATE: Final = re.compile(r"[0-9A-Z]{5}")
_UNSAFE: Final = re.compile(r"[^\w.<>]")
#: Of several failures at once, the one that forbids most decides.
_SEVERITY: Final[Mapping[Kind, int]] = {"retryable": 0, "terminal": 1, "ambiguous": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Safe to store, log and count. ``retry_after`` is the provider's header as it came, for the policy to read."""

    kind: Kind
    code: str
    error_class: str
    retry_after: str | None = None


class _Stated(Exception):
    """A handler's own word on its failure. ``code`` goes to tables, logs and metrics: a name, never a value."""

    kind: ClassVar[Kind]

    def __init__(self, code: str, *, retry_after: str | int | None = None) -> None:
        if not _CODE.fullmatch(code):
            raise InvalidInput("code", "1 to 64 of a-z 0-9 _", "name the kind of failure, without values")
        super().__init__(code)
        self.code = code
        self.retry_after = None if retry_after is None else _header(str(retry_after))


class Retryable(_Stated):
    """Nothing happened; another attempt may succeed. ``retry_after``: whole seconds, or a Retry-After header as it came."""

    kind = "retryable"


class RetryLater(Retryable):
    """Not now, through no fault of the work: a message waits ``seconds`` without spending an attempt, up to its handler's patience;
    a run's attempt is tried again after that time."""

    def __init__(self, code: str, *, seconds: float) -> None:
        if not 0 <= seconds <= _MOST_LATER_SECONDS:
            raise InvalidInput("seconds", f"must be a number from 0 to {_MOST_LATER_SECONDS}", "say when to try again")
        super().__init__(code, retry_after=math.ceil(seconds))
        self.seconds = seconds

    def __reduce__(self) -> tuple[partial["RetryLater"], tuple[str]]:
        return partial(type(self), seconds=self.seconds), (self.code,)


class Terminal(_Stated):
    """No attempt can succeed."""

    kind = "terminal"

    def __init__(self, code: str) -> None:
        super().__init__(code)


class Ambiguous(_Stated):
    """The effect may have happened."""

    kind = "ambiguous"

    def __init__(self, code: str) -> None:
        super().__init__(code)


@dataclass(frozen=True, slots=True)
class _Verdict:
    kind: Kind
    code: str
    retry_after: str | None = None


_UNEXPECTED: Final = _Verdict("retryable", "unexpected")

#: Fencepost's own errors; a subclass stands before its base.
_OURS: Final[tuple[tuple[type[Exception], _Verdict], ...]] = (
    (TransientError, _Verdict("retryable", "transient")),
    (EffectMismatch, _Verdict("terminal", "effect_mismatch")),
    (InProgress, _Verdict("retryable", InProgress.code)),
    (IdempotencyError, _Verdict("terminal", IdempotencyError.code)),
    (InvalidInput, _Verdict("terminal", "invalid_input")),
    (ConfigurationError, _Verdict("terminal", "configuration")),
    (PermanentError, _Verdict("terminal", "permanent")),
    (RunNotFound, _Verdict("terminal", "run_not_found")),
    (RunEnded, _Verdict("terminal", "run_ended")),
    (RunErased, _Verdict("terminal", "run_erased")),
    (ReplayRefused, _Verdict("terminal", "replay_refused")),
    (TransactionRequired, _Verdict("terminal", "transaction_required")),
    (WorkflowFailure, _Verdict("terminal", "workflow_failure")),
)

#: Codes of failures before anything was sent.
_NOTHING_SENT: Final = frozenset({"not_connected", "connect_timeout", "pool_timeout"})
_NOT_CONNECTED: Final = _Verdict("retryable", "not_connected")  # nothing was sent
_CONNECT_TIMEOUT: Final = _Verdict("retryable", "connect_timeout")
_LOST: Final = _Verdict("ambiguous", "connection_lost")  # it was sent, perhaps
_TIMED_OUT: Final = _Verdict("ambiguous", "timeout")
_UNREADABLE: Final = _Verdict("ambiguous", "unreadable_answer")

#: Package and class, looked for along an error's bases, nearest first.
_CLASSES: Final[Mapping[str, _Verdict]] = {
    "builtins.ConnectionRefusedError": _NOT_CONNECTED,
    "socket.gaierror": _NOT_CONNECTED,
    # A bare socket's: the peer went before a result was known. Clients say more, and are told apart below.
    "builtins.ConnectionError": _Verdict("retryable", "connection_lost"),
    "builtins.TimeoutError": _TIMED_OUT,
    "builtins.PermissionError": _Verdict("terminal", "permission_denied"),
    "http.RemoteDisconnected": _LOST,
    "http.IncompleteRead": _UNREADABLE,
    "pydantic_core.ValidationError": _Verdict("terminal", "invalid_input"),
    "httpx.ConnectError": _NOT_CONNECTED,
    "httpx.ConnectTimeout": _CONNECT_TIMEOUT,
    "httpx.PoolTimeout": _Verdict("retryable", "pool_timeout"),
    "httpx.TimeoutException": _TIMED_OUT,
    "httpx.NetworkError": _LOST,
    "httpx.RemoteProtocolError": _LOST,
    "httpx.DecodingError": _UNREADABLE,
    "aiohttp.ClientConnectorError": _NOT_CONNECTED,
    "aiohttp.ConnectionTimeoutError": _CONNECT_TIMEOUT,
    "aiohttp.ServerTimeoutError": _TIMED_OUT,
    "aiohttp.ClientConnectionError": _LOST,
    "aiohttp.ClientPayloadError": _UNREADABLE,
    "requests.ConnectTimeout": _CONNECT_TIMEOUT,
    "requests.Timeout": _TIMED_OUT,
    # One name for a refused connection and for one lost in the middle.
    "requests.ConnectionError": _LOST,
    "requests.ChunkedEncodingError": _UNREADABLE,
    "urllib3.NewConnectionError": _NOT_CONNECTED,
    "urllib3.ConnectTimeoutError": _CONNECT_TIMEOUT,
    "urllib3.TimeoutError": _TIMED_OUT,
    "urllib3.ProtocolError": _LOST,
}

#: The provider did nothing yet: too many requests, too early, request not received in time, not available now.
_RETRYABLE_STATUS: Final = frozenset({408, 425, 429, 503})
#: The provider never does this: not implemented, HTTP version.
_TERMINAL_STATUS: Final = frozenset({501, 505})
#: Of an effect they prove nothing: 408 some providers send for work that goes on, 409 for an earlier call that does.
_UNPROVEN_STATUS: Final = frozenset({"http_408", "http_409"})
#: They have no effect that could have happened (RFC 9110, 9.2.1). PUT and DELETE have; their authors know whether twice is once.
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})

#: The transaction may have committed: transaction resolution unknown, statement completion unknown.
_AMBIGUOUS_SQLSTATES: Final = frozenset({"08007", "40003"})
#: The same data fails alike: data exceptions, broken constraints; and a missing privilege.
_TERMINAL_SQLSTATES: Final = ("22", "23", "42501")


def classify(error: BaseException) -> Failure:
    """Decide what ``error`` means. Raises ``TypeError`` for cancellation and exits, which are nobody's failure.

    Of an exception group, the member that forbids most decides.
    """
    if not isinstance(error, Exception):
        raise TypeError(f"{type(error).__name__} is not a failure")
    return max((_classify_one(member) for member in _members(error)), key=lambda failure: _SEVERITY[failure.kind])


def proven(error: Exception) -> Kind:
    """As ``classify`` for a call that may have had an effect: what is not proven is ambiguous.

    Proof is an author's own word (``Retryable``: it did nothing; ``Terminal``: it was refused), a connection that never came
    about, and an HTTP status that no proxy and no earlier call with the same key can be behind. Any other error may have come
    after the effect. Of an exception group, every member must prove it.
    """
    return max((_proven_one(member) for member in _members(error)), key=lambda kind: _SEVERITY[kind])


def _proven_one(error: Exception) -> Kind:
    teller = next((link for link in _chain(error) if _recognise(link)), error)
    failure = _classify_one(teller)
    told = failure.code in _NOTHING_SENT or _is_status_proof(failure)
    return failure.kind if isinstance(teller, _Stated) or told else "ambiguous"


def _is_status_proof(failure: Failure) -> bool:
    """503 is also what a proxy says that lost its backend in the middle; a Retry-After shows that it was meant."""
    if not failure.code.startswith("http_") or failure.code == "http_503":
        return failure.code == "http_503" and failure.retry_after is not None
    return not failure.code.startswith("http_3") and failure.code not in _UNPROVEN_STATUS


def _classify_one(error: Exception) -> Failure:
    verdict = next((known for link in _chain(error) if (known := _recognise(link))), _UNEXPECTED)
    return Failure(kind=verdict.kind, code=verdict.code, error_class=_class_name(error), retry_after=verdict.retry_after)


def _members(error: Exception) -> list[Exception]:
    """The errors of a group, at any depth; the error itself if it is none."""
    waiting: list[Exception] = [error]
    found: list[Exception] = []
    while waiting and len(found) < _MAX_MEMBERS:
        one = waiting.pop()
        if isinstance(one, ExceptionGroup):
            waiting.extend(one.exceptions)
        else:
            found.append(one)
    return found


def _chain(error: Exception) -> Iterator[Exception]:
    """The error and what it wraps: SQLAlchemy's ``orig``, urllib's ``reason``, else the cause."""
    link: object = error
    for _ in range(_MAX_CAUSES):  # which also ends a circle
        if not isinstance(link, Exception):
            return
        yield link
        inner = (_read(link, name) for name in ("orig", "reason", "__cause__"))
        link = next((found for found in inner if isinstance(found, Exception)), None)


def _recognise(error: Exception) -> _Verdict | None:
    return _stated(error) or _by_status(error) or _by_sqlstate(error) or _by_class(error)


def _stated(error: Exception) -> _Verdict | None:
    if isinstance(error, _Stated):
        return _Verdict(error.kind, error.code, error.retry_after)
    if isinstance(error, EffectFailed):
        return _Verdict("terminal", error.code)
    if isinstance(error, EffectUnknown):
        return _Verdict("retryable", "effect_unknown", error.retry_after)  # the ledger repeats nothing, however often it is asked
    verdict = next((verdict for ours, verdict in _OURS if isinstance(error, ours)), None)
    return _Verdict(verdict.kind, error.code) if verdict and isinstance(error, IdempotencyError) else verdict


def _by_status(error: Exception) -> _Verdict | None:
    """An HTTP status that an error carries: on its ``response`` (httpx, requests) or itself (aiohttp, urllib)."""
    response = _read(error, "response")
    status = _read(response, "status_code") if response is not None else _read(error, "status")
    if not isinstance(status, int) or not 300 <= status <= 599:
        return None
    code = f"http_{status:d}"
    if status in _RETRYABLE_STATUS:
        return _Verdict("retryable", code, _retry_after(error if response is None else response))
    if status < 500 or status in _TERMINAL_STATUS:
        return _Verdict("terminal", code)
    return _Verdict("retryable" if _is_safe(error) else "ambiguous", code)


def _by_sqlstate(error: Exception) -> _Verdict | None:
    """What PostgreSQL says; psycopg2 calls it ``pgcode``. What is not listed was rolled back, and may go better another time."""
    state = _read(error, "sqlstate") or _read(error, "pgcode")
    if not isinstance(state, str) or not _SQLSTATE.fullmatch(state):
        return None
    kind: Kind = "retryable"
    if state in _AMBIGUOUS_SQLSTATES:
        kind = "ambiguous"
    elif state.startswith(_TERMINAL_SQLSTATES):
        kind = "terminal"
    return _Verdict(kind, f"sqlstate_{state.lower()}")


def _by_class(error: Exception) -> _Verdict | None:
    names = (f"{str(base.__module__).partition('.')[0]}.{base.__name__}" for base in type(error).__mro__)
    verdict = next((_CLASSES[name] for name in names if name in _CLASSES), None)
    if verdict is not None and verdict.kind == "ambiguous" and _is_safe(error):
        return _Verdict("retryable", verdict.code)
    return verdict


def _is_safe(error: Exception) -> bool:
    """Whether the request was one without effects, as far as the error knows its request."""
    request = _read(error, "request") or _read(error, "request_info")
    method = _read(request, "method")
    return isinstance(method, str) and method.upper() in _SAFE_METHODS


def _retry_after(carrier: object) -> str | None:
    headers = _read(carrier, "headers")
    if not isinstance(headers, Mapping | Message):
        return None
    return _header(headers.get("Retry-After") or headers.get("retry-after"))


def _header(value: object) -> str | None:
    return value if isinstance(value, str) and len(value) <= _MAX_RETRY_AFTER_LENGTH else None


def _read(thing: object, name: str) -> object:
    """An attribute of foreign code, where asking may run a property; None if that fails."""
    try:
        return getattr(thing, name, None)
    except Exception:  # noqa: BLE001 - httpx raises RuntimeError for a request that was never set
        return None


def _class_name(error: Exception) -> str:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return _UNSAFE.sub("_", name)[:_MAX_CLASS_LENGTH]
