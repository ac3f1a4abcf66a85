"""Where a partition is read from when it is assigned. Pure."""

from typing import Literal, NamedTuple

__all__ = ["Start", "start_of"]


class Start(NamedTuple):
    """``surprise`` says why it is not where the group has left off."""

    offset: int
    surprise: str | None = None


def start_of(
    *, committed: tuple[int, str] | None, incarnation: str, beginning: int, end: int, reset: Literal["earliest", "latest"]
) -> Start:
    """``committed``: the group's offset and what was kept beside it, which is the topic's id; None if it has none yet.

    An offset of another incarnation of the topic means nothing: all that is there is new. One beyond the end is of a log that was
    cut; what is there may be new, and what was handled is known to the ledger.
    """
    if committed is None:
        return Start(end if reset == "latest" else beginning)
    offset, told = committed
    if told and told != incarnation:
        return Start(beginning, "the topic was made anew")
    if offset > end:
        return Start(beginning, "the offset is beyond the partition's end")
    if offset < beginning:
        return Start(beginning, "messages were deleted before they were handled")
    return Start(offset)
