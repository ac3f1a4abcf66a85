"""What handlers and workflows hand over is kept as it is, or refused: an infinity or a NaN is never kept as nothing."""

import json
from typing import Any, Final

import pytest
from pydantic import BaseModel, TypeAdapter

from consumer_sdk.encoding import encoded, encoded_as
from fencepost.errors import InvalidCommand
from tests.support.infinities import IN_MODELS, IN_PLAIN_VALUES, INFINITE, NAN, Measured, Texts

ANY: Final[TypeAdapter[Any]] = TypeAdapter(Any)
EACH: Final = [*IN_PLAIN_VALUES.values(), *IN_MODELS.values()]
NAMES: Final = [*IN_PLAIN_VALUES, *(f"{name} of a model" for name in IN_MODELS)]


@pytest.mark.parametrize("value", EACH, ids=NAMES)
def test_an_infinity_or_a_nan_is_refused(value: object) -> None:
    with pytest.raises(InvalidCommand, match=r"^output: must be a value that JSON can hold; convert it first$") as refused:
        encoded("output", value, most=1_000)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize("value", EACH, ids=NAMES)
@pytest.mark.parametrize("typed", [True, False], ids=["of its type", "of any type"])
def test_an_infinity_or_a_nan_is_refused_by_type(value: object, typed: bool) -> None:
    adapter = TypeAdapter(type(value)) if typed else ANY
    with pytest.raises(
        InvalidCommand, match=r"^input: must be of the type that .*, and a value that JSON can hold; convert it first$"
    ):
        encoded_as("input", adapter, value, most=1_000)


@pytest.mark.parametrize("inner", [Texts(value=INFINITE), Texts(value=-INFINITE), Texts(value=NAN)], ids=["inf", "-inf", "nan"])
def test_what_an_author_writes_as_text_is_kept(inner: BaseModel) -> None:
    payload = encoded("output", inner, most=1_000)
    nested = {"text": inner, "nothing": None}
    assert encoded_as("output", TypeAdapter(Texts), inner, most=1_000) == payload
    assert json.loads(encoded_as("output", ANY, nested, most=1_000)) == {"text": json.loads(payload), "nothing": None}
    assert Texts.model_validate_json(payload).model_dump_json() == inner.model_dump_json()


@pytest.mark.parametrize(
    "value",
    [None, [None, "NaN", "Infinity", "null", "None"], {"None": None, "a": 1.5}, Measured(), Measured(anything=["None", None])],
    ids=["nothing", "words", "names", "a model of nothing", "a model of words"],
)
def test_what_only_looks_like_one_is_kept(value: object) -> None:
    told = json.loads(encoded("output", value, most=1_000))
    assert told == (json.loads(value.model_dump_json()) if isinstance(value, BaseModel) else value)
    assert encoded_as("output", ANY, value, most=1_000)
