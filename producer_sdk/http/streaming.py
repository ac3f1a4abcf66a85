"""Sends the stream of a lineage: its stored chunks in order, then exactly one final frame.

A stream holds no connection while it waits or sends, and at most one page of chunks. It reads the next page when its client has
taken the last one; a client that takes nothing for a minute loses the stream, and by its last id it misses nothing. Whether a
stream opens is decided before its first byte: until then the answer may still be a plain one.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

import structlog
from starlette.types import Receive, Send

from fencepost.codec import PayloadCodec, lineage_codec
from fencepost.errors import TransientError
from producer_sdk.http import frames
from producer_sdk.http.answers import Answer, pending_answer, problem_answer
from producer_sdk.http.live import Live, LiveQueue
from producer_sdk.http.metrics import RouteMetrics
from producer_sdk.http.problems import MEDIA_TYPE
from producer_sdk.http.slots import Slots
from producer_sdk.http.store import LineageKey, Place, RouteStore, Standing
from producer_sdk.http.stream_reader import ChunkPages, StreamReader
from producer_sdk.http.watch import Follower, Watch

__all__ = ["StreamRequest", "Streams"]

_log = structlog.get_logger(__name__)

#: What is stored is sent for so long, however short the budget is.
_DRAIN_SECONDS: Final = 5.0
#: Five seconds are promised; a timer may be late.
_PING_SECONDS: Final = 4.5
#: How long a client may take nothing; and how long while the process is about to end.
_PATIENCE_SECONDS: Final = 60.0
_PATIENCE_AT_THE_END_SECONDS: Final = 5.0
#: How long a request waits for the first word of its lineage.
_OPEN_SECONDS: Final = 5.0
#: How soon what could not be read is read again.
_AGAIN_SECONDS: Final = 0.25
_HEADERS: Final = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-store, private"),
    (b"x-accel-buffering", b"no"),
)
#: Answers of an ended lineage that have nothing to be sent before them.
_WITHOUT_CHUNKS: Final = frozenset({"erased", "result-unavailable", "misconfigured"})


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamRequest:
    """What a client asks for. ``owner``: whose slot it takes. ``cursor``: how far it has read. ``seconds``: its budget; 0 sends
    what is stored and does not wait. ``monitor``: the final frame gets an id, so that a browser does not ask again.

    ``final`` gives the answer of an ended lineage, None if it has gone on meanwhile; it may raise ``TransientError``. ``opened`` is
    called right before the first byte."""

    route: str
    key: LineageKey
    owner: Hashable
    cursor: Place
    seconds: float
    live: bool
    monitor: bool
    headers: Sequence[tuple[bytes, bytes]]
    final: Callable[[Standing], Awaitable[Answer | None]]
    opened: Callable[[], None]


class Streams:
    """The streams of a process."""

    def __init__(
        self, store: RouteStore, watch: Watch, *, slots: Slots, live: Live, codec: PayloadCodec, metrics: RouteMetrics
    ) -> None:
        self._pages = ChunkPages(store)
        self._watch = watch
        self._slots = slots
        self._live = live
        self._codec = codec
        self._metrics = metrics
        self._open: set[_Stream] = set()
        self._closing = False

    def close(self) -> None:
        """End each stream with its `pending` frame, and open no more: the process is about to end."""
        self._closing = True
        for stream in self._open:
            stream.close()

    async def answer(self, request: StreamRequest, receive: Receive, send: Send) -> Answer | None:
        """Send the stream to its end. Where it does not open nothing is sent: then this is the plain answer."""
        with self._slots.take(request.owner) as free:
            if not free or self._closing:
                return pending_answer()
            with self._watch.follow(request.key) as follower, self._kept(_Stream(request, self._watch, follower, send)) as stream:
                try:
                    return await stream.first_look() or await self._send(stream, receive)
                except TransientError as error:
                    _log.warning("stream_not_opened", route=request.route, error=str(error))
                    return pending_answer()

    async def _send(self, stream: "_Stream", receive: Receive) -> Answer | None:
        request, follower = stream.request, stream.follower
        codec = lineage_codec(self._codec, None if follower.standing is None else follower.standing.data_key)
        with self._listening(request, follower, codec) as live:
            reader = StreamReader(
                self._pages,
                self._watch,
                codec,
                follower=follower,
                cursor=request.cursor,
                live=live,
                told=self._metrics.frames,
            )
            if not await reader.open():
                return problem_answer("stream-cursor-gone")
            end = await stream.send_all(reader, receive)
        self._metrics.stream_ended(request.route, end)
        return None

    def _listening(
        self, request: StreamRequest, follower: Follower, codec: PayloadCodec
    ) -> AbstractContextManager[LiveQueue | None]:
        if not request.live:
            return nullcontext()
        self._watch.look(request.key)  # whoever reads for live streams asks workers to send
        return self._live.follow(request.key, follower.heard.set, codec)

    @contextmanager
    def _kept(self, stream: "_Stream") -> "Iterator[_Stream]":
        self._open.add(stream)
        try:
            yield stream
        finally:
            self._open.discard(stream)


class _Stream:
    """One answer on its way to its client."""

    def __init__(self, request: StreamRequest, watch: Watch, follower: Follower, send: Send) -> None:
        self.request = request
        self._watch = watch
        self.follower = follower
        self._asgi_send = send
        self._clock = asyncio.get_running_loop().time
        self._until = self._clock() + request.seconds
        self._drain_until = self._clock() + max(request.seconds, _DRAIN_SECONDS)
        self._ping_at = 0.0
        self._patience: asyncio.Timeout | None = None
        self._closing = False
        self._gone = False
        self._final: tuple[Standing, Answer] | None = None

    def close(self) -> None:
        self._closing = True
        self.follower.heard.set()
        self._hurry(_PATIENCE_AT_THE_END_SECONDS)

    async def first_look(self) -> Answer | None:
        """The answer where there is nothing to stream. Raises ``TransientError``."""
        if not await self.follower.wait(_OPEN_SECONDS):
            return pending_answer()
        standing = self.follower.standing
        if standing is None:
            return problem_answer("result-unavailable")
        answer = await self._final_answer(standing) if standing.ended else None
        return answer if answer is not None and answer.outcome in _WITHOUT_CHUNKS else None

    async def send_all(self, reader: StreamReader, receive: Receive) -> str:
        """How it ended: result, problem, pending, client_gone or slow_client."""
        watcher = asyncio.create_task(self._until_disconnected(receive))
        try:
            self.request.opened()
            await self._asgi_send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, *self.request.headers]})
            await self._write(frames.RETRY)
            return await self._send_frames(reader)
        except TimeoutError:
            if self._gone:
                return "client_gone"
            _log.info("stream_client_too_slow", route=self.request.route)
            return "slow_client"
        except OSError:  # what ASGI servers may raise for a client that has left
            return "client_gone"
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher

    async def _send_frames(self, reader: StreamReader) -> str:
        while not self._gone:
            overdue = self._is_closing or self._clock() >= self._drain_until
            news = [] if overdue else await reader.read()
            if news:
                await self._write(b"".join(news))
            elif (answer := await self._last_answer(reader)) is not None:
                return await self._end(answer, reader)
            elif overdue or self._clock() >= self._until or self.follower.standing is None:
                await self._write(frames.pending(), more=False)
                return "pending"
            else:
                await self._wait(reader)
        return "client_gone"

    async def _last_answer(self, reader: StreamReader) -> Answer | None:
        """What the final frame says, if everything before it has been sent."""
        if reader.unreadable:
            return problem_answer("result-unavailable")
        if not reader.ended or reader.standing is None:
            return None
        try:
            return await self._final_answer(reader.standing)
        except TransientError as error:
            _log.warning("answer_not_read", route=self.request.route, error=str(error))
            return None

    async def _final_answer(self, standing: Standing) -> Answer | None:
        if self._final is not None and self._final[0] is standing:
            return self._final[1]
        answer = await self.request.final(standing)
        if answer is None:
            self._watch.look(self.request.key)
        else:
            self._final = standing, answer
        return answer

    async def _end(self, answer: Answer, reader: StreamReader) -> str:
        event = "problem" if answer.media_type == MEDIA_TYPE else "result"
        ended_attempt = reader.place.attempt if self.request.monitor else None
        await self._write(frames.final(event, answer.body, ended_attempt=ended_attempt), more=False)
        return event

    async def _wait(self, reader: StreamReader) -> None:
        """Until there is news, the next ping is due, or the budget is over."""
        until = min(self._ping_at, self._until)
        if reader.lacks or reader.ended:
            until = min(until, self._clock() + _AGAIN_SECONDS)
        await self.follower.wait(until - self._clock())
        if self._clock() >= self._ping_at:
            await self._write(frames.PING)

    async def _write(self, body: bytes, *, more: bool = True) -> None:
        """Hand bytes to the server, which takes them once the client has made room. Raises ``TimeoutError``."""
        patience = _PATIENCE_AT_THE_END_SECONDS if self._is_closing else _PATIENCE_SECONDS
        try:
            async with asyncio.timeout(patience) as self._patience:
                await self._asgi_send({"type": "http.response.body", "body": body, "more_body": more})
        finally:
            self._patience = None
        self._ping_at = self._clock() + _PING_SECONDS

    async def _until_disconnected(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self.follower.heard.set()
        self._hurry(0)

    @property
    def _is_closing(self) -> bool:
        return self._closing or self.follower.closing

    def _hurry(self, seconds: float) -> None:
        """Let what is being sent wait no longer than that."""
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(min(self._patience.when() or 0.0, self._clock() + seconds))
