"""Clients that hold streams open and note when each chunk came. They end at the signal that starts others."""

import asyncio
import json
import time
from typing import Final

from benchmarks.workers import ready_and_wait, run_worker

__all__ = ["open_stream"]

#: So many requests at once while the streams are opened.
_AT_ONCE: Final = 10
_LINGER_SECONDS: Final = 1.0
_DATA: Final = b'data: {"at":'


async def stream_clients(kafka: str, port: int, streams: int, prefix: str) -> list[float]:
    """Seconds from each chunk's publishing, which it says itself, to its arrival."""
    delays: list[float] = []
    turn = asyncio.Semaphore(_AT_ONCE)
    opened = [await one for one in asyncio.as_completed([_open(turn, port, f"{prefix}{n}") for n in range(streams)])]
    reading = [asyncio.create_task(_read(reader, delays)) for reader, _ in opened]
    await ready_and_wait()
    await asyncio.sleep(_LINGER_SECONDS)
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    for _, writer in opened:
        writer.close()
    return delays


async def open_stream(port: int, key: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a stream; the first thing to read is its first block."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    body = b'{"text":"Hello"}'
    writer.write(
        f"POST /answers HTTP/1.1\r\nhost: bench\r\nx-user: bench\r\nidempotency-key: {key}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"no stream was opened: {head[:200]!r}")
    return reader, writer


async def _open(turn: asyncio.Semaphore, port: int, key: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with turn:
        return await open_stream(port, key)


async def _read(reader: asyncio.StreamReader, delays: list[float]) -> None:
    while line := await reader.readline():
        if line.startswith(_DATA):
            delays.append(time.time() - json.loads(line.removeprefix(b"data: "))["at"])


if __name__ == "__main__":
    run_worker(stream_clients)
