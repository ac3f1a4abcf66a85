"""A payload codec that encrypts with AES-256-GCM: a data key for each lineage, wrapped by keys of the service.

    python examples/encrypting_codec.py      # prints what it does

Give the same codec to all that share a database: to ``Durable``, whose workers take it over, and to ``MessageHandlers``. The data
key of a lineage lies beside it in the database, wrapped. Erasing the lineage deletes it, and nobody can read any more what it made:
not in a topic, not in a dump without the keys.

What a key of the service made names it, so several can be read and one is written. Exchanging one:

1. Add the new key everywhere, ``write`` unchanged. Every process can read it now.
2. Set ``write`` to the new one, everywhere.
3. Wrap the data keys anew that the old one wraps: ``rewrapped``. Their payloads stay as they are.
4. Remove the old key once nothing is left that it made itself: after the longest of the ledger's and the dead letters' retention.

It does not hide how long a payload is, and whoever has the keys and the database reads everything that was not erased.
"""

import base64
import os
import secrets
from collections.abc import Mapping
from typing import Final, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["EncryptingCodec"]

# The first byte of what is made: a payload under a key of the service, a data key under one, a payload under a data key.
_OF_SERVICE: Final = 1
_DATA_KEY: Final = 2
_OF_LINEAGE: Final = 3
_KEY_BYTES: Final = 32
# Drawn at random: 2^32 messages under one key are safe, so exchange keys of the service before that.
_NONCE_BYTES: Final = 12


class EncryptingCodec:
    """``keys``: 32 bytes each, by ids from 0 to 255; ``write``: the id of the one that encrypts. ``data_keys`` False: new lineages
    get none, those that have one are read all the same.

    A ``DataKeyCodec``: its own ``encode`` and ``decode`` are for what belongs to no lineage.
    """

    def __init__(self, keys: Mapping[int, bytes], *, write: int, data_keys: bool = True) -> None:
        if write not in keys or any(len(key) != _KEY_BYTES or not 0 <= number <= 255 for number, key in keys.items()):
            raise ValueError(f"keys are {_KEY_BYTES} bytes each, by ids from 0 to 255, and the one that writes is among them")
        self._ciphers = {number: AESGCM(key) for number, key in keys.items()}
        self._write = write
        self._data_keys = data_keys

    @classmethod
    def from_environment(cls, variable: str = "PAYLOAD_KEYS", *, data_keys: bool = True) -> Self:
        """Keys as ``2:BASE64,1:BASE64``; the first one writes."""
        given = [part.partition(":") for part in os.environ[variable].split(",")]
        keys = {int(number): base64.b64decode(key) for number, _, key in given}
        return cls(keys, write=int(given[0][0]), data_keys=data_keys)

    def encode(self, payload: bytes) -> bytes:
        return self._sealed(_OF_SERVICE, payload)

    def decode(self, payload: bytes) -> bytes:
        """Raises ``ValueError`` for what no key of it made, and for what was changed since."""
        return self._opened(_OF_SERVICE, payload)

    def new_data_key(self) -> bytes | None:
        return self._sealed(_DATA_KEY, secrets.token_bytes(_KEY_BYTES)) if self._data_keys else None

    def with_data_key(self, wrapped: bytes) -> "_LineageCodec":
        """Raises ``ValueError`` for what no key of it wrapped."""
        return _LineageCodec(self._opened(_DATA_KEY, wrapped))

    def rewrapped(self, wrapped: bytes) -> bytes:
        """The same data key, wrapped by the key that writes."""
        return self._sealed(_DATA_KEY, self._opened(_DATA_KEY, wrapped))

    def _sealed(self, kind: int, content: bytes) -> bytes:
        return _sealed(self._ciphers[self._write], bytes([kind, self._write]), content)

    def _opened(self, kind: int, made: bytes) -> bytes:
        head = made[:2]
        cipher = self._ciphers.get(head[1]) if len(head) == 2 and head[0] == kind else None
        if cipher is None:
            raise ValueError("no key of this codec has made it")
        return _opened(cipher, head, made)


class _LineageCodec:
    """The codec of one lineage."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def encode(self, payload: bytes) -> bytes:
        return _sealed(self._cipher, bytes([_OF_LINEAGE]), payload)

    def decode(self, payload: bytes) -> bytes:
        """Raises ``ValueError`` for what this lineage's key has not made, and for what was changed since."""
        return _opened(self._cipher, bytes([_OF_LINEAGE]), payload)


def _sealed(cipher: AESGCM, head: bytes, content: bytes) -> bytes:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    # The head is authenticated as well: a row cannot be made to name another key, or to be of another kind.
    return head + nonce + cipher.encrypt(nonce, content, head)


def _opened(cipher: AESGCM, head: bytes, made: bytes) -> bytes:
    nonce, sealed = made[len(head) : len(head) + _NONCE_BYTES], made[len(head) + _NONCE_BYTES :]
    if not made.startswith(head) or len(nonce) < _NONCE_BYTES:
        raise ValueError("no key of this codec has made it")
    try:
        return cipher.decrypt(nonce, sealed, head)
    except InvalidTag:
        raise ValueError("it was changed, or its key was") from None


if __name__ == "__main__":
    first, second = secrets.token_bytes(_KEY_BYTES), secrets.token_bytes(_KEY_BYTES)
    old = EncryptingCodec({1: first}, write=1)
    both = EncryptingCodec({1: first, 2: second}, write=2)
    new = EncryptingCodec({2: second}, write=2)
    data_key, other = old.new_data_key(), old.new_data_key()
    assert data_key is not None
    assert other is not None
    row = old.with_data_key(data_key).encode(b'{"card": "4111"}')
    moved = both.rewrapped(data_key)
    read = new.with_data_key(moved).decode(row).decode()
    print(f"its data key, wrapped by key {data_key[1]} and then by key {moved[1]}, reads the row: {read}")
    try:
        old.with_data_key(other).decode(row)
    except ValueError as error:
        print("another data key does not:", error)
