"""The client's side of a durable route, without a network: what to send, and what an answer means.

One operation is one key. It is sent with the same bytes until there is an answer that is final: on a broken connection, on 502, 503
and 504, and on any answer with Retry-After the request is sent again; a stream goes on behind the last id that was seen. A problem
of a durable route without Retry-After is final, whatever its status.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final
from uuid import uuid4

from fencepost.canonical_json import Json
from fencepost.errors import FencepostError, TransientError
from fencepost.retry_after import parse_retry_after
from producer_sdk.http.client.events import Event, EventParser, UnexpectedAnswer

__all__ = [
    "Activity",
    "Again",
    "AnswerNotReady",
    "Attempt",
    "Chunk",
    "Conversation",
    "DurableAnswer",
    "DurableProblem",
    "Frame",
    "Patience",
    "Result",
    "Truncated",
    "new_key",
]

PROBLEM_PREFIX: Final = "urn:fencepost:durable-route:"
_STANDARD_MEMBERS: Final = frozenset({"type", "status", "title", "detail", "instance"})
_CURSOR_SLUGS: Final = frozenset({"stream-cursor-invalid", "stream-cursor-gone"})
_GATEWAY_STATUSES: Final = frozenset({502, 503, 504})
#: Of a run that goes on; elsewhere Location means something else.
_MONITORED_STATUSES: Final = frozenset({202, 409})

_FIRST_PAUSE_SECONDS: Final = 0.2
_MOST_PAUSE_SECONDS: Final = 10.0
_MOST_DOUBLINGS: Final = 10
#: Added by chance to what Retry-After says, so that clients that were told the same do not come at once.
_SPREAD_SECONDS: Final = 0.25
_FRAME_PAUSE_SECONDS: Final = 1.0


class DurableProblem(FencepostError):
    """The operation has ended without a result, or its key cannot be used; asking again changes nothing.

    ``type`` ends in the problem's ``slug``, ``status`` is the HTTP status that goes with it, ``extensions`` are its other members:
    ``error_type`` and ``error_details`` of a workflow's own failure.
    """

    def __init__(self, problem: Mapping[str, Json], status: int) -> None:
        self.type = str(problem.get("type", "about:blank"))
        self.slug = self.type.removeprefix(PROBLEM_PREFIX)
        self.status = status
        self.title = str(problem.get("title", ""))
        self.detail = str(problem.get("detail", ""))
        self.extensions = {name: value for name, value in problem.items() if name not in _STANDARD_MEMBERS}
        super().__init__(f"{self.status} {self.slug}: {self.title}")


class AnswerNotReady(TransientError):
    """The client's patience is over and the operation is not. Keep ``key``, and ask again with it and the same request.

    ``monitor``: where the operation can be looked at, as the server gave it (a path of that server); None if it has not.
    """

    def __init__(self, key: str, monitor: str | None, reason: str) -> None:
        super().__init__(f"no answer yet ({reason}); ask again with the same key and the same request")
        self.key = key
        self.monitor = monitor


@dataclass(frozen=True, slots=True)
class DurableAnswer:
    """A final answer. ``replayed``: the operation had been started by an earlier request. ``content``: its body, byte for byte.
    ``headers`` have lower-case names."""

    status: int
    headers: Mapping[str, str] = field(repr=False)
    content: bytes = field(repr=False)
    key: str
    replayed: bool

    def json(self) -> Json:
        """The body as a JSON value; ``ValueError`` if it is none."""
        value: Json = json.loads(self.content)
        return value


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored chunk. ``id`` is its place in the stream."""

    id: str
    data: Json


@dataclass(frozen=True, slots=True)
class Attempt:
    """The stream begins anew: forget what chunks it has given so far."""

    number: int


@dataclass(frozen=True, slots=True)
class Activity:
    """A live chunk: best effort, not stored, superseded by the chunks of its step."""

    data: Json


@dataclass(frozen=True, slots=True)
class Result:
    """The operation's result; the last frame."""

    data: Json
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Truncated:
    """The run has published more chunks than a stream may store; those that follow are in its result only."""


Frame = Chunk | Attempt | Activity | Truncated | Result


@dataclass(frozen=True, slots=True)
class Again:
    """Send the request again after so many seconds."""

    seconds: float
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """``timeout_seconds``: how long to go on, counted from the first request, or from the newest frame of a stream; a server's
    word that the operation goes on is no frame. ``most_pause_seconds`` bounds what a Retry-After may ask for."""

    timeout_seconds: float = 300.0
    most_pause_seconds: float = 60.0


def new_key() -> str:
    """A key for a new operation. Store it beside the operation before it is sent: a program that starts anew goes on with it."""
    return str(uuid4())


class Conversation:
    """One operation, from its first request to its answer. The drivers do the talking, and wait where it says ``Again``."""

    def __init__(
        self,
        *,
        key: str,
        patience: Patience,
        clock: Callable[[], float],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        jitter: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self.key = key
        self.monitor: str | None = None
        self._patience = patience
        self._clock = clock
        self._now = now
        self._jitter = jitter
        self._ends_at = clock() + patience.timeout_seconds
        self._failures = 0
        self._cursor = ""
        self._seen = (0, -1)  # place of the newest chunk, or attempt that has begun
        self._cursor_given_up = False
        self._retry_ms = 0  # the pause that a stream asked for
        self._parser = EventParser()

    def headers(self) -> dict[str, str]:
        """What to send along with the request, this time."""
        cursor = {"Last-Event-ID": self._cursor} if self._cursor else {}
        return {"Idempotency-Key": self.key} | cursor

    @property
    def remaining_seconds(self) -> float:
        """Of the patience."""
        return max(self._ends_at - self._clock(), 0.0)

    def check_patience(self, reason: str) -> None:
        """While something comes that says nothing yet. Raises ``AnswerNotReady``."""
        if not self.remaining_seconds:
            raise AnswerNotReady(self.key, self.monitor, reason)

    def broken(self, reason: str) -> Again:
        """The connection broke, or could not be made. Raises ``AnswerNotReady`` when the patience is over."""
        pause = min(_FIRST_PAUSE_SECONDS * 2**self._failures, _MOST_PAUSE_SECONDS)
        self._failures = min(self._failures + 1, _MOST_DOUBLINGS)
        asked = min(self._retry_ms / 1000, self._patience.most_pause_seconds)
        return self._again(max(self._jitter(pause / 2, pause), asked), reason)

    def answered(self, status: int, headers: Mapping[str, str], content: bytes) -> DurableAnswer | Again:
        """What a plain answer means. ``headers`` is looked up by lower-case names. Raises ``DurableProblem`` for a final problem,
        ``AnswerNotReady`` when the patience is over."""
        asked = headers.get("retry-after")
        if asked is None and (problem := _durable_problem(headers, content)) is not None:
            return self._refused(DurableProblem(problem, status))
        if asked is None and status not in _GATEWAY_STATUSES:
            replayed = headers.get("idempotent-replayed", headers.get("x-idempotent-replayed")) == "true"
            return DurableAnswer(status, dict(headers), content, self.key, replayed)
        if status in _MONITORED_STATUSES:
            self.monitor = headers.get("location", self.monitor)
        seconds = None if asked is None else parse_retry_after(asked, now=self._now())
        if seconds is None:  # none, or none that can be read: it is not final for that
            return self.broken(f"status {status}")
        self._failures = 0
        return self._asked(seconds, f"status {status}")

    def opened(self) -> None:
        """A stream has opened: 200 and ``text/event-stream``."""
        self._parser = EventParser(self._cursor)

    def fed(self, piece: bytes) -> Iterator[Frame | Again]:
        """What a piece of the stream completes. ``Again``: the stream ends here, go on with another request. Raises
        ``DurableProblem`` for a final problem, ``UnexpectedAnswer``, and ``AnswerNotReady`` when the patience is over."""
        events = self._parser.feed(piece)
        if self._parser.retry_ms is not None:
            self._retry_ms = self._parser.retry_ms
        for event in events:
            self._cursor = event.last_event_id
            for frame in self._framed(event):
                yield frame
                if isinstance(frame, Again | Result):
                    return
                # Counted from here: what the reader does with a frame is not the server's time.
                self._ends_at = self._clock() + self._patience.timeout_seconds
                self._failures = 0
        self._cursor = self._parser.last_event_id
        self.check_patience("the stream goes on without news")

    def ended(self) -> Again:
        """The stream ended without a final frame."""
        return self.broken("the stream broke off")

    def _refused(self, problem: DurableProblem) -> Again:
        """A cursor that the server does not take, or no longer, is given up once: the stream begins anew for the reader."""
        if problem.slug not in _CURSOR_SLUGS or not self._cursor or self._cursor_given_up:
            raise problem
        self._cursor, self._seen, self._cursor_given_up = "", (-1, -1), True
        return self.broken(problem.slug)

    def _framed(self, event: Event) -> list[Frame | Again]:
        match event.type:
            case "pending":
                return [self._asked(_retry_after(event), "the stream's budget is over")]
            case "result":
                return [Result(_data(event), event.data.encode())]
            case "problem":
                problem = _object(event)
                raise DurableProblem(problem, _status(problem))
            case "activity":
                return [Activity(_data(event))]
            case "attempt":
                return self._begun(_whole(str(_object(event).get("attempt"))))
            case "progress":
                return self._placed(event, Chunk(event.last_event_id, _data(event)))
            case "truncated":
                return self._placed(event, Truncated())
        return []  # of a newer server; what must be understood has a name above

    def _begun(self, attempt: int) -> list[Frame | Again]:
        if attempt <= self._seen[0]:
            return []  # it was sent again with a resume
        self._seen = (attempt, -1)
        return [Attempt(attempt)]

    def _placed(self, event: Event, frame: Chunk | Truncated) -> list[Frame | Again]:
        """Delivery is at least once across requests: what was seen is passed over."""
        attempt, _, offset = event.last_event_id.partition(".")
        place = (_whole(attempt), _whole(offset))
        if place <= self._seen:
            return []
        begun = self._begun(place[0])
        self._seen = place
        return [*begun, frame]

    def _asked(self, seconds: float, reason: str) -> Again:
        pause = max(min(seconds, self._patience.most_pause_seconds), _FIRST_PAUSE_SECONDS)
        return self._again(pause + self._jitter(0.0, _SPREAD_SECONDS), reason)

    def _again(self, seconds: float, reason: str) -> Again:
        if seconds >= self.remaining_seconds:
            raise AnswerNotReady(self.key, self.monitor, reason)
        return Again(seconds, reason)


def _durable_problem(headers: Mapping[str, str], content: bytes) -> Mapping[str, Json] | None:
    if not headers.get("content-type", "").lower().startswith("application/problem+json"):
        return None
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    durable = isinstance(value, dict) and str(value.get("type", "")).startswith(PROBLEM_PREFIX)
    return value if durable else None


def _data(event: Event) -> Json:
    try:
        value: Json = json.loads(event.data)
    except (ValueError, RecursionError):
        raise UnexpectedAnswer(f"the data of a frame `{event.type}` is not JSON that can be read") from None
    return value


def _object(event: Event) -> Mapping[str, Json]:
    value = _data(event)
    if not isinstance(value, dict):
        raise UnexpectedAnswer(f"the data of a frame `{event.type}` is no object")
    return value


def _whole(digits: str) -> int:
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 19):
        raise UnexpectedAnswer("a frame does not say where it stands in the stream")
    return int(digits)


def _status(problem: Mapping[str, Json]) -> int:
    status = problem.get("status")
    return status if isinstance(status, int) and 400 <= status <= 599 else 500


def _retry_after(event: Event) -> float:
    seconds = _object(event).get("retry_after")
    return float(seconds) if isinstance(seconds, int | float) and seconds >= 0 else _FRAME_PAUSE_SECONDS
