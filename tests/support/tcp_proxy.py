"""A proxy before the database whose connections can be cut as a network cuts them: without a word to either side."""

import asyncio
import contextlib
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit, urlunsplit

from tests.support.callers import Callers

CHUNK_BYTES = 65_536


class TcpProxy:
    """``async with TcpProxy(database_url) as proxy``; clients use ``proxy.url``."""

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        self._silenced = asyncio.Event()
        self._port = 0
        self._callers = Callers(self._serve)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._callers.accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._callers.close(self._server)

    @property
    def url(self) -> str:
        """The database's address through the proxy."""
        port = self._server.sockets[0].getsockname()[1]
        return urlunsplit(self._parts._replace(netloc=f"{self._parts.username}:{self._parts.password}@127.0.0.1:{port}"))

    async def refuse(self) -> None:
        """As if nobody were there: open connections are cut, new ones are refused."""
        self._port = self._server.sockets[0].getsockname()[1]
        await self._callers.close(self._server)

    async def accept(self) -> None:
        """Let connections through again, at the same address."""
        self._server = await asyncio.start_server(self._callers.accept, "127.0.0.1", self._port)

    def silence(self) -> None:
        """From now on nothing passes through the connections that are open; new ones work."""
        self._silenced.set()
        self._silenced = asyncio.Event()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silenced = self._silenced
        try:
            server_reader, server_writer = await asyncio.open_connection(self._parts.hostname, self._parts.port)
        except OSError:
            return
        pumps = [
            asyncio.create_task(_pump(source, target, silenced))
            for source, target in ((reader, server_writer), (server_reader, writer))
        ]
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)
            server_writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silenced: asyncio.Event) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(CHUNK_BYTES):
            if silenced.is_set():
                await asyncio.Event().wait()
            writer.write(chunk)
            await writer.drain()
    if silenced.is_set():
        await asyncio.Event().wait()
