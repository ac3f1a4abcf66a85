"""A client that reads one stream from its first chunk to its result."""

import time
from typing import Final

from benchmarks.workers import ready_and_wait, run_worker
from benchmarks.workers.stream_clients import open_stream

_PIECE_BYTES: Final = 2**20


async def stream_drain(kafka: str, port: int, key: str) -> dict[str, float]:
    """Chunks that came, and seconds from the request to the last byte."""
    await ready_and_wait()
    began = time.monotonic()
    reader, writer = await open_stream(port, key)
    chunks, tail = 0, b""
    while b"event: result" not in tail:
        piece = await reader.read(_PIECE_BYTES)
        if not piece:
            raise RuntimeError("the stream ended without its result")
        # What may be cut off is looked at again with the next piece.
        text = tail + piece
        chunks += text.count(b"event: progress") - tail.count(b"event: progress")
        tail = text[-64:]
    seconds = time.monotonic() - began
    writer.close()
    return {"chunks": chunks, "seconds": seconds}


if __name__ == "__main__":
    run_worker(stream_drain)
