"""The database adapter: one method a statement."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import asyncpg

from fencepost.database import StatementPool
from fencepost.errors import ConfigurationError, InvariantViolated, TransientError
from fencepost.statements import load_statements
from relay.cursor import Cursor, Row
from relay.lane import Receipt, Stopped
from relay.share import Fleet

__all__ = ["ROLE", "Backlog", "Installation", "Poll", "Store"]

#: What to grant to the relay's database user.
ROLE: Final = "fencepost_relay"

_SQL: Final = load_statements("relay", "statements.sql")
# poll, mark, coordination and one for the gauges: each can hang without the others.
_POOL_SIZE: Final = 4
_HEAD: Final = -1


@dataclass(frozen=True, kw_only=True)
class Poll:
    """The snapshot of a poll, and its rows by lane, late ones first."""

    snapshot: str
    rows: Mapping[int, Sequence[Row]]


@dataclass(frozen=True, kw_only=True)
class Backlog:
    """``waiting`` is counted up to a bound; ``oldest_age_seconds`` is 0 when nothing waits."""

    lane: int
    waiting: int
    oldest_age_seconds: float


@dataclass(frozen=True, kw_only=True)
class Installation:
    """Whether this cluster is the one that the cursors were made in, and whether it can be written."""

    same_cluster: bool
    in_recovery: bool


async def _prepare_connection(connection: asyncpg.Connection) -> None:
    # PostgreSQL's own form of a timestamp, an integer: building datetimes would cost the hot path a microsecond a row.
    await connection.set_type_codec(
        "timestamptz", schema="pg_catalog", encoder=lambda value: value, decoder=lambda value: value[0], format="tuple"
    )


class Store:
    """``relay_id`` is the owner that every write names. ``timeout_seconds`` bounds a statement and the wait for its connection."""

    def __init__(self, statements: StatementPool, relay_id: str) -> None:
        self._statements = statements
        self._fetch = statements.fetch
        self._relay_id = relay_id
        self.close = statements.close

    @classmethod
    async def open(cls, database_url: str, *, relay_id: str, timeout_seconds: float) -> "Store":
        statements = await StatementPool.open(
            database_url,
            _SQL,
            role=ROLE,
            size=_POOL_SIZE,
            timeout_seconds=timeout_seconds,
            init=_prepare_connection,
            server_settings={"application_name": "fencepost-relay"},
        )
        return cls(statements, relay_id)

    async def installation(self) -> Installation:
        rows = await self._fetch("installation")
        if not rows:
            raise ConfigurationError("fencepost.installation is empty; run `fencepost migrate`")
        row = rows[0]
        return Installation(same_cluster=row["recorded"] == row["actual"], in_recovery=row["in_recovery"])

    async def poll(self, cursors: Mapping[int, Cursor], *, row_limit: int, byte_limit: int) -> Poll:
        """What these lanes' cursors have not delivered, each lane within the limits."""
        found = await self._fetch(
            "poll",
            list(cursors),
            [cursor.position for cursor in cursors.values()],
            [cursor.snapshot for cursor in cursors.values()],
            [cursor.target for cursor in cursors.values()],
            [cursor.late_position for cursor in cursors.values()],
            row_limit,
            byte_limit,
        )
        if not found or found[0]["lane"] != _HEAD:
            raise InvariantViolated("a poll without its head row")
        rows: dict[int, list[Row]] = {}
        lane, group = _HEAD, []
        for row in found[1:]:
            if row["lane"] != lane:
                lane = row["lane"]
                group = rows.setdefault(lane, [])
            group.append(row)
        return Poll(snapshot=found[0]["topic"], rows=rows)

    async def mark(self, receipts: Sequence[Receipt]) -> frozenset[int]:
        """Insert receipts; the lanes still held. A lane that is missing was lost and nothing was written for it."""
        try:
            rows = await self._fetch(
                "mark",
                self._relay_id,
                [receipt.lane for receipt in receipts],
                [receipt.generation for receipt in receipts],
                [receipt.sequence for receipt in receipts],
                [receipt.cursor.position for receipt in receipts],
                [receipt.cursor.snapshot for receipt in receipts],
                [receipt.cursor.target for receipt in receipts],
                [receipt.cursor.late_position for receipt in receipts],
                [receipt.first_id for receipt in receipts],
                [receipt.last_id for receipt in receipts],
                [receipt.row_count for receipt in receipts],
                [receipt.late_count for receipt in receipts],
                [_partitions(receipt) for receipt in receipts],
            )
        except asyncpg.UniqueViolationError as error:
            raise TransientError("mark: an earlier try of this mark, thought unanswered, was written meanwhile") from error
        return frozenset(row["lane"] for row in rows)

    async def marked_already(self, receipts: Sequence[Receipt]) -> frozenset[tuple[int, int]]:
        """After a mark without an answer: (lane, sequence) of those receipts that were written after all."""
        rows = await self._fetch(
            "marked_already",
            self._relay_id,
            [receipt.lane for receipt in receipts],
            [receipt.sequence for receipt in receipts],
            [receipt.generation for receipt in receipts],
        )
        return frozenset((row["lane"], row["sequence"]) for row in rows)

    async def cursors(self, lanes: Sequence[int]) -> Mapping[int, tuple[Cursor, int]]:
        """Each lane's cursor and the sequence of its newest receipt."""
        rows = await self._fetch("cursors", lanes)
        return {
            row["lane"]: (
                Cursor(
                    position=row["position"], snapshot=row["snapshot"], target=row["target"], late_position=row["late_position"]
                ),
                row["sequence"],
            )
            for row in rows
        }

    async def claim(self, lease_seconds: float, most: int, held: Sequence[int]) -> Mapping[int, int]:
        """Take up to ``most`` free lanes; lane -> generation."""
        rows = await self._fetch("claim", self._relay_id, lease_seconds, most, held)
        return {row["lane"]: row["lease_generation"] for row in rows}

    async def renew(self, generations: Mapping[int, int], lease_seconds: float) -> Mapping[int, int]:
        """Extend leases; each lane still held, with the sequence of its newest receipt (0: none)."""
        rows = await self._fetch("renew", self._relay_id, list(generations), list(generations.values()), lease_seconds)
        return {row["lane"]: row["newest"] for row in rows}

    async def release(self, generations: Mapping[int, int]) -> frozenset[int]:
        """Give lanes up; those that were still ours."""
        rows = await self._fetch("release", self._relay_id, list(generations), list(generations.values()))
        return frozenset(row["lane"] for row in rows)

    async def join(self, name: str, version: str, lease_seconds: float, stopped: Mapping[int, Stopped]) -> None:
        """Be a live relay for another lease; ``stopped`` is what ``fencepost status`` shows of lanes that stand still."""
        lanes = {str(number): dataclasses.asdict(what) for number, what in stopped.items()}
        await self._fetch("join", self._relay_id, name, version, lease_seconds, json.dumps(lanes))

    async def leave(self) -> None:
        await self._fetch("leave", self._relay_id)

    async def fleet(self, held: Sequence[int]) -> Fleet:
        row = (await self._fetch("fleet", self._relay_id, held))[0]
        return Fleet(members=row["members"], lanes=row["lanes"], free=row["free"])

    async def arm(self, lanes: Sequence[int], milliseconds: int) -> int:
        """Ask writers to ring; the transaction id below which writers may not have seen it."""
        await self._fetch("arm", lanes, milliseconds)
        return int((await self._fetch("transaction_id"))[0]["bound"])

    async def disarm(self, lanes: Sequence[int]) -> None:
        await self._fetch("disarm", lanes)

    async def flushed(self) -> tuple[int, int]:
        """(end of the write-ahead log, how far it is on disk), as byte positions."""
        row = (await self._fetch("flushed"))[0]
        return int(row["inserted"]), int(row["flushed"])

    async def backlog(self, positions: Mapping[int, int], most: int) -> Sequence[Backlog]:
        rows = await self._fetch("backlog", list(positions), list(positions.values()), most)
        return [Backlog(lane=r["lane"], waiting=r["waiting"], oldest_age_seconds=r["oldest_age_seconds"]) for r in rows]

    async def horizon(self) -> dict[str, tuple[float | None, int | None]]:
        """Holder kind -> (seconds, transactions) that it holds back vacuum."""
        return {row["kind"]: (row["seconds"], row["transactions"]) for row in await self._fetch("horizon")}


def _partitions(receipt: Receipt) -> str:
    return json.dumps(
        {
            topic: {
                "count": receipt.partition_counts[topic],
                "offsets": {str(partition): [first, last] for partition, (first, last) in partitions.items()},
            }
            for topic, partitions in receipt.offsets.items()
        },
        separators=(",", ":"),
    )
