"""The bytes of frames: what is inside the data stays inside."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer_sdk.http import frames
from producer_sdk.http.store import CUT_OFFSET, Place


def events_of(body: bytes) -> list[tuple[str, str, str]]:
    """Type, data and last id of each event, as the standard reads them: any line end ends a line, a blank line an event."""
    events: list[tuple[str, str, str]] = []
    kind, data, cursor = "", list[str](), ""
    for line in re.split("\r\n|\r|\n", body.decode()):
        name, _, value = line.partition(":")
        match name:
            case "event":
                kind = value.removeprefix(" ")
            case "data":
                data.append(value.removeprefix(" "))
            case "id":
                cursor = value.removeprefix(" ")
        if not line:
            events += [(kind, "\n".join(data), cursor)] if data else []
            kind, data = "", []
    return events


def test_the_frames_are_these() -> None:
    """T7, S5, S6, S7, S9, S11, S18, 9.4."""
    assert frames.RETRY == b"retry: 1000\n\n"
    assert frames.PING == b": ping\n\n"
    assert frames.progress(Place(0, 4), b'{"token":"world"}') == b'event: progress\ndata: {"token":"world"}\nid: 0.4\n\n'
    assert frames.progress(Place(2, CUT_OFFSET), None) == b"event: truncated\ndata: {}\nid: 2.9223372036854775807\n\n"
    assert frames.attempt(3) == b'event: attempt\ndata: {"attempt": 3}\n\n'
    assert frames.activity(b"1") == b"event: activity\ndata: 1\n\n"
    assert frames.final("result", b'{"answer":"Hello world"}') == b'event: result\ndata: {"answer":"Hello world"}\n\n'
    assert frames.final("problem", b"{}", ended_attempt=4) == b"event: problem\ndata: {}\nid: 4.end\n\n"
    assert frames.pending() == b'event: pending\ndata: {"retry_after": 1}\n\n'


@given(
    data=st.binary(min_size=1, max_size=60).filter(lambda data: data.isascii())
    | st.text("\r\n:id \u2028", min_size=1).map(str.encode)
)
def test_no_data_ends_its_frame_or_becomes_a_field(data: bytes) -> None:
    """STREAM-15: only the kind of a line end is not kept."""
    (event,) = events_of(frames.progress(Place(0, 1), data))
    assert event == ("progress", data.decode().replace("\r\n", "\n").replace("\r", "\n"), "0.1")


@pytest.mark.parametrize(
    "data",
    [b"x\n\nevent: result\ndata: forged\n\n", b"\n\n", b"\r\r\r", b"a\r\nid: 9.9\r\n\r\n"],
    ids=["LF", "blank", "CR", "CRLF"],
)
def test_a_forged_frame_is_text(data: bytes) -> None:
    """STREAM-15."""
    events = events_of(frames.progress(Place(0, 1), data) + frames.final("result", b"1"))
    assert [(kind, cursor) for kind, _, cursor in events] == [("progress", "0.1"), ("result", "0.1")]


def test_only_chunks_move_the_cursor() -> None:
    """S11, S18, STREAM-9, STREAM-17: and on a monitor the end."""
    first = frames.RETRY + frames.progress(Place(0, 0), b"1")
    others = (frames.PING, frames.attempt(1), frames.activity(b"1"), frames.pending(), frames.final("result", b"1"))
    assert {cursor for _, _, cursor in events_of(first + b"".join(others))} == {"0.0"}
    assert events_of(first + frames.final("result", b"1", ended_attempt=1))[-1][2] == "1.end"


def test_the_reference_page_shows_the_bytes_of_a_stream() -> None:
    """R6, T7."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "streams.md").read_text()
    live = b'{"step": "answer", "occurrence": 0, "attempt": 2, "index": 0, "data": "Hel"}'
    stream = (
        frames.RETRY, frames.progress(Place(0, 0), b'{"token":"Hello"}'), frames.PING, frames.attempt(1), frames.activity(live),
        frames.progress(Place(1, 0), b'{"token":"Hello"}'), frames.final("result", b'{"answer":"Hello world"}'),
    )  # fmt: skip
    assert f"```text\n{b''.join(stream).decode()}```" in page
    for other in (frames.pending(), frames.progress(Place(0, CUT_OFFSET), None)):
        event, data = other.decode().split("\n")[:2]
        name, value = event.removeprefix("event: "), data.removeprefix("data: ")
        assert any(line.startswith(f"| `{name}` |") and f"`{value}`" in line for line in page.split("\n")), name
