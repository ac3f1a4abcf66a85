"""A service's side of every producer adapter: one connection, its transactions in its library's own words.

All are synchronous to the test; the asynchronous ones run on an event loop of their own.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import asyncpg
import django
import psycopg
import sqlalchemy
from django.conf import settings
from django.db import connections, transaction
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import producer_sdk.asyncpg
import producer_sdk.django
import producer_sdk.psycopg
import producer_sdk.sqlalchemy
from producer_sdk import Accepted, Cancellation, Command, Event, Run, Scope
from producer_sdk.identity import Unkeyed

Result = TypeVar("Result")

AUTOCOMMIT: Final = "AUTOCOMMIT"


class Writer(ABC):
    """One connection. With ``autocommit`` its library begins nothing, where the library has such a mode."""

    # Whether the library knows that the transaction is aborted before the database says so.
    knows_aborted = True

    @abstractmethod
    def execute(self, sql: str) -> None:
        """Run a statement of the service's own."""

    @abstractmethod
    def enqueue(self, event: Event) -> UUID:
        """Enqueue through the adapter."""

    @abstractmethod
    def enqueue_many(self, events: Sequence[Event]) -> list[UUID]:
        """Enqueue several through the adapter."""

    @abstractmethod
    def accept(self, command: Command, scope: Scope, key: str | Unkeyed, **options: Any) -> Accepted:
        """Accept a command through the adapter."""

    @abstractmethod
    def cancel(self, run_id: UUID, **options: Any) -> Cancellation:
        """Cancel a run through the adapter."""

    @abstractmethod
    def read_run(self, run_id: UUID, *, tenant_id: str) -> Run:
        """Read a run through the adapter."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[object]:
        """A transaction that commits, or rolls back on an exception."""

    @abstractmethod
    def savepoint(self) -> AbstractContextManager[object]:
        """A part of the transaction that is kept, or rolled back on an exception."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; an open transaction is rolled back."""


class AsyncWriter(Writer):
    """What the asynchronous writers share: a loop that turns each call into one that returns."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._runner.run(work)

    @contextmanager
    def entered(self, manager: AbstractAsyncContextManager[Any]) -> Iterator[None]:
        async def leave(error: BaseException | None) -> None:
            await manager.__aexit__(type(error) if error else None, error, error.__traceback__ if error else None)

        async def enter() -> None:
            await manager.__aenter__()

        self.run(enter())
        try:
            yield
        except BaseException as error:
            self.run(leave(error))
            raise
        else:
            self.run(leave(None))

    def close(self) -> None:
        self.run(self.disconnect())
        self._runner.close()

    @abstractmethod
    async def disconnect(self) -> None:
        """Close the connection."""


class AsyncpgWriter(AsyncWriter):
    knows_aborted = False

    def __init__(self, url: str, *, autocommit: bool = False) -> None:
        super().__init__()
        self.connection: Any = self.run(self.connect(url))

    async def connect(self, url: str) -> Any:
        return await asyncpg.connect(url)

    def execute(self, sql: str) -> None:
        self.run(self.connection.execute(sql))

    def enqueue(self, event: Event) -> UUID:
        return self.run(producer_sdk.asyncpg.enqueue(self.connection, event))

    def enqueue_many(self, events: Sequence[Event]) -> list[UUID]:
        return self.run(producer_sdk.asyncpg.enqueue_many(self.connection, events))

    def accept(self, command: Command, scope: Scope, key: str | Unkeyed, **options: Any) -> Accepted:
        return self.run(producer_sdk.asyncpg.accept(self.connection, command, scope, key, **options))

    def cancel(self, run_id: UUID, **options: Any) -> Cancellation:
        return self.run(producer_sdk.asyncpg.cancel(self.connection, run_id, **options))

    def read_run(self, run_id: UUID, *, tenant_id: str) -> Run:
        return self.run(producer_sdk.asyncpg.read_run(self.connection, run_id, tenant_id=tenant_id))

    def transaction(self) -> AbstractContextManager[object]:
        return self.entered(self.connection.transaction())

    def savepoint(self) -> AbstractContextManager[object]:
        return self.transaction()

    async def disconnect(self) -> None:
        await self.connection.close()


class AsyncpgPoolWriter(AsyncpgWriter):
    async def connect(self, url: str) -> Any:
        self.pool: Any = await asyncpg.create_pool(url, min_size=1, max_size=1)
        return await self.pool.acquire()

    async def disconnect(self) -> None:
        await self.pool.release(self.connection)
        await self.pool.close()


class PsycopgWriter(Writer):
    def __init__(self, url: str, *, autocommit: bool = False) -> None:
        self.connection = psycopg.connect(url, autocommit=autocommit)

    def execute(self, sql: str) -> None:
        self.connection.execute(sql.encode())

    def enqueue(self, event: Event) -> UUID:
        return producer_sdk.psycopg.enqueue(self.connection, event)

    def enqueue_many(self, events: Sequence[Event]) -> list[UUID]:
        return producer_sdk.psycopg.enqueue_many(self.connection, events)

    def accept(self, command: Command, scope: Scope, key: str | Unkeyed, **options: Any) -> Accepted:
        return producer_sdk.psycopg.accept(self.connection, command, scope, key, **options)

    def cancel(self, run_id: UUID, **options: Any) -> Cancellation:
        return producer_sdk.psycopg.cancel(self.connection, run_id, **options)

    def read_run(self, run_id: UUID, *, tenant_id: str) -> Run:
        return producer_sdk.psycopg.read_run(self.connection, run_id, tenant_id=tenant_id)

    def transaction(self) -> AbstractContextManager[object]:
        return self.connection.transaction()

    def savepoint(self) -> AbstractContextManager[object]:
        return self.transaction()

    def close(self) -> None:
        self.connection.close()


class PsycopgAsyncWriter(AsyncWriter):
    def __init__(self, url: str, *, autocommit: bool = False) -> None:
        super().__init__()
        self.connection = self.run(psycopg.AsyncConnection.connect(url, autocommit=autocommit))

    def execute(self, sql: str) -> None:
        self.run(self.connection.execute(sql.encode()))

    def enqueue(self, event: Event) -> UUID:
        return self.run(producer_sdk.psycopg.enqueue_async(self.connection, event))

    def enqueue_many(self, events: Sequence[Event]) -> list[UUID]:
        return self.run(producer_sdk.psycopg.enqueue_many_async(self.connection, events))

    def accept(self, command: Command, scope: Scope, key: str | Unkeyed, **options: Any) -> Accepted:
        return self.run(producer_sdk.psycopg.accept_async(self.connection, command, scope, key, **options))

    def cancel(self, run_id: UUID, **options: Any) -> Cancellation:
        return self.run(producer_sdk.psycopg.cancel_async(self.connection, run_id, **options))

    def read_run(self, run_id: UUID, *, tenant_id: str) -> Run:
        return self.run(producer_sdk.psycopg.read_run_async(self.connection, run_id, tenant_id=tenant_id))

    def transaction(self) -> AbstractContextManager[object]:
        return self.entered(self.connection.transaction())

    def savepoint(self) -> AbstractContextManager[object]:
        return self.transaction()

    async def disconnect(self) -> None:
        await self.connection.close()


class SqlalchemyWriter(Writer):
    def __init__(self, url: str, *, autocommit: bool = False) -> None:
        self.engine = sqlalchemy.create_engine(_named(url, "psycopg"), pool_size=1, **_isolation(autocommit))
        self.connection: Any = self.connect()

    def connect(self) -> sqlalchemy.Connection | Session:
        return self.engine.connect()

    def execute(self, sql: str) -> None:
        self.connection.execute(sqlalchemy.text(sql))

    def enqueue(self, event: Event) -> UUID:
        return producer_sdk.sqlalchemy.enqueue(self.connection, event)

    def enqueue_many(self, events: Sequence[Event]) -> list[UUID]:
        return producer_sdk.sqlalchemy.enqueue_many(self.connection, events)

    def accept(self, command: Command, scope: Scope, key: str | Unkeyed, **options: Any) -> Accepted:
        return producer_sdk.sqlalchemy.accept(self.connection, command, scope, key, **options)

    def cancel(self, run_id: UUID, **options: Any) -> Cancellation:
        return producer_sdk.sqlalchemy.cancel(self.connection, run_id, **options)

    def read_run(self, run_id: UUID, *, tenant_id: str) -> Run:
        return producer_sdk.sqlalchemy.read_run(self.connection, run_id, tenant_id=tenant_id)

    def transaction(self) -> AbstractContextManager[object]:
        begun: AbstractContextManager[object] = self.connection.begin()
        return begun

    def savepoint(self) -> AbstractContextManager[object]:
        begun: AbstractContextManager[object] = self.connection.begin_nested()
        return begun

    def close(self) -> None:
        self.connection.close()
        self.engine.dispose()


class SqlalchemySessionWriter(SqlalchemyWriter):
    def connect(self) -> Session:
        return Session(self.engine)


class SqlalchemyAsyncWriter(AsyncWriter):
    driver = "asyncpg"
    knows_aborted = False

    def __init__(self, url: str, *, autocommit: bool = False) -> None:
        super().__init__()
        self.engine = create_async_engine(_named(url, self.driver), pool_size=1, **_isolation(autocommit))
        self.connection: Any = self.run(self.connect())

    async def connect(self) -> AsyncConnection | AsyncSession:
        return await self.engine.connect()

    def execute(self, sql: str) -> None:
        self.run(self.connection.execute(sqlalchemy.text(sql)))

    def enqueue(self, event: Event) -> UUID:
        return self.run(producer_sdk.sqlalchemy.enqueue_async(self.connection, event))

    def enqueue_many(self, events: Sequence[Event]) -> list[UUID]:
        return self.run(producer_sdk.sqlalchemy.enqueue_many_async(self.connection, events))

    def accept(self, command: Command, scope: Scope, key: str | Unkeyed, **options: Any) -> Accepted:
        return self.run(producer_sdk.sqlalchemy.accept_async(self.connection, command, scope, key, **options))

    def cancel(self, run_id: UUID, **options: Any) -> Cancellation:
        return self.run(producer_sdk.sqlalchemy.cancel_async(self.connection, run_id, **options))

    def read_run(self, run_id: UUID, *, tenant_id: str) -> Run:
        return self.run(producer_sdk.sqlalchemy.read_run_async(self.connection, run_id, tenant_id=tenant_id))

    def transaction(self) -> AbstractContextManager[object]:
        return self.entered(self.connection.begin())

    def savepoint(self) -> AbstractContextManager[object]:
        return self.entered(self.connection.begin_nested())

    async def disconnect(self) -> None:
        await self.connection.close()
        await self.engine.dispose()


class SqlalchemyAsyncPsycopgWriter(SqlalchemyAsyncWriter):
    driver = "psycopg"
    knows_aborted = True


class SqlalchemyAsyncSessionWriter(SqlalchemyAsyncWriter):
    async def connect(self) -> AsyncSession:
        return AsyncSession(self.engine)


class DjangoWriter(Writer):
    def __init__(self, url: str, *, autocommit: bool = False) -> None:
        if not settings.configured:
            settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.dummy"}}, USE_TZ=True)
            django.setup()
        self.alias = f"test_{uuid4().hex}"
        connections.settings |= connections.configure_settings(
            {"default": connections.settings["default"], self.alias: _django_settings(url)}
        )

    def execute(self, sql: str) -> None:
        with connections[self.alias].cursor() as cursor:
            cursor.execute(sql)

    def enqueue(self, event: Event) -> UUID:
        return producer_sdk.django.enqueue(event, using=self.alias)

    def enqueue_many(self, events: Sequence[Event]) -> list[UUID]:
        return producer_sdk.django.enqueue_many(events, using=self.alias)

    def accept(self, command: Command, scope: Scope, key: str | Unkeyed, **options: Any) -> Accepted:
        return producer_sdk.django.accept(command, scope, key, using=self.alias, **options)

    def cancel(self, run_id: UUID, **options: Any) -> Cancellation:
        return producer_sdk.django.cancel(run_id, using=self.alias, **options)

    def read_run(self, run_id: UUID, *, tenant_id: str) -> Run:
        return producer_sdk.django.read_run(run_id, tenant_id=tenant_id, using=self.alias)

    def transaction(self) -> AbstractContextManager[object]:
        return transaction.atomic(using=self.alias)

    def savepoint(self) -> AbstractContextManager[object]:
        return self.transaction()

    def close(self) -> None:
        connections[self.alias].close()
        del connections[self.alias]
        del connections.settings[self.alias]


WRITERS: Final[Mapping[str, Callable[..., Writer]]] = {
    "asyncpg": AsyncpgWriter,
    "asyncpg-pool": AsyncpgPoolWriter,
    "psycopg": PsycopgWriter,
    "psycopg-async": PsycopgAsyncWriter,
    "sqlalchemy-connection": SqlalchemyWriter,
    "sqlalchemy-session": SqlalchemySessionWriter,
    "sqlalchemy-async-connection": SqlalchemyAsyncWriter,
    "sqlalchemy-async-psycopg": SqlalchemyAsyncPsycopgWriter,
    "sqlalchemy-async-session": SqlalchemyAsyncSessionWriter,
    "django": DjangoWriter,
}
# Their libraries begin a transaction at the first statement.
SELF_BEGINNING: Final = tuple(name for name in WRITERS if name.startswith(("psycopg", "sqlalchemy")))


def _named(url: str, driver: str) -> sqlalchemy.URL:
    return sqlalchemy.make_url(url).set(drivername=f"postgresql+{driver}")


def _isolation(autocommit: bool) -> dict[str, Any]:
    return {"isolation_level": AUTOCOMMIT} if autocommit else {}


def _django_settings(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path.lstrip("/"),
        "USER": parts.username,
        "PASSWORD": parts.password or "",
        "HOST": parts.hostname,
        "PORT": parts.port,
    }
