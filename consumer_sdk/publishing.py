"""Publishes the chunks of one execution of a run: gives each its place, and stores them in order.

The holder of the lease is the only one who may, so the places are counted here and have no gaps. At most one statement of an
execution is on its way, and what is not known to be stored is repeated before anything that follows it.
"""

import asyncio
import base64
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from consumer_sdk.chunk_store import CUT_OFFSET, Chunk, ChunkBatch, Part
from consumer_sdk.chunk_writer import MOST_BYTES, MOST_CHUNKS, ChunkWriter
from consumer_sdk.encoding import encoded
from consumer_sdk.jobs import Claim
from consumer_sdk.live import live_chunk
from fencepost.codec import PLAIN, PayloadCodec
from fencepost.errors import InvalidCommand, LeaseLost

__all__ = ["MAX_CHUNK_BYTES", "MOST_STORED", "Publisher"]

MAX_CHUNK_BYTES: Final = 65_536
#: Of a stream attempt. What is published beyond is counted and dropped, and the stream says so.
MOST_STORED: Final = 10_000
# What the table takes: a codec may add to a chunk.
MAX_ENCODED_BYTES: Final = 100_000
_NO_LINE_ENDS: Final = bytes.maketrans(b"\r\n", b"  ")


class _Waiting(NamedTuple):
    """A chunk that has no place yet, and where its publisher waits."""

    step: str
    occurrence: int
    data: bytes
    answer: "asyncio.Future[None]"


class Publisher:
    """The stream of one execution. ``codec``: what chunks are stored through. Safe to use from several tasks: chunks are stored in
    the order of the calls."""

    def __init__(self, claim: Claim, writer: ChunkWriter, codec: PayloadCodec = PLAIN) -> None:
        self._claim = claim
        self._writer = writer
        self._codec = codec
        self._attempt = 0
        self._next = 0
        self._opens = True
        self._cut = False
        self._elsewhere: Mapping[tuple[str, int], Part] = {}
        self._turn = asyncio.Lock()
        self._waiting: deque[_Waiting] = deque()
        self._unfinished: Callable[[], Awaitable[None]] | None = None
        self._is_lost = False
        self._emitted: dict[tuple[str, int], int] = {}

    async def begin(self) -> None:
        """Begin an execution of a run that may have been executed before: before the function is entered, so that readers clear at
        once what will be published anew."""
        stream = await self._writer.open_stream(self._claim)
        if stream.attempt is not None:
            self._attempt, self._next, self._cut, self._opens = stream.attempt, stream.next_offset, stream.cut, False
            self._elsewhere = stream.elsewhere

    async def publish(self, step: str, occurrence: int, chunk: object) -> None:
        """Store a chunk of a step; ``step`` is empty outside of steps. It is stored when this returns.

        Raises ``InvalidCommand`` for what JSON cannot hold and for more than 65,536 bytes, ``LeaseLost``, ``TransientError``.
        """
        data = self._encoded(chunk)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(step, occurrence, data, answer))
        try:
            async with self._turn:
                while not answer.done():
                    await self._store_next()
            answer.result()
        finally:
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # it is raised here already, or nobody waits for it any more

    async def carry(self, step: str, occurrence: int) -> None:
        """Take over what a step has published that ended in an earlier execution. Costs nothing where there is nothing to do."""
        part = self._elsewhere.get((step, occurrence))
        if part is None:
            return
        async with self._turn:
            await self._finish()
            if not self._cut:
                self._unfinished = partial(self._carry, step, occurrence, part)
                await self._finish()

    def emit(self, step: str, occurrence: int, chunk: object) -> None:
        """Send a live chunk. It is not stored, and may be lost. Raises ``InvalidCommand`` for what JSON cannot hold."""
        data = self._encoded(chunk)
        index = self._emitted.get((step, occurrence), 0)
        self._emitted[step, occurrence] = index + 1
        key = self._claim.key
        envelope = {
            "root": str(self._claim.root_run_id), "tenant": key.tenant_id, "step": step, "occurrence": occurrence,
            "attempt": self._claim.attempt, "index": index, "before": [self._attempt, self._next],
        }  # fmt: skip
        if self._codec is PLAIN:
            self._writer.emit(live_chunk(envelope, "data", data.decode()))
        else:
            self._writer.emit(live_chunk(envelope, "encoded", f'"{base64.b64encode(data).decode()}"'))

    def _encoded(self, chunk: object) -> bytes:
        # JSON has line ends between its tokens only, where a space is as good: a stream's frame is a line.
        payload = encoded("chunk", chunk, most=MAX_CHUNK_BYTES).translate(_NO_LINE_ENDS)
        data = self._codec.encode(payload)
        if len(data) > MAX_ENCODED_BYTES:
            raise InvalidCommand("chunk", f"the codec makes {len(data)} bytes of it, more than {MAX_ENCODED_BYTES}", "split it")
        return data

    async def _store_next(self) -> None:
        """Store what waits, as much as one statement carries. Whatever is raised is raised for all that it concerns."""
        await self._finish()
        if self._cut:
            self._drop_waiting()
            return
        await asyncio.sleep(0)  # whoever publishes in this turn of the loop goes along
        self._unfinished = self._taken()
        await self._finish()

    async def _finish(self) -> None:
        """What was begun is done first: it has its places, whether or not anybody still waits for it."""
        if self._is_lost:
            raise LeaseLost("the run is no longer held by this attempt; nothing was changed")
        if self._unfinished is not None:
            try:
                await self._unfinished()
            except LeaseLost:
                self._is_lost = True
                raise
            self._unfinished = None

    def _taken(self) -> Callable[[], Awaitable[None]]:
        """Give places to chunks that wait: what stores them."""
        chunks: list[Chunk] = []
        answers: list[asyncio.Future[None]] = []
        size, cuts = 0, False
        while self._waiting and len(chunks) < MOST_CHUNKS and size < MOST_BYTES - MAX_ENCODED_BYTES and not cuts:
            step, occurrence, data, answer = self._waiting.popleft()
            if answer.done():
                continue
            offset = self._next + len(chunks)
            cuts = offset >= MOST_STORED
            chunks.append(Chunk(CUT_OFFSET, step, occurrence, None) if cuts else Chunk(offset, step, occurrence, data))
            answers.append(answer)
            size += len(data)
        batch = ChunkBatch(claim=self._claim, attempt=self._attempt, opens=self._opens, chunks=chunks)
        return partial(self._store, batch, answers, cuts)

    async def _store(self, batch: ChunkBatch, answers: "Sequence[asyncio.Future[None]]", cuts: bool) -> None:
        try:
            await self._writer.publish(batch)
        except Exception as error:
            for answer in answers:
                if not answer.done():
                    answer.set_exception(error)
            raise
        self._opens, self._cut = False, cuts
        self._next += len(batch.chunks) - cuts
        if cuts:
            self._writer.count("cut", 1)
        for answer in answers:
            if not answer.done():
                answer.set_result(None)

    async def _carry(self, step: str, occurrence: int, part: Part) -> None:
        carried, self._cut = await self._writer.carry(
            self._claim, attempt=self._attempt, next_offset=self._next, step=step, occurrence=occurrence, part=part,
            room=MOST_STORED - self._next,
        )  # fmt: skip
        self._next += carried

    def _drop_waiting(self) -> None:
        self._writer.count("cut", len(self._waiting))
        while self._waiting:
            answer = self._waiting.popleft().answer
            if not answer.done():
                answer.set_result(None)
