"""What handlers hand over, as JSON within a limit."""

import json
from typing import TYPE_CHECKING, Any, Final

from fencepost.errors import InvalidCommand

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = ["MAX_OUTPUT_BYTES", "encoded", "encoded_as"]

MAX_OUTPUT_BYTES: Final = 1_000_000


def encoded(field: str, value: object, *, most: int) -> bytes:
    """``value`` as JSON; a pydantic model by its own rules. Raises ``InvalidCommand`` that names the limit and no content."""
    try:
        dump = getattr(value, "model_dump_json", None)
        text = dump() if dump is not None else json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        payload = str(text).encode()
    except Exception:  # noqa: BLE001 - a boundary: the model is the author's, and no value may end the worker
        raise InvalidCommand(field, "must be a value that JSON can hold", "convert it first") from None
    return _within(field, payload, most)


def encoded_as(field: str, adapter: "TypeAdapter[Any]", value: object, *, most: int) -> bytes:
    """``value``, checked against its declared type, as JSON under the names that clients use. Raises ``InvalidCommand``."""
    try:
        payload = adapter.dump_json(adapter.validate_python(value), by_alias=True)
    except Exception:  # noqa: BLE001 - a boundary: the model is the author's, and no value may end the worker
        raise InvalidCommand(field, "must be of the type that the workflow declares", "convert it first") from None
    return _within(field, payload, most)


def _within(field: str, payload: bytes, most: int) -> bytes:
    if len(payload) > most:
        raise InvalidCommand(field, f"{len(payload)} bytes exceed the limit of {most}", "store it elsewhere and keep a reference")
    return payload
