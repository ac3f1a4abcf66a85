"""What the Python clients put on the wire, and what they do with connections: on a transport of the test's own, and on raw TCP."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from fencepost.errors import InvalidInput
from producer_sdk.http import frames
from producer_sdk.http.client import (
    AnswerNotReady,
    AsyncDurableClient,
    Chunk,
    DurableAnswer,
    DurableClient,
    DurableProblem,
    Frame,
    NoStream,
    Patience,
    Result,
    UnexpectedAnswer,
    javascript,
)
from producer_sdk.http.client.clients import MAX_ANSWER_BYTES
from producer_sdk.http.problems import MEDIA_TYPE, PROBLEMS, problem_body
from producer_sdk.http.store import Place
from tests.support.model_route import ModelRoute
from tests.support.waiting import eventually

ROOT: Final = Path(__file__).parents[2]
SSE: Final = {"content-type": "text/event-stream"}
STREAM: Final = frames.progress(Place(0, 0), b"1") + frames.final("result", b"2")
Answering = Callable[[httpx.Request], httpx.Response]


class Body(httpx.AsyncByteStream, httpx.SyncByteStream):
    """A body in pieces, that breaks at the end if told to, and knows whether it was closed."""

    def __init__(self, *pieces: bytes, error: type[httpx.HTTPError] | None = None) -> None:
        self.pieces = pieces
        self.error = error
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        yield from self.pieces
        if self.error is not None:
            raise self.error("broke")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.closed = True


class Wire:
    """Both clients over answers that the test gives, one a request."""

    def __init__(self, *answers: httpx.Response | Exception, patience: Patience | None = None) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []
        self.patience = patience or Patience()

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def send(self, kind: str, *arguments: Any, **options: Any) -> DurableAnswer:
        if kind == "asyncio":
            async with AsyncDurableClient(**self._options()) as client:
                return await client.send(*arguments, **options)
        with DurableClient(**self._options()) as plain:
            return await asyncio.to_thread(plain.send, *arguments, **options)

    async def stream(self, kind: str, *arguments: Any, most: int = 1_000, **options: Any) -> list[Frame]:
        seen: list[Frame] = []
        if kind == "asyncio":
            async with (
                AsyncDurableClient(**self._options()) as client,
                aclosing(client.stream(*arguments, **options)) as streamed,
            ):
                async for frame in streamed:
                    seen.append(frame)
                    if len(seen) == most:
                        break
            return seen
        with DurableClient(**self._options()) as plain, closing(plain.stream(*arguments, **options)) as frames_:
            for frame in frames_:
                seen.append(frame)
                if len(seen) == most:
                    break
        return seen

    def _options(self) -> dict[str, Any]:
        return {"transport": httpx.MockTransport(self.answer), "base_url": "http://shop", "patience": self.patience}


@pytest.fixture(params=["asyncio", "plain"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_the_same_bytes_go_out_under_the_same_key_each_time(kind: str) -> None:
    """R15"""
    wire = Wire(httpx.ConnectError("no"), httpx.Response(503), httpx.Response(201, json=7))
    answer = await wire.send(
        kind, "POST", "/orders", json={"item": "Stühle", "n": 1.50}, key="k-1", headers={"Authorization": "B x"}
    )
    assert answer.json() == 7
    assert {(request.method, str(request.url), request.content) for request in wire.requests} == {
        ("POST", "http://shop/orders", '{"item": "Stühle", "n": 1.5}'.encode())
    }
    for request in wire.requests:
        assert request.headers.get_list("idempotency-key") == ["k-1"]
        assert request.headers.get_list("content-type") == ["application/json"]
        assert request.headers["authorization"] == "B x"


async def test_a_call_without_a_key_is_an_operation_of_its_own(kind: str) -> None:
    """R14, R21"""
    wire = Wire(httpx.ConnectError("no"), *(httpx.Response(201) for _ in range(2)))
    answers = [await wire.send(kind, "POST", "/orders", json={}) for _ in range(2)]
    keys = [request.headers["idempotency-key"] for request in wire.requests]
    assert keys[0] == keys[1] == answers[0].key
    assert keys[2] == answers[1].key != keys[0]


@pytest.mark.parametrize(
    ("options", "content_type", "body"),
    [
        ({}, None, b""), ({"content": b"<x/>", "headers": {"content-type": "text/xml"}}, "text/xml", b"<x/>"),
        ({"content": b"null"}, None, b"null"), ({"json": [], "headers": {"Content-Type": "a/b+json"}}, "a/b+json", b"[]"),
    ],
)  # fmt: skip
async def test_what_is_sent(kind: str, options: dict[str, Any], content_type: str | None, body: bytes) -> None:
    wire = Wire(httpx.Response(201))
    await wire.send(kind, "PUT", "/orders/1", **options)
    [request] = wire.requests
    assert (request.method, request.headers.get("content-type"), request.content) == ("PUT", content_type, body)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"json": 1, "content": b"1"}, InvalidInput), ({"key": ""}, InvalidInput), ({"key": "é"}, InvalidInput),
        ({"key": "a\nb"}, InvalidInput), ({"headers": {"idempotency-key": "x"}}, InvalidInput),
        ({"headers": {"Last-Event-ID": "0.1"}}, InvalidInput), ({"json": float("nan")}, ValueError),
    ],
)  # fmt: skip
async def test_what_cannot_be_sent_is_refused_before_the_first_request(
    kind: str, options: dict[str, Any], error: type[Exception]
) -> None:
    wire = Wire()
    with pytest.raises(error):
        await wire.send(kind, "POST", "/orders", **options)
    assert wire.requests == []


@pytest.mark.parametrize(
    "error", [httpx.UnsupportedProtocol("ftp"), httpx.LocalProtocolError("header"), httpx.TooManyRedirects("x")]
)
async def test_a_request_that_can_never_be_sent_is_not_sent_again(kind: str, error: Exception) -> None:
    wire = Wire(error)
    with pytest.raises(type(error)):
        await wire.send(kind, "POST", "/orders", json={})


@pytest.mark.parametrize(
    "error",
    [
        httpx.ConnectError, httpx.ConnectTimeout, httpx.ReadTimeout, httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError,
        httpx.PoolTimeout, httpx.ProxyError, httpx.DecodingError,
    ],
    ids=lambda error: error.__name__,
)  # fmt: skip
async def test_a_connection_that_breaks_anywhere_is_tried_again(kind: str, error: type[httpx.RequestError]) -> None:
    """R15"""
    wire = Wire(error("no"), httpx.Response(201, stream=Body(b"{", error=error)), httpx.Response(201, json={}))
    assert (await wire.send(kind, "POST", "/orders", json={})).content == b"{}"


async def test_the_last_error_is_the_reason_when_the_patience_is_over(kind: str) -> None:
    wire = Wire(*(httpx.ConnectError("no") for _ in range(5)), patience=Patience(timeout_seconds=0.5))
    with pytest.raises(AnswerNotReady, match="ConnectError") as raised:
        await wire.send(kind, "POST", "/orders", json={}, key="k-1")
    assert raised.value.key == "k-1"
    assert 1 < len(wire.requests) < 5


async def test_no_request_may_be_silent_for_longer_than_the_patience(kind: str) -> None:
    wire = Wire(httpx.Response(201), patience=Patience(timeout_seconds=4))
    await wire.send(kind, "POST", "/orders", json={})
    assert 3 < wire.requests[0].extensions["timeout"]["read"] <= 4


async def test_a_redirect_is_an_answer(kind: str) -> None:
    """A 303 that was followed would make its page the operation's result."""
    wire = Wire(httpx.Response(303, headers={"location": "/done"}))
    assert (await wire.send(kind, "POST", "/orders", json={})).status == 303
    assert len(wire.requests) == 1


async def test_a_stream_asks_for_events_and_closes_each_answer(kind: str) -> None:
    bodies = [Body(frames.progress(Place(0, 0), b"1"), error=httpx.ReadError), Body(STREAM)]
    wire = Wire(*(httpx.Response(200, headers=SSE, stream=body) for body in bodies))
    assert await wire.stream(kind, "POST", "/answers", json={}, headers={"accept": "*/*"}) == [Chunk("0.0", 1), Result(2, b"2")]
    assert [request.headers.get_list("last-event-id") for request in wire.requests] == [[], ["0.0"]]
    assert {request.headers["accept"] for request in wire.requests} == {"text/event-stream, application/problem+json"}
    assert [body.closed for body in bodies] == [True, True]


async def test_who_leaves_a_stream_closes_its_connection(kind: str) -> None:
    body = Body(STREAM)
    wire = Wire(httpx.Response(200, headers=SSE, stream=body))
    assert await wire.stream(kind, "POST", "/answers", json={}, most=1) == [Chunk("0.0", 1)]
    assert body.closed


async def test_a_stream_may_get_a_plain_answer(kind: str) -> None:
    """STREAM-22, S21"""
    pending = httpx.Response(202, headers={"retry-after": "0"}, json={"state": "pending"})
    erased = httpx.Response(410, headers={"content-type": MEDIA_TYPE}, content=problem_body(PROBLEMS["erased"]))
    with pytest.raises(DurableProblem, match="410 erased"):
        await Wire(pending, erased).stream(kind, "POST", "/answers", json={})
    with pytest.raises(NoStream) as raised:
        await Wire(httpx.Response(401, content=b"who?")).stream(kind, "POST", "/answers", json={})
    assert (raised.value.answer.status, raised.value.answer.content) == (401, b"who?")


async def test_what_no_durable_route_answers_is_a_typed_error(kind: str) -> None:
    with pytest.raises(UnexpectedAnswer, match="stream"):
        await Wire(httpx.Response(200, headers=SSE, content=STREAM)).send(kind, "POST", "/answers", json={})
    endless = Body(*[b"x" * 1_000_000] * (MAX_ANSWER_BYTES // 1_000_000 + 1))
    with pytest.raises(UnexpectedAnswer, match="bytes"):
        await Wire(httpx.Response(200, stream=endless)).send(kind, "POST", "/orders", json={})
    assert endless.closed


async def test_a_client_that_was_given_stays_its_owners() -> None:
    wire = Wire(httpx.Response(201), httpx.Response(201))
    async with httpx.AsyncClient(transport=httpx.MockTransport(wire.answer), base_url="http://shop") as http:
        async with AsyncDurableClient(http) as client:
            await client.send("POST", "/orders", json={})
        assert not http.is_closed
    with httpx.Client(transport=httpx.MockTransport(wire.answer), base_url="http://shop") as plain:
        with DurableClient(plain) as durable:
            durable.send("POST", "/orders", json={})
        assert not plain.is_closed


async def test_a_program_that_starts_anew_goes_on_with_its_key(tmp_path: Path) -> None:
    """KEY-21: killed before the answer, it sends the same key and the same body; a new operation has a new key."""
    file = tmp_path / "operation.json"
    async with ModelRoute() as route:
        route.silent = True
        program = await started(file, route.url)
        await eventually(lambda: bool(route.operations))
        program.kill()
        await program.wait()
        route.silent = False

        program = await started(file, route.url)
        output, _ = await asyncio.wait_for(program.communicate(), 30)
        assert (program.returncode, output) == (0, b"201\n")
        [(key, operation)] = route.operations.items()
        assert len(operation.requests) == 2

        program = await started(file, route.url)
        await asyncio.wait_for(program.communicate(), 30)
        assert len(route.operations.keys() - {key}) == 1
        assert route.complaints == []


async def started(file: Path, url: str) -> asyncio.subprocess.Process:
    program = ("-m", "tests.support.client_program", str(file), url, "chair")
    return await asyncio.create_subprocess_exec(sys.executable, *program, cwd=ROOT, stdout=asyncio.subprocess.PIPE)


def test_the_javascript_client_is_a_file_to_serve() -> None:
    assert "export async function* stream" in javascript().read_text()
