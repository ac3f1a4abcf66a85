"""What the operator's commands share: one connection, named statements, tables or JSON."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final

import asyncpg
import typer
from rich.console import Console
from rich.table import Table

from fencepost.addresses import check_database_url
from fencepost.errors import TransientError
from fencepost.statements import load_statements
from relay.store import translated

__all__ = ["DatabaseUrl", "Inspector", "JsonOutput", "inspecting", "print_json", "print_table", "seconds"]

_SQL: Final = load_statements("relay", "inspection.sql")
_TIMEOUT_SECONDS: Final = 30
_WRITERS: Final = {"rebase": "the role that owns the schema"}

DatabaseUrl = Annotated[str, typer.Option("--database-url", envvar="FENCEPOST_DATABASE_URL", help="Database of the outbox.")]
JsonOutput = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Inspector:
    """Runs the statements of inspection.sql on one connection."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self.connection = connection

    async def rows(self, name: str, *arguments: object) -> Sequence[Any]:
        async with translated(name, role=_WRITERS.get(name, "fencepost_operator (to look) or fencepost_relay (to relay)")):
            return await self.connection.fetch(_SQL[name], *arguments, timeout=_TIMEOUT_SECONDS)


@asynccontextmanager
async def inspecting(database_url: str) -> AsyncIterator[Inspector]:
    """An inspector, connected. Raises ``ConfigurationError`` without an address, ``TransientError`` without an answer."""
    address = check_database_url(database_url)
    try:
        async with translated("connect"):
            connection = await asyncpg.connect(address, timeout=10)
    except TransientError as error:
        raise TransientError(
            f"FENCEPOST_DATABASE_URL: the database does not answer ({error}); is it up, and the address right?"
        ) from error
    try:
        yield Inspector(connection)
    finally:
        await connection.close(timeout=5)


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")  # a name that is cut cannot be looked up
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    Console().print(table)


def seconds(value: float | None) -> str:
    """A duration for people: 0.4 s, 12 s, 3 min, 5 h, 2 d."""
    if value is None:
        return ""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if value >= 2 * size:
            return f"{value / size:.0f} {unit}"
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
