"""The accepting transaction: what a handler writes in it commits with the run that it starts, or not at all.

Fencepost begins and commits it, so that nothing is answered before the commit. By default it is one of asyncpg on a small pool of
Fencepost's own; ``SessionTransactions`` takes the application's SQLAlchemy or SQLModel sessions instead.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, TypeAlias

import asyncpg

from fencepost.database import connecting, translated
from fencepost.errors import FencepostError, TransactionRequired, TransientError
from fencepost.secrets import Secrets
from fencepost.watched import WatchedConnection
from producer_sdk import asyncpg as plain
from producer_sdk.acceptance import Accepted
from producer_sdk.command import Command
from producer_sdk.http.store import ROLE
from producer_sdk.identity import Scope, Unkeyed
from producer_sdk.writing import Parameters, Statement

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import SessionTransaction

__all__ = [
    "IN_TRANSACTION",
    "CommitUnknown",
    "OpenTransaction",
    "PoolTransactions",
    "SessionTransactions",
    "Transactions",
    "Tx",
    "is_passing",
]

_PASSING_CLASSES: Final = ("08", "40", "53", "57", "58")
_NOT_THEIRS: Final = "the handler has ended the accepting transaction: commit and rollback are Fencepost's"
_READ_ONLY: Final = "25006"
_LOCK_NOT_AVAILABLE: Final = "55P03"
#: Of a COMMIT; a listener that hangs in a transaction keeps it full.
_NOTIFICATIONS_FULL: Final = "54000"
_LOST: Final = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError)


class _InTransaction:
    def __repr__(self) -> str:
        return "IN_TRANSACTION"


#: Marks the parameter of a handler that gets the accepting transaction: ``Annotated[AsyncSession, IN_TRANSACTION]``.
IN_TRANSACTION: Final = _InTransaction()
#: A handler's ``tx: Tx`` is an asyncpg connection within the accepting transaction: use it, and leave commit and rollback alone.
Tx: TypeAlias = Annotated["asyncpg.Connection[Any]", IN_TRANSACTION]


class CommitUnknown(Exception):
    """The COMMIT was sent and its answer never came: the run exists, or it does not."""


class OpenTransaction(Protocol):
    """One accepting transaction. ``tx`` is what the handler gets."""

    tx: Any

    async def row(self, statement: Statement, parameters: Parameters) -> Sequence[Any]:
        """The one row of a statement of Fencepost's."""

    async def accept(
        self, command: Command, scope: Scope, key: str | Unkeyed, *, secrets: Secrets, key_retention_seconds: float
    ) -> Accepted: ...

    async def commit(self) -> None:
        """Raises ``CommitUnknown`` where nobody knows whether it did."""

    def abandon(self) -> None:
        """Take its connection away from whoever does not give it back."""


class Transactions(Protocol):
    """Where accepting transactions come from."""

    def begin(self) -> AbstractAsyncContextManager[OpenTransaction]:
        """A transaction, rolled back at the end unless it was committed. Raises ``TransientError`` where waiting helps."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...


class PoolTransactions:
    """Transactions of asyncpg, READ COMMITTED, on a pool of their own: whatever the application's pool is short of, a start is
    not."""

    def __init__(
        self, database_url: str, *, size: int, patience_seconds: float, timeout_seconds: float, idle_seconds: float
    ) -> None:
        """``patience_seconds`` bounds the wait for one of the connections, ``timeout_seconds`` that for the database,
        ``idle_seconds`` the silence of a transaction."""
        self._database_url = database_url
        self._size = size
        self._patience = patience_seconds
        self._timeout = timeout_seconds
        self._idle_seconds = idle_seconds
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None

    async def open(self) -> None:
        async with connecting(role=ROLE):
            self._pool = await asyncpg.create_pool(
                self._database_url,
                min_size=0,
                max_size=self._size,
                timeout=self._timeout,
                connection_class=WatchedConnection,
                command_timeout=self._idle_seconds,  # a network that fell silent at a COMMIT must not hold a connection for ever
                server_settings={
                    "application_name": "fencepost-routes",
                    "idle_in_transaction_session_timeout": str(int(self._idle_seconds * 1000)),
                },
            )

    async def close(self) -> None:
        if self._pool is not None:
            self._pool.terminate()

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[OpenTransaction]:
        assert self._pool is not None
        async with translated("begin", role=ROLE):
            connection: Any = await self._pool.acquire(timeout=self._patience)
        # Whatever the database's default: in an older snapshot a key that was taken meanwhile is not seen, and SERIALIZABLE refuses
        # starts of different keys that read one page of an index.
        transaction = connection.transaction(isolation="read_committed")
        try:
            async with translated("begin", role=ROLE), asyncio.timeout(self._timeout):
                await transaction.start()
            connection.watch()
            opened = _PoolTransaction(connection)
            yield opened
            if not opened.committed:
                await transaction.rollback()
        except asyncio.CancelledError:
            # The server rolls back by itself; asyncpg would wait for its word on a statement that hangs.
            _terminate(connection)
            raise
        except BaseException as error:
            await _rolled_back(connection, transaction, self._timeout)
            if _sqlstate(error) == _READ_ONLY:
                # The server became a reader under open connections; new ones follow the address to the writer.
                await self._pool.expire_connections()
            if is_passing(error) and not isinstance(error, TransientError):
                raise TransientError(f"start: {type(error).__name__}") from error
            raise
        finally:
            with contextlib.suppress(*_LOST):  # the pool ends what it cannot take back, and what was committed is committed
                await self._pool.release(connection, timeout=self._timeout)


async def _rolled_back(connection: Any, transaction: Any, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            if connection.is_in_transaction():
                # Not by a ROLLBACK of ours: the pool would warn of a transaction that it believes open.
                await transaction.rollback()
    except _LOST:
        _terminate(connection)


def _terminate(connection: Any) -> None:
    with contextlib.suppress(asyncpg.InterfaceError):  # the pool has taken a lost connection back already
        connection.terminate()


class _PoolTransaction:
    def __init__(self, connection: Any) -> None:
        self.tx = connection
        self.committed = False

    async def row(self, statement: Statement, parameters: Parameters) -> Sequence[Any]:
        async with translated("start", role=ROLE):
            row: Sequence[Any] = await self.tx.fetchrow(statement.numbered, *parameters)
        return row

    async def accept(
        self, command: Command, scope: Scope, key: str | Unkeyed, *, secrets: Secrets, key_retention_seconds: float
    ) -> Accepted:
        async with translated("accept", role=ROLE):
            return await plain.accept(self.tx, command, scope, key, secrets=secrets, key_retention_seconds=key_retention_seconds)

    def abandon(self) -> None:
        _terminate(self.tx)

    async def commit(self) -> None:
        if self.tx.was_ended:
            raise TransactionRequired(_NOT_THEIRS)
        self.committed = True
        try:
            await self.tx.commit_by_owner()
        except _LOST as error:
            _raise_for_commit(error)
            raise


class SessionTransactions:
    """Transactions of the application's sessions: ``Durable(..., transactions=SessionTransactions(async_sessionmaker(engine)))``.

    The handler's parameter is ``Annotated[AsyncSession, IN_TRANSACTION]``; SQLModel's session fits as well. The engine runs on
    asyncpg or psycopg, chooses the isolation level, and bounds the wait for its connections itself (``pool_timeout``).
    """

    def __init__(self, sessions: "Callable[[], AsyncSession]") -> None:
        self._sessions = sessions

    async def open(self) -> None:
        """The engine is the application's."""

    async def close(self) -> None:
        """The engine is the application's."""

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[OpenTransaction]:
        async with self._sessions() as session:
            try:
                begun = await session.begin()
                yield _SessionTransaction(session, begun.sync_transaction)
            except BaseException as error:
                if is_passing(error) and not isinstance(error, TransientError):
                    raise TransientError(f"start: {type(error).__name__}") from error
                raise


class _SessionTransaction:
    def __init__(self, session: "AsyncSession", transaction: "SessionTransaction | None") -> None:
        self.tx = session
        self._transaction = transaction

    async def row(self, statement: Statement, parameters: Parameters) -> Sequence[Any]:
        connection = await self.tx.connection()
        numbered = connection.dialect.driver == "asyncpg"
        result = await connection.exec_driver_sql(statement.numbered if numbered else statement.counted, parameters)
        return tuple(result.one())

    async def accept(
        self, command: Command, scope: Scope, key: str | Unkeyed, *, secrets: Secrets, key_retention_seconds: float
    ) -> Accepted:
        from producer_sdk import sqlalchemy

        # A session begins the next transaction by itself: the run would be there without the handler's writes, or they without it.
        if self.tx.sync_session.get_transaction() is not self._transaction:
            raise TransactionRequired(_NOT_THEIRS)
        return await sqlalchemy.accept_async(
            self.tx, command, scope, key, secrets=secrets, key_retention_seconds=key_retention_seconds
        )

    def abandon(self) -> None:
        """The engine is the application's, and its connections are."""

    async def commit(self) -> None:
        await self.tx.flush()
        try:
            await self.tx.commit()
        except Exception as error:
            _raise_for_commit(error)
            raise


def is_passing(error: BaseException) -> bool:
    """Whether it is the database's own fault and passes: a lost connection, a deadlock, no connection free, a server that has
    become a reader."""
    state = _sqlstate(error)
    if state is not None:
        return state[:2] in _PASSING_CLASSES or state in {_READ_ONLY, _LOCK_NOT_AVAILABLE}
    lost = getattr(error, "connection_invalidated", False) or type(error).__module__.startswith("sqlalchemy.exc")
    return isinstance(error, asyncpg.InterfaceError | asyncpg.InternalClientError) or (
        lost and type(error).__name__ in {"TimeoutError", "OperationalError", "InterfaceError"}
    )


def _raise_for_commit(error: Exception) -> None:
    """What the failure of a COMMIT means, where it is not the application's."""
    state = _sqlstate(error) or ""
    if state == _NOTIFICATIONS_FULL:
        raise TransientError("commit: the database's queue of notifications is full") from error
    # Serialization failures and deadlocks are the server's word that nothing was committed.
    if isinstance(error, OSError) or (is_passing(error) and state[:2] != "40"):
        raise CommitUnknown from error


def _sqlstate(error: BaseException) -> str | None:
    """Of a driver's error, or of the one that SQLAlchemy or Fencepost has wrapped. What an application has made of one is the
    application's."""
    original = error.__cause__ if isinstance(error, FencepostError) else getattr(error, "orig", None)
    for one in (error, original, getattr(original, "orig", None), getattr(original, "__cause__", None)):
        state = getattr(one, "sqlstate", None)
        if isinstance(state, str):
            return state
    return None
