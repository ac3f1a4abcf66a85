"""A listening socket whose connections end when their client has vanished.

A client that is cut off the network says nothing. The kernel sends what a stream writes again and again for a quarter of an hour,
and the server believes that the client is there: the slot stays taken. ``TCP_USER_TIMEOUT`` ends the connection as soon as
something has not been acknowledged for that long, and a stream writes every five seconds at least.
"""

import socket
from typing import Final

from fencepost.errors import ConfigurationError

__all__ = ["USER_TIMEOUT_SECONDS", "listening_socket"]

#: With a ping each five seconds, a vanished client is noticed within ten; the kernel looks half a second late.
USER_TIMEOUT_SECONDS: Final = 4.0
_BACKLOG: Final = 2_048


def listening_socket(host: str, port: int, *, user_timeout_seconds: float = USER_TIMEOUT_SECONDS) -> socket.socket:
    """A socket that listens there; port 0 takes a free one. Raises ``ConfigurationError`` where the address cannot be had.

    Give it to the server: ``uvicorn.Server(config).run(sockets=[listening_socket("0.0.0.0", 8000)])``, or its ``fileno()`` as
    uvicorn's ``--fd`` in a process that inherits it. A client that is there but takes nothing for that long is cut as well, which a
    reader that keeps its last id does not mind. Systems without the option get a plain socket.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(user_timeout_seconds * 1000))
    return listener
