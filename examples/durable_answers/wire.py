"""A line between the browser and the server that can be cut: a TCP proxy of a few lines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

__all__ = ["Wire", "open_wire"]

_PIECE_BYTES: Final = 65_536


class Wire:
    """Carries connections on ``url`` to the server's port, until they are cut."""

    def __init__(self, server_port: int) -> None:
        self.url = ""
        self._server_port = server_port
        self._ends: set[asyncio.StreamWriter] = set()

    def cut(self) -> int:
        """Reset every connection, and say how many there were. New ones are carried."""
        lines = len(self._ends) // 2
        for end in self._ends:
            end.transport.abort()
        return lines

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:
            writer.transport.abort()  # nobody is there: as a refused connection, for a browser
            return
        ends = {writer, far_writer}
        self._ends |= ends
        try:
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        finally:
            self._ends -= ends
            for end in ends:
                end.close()


@asynccontextmanager
async def open_wire(server_port: int) -> AsyncIterator[Wire]:
    """A line to the server's port, on a free port of its own."""
    wire = Wire(server_port)
    listener = await asyncio.start_server(wire.carry, "127.0.0.1", 0)
    wire.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield wire
    finally:
        listener.close()
        wire.cut()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    writer.close()
