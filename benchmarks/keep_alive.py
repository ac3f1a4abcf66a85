"""A client of the routes benchmark's server that takes little of the machine: one connection, one request at a time."""

import asyncio
import re
from typing import Final, NamedTuple, Self

__all__ = ["SHOPS", "Answer", "Connection", "request"]

#: So many rows are there for the bare route to read.
SHOPS: Final = 200

# The path of each way to ask, and the headers besides the key. ``bare``: a route without Fencepost.
_WAYS: Final = {
    "bare": ("/bare/{shop}", ""),
    "replay": ("/shops/{shop}/orders", ""),
    "first": ("/shops/{shop}/orders", ""),
    "first_without_wait": ("/shops/{shop}/orders", "prefer: respond-async\r\n"),
}

_LENGTH: Final = re.compile(rb"\r\ncontent-length: (\d+)\r\n")
_RUN: Final = re.compile(rb"\r\nfencepost-run-id: (\S+)\r\n")


class Answer(NamedTuple):
    status: int
    head: bytes
    body: bytes

    @property
    def run_id(self) -> str:
        found = _RUN.search(self.head)
        return found[1].decode() if found else ""

    @property
    def replayed(self) -> bool:
        return b"\r\nidempotent-replayed: true\r\n" in self.head


class Connection:
    """A connection that is kept."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> Self:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, text: bytes, status: int) -> Answer:
        """The answer to a request. Raises ``RuntimeError`` for another status than this."""
        self._writer.write(text)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        answer = Answer(int(head[9:12]), head, await self._reader.readexactly(int(length[1]) if length else 0))
        if answer.status != status:
            raise RuntimeError(f"an answer {answer.status}: {answer.body[:200]!r}")
        return answer

    def close(self) -> None:
        self._writer.close()


def request(way: str, number: int, *, key: str, user: str = "ada", work_seconds: float = 0) -> bytes:
    """A request to create an order. A key belongs to one number, user and ``work_seconds``: they are part of the request."""
    path, headers = _WAYS[way]
    body = f'{{"item":"a book","quantity":2,"work_seconds":{work_seconds:g}}}'
    return (
        f"POST {path.format(shop=number % SHOPS)} HTTP/1.1\r\nhost: bench\r\nx-user: {user}\r\nidempotency-key: {key}\r\n{headers}"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    ).encode()
