"""Places and names of fields, and no value."""

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from consumer_sdk.calling import called
from consumer_sdk.evidence import frames_of, problems_of

SECRET = "s3cret-value"


class Address(BaseModel):
    street: str
    lines: dict[str, int] = {}


class Invoice(BaseModel):
    number: int
    address: Address


def _raise_within() -> None:
    raise KeyError(SECRET)


def _raise_because() -> None:
    try:
        _raise_within()
    except KeyError as cause:
        raise ValueError(SECRET) from cause


def test_the_frames_of_an_error_name_file_line_and_function() -> None:
    with pytest.raises(KeyError) as raised:
        _raise_within()
    frames = frames_of(raised.value)
    assert frames[-1].endswith("_raise_within")
    assert "test_evidence.py:" in frames[-1]
    assert SECRET not in str(frames)


def test_a_cause_comes_before_what_it_caused_and_a_circle_ends() -> None:
    with pytest.raises(ValueError, match=SECRET) as raised:
        _raise_because()
    cause = raised.value.__cause__
    assert cause is not None
    cause.__cause__ = raised.value
    frames = frames_of(raised.value)
    assert any("_raise_within" in frame for frame in frames)
    assert len(frames) <= 8


def test_no_error_has_no_frames() -> None:
    assert frames_of(None) == []


def test_the_problems_of_a_model_are_fields_and_kinds() -> None:
    with pytest.raises(ValidationError) as raised:
        Invoice.model_validate_json('{"number": "s3cret-value", "address": {"lines": {"s3cret-value": "x"}}}')
    problems = problems_of(raised.value)
    assert problems == ["number: int_parsing", "address.street: missing", "address.lines.?: int_parsing"]


def test_another_error_is_told_by_its_class() -> None:
    assert problems_of(KeyError(SECRET)) == ["KeyError"]


async def _deep(depth: int) -> None:
    if depth:
        await _deep(depth - 1)
    raise LookupError("secret")


async def _handles() -> None:
    await _deep(20)


async def test_the_frame_of_the_handler_is_told_however_deep_its_driver_is() -> None:
    """Of a missing table a driver's frames alone say nothing."""

    async def context(function: Callable[[], Coroutine[Any, Any, object]]) -> object:
        return await function()

    for attempt in (called(_handles), called(context, _handles)):
        with pytest.raises(LookupError) as raised:
            await attempt
        frames = frames_of(raised.value)
        assert len(frames) == 8
        assert frames[0].startswith(f"{__file__}:")
        assert [frame.rpartition(" ")[2] for frame in frames[1:]] == ["_deep"] * 7
    assert frames_of(raised.value)[0].endswith("context")
