"""Chooses where PostgreSQL and Kafka come from, starts both at once, and stops what it started.

The first that works is taken: addresses given in the environment, containers, local processes from packages. A run
never uses a service that the machine happens to have.
"""

import atexit
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar, assert_never
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

from fencepost.devservices import containers
from fencepost.devservices.errors import ServicesError
from fencepost.devservices.kafka import Broker, LocalKafka
from fencepost.devservices.postgres import LocalPostgres
from fencepost.devservices.processes import Watchdog

logger = logging.getLogger(__name__)

First = TypeVar("First")
Second = TypeVar("Second")

Kind = Literal["given", "containers", "local"]

DATABASE_VARIABLE: Final = "FENCEPOST_TEST_DATABASE_URL"
KAFKA_VARIABLE: Final = "FENCEPOST_TEST_KAFKA"


class Services:
    """A PostgreSQL and a Kafka, with what tests do to them. A context manager: leaving it stops what was started."""

    def __init__(
        self,
        kind: Kind,
        database_url: str,
        bootstrap_servers: str,
        *,
        local: "LocalServices | None" = None,
        stop: Callable[[], None] | None = None,
    ) -> None:
        self.kind: Kind = kind
        #: Address of the database `postgres` for a superuser: `postgresql://user:password@host:port/postgres`.
        self.database_url = database_url
        #: Addresses of the brokers: `host:port`, separated by commas.
        self.bootstrap_servers = bootstrap_servers
        self._local = local
        self._stop = stop

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def postgres(self) -> LocalPostgres:
        """The local PostgreSQL server, to be stopped, restarted or paused."""
        return self._processes("postgres").postgres

    @property
    def broker(self) -> Broker:
        """The first local broker, to be stopped, killed, paused and started again."""
        return self.brokers[0]

    @property
    def brokers(self) -> list[Broker]:
        """All local brokers."""
        return self._processes("brokers").kafka.brokers

    def stop(self) -> None:
        """Stop what was started; given services are left alone. A second call does nothing."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()

    def create_database(self, template: str | None = None) -> str:
        """Create a database with a name of its own and return its address.

        `template` is the name or the address of a database to clone; nobody may be connected to it.
        """
        name = f"fencepost_{uuid.uuid4().hex[:16]}"
        statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
        if template is not None:
            statement += sql.SQL(" TEMPLATE {}").format(sql.Identifier(_database_name(template)))
        with psycopg.connect(self.database_url, autocommit=True) as connection:
            connection.execute(statement)
        return _with_database(self.database_url, name)

    def drop_database(self, url: str) -> None:
        """Drop a database that `create_database` made, with its connections and prepared transactions."""
        name = _database_name(url)
        with psycopg.connect(_with_database(self.database_url, name), autocommit=True) as connection:
            prepared = connection.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")
            for (gid,) in prepared.fetchall():
                connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
        with psycopg.connect(self.database_url, autocommit=True) as connection:
            _forget_statements(connection, name)
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

    def _processes(self, what: str) -> "LocalServices":
        if self._local is None:
            raise ServicesError(
                f"services.{what} needs local services that this handle started; this one has {self.kind!r} services "
                'without their processes. Use start_services(kind="local"), in tests the fixture own_services'
            )
        return self._local


class LocalServices:
    """Local processes of one run, with their directory and their watchdog."""

    def __init__(self, directory: Path | None, brokers: int) -> None:
        self._watchdog = Watchdog()
        self._own_directory = directory is None
        try:
            self.directory = _prepare(directory)
            if self._own_directory:
                self._watchdog.remove(self.directory)
            self.postgres, self.kafka = _both(
                lambda: LocalPostgres(self.directory, self._watchdog),
                lambda: LocalKafka(self.directory, self._watchdog, brokers),
            )
            _both(self.postgres.create, self.kafka.create)
        except BaseException:
            # Also removes the directory if it is this run's own.
            self._watchdog.close()
            raise

    def stop(self) -> None:
        """Stop both services, then the watchdog."""
        try:
            _both(self.postgres.stop, self.kafka.stop)
        finally:
            self._watchdog.close()
            if self._own_directory:
                shutil.rmtree(self.directory, ignore_errors=True)


def start_services(directory: Path | None = None, brokers: int = 1, *, kind: Kind | None = None) -> Services:
    """Return a PostgreSQL and a Kafka that answer.

    `directory` takes data and logs of local services; it is kept, while a directory of the run's own is removed.
    More than one broker means local services. `kind` asks for one kind and no other, for tests that stop a service.
    """
    if kind is None and brokers == 1:
        found = given_services() or _containers_if_they_work()
        if found is not None:
            return found
    match kind:
        case "given":
            found = given_services()
            if found is None:
                raise ServicesError(f"no addresses given: set {DATABASE_VARIABLE} and {KAFKA_VARIABLE}")
            return found
        case "containers":
            return container_services()
        case "local" | None:
            return local_services(directory, brokers)
        case _:
            assert_never(kind)


def given_services() -> Services | None:
    """Return the services whose addresses the environment gives, None if it gives none."""
    database_url, bootstrap_servers = os.environ.get(DATABASE_VARIABLE), os.environ.get(KAFKA_VARIABLE)
    if bool(database_url) != bool(bootstrap_servers):
        missing = KAFKA_VARIABLE if database_url else DATABASE_VARIABLE
        raise ServicesError(f"{missing} is not set; give both addresses, or neither to have the services started")
    if not (database_url and bootstrap_servers):
        return None
    return Services("given", database_url, bootstrap_servers)


def container_services() -> Services:
    """Start both services in containers."""
    with ThreadPoolExecutor(2) as pool:
        starting = [pool.submit(containers.start_postgres), pool.submit(containers.start_kafka)]
    started = [one.result() for one in starting if one.exception() is None]

    def stop() -> None:
        for container in started:
            container.stop()

    if len(started) < len(starting):
        stop()
    postgres, kafka = (one.result() for one in starting)
    # A forgotten stop is otherwise left to testcontainers' reaper, which may be disabled.
    services = Services("containers", postgres.address, kafka.address, stop=stop)
    atexit.register(services.stop)
    return services


def local_services(directory: Path | None = None, brokers: int = 1) -> Services:
    """Start both services as local processes."""
    local = LocalServices(directory, brokers)
    url, bootstrap_servers = local.postgres.url, local.kafka.bootstrap_servers
    return Services("local", url, bootstrap_servers, local=local, stop=local.stop)


def _containers_if_they_work() -> Services | None:
    if not containers.docker_answers():
        return None
    try:
        return container_services()
    except Exception as error:  # noqa: BLE001 - an image that can't be had is no reason to give up
        logger.warning("a Docker daemon answers, but the containers did not start (%s); using local services", error)
        return None


def _prepare(directory: Path | None) -> Path:
    if directory is None:
        own = Path(tempfile.mkdtemp(prefix="fencepost-"))
        # The database's account, which may be another one, has to get to its data below.
        own.chmod(0o711)
        return own
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise ServicesError(f"{directory} is not empty; name a new directory for the services")
    return directory.resolve()


def _both(first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.submit(first), pool.submit(second)
    return one.result(), other.result()


def _database_name(name_or_url: str) -> str:
    return urlsplit(name_or_url).path.lstrip("/") if "://" in name_or_url else name_or_url


def _forget_statements(connection: "psycopg.Connection[Any]", database: str) -> None:
    # Counts outlive their database, and the server's table of them is bounded: they would push out those of living ones.
    counted = "SELECT to_regproc('pg_stat_statements_reset') IS NOT NULL"
    if connection.execute(counted).fetchone() == (True,):
        connection.execute("SELECT pg_stat_statements_reset(0, oid, 0) FROM pg_database WHERE datname = %s", [database])


def _with_database(url: str, name: str) -> str:
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))
