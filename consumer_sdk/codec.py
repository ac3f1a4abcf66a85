"""The one place where payloads are turned into other bytes and back: encryption, compression, a schema registry's framing."""

from typing import Final, Protocol

__all__ = ["PLAIN", "PayloadCodec"]


class PayloadCodec(Protocol):
    """Both ways must be pure functions of the bytes. ``decode`` raises ``ValueError`` for bytes that it cannot read; what
    ``encode`` made must stay readable for as long as the ledger remembers.

    Messages are decoded before they are validated; results of effects are encoded before they are stored, and decoded before a
    handler gets them again.
    """

    def encode(self, payload: bytes) -> bytes: ...

    def decode(self, payload: bytes) -> bytes: ...


class _Plain:
    def encode(self, payload: bytes) -> bytes:
        return payload

    def decode(self, payload: bytes) -> bytes:
        return payload


#: Leaves payloads as they are.
PLAIN: Final[PayloadCodec] = _Plain()
