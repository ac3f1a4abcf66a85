"""asyncpg at Fencepost's edge: named statements on a small pool, and foreign errors become Fencepost's.

No transaction outlives a statement: every one is a single implicit transaction, so nothing is ever open while anything
else is awaited, and every statement works through a transaction pooler.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Final, Protocol

import asyncpg

from fencepost.errors import ConfigurationError, FencepostError, TransientError

__all__ = ["StatementPool", "Statements", "connecting", "inlined", "keep_nothing", "translated", "translation"]

# Passing faults by class of SQLSTATE: connection, resources, operator intervention, system, and rollbacks.
_TRANSIENT_CLASSES: Final = ("08", "40", "53", "57", "58")
_READ_ONLY: Final = "25006"
_LOCK_NOT_AVAILABLE: Final = "55P03"
_PARAMETER: Final = re.compile(r"\$(\d)")
# Fencepost's statements and functions name its objects in full.
_SCHEMA: Final = re.compile(r"\bfencepost\b")


@asynccontextmanager
async def translated(statement: str, *, role: str) -> AsyncIterator[None]:
    """Foreign errors in, Fencepost's out, cause kept: ``TransientError`` if waiting helps, else ``ConfigurationError``.

    ``role`` is what to grant to a user who may not. Errors of PostgreSQL that are neither pass through unchanged, and so does what
    a handler's own statement in a transaction of Fencepost's lacks: its table, or the right to it.
    """
    try:
        yield
    except Exception as error:
        ours = translation(statement, error, role=role)
        if ours is None:
            raise
        raise ours from error


def translation(statement: str, error: Exception, *, role: str) -> FencepostError | None:
    """What ``translated`` raises in place of the error; None where that passes through."""
    if isinstance(error, asyncpg.PostgresError):
        return _translate(statement, error, role)
    if isinstance(error, asyncpg.InterfaceError | asyncpg.InternalClientError | OSError | TimeoutError):
        # InternalClientError: the server's farewell has arrived on a pooled connection and its end has not, yet.
        return TransientError(f"{statement}: {type(error).__name__}: {error}")
    return None


def inlined(statement: str, *arguments: str) -> str:
    """A named statement with texts for its parameters, to be sent with others in one round trip, which takes no parameters.

    Raises ``ValueError`` for a NUL, which no text of PostgreSQL's holds.
    """
    text, numbers = _template(statement)
    return text % tuple([_literal(arguments[number]) for number in numbers])


@cache
def _template(statement: str) -> tuple[str, Sequence[int]]:
    """The text for ``%``, and which argument goes where. Comments go: a literal that has two lines would end one."""
    tag, *lines = statement.splitlines()
    text = "\n".join([tag, *(line for line in lines if not line.startswith("--"))]).replace("%", "%%")
    return _PARAMETER.sub("%s", text), [int(number) - 1 for number in _PARAMETER.findall(text)]


def _literal(text: str) -> str:
    """Quoted as libpq does it, which is right whatever ``standard_conforming_strings`` says. The driver speaks UTF-8, where no byte
    of a longer character is a quote."""
    if "\0" in text:
        raise ValueError("a text with a NUL")
    quoted = text.replace("'", "''")
    if "\\" in quoted:
        return " E'" + quoted.replace("\\", "\\\\") + "'"
    return f"'{quoted}'"


@asynccontextmanager
async def connecting(*, role: str) -> AsyncIterator[None]:
    """As ``translated``, and what the driver cannot read of the address is the operator's to mend. It is not quoted."""
    try:
        async with translated("connect", role=role):
            yield
    except (asyncpg.ClientConfigurationError, ValueError) as error:
        raise ConfigurationError("FENCEPOST_DATABASE_URL is not an address that PostgreSQL's clients take") from error


def _translate(statement: str, error: asyncpg.PostgresError, role: str) -> FencepostError | None:
    state = error.sqlstate or ""
    if state[:2] in _TRANSIENT_CLASSES or state in {_READ_ONLY, _LOCK_NOT_AVAILABLE}:
        return TransientError(f"{statement}: {state} {error}")
    if isinstance(error, asyncpg.InvalidAuthorizationSpecificationError | asyncpg.InvalidCatalogNameError):
        return ConfigurationError(f"FENCEPOST_DATABASE_URL: the database refused the connection: {error}")
    if isinstance(error, asyncpg.UndefinedTableError | asyncpg.UndefinedFunctionError | asyncpg.InvalidSchemaNameError):
        if not _SCHEMA.search(str(error)):
            return None
        return ConfigurationError(f"the schema is missing or older than this version ({error}); run `fencepost migrate`")
    if isinstance(error, asyncpg.ObjectInUseError):
        return ConfigurationError(f"{error.message}; {error.hint}" if error.hint else str(error))
    if isinstance(error, asyncpg.InsufficientPrivilegeError) and _is_ours(error):
        return ConfigurationError(f"{error}; grant {role} to this database user")
    return None


def _is_ours(refusal: asyncpg.InsufficientPrivilegeError) -> bool:
    """Whether it is Fencepost that may not. The words of a refusal leave the schema of a table out; the statement names it. The
    refusal of a connection has no statement."""
    query: str | None = getattr(refusal, "query", None)
    return query is None or _SCHEMA.search(f"{refusal} {query}") is not None


async def keep_nothing(_connection: asyncpg.Connection) -> None:
    """Statements leave no session state behind, so returning a connection to the pool needs no statement."""


class Statements(Protocol):
    """Where named statements run: a pool, or what stands in for one in tests."""

    async def fetch(self, name: str, *arguments: Any) -> Sequence[Any]: ...
    async def fetch_on(self, connection: Any, name: str, *arguments: Any) -> Sequence[Any]: ...
    async def close(self) -> None: ...


class StatementPool:
    """Runs named statements. ``timeout_seconds`` bounds each, and the wait for its connection."""

    def __init__(
        self, pool: "asyncpg.Pool[asyncpg.Record]", statements: Mapping[str, str], *, role: str, timeout_seconds: float
    ) -> None:
        self._pool = pool
        self._statements = statements
        self._role = role
        self._timeout = timeout_seconds

    @classmethod
    async def open(
        cls,
        database_url: str,
        statements: Mapping[str, str],
        *,
        role: str,
        size: int,
        timeout_seconds: float,
        init: Callable[[asyncpg.Connection], Coroutine[Any, Any, None]] | None = None,
        server_settings: Mapping[str, str],
    ) -> "StatementPool":
        """Connect once, so that a wrong address is known at once; ``role`` is what to grant to a user who may not."""
        async with connecting(role=role):
            pool = await asyncpg.create_pool(
                database_url,
                min_size=1,
                max_size=size,
                timeout=timeout_seconds,
                init=init,
                reset=keep_nothing,
                server_settings=dict(server_settings),
            )
        return cls(pool, statements, role=role, timeout_seconds=timeout_seconds)

    async def close(self) -> None:
        """Close every connection, by force if one hangs."""
        try:
            async with asyncio.timeout(2):
                await self._pool.close()
        except (TimeoutError, asyncpg.InterfaceError, OSError):
            self._pool.terminate()

    async def fetch(self, name: str, *arguments: object) -> Sequence[Any]:
        """The rows of the statement ``name``. Raises ``TransientError`` where waiting helps."""
        async with translated(name, role=self._role):
            connection = await self._pool.acquire(timeout=self._timeout)
            try:
                async with asyncio.timeout(self._timeout):
                    return await connection.fetch(self._statements[name], *arguments)
            except asyncpg.ReadOnlySQLTransactionError:
                # The server became a reader under open connections; new ones follow the address to the writer.
                await self._pool.expire_connections()
                raise
            except (TimeoutError, asyncio.CancelledError, asyncpg.InternalClientError):
                # asyncpg would wait without bound for the server's word on the cancelled statement, or use it again.
                connection.terminate()
                raise
            finally:
                await self._pool.release(connection)

    async def fetch_on(self, connection: asyncpg.Connection, name: str, *arguments: object) -> Sequence[Any]:
        """The same on a connection of the caller's, in its transaction and under its limits."""
        async with translated(name, role=self._role):
            return await connection.fetch(self._statements[name], *arguments)
