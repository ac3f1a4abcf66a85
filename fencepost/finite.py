"""Tells of floats that pydantic writes as something else: an infinity or a NaN as null, or as a constant that JSON does not have.

A model whose author chose ``ser_json_inf_nan='strings'`` writes them as text, and passes. A serializer that writes null for one has
to do so in Python's mode as well (not ``when_used="json"``), or the value counts as lost. Not seen is what only one of the two
dumps holds: an iterator, which is read once, and what a serializer makes for JSON alone.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = ["check_finite", "finite_json"]

#: What pydantic writes for such a float, as a value or as a name. Without any of them nothing was lost.
_SUSPECT: Final = (b"null", b"NaN", b"Infinity", b'"None"')
_WRITTEN: Final = (None, "None")


def finite_json(
    adapter: "TypeAdapter[Any]", value: object, *, round_trip: bool = False, warnings: Literal["warn", "error"] = "warn"
) -> bytes:
    """``value`` as JSON by its type, under the names that clients use. Raises ``ValueError`` for an infinity or a NaN, and what
    serializers raise."""
    payload = adapter.dump_json(value, by_alias=True, round_trip=round_trip, warnings=warnings)
    check_finite(payload, lambda: adapter.dump_python(value, by_alias=True, round_trip=round_trip, warnings="none"))
    return payload


def check_finite(payload: bytes, dumped: Callable[[], object]) -> None:
    """Raise ``ValueError``, which quotes nothing, where an infinity or a NaN was lost in ``payload`` or made it no JSON.

    ``dumped`` gives the same value as Python holds it, in the same order; it is asked only where ``payload`` is suspect.
    """
    if not any(word in payload for word in _SUSPECT):
        return
    waiting: list[tuple[Any, Any]] = [(json.loads(payload, parse_constant=_refuse), dumped())]
    while waiting:
        written, given = waiting.pop()
        given = given.value if isinstance(given, Enum) else given
        if isinstance(given, Set):
            # Each dump has an order of its own.
            if any(one in _WRITTEN for one in _leaves(written)) and any(map(_is_infinite_or_nan, _leaves(given))):
                _refuse()
        elif written in _WRITTEN and _is_infinite_or_nan(given):
            _refuse()
        else:
            waiting += [part for part in _parts(written, given) if part[0] in _WRITTEN or isinstance(part[0], dict | list)]


def _is_infinite_or_nan(given: object) -> bool:
    return isinstance(given, float) and not math.isfinite(given)


def _leaves(value: object) -> Iterable[object]:
    """Of what a set can hold: tuples, sets and members of enums, at any depth."""
    value = value.value if isinstance(value, Enum) else value
    if isinstance(value, list | tuple | Set):
        return chain.from_iterable(map(_leaves, value))
    return (value,)


def _parts(written: object, given: object) -> Iterable[tuple[Any, Any]]:
    """By their order: names may be aliases."""
    if isinstance(written, dict) and isinstance(given, Mapping):
        return chain(zip(written, given, strict=False), zip(written.values(), given.values(), strict=False))
    if isinstance(written, list) and isinstance(given, Collection):
        return zip(written, given, strict=False)
    return ()


def _refuse(_: str = "") -> NoReturn:
    raise ValueError("holds NaN or an infinity")
