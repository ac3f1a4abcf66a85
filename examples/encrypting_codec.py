"""A payload codec that encrypts with AES-256-GCM, with keys that can be exchanged while old rows stay readable.

    python examples/encrypting_codec.py      # prints what it does

Give the same codec to all that share a database: to ``Durable``, whose workers take it over, and to ``MessageHandlers``.
What it made names its key, so several keys can be read and one is written. Exchanging a key:

1. Add the new key everywhere, ``write`` unchanged. Every process can read it now.
2. Set ``write`` to the new one, everywhere.
3. Remove the old key once nothing is left that it made: after the longest of the ledger's, the chunks' and the runs' retention.

It does not hide how long a payload is, and whoever has the keys and the database reads everything.
"""

import base64
import os
import secrets
from collections.abc import Mapping
from typing import Final, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["EncryptingCodec"]

_FORMAT: Final = 1
_KEY_BYTES: Final = 32
# Drawn at random: 2^32 payloads under one key are safe, so exchange keys before that.
_NONCE_BYTES: Final = 12
_HEAD_BYTES: Final = 2


class EncryptingCodec:
    """``keys``: 32 bytes each, by ids from 0 to 255; ``write``: the id of the one that encrypts. A ``PayloadCodec``."""

    def __init__(self, keys: Mapping[int, bytes], *, write: int) -> None:
        if write not in keys or any(len(key) != _KEY_BYTES or not 0 <= number <= 255 for number, key in keys.items()):
            raise ValueError(f"keys are {_KEY_BYTES} bytes each, by ids from 0 to 255, and the one that writes is among them")
        self._ciphers = {number: AESGCM(key) for number, key in keys.items()}
        self._head = bytes([_FORMAT, write])
        self._cipher = self._ciphers[write]

    @classmethod
    def from_environment(cls, variable: str = "PAYLOAD_KEYS") -> Self:
        """Keys as ``2:BASE64,1:BASE64``; the first one writes."""
        given = [part.partition(":") for part in os.environ[variable].split(",")]
        return cls({int(number): base64.b64decode(key) for number, _, key in given}, write=int(given[0][0]))

    def encode(self, payload: bytes) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        # The head is authenticated as well: a row cannot be made to name another key.
        return self._head + nonce + self._cipher.encrypt(nonce, payload, self._head)

    def decode(self, payload: bytes) -> bytes:
        """Raises ``ValueError`` for what no key of it made, and for what was changed since."""
        head, nonce = payload[:_HEAD_BYTES], payload[_HEAD_BYTES : _HEAD_BYTES + _NONCE_BYTES]
        cipher = self._ciphers.get(head[1]) if len(head) == _HEAD_BYTES and head[0] == _FORMAT else None
        if cipher is None or len(nonce) < _NONCE_BYTES:
            raise ValueError("no key of this codec has made the payload")
        try:
            return cipher.decrypt(nonce, payload[_HEAD_BYTES + _NONCE_BYTES :], head)
        except InvalidTag:
            raise ValueError("the payload was changed, or its key was") from None


if __name__ == "__main__":
    first, second = secrets.token_bytes(_KEY_BYTES), secrets.token_bytes(_KEY_BYTES)
    old = EncryptingCodec({1: first}, write=1)
    new = EncryptingCodec({1: first, 2: second}, write=2)
    row = old.encode(b'{"card": "4111"}')
    print("a row of key", row[1], "is read after the exchange:", new.decode(row).decode())
    print("new rows are of key", new.encode(b"{}")[1])
