"""Where a fault lies, told without a value: places in code and names of fields. Messages may quote what must not be logged."""

import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import fencepost
from consumer_sdk import calling

__all__ = ["frames_of", "problems_of"]

_MOST_FRAMES: Final = 8
_MOST_CAUSES: Final = 8
_OURS: Final = (f"{Path(calling.__file__).parent}/", f"{fencepost.__path__[0]}/")
_MOST_PROBLEMS: Final = 10
_FIELD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def frames_of(error: BaseException | None) -> list[str]:
    """The last frames of an error and of what caused it: file, line and function, the innermost last. Where the handler's own is
    not among them, since drivers are deep, it stands before them."""
    frames: list[traceback.FrameSummary] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen and len(seen) < _MOST_CAUSES:
        seen.add(id(error))
        frames = [*traceback.extract_tb(error.__traceback__), *frames]
        error = error.__cause__
    last = frames[-_MOST_FRAMES:]
    handler = _handler_of(frames)
    if handler is not None and handler not in last:
        last = [handler, *last[1:]]
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in last]


def _handler_of(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The first frame below the one that calls handlers which is not Fencepost's."""
    calls = [place for place, frame in enumerate(frames) if (frame.filename, frame.name) == (calling.__file__, "called")]
    below = frames[calls[0] + 1 :] if calls else ()
    return next((frame for frame in below if not frame.filename.startswith(_OURS)), None)


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
