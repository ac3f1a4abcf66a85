"""Durable routes behind a real server: kills, signals and sockets that end."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import httpx
import pytest

from fencepost.devservices import Services, free_port
from fencepost.devservices.processes import Watchdog, tail
from tests.support.emptied import emptied
from tests.support.routes import DOMAIN, Counterpart, Shop, bearer, is_replay
from tests.support.service_process import ServiceProcess
from tests.support.session import SharedServices
from tests.support.waiting import eventually

ROOT: Final = Path(__file__).resolve().parents[2]

#: ``serve()``: another process of the application, ready to answer.
Serve = Callable[[], "Server"]


class Server(ServiceProcess):
    """The application in a process of its own."""

    def __init__(self, database_url: str, *, log: Path, watchdog: Watchdog) -> None:
        port = free_port()
        super().__init__(
            ("-m", "uvicorn", "tests.support.route_app:app", "--port", str(port)),
            {"database_url": database_url},
            http_port=port,
            log=log,
            watchdog=watchdog,
            environment={"PYTHONPATH": str(ROOT)},
        )

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Counterpart]:
        async with httpx.AsyncClient(base_url=self.url, timeout=60, limits=httpx.Limits(max_connections=None)) as http:

            async def is_ready() -> bool:
                assert self.running, tail(self.log)
                try:
                    answer = await http.post("/orders", headers=bearer(), json={"item": "lamp"})
                except httpx.HTTPError:
                    return False
                return answer.status_code == 400  # it asks for a key

            await eventually(is_ready, 30, message="the server answers")
            yield Counterpart(http)

    def signalled(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


@pytest.fixture(scope="module")
def routes_url(services: Services, shared_services: SharedServices) -> Iterator[str]:
    url = services.create_database(shared_services.template_url)
    yield url
    services.drop_database(url)


@pytest.fixture
async def shop(routes_url: str) -> AsyncIterator[Shop]:
    """The worker's side, in this process."""
    connection = await emptied(routes_url)
    await connection.execute(DOMAIN)
    yield Shop(routes_url, connection)
    await connection.close()


@pytest.fixture
def serve(routes_url: str, tmp_path: Path, watchdog: Watchdog) -> Iterator[Serve]:
    servers: list[Server] = []

    def start() -> Server:
        servers.append(Server(routes_url, log=tmp_path / f"server-{len(servers)}.log", watchdog=watchdog))
        return servers[-1]

    yield start
    for server in servers:
        if server.running:
            server.kill()


async def test_the_run_is_committed_before_the_wait(shop: Shop, serve: Serve) -> None:
    """ROUTE-4, R5, KEY-12: the server is killed while it waits; a retry at another one attaches to the same run."""
    first, second = serve(), serve()
    async with first.client() as client, second.client() as other:
        request = asyncio.create_task(client.order())
        await shop.ended("queued")
        first.kill()
        with pytest.raises(httpx.TransportError):
            await request
        async with shop.working():
            answer = await other.order()
    assert (answer.status_code, is_replay(answer)) == (201, True)
    assert (shop.worked["lamp"], (await shop.stored())["runs"], (await shop.stored())["orders"]) == (1, 1, 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_shutdown_while_waiting(shop: Shop, serve: Serve, number: signal.Signals) -> None:
    """ROUTE-31: fifty requests wait; each gets 202 before the exit, and retries elsewhere collect the results."""
    first, second = serve(), serve()
    async with first.client() as client, second.client() as other:
        requests = [asyncio.create_task(client.order(f"k-{n}", f"item {n}")) for n in range(50)]
        await shop.ended("queued", 50)
        first.signalled(number)
        async with asyncio.timeout(15):
            answers = await asyncio.gather(*requests)
        assert {(answer.status_code, answer.headers["retry-after"]) for answer in answers} == {(202, "1")}
        assert all(answer.headers["location"] for answer in answers)
        await first.wait()
        async with shop.working():
            collected = await asyncio.gather(*(other.order(f"k-{n}", f"item {n}") for n in range(50)))
    assert [answer.json()["item"] for answer in collected] == [f"item {n}" for n in range(50)]
    assert "Traceback" not in first.log.read_text()


async def test_a_socket_that_ends(shop: Shop, serve: Serve) -> None:
    """ROUTE-18, C7: the run goes on, and nothing is cancelled."""
    server = serve()
    async with server.client() as client:
        body = json.dumps({"item": "lamp"}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
        head = "\r\n".join(
            [
                "POST /orders HTTP/1.1", "host: shop", "authorization: Bearer acme/ada", "idempotency-key: k-1",
                "content-type: application/json", f"content-length: {len(body)}", "", "",
            ]
        )  # fmt: skip
        writer.write(head.encode() + body)
        await shop.ended("queued")
        writer.close()
        await writer.wait_closed()
        assert await reader.read() == b""
        async with shop.working():
            answer = await client.order()
    assert (answer.status_code, is_replay(answer)) == (201, True)
    assert await shop.connection.fetchval("SELECT count(*) FROM fencepost.run_events WHERE type LIKE '%cancel%'") == 0


async def test_a_server_without_its_database(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, watchdog: Watchdog
) -> None:
    """ROUTE-32: it starts, answers 503 with Retry-After, and says what it waits for."""
    server = Server(f"postgresql://postgres@127.0.0.1:{free_port()}/nowhere", log=tmp_path / "server.log", watchdog=watchdog)
    try:
        async with httpx.AsyncClient(base_url=server.url) as http:

            async def answered() -> httpx.Response | None:
                assert server.running, tail(server.log)
                try:
                    return await http.post("/orders", headers=bearer() | {"idempotency-key": "k"}, json={"item": "lamp"})
                except httpx.TransportError:
                    return None

            answer = await eventually(answered, 30)
        assert answer is not None
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "database_unreachable" in server.log.read_text()
    finally:
        server.kill()
