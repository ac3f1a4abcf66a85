"""What a durable route reads of headers: every spelling of a key, and wishes to wait."""

import re

import pytest

from fencepost.errors import KeyInvalid, KeyMissing
from producer_sdk.http.headers import EXPOSED_HEADERS, Preference, field_values, parse_key, preference_of

LONGEST = "k" * 255


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("k-1", "k-1"),
        ('"k-1"', "k-1"),
        ('"k-1"; v=2', "k-1"),
        ('"k-1";v=2;w="a;b";x=?1;y=:aGk=:;z', "k-1"),
        ('"a\\"b"', 'a"b'),
        ('"a\\\\b"', "a\\b"),
        ("a\\b", "a\\b"),
        ('"a b"', "a b"),
        ('"a,b"', "a,b"),
        ("8e03978e-40d5-43e8-bc93-6894a57f9324", "8e03978e-40d5-43e8-bc93-6894a57f9324"),
        (LONGEST, LONGEST),
        (f'"{LONGEST}"', LONGEST),
    ],
)
def test_spellings_of_a_key(line: str, key: str) -> None:
    """KEY-1, 9.1-1, 9.1-2: bare and quoted, parameters ignored."""
    assert parse_key([line]) == key


@pytest.mark.parametrize(
    "line",
    [
        "", '""', "a,b", '"a", "b"', '"a', 'a"', '"a\\n"', "a b", "a;b", "é", '"é"', LONGEST + "k", f'"{LONGEST}k"', "\x00", "a\tb",
        '"a"b', '"a";', '"a"; =1', '"a"; V=2', "'a b'", '"', '"a\\', "a\x7f",
    ],
)  # fmt: skip
def test_only_a_well_formed_key_gets_in(line: str) -> None:
    """KEY-2, T4"""
    with pytest.raises(KeyInvalid):
        parse_key([line])


@pytest.mark.parametrize("lines", [["a", "a"], ["a", "b"], ['"a"', "a"]])
def test_a_repeated_field_is_refused(lines: list[str]) -> None:
    """KEY-3, 9.1-2"""
    with pytest.raises(KeyInvalid):
        parse_key(lines)


def test_no_line_is_no_key() -> None:
    """KEY-5, T4"""
    with pytest.raises(KeyMissing):
        parse_key([])


def test_no_text_makes_the_parser_slow() -> None:
    """A key of backslashes, and parameters without an end, within the time that one pass takes."""
    for text in ['"' + "\\\\" * 50_000, '"a"' + "; a" * 50_000 + "!", '"a";' + " " * 100_000 + "!", "a" * 200_000]:
        with pytest.raises(KeyInvalid):
            parse_key([text])


@pytest.mark.parametrize(
    ("lines", "preference"),
    [
        ([], Preference()),
        (["wait=3"], Preference(3)),
        (['wait="3"'], Preference(3)),
        (["Wait = 3"], Preference(3)),
        (["respond-async, wait=10"], Preference(10, True)),
        (["respond-async", "wait=10"], Preference(10, True)),
        (["wait=3; x=y, handling=lenient"], Preference(3)),
        (["wait=3, wait=9"], Preference(3)),
        (["wait=-1"], Preference()),
        (["wait=1.5"], Preference()),
        (["wait="], Preference()),
        (["wait"], Preference()),
        (["=,;, wait=4"], Preference(4)),
        (["wait=" + "9" * 5000], Preference(999_999_999)),
        (["wait=²"], Preference()),
    ],
)
def test_what_a_client_prefers(lines: list[str], preference: Preference) -> None:
    """9.2-9: integers only; what cannot be read is no wish."""
    assert preference_of(lines) == preference


def test_every_field_line_counts() -> None:
    """9.1-2: whatever the case of its name, and without the blanks around it."""
    headers = [(b"Idempotency-Key", b" a "), (b"other", b"x"), (b"idempotency-key", b"b")]
    assert field_values(headers, "Idempotency-Key") == ["a", "b"]


def test_names_of_exposed_headers_are_header_names() -> None:
    """ROUTE-29"""
    assert all(re.fullmatch(r"[A-Za-z-]+", name) for name in EXPOSED_HEADERS)
    assert {"Idempotent-Replayed", "X-Idempotent-Replayed", "Retry-After", "Location"} <= set(EXPOSED_HEADERS)
