"""What the description of an API says of a durable route: the key's header, the answers and their headers, the problems."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic import BaseModel, Field

from producer_sdk.http.headers import KEY_HEADER
from producer_sdk.http.operation import Operation
from producer_sdk.http.problems import MEDIA_TYPE, PROBLEMS, ProblemType

__all__ = ["MONITOR_RESPONSES", "OperationState", "Problem", "described"]

#: What only a monitor answers with.
_NOT_BY_ROUTES: Final = frozenset({"not-found"})
_STREAM_ONLY: Final = frozenset({"stream-cursor-invalid", "stream-cursor-gone"})

_REPLAYED: Final = {
    name: {"description": "`true` where another request has started the operation", "schema": {"type": "string"}}
    for name in ("Idempotent-Replayed", "X-Idempotent-Replayed")
}
_RETRY_AFTER: Final = {
    "Retry-After": {"description": "Seconds until the same request may be sent again", "schema": {"type": "integer"}}
}
_LOCATION: Final = {"Location": {"description": "The operation's monitor", "schema": {"type": "string", "format": "uri-reference"}}}
_PARAMETERS: Final = (
    (KEY_HEADER, "New for each operation, the same for each retry of it. 1 to 255 printable ASCII characters, quoted or bare."),
    ("Prefer", "`wait=N` (seconds) or `respond-async` (RFC 7240): how long to wait for the result."),
)


class Problem(BaseModel):
    """RFC 9457. Without `Retry-After` it is final for its key."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    error_type: str | None = Field(None, description="Of a workflow's failure")
    error_details: Any = Field(None, description="Of a workflow's failure")
    errors: list[dict[str, Any]] | None = Field(None, description="Where the request does not fit its schema")


class OperationState(BaseModel):
    """An operation that is not finished."""

    state: str


def _schema(slugs: list[str]) -> dict[str, Any]:
    """Of a problem that is one of these types. Written out, since FastAPI gives a model of its own media type only."""
    schema = Problem.model_json_schema()
    schema["properties"]["type"] = {"type": "string", "enum": [PROBLEMS[slug].uri for slug in slugs]}
    return schema


MONITOR_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "How the operation stands, or its result", "headers": {**_RETRY_AFTER, **_REPLAYED}},
    404: {
        "description": PROBLEMS["not-found"].title,
        "content": {MEDIA_TYPE: {"schema": _schema(["not-found"])}},
    },
}


def described(operation: Operation, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of FastAPI's route, with what clients may rely on; the author's own descriptions stand."""
    success = options.get("status_code") or 200
    responses: dict[int | str, dict[str, Any]] = {
        success: {"headers": dict(_REPLAYED)},
        202: {
            "description": "Pending: send the same request again, or ask the monitor",
            "model": OperationState,
            "headers": {**_RETRY_AFTER, **_LOCATION, **_REPLAYED},
        },
        **_problem_responses(operation),
    }
    responses.update(operation.reply.responses(operation))
    for status, own in (options.get("responses") or {}).items():
        responses[status] = {**responses.get(status, {}), **own}
    extra = dict(options.get("openapi_extra") or {})
    extra["parameters"] = [*extra.get("parameters", []), *_parameters(operation, options)]
    return {**options, "responses": responses, "openapi_extra": extra}


def _parameters(operation: Operation, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    required = any(operation.requires_key(method.upper()) for method in options.get("methods") or ["GET"])
    parameters = [
        {
            "name": name,
            "in": "header",
            "required": name == KEY_HEADER and required,
            "description": text,
            "schema": {"type": "string"},
        }
        for name, text in _PARAMETERS
    ]
    if operation.reply.streams:
        text = "The id of the last event that was received: the stream goes on behind it."
        parameters.append(
            {"name": "Last-Event-ID", "in": "header", "required": False, "description": text, "schema": {"type": "string"}}
        )
    return parameters


def _problem_responses(operation: Operation) -> dict[int | str, dict[str, Any]]:
    by_status: defaultdict[int, list[str]] = defaultdict(list)
    for row in _problems_of(operation):
        for status in [row.status] if row.slug != "workflow-failed" else sorted(set(operation.workflow.failures.values())):
            by_status[status].append(row.slug)
    return {status: _problem_response(slugs) for status, slugs in sorted(by_status.items())}


def _problems_of(operation: Operation) -> Iterable[ProblemType]:
    left_out = _NOT_BY_ROUTES if operation.reply.streams else _NOT_BY_ROUTES | _STREAM_ONLY
    return [row for row in PROBLEMS.values() if row.slug not in left_out]


def _problem_response(slugs: list[str]) -> dict[str, Any]:
    headers = dict(_REPLAYED)
    if any(PROBLEMS[slug].retry_after is not None for slug in slugs):
        headers |= _RETRY_AFTER
    return {
        "description": ", ".join(PROBLEMS[slug].title for slug in slugs),
        "content": {MEDIA_TYPE: {"schema": _schema(slugs)}},
        "headers": headers,
    }
