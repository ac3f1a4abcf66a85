"""The listening socket of servers that stream, and the end of the process that streams are told of."""

import asyncio
import os
import signal
import socket

import pytest

from fencepost.errors import ConfigurationError
from producer_sdk.http.ending import told_of_the_end
from producer_sdk.http.sockets import listening_socket


def test_connections_of_the_socket_end_with_their_client() -> None:
    """STREAM-8: the option passes on to what is accepted."""
    with listening_socket("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()[:2]):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 4_000


def test_an_address_that_cannot_be_had_is_the_operators() -> None:
    with listening_socket("127.0.0.1", 0) as taken, pytest.raises(ConfigurationError, match="cannot listen on 127"):
        listening_socket("127.0.0.1", taken.getsockname()[1])


async def test_the_end_is_told_and_the_servers_own_handler_hears_it_as_well() -> None:
    """STREAM-21."""
    told, handled = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, handled.set)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with told_of_the_end(told.set):
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(5):
                await asyncio.gather(told.wait(), handled.wait())
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def test_outside_of_the_main_thread_nothing_is_told() -> None:
    def enter() -> None:
        async def inside() -> None:
            with told_of_the_end(lambda: None):
                pass

        asyncio.run(inside())

    await asyncio.to_thread(enter)
