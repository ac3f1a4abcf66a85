"""The readers of server-sent events, in Python and in JavaScript: what a stream says does not depend on how its bytes are cut."""

import base64
import random
import re
from itertools import pairwise
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer_sdk.http.client import Event, EventParser, UnexpectedAnswer
from producer_sdk.http.client.events import MAX_EVENT_CHARACTERS, MAX_RETRY_MS
from tests.support.javascript import run_javascript

#: What comes, the events (type, data, id) that it says, the cursor behind it, and the pause that it asks for.
Vector = tuple[bytes, list[tuple[str, str, str]], str, int | None]
VECTORS: Final[dict[str, Vector]] = {
    "nothing": (b"", [], "", None),
    "a frame": (b"event: progress\ndata: {}\nid: 0.0\n\n", [("progress", "{}", "0.0")], "0.0", None),
    "no type": (b"data: x\n\n", [("message", "x", "")], "", None),
    "an empty type": (b"event\ndata: x\n\n", [("message", "x", "")], "", None),
    "a BOM": (b"\xef\xbb\xbfdata: x\n\n", [("message", "x", "")], "", None),
    "one BOM only": (b"\xef\xbb\xbf\xef\xbb\xbfdata: x\n\n", [], "", None),
    "a BOM later": (b"\ndata: \xef\xbb\xbfx\n\n", [("message", "\ufeffx", "")], "", None),
    "CR": (b"data: a\rid: 1\r\rdata: b\r\r", [("message", "a", "1"), ("message", "b", "1")], "1", None),
    "CRLF": (b"data: a\r\nid: 1\r\n\r\ndata: b\r\n\r\n", [("message", "a", "1"), ("message", "b", "1")], "1", None),
    "mixed": (b"data: a\r\ndata: b\rdata: c\n\r\n", [("message", "a\nb\nc", "")], "", None),
    "CR, CRLF": (b"data: a\r\r\ndata: b\r\n\r", [("message", "a", ""), ("message", "b", "")], "", None),
    "LF CR is two ends": (b"data: a\n\rdata: b\n\n", [("message", "a", ""), ("message", "b", "")], "", None),
    "CRLF LF is two ends": (b"data: a\r\n\ndata: b\r\n\n", [("message", "a", ""), ("message", "b", "")], "", None),
    "other line ends are none": ("data: a\u2028b\u0085c\x0bd\n\n".encode(), [("message", "a\u2028b\x85c\x0bd", "")], "", None),
    "no blank": (b"data:x\ndata:  y\n\n", [("message", "x\n y", "")], "", None),
    "a colon in a value": (b"data: a: b\n\n", [("message", "a: b", "")], "", None),
    "empty data": (b"data\n\ndata:\ndata\n\n", [("message", "", ""), ("message", "\n", "")], "", None),
    "a comment": (b": ping\n\n:data: x\n\ndata: y\n: z\n\n", [("message", "y", "")], "", None),
    "unknown fields": (b"Data: x\n data: x\ndatas: x\ndata: y\n\n", [("message", "y", "")], "", None),
    "an id that stays": (b"id: 7\ndata: a\n\ndata: b\n\n", [("message", "a", "7"), ("message", "b", "7")], "7", None),
    "an empty id": (b"id: 7\ndata: a\n\nid\ndata: b\n\n", [("message", "a", "7"), ("message", "b", "")], "", None),
    "an id with NUL": (b"id: 7\ndata: a\n\nid: 8\0\ndata: b\n\n", [("message", "a", "7"), ("message", "b", "7")], "7", None),
    "an id only": (b"id: 9\n\n", [], "9", None),
    "an event without data": (b"event: result\nid: 3\n\ndata: x\n\n", [("message", "x", "3")], "3", None),
    "an unfinished block": (b"id: 1\ndata: a\n\nid: 2\ndata: b\n", [("message", "a", "1")], "1", None),
    "an unfinished line": (b"id: 1\ndata: a\n\nid: 2\n\nid: 3", [("message", "a", "1")], "2", None),
    "a pause": (b"retry: 1000\n\n", [], "", 1000),
    "a pause without a block": (b"retry:5\n", [], "", 5),
    "no pauses": (b"retry: 1s\nretry: -1\nretry: 1.5\nretry\nretry: \nretry: \xc2\xb2\n\n", [], "", None),
    "a long pause": (b"retry: " + b"9" * 5000 + b"\n\n", [], "", MAX_RETRY_MS),
    "not UTF-8": (b"data: \xff\xe2\x82x\n\n", [("message", "\ufffd\ufffdx", "")], "", None),
    "more than two bytes": ("data: \U0001f600é€\n\n".encode(), [("message", "\U0001f600é€", "")], "", None),
}

#: The JavaScript reader on many streams: pieces of bytes, as base64.
READ: Final = """
return input.map((pieces) => {
  const parser = new durable.EventParser();
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  const events = pieces.flatMap((piece) => parser.feed(decoder.decode(Buffer.from(piece, "base64"), { stream: true })));
  return [events.map((event) => [event.type, event.data, event.lastEventId]), parser.lastEventId, parser.retryMs];
});
"""

Read = tuple[list[tuple[str, str, str]], str, int | None]


def read(pieces: list[bytes]) -> Read:
    parser = EventParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return [(event.type, event.data, event.last_event_id) for event in events], parser.last_event_id, parser.retry_ms


def read_in_javascript(streams: list[list[bytes]]) -> list[Read]:
    encoded = [[base64.b64encode(piece).decode() for piece in pieces] for pieces in streams]
    answers: list[Any] = run_javascript(READ, encoded)
    return [([(kind, data, place) for kind, data, place in events], cursor, pause) for events, cursor, pause in answers]


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    """The stream in pieces, some of them empty."""
    bounds = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[start:end] for start, end in pairwise(bounds)]


def split(stream: bytes) -> list[bytes]:
    return [stream[index : index + 1] for index in range(len(stream))]


@pytest.mark.parametrize("name", VECTORS)
def test_what_a_stream_says(name: str) -> None:
    """STREAM-16"""
    stream, events, cursor, pause = VECTORS[name]
    assert read([stream]) == (events, cursor, pause)
    assert read(split(stream)) == (events, cursor, pause)


def test_the_javascript_reader_says_the_same() -> None:
    """STREAM-16"""
    expected = [(events, cursor, pause) for _, events, cursor, pause in VECTORS.values()]
    assert dict(zip(VECTORS, read_in_javascript([[stream] for stream, *_ in VECTORS.values()]), strict=True)) == dict(
        zip(VECTORS, expected, strict=True)
    )
    assert read_in_javascript([split(stream) for stream, *_ in VECTORS.values()]) == expected


PIECES: Final = [
    b"data", b"id", b"event", b"retry", b":", b": ", b" ", b"\n", b"\r", b"\r\n", b"\n\n", b"\r\r", b"\0", b"x", b"12",
    b"\xef\xbb\xbf",
    "é".encode(), "\u2028".encode(), "\U0001f600".encode(), b"\xff", b"\xf0\x9f",
]  # fmt: skip
STREAMS: Final = st.lists(st.sampled_from(PIECES), max_size=40).map(b"".join)


@given(STREAMS, st.lists(st.integers(0, 1000), max_size=8))
def test_how_the_bytes_are_cut_changes_nothing(stream: bytes, places: list[int]) -> None:
    """STREAM-16"""
    assert read(cut(stream, places)) == read([stream]) == read(split(stream))


@given(STREAMS)
def test_the_reader_is_the_standards(stream: bytes) -> None:
    """9.4-14, 9.4-15: against the standard's algorithm, written as it stands there, on the whole text."""
    assert read([stream]) == by_the_standard(stream)


def by_the_standard(stream: bytes) -> Read:
    text = stream.decode("utf-8", "replace").removeprefix("\ufeff")
    events: list[tuple[str, str, str]] = []
    kind, data, id_buffer, cursor, pause = "", "", "", "", None
    for line in re.split("\r\n|\r|\n", text)[:-1]:
        if line == "":
            cursor = id_buffer
            if data:
                events.append((kind or "message", data.removesuffix("\n"), cursor))
            kind, data = "", ""
            continue
        if line.startswith(":"):
            continue
        name, value = line.split(":", 1) if ":" in line else (line, "")
        value = value.removeprefix(" ")
        if name == "event":
            kind = value
        if name == "data":
            data += value + "\n"
        if name == "id" and "\0" not in value:
            id_buffer = value
        if name == "retry" and re.fullmatch("[0-9]+", value):
            pause = min(int(value), MAX_RETRY_MS)
    return events, cursor, pause


def test_both_readers_agree_on_streams_of_chance() -> None:
    """STREAM-16"""
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    streams = [b"".join(chance.choices(PIECES, k=chance.randrange(40))) for _ in range(2_000)]
    pieces = [cut(stream, [chance.randrange(1000) for _ in range(5)]) for stream in streams]
    for given_pieces, said in zip(pieces, read_in_javascript(pieces), strict=True):
        assert said == read(given_pieces), (seed, given_pieces)


def test_a_reader_goes_on_from_its_cursor() -> None:
    parser = EventParser("0.4")
    assert parser.feed(b"data: x\n\nid: 0.5\ndata: y\n\n") == [Event("message", "x", "0.4"), Event("message", "y", "0.5")]


def test_an_event_that_is_too_long_is_refused_and_many_short_ones_are_not() -> None:
    half = b"data: " + b"x" * (MAX_EVENT_CHARACTERS // 2 - 6)
    assert len(EventParser().feed((half + b"\n\n") * 5)) == 5
    assert len(EventParser().feed(half + b"\n" + half + b"\n\n")) == 1
    for long in (half * 2 + b"x", half + b"\n" + half + b"\nx", b": " + half * 2):
        with pytest.raises(UnexpectedAnswer):
            EventParser().feed(long)


def test_the_javascript_reader_refuses_the_same_length() -> None:
    script = f"""
    const half = "data: " + "x".repeat({MAX_EVENT_CHARACTERS // 2 - 6});
    const tried = (text) => {{
      try {{ return new durable.EventParser().feed(text).length; }} catch (error) {{ return error.name; }}
    }};
    const texts = [(half + "\\n\\n").repeat(5), half + "\\n" + half + "\\n\\n", half + half + "x", half + "\\n" + half + "\\nx"];
    return texts.map(tried);
    """
    assert run_javascript(script, None) == [5, 1, "UnexpectedAnswer", "UnexpectedAnswer"]
