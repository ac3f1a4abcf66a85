"""What handlers hand over, as JSON within a limit."""

import json
from typing import TYPE_CHECKING, Any, Final

from fencepost.errors import InvalidCommand
from fencepost.finite import check_finite, finite_json

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = ["MAX_OUTPUT_BYTES", "encoded", "encoded_as"]

MAX_OUTPUT_BYTES: Final = 1_000_000


def encoded(field: str, value: object, *, most: int) -> bytes:
    """``value`` as JSON; a pydantic model by its own rules. Raises ``InvalidCommand`` that names the limit and no content."""
    try:
        payload = _of_model(value) if hasattr(value, "model_dump_json") else _of_plain(value)
    except Exception:  # noqa: BLE001 - a boundary: the model is the author's, and no value may end the worker
        raise InvalidCommand(field, "must be a value that JSON can hold", "convert it first") from None
    return _within(field, payload, most)


def encoded_as(field: str, adapter: "TypeAdapter[Any]", value: object, *, most: int) -> bytes:
    """``value``, checked against its declared type, as JSON under the names that clients use. Raises ``InvalidCommand``."""
    try:
        payload = finite_json(adapter, adapter.validate_python(value))
    except Exception:  # noqa: BLE001 - a boundary: the model is the author's, and no value may end the worker
        limit = "must be of the type that the workflow declares, and a value that JSON can hold"
        raise InvalidCommand(field, limit, "convert it first") from None
    return _within(field, payload, most)


def _of_plain(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _of_model(model: Any) -> bytes:
    payload = str(model.model_dump_json()).encode()
    check_finite(payload, model.model_dump)
    return payload


def _within(field: str, payload: bytes, most: int) -> bytes:
    if len(payload) > most:
        raise InvalidCommand(field, f"{len(payload)} bytes exceed the limit of {most}", "store it elsewhere and keep a reference")
    return payload
