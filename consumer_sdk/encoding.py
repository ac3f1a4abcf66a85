"""What handlers hand over, as JSON within a limit."""

import json
from typing import Final

from fencepost.errors import InvalidCommand

__all__ = ["MAX_OUTPUT_BYTES", "encoded"]

MAX_OUTPUT_BYTES: Final = 1_000_000


def encoded(field: str, value: object, *, most: int) -> bytes:
    """``value`` as JSON; a pydantic model by its own rules. Raises ``InvalidCommand`` that names the limit and no content."""
    try:
        dump = getattr(value, "model_dump_json", None)
        text = dump() if dump is not None else json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        payload = str(text).encode()
    except Exception:  # noqa: BLE001 - a boundary: the model is the author's, and no value may end the worker
        raise InvalidCommand(field, "must be a value that JSON can hold", "convert it first") from None
    if len(payload) > most:
        raise InvalidCommand(field, f"{len(payload)} bytes exceed the limit of {most}", "store it elsewhere and keep a reference")
    return payload
