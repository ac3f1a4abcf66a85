"""Writes the chunks of a worker's executions: batched over runs, repeated while that may help, told apart if refused."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import timedelta
from typing import Final, TypeVar
from uuid import UUID

from consumer_sdk.chunk_store import ChunkBatch, ChunkStore, Part, PlaceTaken, Stream
from consumer_sdk.jobs import Claim, JobKey, Standing
from consumer_sdk.late import Late
from consumer_sdk.live import LiveSender
from consumer_sdk.patience import patiently
from fencepost.batching import Batcher
from fencepost.clock import lease_clock
from fencepost.errors import InvariantViolated, LeaseLost, TransientError

__all__ = ["ChunkWriter"]

_Answer = TypeVar("_Answer")

_MOST_STATEMENT_SECONDS: Final = 10.0
#: What one statement carries; a single run's batch fits in.
MOST_CHUNKS: Final = 500
MOST_BYTES: Final = 2_000_000


class ChunkWriter:
    """One a worker; it opens its connections at first use. Raises ``LeaseLost`` where the fence refused, ``TransientError`` where
    the database was away for as long as a lease lasts.

    ``standing`` says how a job stands whose chunks were refused. ``ring`` is told of the lineages that have new chunks, after the
    commit, and must not block. ``count`` is told of what became of chunks: stored, carried, cut, live_sent, live_dropped.
    """

    def __init__(
        self,
        database_url: str,
        *,
        worker_id: str,
        lease_seconds: float,
        standing: Callable[[JobKey], Awaitable[Standing | None]],
        ring: Callable[[Sequence[UUID]], None],
        count: Callable[[str, int], None],
        pooler: bool = False,
    ) -> None:
        self._database_url = database_url
        self._worker_id = worker_id
        self._lease_seconds = lease_seconds
        self._standing = standing
        self._ring = ring
        self.count = count
        self._pooler = pooler
        self._store = Late(self._open)
        self._batches = Batcher[ChunkBatch, bool](self._store_all)
        self._live = LiveSender(self._send_live, count)

    async def open_stream(self, claim: Claim) -> Stream:
        """How the stream stands, a new attempt opened if its newest holds what will be published anew."""

        async def write() -> Stream | None:
            return await (await self._store.opened()).open_stream(claim)

        stream = await self._fenced("open_stream", claim, write)
        if stream.attempt is not None:
            self._ring([claim.root_run_id])
        return stream

    async def publish(self, batch: ChunkBatch) -> None:
        """Store chunks; those that are stored already are left as they are."""

        async def write() -> bool | None:
            return await self._batches.put(batch) or None

        await self._fenced("publish", batch.claim, write)
        self.count("stored", sum(chunk.data is not None for chunk in batch.chunks))

    async def carry(
        self, claim: Claim, *, attempt: int, next_offset: int, step: str, occurrence: int, part: Part, room: int
    ) -> tuple[int, bool]:
        """Copy a step's chunks to an attempt, at most ``room``: how many, and whether the stream was cut."""

        async def write() -> tuple[int, bool] | None:
            store = await self._store.opened()
            return await store.carry(
                claim, attempt=attempt, next_offset=next_offset, step=step, occurrence=occurrence, part=part, room=room
            )

        carried, cut = await self._fenced("carry", claim, write)
        self.count("carried", carried)
        self._ring([claim.root_run_id])
        return carried, cut

    def emit(self, chunk: str) -> None:
        """Send a live chunk some time soon, or not at all."""
        self._live.send(chunk)

    async def forget(self, retention: timedelta, *, limit: int) -> int:
        """Delete chunks of lineages that ended longer ago than ``retention``; how many."""
        return await (await self._store.opened()).forget(retention, limit=limit)

    async def close(self) -> None:
        """Close the connections, even those that are being opened, and drop the live chunks that are on their way."""
        await self._live.close()
        await self._store.close()

    async def _open(self) -> ChunkStore:
        return await ChunkStore.open(
            self._database_url,
            worker_id=self._worker_id,
            timeout_seconds=min(self._lease_seconds / 3, _MOST_STATEMENT_SECONDS),
            pooler=self._pooler,
        )

    async def _send_live(self, chunks: Sequence[str]) -> bool:
        return await (await self._store.opened()).send_live(chunks)

    async def _fenced(self, what: str, claim: Claim, write: Callable[[], Awaitable[_Answer | None]]) -> _Answer:
        """Write, and again while the database is away or the row is locked, no longer than a lease lasts: the handler is stopped
        by then, and the job is another's."""

        async def once() -> _Answer:
            answer = await write()
            if answer is not None:
                return answer
            standing = await self._standing(claim.key)
            if standing is None or not standing.held or standing.cancel_requested:
                raise LeaseLost(f"{what}: the run is no longer held by this attempt; nothing was changed")
            raise TransientError(f"{what}: the job's row is locked by another transaction")

        return await patiently(once, until=lease_clock() + self._lease_seconds, failed=lambda: None)

    async def _store_all(self, batches: Sequence[ChunkBatch]) -> Sequence[bool]:
        store = await self._store.opened()
        held: list[bool] = []
        for statement in _statements(batches):
            held += await self._store_some(store, statement)
        return held

    async def _store_some(self, store: ChunkStore, batches: Sequence[ChunkBatch]) -> Sequence[bool]:
        repeated = any(batch.sent for batch in batches)
        try:
            places = await store.publish(batches)
        except PlaceTaken as error:
            if repeated:  # the statement that was thought unanswered was still at work
                raise TransientError("publish: the statement before this one has not ended") from error
            raise InvariantViolated("a chunk's place was taken: two executions have numbered one stream") from error
        finally:
            for batch in batches:
                batch.sent = True
        if places:
            self._ring([batches[place].claim.root_run_id for place in sorted(places)])
        return [place in places for place in range(len(batches))]


def _statements(batches: Sequence[ChunkBatch]) -> Iterator[Sequence[ChunkBatch]]:
    """The batches in order, as many at a time as one statement should carry."""
    some: list[ChunkBatch] = []
    chunks = size = 0
    for batch in batches:
        if some and (chunks + len(batch.chunks) > MOST_CHUNKS or size + batch.size > MOST_BYTES):
            yield some
            some, chunks, size = [], 0, 0
        some.append(batch)
        chunks, size = chunks + len(batch.chunks), size + batch.size
    if some:
        yield some
