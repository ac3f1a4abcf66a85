"""Connections for what handlers do: transactions, and the ledger. They may wait for one another, never in the way of leases."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, cast

import asyncpg

from consumer_sdk.classification import Ambiguous
from consumer_sdk.effect_store import EFFECT_STATEMENTS
from fencepost.database import StatementPool, keep_nothing, translated
from fencepost.errors import TransientError

__all__ = ["Transactions", "open_effects"]

_GONE: Final = (asyncpg.PostgresConnectionError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError)

_SILENCE_SECONDS: Final = 5.0


class Transactions:
    """``limit_seconds`` bounds the wait for a connection, every statement, and a transaction's silence. It opens at first use."""

    def __init__(self, database_url: str, *, role: str, size: int, limit_seconds: float) -> None:
        self._database_url = database_url
        self._role = role
        self._size = size
        self._limit = limit_seconds
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None
        self._opening = asyncio.Lock()

    @asynccontextmanager
    async def begin(self, *, bounded: bool = True) -> AsyncIterator[asyncpg.Connection]:
        """A connection with a transaction begun. ``bounded`` False: the caller's first statement sets the bounds, and saves a round
        trip. Raises ``Ambiguous`` for a COMMIT without an answer, ``TransientError`` where nothing was committed."""
        pool = self._pool or await self._opened()
        async with translated("transaction", role=self._role):
            connection = await pool.acquire()  # connecting has a bound of its own, and so has whoever holds one
        try:
            async with _transaction_on(connection, limit_seconds=self._limit if bounded else None):
                yield cast("asyncpg.Connection", connection)
        finally:
            await pool.release(connection)

    def close(self) -> None:
        """Cut the connections; what was open on them is undone."""
        if self._pool is not None:
            self._pool.terminate()

    async def _opened(self) -> "asyncpg.Pool[asyncpg.Record]":
        async with self._opening:
            if self._pool is None:
                async with translated("transaction", role=self._role):
                    self._pool = await asyncpg.create_pool(
                        self._database_url,
                        min_size=0,
                        max_size=self._size,
                        timeout=self._limit,
                        # The driver's own reset costs as much as all the rest. What a handler sets, it sets for its transaction.
                        reset=keep_nothing,
                        command_timeout=self._limit + _SILENCE_SECONDS,  # a silent network must not hold a slot for ever
                        server_settings={"application_name": "fencepost-handler"},
                    )
        return self._pool


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


@asynccontextmanager
async def _transaction_on(
    connection: "asyncpg.pool.PoolConnectionProxy[asyncpg.Record]", *, limit_seconds: float | None
) -> AsyncIterator[None]:
    """A transaction that is never waited for in vain: one that was cut short is undone by the server when its connection ends.

    What fails before COMMIT is undone. Of a COMMIT without an answer nobody knows: ``Ambiguous``. Left open by a handler that
    hangs it must not outlive the lease: it would hold locks and the horizon. The limits are the transaction's, so a pooler
    may stand between.
    """
    transaction = connection.transaction()
    await transaction.start()
    try:
        if limit_seconds is not None:
            limit = int(limit_seconds * 1000)
            await connection.execute(  # numbers of our own
                f"SET LOCAL statement_timeout = {limit}; SET LOCAL idle_in_transaction_session_timeout = {limit}"
            )
        yield
    except TimeoutError as error:
        _cut(connection)
        raise TransientError("transaction: the database did not answer in time; nothing was committed") from error
    except asyncio.CancelledError:
        _cut(connection)
        raise
    except BaseException:
        with contextlib.suppress(*_GONE):  # the connection went first, and the transaction with it
            await transaction.rollback()
        raise
    try:
        await transaction.commit()
    except _GONE as error:
        _cut(connection)
        raise Ambiguous("commit_unknown") from error


def _cut(connection: "asyncpg.pool.PoolConnectionProxy[asyncpg.Record]") -> None:
    with contextlib.suppress(asyncpg.InterfaceError):  # the pool has let go of it already
        connection.terminate()
