"""Reads a stream of server-sent events (WHATWG HTML, 9.2), from bytes that come in any pieces.

A block counts at its blank line: one that the end of the stream cuts off neither shows nor moves the cursor.
"""

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from fencepost.errors import FencepostError

__all__ = ["MAX_EVENT_CHARACTERS", "MAX_RETRY_MS", "Event", "EventParser", "UnexpectedAnswer"]

#: Of one block, before its blank line. The server's longest result has 1,000,000 bytes, and a shaped one 4,000,000.
MAX_EVENT_CHARACTERS: Final = 8_000_000
#: What a longer pause is read as.
MAX_RETRY_MS: Final = 1_000_000_000

_MOST_DIGITS: Final = 9
_LINE_END: Final = re.compile("\r\n|\r|\n")


class UnexpectedAnswer(FencepostError):
    """What answers does not speak as a durable route does: something else stands at that address. Asking again does not help."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event. ``last_event_id``: the cursor once it has been seen, '' for none."""

    type: str
    data: str
    last_event_id: str


class EventParser:
    """``feed`` it bytes, it gives events. ``last_event_id`` is the cursor, ``retry_ms`` the pause that the server asked for."""

    def __init__(self, last_event_id: str = "") -> None:
        self.last_event_id = last_event_id
        self.retry_ms: int | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = False
        self._after_cr = False
        self._line: list[str] = []
        self._clear()

    def feed(self, piece: bytes) -> list[Event]:
        """The events that ``piece`` completes. Raises ``UnexpectedAnswer`` for one that is too long."""
        events: list[Event] = []
        for line in self._lines(self._text(piece)):
            if line:
                self._take(line)
            else:
                events += self._dispatched()
        return events

    def _text(self, piece: bytes) -> str:
        text = self._decoder.decode(piece)
        if text and not self._begun:
            self._begun = True
            return text.removeprefix("\ufeff")
        return text

    def _lines(self, text: str) -> Iterator[str]:
        """The lines that the text ends. A CR ends its line at once; a LF right behind it belongs to the same end."""
        if not text:
            return
        if self._after_cr:
            text = text.removeprefix("\n")
        self._after_cr = text.endswith("\r")
        head, *others = _LINE_END.split(text)
        self._keep(head)
        for other in others:
            line = "".join(self._line)
            self._line = []
            yield line
            self._keep(other)

    def _keep(self, part: str) -> None:
        self._line.append(part)
        self._characters += len(part)
        if self._characters > MAX_EVENT_CHARACTERS:
            raise UnexpectedAnswer(f"an event of the stream has more than {MAX_EVENT_CHARACTERS} characters")

    def _take(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            self._type = value
        elif name == "data":
            self._data.append(value)
        elif name == "id" and "\0" not in value:
            self._id = value
        elif name == "retry" and value.isascii() and value.isdigit():
            self.retry_ms = int(value) if len(value) <= _MOST_DIGITS else MAX_RETRY_MS

    def _dispatched(self) -> list[Event]:
        self.last_event_id = self._id
        events = [Event(self._type or "message", "\n".join(self._data), self._id)] if self._data else []
        self._clear()
        return events

    def _clear(self) -> None:
        self._type, self._data, self._id, self._characters = "", [], self.last_event_id, 0

    # Fields of the block that is being read.
    _type: str
    _data: list[str]
    _id: str
    _characters: int
