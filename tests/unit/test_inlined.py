"""Statements that are sent by their text have their parameters in it, and no text can be more than a text there."""

import pytest

from fencepost.database import inlined

TAG = "-- fencepost:find\n"


def test_each_parameter_stands_where_its_number_was() -> None:
    assert inlined(TAG + "SELECT f($2, $1, $2)", "a", "b") == TAG + "SELECT f('b', 'a', 'b')"


@pytest.mark.parametrize(
    ("text", "literal"),
    [
        ("", "''"),
        ("it's", "'it''s'"),
        ("a\\b", " E'a\\\\b'"),
        ("\\'; DROP TABLE t; --", " E'\\\\''; DROP TABLE t; --'"),
        ("two\nlines", "'two\nlines'"),
        ("$1 %s %", "'$1 %s %'"),
        ("ä€𝄞", "'ä€𝄞'"),
    ],
    ids=["empty", "quote", "backslash", "both", "lines", "placeholders", "not ascii"],
)
def test_a_text_is_one_literal(text: str, literal: str) -> None:
    assert inlined(TAG + "SELECT $1", text) == f"{TAG}SELECT {literal}"


def test_comments_are_left_out_so_that_no_text_can_end_one() -> None:
    assert inlined(TAG + "-- by $1\nSELECT 100 % 7, $1", "a\nb") == TAG + "SELECT 100 % 7, 'a\nb'"


def test_a_text_that_postgresql_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL"):
        inlined(TAG + "SELECT $1", "a\0b")
