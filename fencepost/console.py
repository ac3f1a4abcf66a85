"""What the operator's commands share: one connection, named statements, JSON."""

import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import MappingProxyType
from typing import Annotated, Any, Final

import asyncpg
import typer

from fencepost.addresses import check_database_url
from fencepost.database import connecting, translated
from fencepost.errors import ConfigurationError, TransientError

__all__ = ["DatabaseUrl", "Inspector", "JsonOutput", "inspecting", "naming_options", "print_json", "seconds"]

_TIMEOUT_SECONDS: Final = 30

DatabaseUrl = Annotated[
    str, typer.Option("--database-url", envvar="FENCEPOST_DATABASE_URL", help="Database of the outbox and the runs.")
]
JsonOutput = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Inspector:
    """Runs named statements on one connection. ``role`` is what to grant to a user who may not, ``roles`` by statement."""

    def __init__(
        self, connection: asyncpg.Connection, statements: Mapping[str, str], *, role: str, roles: Mapping[str, str]
    ) -> None:
        self.connection = connection
        self._statements = statements
        self._role = role
        self._roles = roles

    async def rows(self, name: str, *arguments: object) -> Sequence[Any]:
        async with translated(name, role=self._roles.get(name, self._role)):
            return await self.connection.fetch(self._statements[name], *arguments, timeout=_TIMEOUT_SECONDS)


@asynccontextmanager
async def inspecting(
    database_url: str, statements: Mapping[str, str], *, role: str, roles: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[Inspector]:
    """An inspector, connected. Raises ``ConfigurationError`` without an address, ``TransientError`` without an answer."""
    with naming_options(FENCEPOST_DATABASE_URL="--database-url"):
        address = check_database_url(database_url)
    try:
        async with connecting(role=role):
            connection = await asyncpg.connect(address, timeout=10)
    except TransientError as error:
        raise TransientError(
            f"FENCEPOST_DATABASE_URL (or --database-url): the database does not answer ({error}); is it up, and the address right?"
        ) from error
    try:
        yield Inspector(connection, statements, role=role, roles=roles)
    finally:
        await connection.close(timeout=5)


@contextmanager
def naming_options(**options: str) -> Iterator[None]:
    """A ``ConfigurationError`` that names a variable names the command's option for it as well."""
    try:
        yield
    except ConfigurationError as error:
        message = re.sub(r"\w+", lambda word: f"{word[0]} (or {options[word[0]]})" if word[0] in options else word[0], str(error))
        raise ConfigurationError(message) from None


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def seconds(value: float | None) -> str:
    """A duration for people: 0.4 s, 12 s, 3 min, 5 h, 2 d."""
    if value is None:
        return ""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if value >= 2 * size:
            return f"{value / size:.0f} {unit}"
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
