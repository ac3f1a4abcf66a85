"""Two relays as an operator runs them: processes of their own, set up by their environment, seen in the database."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import asyncpg

from fencepost.devservices import ServicesError
from fencepost.devservices.processes import Watchdog, tail

__all__ = ["LEASE_SECONDS", "Fleet", "LaneView"]

LEASE_SECONDS: Final = 5.0
# A short lease, so that the survivor takes over while one watches. Half a second of margin is much on one machine.
_SETTINGS: Final = {
    "LEASE_SECONDS": LEASE_SECONDS,
    "PUBLISH_DEADLINE_SECONDS": 2.5,
    "LEASE_MARGIN_SECONDS": 0.5,
    "HTTP_PORT": 0,
}
_STOP_SECONDS: Final = 20.0
_NAMES: Final = ("relay-a", "relay-b")

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
    """The relays by name. Leaving the block stops those that still run."""

    def __init__(self, database_url: str, bootstrap_servers: str, logs: Path) -> None:
        self.killed: str | None = None
        self._environment = _environment(database_url, bootstrap_servers)
        self._logs = logs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._watchdog = Watchdog()

    def __enter__(self) -> "Fleet":
        try:
            for name in _NAMES:
                self._start(name)
        except BaseException:
            self._watchdog.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        running = [process for process in self._processes.values() if process.poll() is None]
        try:
            for process in running:
                process.terminate()
            deadline = time.monotonic() + _STOP_SECONDS
            for process in running:
                _wait(process, deadline)
        finally:
            self._watchdog.close()

    @property
    def names(self) -> tuple[str, ...]:
        return _NAMES

    def check(self) -> None:
        """Raise if a relay ended that nobody killed."""
        for name, process in self._processes.items():
            if name != self.killed and process.poll() is not None:
                raise ServicesError(f"{name} ended with {process.returncode}; its log ends:\n{tail(self._log(name))}")

    def kill(self, name: str) -> None:
        """kill -9: no goodbye, nothing released, whatever was in flight is left as it is."""
        self.killed = name
        self._processes[name].kill()
        self._processes[name].wait()

    def _start(self, name: str) -> None:
        with self._log(name).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "fencepost", "relay", "run"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._environment, "FENCEPOST_RELAY_NAME": name},
                # Ctrl-C is the demo's to handle: it stops the relays in order.
                start_new_session=True,
            )
        self._processes[name] = process
        self._watchdog.guard(process.pid, signal.SIGKILL)

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"


def _environment(database_url: str, bootstrap_servers: str) -> Mapping[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FENCEPOST_")}
    chosen: dict[str, object] = {
        **_SETTINGS, "DATABASE_URL": database_url, "KAFKA_BOOTSTRAP_SERVERS": bootstrap_servers, "SOURCE": "demo/orders",
    }  # fmt: skip
    return kept | {f"FENCEPOST_{name}": str(value) for name, value in chosen.items()}


def _wait(process: "subprocess.Popen[bytes]", deadline: float) -> None:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
