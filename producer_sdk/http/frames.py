r"""What a stream sends, as the bytes of Server-Sent Events. Pure.

=========  =======================  ============================================================================
event      id                       data
=========  =======================  ============================================================================
progress   ``<attempt>.<offset>``   a stored chunk, as it was published
truncated  ``<attempt>.<2^63 - 1>`` ``{}``: the stream was cut here, the result holds everything
attempt                             ``{"attempt": n}``: what was shown before begins anew
activity                            a live chunk with its step, attempt and index; not stored
result                              the stored answer; the last frame
problem                             problem details as of RFC 9457, status inside; the last frame
pending                             ``{"retry_after": 1}``: ask again with the last id; the last frame
=========  =======================  ============================================================================

A final frame has an id on a monitor only, where a browser would ask again without one. Whatever the data holds, it cannot end its
line as anything but data: each of its lines is a field of its own, and a reader puts them together again.
"""

import re
from typing import Final

from producer_sdk.http.cursor import end_id, place_id
from producer_sdk.http.store import Place

__all__ = ["PING", "RETRY", "activity", "attempt", "final", "pending", "progress"]

#: A comment: it keeps proxies from taking silence for an end, and reaches no handler.
PING: Final = b": ping\n\n"
#: The first block: how long a reader waits before it asks again, in milliseconds.
RETRY: Final = b"retry: 1000\n\n"

_PENDING_DATA: Final = b'{"retry_after": 1}'
_LINE_END: Final = re.compile(rb"\r\n|\r|\n")


def progress(place: Place, data: bytes | None) -> bytes:
    """A stored chunk; None: the marker of a stream that was cut."""
    if data is None:
        return _frame(b"truncated", b"{}", place_id(place))
    return _frame(b"progress", data, place_id(place))


def attempt(number: int) -> bytes:
    """The reader has to clear what it shows."""
    return _frame(b"attempt", b'{"attempt": %d}' % number)


def activity(data: bytes) -> bytes:
    """A live chunk."""
    return _frame(b"activity", data)


def final(event: str, data: bytes, *, ended_attempt: int | None = None) -> bytes:
    """The last frame, ``result`` or ``problem``. ``ended_attempt``: on a monitor, the stream's attempt."""
    return _frame(event.encode(), data, None if ended_attempt is None else end_id(ended_attempt))


def pending() -> bytes:
    """The last frame of a stream whose run goes on."""
    return _frame(b"pending", _PENDING_DATA)


def _frame(event: bytes, data: bytes, frame_id: str | None = None) -> bytes:
    if b"\n" in data or b"\r" in data:
        data = b"\ndata: ".join(_LINE_END.split(data))
    ending = b"" if frame_id is None else b"id: %b\n" % frame_id.encode()
    return b"event: %b\ndata: %b\n%b\n" % (event, data, ending)
