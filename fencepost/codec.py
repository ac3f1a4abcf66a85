"""The one place where payloads are turned into other bytes and back: encryption, compression, a schema registry's framing."""

from typing import Final, Protocol

__all__ = ["PLAIN", "PayloadCodec"]


class PayloadCodec(Protocol):
    """``decode`` is a pure function of the bytes, and raises ``ValueError`` for those that it cannot read; ``encode`` may draw a
    nonce, so one payload may become other bytes each time. What it made must stay readable for as long as it is stored.

    Messages are decoded before they are validated. Inputs, results, failures, checkpoints and chunks of runs, and results of
    effects and steps, are encoded before they are stored, and decoded before anybody gets them again.
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
