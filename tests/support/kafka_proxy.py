"""A proxy before one broker that knows just enough of Kafka's framing to lead clients through itself and to hold traffic.

The broker tells clients its own address; the proxy writes its own over it in every answer. Whole frames are forwarded or
none, so a request whose sender went away halfway never reaches the broker.
"""

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from types import TracebackType
from typing import Final, Self

from tests.support.callers import Callers

PRODUCE: Final = 0
SIZE_BYTES: Final = 4
LOCALHOST: Final = "127.0.0.1"
# Small, so that a reader that stands still is felt by the sender soon.
RECEIVE_BUFFER_BYTES: Final = 16_384


class KafkaProxy:
    """``async with KafkaProxy(bootstrap_servers) as proxy``; clients use ``proxy.address``.

    ``reading``: requests are taken from clients. ``sending``: produce requests are passed on. ``answering``: the answers
    to them are passed back, ``answer_seconds`` late. ``welcoming``: a new connection is served. Clear an event to hold that.
    """

    def __init__(self, bootstrap_servers: str) -> None:
        host, _, port = bootstrap_servers.partition(",")[0].rpartition(":")
        self._upstream = host, int(port)
        self.reading, self.sending, self.answering, self.welcoming = (asyncio.Event() for _ in range(4))
        for event in (self.reading, self.sending, self.answering, self.welcoming):
            event.set()
        self.answer_seconds = 0.0
        #: Requests that reached the proxy whole, by API key.
        self.received: Counter[int] = Counter()
        #: Requests passed on to the broker, by API key.
        self.forwarded: Counter[int] = Counter()
        self.connections = 0
        self._callers = Callers(self._accepted)

    async def __aenter__(self) -> Self:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        listener.bind((LOCALHOST, 0))
        self.port: int = listener.getsockname()[1]
        self._server = await asyncio.start_server(self._callers.accept, sock=listener, limit=RECEIVE_BUFFER_BYTES)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._callers.close(self._server)

    @property
    def address(self) -> str:
        """Where clients connect to."""
        return f"{LOCALHOST}:{self.port}"

    @property
    def open_connections(self) -> int:
        """How many clients are connected."""
        return len(self._callers.tasks)

    async def cut(self) -> None:
        """Break every connection that is open now."""
        await self._callers.cut()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError, EOFError):
            await self._serve(reader, writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.welcoming.wait()
        broker_reader, broker_writer = await asyncio.open_connection(*self._upstream)
        produced: set[bytes] = set()
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._requests(reader, broker_writer, produced))
                both.create_task(self._answers(broker_reader, writer, produced))
        except* (OSError, EOFError):
            pass
        finally:
            broker_writer.transport.abort()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, produced: set[bytes]) -> None:
        while True:
            await self.reading.wait()
            size = await reader.readexactly(SIZE_BYTES)
            await self.reading.wait()
            frame = await reader.readexactly(int.from_bytes(size))
            api_key, correlation = int.from_bytes(frame[:2]), frame[4:8]
            self.received[api_key] += 1
            if api_key == PRODUCE:
                produced.add(correlation)
                await self.sending.wait()
            self.forwarded[api_key] += 1
            writer.write(size + frame)
            await writer.drain()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, produced: set[bytes]) -> None:
        host, port = self._upstream
        theirs, ours = (host.encode() + struct.pack(">i", number) for number in (port, self.port))
        while True:
            size = await reader.readexactly(SIZE_BYTES)
            frame = await reader.readexactly(int.from_bytes(size))
            if frame[:4] in produced:
                produced.remove(frame[:4])
                await asyncio.sleep(self.answer_seconds)
                await self.answering.wait()
            writer.write(size + frame.replace(theirs, ours))
            await writer.drain()
