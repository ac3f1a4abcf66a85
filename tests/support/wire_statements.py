"""What a process asks PostgreSQL, statement by statement, as the wire shows it: a proxy that reads along."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from tests.support.callers import Callers

__all__ = ["Wire", "reading_along"]

_CHUNK: Final = 65_536
_NAME: Final = re.compile(r"-- fencepost:(\w+)")


class Wire:
    """``statements``: each in order, by its name if it is Fencepost's, else by its first word."""

    def __init__(self) -> None:
        self.statements: list[str] = []

    def connection(self) -> Callable[[bytes], None]:
        """What takes the bytes that one client sends."""
        buffer, started, prepared = bytearray(), False, dict[bytes, str]()

        def take(data: bytes) -> None:
            nonlocal started
            buffer.extend(data)
            while True:
                head = 1 if started else 0
                if len(buffer) < head + 4:
                    return
                size = int.from_bytes(buffer[head : head + 4], "big")
                if len(buffer) < head + size:
                    return
                kind, body = bytes(buffer[:head]), bytes(buffer[head + 4 : head + size])
                del buffer[: head + size]
                # The first message has no kind; a wish for encryption comes before it and is refused.
                started = started or body[:4] != b"\x04\xd2\x16\x2f"
                self._read(kind, body, prepared)

        return take

    def _read(self, kind: bytes, body: bytes, prepared: dict[bytes, str]) -> None:
        if kind == b"Q":
            self.statements.append(_named(body))
        elif kind == b"P":
            name, _, rest = body.partition(b"\0")
            prepared[name] = _named(rest)
        elif kind == b"B":
            _portal, _, rest = body.partition(b"\0")
            self.statements.append(prepared.get(rest.partition(b"\0")[0], "?"))


def _named(text: bytes) -> str:
    sql = text.partition(b"\0")[0].decode()
    match = _NAME.search(sql)
    return match[1] if match else sql.split()[0].strip(";") if sql.split() else ""


@asynccontextmanager
async def reading_along(database_url: str) -> AsyncIterator[tuple[str, Wire]]:
    """An address that leads to the database, and what is said through it."""
    parts, wire = urlsplit(database_url), Wire()

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, seen: Callable[[bytes], None]) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK):
                seen(data)
                sink.write(data)
                await sink.drain()
        sink.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            await asyncio.gather(pump(reader, inner_writer, wire.connection()), pump(inner_reader, writer, lambda _: None))
        finally:
            inner_writer.transport.abort()

    callers = Callers(serve)
    server = await asyncio.start_server(callers.accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    user, _, _ = parts.netloc.rpartition("@")
    try:
        yield urlunsplit(parts._replace(netloc=f"{user}@127.0.0.1:{port}")), wire
    finally:
        await callers.close(server)
