"""The database adapter of durable routes: one method a statement, and no decision of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from uuid import UUID

from fencepost.database import StatementPool
from fencepost.statements import load_statements
from producer_sdk.runs import cancelled
from producer_sdk.writing import Statement, with_counted_placeholders

__all__ = [
    "CUT_OFFSET",
    "FIND_KEY",
    "ROLE",
    "START_LINEAGE",
    "Chunk",
    "FoundKey",
    "LineageKey",
    "LookedUp",
    "Monitor",
    "Place",
    "RouteStore",
    "Standing",
    "found_key",
]

#: What to grant to the database user of a service with durable routes.
ROLE: Final = "fencepost_producer"
# Every statement reads some rows by their keys. With statistics of an empty table the planner would walk it, and go on doing so
# while it fills; and planned anew at each call, a read of one lineage takes five times as long.
_PLANNER: Final = {
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
}
_FOUND: Final = (
    "outcome", "root_run_id", "key_monitor_id", "stored_key_version", "stored_profile", "stored_schema_version",
    "stored_fingerprint",
)  # fmt: skip
#: Of a chunk that says that its stream was cut there.
CUT_OFFSET: Final = 2**63 - 1

_SQL: Final = load_statements("producer_sdk.http", "routes.sql")


def _statement(name: str) -> Statement:
    return Statement(_SQL[name], with_counted_placeholders(_SQL[name]))


#: Inside the transaction that starts a lineage, by whichever driver.
FIND_KEY: Final = _statement("find_key")
START_LINEAGE: Final = _statement("start_lineage")


class LineageKey(NamedTuple):
    """A lineage, by its first run."""

    root_run_id: UUID
    tenant_id: str


class Place(NamedTuple):
    """How far a stream was read: the last chunk that was. ``(0, -1)``: none."""

    attempt: int
    offset: int


class FoundKey(NamedTuple):
    """What a key stands for. ``outcome``: new, found, expired, erased or in_progress; the rest is there if it is found."""

    outcome: str
    root_run_id: UUID | None
    monitor_id: UUID | None
    key_version: int | None
    profile: int | None
    schema_version: int | None
    fingerprint: bytes | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How a lineage stands, by its newest run. ``state``: queued, running, completed, failed or cancelled.

    ``parked``: it waits for a person. ``dead_reason`` says why a failed run failed, ``failure`` what its client may know.
    ``answer``: what a route has shaped of the output. ``stream_attempt``: None before the first chunk; ``last_offset``: of its last
    chunk, None while it has none. ``data_key``: the lineage's, wrapped; None if it has none."""

    monitor_id: UUID
    run_id: UUID
    iteration: int
    state: str
    parked: bool
    dead_reason: str | None
    error_code: str | None
    output: bytes | None
    failure: bytes | None
    erased: bool
    answer: bytes | None
    stream_attempt: int | None
    last_offset: int | None = None
    data_key: bytes | None = field(default=None, repr=False)

    @property
    def ended(self) -> bool:
        return self.erased or self.state in {"completed", "failed", "cancelled"}


class LookedUp(NamedTuple):
    """What a key stands for, and how its lineage stands; None if it was not there to be read."""

    found: FoundKey
    standing: Standing | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A stored chunk, and which call of which step published it. ``data`` None: the stream was cut here."""

    place: Place
    step: str
    occurrence: int
    data: bytes | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Monitor:
    """The lineage behind a monitor's id, and the digest of whose it is."""

    monitor_id: UUID
    key: LineageKey
    newest_run_id: UUID
    route: str
    principal_hash: bytes
    principal_version: int


class RouteStore:
    """The reads of durable routes, on a pool of their own. Raises ``TransientError`` where waiting helps."""

    def __init__(self, statements: StatementPool) -> None:
        self._fetch = statements.fetch
        self.close = statements.close

    @classmethod
    async def open(cls, database_url: str, *, size: int, timeout_seconds: float) -> "RouteStore":
        """``size`` connections at most; ``timeout_seconds`` bounds each statement, and the wait for its connection."""
        statements = await StatementPool.open(
            database_url,
            _SQL,
            role=ROLE,
            size=size,
            timeout_seconds=timeout_seconds,
            server_settings={"application_name": "fencepost-routes"} | _PLANNER,
        )
        return cls(statements)

    async def look_up(self, tenant_id: str, versions: Sequence[int], hashes: Sequence[bytes], written: int) -> LookedUp:
        """What a key stands for and how its lineage stands; nothing is kept."""
        values = dict((await self._fetch("look_up", tenant_id, versions, hashes, written))[0])
        found = found_key(tuple(values.pop(name) for name in _FOUND))
        return LookedUp(found, _standing(values) if values["run_id"] is not None else None)

    async def find_key(self, tenant_id: str, versions: Sequence[int], hashes: Sequence[bytes], written: int) -> FoundKey:
        """What a key stands for; nothing is kept."""
        return found_key((await self._fetch("find_key", tenant_id, versions, hashes, written, False))[0])

    async def read(self, keys: Sequence[LineageKey]) -> Sequence[Standing | None]:
        """How lineages stand; None for one that is not there."""
        rows = await self._fetch("read_lineages", [key.root_run_id for key in keys], [key.tenant_id for key in keys])
        standings: list[Standing | None] = [None] * len(keys)
        for row in rows:
            standings[row["place"] - 1] = _standing(dict(row))
        return standings

    async def read_chunks(
        self, places: Sequence[tuple[LineageKey, Place]], *, most: int, most_bytes: int
    ) -> Sequence[Sequence[Chunk]]:
        """Up to ``most`` chunks behind each place, in order; the one that brings their data to ``most_bytes`` is the last."""
        keys, behind = [key for key, _ in places], [place for _, place in places]
        rows = await self._fetch(
            "read_chunks",
            [key.root_run_id for key in keys],
            [key.tenant_id for key in keys],
            [place.attempt for place in behind],
            [place.offset for place in behind],
            most,
            most_bytes,
        )
        chunks: list[list[Chunk]] = [[] for _ in places]
        for number, attempt, offset, step, occurrence, data in rows:
            chunks[number - 1].append(Chunk(place=Place(attempt, offset), step=step, occurrence=occurrence, data=data))
        return chunks

    async def find_monitor(self, tenant_id: str, monitor_id: UUID) -> Monitor | None:
        """The lineage behind a monitor's id; None for an unknown one, and for another tenant's."""
        row = (await self._fetch("find_monitor", tenant_id, monitor_id))[0]
        if row["root_run_id"] is None:
            return None
        return Monitor(
            monitor_id=monitor_id,
            key=LineageKey(row["root_run_id"], tenant_id),
            newest_run_id=row["newest_run_id"],
            route=row["route"],
            principal_hash=row["principal_hash"],
            principal_version=row["principal_version"],
        )

    async def keep_answer(self, key: LineageKey, run_id: UUID, answer: bytes) -> bytes | None:
        """Keep what a route has shaped of a run's output; what is kept, None if the lineage has moved on or was erased."""
        kept: bytes | None = (await self._fetch("keep_answer", key.tenant_id, key.root_run_id, run_id, answer))[0]["answer"]
        return kept

    async def cancel(self, tenant_id: str, run_id: UUID, *, actor: str, reason: str) -> str:
        """Cancel a run, or ask its worker to: cancelled or requested. Raises ``RunEnded`` and ``RunNotFound``."""
        return cancelled((await self._fetch("cancel", tenant_id, run_id, actor, reason))[0]).outcome

    async def arm(self, milliseconds: int) -> None:
        """Ask whoever changes a lineage to ring, for that long."""
        await self._fetch("arm_lineages", milliseconds)

    async def arm_live(self, milliseconds: int) -> None:
        """Ask for live chunks, for that long."""
        await self._fetch("arm_live", milliseconds)


def found_key(row: Sequence[Any]) -> FoundKey:
    """What the row of ``find_key`` says. Ids travel as text, which every driver reads alike."""
    outcome, root_run_id, monitor_id, version, profile, schema_version, fingerprint = row
    return FoundKey(
        outcome,
        None if root_run_id is None else UUID(root_run_id),
        None if monitor_id is None else UUID(monitor_id),
        version,
        profile,
        schema_version,
        None if fingerprint is None else bytes(fingerprint),
    )


def _standing(values: dict[str, Any]) -> Standing:
    del values["place"]
    return Standing(**values)
