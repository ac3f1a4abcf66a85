"""A small, honest durable route on raw TCP, whose process "dies" between any two bytes of any answer.

One key is one operation, and each key has its own fate, which it spells: ``stream.70`` is the scenario ``stream`` whose first
answer is cut after 70 bytes, ``stream.70.12`` one whose second is cut after 12 as well. The server keeps what it was sent, and
complains of what the contract forbids: another body under a key, a cursor that it has never given. It asks for short pauses.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

from producer_sdk.http import frames
from producer_sdk.http.client import javascript
from producer_sdk.http.problems import MEDIA_TYPE, PROBLEMS, problem_body
from producer_sdk.http.store import CUT_OFFSET, Place
from tests.support.callers import Callers

__all__ = ["AT_ONCE", "COLLECT", "PROMPT", "SCENARIOS", "STREAMS", "ModelRoute", "Operation", "collect_input", "expected"]

BODY_END: Final = b"\r\n\r\n"
RESULT: Final = '{"text":"zwölf €\u2028😀"}'.encode()
#: What the run stores, in order, and how far it has come when its first stream's budget is over.
CHUNKS: Final = (
    (Place(0, 0), b'{"t":"z\xc3\xb6"}'),
    (Place(0, 1), b'"b"'),
    (Place(2, 0), b'{"t":\n"\xf0\x9f\x98\x80"}'),
    (Place(2, 1), b"null"),
    (Place(2, CUT_OFFSET), None),
)
RETRY: Final = frames.RETRY.replace(b"1000", b"10")
PENDING: Final = frames.pending().replace(b"1", b"0")
#: Chunks that are stored when the first stream ends.
FIRST_BUDGET: Final = 3
#: What clients post.
PROMPT: Final = {"prompt": "zwölf", "exact": [1, 2.50, None]}
STREAMS: Final = ("stream", "streamedfailure", "busy")
AT_ONCE: Final = 100
#: The JavaScript client over many keys: ``async (durable, input) => {...}``.
COLLECT: Final = """
const collect = async (key) => {
  const seen = [];
  const options = { json: input.prompt, key };
  try {
    if (!input.streams.includes(key.split(".")[0])) {
      const { status, text, replayed } = await durable.send(input.url, options);
      return [["answer", status, text, replayed]];
    }
    for await (const { type, ...frame } of durable.stream(input.url, options)) {
      delete frame.text;
      seen.push([type, ...Object.values(frame)]);
    }
  } catch (error) {
    if (error.name !== "DurableProblem") throw error;
    seen.push(["problem", error.slug, error.status, error.problem.error_type]);
  }
  return seen;
};
const results = [];
const waiting = input.keys.map((key, index) => [key, index]);
const work = async () => {
  for (let next; (next = waiting.shift()); ) results[next[1]] = await collect(next[0]);
};
await Promise.all(Array.from({ length: input.atOnce }, work));
return results;
"""


@dataclass
class Operation:
    """What a key has seen. ``given``: cursors that the server has sent whole."""

    body: bytes
    requests: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)
    given: set[str] = field(default_factory=set)


class ModelRoute:
    """``async with ModelRoute() as route``; clients post to ``route.url``. A key without a scenario is ``json``.

    ``silent``: it takes requests and answers none. The key ``endless`` is a stream that stays open behind its first chunk; ``left``
    is set once its client has gone."""

    def __init__(self) -> None:
        self.operations: dict[str, Operation] = {}
        self.complaints: list[str] = []
        self.silent = False
        self.left = asyncio.Event()
        self.lengths: dict[str, dict[int, int]] = defaultdict(dict)
        self._callers = Callers(self._serve)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._callers.accept, "127.0.0.1", 0, backlog=1_000)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._callers.close(self._server)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def url(self) -> str:
        return f"{self.address}/answers"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Requests of one connection, until one of its answers is cut."""
        try:
            while await self._serve_one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has left
        writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        method, path, headers = _parsed(await reader.readuntil(BODY_END))
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if method == "GET":
            writer.write(_file(path))
            return True
        key = headers.get("idempotency-key", "")
        answer, given = self._answered(key, headers, body)
        if self.silent:
            await reader.read()  # until the client has left
            return False
        operation = self.operations[key]
        scenario, *cuts = key.split(".")
        number = len(operation.requests) - 1
        self.lengths[scenario][number] = len(answer)
        if number < len(cuts) and int(cuts[number]) < len(answer):
            cut = int(cuts[number])
            operation.given |= {place for place, end in given.items() if end <= cut}
            writer.write(answer[:cut])
            return False
        operation.given |= set(given)
        writer.write(answer)
        if key == "endless":
            await reader.read()
            self.left.set()
            return False
        await writer.drain()
        return True

    def _answered(self, key: str, headers: Mapping[str, str], body: bytes) -> tuple[bytes, dict[str, int]]:
        """The bytes of the answer, and behind which of them each cursor has been given."""
        operation = self.operations.setdefault(key, Operation(body))
        cursor = headers.get("last-event-id", "")
        operation.requests.append((cursor, headers))
        if body != operation.body:
            self.complaints.append(f"{key}: another body")
        if cursor and cursor not in operation.given:
            self.complaints.append(f"{key}: the cursor {cursor} was never given")
        scenario = _endless if key == "endless" else SCENARIOS.get(key.partition(".")[0], _json)
        return scenario(len(operation.requests), cursor)


def _parsed(head: bytes) -> tuple[str, str, dict[str, str]]:
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    method, path, _ = first.split(" ")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        assert name.lower() not in headers, f"{name} was sent twice"
        headers[name.lower()] = value.strip()
    return method, path, headers


def _plain(status: str, body: bytes, *headers: str, kind: str = "application/json") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-type: {kind}", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + BODY_END + body


def _json(_number: int, _cursor: str) -> tuple[bytes, dict[str, int]]:
    return _plain("201 Created", RESULT), {}


def _later(number: int, _cursor: str) -> tuple[bytes, dict[str, int]]:
    """Pending until it has been asked for the third time."""
    if number < 3:
        asked = ("retry-after: 0", "location: /operations/1")
        return _plain("202 Accepted", b'{"state":"pending"}', *asked), {}
    return _plain("201 Created", RESULT, "idempotent-replayed: true"), {}


def _failed(_number: int, _cursor: str) -> tuple[bytes, dict[str, int]]:
    body = problem_body(PROBLEMS["workflow-failed"], status=422, members={"error_type": "OutOfStock"})
    return _plain("422 Unprocessable Content", body, kind=MEDIA_TYPE), {}


def _stream(number: int, cursor: str) -> tuple[bytes, dict[str, int]]:
    """The first stream ends as pending, those that follow with the result."""
    events = _events(cursor, CHUNKS[:FIRST_BUDGET] if number == 1 else CHUNKS)
    return _streamed([*events, ("", PENDING if number == 1 else frames.final("result", RESULT))])


def _streamed_failure(_number: int, cursor: str) -> tuple[bytes, dict[str, int]]:
    body = problem_body(PROBLEMS["workflow-failed"], status=422, members={"error_type": "OutOfStock"})
    return _streamed([*_events(cursor, CHUNKS[:2]), ("", frames.final("problem", body))])


def _endless(_number: int, cursor: str) -> tuple[bytes, dict[str, int]]:
    answer, given = _streamed(_events(cursor, CHUNKS[:1]))
    return answer.removesuffix(b"0\r\n\r\n"), given


def _busy(number: int, cursor: str) -> tuple[bytes, dict[str, int]]:
    """A resume that finds no free slot."""
    return _later(1, cursor) if number == 2 else _stream(number, cursor)


def _events(cursor: str, chunks: Sequence[tuple[Place, bytes | None]]) -> list[tuple[str, bytes]]:
    """What is behind the cursor, each with its id."""
    seen = Place(*map(int, cursor.split("."))) if cursor else Place(0, -1)
    events, attempt = [("", RETRY)], seen.attempt
    for place, data in chunks:
        if place <= seen:
            continue
        if place.attempt > attempt:
            attempt = place.attempt
            events.append(("", frames.attempt(attempt)))
        events.append((f"{place.attempt}.{place.offset}", frames.progress(place, data)))
        events.append(("", frames.PING))
    return events


def _streamed(events: list[tuple[str, bytes]]) -> tuple[bytes, dict[str, int]]:
    """As uvicorn sends a stream: each event is a chunk of the transfer."""
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked" + BODY_END
    given = {}
    for place, event in events:
        answer += b"%x\r\n" % len(event) + event
        if place:
            given[place] = len(answer)
        answer += b"\r\n"
    return answer + b"0\r\n\r\n", given


def _file(path: str) -> bytes:
    """What a browser's test needs of the same origin."""
    if path == "/durable.js":
        return _plain("200 OK", javascript().read_bytes(), kind="text/javascript")
    if path == "/":
        return _plain("200 OK", b"<!doctype html><title>page</title>", kind="text/html")
    return _plain("404 Not Found", b"", kind="text/plain")


SCENARIOS: Final = {
    "json": _json,
    "later": _later,
    "failed": _failed,
    "stream": _stream,
    "streamedfailure": _streamed_failure,
    "busy": _busy,
}


def collect_input(url: str, keys: Sequence[str]) -> dict[str, Any]:
    """Of ``COLLECT``."""
    return {"url": url, "keys": list(keys), "prompt": PROMPT, "streams": STREAMS, "atOnce": AT_ONCE}


def expected(scenario: str) -> list[list[Any]]:
    """What a client of the scenario has to end with: each frame, answer or problem as a list that JSON can hold."""
    problem = ["problem", "workflow-failed", 422, "OutOfStock"]
    match scenario:
        case "json" | "later":
            return [["answer", 201, RESULT.decode(), scenario == "later"]]
        case "failed":
            return [problem]
        case "streamedfailure":
            return [*_seen(CHUNKS[:2]), problem]
    return [*_seen(CHUNKS), ["result", json.loads(RESULT)]]


def _seen(chunks: Sequence[tuple[Place, bytes | None]]) -> list[list[Any]]:
    seen: list[list[Any]] = []
    attempt = 0
    for place, data in chunks:
        if place.attempt > attempt:
            attempt = place.attempt
            seen.append(["attempt", attempt])
        seen.append(["truncated"] if data is None else ["progress", f"{place.attempt}.{place.offset}", json.loads(data)])
    return seen
