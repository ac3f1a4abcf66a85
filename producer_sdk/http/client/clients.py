"""The drivers of a ``Conversation`` on httpx: one for asyncio, one without."""

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing, closing
from dataclasses import dataclass
from json import dumps
from types import TracebackType
from typing import Any, Final, Self

import httpx

from fencepost.clock import lease_clock
from fencepost.errors import FencepostError, InvalidInput
from producer_sdk.http.client.conversation import Again, Conversation, DurableAnswer, Frame, Patience, Result, new_key
from producer_sdk.http.client.events import UnexpectedAnswer

__all__ = ["MAX_ANSWER_BYTES", "AsyncDurableClient", "DurableClient", "NoStream"]

MAX_ANSWER_BYTES: Final = 8_000_000
#: A waiting answer is silent for as long as its route may wait; a stream never for longer than its pings, which are 5 s apart.
_ANSWER_SECONDS: Final = 70.0
_STREAM_SECONDS: Final = 20.0
_CONNECT_SECONDS: Final = 5.0
_LEAST_SECONDS: Final = 1.0
_DEFAULT_PATIENCE: Final = Patience()
_STREAM: Final = "text/event-stream"
_ACCEPT: Final = f"{_STREAM}, application/problem+json"
#: Set by the conversation: a second one would make the request invalid.
_OWN_HEADERS: Final = ("idempotency-key", "last-event-id")
#: The environment's fault. A request that httpx cannot send at all is the caller's, and is raised as it is.
_TRANSIENT: Final = (
    httpx.TimeoutException,
    httpx.NetworkError,
    httpx.RemoteProtocolError,
    httpx.ProxyError,
    httpx.DecodingError,
)


class NoStream(FencepostError):
    """A request for a stream got a final ``answer`` that is none, and no problem of a durable route: a 401, say."""

    def __init__(self, answer: DurableAnswer) -> None:
        super().__init__(f"status {answer.status} in place of a stream")
        self.answer = answer


@dataclass(frozen=True, slots=True)
class _Request:
    """One operation's request: the same bytes each time that it is sent."""

    method: str
    url: str
    body: bytes
    headers: httpx.Headers

    def arguments(self, conversation: Conversation, seconds: float, **more: str) -> dict[str, Any]:
        """Of ``httpx.Client.stream``. ``seconds``: the longest silence."""
        headers = httpx.Headers(self.headers)
        headers.update(conversation.headers() | more)
        silence = max(min(seconds, conversation.remaining_seconds), _LEAST_SECONDS)
        timeout = httpx.Timeout(silence, connect=min(silence, _CONNECT_SECONDS))
        return {"method": self.method, "url": self.url, "content": self.body, "headers": headers, "timeout": timeout}


class AsyncDurableClient:
    """Sends operations to durable routes, and collects their answers whatever happens on the way::

        async with AsyncDurableClient(base_url="https://shop.example") as client:
            answer = await client.send("POST", "/orders", json={"item": "chair"}, key=key)

    ``key``: ``new_key()``, stored beside the operation, so that the operation survives this program too; without one, each call
    is an operation of its own. Other arguments are those of ``httpx.AsyncClient``, but for time-outs, which are set by
    request; or give one as ``client``, which stays yours to close. Redirects are followed only if that client does, and should not
    be: most make a GET of what was sent.
    """

    def __init__(
        self, client: httpx.AsyncClient | None = None, *, patience: Patience = _DEFAULT_PATIENCE, **arguments: Any
    ) -> None:
        self._client = httpx.AsyncClient(**arguments) if client is None else client
        self._owned = client is None
        self._patience = patience

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        if self._owned:
            await self._client.aclose()

    async def send(
        self,
        method: str,
        url: str,
        *,
        key: str | None = None,
        json: object = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> DurableAnswer:
        """Send an operation until it has its answer, which may be one that is none of a durable route (a 401, say).

        Raises ``DurableProblem`` for an operation that ended without a result, ``AnswerNotReady`` when the patience is over, and
        ``UnexpectedAnswer`` for what no durable route answers.
        """
        conversation, request = _begun(self._patience, method, url, key, json, content, headers)
        while True:
            step = await self._answer(conversation, request)
            if isinstance(step, DurableAnswer):
                return step
            await asyncio.sleep(step.seconds)

    async def stream(
        self,
        method: str,
        url: str,
        *,
        key: str | None = None,
        json: object = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[Frame, None]:
        """The operation's frames, each once, across as many requests as it takes; the last is its ``Result``.

        Raises as ``send`` does, and ``NoStream`` for an answer that is none of a durable route. Who leaves before the end closes
        it: ``async with contextlib.aclosing(client.stream(...)) as frames``.
        """
        conversation, request = _begun(self._patience, method, url, key, json, content, headers)
        pause: Again
        while True:
            async with aclosing(self._frames(conversation, request)) as frames:
                async for frame in frames:
                    if isinstance(frame, Again):
                        pause = frame
                        break
                    yield frame
                    if isinstance(frame, Result):
                        return
            await asyncio.sleep(pause.seconds)

    async def _answer(self, conversation: Conversation, request: _Request) -> DurableAnswer | Again:
        try:
            async with self._sent(request.arguments(conversation, _ANSWER_SECONDS)) as response:
                _check_plain(response)
                return conversation.answered(response.status_code, response.headers, await _content(conversation, response))
        except _TRANSIENT as error:
            return conversation.broken(type(error).__name__)

    async def _frames(self, conversation: Conversation, request: _Request) -> AsyncGenerator[Frame | Again, None]:
        """One request's frames; the last is the result, or says when to go on."""
        try:
            async with self._sent(request.arguments(conversation, _STREAM_SECONDS, accept=_ACCEPT)) as response:
                if not _is_stream(response):
                    content = await _content(conversation, response)
                    yield _later(conversation.answered(response.status_code, response.headers, content))
                    return
                conversation.opened()
                async for piece in response.aiter_bytes():
                    for frame in conversation.fed(piece):
                        yield frame
                yield conversation.ended()
        except _TRANSIENT as error:
            yield conversation.broken(type(error).__name__)

    def _sent(self, arguments: Mapping[str, Any]) -> AbstractAsyncContextManager[httpx.Response]:
        return self._client.stream(**arguments)


class DurableClient:
    """``AsyncDurableClient`` for programs without asyncio."""

    def __init__(self, client: httpx.Client | None = None, *, patience: Patience = _DEFAULT_PATIENCE, **arguments: Any) -> None:
        self._client = httpx.Client(**arguments) if client is None else client
        self._owned = client is None
        self._patience = patience

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._owned:
            self._client.close()

    def send(
        self,
        method: str,
        url: str,
        *,
        key: str | None = None,
        json: object = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> DurableAnswer:
        """As ``AsyncDurableClient.send``."""
        conversation, request = _begun(self._patience, method, url, key, json, content, headers)
        while True:
            step = self._answer(conversation, request)
            if isinstance(step, DurableAnswer):
                return step
            time.sleep(step.seconds)

    def stream(
        self,
        method: str,
        url: str,
        *,
        key: str | None = None,
        json: object = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Generator[Frame, None, None]:
        """As ``AsyncDurableClient.stream``; ``contextlib.closing`` is for who leaves before the end."""
        conversation, request = _begun(self._patience, method, url, key, json, content, headers)
        pause: Again
        while True:
            with closing(self._frames(conversation, request)) as frames:
                for frame in frames:
                    if isinstance(frame, Again):
                        pause = frame
                        break
                    yield frame
                    if isinstance(frame, Result):
                        return
            time.sleep(pause.seconds)

    def _answer(self, conversation: Conversation, request: _Request) -> DurableAnswer | Again:
        try:
            with self._sent(request.arguments(conversation, _ANSWER_SECONDS)) as response:
                _check_plain(response)
                return conversation.answered(response.status_code, response.headers, _read(conversation, response))
        except _TRANSIENT as error:
            return conversation.broken(type(error).__name__)

    def _frames(self, conversation: Conversation, request: _Request) -> Generator[Frame | Again, None, None]:
        try:
            with self._sent(request.arguments(conversation, _STREAM_SECONDS, accept=_ACCEPT)) as response:
                if not _is_stream(response):
                    content = _read(conversation, response)
                    yield _later(conversation.answered(response.status_code, response.headers, content))
                    return
                conversation.opened()
                for piece in response.iter_bytes():
                    yield from conversation.fed(piece)
                yield conversation.ended()
        except _TRANSIENT as error:
            yield conversation.broken(type(error).__name__)

    def _sent(self, arguments: Mapping[str, Any]) -> AbstractContextManager[httpx.Response]:
        return self._client.stream(**arguments)


def _begun(
    patience: Patience,
    method: str,
    url: str,
    key: str | None,
    json: object,
    content: bytes | None,
    headers: Mapping[str, str] | None,
) -> tuple[Conversation, _Request]:
    """The operation, with the bytes that every request of it sends: a body made anew might differ, and a key binds its body."""
    if content is not None and json is not None:
        raise InvalidInput("content", "goes with json not given", "give one of them")
    key = new_key() if key is None else key
    if not (key and key.isascii() and key.isprintable()):
        raise InvalidInput("key", "must be printable ASCII", "make one with new_key()")
    own = httpx.Headers(headers)
    for name in _OWN_HEADERS:
        if name in own:
            raise InvalidInput("headers", f"must not hold {name}", "give the key as key; the client keeps the cursor")
    if json is not None:
        content = dumps(json, ensure_ascii=False, allow_nan=False).encode()
        own.setdefault("content-type", "application/json")
    return Conversation(key=key, patience=patience, clock=lease_clock), _Request(method, url, content or b"", own)


def _is_stream(response: httpx.Response) -> bool:
    kind: str = response.headers.get("content-type", "")
    return response.status_code == httpx.codes.OK and kind.lower().startswith(_STREAM)


def _check_plain(response: httpx.Response) -> None:
    if _is_stream(response):
        raise UnexpectedAnswer("the route streams; ask for its frames with stream()")


def _later(step: DurableAnswer | Again) -> Again:
    if isinstance(step, DurableAnswer):
        raise NoStream(step)
    return step


async def _content(conversation: Conversation, response: httpx.Response) -> bytes:
    content = bytearray()
    async for piece in response.aiter_bytes():
        _keep(content, piece, conversation)
    return bytes(content)


def _read(conversation: Conversation, response: httpx.Response) -> bytes:
    content = bytearray()
    for piece in response.iter_bytes():
        _keep(content, piece, conversation)
    return bytes(content)


def _keep(content: bytearray, piece: bytes, conversation: Conversation) -> None:
    content += piece
    conversation.check_patience("the answer does not end")
    if len(content) > MAX_ANSWER_BYTES:
        raise UnexpectedAnswer(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
