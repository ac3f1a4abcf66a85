"""What an operator sees in the database: lanes, receipts, deliveries, sessions. Reads only, on one connection."""

from types import TracebackType
from typing import Any, Final, Self

import asyncpg

from tests.support.waiting import eventually

DRAIN_SECONDS: Final = 60.0


class Outbox:
    """``async with Outbox(url) as outbox``."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: asyncpg.Connection[Any] | None = None

    async def __aenter__(self) -> Self:
        self._connection = await asyncpg.connect(self._url, server_settings={"application_name": "test"})
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.connection.close()

    @property
    def connection(self) -> "asyncpg.Connection[Any]":
        """The connection, for what has no method of its own."""
        assert self._connection is not None
        return self._connection

    async def owners(self) -> dict[int, str]:
        """Lane -> relay id, of leases that run."""
        return dict(
            await self.connection.fetch("SELECT lane, lease_owner FROM fencepost.lanes WHERE lease_expires_at > clock_timestamp()")
        )

    async def lanes_of(self, name: str) -> list[int]:
        """Lanes that run under a lease of the relay with this name."""
        return sorted(lane for lane, owner in (await self.owners()).items() if owner.startswith(f"{name}/"))

    async def generations(self) -> dict[int, int]:
        """Lane -> how often it was claimed."""
        return dict(await self.connection.fetch("SELECT lane, lease_generation FROM fencepost.lanes"))

    async def receipts(self, name: str = "") -> int:
        """How many batches were marked, by all relays or by those of one name."""
        return int(
            await self.connection.fetchval(
                "SELECT count(*) FROM fencepost.receipts WHERE starts_with(relay_id, $1)", f"{name}/" if name else ""
            )
        )

    async def marked_rows(self) -> int:
        """Rows by receipt: more than rows of the outbox if some were marked twice."""
        return int(await self.connection.fetchval("SELECT coalesce(sum(row_count), 0) FROM fencepost.receipts"))

    async def is_true(self, query: str) -> bool:
        """Whether a query of one boolean says so."""
        return bool(await self.connection.fetchval(query))

    async def delivered(self) -> set[str]:
        """Event ids that the delivered view names."""
        rows = await self.connection.fetch("SELECT event_id::text AS id FROM fencepost.delivery WHERE delivered")
        return {row["id"] for row in rows}

    async def undelivered(self) -> int:
        """Rows that wait."""
        return int(await self.connection.fetchval("SELECT count(*) FROM fencepost.delivery WHERE NOT delivered"))

    async def drained(self, seconds: float = DRAIN_SECONDS) -> None:
        """Wait until every row is delivered."""

        async def empty() -> bool:
            return not await self.undelivered()

        await eventually(empty, seconds, message="every row is delivered")

    async def progress(self, receipts: int = 1, *, name: str = "") -> None:
        """Wait until so many more batches are marked."""
        before = await self.receipts(name)

        async def more() -> bool:
            return await self.receipts(name) >= before + receipts

        await eventually(more, DRAIN_SECONDS, message=f"{receipts} more receipts of {name or 'anybody'}")

    async def settled(self, **shares: int) -> None:
        """Wait until the relays of these names hold so many lanes: ``settled(a=4, b=4)``."""

        async def shared() -> bool:
            return {name: len(await self.lanes_of(name)) for name in shares} == shares

        await eventually(shared, DRAIN_SECONDS, message=f"lanes are shared as {shares}")
