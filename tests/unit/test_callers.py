"""A server of a test leaves no connection open, whenever the test ends."""

import asyncio
import contextlib
import socket

import pytest

from tests.support.callers import Callers


@pytest.mark.parametrize("turns", range(8))
def test_a_connection_is_closed_with_its_server_whenever_that_is(turns: int) -> None:
    """So many turns of the loop after a client has connected, which may be before anybody has heard of it."""

    async def hold(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def until_closed() -> None:
        callers = Callers(hold)
        server = await asyncio.start_server(callers.accept, "127.0.0.1", 0)
        client.connect(server.sockets[0].getsockname())
        for _ in range(turns):
            await asyncio.sleep(0)
        await callers.close(server)
        assert not callers.tasks

    with socket.socket() as client:
        client.settimeout(5)
        asyncio.run(until_closed())
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""


async def test_what_was_written_reaches_the_client_before_its_connection_closes() -> None:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x" * 1_000_000)
        writer.close()

    callers = Callers(answer)
    server = await asyncio.start_server(callers.accept, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    assert len(await reader.read(-1)) == 1_000_000
    writer.close()
    await callers.close(server)
