"""Two relays as an operator runs them: processes of their own, set up by their environment, seen in the database."""

import asyncio
from typing import Any, Final

import asyncpg

from demo.processes import Processes

__all__ = ["LEASE_SECONDS", "RELAYS", "Fleet", "LaneView"]

LEASE_SECONDS: Final = 5.0
RELAYS: Final = ("relay-a", "relay-b")
# A short lease, so that the survivor takes over while one watches. Half a second of margin is much on one machine.
_SETTINGS: Final = {
    "LEASE_SECONDS": LEASE_SECONDS,
    "PUBLISH_DEADLINE_SECONDS": 2.5,
    "LEASE_MARGIN_SECONDS": 0.5,
    "HTTP_PORT": 0,
    "SOURCE": "demo",
}

# A lane counts as held while its lease runs, whoever is behind it.
_LANES: Final = """
SELECT split_part(lease_owner, '/', 1) AS owner, count(*) AS lanes
FROM fencepost.lanes WHERE lease_expires_at > clock_timestamp() GROUP BY 1
"""
_LANE_COUNT: Final = "SELECT count(*) FROM fencepost.lanes"


class LaneView:
    """Asks the database who holds how many lanes."""

    def __init__(self, connection: "asyncpg.Connection[Any]") -> None:
        self._connection = connection
        self._one_at_a_time = asyncio.Lock()

    async def held(self) -> dict[str, int]:
        """Relay -> lanes whose lease runs."""
        async with self._one_at_a_time:
            return {row["owner"]: row["lanes"] for row in await self._connection.fetch(_LANES)}

    async def count(self) -> int:
        """How many lanes there are."""
        async with self._one_at_a_time:
            return int(await self._connection.fetchval(_LANE_COUNT))


class Fleet:
    """Starts the relays of a database, and kills them."""

    def __init__(self, processes: Processes, *, database_url: str, bootstrap_servers: str) -> None:
        self._processes = processes
        self._settings = {**_SETTINGS, "DATABASE_URL": database_url, "KAFKA_BOOTSTRAP_SERVERS": bootstrap_servers}

    def start(self, name: str) -> None:
        """Start the relay with this name."""
        self._processes.start(name, ["-m", "fencepost", "relay", "run"], settings={**self._settings, "RELAY_NAME": name})

    def kill(self, name: str) -> None:
        """As a crash would."""
        self._processes.kill(name)

    def check(self) -> None:
        """Raise if one ended that nobody has ended."""
        self._processes.check()

    def start_missing(self) -> None:
        """Whichever is not there."""
        for name in RELAYS:
            if self._processes.state(name) == "gone":
                self.start(name)
