"""A LISTEN connection that stays: whatever the network does to it, it is up again."""

import asyncio
from typing import Any, Final

import asyncpg
import pytest

from consumer_sdk.run_store import ROLE
from fencepost import listening
from fencepost.listening import Listener
from tests.support.tcp_proxy import TcpProxy

CHANNEL: Final = "fencepost_test"
END_SECONDS: Final = 20.0


async def test_a_network_that_falls_silent_before_it_listens_is_left(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """T5: connected, and no answer to LISTEN. The driver would wait for it without a bound."""
    monkeypatch.setattr(listening, "_CONNECT_SECONDS", 1.0)
    monkeypatch.setattr(listening, "_RECONNECT_SECONDS", 0.0)
    listen = asyncpg.Connection.add_listener
    tries: list[str] = []
    up, heard = asyncio.Event(), asyncio.Event()

    async with TcpProxy(database_url) as proxy:

        async def silent_at_first(connection: Any, channel: str, callback: Any) -> None:
            if not tries:
                proxy.silence()
            tries.append(channel)
            await listen(connection, channel, callback)

        monkeypatch.setattr(asyncpg.Connection, "add_listener", silent_at_first)
        listener = Listener(
            proxy.url,
            role=ROLE,
            heard={CHANNEL: lambda _: heard.set()},
            changed=lambda listens: up.set() if listens else up.clear(),
        )
        running = asyncio.create_task(listener.run())
        try:
            async with asyncio.timeout(END_SECONDS):
                await up.wait()
                assert listener.up
                connection = await asyncpg.connect(database_url)
                await connection.execute(f"NOTIFY {CHANNEL}")
                await connection.close()
                await heard.wait()
        finally:
            running.cancel()
            await asyncio.wait([running])
    assert len(tries) > 1
