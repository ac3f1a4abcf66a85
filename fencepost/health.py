"""/livez, /readyz and /metrics on one port, served by threads, so that a scrape never waits for the event loop.

Liveness: a restart would help. Readiness: what the process needs answers. A refused row is an alert, not unreadiness:
it would block the roll-out of its own fix.
"""

import errno
import json
import threading
from collections.abc import Callable, Iterable
from socket import AF_INET6, gaierror
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from fencepost.errors import ConfigurationError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

__all__ = ["HealthServer", "Problems"]

Problems = Callable[[], list[str]]

_REQUEST_SECONDS: Final = 5
# A stop waits for it.
_POLL_SECONDS: Final = 0.05


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        # The base class asks the resolver for this host's name, which can take long and serves nothing here.
        TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), int(port)
        self.setup_environ()


class _Server6(_Server):
    address_family = AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_SECONDS

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Probes come every few seconds; they are not news."""


class HealthServer:
    """``live`` and ``ready`` return what is wrong, as short texts without secrets; an empty list is well.

    ``prefix`` is that of the settings HTTP_HOST and HTTP_PORT, for a refusal to name them.
    """

    def __init__(self, host: str, port: int, *, prefix: str, registry: CollectorRegistry, live: Problems, ready: Problems) -> None:
        self._metrics = make_wsgi_app(registry)
        self._checks = {"/livez": live, "/readyz": ready}
        try:
            self._server = make_server(
                host, port, self._serve, server_class=_Server6 if ":" in host else _Server, handler_class=_Handler
            )
        except OSError as error:
            raise ConfigurationError(_refusal(prefix, host, port, error)) from error
        self.port = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": _POLL_SECONDS}, name="health", daemon=True
        )
        self._thread.start()

    def _serve(self, environment: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        path = environment["PATH_INFO"]
        if path == "/metrics":
            answer: Iterable[bytes] = self._metrics(environment, start_response)
            return answer
        check = self._checks.get(path)
        if check is None:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"try /livez, /readyz or /metrics\n"]
        problems = check()
        status = "503 Service Unavailable" if problems else "200 OK"
        start_response(status, [("Content-Type", "application/json"), ("Cache-Control", "no-store")])
        return [json.dumps({"status": "failing" if problems else "ok", "problems": problems}).encode() + b"\n"]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _refusal(prefix: str, host: str, port: int, error: OSError) -> str:
    if isinstance(error, gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return (
            f"{prefix}HTTP_HOST: {host} is no address of this machine: {error.strerror}; "
            "take 127.0.0.1 to be reached from this machine only, or 0.0.0.0 to be reached at all of its addresses"
        )
    return (
        f"{prefix}HTTP_HOST, {prefix}HTTP_PORT: cannot listen on {host}:{port}: {error.strerror}; "
        "give each process of a machine a port of its own, from 1024 on (0 picks one)"
    )
