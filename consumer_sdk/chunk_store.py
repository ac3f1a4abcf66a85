"""The database adapter of streams: one method a statement, and no decision of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain, repeat
from typing import Any, Final, NamedTuple

import asyncpg

from consumer_sdk.jobs import Claim
from consumer_sdk.run_store import ROLE
from fencepost.database import StatementPool, Statements
from fencepost.statements import load_statements

__all__ = ["CHUNK_STATEMENTS", "CUT_OFFSET", "Chunk", "ChunkBatch", "ChunkStore", "Part", "PlaceTaken", "Stream"]

CHUNK_STATEMENTS: Final = load_statements("consumer_sdk", "chunks.sql")
#: Of the mark that a stream was cut. Its data is None.
CUT_OFFSET: Final = 2**63 - 1

# Storing, and what must not wait behind it: a stream that is opened, live chunks.
_POOL_SIZE: Final = 2
# A batch joins its runs with its chunks, both arrays: probing one for each of the other is quadratic. Row locks and ranges of
# chunks are probed all the same, there is no other way to them.
_PLANNER: Final = {"enable_nestloop": "off", "enable_seqscan": "off", "jit": "off", "plan_cache_mode": "force_generic_plan"}


class Chunk(NamedTuple):
    """A chunk at its place. ``data`` None: the stream is cut here."""

    offset: int
    step: str
    occurrence: int
    data: bytes | None


class Part(NamedTuple):
    """Where the chunks of a step that has ended are, in an earlier stream attempt."""

    attempt: int
    first_offset: int
    last_offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """How a stream stands. ``attempt`` None: there is none. ``elsewhere``: what a new attempt has to take over, by step and
    occurrence."""

    attempt: int | None
    next_offset: int
    cut: bool
    elsewhere: Mapping[tuple[str, int], Part]


class PlaceTaken(Exception):
    """Another chunk has the place: of another execution, or of this one by a statement that is still at work."""


@dataclass(kw_only=True, slots=True)
class ChunkBatch:
    """Chunks of one run, one after the other. ``opens``: its stream may not be there yet. ``sent``: they may be stored already."""

    claim: Claim
    attempt: int
    opens: bool
    chunks: Sequence[Chunk]
    sent: bool = field(default=False, compare=False)

    @property
    def size(self) -> int:
        """Bytes of data."""
        return sum(len(chunk.data or b"") for chunk in self.chunks)


class ChunkStore:
    """``worker_id`` is the owner that every write names. Raises ``TransientError`` where waiting helps."""

    def __init__(self, statements: Statements, worker_id: str) -> None:
        self._fetch = statements.fetch
        self._worker_id = worker_id
        self.close = statements.close

    @classmethod
    async def open(cls, database_url: str, *, worker_id: str, timeout_seconds: float, pooler: bool = False) -> "ChunkStore":
        """``pooler``: a transaction pooler stands between, which takes no settings of the session."""
        settings = {"application_name": "fencepost-streams"} | ({} if pooler else _PLANNER)
        statements = await StatementPool.open(
            database_url, CHUNK_STATEMENTS, role=ROLE, size=_POOL_SIZE, timeout_seconds=timeout_seconds, server_settings=settings
        )
        return cls(statements, worker_id)

    async def open_stream(self, claim: Claim) -> Stream | None:
        """How the stream stands for an execution that may not be the first; None if the run is not held."""
        rows = await self._fetch("open_stream", *self._held(claim))
        if not rows:
            return None
        place, *elsewhere = sorted(rows, key=lambda row: row["step"] is not None)
        return Stream(
            attempt=place["attempt"],
            next_offset=place["next_offset"],
            cut=place["is_cut"],
            elsewhere={
                (row["step"], row["occurrence"]): Part(row["source"], row["first_offset"], row["last_offset"]) for row in elsewhere
            },
        )

    async def publish(self, batches: Sequence[ChunkBatch]) -> frozenset[int]:
        """Store chunks: the places of the batches whose run is held. Raises ``PlaceTaken``."""
        claims = [batch.claim for batch in batches]
        chunks = [chunk for batch in batches for chunk in batch.chunks]
        places = chain.from_iterable(repeat(place, len(batch.chunks)) for place, batch in enumerate(batches, start=1))
        arguments = (
            self._worker_id,
            [claim.key.run_id for claim in claims],
            [claim.key.tenant_id for claim in claims],
            [claim.key.generation for claim in claims],
            [claim.root_run_id for claim in claims],
            [claim.iteration for claim in claims],
            [batch.attempt for batch in batches],
            [batch.opens for batch in batches],
            [batch.sent for batch in batches],
            list(places),
            [chunk.offset for chunk in chunks],
            [chunk.step for chunk in chunks],
            [chunk.occurrence for chunk in chunks],
            [chunk.data for chunk in chunks],
        )
        try:
            rows = await self._fetch("publish_chunks", *arguments)
        except asyncpg.UniqueViolationError as error:
            raise PlaceTaken from error
        return frozenset(row["place"] - 1 for row in rows)

    async def carry(
        self, claim: Claim, *, attempt: int, next_offset: int, step: str, occurrence: int, part: Part, room: int
    ) -> tuple[int, bool] | None:
        """Copy a step's chunks to an attempt: how many, and whether the stream was cut; None if the run is not held."""
        rows = await self._fetch("carry_chunks", *self._held(claim), attempt, next_offset, step, occurrence, *part, room)
        return (rows[0]["carried"], rows[0]["is_cut"]) if rows else None

    async def send_live(self, payloads: Sequence[str]) -> bool:
        """Notify whoever listens. False: nobody does."""
        return bool((await self._fetch("send_live", payloads))[0]["listened"])

    async def forget(self, retention: timedelta, *, limit: int) -> int:
        """Delete chunks of lineages that ended longer ago than ``retention``; how many."""
        forgotten: int = (await self._fetch("forget_chunks", retention, limit))[0]["forgotten"]
        return forgotten

    def _held(self, claim: Claim) -> tuple[Any, ...]:
        return self._worker_id, *claim.key, claim.root_run_id, claim.iteration
