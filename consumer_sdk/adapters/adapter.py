"""What an adapter is, and how one that an application sets up checks its constants: once, not at each record."""

from collections.abc import Callable
from typing import Final, TypeAlias

from consumer_sdk.message import Message, Record
from fencepost.errors import ConfigurationError
from fencepost.wire import MAX_ATTRIBUTE_BYTES

__all__ = ["Adapter", "check_name", "check_schema_version"]

Adapter: TypeAlias = Callable[[Record], Message[None]]

_VERSIONS_END: Final = 2**31


def check_name(field: str, text: str | None) -> None:
    """Raise ``ConfigurationError`` for a constant that no message could carry; None is one that is not set."""
    if text is not None and ("\0" in text or not 1 <= len(text.encode(errors="replace")) <= MAX_ATTRIBUTE_BYTES):
        raise ConfigurationError(
            f"{field}: must have 1 to {MAX_ATTRIBUTE_BYTES} bytes and no NUL; correct it where the topic is set"
        )


def check_schema_version(version: int) -> None:
    """Raise ``ConfigurationError`` for what is no version of a payload."""
    if not 1 <= version < _VERSIONS_END:
        raise ConfigurationError("schema_version: must be 1 or more; correct it where the topic is set")
