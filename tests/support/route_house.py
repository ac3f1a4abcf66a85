"""A server with durable routes and a worker as processes of their own, to be killed and started anew: ``killed_routes.py``."""

import base64
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import asyncpg
import httpx

from fencepost.devservices import free_port
from fencepost.devservices.processes import Watchdog
from tests.support.killed_routes import SCHEMA
from tests.support.service_process import ServiceProcess
from tests.support.waiting import eventually

__all__ = ["RouteHouse", "open_house"]

_ROOT: Final = Path(__file__).resolve().parents[2]
_SECRETS: Final = f"1:{base64.b64encode(b'1' * 32).decode()}"
_LEASES: Final = {"worker_lease_seconds": 2, "worker_lease_margin_seconds": 0.5}


class RouteHouse:
    """One server on one port, as often as it is killed, and a worker. ``gates`` let the runs go on."""

    def __init__(self, database_url: str, connection: "asyncpg.Connection[Any]", logs: Path, watchdog: Watchdog) -> None:
        self._database_url = database_url
        self._connection = connection
        self._logs = logs
        self._watchdog = watchdog
        self._port = free_port()
        self.server = self._serve()
        self.worker = self._work()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def _start(self, name: str, port: int, *program: str) -> ServiceProcess:
        return ServiceProcess(
            program,
            _LEASES | {"database_url": self._database_url, "idempotency_secrets": _SECRETS, "worker_http_port": port},
            http_port=port,
            log=self._logs / f"{name}.log",
            watchdog=self._watchdog,
            environment={"PYTHONPATH": str(_ROOT)},
        )

    def _serve(self) -> ServiceProcess:
        program = ("-m", "uvicorn", "tests.support.killed_routes:app", "--port", str(self._port))
        return self._start("server", self._port, *program)

    def _work(self) -> ServiceProcess:
        return self._start("worker", free_port(), "-m", "fencepost", "worker", "run", "tests.support.killed_routes:durable")

    async def ready(self) -> None:
        await self.server.wait_ready()
        await self.worker.wait_ready()

    async def restart_server(self) -> None:
        """Kill the server in what it is doing; the next one is there when this returns."""
        self.server.kill()
        self.server = self._serve()
        await self.server.wait_ready()

    async def restart_worker(self) -> None:
        self.worker.kill()
        self.worker = self._work()
        await self.worker.wait_ready()

    async def asked(self, most: int) -> None:
        """Wait until this server has taken a request of each of so many clients."""
        async with httpx.AsyncClient(base_url=self.url) as client:

            async def arrived() -> bool:
                return int((await client.get("/arrivals")).text) >= most

            await eventually(arrived)

    async def open(self, gate: object) -> None:
        await self._connection.execute("INSERT INTO stage.gates VALUES ($1)", str(gate))

    async def counts(self, *tables: str) -> list[int]:
        return [int(await self._connection.fetchval(f"SELECT count(*) FROM {table}")) for table in tables]

    async def counted(self, table: str, most: int) -> bool:
        return await self.counts(table) == [most]

    async def charges(self) -> Counter[str]:
        return Counter(row["item"] for row in await self._connection.fetch("SELECT item FROM stage.charges"))

    def end(self) -> None:
        self.server.kill()
        self.worker.kill()


@asynccontextmanager
async def open_house(database_url: str, logs: Path, watchdog: Watchdog) -> AsyncIterator[RouteHouse]:
    """Both processes, ready; killed behind the block."""
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute(SCHEMA)
        house = RouteHouse(database_url, connection, logs, watchdog)
        try:
            await house.ready()
            yield house
        finally:
            house.end()
    finally:
        await connection.close()
