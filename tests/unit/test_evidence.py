"""Places and names of fields, and no value."""

import pytest
from pydantic import BaseModel, ValidationError

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
