r"""Strict JSON in, canonical JSON out: two texts that mean the same give the same bytes, two that differ give different ones.

``parse_json`` takes I-JSON (RFC 7493) and refuses whatever two readers could understand in two ways. ``canonical_json``
writes RFC 8785, the form that fingerprints are made of. Neither quotes what it refuses: names and values may be secret.

Profile 1 leaves RFC 8785 in two places, on purpose:

- An integer is exact at any size that the digit limit allows; neighbours beyond 2**53 stay apart. A float prints as
  ECMAScript prints it, so 1.0 is 1 and 1e21 is not the integer 10**21.
- Values that only Python has become tagged texts. Their tag begins with U+0000, which no other text may hold, so none can
  be forged; ``parse_json`` refuses them, so this form is for digests and not for storage.

  ===================== ======================================================================================
  ``Decimal``           ``"\u0000decimal:15e-1"``, whole coefficient without trailing zeros: 1.5 and 1.50 are one
  ``datetime``, aware   ``"\u0000datetime:2026-01-31T12:00:00.000000Z"``, in UTC
  ``date``              ``"\u0000date:2026-01-31"``
  ``UUID``              its text, without a tag
  ``Enum``              the form of its value
  ===================== ======================================================================================
"""

import json
import math
import re
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from functools import lru_cache, partial
from json.encoder import encode_basestring
from types import NoneType
from typing import Any, Final, TypeAlias
from uuid import UUID

from fencepost.errors import InvalidJson

__all__ = ["MAX_BYTES", "MAX_CANONICAL_CHARACTERS", "MAX_DEPTH", "MAX_DIGITS", "Json", "canonical_json", "parse_json"]

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

MAX_BYTES: Final = 1_000_000
MAX_DEPTH: Final = 64
MAX_DIGITS: Final = 1_000
# "1e20" takes 21 digits: the canonical form of the longest text that is accepted stays below.
MAX_CANONICAL_CHARACTERS: Final = 16 * MAX_BYTES

_FIRST_INEXACT_IN_A_DOUBLE: Final = 2**53
_INTEGER_BOUND: Final = 10**MAX_DIGITS
# Possessive, and the closing quote may be missing: one pass, whatever the text is.
_STRING_OR_BRACKET: Final = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)
_ESCAPE_TO_LOOK_AT: Final = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")
_NOT_TEXT: Final = re.compile("[\0\ud800-\udfff]")
_TEXT_LIMIT: Final = "may hold neither U+0000 nor a lone surrogate"
_TEXT_REMEDY: Final = "use whole Unicode characters"


def parse_json(
    text: bytes | str,
    *,
    max_bytes: int = MAX_BYTES,
    max_depth: int = MAX_DEPTH,
    max_digits: int = MAX_DIGITS,
) -> Json:
    """Return what the JSON text says: integers exact, other numbers as float, objects in the order of the text.

    ``max_bytes`` is in bytes of UTF-8, ``max_depth`` counts arrays and objects inside one another, ``max_digits`` counts
    those of one number. Raises ``InvalidJson``, also for a number that a double cannot hold and for a name given twice.
    """
    decoded = _decoded(text, max_bytes)
    _check_depth(decoded, max_depth)
    value = _parsed(decoded, max_digits)
    if _ESCAPE_TO_LOOK_AT.search(decoded):
        _check_texts(value)
    return value


def canonical_json(value: object) -> bytes:
    """Return the one form of the value, in UTF-8. The module says which Python types have one.

    Raises ``InvalidJson``, which names the kind of place and its depth.
    """
    return _written(value, 0).encode()


# Reading


def _refused(limit: str, remedy: str) -> InvalidJson:
    return InvalidJson("json", limit, remedy)


def _decoded(text: bytes | str, max_bytes: int) -> str:
    if not isinstance(text, bytes | str):
        raise _refused("must be bytes or text", "pass the body as it came")
    # First by the length at hand: nothing beyond the limit is copied.
    size = len(text)
    if size <= max_bytes:
        decoded = _unicode(text)
        size = len(decoded.encode())
    if size > max_bytes:
        raise _refused(f"has {size} bytes or more, may have {max_bytes}", "send less, or a reference")
    if decoded.startswith("\ufeff"):
        raise _refused("begins with a byte order mark", "send UTF-8 without one")
    return decoded


def _unicode(text: bytes | str) -> str:
    try:
        return text.decode() if isinstance(text, bytes) else text.encode().decode()
    except UnicodeError:
        # Without its cause: that error carries the whole text.
        raise _refused("must be UTF-8", "send UTF-8, without lone surrogates") from None


def _check_depth(text: str, max_depth: int) -> None:
    """Before parsing, because the parser recurses."""
    if text.count("[") + text.count("{") <= max_depth:
        return
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        first = text[found.start()]
        if first in "[{":
            depth += 1
        elif first in "]}":
            depth -= 1
        if depth > max_depth:
            raise _refused(f"is nested deeper than {max_depth}", "send a flatter value")


def _parsed(text: str, max_digits: int) -> Json:
    try:
        value: Json = _decoder(max_digits).decode(text)
    except json.JSONDecodeError as error:
        # Without its cause: that error carries the whole text.
        raise _refused(f"is not JSON at character {error.pos}", "send one JSON value as RFC 8259 has it") from None
    return value


@lru_cache(maxsize=16)
def _decoder(max_digits: int) -> json.JSONDecoder:
    return json.JSONDecoder(
        object_pairs_hook=_unique_members,
        parse_int=partial(_read_integer, max_digits=max_digits),
        parse_float=partial(_read_float, max_digits=max_digits),
        parse_constant=_refuse_constant,
    )


def _unique_members(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _refused("gives one name twice in an object", "give each name once")
    return members


def _refuse_constant(_: str) -> None:
    raise _refused("holds NaN or an infinity", "send a finite number, or null")


def _check_digits(text: str, max_digits: int) -> None:
    if len(text) > max_digits and sum(map(str.isdigit, text)) > max_digits:
        raise _refused(f"holds a number of more than {max_digits} digits", "send a shorter number, or text")


def _read_integer(text: str, *, max_digits: int) -> int:
    _check_digits(text, max_digits)
    return int(text)


def _read_float(text: str, *, max_digits: int) -> float:
    _check_digits(text, max_digits)
    value = float(text)
    if math.isinf(value):
        raise _refused("holds a number beyond the range of a double", "send a smaller number, or text")
    if _becomes_another_number(text, value):
        raise _refused("holds a number that a double takes for another", "send an integer without fraction and exponent, or text")
    return value


def _becomes_another_number(text: str, value: float) -> bool:
    """Whether a number became zero, or one that is written to its units, as ids are, became another integer.

    Rounded fractions pass, and so does every notation that an encoder has for the double itself.
    """
    if not value:
        return bool(text.lower().partition("e")[0].strip("-0."))
    if abs(value) < _FIRST_INEXACT_IN_A_DOUBLE:
        return False
    exact = Decimal(text)
    is_written_to_its_units = len(exact.as_tuple().digits) > exact.adjusted()
    return is_written_to_its_units and exact not in (Decimal.from_float(value), Decimal(repr(value)))


def _check_texts(value: Json) -> None:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str) and _NOT_TEXT.search(item):
            raise _refused(f"holds a text or name that {_TEXT_LIMIT}", _TEXT_REMEDY)
        if isinstance(item, dict):
            waiting.extend(item)
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)


# Writing


def _unwritable(kind: str, depth: int, limit: str, remedy: str) -> InvalidJson:
    return InvalidJson(f"{kind} at depth {depth}", limit, remedy)


def _written(value: Any, depth: int) -> str:
    write = _WRITERS.get(type(value)) or _writer_of_base(value, depth)
    return write(value, depth)


def _writer_of_base(value: object, depth: int) -> "_Writer":
    if isinstance(value, Enum):
        return _write_enum
    for base, write in _WRITERS.items():
        if isinstance(value, base):
            return write
    raise _unwritable("a value", depth, f"is a {type(value).__name__}, which has no canonical form", "convert it to text first")


def _write_object(members: dict[Any, Any], depth: int) -> str:
    inner = _deeper(depth)
    names = _in_order(members, inner)
    return _bounded("{" + ",".join([f"{encode_basestring(name)}:{_written(members[name], inner)}" for name in names]) + "}", depth)


def _write_array(items: Iterable[Any], depth: int) -> str:
    inner = _deeper(depth)
    return _bounded("[" + ",".join([_written(item, inner) for item in items]) + "]", depth)


def _deeper(depth: int) -> int:
    if depth >= MAX_DEPTH:
        raise _unwritable("a value", depth, f"is nested deeper than {MAX_DEPTH}, or holds itself", "pass a flatter value")
    return depth + 1


def _bounded(text: str, depth: int) -> str:
    """Values that share their parts are small in memory and vast in writing."""
    if len(text) > MAX_CANONICAL_CHARACTERS:
        raise _unwritable("a value", depth, f"has more than {MAX_CANONICAL_CHARACTERS} characters", "pass a reference")
    return text


def _in_order(members: dict[Any, Any], depth: int) -> list[str]:
    """By UTF-16 code units, as ECMAScript sorts; for ASCII that is the order of Python."""
    try:
        together = "".join(members)
    except TypeError:
        raise _unwritable("a name", depth, "must be text", "convert it, so that 1 and '1' cannot become one name") from None
    _check_text("a name", together, depth)
    return sorted(members, key=None if together.isascii() else _utf16)


def _utf16(name: str) -> bytes:
    return name.encode("utf-16-be")


def _check_text(kind: str, text: str, depth: int) -> None:
    if "\0" in text or (not text.isascii() and _NOT_TEXT.search(text)):
        raise _unwritable(kind, depth, _TEXT_LIMIT, _TEXT_REMEDY)


def _write_text(text: str, depth: int) -> str:
    _check_text("a text", text, depth)
    # Escapes exactly what RFC 8785 escapes: quote, backslash and control characters, in the short form where there is one.
    return encode_basestring(text)


def _write_integer(value: int, depth: int) -> str:
    if not -_INTEGER_BOUND < value < _INTEGER_BOUND:
        raise _unwritable("an integer", depth, f"has more than {MAX_DIGITS} digits", "pass text")
    return int.__repr__(value)


def _write_float(value: float, depth: int) -> str:
    if not math.isfinite(value):
        raise _unwritable("a float", depth, "must be finite", "pass None or text for what is not a number")
    return _ecmascript(float.__repr__(value)) if value else "0"


def _ecmascript(text: str) -> str:
    """The notation that ECMAScript has for Python's shortest digits: plain from 1e-6 to below 1e21."""
    mantissa, _, exponent_text = text.partition("e")
    if not exponent_text:
        return text.removesuffix(".0")
    exponent = int(exponent_text)
    sign = "-" if mantissa.startswith("-") else ""
    digits = mantissa.lstrip("-").replace(".", "")
    if -7 < exponent < 0:
        return f"{sign}0.{'0' * (-exponent - 1)}{digits}"
    if 0 <= exponent < 21:
        return sign + digits.ljust(exponent + 1, "0")
    return f"{mantissa}e{exponent:+d}"


def _write_boolean(value: bool, _: int) -> str:
    return "true" if value else "false"


def _write_null(_: None, __: int) -> str:
    return "null"


def _write_enum(value: Enum, depth: int) -> str:
    return _written(value.value, depth)


def _write_uuid(value: UUID, _: int) -> str:
    return f'"{value}"'


def _tagged(tag: str, text: str) -> str:
    return f'"\\u0000{tag}:{text}"'


def _write_decimal(value: Decimal, depth: int) -> str:
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        raise _unwritable("a Decimal", depth, "must be finite", "pass None or text for what is not a number")
    if len(digits) > MAX_DIGITS:
        raise _unwritable("a Decimal", depth, f"has more than {MAX_DIGITS} digits", "round it, or pass text")
    # By its digits, not by normalize(), which would round to the precision of the caller's context.
    coefficient = "".join(map(str, digits)).lstrip("0")
    stripped = coefficient.rstrip("0")
    if not stripped:
        return _tagged("decimal", "0")
    return _tagged("decimal", f"{'-' * sign}{stripped}e{exponent + len(coefficient) - len(stripped)}")


def _write_datetime(value: datetime, depth: int) -> str:
    if value.utcoffset() is None:
        raise _unwritable("a datetime", depth, "must have a time zone", "give it one, such as datetime.UTC")
    try:
        moment = value.astimezone(UTC)
    except OverflowError:
        raise _unwritable("a datetime", depth, "must lie in the years 1 to 9999 in UTC", "pass text") from None
    return _tagged("datetime", datetime.isoformat(moment.replace(tzinfo=None), timespec="microseconds") + "Z")


def _write_date(value: date, _: int) -> str:
    return _tagged("date", date.isoformat(value))


_Writer: TypeAlias = Callable[[Any, int], str]
# A base after each of its subclasses, for the search by isinstance: bool is an int, a datetime is a date.
_WRITERS: Final[dict[type, _Writer]] = {
    str: _write_text,
    bool: _write_boolean,
    int: _write_integer,
    float: _write_float,
    NoneType: _write_null,
    dict: _write_object,
    list: _write_array,
    tuple: _write_array,
    UUID: _write_uuid,
    Decimal: _write_decimal,
    datetime: _write_datetime,
    date: _write_date,
}
