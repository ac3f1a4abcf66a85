"""The command line in this process, and users of one role."""

import asyncio
import json
import secrets
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import asyncpg
from typer.testing import CliRunner

from fencepost.cli import app

__all__ = ["Command", "user_of"]


class Command:
    """``fencepost …`` on one database: ``code, output = await command("runs", "list")``."""

    def __init__(self, database_url: str, *, columns: int = 200) -> None:
        self.database_url = database_url
        self._environment = {"FENCEPOST_DATABASE_URL": database_url, "COLUMNS": str(columns)}

    async def __call__(self, *arguments: object, **environment: str) -> tuple[int, str]:
        """Exit code, and all that it said. An error of Fencepost's own is raised."""
        words = [str(argument) for argument in arguments]
        result = await asyncio.to_thread(lambda: CliRunner().invoke(app(), words, env={**self._environment, **environment}))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output

    async def json(self, *arguments: object, code: int = 0) -> Any:
        """What it said with --json, after it ended with this code."""
        ended, output = await self(*arguments, "--json")
        assert ended == code, output
        return json.loads(output)


@asynccontextmanager
async def user_of(role: str, database_url: str) -> AsyncIterator[str]:
    """The address of a new user that has this role and no other."""
    connection = await asyncpg.connect(database_url)
    user, password, parts = f"test_{uuid.uuid4().hex[:12]}", secrets.token_hex(8), urlsplit(database_url)
    await connection.execute(f"CREATE USER {user} PASSWORD '{password}'")
    await connection.execute(f"GRANT {role} TO {user}")
    try:
        yield parts._replace(netloc=f"{user}:{password}@{parts.hostname}:{parts.port}").geturl()
    finally:
        await connection.execute(f"DROP USER {user}")
        await connection.close()
