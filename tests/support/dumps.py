"""All that a database of Fencepost's holds, as text that can be searched."""

from typing import Any, Final

import asyncpg

__all__ = ["everything_stored"]

_TABLES: Final = "SELECT format('%I.%I', schemaname, tablename) FROM pg_tables WHERE schemaname = 'fencepost'"


async def everything_stored(connection: "asyncpg.Connection[Any]") -> str:
    """Every value of every row of every table, a line each; bytes as the text that they may hold."""
    return "\n".join(
        [
            f"{table}.{name}: {_text(value)}"
            for (table,) in await connection.fetch(_TABLES)
            for row in await connection.fetch(f"SELECT * FROM {table}")
            for name, value in row.items()
        ]
    )


def _text(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
