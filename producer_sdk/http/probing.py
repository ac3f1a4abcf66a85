"""Looks, at start-up, whether a middleware of the application keeps or collects answers: by two requests through its whole stack.

A layer that keeps every 2xx would replay a 202 in place of the result for as long as it remembers; one that collects bodies would
hold a stream back to its end. A list of such middlewares would miss the next one, so what they do is tried. The requests end in the
route class; no dependency and no handler of the application runs.
"""

import asyncio
import re
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID, uuid4

import structlog
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from starlette.types import Message, Scope, Send

from producer_sdk.http.operation import Operation
from producer_sdk.http.routing import PROBE, DurableRoute

if TYPE_CHECKING:
    from producer_sdk.http.durable import Durable

__all__ = ["probe"]

_log = structlog.get_logger(__name__)

_PROBE_SECONDS: Final = 5.0
_FIRST_PIECE_SECONDS: Final = 1.0
_PLACEHOLDER: Final = re.compile(r"\{[^}:]+(?::(?P<convertor>[a-z]+))?\}")
_SAMPLES: Final = {"uuid": str(UUID(int=0)), "float": "0.0"}


async def probe(durable: "Durable", app: FastAPI) -> tuple[frozenset[str], frozenset[str]]:
    """The names of operations whose answers are kept by a middleware, and of those whose answers are collected."""
    cached: set[str] = set()
    collected: set[str] = set()
    for method, path, operation in _routes(durable, app):
        found = await _probed(app, method, path, operation.name)
        if found is None:
            continue
        if found.answered_by_another:
            cached.add(operation.name)
        if not found.in_pieces:
            collected.add(operation.name)
    if cached:
        _log.warning("answers_are_cached", routes=sorted(cached), remedy="pending is answered 409; take the middleware off them")
    if streams := sorted(name for name in collected | cached if durable.operations[name].reply.streams):
        _log.error("streams_are_collected", routes=streams, remedy="take the middleware that collects answers off them")
    return frozenset(cached), frozenset(collected)


def _routes(durable: "Durable", app: FastAPI) -> list[tuple[str, str, Operation]]:
    """Each durable route of the application once, with a path that leads to it."""
    found: list[tuple[str, str, Operation]] = []
    for context in iter_route_contexts(app.routes):
        route = context.original_route
        if not isinstance(route, DurableRoute) or route.operation is None or context.path is None:
            continue
        if durable.operations.get(route.operation.name) is route.operation:
            method = min(context.methods or {"POST"})
            found.append((method, _PLACEHOLDER.sub(_sample, context.path), route.operation))
    return found


def _sample(placeholder: "re.Match[str]") -> str:
    return _SAMPLES.get(placeholder["convertor"] or "", "0")


async def _probed(app: FastAPI, method: str, path: str, name: str) -> "_Probe | None":
    """Two equal requests; None where they did not reach the route, so that nothing is known."""
    first = _Probe(uuid4().hex)
    second = _Probe(first.key)
    for one in (first, second):
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                await app(one.scope(app, method, path), one.receive, one.send)
        except Exception as error:  # noqa: BLE001 - a boundary: a middleware may raise anything at a request that it does not expect
            _log.warning("probe_failed", route=name, error=type(error).__name__)
            return None
        if one is first and not first.reached:
            _log.warning("probe_not_answered", route=name, status=first.status)
            return None
    first.answered_by_another = not second.reached and second.status == first.status
    return first


class _Probe:
    """A request of the probe, and what became of it."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.reached = False
        self.in_pieces = False
        self.answered_by_another = False
        self.status = 0
        self._first_piece = asyncio.Event()
        self._body = [{"type": "http.request", "body": b"{}", "more_body": False}]

    def scope(self, app: FastAPI, method: str, path: str) -> Scope:
        headers = {"host": "localhost", "content-type": "application/json", "content-length": "2", "idempotency-key": self.key}
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(field.encode(), value.encode()) for field, value in headers.items()],
            "client": ("127.0.0.1", 0),
            "server": ("localhost", 80),
            "state": {},
            "app": app,
            PROBE: self._answer,
        }

    async def receive(self) -> Message:
        if self._body:
            return self._body.pop()
        await asyncio.Event().wait()
        raise AssertionError  # the wait has no end but cancellation

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message.get("body"):
            self._first_piece.set()

    async def _answer(self, _operation: Operation, send: Send) -> None:
        """In the route's place: an answer in two pieces, the second of which waits for the first to have gone out."""
        self.reached = True
        start: dict[str, Any] = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
        await send(start)
        await send({"type": "http.response.body", "body": b"{", "more_body": True})
        try:
            async with asyncio.timeout(_FIRST_PIECE_SECONDS):
                await self._first_piece.wait()
            self.in_pieces = True
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b"}"})
