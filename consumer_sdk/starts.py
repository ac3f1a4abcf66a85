"""Where a partition is read from when it is assigned, and what is said beside an offset that is committed. Pure.

Beside each offset stands the topic's id, since offsets mean nothing in another incarnation of the topic, and whether the partition
was still held, and by which process: after one that did not let go of it, its messages are handled with care, since one may have
been the reason.
"""

from typing import Final, Literal, NamedTuple

__all__ = ["Start", "note_of", "start_of"]

_HELD: Final = "held"
_LEFT: Final = "left"


class Start(NamedTuple):
    """``unclean``: whoever had the partition has not let go of it. ``surprise`` says why it is not where the group has left off.
    ``end``: what is there by now ends before this offset."""

    offset: int
    unclean: bool = False
    surprise: str | None = None
    end: int = 0


def note_of(incarnation: str, *, held_by: str | None) -> str:
    """What is committed beside an offset. ``held_by``: the process that holds the partition, with no blanks; "" is one that has
    ended; None: it is let go of."""
    if held_by is None:
        return f"{incarnation} {_LEFT}"
    return f"{incarnation} {_HELD} {held_by}".rstrip()


def start_of(
    *,
    committed: tuple[int, str] | None,
    incarnation: str,
    beginning: int,
    end: int,
    reset: Literal["earliest", "latest"],
    process: str,
) -> Start:
    """``committed``: the group's offset and what was kept beside it; None if it has none yet. ``process``: who asks, which has not
    ended if it held the partition itself.

    Where the topic was made anew, all that is there is new. An offset beyond the end is of a log that was cut: what is there may
    be new, and what was handled is known to the ledger. A note of another's making says nothing.
    """
    if committed is None:
        return Start(end if reset == "latest" else beginning, end=end)
    offset, note = committed
    told, _, rest = note.partition(" ")
    state, _, holder = rest.partition(" ")
    if state in {_HELD, _LEFT} and told != incarnation:
        return Start(beginning, surprise="the topic was made anew", end=end)
    unclean = state == _HELD and holder != process
    if offset > end:
        return Start(beginning, unclean, "the offset is beyond the partition's end", end)
    if offset < beginning:
        return Start(beginning, unclean, "messages were deleted before they were handled", end)
    return Start(offset, unclean, end=end)
