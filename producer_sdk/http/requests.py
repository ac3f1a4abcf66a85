"""What a durable route takes of a request's body, and what the client's key is bound to.

The body is bounded before it is read and parsed strictly before pydantic sees it: whatever two readers could take in two ways is
refused, since a fingerprint must mean one request.
"""

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import parse_qs

from fastapi.dependencies.models import Dependant
from starlette.requests import Request
from starlette.types import Message, Receive

from fencepost.canonical_json import MAX_DEPTH, canonical_json, parse_json
from fencepost.errors import InvalidJson
from producer_sdk.http.problems import Refused
from producer_sdk.identity import request_of

__all__ = ["NO_BODY", "bound_request", "check_length", "form_body", "is_form", "json_body", "limited", "refused_fields"]


class _NoBody:
    def __repr__(self) -> str:
        return "no body"


#: There was no body at all, which a schema may or may not allow.
NO_BODY: Final = _NoBody()
_FORM: Final = "application/x-www-form-urlencoded"
_MOST_FORM_FIELDS: Final = 1_000
_MOST_DIGITS: Final = 18
#: Half of what a workflow's input may have: what the handler puts around it has room.
_MOST_DEPTH: Final = MAX_DEPTH // 2


def check_length(request: Request, most: int) -> None:
    """Refuse a body whose announced length is more than ``most`` bytes, before any of it is read."""
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and (len(announced) > _MOST_DIGITS or int(announced) > most):
        raise Refused("input-too-large")


def limited(receive: Receive, most: int) -> Receive:
    """A ``receive`` that raises ``Refused`` for a body of more than ``most`` bytes, whatever was announced."""
    left = most

    async def receive_limited() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise Refused("input-too-large")
        return message

    return receive_limited


def is_form(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == _FORM


def json_body(body: bytes, content_type: str) -> Any:
    """The value of a JSON body. Raises ``Refused``, also for a body that is said to be another kind."""
    if not body:
        return NO_BODY
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    if kind != "application" or not (subtype == "json" or subtype.endswith("+json")):
        raise Refused("body-invalid")
    try:
        return parse_json(body, max_depth=_MOST_DEPTH)
    except InvalidJson:
        raise Refused("body-invalid") from None


def form_body(body: bytes) -> dict[str, Any]:
    """The fields of an HTML form; one that is given several times is a list. Raises ``Refused``."""
    try:
        text = body.decode("utf-8")
        fields = parse_qs(
            text, keep_blank_values=True, strict_parsing=bool(text), errors="strict", max_num_fields=_MOST_FORM_FIELDS
        )
        values: dict[str, Any] = {name: given[0] if len(given) == 1 else given for name, given in fields.items()}
        canonical_json(values)
    except (ValueError, InvalidJson):
        raise Refused("body-invalid") from None
    return values


def refused_fields(errors: list[Any]) -> Refused:
    """Why a request does not fit its schema: where and which rule, never the value."""
    shown = [{"loc": [_place(part) for part in error.get("loc", ())], "type": str(error.get("type"))} for error in errors]
    return Refused("request-invalid", {"errors": shown})


def bound_request(
    dependant: Dependant, values: Mapping[str, Any], request: Request, body: Any, *, embedded: bool
) -> dict[str, Any]:
    """What the key is bound to: path and query parameters, and the fields that the client set of the validated body.

    ``values``: what FastAPI has made of the handler's own parameters. Those of its dependencies count as they were written.
    ``embedded``: the body is an object that holds each parameter under its name. Raises ``Refused``.
    """
    path: dict[str, Any] = {name: str(value) for name, value in request.path_params.items()}
    query: dict[str, Any] = {name: request.query_params.getlist(name) for name in request.query_params}
    _check_written("path", path)
    _check_written("query", query)
    for place, fields in ((path, dependant.path_params), (query, dependant.query_params)):
        for field in fields:
            if field.alias in place:
                place[field.alias] = _canonical(values[field.name], place[field.alias])
    return {"path": path, "query": query, "body": _bound_body(dependant, values, body, embedded)}


def _check_written(place: str, written: Mapping[str, Any]) -> None:
    for name, text in written.items():
        try:
            canonical_json([name, text])
        except InvalidJson:
            raise Refused("request-invalid", {"errors": [{"loc": [place], "type": "text_invalid"}]}) from None


def _bound_body(dependant: Dependant, values: Mapping[str, Any], body: Any, embedded: bool) -> Any:
    if body is NO_BODY:
        return None
    fields = dependant.body_params
    if embedded:
        own = {field.alias: _canonical(values[field.name], body[field.alias]) for field in fields if field.alias in body}
        return {**body, **own}
    return _canonical(values[fields[0].name], body) if fields else body


def _canonical(value: Any, written: Any) -> Any:
    """The validated value, or what was written where that has no canonical form, a set's or a URL's."""
    try:
        bound = request_of(value)
        canonical_json(bound)
    except InvalidJson:
        return written
    return bound


def _place(part: object) -> object:
    return part if isinstance(part, int) else str(part)
