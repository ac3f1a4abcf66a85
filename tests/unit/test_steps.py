"""Arguments and results of steps: which have a form, which are alike, and what an annotation does."""

import functools
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any, Final
from uuid import UUID

import pytest
from pydantic import BaseModel, Field

from consumer_sdk.steps import canonical_arguments, decoded_result, encoded_result, step_fingerprint
from fencepost.errors import InvalidCommand, InvalidJson
from fencepost.secrets import Secrets
from tests.support.infinities import IN_MODELS, IN_PLAIN_VALUES, INFINITE, Texts

# A computed field is no part of what a step keeps.
KEPT: Final = {name: value for name, value in {**IN_PLAIN_VALUES, **IN_MODELS}.items() if name != "a computed field"}
SECRETS: Final = Secrets({1: b"a" * 32, 2: b"b" * 32}, write=[2])


class Colour(Enum):
    RED = "red"


class Point(BaseModel):
    x: int = Field(alias="theX")


@dataclass
class Pair:
    left: Point
    right: list[Point]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 2), [1, 2]), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), (Point(theX=1), {"x": 1}), (Colour.RED, "red"),
        (Pair(Point(theX=1), [Point(theX=2)]), {"left": {"x": 1}, "right": [{"x": 2}]}), (UUID(int=1), str(UUID(int=1))),
        (Decimal("1.50"), Decimal("1.5")), (1.0, 1),
    ],
    ids=["tuple and list", "order of names", "model", "enum", "dataclass", "uuid", "decimal", "float"],
)  # fmt: skip
def test_what_means_the_same_is_alike(one: object, other: object) -> None:
    assert canonical_arguments([one]) == canonical_arguments([other])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], [2, 1]), ([[1], 2], [1, [2]]), ([1], ["1"]), ([None], []), ([Decimal(1)], [1]),
        ([date(2026, 1, 1)], [datetime(2026, 1, 1, tzinfo=UTC)]), ([True], [1]),
    ],
)  # fmt: skip
def test_what_differs_is_told_apart(one: list[object], other: list[object]) -> None:
    assert canonical_arguments(one) != canonical_arguments(other)


@pytest.mark.parametrize(
    "argument",
    [{1, 2}, b"a", object(), float("nan"), datetime(2026, 1, 1, tzinfo=UTC).replace(tzinfo=None), "\ud800", Point],
    ids=["set", "bytes", "object", "nan", "naive time", "surrogate", "class"],
)
def test_what_has_no_form_is_refused(argument: object) -> None:
    with pytest.raises(InvalidJson):
        canonical_arguments([argument])


def test_a_fingerprint_is_of_its_arguments_and_secret() -> None:
    fingerprints = {step_fingerprint(SECRETS, version, arguments) for version in (1, 2) for arguments in (b"[1]", b"[2]")}

    assert len(fingerprints) == 4
    assert {len(fingerprint) for fingerprint in fingerprints} == {32}


async def whole() -> int:
    return 1


async def point() -> Point:
    return Point(theX=1)


async def untold():  # type: ignore[no-untyped-def]
    return 1


class Desk:
    async def points(self) -> list[Point]:
        return [Point(theX=1)]


@pytest.mark.parametrize(
    ("function", "result", "payload", "read"),
    [
        (whole, 1, b"1", 1),
        (point, Point(theX=1), b'{"theX":1}', Point(theX=1)),
        (Desk().points, [Point(theX=1)], b'[{"theX":1}]', [Point(theX=1)]),
        (untold, Point(theX=1), b'{"theX":1}', {"theX": 1}),
        (functools.partial(point), Point(theX=1), b'{"theX":1}', {"theX": 1}),
        (lambda _value: whole(), (1, 2), b"[1,2]", [1, 2]),
    ],
    ids=["scalar", "model", "method", "no annotation", "partial", "lambda"],
)
def test_a_result_is_stored_and_read_by_the_annotation(function: Any, result: object, payload: bytes, read: object) -> None:
    assert encoded_result("step", function, result) == (payload, read)
    assert decoded_result(function, payload) == read


@pytest.mark.parametrize("result", ["one", None, [1], object()], ids=["text", "none", "list", "object"])
def test_another_result_than_annotated_is_refused_without_its_value(result: object) -> None:
    with pytest.raises(InvalidCommand, match="result of step charge: must be what the function") as refused:
        encoded_result("charge", whole, result)

    assert refused.value.__cause__ is None


async def perhaps() -> float | None:
    return None


async def anything() -> Any: ...


async def texts() -> list[Texts]:
    return []


@pytest.mark.parametrize("result", KEPT.values(), ids=KEPT.keys())
@pytest.mark.parametrize("function", [anything, untold, perhaps], ids=["of any type", "no annotation", "a float or nothing"])
def test_a_result_with_an_infinity_or_a_nan_is_refused_without_its_value(function: Any, result: object) -> None:
    """A later attempt would read nothing in its place."""
    with pytest.raises(InvalidCommand, match=r"^result of step charge: must be .* a value that JSON can hold") as refused:
        encoded_result("charge", function, result)

    assert refused.value.__cause__ is None


def test_an_infinity_that_its_model_writes_as_text_is_kept_and_read() -> None:
    assert encoded_result("charge", texts, [Texts(value=INFINITE)]) == (b'[{"value":"Infinity"}]', [Texts(value=INFINITE)])


def test_what_was_kept_of_another_type_is_not_read() -> None:
    with pytest.raises(ValueError, match="theX"):
        decoded_result(point, b'{"y": 1}')
