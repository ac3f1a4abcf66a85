"""The example of an encrypting codec: what it made comes back, what was changed does not, and keys can be exchanged."""

import secrets
import sys
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.encrypting_codec import EncryptingCodec
from tests.support.consoles import Console, exchanges

PAGE: Final = Path(__file__).parents[2] / "docs" / "guides" / "encrypting-payloads.md"
FIRST, SECOND = secrets.token_bytes(32), secrets.token_bytes(32)
OLD: Final = EncryptingCodec({1: FIRST}, write=1)
BOTH: Final = EncryptingCodec({1: FIRST, 2: SECOND}, write=2)
NEW: Final = EncryptingCodec({2: SECOND}, write=2)


@given(payload=st.binary(max_size=200), place=st.integers(min_value=0), bit=st.integers(min_value=0, max_value=7))
def test_a_changed_payload_is_refused_and_an_unchanged_one_comes_back(payload: bytes, place: int, bit: int) -> None:
    made = OLD.encode(payload)
    changed = bytearray(made)
    changed[place % len(made)] ^= 1 << bit
    assert OLD.decode(made) == payload
    with pytest.raises(ValueError, match=r"no key|changed"):
        BOTH.decode(bytes(changed))


@given(payload=st.binary(max_size=40))
def test_bytes_that_it_did_not_make_are_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"no key|changed"):
        OLD.decode(payload)


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
