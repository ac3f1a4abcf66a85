"""Where a fault lies, told without a value: places in code and names of fields. Messages may quote what must not be logged."""

import re
import traceback
from typing import Final

__all__ = ["frames_of", "problems_of"]

_MOST_FRAMES: Final = 8
_MOST_PROBLEMS: Final = 10
_FIELD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def frames_of(error: BaseException | None) -> list[str]:
    """The last frames of an error and of what caused it: file, line and function, the innermost last."""
    frames: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen and len(frames) < _MOST_FRAMES:
        seen.add(id(error))
        found = traceback.extract_tb(error.__traceback__)[-_MOST_FRAMES:]
        frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in found] + frames
        error = error.__cause__
    return frames[-_MOST_FRAMES:]


def problems_of(error: Exception) -> list[str]:
    """What a pydantic model found: place and kind of each problem; of any other error its class.

    A part of a place that is no plain name may be a key of the input: it is left out.
    """
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return [type(error).__name__]
    return [f"{_place(problem['loc'])}: {problem['type']}" for problem in errors(include_input=False)[:_MOST_PROBLEMS]]


def _place(parts: "tuple[int | str, ...]") -> str:
    return ".".join(str(part) if isinstance(part, int) or _FIELD.fullmatch(part) else "?" for part in parts) or "input"
