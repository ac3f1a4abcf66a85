"""Every problem that a durable route answers with (RFC 9457), in one table: status, title and detail are fixed for each type.

A body never holds the key, the scope, the input or an error's message. Without ``Retry-After`` a problem is final for its key.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["MEDIA_TYPE", "PROBLEMS", "TYPE_PREFIX", "ProblemType", "Refused", "problem_body", "reference_page"]

TYPE_PREFIX: Final = "urn:fencepost:durable-route:"
CODE_PREFIX: Final = "fencepost.durable_route."
MEDIA_TYPE: Final = "application/problem+json"


@dataclass(frozen=True, slots=True)
class ProblemType:
    """One row. ``retry_after``: seconds until the same request may be sent again; None: it is final for this key."""

    slug: str
    status: int
    title: str
    detail: str
    retry_after: int | None = None

    @property
    def uri(self) -> str:
        return TYPE_PREFIX + self.slug

    @property
    def code(self) -> str:
        return CODE_PREFIX + self.slug.replace("-", "_")


_ROWS: Final = (
    ProblemType(
        "idempotency-key-missing", 400, "Idempotency key missing",
        "Send an Idempotency-Key header: a new one for each operation, the same one for each retry of it."),
    ProblemType(
        "idempotency-key-invalid", 400, "Idempotency key invalid",
        "The Idempotency-Key header must be given once and hold 1 to 255 printable ASCII characters."),
    ProblemType(
        "idempotency-key-reused", 422, "Idempotency key reused",
        "The key belongs to another request. Use a new key for a new operation."),
    ProblemType(
        "idempotency-key-expired", 410, "Idempotency key expired",
        "The key was used and is past its retention. Nothing was started; its answer is no longer kept."),
    ProblemType(
        "body-invalid", 400, "Body invalid",
        "The body must be one JSON value in UTF-8: each name once in an object, finite numbers, whole Unicode, bounded depth."),
    ProblemType(
        "request-invalid", 422, "Request invalid",
        "A part of the request does not fit its schema; errors says which. Nothing was started, the key is free."),
    ProblemType(
        "input-too-large", 413, "Input too large", "The body is larger than this operation takes. Nothing was started."),
    ProblemType(
        "rate-limited", 429, "Too many operations started",
        "This client has started too many operations. Nothing was started; send the same request again later.", 1),
    ProblemType(
        "in-progress", 409, "Operation in progress",
        "The operation of this key is not finished. Send the same request again to get its result.", 1),
    ProblemType(
        "stream-cursor-invalid", 400, "Stream cursor invalid",
        "Last-Event-ID is not an id that this stream has given. Send the request again without it."),
    ProblemType(
        "stream-cursor-gone", 410, "Stream cursor gone",
        "Last-Event-ID names a place that this stream does not hold. Send the request again without it."),
    ProblemType("not-found", 404, "No such operation", "There is no such operation, or it is not yours."),
    ProblemType("erased", 410, "Operation erased", "The operation's data was erased."),
    ProblemType("workflow-failed", 422, "Operation failed", "The operation failed; error_type and error_details say how."),
    ProblemType("failed", 500, "Operation failed", "The operation failed and is not tried again."),
    ProblemType("attempts-exhausted", 500, "Attempts exhausted", "The operation failed at each of its attempts."),
    ProblemType("timed-out", 500, "Operation timed out", "The operation was not finished within its time."),
    ProblemType("terminated", 500, "Operation terminated", "The operation was ended before it was finished."),
    ProblemType("cancelled", 409, "Operation cancelled", "The operation was cancelled."),
    ProblemType(
        "ambiguous", 500, "Outcome unknown",
        "The operation ended without knowing whether an outside effect happened. A person has to look."),
    ProblemType("result-unavailable", 500, "Result unavailable", "The operation has ended and its result cannot be read."),
    ProblemType("misconfigured", 500, "Route misconfigured", "The server is set up in a way that this operation cannot work with."),
    ProblemType(
        "unavailable", 503, "Temporarily unavailable",
        "The operation cannot be looked up or started now. Send the same request again.", 1),
)  # fmt: skip
#: By slug.
PROBLEMS: Final[Mapping[str, ProblemType]] = {row.slug: row for row in _ROWS}


class Refused(Exception):
    """A request ends with this problem. ``members``: what its body says besides; never a value of the request. ``retry_after``:
    seconds, where they are not the type's."""

    def __init__(self, slug: str, members: Mapping[str, Any] | None = None, *, retry_after: int | None = None) -> None:
        super().__init__(slug)
        self.slug = slug
        self.members = members
        self.retry_after = retry_after


def problem_body(problem: ProblemType, *, status: int | None = None, members: Mapping[str, Any] | None = None) -> bytes:
    """The body. ``status``: only where the type has none of its own (``workflow-failed``)."""
    body = {
        "type": problem.uri,
        "title": problem.title,
        "status": problem.status if status is None else status,
        "detail": problem.detail,
        "code": problem.code,
        **(members or {}),
    }
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def reference_page() -> str:
    """The table as a page of the documentation."""
    lines = [
        "# Problems of durable routes",
        "",
        f"Written from the code. Each is `{MEDIA_TYPE}`; `type` is `{TYPE_PREFIX}<slug>`, `code` is `{CODE_PREFIX}<slug>`",
        "with `_` for `-`. Without `Retry-After` a problem is final for its key.",
        "",
        "| slug | status | Retry-After | title | detail |",
        "|---|---|---|---|---|",
    ]
    for row in _ROWS:
        status = "as mapped" if row.slug == "workflow-failed" else str(row.status)
        retry_after = "" if row.retry_after is None else str(row.retry_after)
        lines.append(f"| `{row.slug}` | {status} | {retry_after} | {row.title} | {row.detail} |")
    return "\n".join([*lines, ""])
