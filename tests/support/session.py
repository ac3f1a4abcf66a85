"""One PostgreSQL and one Kafka for a whole test run, started when the first process of the run asks for them.

Without pytest-xdist the run is one process and starts them itself. With it, the controller starts them at a worker's
first request and stops them after the last worker has ended; the workers get the addresses and no right to stop.
"""

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from typing import Final, Protocol

import psycopg

from fencepost.devservices import Kind, Services, start_services

# A cold start downloads Kafka once; a warm one takes seconds.
ANSWER_SECONDS: Final = 900.0
LOCALHOST: Final = "127.0.0.1"


@dataclass(frozen=True)
class SharedServices:
    """The addresses of the run's services; `template_url` is a migrated database that nobody connects to."""

    kind: Kind
    database_url: str
    bootstrap_servers: str
    template_url: str

    def handle(self) -> Services:
        """Return services for a test: databases can be made, nothing can be stopped."""
        return Services(self.kind, self.database_url, self.bootstrap_servers)


class Source(Protocol):
    """Where a process of the run has the services from."""

    def get(self) -> SharedServices:
        """Return the services, started now if nobody has asked before."""

    def close(self) -> None:
        """Give up what this process holds."""


class Owner:
    """Starts the services at the first request and stops them at the end. A failed start is not tried again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._services: Services | None = None
        self._shared: SharedServices | None = None
        self._failure: Exception | None = None

    def get(self) -> SharedServices:
        """Return the services, started now if nobody has asked before."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._shared is None:
                self._shared = self._start()
            return self._shared

    def close(self) -> None:
        """Stop what was started; the template goes too, as a given server outlives the run."""
        with self._lock:
            services, shared = self._services, self._shared
            self._services = self._shared = None
            if services is not None and shared is not None and services.kind == "given":
                services.drop_database(shared.template_url)
            if services is not None:
                services.stop()

    def _start(self) -> SharedServices:
        try:
            self._services = start_services()
            _let_statements_be_forgotten(self._services.database_url)
            template = migrated_database(self._services)
        except Exception as error:
            self._failure = error
            raise
        return SharedServices(self._services.kind, self._services.database_url, self._services.bootstrap_servers, template)


class Desk:
    """The controller's side: a thread that answers the workers' requests on a port of this machine."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._key = secrets.token_bytes(32)
        self._listener = Listener((LOCALHOST, 0), authkey=self._key)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="services-desk", daemon=True)
        self._thread.start()

    @property
    def directions(self) -> tuple[str, int, str]:
        """What a worker needs to find the desk."""
        host, port = self._listener.address
        return str(host), int(port), self._key.hex()

    def close(self) -> None:
        """Stop answering, then stop the services."""
        self._closing.set()
        # A visit wakes the thread that waits for one.
        with contextlib.suppress(OSError, EOFError):
            Client((LOCALHOST, self.directions[1]), authkey=self._key).close()
        self._thread.join()
        self._listener.close()
        self._owner.close()

    def _serve(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(OSError, EOFError), self._listener.accept() as visitor:
                self._answer(visitor)

    def _answer(self, visitor: "Connection[object, object]") -> None:
        if self._closing.is_set():
            return
        try:
            visitor.send(self._owner.get())
        except Exception as error:  # noqa: BLE001 - whatever went wrong is the worker's answer
            visitor.send(str(error))


class Visitor:
    """A worker's side: asks the controller once and remembers the answer."""

    def __init__(self, directions: tuple[str, int, str]) -> None:
        self._directions = directions
        self._shared: SharedServices | None = None

    def get(self) -> SharedServices:
        """Return the run's services; the first worker that asks waits for their start."""
        if self._shared is None:
            self._shared = self._ask()
        return self._shared

    def close(self) -> None:
        """Nothing to give up: the controller owns the services."""

    def _ask(self) -> SharedServices:
        host, port, key = self._directions
        with Client((host, port), authkey=bytes.fromhex(key)) as desk:
            if not desk.poll(ANSWER_SECONDS):
                raise RuntimeError(f"the run's services were not there after {ANSWER_SECONDS:.0f} s")
            answer = desk.recv()
        if isinstance(answer, SharedServices):
            return answer
        raise RuntimeError(f"the run has no services: {answer}")


def _let_statements_be_forgotten(url: str) -> None:
    """Counts of databases that were dropped are in the way of those that tests read. A given server may count none."""
    with psycopg.connect(url, autocommit=True) as connection:
        counts = "SELECT current_setting('shared_preload_libraries') ~ 'pg_stat_statements'"
        if connection.execute(counts).fetchone() == (True,):
            with contextlib.suppress(psycopg.errors.UniqueViolation):  # another run on the same server makes it at this moment
                connection.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")


def migrated_database(services: Services) -> str:
    """Return the address of a new database with every migration applied."""
    from migrations.runner import migrate

    url = services.create_database()
    in_a_thread(lambda: asyncio.run(migrate(url)))
    return url


def in_a_thread(work: Callable[[], object]) -> None:
    """Do the work outside the test's event loop, and pass on what it raises."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
