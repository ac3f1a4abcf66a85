"""The one place where payloads are turned into other bytes and back: encryption, compression, a schema registry's framing.

A ``PayloadCodec`` is the service's. One that is a ``DataKeyCodec`` as well has another key for each lineage: once that key is
destroyed, nobody can read what was encoded with it, wherever its bytes are.
"""

from functools import cached_property
from typing import Final, Protocol, runtime_checkable

__all__ = ["MAX_DATA_KEY_BYTES", "PLAIN", "DataKeyCodec", "PayloadCodec", "lineage_codec"]

#: Of a data key as it is stored, wrapped.
MAX_DATA_KEY_BYTES: Final = 4_096


class PayloadCodec(Protocol):
    """``decode`` is a pure function of the bytes, and raises ``ValueError`` for those that it cannot read; ``encode`` may draw a
    nonce, so one payload may become other bytes each time. What it made must stay readable for as long as it is stored.

    Messages are decoded before they are validated, but for events of runs, which Fencepost writes. Inputs, results, failures,
    checkpoints and chunks of runs, and results of effects and steps, are encoded before they are stored, and decoded before anybody
    gets them again.
    """

    def encode(self, payload: bytes) -> bytes: ...

    def decode(self, payload: bytes) -> bytes: ...


@runtime_checkable
class DataKeyCodec(PayloadCodec, Protocol):
    """A codec with a data key for each lineage. Its own ``encode`` and ``decode`` serve what belongs to none: messages, effects of
    messages without a run, and lineages that were accepted before there were data keys."""

    def new_data_key(self) -> bytes | None:
        """A fresh data key, wrapped by a key of the service: 1 to 4,096 bytes, which are stored beside the lineage.

        None: the lineage gets none, as long as there are processes that could not read it.
        """

    def with_data_key(self, wrapped: bytes) -> PayloadCodec:
        """The codec of the one lineage. Raises ``ValueError`` where the data key cannot be unwrapped.

        Called for each claim and for each stream, on the event loop: it must not ask another service.
        """


class _Plain:
    def encode(self, payload: bytes) -> bytes:
        return payload

    def decode(self, payload: bytes) -> bytes:
        return payload


#: Leaves payloads as they are.
PLAIN: Final[PayloadCodec] = _Plain()


def lineage_codec(codec: PayloadCodec, wrapped: bytes | None) -> PayloadCodec:
    """The codec of a lineage with that data key: ``codec`` itself where either of the two knows of none."""
    if wrapped is None or not isinstance(codec, DataKeyCodec):
        return codec
    return _LineageCodec(codec, wrapped)


class _LineageCodec:
    """Unwraps once, at its first use. So a key that cannot be unwrapped is a payload that cannot be read, to whoever reads one."""

    def __init__(self, service: DataKeyCodec, wrapped: bytes) -> None:
        self._service = service
        self._wrapped = wrapped

    def encode(self, payload: bytes) -> bytes:
        return self._unwrapped.encode(payload)

    def decode(self, payload: bytes) -> bytes:
        return self._unwrapped.decode(payload)

    @cached_property
    def _unwrapped(self) -> PayloadCodec:
        try:
            return self._service.with_data_key(self._wrapped)
        except ValueError:
            raise
        except Exception as error:  # noqa: BLE001 - a boundary: a codec is the author's
            # Without its cause: that error may carry the key.
            raise ValueError(f"the data key cannot be unwrapped: {type(error).__name__}") from None
