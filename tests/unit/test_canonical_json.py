"""JSON that means the same gives the same bytes, JSON that two readers could understand in two ways is refused."""

import json
import math
import string
import struct
import traceback
from collections import OrderedDict, defaultdict
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal, localcontext
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.canonical_json import MAX_BYTES, MAX_DEPTH, MAX_DIGITS, canonical_json, parse_json
from fencepost.errors import InvalidJson

VECTORS = Path(__file__).parent / "vectors" / "rfc8785"

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=12)
AWARE = st.datetimes(min_value=datetime(2, 1, 1), max_value=datetime(9998, 12, 31), timezones=st.timezones())  # noqa: DTZ001
EAST = timezone(timedelta(hours=14))


def canonical(text: str | bytes) -> str:
    """The canonical form of a JSON text."""
    return canonical_json(parse_json(text)).decode()


def refusal_of(text: str | bytes, **limits: int) -> InvalidJson:
    """How the text is refused."""
    with pytest.raises(InvalidJson) as caught:
        parse_json(text, **limits)
    return caught.value


def unwritable(value: object) -> InvalidJson:
    """How the value is refused."""
    with pytest.raises(InvalidJson) as caught:
        canonical_json(value)
    return caught.value


def double(bits: str) -> float:
    """The double that has these bits, given in hexadecimal."""
    return float(struct.unpack(">d", bytes.fromhex(bits))[0])


def numbers(name: str) -> list[list[str]]:
    """The rows of a table of doubles: bits and canonical text."""
    return [line.split(",") for line in (VECTORS / name).read_text().splitlines()]


def nested(depth: int) -> list[Any]:
    """Arrays inside one another."""
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


# FINGERPRINT-1 to 9: the form


def test_spelling_does_not_matter() -> None:  # FINGERPRINT-1, J17
    assert canonical('{"b":1,"a":"A"}') == canonical('{ "a" : "\\u0041", "b" : 1 }\n') == '{"a":"A","b":1}'


def test_the_order_of_an_array_matters() -> None:  # FINGERPRINT-2
    assert canonical('{"ids":[2,1]}') == '{"ids":[2,1]}'


def test_names_sort_by_utf16_code_units() -> None:  # FINGERPRINT-3
    form = canonical('{"\\ufb33":1,"\\ud83d\\ude02":2}')

    assert form == '{"\U0001f602":2,"\ufb33":1}'
    assert len(form.encode()) == 18


def test_numbers_print_the_ecmascript_way() -> None:  # FINGERPRINT-4
    assert (
        canonical("[1E30,4.50,1e20,1e21,1e-6,1e-7,1e16,-0.0,1.0]")
        == "[1e+30,4.5,100000000000000000000,1e+21,0.000001,1e-7,10000000000000000,0,1]"
    )


def test_only_what_must_be_escaped_is_escaped() -> None:  # FINGERPRINT-5
    form = canonical('{"a":"\\u002F\\u007f\\u2028\\u001f\\u000a\\"\\\\"}')

    assert form == '{"a":"/\x7f\u2028\\u001f\\n\\"\\\\"}'
    assert len(form.encode()) == 25


def test_control_characters_have_their_short_or_lower_case_escape() -> None:
    rest = "".join(f"\\u{code:04x}" for code in range(1, 32) if chr(code) not in "\b\t\n\f\r")

    assert canonical_json("\b\t\n\f\r").decode() == '"\\b\\t\\n\\f\\r"'
    assert canonical_json("".join(chr(code) for code in range(1, 32) if chr(code) not in "\b\t\n\f\r")).decode() == f'"{rest}"'


def test_sorting_reaches_every_level() -> None:  # FINGERPRINT-6
    assert (
        canonical('{ "aa":1, "a":{"f":[{"y":1,"E":2},[]],"F":{}}, "B":3, "":4 }')
        == '{"":4,"B":3,"a":{"F":{},"f":[{"E":2,"y":1},[]]},"aa":1}'
    )


def test_unicode_is_not_normalised() -> None:  # FINGERPRINT-7
    assert canonical('{"n":"\\u00e9"}') != canonical('{"n":"e\\u0301"}')


def test_equal_numbers_are_equal_and_types_differ() -> None:  # FINGERPRINT-8
    assert canonical("[100,1,-0.0]") == canonical("[1e2,1.0,0]") == canonical("[100,1E0,-0]") == "[100,1,0]"
    assert canonical('["100",1,0]') != "[100,1,0]"


@pytest.mark.parametrize("integer", [2**53, 2**64, 10**400, -(2**70)])
def test_neighbouring_integers_stay_apart_at_any_size(integer: int) -> None:  # FINGERPRINT-9; profile 1, not RFC 8785
    assert [canonical(str(integer + step)) for step in (-1, 0, 1)] == [str(integer + step) for step in (-1, 0, 1)]


# FINGERPRINT-9 to 14: what is refused


@pytest.mark.parametrize(
    "text",
    ["9007199254740993.0", "9007199254740993e0", "9.007199254740993e15", "-9007199254740993.00", "9007199254740993.5"],
)
def test_an_integer_in_the_notation_of_a_float_is_refused_where_a_double_takes_it_for_its_neighbour(text: str) -> None:
    assert "double" in refusal_of(f"[{text}]").limit


@pytest.mark.parametrize(
    "text",
    ["1e23", "1.0E30", "9007199254740994.0", "99999999999999991611392.0", "9.99999999999999916e+22", "333333333.33333329", "0e9"],
)
def test_every_notation_that_encoders_have_for_a_double_is_read(text: str) -> None:
    assert parse_json(text) == float(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"amount":1,"amount":100}',
        '{"a":{"b":[{"c":{"amount":1,"amount":1}}]}}',
        '{"a":1,"\\u0061":2}',
        '{"":0,"x":1,"":0}',
    ],
)
def test_a_name_given_twice_is_refused(text: str) -> None:  # FINGERPRINT-10
    assert "twice" in refusal_of(text).limit


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1E+99999999999", "1" + "0" * 400 + ".0"])
def test_what_is_not_a_finite_number_is_refused(text: str) -> None:  # FINGERPRINT-11
    refusal_of(f"[{text}]")
    refusal_of(text)


@pytest.mark.parametrize("text", ["1e-400", "-0.1e-99999999999999999999", "0." + "0" * 400 + "1"])
def test_a_number_that_would_become_zero_is_refused(text: str) -> None:
    assert "double" in refusal_of(f"[{text}]").limit


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, double("7fffffffffffffff"), Decimal("NaN"), Decimal("-Infinity")])
def test_what_is_not_a_finite_number_has_no_form(value: object) -> None:  # FINGERPRINT-11
    assert "depth 1" in unwritable([value]).field


@pytest.mark.parametrize(
    "text",
    ['["\\u0000"]', '["\\ud800"]', '{"\\udc00":1}', '{"\\u0000":1}', '["\\ude02\\ud83d"]', '[{"a":[{"b":"x\\uDBFFy"}]}]'],
)
def test_text_that_the_database_cannot_hold_is_refused(text: str) -> None:  # FINGERPRINT-12
    refusal_of(text)
    refusal_of(text.encode())


@pytest.mark.parametrize("value", ["\0", "a\ud800", {"\udc00": 1}, {"\0": 1}, {"é\0": 1}])
def test_text_that_the_database_cannot_hold_has_no_form(value: object) -> None:  # FINGERPRINT-12
    assert "U+0000" in unwritable(value).limit


def test_a_backslash_before_a_harmless_escape_is_read() -> None:
    assert parse_json('["\\\\u0000", "\\\\ud800", "\\ud83d\\ude02"]') == ["\\u0000", "\\ud800", "\U0001f602"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"])
def test_any_encoding_but_utf8_without_a_mark_is_refused(encoding: str) -> None:  # FINGERPRINT-13
    refusal_of('{"a":"é"}'.encode(encoding))


@pytest.mark.parametrize(
    "text",
    [b'["\xff"]', b'["\xed\xa0\x80"]', b'["\xc0\x80"]', b'["\xe2\x82"]', b"\xff", "\ufeff1", '["\ud800"]'],
)
def test_an_invalid_byte_or_mark_is_refused(text: bytes | str) -> None:  # FINGERPRINT-13
    assert "UTF-8" in refusal_of(text).remedy


@pytest.mark.parametrize("unit", ["[", '{"a":', '[{"":', '["]",{"}":'])
def test_depth_is_refused_without_recursion(unit: str) -> None:  # FINGERPRINT-14
    assert "deeper" in refusal_of(unit * 200_000, max_bytes=10_000_000).limit


def test_depth_is_allowed_up_to_its_limit() -> None:
    value = nested(MAX_DEPTH)
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH

    assert parse_json(text) == value
    assert canonical_json(value).decode() == text
    assert parse_json(f"[[],{text[1:]}") == [[], *value]
    assert "deeper" in refusal_of(f"[{text}]").limit
    assert "deeper" in unwritable([value]).limit
    assert parse_json("[[1]]", max_depth=2) == [[1]]
    refusal_of("[[1]]", max_depth=1)


def test_brackets_in_texts_and_beside_one_another_are_not_depth() -> None:
    beside = [[], {"[": "{[\"\\[{'"}] * 100

    assert parse_json(json.dumps(beside)) == beside
    assert parse_json(json.dumps("[{" * 1_000)) == "[{" * 1_000


def test_a_value_that_holds_itself_is_refused_without_recursion_failure() -> None:
    circle: list[Any] = []
    circle.append(circle)
    ring: dict[str, Any] = {}
    ring["a"] = ring

    assert "holds itself" in unwritable(circle).limit
    assert "holds itself" in unwritable(ring).limit


def test_a_value_that_is_vast_only_when_written_is_refused() -> None:
    shared: list[Any] = ["x" * 100]
    for _ in range(50):
        shared = [shared, shared]

    assert "characters" in unwritable(shared).limit


@pytest.mark.parametrize("template", ["{}", "-{}", "0.{}", "{}.5", "{}e-1500", "1e{}"])
def test_digits_are_bounded(template: str) -> None:  # FINGERPRINT-14
    assert "digits" in refusal_of(f"[{template.format('1' * 5_000)}]").limit


def test_digits_are_allowed_up_to_their_limit() -> None:
    longest = "-" + "9" * MAX_DIGITS

    assert canonical(longest) == longest
    assert "digits" in refusal_of(longest + "9").limit
    assert "digits" in unwritable(10**MAX_DIGITS).limit
    assert "digits" in unwritable(-(10**5_000)).limit
    assert parse_json("-12", max_digits=2) == -12
    assert parse_json("-1.2", max_digits=2) == -1.2
    refusal_of("123", max_digits=2)


@pytest.mark.parametrize("character", ["a", "é", "\U0001f602"])
def test_size_is_counted_in_bytes_of_utf8(character: str) -> None:
    text = '"' + character * 10 + '"'
    size = len(text.encode())

    assert parse_json(text, max_bytes=size) == parse_json(text.encode(), max_bytes=size) == character * 10
    assert "bytes" in refusal_of(text, max_bytes=size - 1).limit
    assert "bytes" in refusal_of(text.encode(), max_bytes=size - 1).limit
    assert "bytes" in refusal_of(b" " * (MAX_BYTES + 1)).limit


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "{",
        "[1,]",
        '{"a":1,}',
        "{'a':1}",
        '{"a" 1}',
        "{1:2}",
        "01",
        "+1",
        ".5",
        "1.",
        "0x1",
        "1 2",
        "1_0",
        "-",
        "--1",
        "1e",
    ],
)
def test_what_is_not_json_is_refused(text: str) -> None:
    assert "not JSON" in refusal_of(text).limit


@pytest.mark.parametrize(
    "text",
    ['"a', '"\\', '"\t"', '"\x01"', '"\\x"', '"\\u12"', '"\\u+123"', "nul", "True", "[1]//", "\x0b1", "\u00a01", "\u0661"],
)
def test_what_is_almost_json_is_refused(text: str) -> None:
    assert "not JSON" in refusal_of(text).limit


@pytest.mark.parametrize("value", [b"1", bytearray(b"1"), {1}, frozenset(), object(), 1j, range(2), timedelta(1), float, ...])
def test_other_types_have_no_form(value: object) -> None:
    assert type(value).__name__ in unwritable({"a": [value]}).limit


def test_only_bytes_and_text_are_parsed() -> None:
    refusal_of(None)  # type: ignore[arg-type]
    refusal_of({"a": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [1, None, True, 1.5, ("a",), b"a", UUID(int=1)])
def test_a_name_that_is_not_text_is_refused(name: object) -> None:  # 1 and "1" would be one name
    assert unwritable([{name: 1, "1": 2}]).field == "a name at depth 2"


SECRET = "hunter2"


@pytest.mark.parametrize(
    "text",
    [
        f'{{"{SECRET}":1,"{SECRET}":2}}',
        f'["{SECRET}\\u0000"]',
        f'{{"{SECRET}\\ud800":1}}',
        f'["{SECRET}\ud800"]',
        f'["{SECRET}" {SECRET}]',
        f'"{SECRET}\x01"',
        f'"{SECRET}\\q"',
        f'["{SECRET}",1e400]',
        f'["{SECRET}",NaN]',
        f'["{SECRET}",{"9" * 5_000}]',
        f'["{SECRET}",{"[" * 100}',
        b'"' + SECRET.encode() + b'\xff"',
        SECRET,
    ],
)
def test_a_refused_text_is_not_quoted(text: str | bytes) -> None:
    shown = "".join(traceback.format_exception(refusal_of(text)))

    assert SECRET not in shown.replace(f'SECRET = "{SECRET}"', "")


@pytest.mark.parametrize(
    "value",
    [
        {SECRET: math.nan},
        {SECRET: {SECRET: b"hunter2"}},
        {SECRET + "\0": 1},
        [SECRET + "\ud800"],
        {SECRET: 1, 2: SECRET},
        {SECRET: nested(70)},
        {SECRET: datetime(2026, 1, 1)},  # noqa: DTZ001
        {SECRET: datetime.min.replace(tzinfo=EAST)},
        {SECRET: Decimal("sNaN123")},
    ],
)
def test_a_refused_value_is_not_quoted(value: object) -> None:
    shown = "".join(traceback.format_exception(unwritable(value)))

    assert SECRET not in shown


# Values that only Python has


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Price(Enum):
    LOW = Decimal("1.50")


class Point(NamedTuple):
    x: int
    y: float


class Text(str):
    __slots__ = ()


class Ratio(float):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (None, "null"),
        (True, "true"),
        ((1, (2,)), "[1,[2]]"),
        (Point(1, 2.0), "[1,2]"),
        (OrderedDict(b=1, a=2), '{"a":2,"b":1}'),
        (defaultdict(int, a=1), '{"a":1}'),
        (Text("x"), '"x"'),
        (Ratio(0.5), "0.5"),
        (Colour.RED, '"red"'),
        ({Colour.RED: Level.HIGH}, '{"red":3}'),
        (Price.LOW, '"\\u0000decimal:15e-1"'),
        (UUID("0000000A-0000-0000-0000-000000000000"), '"0000000a-0000-0000-0000-000000000000"'),
        (Decimal("-120"), '"\\u0000decimal:-12e1"'),
        (Decimal("1e999999"), '"\\u0000decimal:1e999999"'),
        (Decimal("-0.00"), '"\\u0000decimal:0"'),
        (date(2026, 1, 31), '"\\u0000date:2026-01-31"'),
        (datetime(2026, 1, 31, 12, tzinfo=UTC), '"\\u0000datetime:2026-01-31T12:00:00.000000Z"'),
    ],
)
def test_a_python_value_has_one_form(value: object, form: str) -> None:
    assert canonical_json(value).decode() == form


@given(st.decimals(allow_nan=False, allow_infinity=False), st.integers(0, 5))
def test_equal_decimals_have_one_form(value: Decimal, zeros: int) -> None:
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    same = Decimal((sign, digits + (0,) * zeros, exponent - zeros))

    assert canonical_json(same) == canonical_json(value)


@given(*[st.decimals(allow_nan=False, allow_infinity=False)] * 2)
def test_two_decimals_have_one_form_only_if_they_are_equal(one: Decimal, other: Decimal) -> None:
    assert (canonical_json(one) == canonical_json(other)) == (one == other)


def test_a_decimal_is_not_rounded_to_the_context_of_the_caller() -> None:
    with localcontext(prec=3):
        assert canonical_json(Decimal("1.23456")) == b'"\\u0000decimal:123456e-5"'
    assert "digits" in unwritable(Decimal("1." + "1" * MAX_DIGITS)).limit


@given(AWARE, st.integers(-14, 14))
def test_a_moment_has_one_form_in_every_time_zone(moment: datetime, hours: int) -> None:
    assert canonical_json(moment) == canonical_json(moment.astimezone(timezone(timedelta(hours=hours))))


@pytest.mark.parametrize("moment", [datetime(2026, 1, 1), datetime.min.replace(tzinfo=EAST)])  # noqa: DTZ001
def test_a_datetime_that_is_no_moment_in_utc_is_refused(moment: datetime) -> None:
    assert unwritable([moment]).field == "a datetime at depth 1"


def test_no_text_can_pass_for_a_tagged_value() -> None:
    for value in (Decimal("1.5"), datetime(2026, 1, 1, tzinfo=UTC), date(2026, 1, 1)):
        form = canonical_json(value)

        unwritable(json.loads(form))
        refusal_of(form)


# FINGERPRINT-18: the public vectors


@pytest.mark.parametrize("name", ["arrays", "french", "structures", "unicode", "values", "weird"])
def test_a_public_vector_has_its_published_form(name: str) -> None:  # FINGERPRINT-18
    published = (VECTORS / "output" / f"{name}.json").read_bytes()

    assert canonical_json(parse_json((VECTORS / "input" / f"{name}.json").read_bytes())) == published
    assert canonical_json(parse_json(published)) == published


@pytest.mark.parametrize("table", ["appendix-b.csv", "v8.csv"])
def test_a_double_prints_as_published(table: str) -> None:  # FINGERPRINT-18
    rows = numbers(table)

    assert [[bits, canonical_json(double(bits)).decode()] for bits, _ in rows] == rows
    # As text, too. A whole number below 1e21 is read as an integer, exact in profile 1, and prints the same.
    assert [[bits, canonical(text)] for bits, text in rows] == rows


# Properties


@given(JSON)
def test_a_canonical_form_is_read_and_written_unchanged(value: object) -> None:
    form = canonical_json(value)

    assert canonical_json(parse_json(form)) == form


@given(JSON)
def test_every_json_writer_leads_to_one_form(value: object) -> None:
    compact = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    airy = json.dumps(value, indent=2, sort_keys=True)

    assert canonical_json(parse_json(compact)) == canonical_json(parse_json(airy.encode())) == canonical_json(value)


@given(st.dictionaries(TEXTS, JSON, max_size=6), st.randoms())
def test_the_order_of_members_never_matters(members: dict[str, Any], random: Any) -> None:
    shuffled = list(members.items())
    random.shuffle(shuffled)

    assert canonical_json(dict(shuffled)) == canonical_json(members)


@given(st.lists(JSON, min_size=2, max_size=4), st.randoms())
def test_the_order_of_items_always_matters(items: list[Any], random: Any) -> None:
    shuffled = list(items)
    random.shuffle(shuffled)
    moved = [canonical_json(item) for item in items] != [canonical_json(item) for item in shuffled]

    assert (canonical_json(items) != canonical_json(shuffled)) == moved


@given(st.dictionaries(TEXTS, st.none(), min_size=1))
def test_names_are_written_in_utf16_order(members: dict[str, None]) -> None:
    written = list(json.loads(canonical_json(members)))

    assert written == sorted(members, key=lambda name: name.encode("utf-16-be"))


@given(JSON)
def test_the_form_is_what_the_value_says(value: Any) -> None:
    assert json.loads(canonical_json(value)) == json.loads(json.dumps(value), parse_float=as_printed)


def as_printed(text: str) -> float | int:
    """A float as it is read back: one below 1e21 that is whole prints as the integer of its shortest digits."""
    value = float(text)
    return int(Decimal(text)) if value.is_integer() and abs(value) < 1e21 else value


@given(st.binary(max_size=40) | st.text(alphabet='{}[]",:\\u0d8e1.+-ntf\0 \ufeff' + string.ascii_lowercase, max_size=40))
def test_whatever_comes_is_read_or_refused(text: bytes | str) -> None:
    try:
        value = parse_json(text)
    except InvalidJson:
        return
    canonical_json(value)
