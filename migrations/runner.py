"""Applies the .sql files in order, each once: one runner at a time (advisory lock), each file checked by checksum.

``NNNN_pre_*`` is safe while the old code still runs, ``NNNN_post_*`` needs it gone. A file whose first line is
``-- no transaction`` holds one statement that cannot run inside one (CREATE INDEX CONCURRENTLY, say).
"""

import contextlib
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

import asyncpg

from fencepost.addresses import check_database_url
from fencepost.errors import ConfigurationError
from fencepost.statements import load_statements

__all__ = ["Migration", "MigrationState", "load_migrations", "migrate", "migration_states"]

_NAME = re.compile(r"(?P<number>\d{4})_(?P<phase>pre|post)_(?P<name>[a-z0-9_]+)\.sql")
_STATEMENTS = load_statements("migrations", "statements.sql")
_LOCK_TIMEOUT = "30s"


@dataclass(frozen=True, kw_only=True)
class Migration:
    """One file. ``checksum`` is the SHA-256 of its bytes, in hex."""

    number: int
    phase: Literal["pre", "post"]
    name: str
    sql: str
    checksum: str

    @property
    def transactional(self) -> bool:
        return not self.sql.startswith("-- no transaction")

    @property
    def title(self) -> str:
        return f"{self.number:04d}_{self.phase}_{self.name}"


@dataclass(frozen=True, kw_only=True)
class MigrationState:
    """A migration and when the database applied it, as ISO 8601 text; None while it is pending."""

    migration: Migration
    applied_at: str | None


def load_migrations() -> Sequence[Migration]:
    """Every migration that this version ships, in order."""
    found = [_read(entry.name, entry.read_bytes()) for entry in files("migrations").joinpath("sql").iterdir()]
    return sorted(found, key=lambda migration: migration.number)


def _read(filename: str, content: bytes) -> Migration:
    match = _NAME.fullmatch(filename)
    if match is None:
        raise ConfigurationError(f"migrations/sql/{filename}: name it NNNN_pre_words.sql or NNNN_post_words.sql")
    return Migration(
        number=int(match["number"]),
        phase="pre" if match["phase"] == "pre" else "post",
        name=match["name"],
        sql=content.decode(),
        checksum=hashlib.sha256(content).hexdigest(),
    )


async def migrate(
    database_url: str,
    *,
    migrations: Sequence[Migration] | None = None,
    dry_run: bool = False,
    progress: Callable[[Migration], None] = lambda migration: None,
) -> Sequence[Migration]:
    """Apply what is pending, in order, and return it; with ``dry_run`` only return it.

    Two runs at once are safe: the second waits for the first and finds nothing left to do.
    Raises ``ConfigurationError`` when an applied file has changed, or the database is ahead of this version.
    """
    shipped = load_migrations() if migrations is None else migrations
    async with _connection(database_url) as connection:
        if dry_run:
            return _pending(shipped, await _applied(connection))
        async with _only_runner(connection):
            await _create_ledger(connection)
            pending = _pending(shipped, await _applied(connection))
            for migration in pending:
                progress(migration)
                await _apply(connection, migration)
            return pending


async def _create_ledger(connection: asyncpg.Connection) -> None:
    try:
        await connection.execute(_STATEMENTS["create_ledger"])
    except asyncpg.InsufficientPrivilegeError as error:
        raise ConfigurationError(
            f"{error}; run `fencepost migrate` as a role that may create schemas and roles in this database"
        ) from error


async def migration_states(database_url: str) -> Sequence[MigrationState]:
    """Each shipped migration with the time it was applied, or None. Raises as ``migrate`` does."""
    async with _connection(database_url) as connection:
        applied = await _applied(connection)
        _pending(load_migrations(), applied)
    times = {number: applied_at for number, (_, applied_at) in applied.items()}
    return [MigrationState(migration=item, applied_at=times.get(item.number)) for item in load_migrations()]


@asynccontextmanager
async def _connection(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    try:
        connection = await asyncpg.connect(check_database_url(database_url), timeout=30)
    except (OSError, asyncpg.PostgresError) as error:
        raise ConfigurationError(f"FENCEPOST_DATABASE_URL: cannot connect to the database: {error}") from error
    except (ValueError, asyncpg.InterfaceError) as error:
        raise ConfigurationError("FENCEPOST_DATABASE_URL is not an address that PostgreSQL's clients take") from error
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def _only_runner(connection: asyncpg.Connection) -> AsyncIterator[None]:
    await connection.execute("SET lock_timeout = '60s'")
    try:
        await connection.execute(_STATEMENTS["lock_runner"])
    except asyncpg.LockNotAvailableError as error:
        raise ConfigurationError(
            "another `fencepost migrate` has held the lock for 60 s; wait for it, or see who holds it in pg_locks"
        ) from error
    try:
        await connection.execute(f"SET lock_timeout = '{_LOCK_TIMEOUT}'")
        yield
    finally:
        if not connection.is_closed():
            await connection.execute(_STATEMENTS["unlock_runner"])


async def _applied(connection: asyncpg.Connection) -> dict[int, tuple[str, str]]:
    try:
        if not await connection.fetchval(_STATEMENTS["ledger_exists"]):
            return {}
        rows = await connection.fetch(_STATEMENTS["applied"])
    except asyncpg.InsufficientPrivilegeError as error:
        raise ConfigurationError(f"{error}; grant fencepost_operator or fencepost_relay to this database user") from error
    return {row["number"]: (row["checksum"], row["applied_at"]) for row in rows}


def _pending(shipped: Sequence[Migration], applied: dict[int, tuple[str, str]]) -> Sequence[Migration]:
    known = {migration.number: migration for migration in shipped}
    for number, (checksum, _) in applied.items():
        if number not in known:
            raise ConfigurationError(
                f"the database has migration {number:04d}, which this version does not ship; use the newer version"
            )
        if known[number].checksum != checksum:
            raise ConfigurationError(
                f"{known[number].title}.sql differs from what the database applied; a released migration is never edited"
            )
    return [migration for migration in shipped if migration.number not in applied]


async def _apply(connection: asyncpg.Connection, migration: Migration) -> None:
    record = (migration.number, migration.title, migration.checksum)
    try:
        async with connection.transaction() if migration.transactional else contextlib.nullcontext():
            await connection.execute(migration.sql)
            await connection.execute(_STATEMENTS["record"], *record)
    except asyncpg.PostgresError as error:
        raise ConfigurationError(f"{migration.title}: {_said(error)}; nothing of this file was applied") from error


def _said(error: asyncpg.PostgresError) -> str:
    hint = getattr(error, "hint", None)
    return f"{error}; {hint}" if hint and hint not in str(error) else str(error)
