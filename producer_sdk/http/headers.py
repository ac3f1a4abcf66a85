"""What a durable route reads of a request's headers: the idempotency key, and how long the client wishes to wait. Pure."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from fencepost.errors import KeyInvalid, KeyMissing
from producer_sdk.identity import MAX_KEY_CHARACTERS

__all__ = ["EXPOSED_HEADERS", "KEY_HEADER", "REQUEST_HEADERS", "Preference", "field_values", "parse_key", "preference_of"]

KEY_HEADER: Final = "Idempotency-Key"
#: For a CORS middleware's ``expose_headers``: what a script of another origin must be able to read.
EXPOSED_HEADERS: Final = (
    "Idempotent-Replayed",
    "X-Idempotent-Replayed",
    "Retry-After",
    "Location",
    "Link",
    "Preference-Applied",
    "Fencepost-Run-Id",
)
#: For a CORS middleware's ``allow_headers``: what a script of another origin must be able to send. Authorization is what most
#: applications know their clients by; where it is another header, the application adds that.
REQUEST_HEADERS: Final = (KEY_HEADER, "Last-Event-ID", "Prefer", "Content-Type", "Authorization")

# An RFC 9651 Item that is a String, with parameters, which mean nothing here. Possessive: no text makes it slow.
_BARE_ITEM: Final = r"(?:\"(?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\[\"\\])*+\"|[A-Za-z0-9*:?@._~!$%&'+^`|#/=-]++)"
_QUOTED: Final = re.compile(
    r'"(?P<key>(?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*+)"(?:; *+[a-z*][a-z0-9_.*-]*+(?:=' + _BARE_ITEM + r")?+)*+"
)
_BARE: Final = re.compile(r"[\x21\x23-\x2b\x2d-\x3a\x3c-\x7e]{1,255}")
_ESCAPED: Final = re.compile(r"\\(.)")
_PREFERENCE: Final = re.compile(r'(?P<name>[A-Za-z-]++)\s*+(?:=\s*+"?(?P<value>[^"\s;]*+)"?)?+\s*+(?:;.*)?')
_MOST_DIGITS: Final = 9


@dataclass(frozen=True, slots=True)
class Preference:
    """What ``Prefer`` says (RFC 7240). ``wait_seconds`` None: nothing of waiting."""

    wait_seconds: int | None = None
    respond_async: bool = False


def field_values(headers: Iterable[tuple[bytes, bytes]], name: str) -> list[str]:
    """The value of each field line of the name. A first one that wins silently would hide a second."""
    wanted = name.lower().encode()
    return [value.decode("latin-1").strip(" \t") for field, value in headers if field.lower() == wanted]


def parse_key(lines: Sequence[str]) -> str:
    """The key of a request: the draft's quoted String, or the bare text that most clients send; both spell one key.

    ``lines``: the value of each field line. Raises ``KeyMissing`` and ``KeyInvalid``.
    """
    if not lines:
        raise KeyMissing(f"send an {KEY_HEADER} header that is new for each operation and the same for each retry")
    if len(lines) > 1:
        raise KeyInvalid(f"{KEY_HEADER} is given twice")
    key = _quoted(lines[0]) if lines[0].startswith('"') else _bare(lines[0])
    if key is None or not 1 <= len(key) <= MAX_KEY_CHARACTERS:
        raise KeyInvalid(f"{KEY_HEADER} must be one String of 1 to {MAX_KEY_CHARACTERS} printable ASCII characters")
    return key


def preference_of(lines: Sequence[str]) -> Preference:
    """What the client wishes. What cannot be read is no wish: RFC 7240 lets a server ignore any."""
    wait: int | None = None
    respond_async = False
    for part in ",".join(lines).split(","):
        match = _PREFERENCE.fullmatch(part.strip())
        if match is None:
            continue
        name, value = match["name"].lower(), match["value"] or ""
        if name == "respond-async":
            respond_async = True
        elif name == "wait" and wait is None and value.isascii() and value.isdigit():
            wait = int(value[:_MOST_DIGITS])
    return Preference(wait, respond_async)


def _quoted(text: str) -> str | None:
    match = _QUOTED.fullmatch(text)
    return _ESCAPED.sub(r"\1", match["key"]) if match else None


def _bare(text: str) -> str | None:
    return text if _BARE.fullmatch(text) else None
