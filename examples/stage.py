"""What the durable examples run on: a migrated database, and each process as an operator runs it, with a log each.

Whatever is killed can be started again under its name. Everything ends with the program.
"""

import argparse
import asyncio
import base64
import logging
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import httpx

from demo.ground import database
from demo.processes import Processes
from fencepost.devservices import Services, ServicesError, free_port, start_services

__all__ = ["Stage", "eventually", "keep_open", "open_stage", "port_number", "told"]

#: Prints a line at once, into a pipe too.
told: Final = partial(print, flush=True)

_READY_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.5
_TICK_SECONDS: Final = 0.05
_LARGEST_PORT: Final = 65_535
# Short leases, so that whoever watches need not wait for what a kill has left behind.
_LEASE: Final = {"LEASE_SECONDS": 3, "LEASE_MARGIN_SECONDS": 0.5}
_WORKER: Final[Mapping[str, object]] = {f"WORKER_{name}": value for name, value in _LEASE.items()}
_RELAY: Final[Mapping[str, object]] = {**_LEASE, "PUBLISH_DEADLINE_SECONDS": 2, "HTTP_PORT": 0}
_CONSUMER: Final[Mapping[str, object]] = {"CONSUMER_HTTP_PORT": 0, "CONSUMER_COMMIT_INTERVAL_MS": 200}


class Stage:
    """The processes of one example. ``url`` is where its server listens; ``variables`` go to every process."""

    def __init__(
        self, processes: Processes, database_url: str, *, port: int | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        self.database_url = database_url
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._processes = processes
        self._variables = dict(variables or {})
        self._settings: dict[str, object] = {
            "DATABASE_URL": database_url,
            "IDEMPOTENCY_SECRETS": f"1:{base64.b64encode(secrets.token_bytes(32)).decode()}",
        }

    async def serve(self, application: str, name: str = "server") -> None:
        """Start the server, and wait until it answers."""
        self._start(name, "-m", "uvicorn", application, "--port", str(self.port), "--log-level", "warning")
        await self.until(lambda: answers(f"{self.url}/problems"), f"{name} answers")

    async def work(self, handlers: str, name: str = "worker") -> None:
        """Start a worker, and wait until it is ready."""
        port = free_port()
        self._start(name, "-m", "fencepost", "worker", "run", handlers, settings={**_WORKER, "WORKER_HTTP_PORT": port})
        await self.until(lambda: answers(f"http://127.0.0.1:{port}/readyz"), f"{name} is ready")

    def relay(self, bootstrap_servers: str) -> None:
        """Start a relay from the database to Kafka."""
        self._start("relay", "-m", "fencepost", "relay", "run", settings={**_RELAY, "KAFKA_BOOTSTRAP_SERVERS": bootstrap_servers})

    def consume(self, handlers: str, bootstrap_servers: str, topic: str) -> None:
        """Start a consumer of a topic, whose group and name are the topic's."""
        kafka = {"KAFKA_BOOTSTRAP_SERVERS": bootstrap_servers, "CONSUMER_TOPICS": topic, "CONSUMER_GROUP": topic}
        self._start("consumer", "-m", "fencepost", "consumer", "run", handlers, settings={**_CONSUMER, **kafka})

    def run(self, name: str, *arguments: str) -> None:
        """Start Python with these arguments."""
        self._start(name, *arguments)

    def kill(self, *names: str) -> None:
        """kill -9."""
        for name in names:
            self._processes.kill(name)

    def pid(self, name: str) -> int:
        """For whoever wants to kill it by hand."""
        return self._processes.pid(name)

    def clear(self, names: Iterable[str]) -> list[str]:
        """Those that somebody has killed by hand; they may be started again."""
        killed = [name for name in names if self._processes.has_ended(name)]
        self._processes.stop(*killed)
        return killed

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str, *, seconds: float = _READY_SECONDS) -> None:
        """As ``eventually``; raises ``ServicesError`` at once where a process has ended by itself."""

        async def holds() -> bool:
            self._processes.check()
            return await condition()

        await eventually(holds, what, seconds=seconds)

    def _start(self, name: str, *arguments: str, settings: Mapping[str, object] | None = None) -> None:
        self._processes.start(name, arguments, settings=self._settings | dict(settings or {}), environment=self._variables)


@asynccontextmanager
async def open_stage(
    services: Services, logs: Path, *, port: int | None = None, variables: Mapping[str, str] | None = None
) -> AsyncIterator[Stage]:
    """A stage on a database of its own, which is removed at the end."""
    async with database(services) as (url, _):
        with Processes(logs) as processes:
            yield Stage(processes, url, port=port, variables=variables)


def port_number(text: str) -> int:
    """The value of ``--port``, for argparse; 0 is any free one."""
    if not text.isdecimal() or int(text) > _LARGEST_PORT:
        raise argparse.ArgumentTypeError(f"must be 0 to {_LARGEST_PORT}; 0 takes a free one")
    return int(text)


def keep_open(application: str, handlers: str, *, port: int, begin: Callable[[str], str] = "open: {}".format) -> int:
    """Run a server and a worker until Ctrl-C, and start again whichever is killed. ``begin`` says, of the server's address, what
    can be done there. The exit code."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # its retries while Kafka starts are nobody's concern here
    told("starting PostgreSQL and Kafka; the first time, Kafka is downloaded")
    try:
        with tempfile.TemporaryDirectory(prefix="fencepost-example-") as logs, start_services() as services:
            asyncio.run(_keep_open(services, Path(logs), application, handlers, port, begin))
    except ServicesError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        told("stopped")
    return 0


async def _keep_open(
    services: Services, logs: Path, application: str, handlers: str, port: int, begin: Callable[[str], str]
) -> None:
    async with open_stage(services, logs, port=port) as stage:
        start: dict[str, Callable[[], Awaitable[None]]] = {
            "server": partial(stage.serve, application),
            "worker": partial(stage.work, handlers),
        }
        await asyncio.gather(*(one() for one in start.values()))
        told(f"\n{begin(stage.url)}\n\nCtrl-C ends it. What you kill is started again:")
        for name in start:
            told(f"  kill -9 {stage.pid(name)}    # the {name}")
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for name in stage.clear(start):
                await start[name]()
                told(f"the {name} was killed and is started again, as process {stage.pid(name)}")


async def answers(url: str) -> bool:
    """Whether something answers 200 there."""
    async with httpx.AsyncClient(timeout=2) as client:
        try:
            return (await client.get(url)).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False


async def eventually(condition: Callable[[], Awaitable[bool]], what: str, *, seconds: float = _READY_SECONDS) -> None:
    """Wait until the asynchronous condition holds. Raises ``ServicesError`` where it does not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() > deadline:
            raise ServicesError(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(_TICK_SECONDS)
