"""The members of a JSON object, each with its own text: a payload inside an envelope is passed on as it was written.

Parsed and written anew, a number could become another one. What the members hold is for their readers to check; here a name
stands once, and there is one object and nothing else.
"""

import json
import re
from typing import Any, Final, NamedTuple, TypeVar

__all__ = ["Member", "json_members", "json_value"]

Value = TypeVar("Value")

_SPACE: Final = re.compile(r"[ \t\n\r]*")


class Member(NamedTuple):
    """``value`` as Python has it, whole numbers as their digits; ``text`` as it stands in the object."""

    value: Any
    text: str


def json_members(document: bytes) -> dict[str, Member]:
    """Return the members by name. Raises ``ValueError`` for what is not one JSON object in UTF-8, whatever its depth."""
    text = document.decode()
    at = _past(text, 0, "{")
    members: dict[str, Member] = {}
    if text[at : at + 1] == "}":
        return _whole(text, at + 1, members)
    while True:
        if not text.startswith('"', at):
            raise ValueError("a member needs a name")
        name, at = _read(text, at)
        if name in members:
            raise ValueError("a name stands twice")
        start = _past(text, at, ":")
        value, end = _read(text, start)
        members[name] = Member(value, text[start:end])
        at = _past(text, end)
        if text[at : at + 1] == "}":
            return _whole(text, at + 1, members)
        at = _past(text, at, ",")


def json_value(document: bytes) -> Any:
    """Return what the document says, whole numbers as their digits. Raises ``ValueError`` for what is not JSON in UTF-8."""
    text = document.decode()
    value, end = _read(text, _past(text, 0))
    return _whole(text, end, value)


def _read(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _past(text: str, at: int, mark: str = "") -> int:
    at = _end_of_space(text, at)
    if not text.startswith(mark, at):
        raise ValueError(f"{mark} is missing")
    return _end_of_space(text, at + len(mark))


def _end_of_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _whole(text: str, at: int, value: Value) -> Value:
    if _end_of_space(text, at) != len(text):
        raise ValueError("something follows")
    return value


def _refuse(_: str) -> None:
    raise ValueError("NaN and infinities are no JSON")


# Digits stay text: a number of any length costs nothing, and none is refused for its length.
_DECODER: Final = json.JSONDecoder(parse_int=str, parse_constant=_refuse)
