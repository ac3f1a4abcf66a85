"""What a client is told of a lineage: from how it stands to status, headers and bytes. Pure but for a line in the log where the
codec fails, and the same for route, monitor and stream. Headers of a run are added by who knows whether the
request has started it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from uuid import UUID

from starlette.types import Send

from fencepost.codec import PayloadCodec
from producer_sdk.http.decoding import decoded
from producer_sdk.http.problems import MEDIA_TYPE, PROBLEMS, problem_body
from producer_sdk.http.store import Standing

__all__ = [
    "NO_STORE",
    "RETRY_SECONDS",
    "Answer",
    "RunHeaders",
    "pending_answer",
    "problem_answer",
    "result_answer",
    "send_answer",
    "state_answer",
]

#: How soon a client may ask again for what is not finished.
RETRY_SECONDS: Final = 1
NO_STORE: Final = ("cache-control", "no-store")
_JSON: Final = "application/json"

#: Why a run's job is dead, and what a client calls it. The rest is `failed`.
_DEATHS: Final = {
    "attempts_exhausted": "attempts-exhausted",
    "deadline_exceeded": "timed-out",
    "cost_exhausted": "terminated",
    "ambiguous": "ambiguous",
}

Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A whole answer. ``outcome``: result, pending or a problem's slug, for metrics."""

    status: int
    outcome: str
    media_type: str
    body: bytes
    headers: Headers = ()

    def with_headers(self, headers: Headers) -> "Answer":
        return replace(self, headers=(*self.headers, *headers))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHeaders:
    """What an answer about a known run says of it. ``location``: of its monitor."""

    location: str
    replayed: bool
    run_id: UUID | None = None

    def of(self, answer: Answer) -> Headers:
        """Where the run is not finished, its monitor; on each answer, whether this request started it."""
        headers: list[tuple[str, str]] = []
        if self.replayed:
            headers += [("idempotent-replayed", "true"), ("x-idempotent-replayed", "true")]
        if self.run_id is not None:
            headers.append(("fencepost-run-id", str(self.run_id)))
        if answer.outcome in {"pending", "in-progress"}:
            headers += [("location", self.location), ("link", f'<{self.location}>; rel="status"')]
        return headers


def problem_answer(
    slug: str, *, status: int | None = None, members: Mapping[str, Any] | None = None, retry_after: int | None = None
) -> Answer:
    """The answer of a problem. ``retry_after``: seconds, where they are not the type's."""
    problem = PROBLEMS[slug]
    headers = [NO_STORE]
    seconds = problem.retry_after if retry_after is None else retry_after
    if seconds is not None:
        headers.append(("retry-after", str(seconds)))
    return Answer(
        status=problem.status if status is None else status,
        outcome=slug,
        media_type=MEDIA_TYPE,
        body=problem_body(problem, status=status, members=members),
        headers=headers,
    )


def pending_answer(state: str = "pending", *, status: int = 202) -> Answer:
    """The run is not finished, or it is not known whether it has begun. ``status`` 200: to who asks its monitor."""
    return state_answer(state, status=status, outcome="pending").with_headers([("retry-after", str(RETRY_SECONDS))])


def state_answer(state: str, *, status: int = 200, outcome: str = "state") -> Answer:
    """How an operation stands, where that is all there is to say."""
    body = json.dumps({"state": state}, separators=(",", ":")).encode()
    return Answer(status=status, outcome=outcome, media_type=_JSON, body=body, headers=[NO_STORE])


def result_answer(standing: Standing, codec: PayloadCodec, *, success_status: int) -> Answer | None:
    """The final answer of a lineage; None while it has none."""
    if standing.erased:
        return problem_answer("erased")
    match standing.state:
        case "completed":
            return _success(standing, codec, success_status)
        case "failed":
            return _failure(standing, codec)
        case "cancelled":
            return problem_answer("cancelled")
    return None


def _success(standing: Standing, codec: PayloadCodec, status: int) -> Answer:
    stored = standing.output if standing.answer is None else standing.answer
    body = b"null" if stored is None else decoded(codec, stored)
    if body is None:
        return problem_answer("result-unavailable")
    return Answer(status=status, outcome="result", media_type=_JSON, body=body)


def _failure(standing: Standing, codec: PayloadCodec) -> Answer:
    if standing.failure is None:
        return problem_answer(_DEATHS.get(standing.dead_reason or "", "failed"))
    payload = decoded(codec, standing.failure)
    if payload is None:
        return problem_answer("result-unavailable")
    try:
        failure = json.loads(payload)
        members = {"error_type": failure["type"], "error_details": failure.get("details")}
        return problem_answer("workflow-failed", status=int(failure["status"]), members=members)
    except (ValueError, KeyError, TypeError):
        return problem_answer("result-unavailable")


async def send_answer(answer: Answer, send: Send, *, help_url: str, raw_headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """Send an answer. ``help_url``: of the page that explains problems; ``raw_headers``: what the application's dependencies have
    set."""
    headers = [
        (b"content-type", answer.media_type.encode()),
        (b"content-length", str(len(answer.body)).encode()),
        *((name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers),
        *raw_headers,
    ]
    if answer.media_type == MEDIA_TYPE:
        headers.append((b"link", f'<{help_url}#{answer.outcome}>; rel="help"'.encode("latin-1")))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})
