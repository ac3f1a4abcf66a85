"""Asks the payment provider of ``demo.provider``, so that every failure says whether the provider may have charged.

A connection that was refused sent nothing. A status is what it says. Whatever was sent and got no whole answer is ``Ambiguous``.

On asyncio's own streams, since a call that runs out of time must be cancelled before it is sent, not only no longer waited for: a
thread that was frozen would still send it when it wakes up.
"""

import asyncio
import io
import json
import time
from collections.abc import Mapping
from email.message import Message
from http.client import HTTPException, parse_headers
from typing import Any, Final, NamedTuple

from consumer_sdk import Absent, Ambiguous, Applied, Effect

__all__ = ["ProviderClient", "ProviderError"]

_HOST: Final = "127.0.0.1"


class ProviderError(Exception):
    """The provider answered something else than success: ``status`` and ``headers`` say what."""

    def __init__(self, status: int, headers: "Message[str, str]") -> None:
        super().__init__(f"the provider answered {status}")
        self.status = status
        self.headers = headers


class _Answer(NamedTuple):
    status: int
    headers: "Message[str, str]"
    body: bytes

    def json(self) -> Any:
        """Raises ``ProviderError`` for anything but success."""
        if not 200 <= self.status < 300:
            raise ProviderError(self.status, self.headers)
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise Ambiguous("unreadable_answer") from error


class ProviderClient:
    """Each call takes ``timeout_seconds`` at most, and the provider is told not to charge later. A connection for each call."""

    def __init__(self, port: int, *, timeout_seconds: float) -> None:
        self.port = port
        self._timeout_seconds = timeout_seconds

    async def charge(self, effect: Effect, *, order: str, amount: int) -> Applied:
        """Charge the order, under the effect's key."""
        body = json.dumps({"order": order, "amount": amount}).encode()
        headers = {
            "Idempotency-Key": effect.key,
            "Fencing-Token": str(effect.fencing_token),
            "Charge-Before": repr(time.time() + self._timeout_seconds),
        }
        return _applied((await self._ask("POST", "/charges", headers, body)).json())

    async def status(self, key: str) -> dict[str, Any] | None:
        """The charge that was made under ``key``; None if there is none."""
        answer = await self._ask("GET", f"/charges/{key}")
        charge: dict[str, Any] | None = None if answer.status == 404 else answer.json()
        return charge

    async def charge_state(self, effect: Effect) -> Applied | Absent | None:
        """A reconciler of charges: the provider's status endpoint tells."""
        charge = await self.status(effect.key)
        return Absent() if charge is None else _applied(charge)

    async def book(self) -> dict[str, Any]:
        """The provider's whole book, as ``GET /book`` gives it."""
        book: dict[str, Any] = (await self._ask("GET", "/book")).json()
        return book

    async def _ask(self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b"") -> _Answer:
        request = _request(method, path, headers or {}, body)
        async with asyncio.timeout(self._timeout_seconds):
            reader, writer = await asyncio.open_connection(_HOST, self.port)
            try:
                writer.write(request)
                raw = await reader.read()
            except OSError as error:
                raise Ambiguous("connection_lost") from error
            finally:
                writer.close()
        return _parsed(raw)


def _applied(charge: dict[str, Any]) -> Applied:
    try:
        return Applied(charge, reference=charge["charge"])
    except (KeyError, TypeError) as error:
        raise Ambiguous("unreadable_answer") from error


def _request(method: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """A request of HTTP/1.0: the answer ends with the connection."""
    every = {"Host": _HOST, "Content-Length": str(len(body)), **headers}
    lines = [f"{method} {path} HTTP/1.0", *(f"{name}: {value}" for name, value in every.items()), "", ""]
    return "\r\n".join(lines).encode("ascii") + body


def _parsed(raw: bytes) -> _Answer:
    """Raises ``Ambiguous`` for an answer that is missing, or cut off."""
    if not raw:
        raise Ambiguous("connection_lost")
    stream = io.BytesIO(raw)
    try:
        status = int(stream.readline().split()[1])
        headers = parse_headers(stream)
        body = stream.read()
        if len(body) != int(headers["Content-Length"]):
            raise ValueError("the answer was cut off")
    except (HTTPException, ValueError, IndexError, TypeError) as error:
        raise Ambiguous("unreadable_answer") from error
    return _Answer(status, headers, body)
