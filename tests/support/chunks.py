"""Streams as tests arrange them: executions that publish through the worker's own writer, and a reader with a cursor."""

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import asyncpg

from consumer_sdk.chunk_store import CHUNK_STATEMENTS, CUT_OFFSET, ChunkStore
from consumer_sdk.chunk_writer import ChunkWriter
from consumer_sdk.jobs import Claim
from consumer_sdk.publishing import Publisher
from consumer_sdk.run_store import ROLE
from fencepost.codec import PLAIN, PayloadCodec
from fencepost.database import StatementPool
from tests.support.jobs import Crew, Hand

__all__ = ["CUT", "Execution", "Frame", "Gate", "Reader", "Streams", "gathered"]

#: Stands for the mark of a cut stream.
CUT: Final = "(cut)"
_RECORD: Final = """
INSERT INTO fencepost.effects (run_key, tenant_id, iteration, step, occurrence, operation, state, run_id, run_generation, holder,
                               fingerprint, fingerprint_version, provider_key, finished_at)
VALUES ($1::uuid::text, $2, $3, $4, $5, 'fencepost.step', 'succeeded', $6, $7, 'test', sha256('x'), 1, '', clock_timestamp())
"""
_READ: Final = 'SELECT attempt, "offset", data FROM fencepost.read_chunks($1, $2, $3, $4, $5, 1000000000) ORDER BY 1, 2'


# Whoever stores a chunk has the job's row locked by then, and waits here for as long as a test holds the lock.
_GATE: Final = """
CREATE FUNCTION public.gate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NEW; END $$;
CREATE TRIGGER gate BEFORE INSERT ON fencepost.chunks FOR EACH ROW EXECUTE FUNCTION public.gate();
"""


class Gate:
    """Closed while a test holds it: a chunk on its way waits in its statement."""

    def __init__(self, connection: "asyncpg.Connection[Any]") -> None:
        self._connection = connection

    async def open(self) -> None:
        await self._connection.execute("SELECT pg_advisory_unlock(1)")


class Frame(NamedTuple):
    """A chunk as its reader sees it."""

    attempt: int
    offset: int
    chunk: object


class Execution:
    """One claimed execution of a run."""

    def __init__(self, streams: "Streams", hand: Hand, claim: Claim, publisher: Publisher) -> None:
        self.streams = streams
        self.hand = hand
        self.claim = claim
        self.publisher = publisher

    async def publish(self, *chunks: object, step: str = "", occurrence: int = 0) -> None:
        for chunk in chunks:
            await self.publisher.publish(step, occurrence, chunk)

    async def record(self, step: str, occurrence: int = 0) -> None:
        """Keep the step's result, as its return does."""
        claim = self.claim
        await self.streams.database.execute(
            _RECORD,
            claim.root_run_id,
            claim.key.tenant_id,
            claim.iteration,
            step,
            occurrence,
            claim.key.run_id,
            claim.key.generation,
        )

    async def fail(self) -> None:
        """End the attempt; the next one is ready at once."""
        assert await self.hand.settle(self.claim.key, delay_seconds=0) is not None

    async def lose(self) -> None:
        """The lease runs out unnoticed."""
        await self.streams.crew.runs.expire_lease(self.claim.key.run_id)

    async def complete(self) -> None:
        assert await self.hand.complete(self.claim.key)


class Reader:
    """A client's cursor in one lineage's stream."""

    def __init__(self, database: "asyncpg.Connection[Any]", root_run_id: uuid.UUID, tenant_id: str = "acme") -> None:
        self._database = database
        self._root = root_run_id
        self._tenant = tenant_id
        self.place = (0, -1)

    async def read(self, most: int = 100_000) -> list[Frame]:
        """What follows the last frame that was read."""
        attempt, offset = self.place
        rows = await self._database.fetch(_READ, [self._root], [self._tenant], [attempt], [offset], most)
        frames = [_frame(row) for row in rows]
        if frames:
            self.place = (frames[-1].attempt, frames[-1].offset)
        return frames


class Streams:
    """Everybody who has to do with streams on one database."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.database = crew.database
        self.counted: Counter[str] = Counter()
        self.rung: list[uuid.UUID] = []
        self._writers: dict[str, ChunkWriter] = {}
        self._hands: dict[str, Hand] = {}

    @staticmethod
    @asynccontextmanager
    async def on(database_url: str) -> AsyncIterator["Streams"]:
        async with Crew.on(database_url) as crew:
            streams = Streams(crew)
            try:
                yield streams
            finally:
                for writer in streams._writers.values():
                    await writer.close()

    async def hand(self, worker_id: str = "A") -> Hand:
        if worker_id not in self._hands:
            self._hands[worker_id] = await self.crew.hand(worker_id)
        return self._hands[worker_id]

    async def writer(
        self, worker_id: str = "A", *, lease_seconds: float = 30.0, pooler: bool = False, url: str | None = None
    ) -> ChunkWriter:
        """A worker's, made once. ``url``: as another user."""
        if worker_id not in self._writers:
            hand = await self.hand(worker_id)
            self._writers[worker_id] = ChunkWriter(
                url or self.crew.url,
                worker_id=worker_id,
                lease_seconds=lease_seconds,
                standing=hand.store.standing,
                ring=self.rung.extend,
                count=self._count,
                pooler=pooler,
            )
        return self._writers[worker_id]

    async def alter(self, statement: str, right: str, wrong: str, *, worker_id: str = "A", lease_seconds: float = 30.0) -> None:
        """Have the worker use a broken statement."""
        assert CHUNK_STATEMENTS[statement].count(right) == 1
        altered = {**CHUNK_STATEMENTS, statement: CHUNK_STATEMENTS[statement].replace(right, wrong)}
        pool = await StatementPool.open(self.crew.url, altered, role=ROLE, size=2, timeout_seconds=10, server_settings={})
        (await self.writer(worker_id, lease_seconds=lease_seconds))._store._opened = ChunkStore(pool, worker_id)

    def _count(self, outcome: str, chunks: int) -> None:
        self.counted[outcome] += chunks

    async def claim(self, worker_id: str = "A") -> Claim:
        """Lease the job that is ready."""
        (claim,) = await (await self.hand(worker_id)).claims()
        return claim

    async def execute(self, worker_id: str = "A", *, codec: PayloadCodec = PLAIN, lease_seconds: float = 30.0) -> Execution:
        """Claim the run that is ready, and begin as a worker does."""
        return await self.begin(await self.claim(worker_id), worker_id, codec=codec, lease_seconds=lease_seconds)

    async def begin(
        self, claim: Claim, worker_id: str = "A", *, codec: PayloadCodec = PLAIN, lease_seconds: float = 30.0
    ) -> Execution:
        """Ask where the stream stands only where the run may have been executed before."""
        publisher = Publisher(claim, await self.writer(worker_id, lease_seconds=lease_seconds), codec)
        if claim.key.generation > 1 or claim.key.run_id != claim.root_run_id or claim.iteration > 0:
            await publisher.begin()
        return Execution(self, await self.hand(worker_id), claim, publisher)

    async def close_gate(self) -> Gate:
        """From now until it is opened, chunks are not stored, and do not fail."""
        connection = await self.crew.connect()
        await connection.execute(_GATE)
        await connection.execute("SELECT pg_advisory_lock(1)")
        return Gate(connection)

    def reader(self, root_run_id: uuid.UUID, tenant_id: str = "acme") -> Reader:
        return Reader(self.database, root_run_id, tenant_id)

    async def all(self, root_run_id: uuid.UUID) -> list[Frame]:
        return await self.reader(root_run_id).read()

    async def attempt(self, root_run_id: uuid.UUID) -> int | None:
        """The stream attempt that readers are told of."""
        found: int | None = await self.database.fetchval(
            "SELECT attempt FROM fencepost.streams WHERE root_run_id = $1", root_run_id
        )
        return found


def _frame(row: Any) -> Frame:
    if row["data"] is None:
        assert row["offset"] == CUT_OFFSET
        return Frame(row["attempt"], row["offset"], CUT)
    return Frame(row["attempt"], row["offset"], json.loads(row["data"]))


async def gathered(calls: Sequence[Awaitable[None]]) -> list[BaseException | None]:
    """What each call raised."""
    return list(await asyncio.gather(*calls, return_exceptions=True))
