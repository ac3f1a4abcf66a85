"""Reads what is stored through the service's codec, which is the author's: whatever it raises, the reader goes on and is told."""

import structlog

from fencepost.codec import PayloadCodec

__all__ = ["decoded"]

_log = structlog.get_logger(__name__)


def decoded(codec: PayloadCodec, stored: bytes) -> bytes | None:
    """The payload; None, and a line in the log that names the error's class alone, where the codec cannot read it."""
    try:
        return codec.decode(stored)
    except Exception as error:  # noqa: BLE001 - a boundary: a codec raises what its library does, and a message may hold the payload
        _log.error("stored_payload_not_read", error=type(error).__name__)
        return None
