"""Sends live chunks to whoever listens: not stored, best effort, and nothing is sent while nobody does.

What comes in while a statement is on its way goes with the next one: a NOTIFY takes a lock of the whole database at its commit, so
there is one for many. A full queue drops what is newest. Nothing here ever delays or fails an execution.
"""

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final

import asyncpg
import structlog

from fencepost.clock import lease_clock
from fencepost.errors import FencepostError

__all__ = ["LiveSender", "live_chunk", "payloads"]

_log = structlog.get_logger(__name__)

#: How much of a process's live chunks may wait.
_MOST_WAITING: Final = 1_000
#: How long it believes that nobody listens. Who begins to listen may miss that much.
_UNHEARD_SECONDS: Final = 0.5
MOST_CHUNK_BYTES: Final = 7_000
# PostgreSQL takes 7,999 bytes, and two are for the brackets.
_MOST_PAYLOAD_BYTES: Final = 7_997


class LiveSender:
    """``notify`` sends payloads and says whether anybody listens; ``count`` is told of live_sent and live_dropped."""

    def __init__(self, notify: Callable[[Sequence[str]], Awaitable[bool]], count: Callable[[str, int], None]) -> None:
        self._notify = notify
        self._count = count
        self._waiting: deque[str] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._unheard_until = 0.0
        self._told = False

    def send(self, chunk: str) -> None:
        """Send a chunk that ``live_chunk`` made some time soon, or not at all."""
        if lease_clock() < self._unheard_until or len(self._waiting) >= _MOST_WAITING:
            self._count("live_dropped", 1)
            return
        self._waiting.append(chunk)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all(), name="live chunks")

    async def close(self) -> None:
        """Drop what waits."""
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait([self._sender])

    async def _send_all(self) -> None:
        while self._waiting:
            chunks, self._waiting = self._waiting, deque()
            listened = await self._sent(payloads(chunks))
            self._count("live_sent" if listened else "live_dropped", len(chunks))
            if not listened:
                self._unheard_until = lease_clock() + _UNHEARD_SECONDS

    async def _sent(self, texts: Sequence[str]) -> bool:
        try:
            return await self._notify(texts)
        except (FencepostError, asyncpg.PostgresError) as error:  # of the latter: the queue of notifications is full
            if not self._told:
                _log.warning("live_chunks_not_sent", error=str(error), consequence="streams show stored chunks only")
                self._told = True
            return False


def live_chunk(envelope: Mapping[str, object], name: str, content: str) -> str:
    """A live chunk as JSON: ``envelope`` says whose it is; ``content``, its JSON, is left out where it is too long."""
    head = json.dumps(envelope, separators=(",", ":"), ensure_ascii=False)[:-1]
    text = f'{head},"{name}":{content}}}'
    fits = len(content.encode()) <= MOST_CHUNK_BYTES and len(text.encode()) <= _MOST_PAYLOAD_BYTES
    return text if fits else f'{head},"truncated":true}}'


def payloads(chunks: Iterable[str]) -> list[str]:
    """JSON arrays of the chunks in order, as few as notifications have room for."""
    arrays: list[list[str]] = []
    size = 0
    for chunk in chunks:
        bytes_of = len(chunk.encode()) + len(",")
        if not arrays or size + bytes_of > _MOST_PAYLOAD_BYTES + len(","):
            arrays.append([])
            size = 0
        arrays[-1].append(chunk)
        size += bytes_of
    return [f"[{','.join(array)}]" for array in arrays]
