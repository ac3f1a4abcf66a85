"""Connections for what handlers do: transactions, and the ledger. They may wait for one another, never in the way of leases."""

import asyncio
import contextlib
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import asyncpg
from asyncpg.pool import PoolConnectionProxy
from asyncpg.transaction import Transaction

from consumer_sdk.classification import Ambiguous
from consumer_sdk.effect_store import EFFECT_STATEMENTS
from consumer_sdk.identity import Identity
from fencepost.clock import lease_clock
from fencepost.database import StatementPool, inlined, translation
from fencepost.errors import TransientError
from fencepost.statements import load_statements
from fencepost.watched import UNSET, UNSET_ROLE, WatchedConnection

if TYPE_CHECKING:
    _Proxy: TypeAlias = PoolConnectionProxy[asyncpg.Record]
else:
    _Proxy = PoolConnectionProxy

__all__ = ["HandlerConnection", "Transactions", "open_effects", "whole_milliseconds"]

_RECORD: Final = load_statements("consumer_sdk", "messages.sql")["record_message"]
_GONE: Final = (asyncpg.PostgresConnectionError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError)

# Cut short, or on a server that became a reader: not used again, nor waited for.
_CUT: Final = (TimeoutError, asyncio.CancelledError, asyncpg.ReadOnlySQLTransactionError)

_SILENCE_SECONDS: Final = 5.0
_IDLE_SECONDS: Final = 300.0
# The most that a setting of PostgreSQL's holds: 24 days. A handler may take longer.
_MOST_MILLISECONDS: Final = 2**31 - 1


class HandlerConnection(WatchedConnection):
    """``begin`` and ``end`` are one round trip each, whatever else goes out with BEGIN. The driver's own object of a transaction
    would make it more; it only stands there, so that a transaction which a handler begins is a savepoint."""

    _outer: Transaction | None = None

    async def begin(self, rest: str, *, unset: str) -> int:
        """Begin a transaction, in which the statements ``rest`` are the first; how many rows the last of them came to. ``unset``
        undoes what an earlier handler has set, another tenant's search path say; before, since BEGIN reads some of it."""
        before = f"BEGIN; {unset}COMMIT; " if self.was_set else ""
        status = await asyncpg.Connection.execute(self, f"{before}BEGIN; {rest}")
        if self._outer is None:
            self._outer = self.transaction()
        self._top_xact = self._outer
        self.watch()
        return int(status.rpartition(" ")[2]) if status.startswith("SELECT") else 0

    async def end(self, *, commit: bool) -> None:
        """Commit or undo it. What PostgreSQL undoes where it was to commit has failed."""
        if not commit:
            self._top_xact = None
            await asyncpg.Connection.execute(self, "ROLLBACK")
            return
        if self.was_ended or not self.is_in_transaction():
            told = "the handler ended the transaction, which is not its own; what it wrote may be undone"
            raise asyncpg.NoActiveSQLTransactionError(told)
        await self.commit_by_owner()

    def returned(self) -> None:
        """The handler's cursors, statements and listeners end here, as where a pool of the driver's takes a connection back."""
        self._on_release()  # type: ignore[attr-defined]
        self._listeners.clear()  # type: ignore[attr-defined]
        self._log_listeners.clear()  # type: ignore[attr-defined]


class _Lent(_Proxy):
    """What a handler holds of a connection: it ends with the transaction, and cannot reach into the next one."""

    def __init__(self, connection: HandlerConnection) -> None:
        super().__init__(cast("Any", None), connection)

    def take_back(self) -> None:
        self._detach()  # type: ignore[attr-defined]


class Transactions:
    """``limit_seconds`` bounds the wait for a connection to open, and of a bounded transaction every statement and its silence;
    ``longest_seconds`` is the most that the others ask for. ``own_sessions``: no pooler stands between, so the longest is every
    session's bound, a transaction sets its own only where that is another, and what its predecessor has set is undone. Connections
    are opened when they are needed, ``size`` at most, and closed when they were not for minutes.

    Not a pool of the driver's: what it does around each use costs as much as a statement.
    """

    def __init__(
        self,
        database_url: str,
        *,
        role: str,
        size: int,
        limit_seconds: float,
        longest_seconds: float = 0.0,
        own_sessions: bool = False,
    ) -> None:
        self._database_url = database_url
        self._role = role
        self._limit = limit_seconds
        self._longest = max(limit_seconds, longest_seconds)
        self._session_bound = self._longest if own_sessions else None
        self.unset = UNSET if own_sessions else UNSET_ROLE  # what else is set for the session is the pooler's business
        self._slots = asyncio.Semaphore(size)
        # The last that came back is the next to go out: the others fall idle.
        self._idle: list[tuple[HandlerConnection, float]] = []
        self._lent: set[HandlerConnection] = set()
        self._sweeping: asyncio.TimerHandle | None = None
        self._closed = False

    def begin(self, *, bounded: bool = True) -> "_Transaction":
        """A connection with a transaction begun. ``bounded`` False: the caller's first statement sets the bounds. Raises
        ``Ambiguous`` for a COMMIT without an answer, ``TransientError`` where nothing was committed."""
        return _Transaction(self, role=self._role, rest=self._bounds(self._limit) if bounded else "")

    def begin_recorded(self, identity: Identity, *, holder: str, limit_seconds: float) -> "_Recorded":
        """The same with a message recorded as handled before anything else, and bounds of its own: one round trip. For a message
        that was handled before it gives None in place of the connection."""
        return _Recorded(self, role=self._role, rest=self._bounds(limit_seconds) + inlined(_RECORD, *identity, holder))

    def _bounds(self, seconds: float) -> str:
        return "" if seconds == self._session_bound else _local_bounds(seconds)

    def close(self) -> None:
        """Cut the connections; what was open on them is undone."""
        self._closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in [*self._lent, *(idle for idle, _ in self._idle)]:
            connection.terminate()
        self._idle.clear()

    async def acquire(self) -> HandlerConnection:
        """A connection that is nobody else's; waits for one."""
        await self._slots.acquire()
        try:
            if self._closed:
                raise asyncpg.InterfaceError("the connections are closed")
            connection = self._usable() or await self._connected()
        except BaseException:
            self._slots.release()
            raise
        self._lent.add(connection)
        return connection

    def release(self, connection: HandlerConnection, *, reusable: bool) -> None:
        """Give it back. One whose state is not known is never used again: the server undoes what is open on it."""
        self._lent.discard(connection)
        self._slots.release()
        if not reusable or self._closed or connection.is_closed() or connection.is_in_transaction():
            connection.terminate()
            return
        connection.returned()
        self._idle.append((connection, lease_clock()))
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._sweep)

    def _usable(self) -> HandlerConnection | None:
        while self._idle:
            connection, _ = self._idle.pop()
            if not connection.is_closed():
                return connection
            connection.terminate()
        return None

    async def _connected(self) -> HandlerConnection:
        connection: HandlerConnection = await asyncpg.connect(
            self._database_url,
            timeout=self._limit,
            command_timeout=self._longest + _SILENCE_SECONDS,  # a silent network must not hold a slot for ever
            server_settings={"application_name": "fencepost-handler", **self._session_settings()},
            connection_class=HandlerConnection,
        )
        return connection

    def _session_settings(self) -> dict[str, str]:
        if self._session_bound is None:
            return {}
        return dict.fromkeys(
            ("statement_timeout", "idle_in_transaction_session_timeout"), str(whole_milliseconds(self._session_bound))
        )

    def _sweep(self) -> None:
        """Close those that nobody has needed for long. They are the first: each was there when another was taken."""
        old = lease_clock() - _IDLE_SECONDS
        while self._idle and self._idle[0][1] <= old:
            self._idle.pop(0)[0].terminate()
        loop = asyncio.get_running_loop()
        self._sweeping = loop.call_later(self._idle[0][1] - old, self._sweep) if self._idle else None


class _Work:
    """What is done in a transaction that is never waited for in vain: one that was cut short is undone by the server when its
    connection ends.

    What fails before COMMIT is undone. Of a COMMIT without an answer nobody knows: ``Ambiguous``. Left open by a handler that
    hangs it must not outlive the lease: it would hold locks and the horizon. Behind a pooler the limits are the transaction's.
    """

    _connection: HandlerConnection
    _lent: _Lent

    def __init__(self, transactions: Transactions, *, role: str, rest: str) -> None:
        self._transactions = transactions
        self._role = role
        self._rest = rest

    async def _begin(self) -> int:
        try:
            self._connection = connection = await self._transactions.acquire()
            try:
                rows = await connection.begin(self._rest, unset=self._transactions.unset)
            except BaseException:
                self._transactions.release(connection, reusable=False)
                raise
        except Exception as error:
            self._raise_ours(error)
            raise
        self._lent = _Lent(connection)
        return rows

    async def __aexit__(
        self, _class: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        ended = False
        try:
            if error is None:
                await self._commit()
                ended = True
            elif not isinstance(error, _CUT):
                with contextlib.suppress(*_GONE):  # the connection went first, or is silent, and the transaction goes with it
                    async with asyncio.timeout(_SILENCE_SECONDS):
                        await self._connection.end(commit=False)
                    ended = True
        except Exception as failure:
            self._raise_ours(failure)
            raise
        finally:
            self._lent.take_back()
            self._transactions.release(self._connection, reusable=ended)
        if isinstance(error, TimeoutError):
            raise TransientError("transaction: the database did not answer in time; nothing was committed") from error
        self._raise_ours(error)

    async def _commit(self) -> None:
        try:
            await self._connection.end(commit=True)
        except _GONE as error:
            raise Ambiguous("commit_unknown") from error

    def _raise_ours(self, error: BaseException | None) -> None:
        if isinstance(error, Exception) and (ours := translation("transaction", error, role=self._role)) is not None:
            raise ours from error


class _Transaction(_Work):
    async def __aenter__(self) -> asyncpg.Connection:
        await self._begin()
        return cast("asyncpg.Connection", self._lent)


class _Recorded(_Work):
    async def __aenter__(self) -> asyncpg.Connection | None:
        return cast("asyncpg.Connection", self._lent) if await self._begin() else None


def whole_milliseconds(seconds: float) -> int:
    """A bound as PostgreSQL takes it."""
    return min(max(int(seconds * 1000), 1), _MOST_MILLISECONDS)


@cache
def _local_bounds(seconds: float) -> str:
    """Numbers of our own: nothing to quote."""
    limit = whole_milliseconds(seconds)
    return f"SET LOCAL statement_timeout = {limit}; SET LOCAL idle_in_transaction_session_timeout = {limit}; "


async def open_effects(database_url: str, *, role: str, size: int, timeout_seconds: float) -> StatementPool:
    """The ledger's statements, on connections of their own: handlers that wait for it must not wait in the way of leases."""
    return await StatementPool.open(
        database_url,
        EFFECT_STATEMENTS,
        role=role,
        size=size,
        timeout_seconds=timeout_seconds,
        server_settings={"application_name": "fencepost-ledger"},
    )
