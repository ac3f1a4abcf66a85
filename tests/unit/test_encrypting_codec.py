"""The example of an encrypting codec: what it made comes back, what was changed does not, and keys can be exchanged."""

import secrets
import sys
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.encrypting_codec import EncryptingCodec
from fencepost.codec import DataKeyCodec
from tests.support.consoles import Console, exchanges

PAGE: Final = Path(__file__).parents[2] / "docs" / "guides" / "encrypting-payloads.md"
FIRST, SECOND = secrets.token_bytes(32), secrets.token_bytes(32)
OLD: Final = EncryptingCodec({1: FIRST}, write=1)
BOTH: Final = EncryptingCodec({1: FIRST, 2: SECOND}, write=2)
NEW: Final = EncryptingCodec({2: SECOND}, write=2)


def data_key() -> bytes:
    wrapped = OLD.new_data_key()
    assert wrapped is not None
    return wrapped


@given(payload=st.binary(max_size=200), place=st.integers(min_value=0), bit=st.integers(min_value=0, max_value=7))
def test_a_changed_payload_is_refused_and_an_unchanged_one_comes_back(payload: bytes, place: int, bit: int) -> None:
    made = OLD.encode(payload)
    changed = bytearray(made)
    changed[place % len(made)] ^= 1 << bit
    assert OLD.decode(made) == payload
    with pytest.raises(ValueError, match=r"no key|changed"):
        BOTH.decode(bytes(changed))


@given(payload=st.binary(max_size=200), place=st.integers(min_value=0), bit=st.integers(min_value=0, max_value=7))
def test_so_is_a_payload_of_a_lineage_and_a_wrapped_key(payload: bytes, place: int, bit: int) -> None:
    wrapped = data_key()
    for made, read in (
        (OLD.with_data_key(wrapped).encode(payload), OLD.with_data_key(wrapped).decode),
        (wrapped, lambda wrapped: OLD.with_data_key(wrapped).encode(b"")),
    ):
        changed = bytearray(made)
        changed[place % len(made)] ^= 1 << bit
        read(made)
        with pytest.raises(ValueError, match=r"no key|changed"):
            read(bytes(changed))


@given(payload=st.binary(max_size=40))
def test_bytes_that_it_did_not_make_are_refused(payload: bytes) -> None:
    for read in (OLD.decode, OLD.with_data_key, OLD.with_data_key(data_key()).decode):
        with pytest.raises(ValueError, match=r"no key|changed"):
            read(payload)


def test_what_is_of_one_lineage_is_read_by_its_key_alone() -> None:
    """And what is of another kind is taken for no other: a wrapped key is no payload, and the service's payload is no lineage's."""
    assert isinstance(OLD, DataKeyCodec)
    one, other = data_key(), data_key()
    row = OLD.with_data_key(one).encode(b"one")
    assert BOTH.with_data_key(one).decode(row) == b"one"
    for read, made in (
        (OLD.with_data_key(other).decode, row), (OLD.decode, row), (OLD.decode, one),
        (OLD.with_data_key(one).decode, OLD.encode(b"one")), (OLD.with_data_key, OLD.encode(bytes(32))), (NEW.with_data_key, one),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"no key|changed"):
            read(made)


def test_without_data_keys_it_reads_those_that_there_are_and_gives_none() -> None:
    first = EncryptingCodec({1: FIRST}, write=1, data_keys=False)
    assert isinstance(first, DataKeyCodec)
    assert first.new_data_key() is None
    wrapped = data_key()
    assert first.with_data_key(wrapped).decode(OLD.with_data_key(wrapped).encode(b"said")) == b"said"


def test_a_data_key_that_was_wrapped_anew_needs_the_old_key_no_more() -> None:
    """SEC-9"""
    wrapped = data_key()
    row = OLD.with_data_key(wrapped).encode(b"old")
    assert NEW.with_data_key(BOTH.rewrapped(wrapped)).decode(row) == b"old"
    with pytest.raises(ValueError, match="no key"):
        NEW.rewrapped(wrapped)


def test_rows_of_an_old_key_are_read_until_it_is_removed() -> None:
    """SEC-9: after a key rotation old and new rows are readable."""
    row = OLD.encode(b"old")
    assert BOTH.decode(row) == b"old"
    assert BOTH.decode(BOTH.encode(b"new")) == NEW.decode(BOTH.encode(b"new")) == b"new"
    with pytest.raises(ValueError, match="no key"):
        NEW.decode(row)
    assert len({OLD.encode(b"same") for _ in range(20)}) == 20


def test_keys_come_from_the_environment_and_wrong_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAYLOAD_KEYS", "2:" + "QUFB" * 10 + "QUE=,1:" + "QkJC" * 10 + "QkI=")
    codec = EncryptingCodec.from_environment()
    assert codec.encode(b"")[1] == 2
    assert codec.decode(EncryptingCodec({1: b"B" * 32}, write=1).encode(b"x")) == b"x"
    for keys, write in (({1: b"short"}, 1), ({1: FIRST}, 2), ({256: FIRST}, 256)):
        with pytest.raises(ValueError, match="32 bytes"):
            EncryptingCodec(keys, write=write)


def test_the_page_s_command_prints_what_it_shows() -> None:
    [exchange] = exchanges(PAGE)
    printed, shown = Console(shown=".venv/bin/python", meant=sys.executable).run(exchange)
    assert printed == shown
