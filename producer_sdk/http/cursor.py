"""Where a stream is resumed: the Last-Event-ID of a request, read strictly.

``<attempt>.<offset>`` is the id of a stored chunk. ``<attempt>.end`` is that of a final frame on a monitor: there, and nowhere
else, the client says that nothing is left to ask for.
"""

import re
from collections.abc import Sequence
from enum import Enum
from typing import Final, Literal, overload

from producer_sdk.http.problems import Refused
from producer_sdk.http.store import CUT_OFFSET, Place

__all__ = ["START", "Finished", "end_id", "place_id", "read_cursor"]

#: Before the first chunk.
START: Final = Place(0, -1)

_MOST_ATTEMPT: Final = 2**31 - 1
_NUMBER: Final = "(0|[1-9][0-9]{0,18})"
_PLACE: Final = re.compile(rf"{_NUMBER}\.{_NUMBER}", re.ASCII)
_END: Final = re.compile(rf"{_NUMBER}\.end", re.ASCII)


class Finished(Enum):
    """The type of ``FINISHED``, its only member."""

    FINISHED = "finished"


def place_id(place: Place) -> str:
    return f"{place.attempt}.{place.offset}"


def end_id(attempt: int) -> str:
    return f"{attempt}.end"


@overload
def read_cursor(values: Sequence[str], *, on_monitor: Literal[False] = False) -> Place: ...
@overload
def read_cursor(values: Sequence[str], *, on_monitor: Literal[True]) -> Place | Finished: ...
def read_cursor(values: Sequence[str], *, on_monitor: bool = False) -> Place | Finished:
    """The place that a client has read up to, by its Last-Event-ID fields: ``START`` without any. Raises ``Refused``."""
    if not values:
        return START
    if len(values) > 1:
        raise Refused("stream-cursor-invalid")  # which of them the client has read last, nobody knows
    if on_monitor and (end := _END.fullmatch(values[0])) and int(end[1]) <= _MOST_ATTEMPT:
        return Finished.FINISHED
    found = _PLACE.fullmatch(values[0])
    place = Place(int(found[1]), int(found[2])) if found else None
    if place is None or place.attempt > _MOST_ATTEMPT or place.offset > CUT_OFFSET:
        raise Refused("stream-cursor-invalid")
    return place
