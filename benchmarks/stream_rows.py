"""The rows of the streams benchmark, which stand for what workers store."""

from typing import Any, Final

import psycopg

__all__ = ["INSERT_CHUNK", "RING", "begin", "finish", "lineages"]

#: For asyncpg: root, tenant, offset, data.
INSERT_CHUNK: Final = (
    'INSERT INTO fencepost.chunks (root_run_id, tenant_id, attempt, "offset", iteration, step, occurrence, data) '
    "VALUES ($1, $2, 0, $3, 0, 'answer', 0, $4)"
)
RING: Final = "SELECT fencepost.ring_lineages($1)"

_OPEN: Final = "INSERT INTO fencepost.streams (root_run_id, tenant_id, attempt, iteration) VALUES (%s, %s, 0, 0)"
_FILL: Final = """
INSERT INTO fencepost.chunks (root_run_id, tenant_id, attempt, "offset", iteration, step, occurrence, data)
SELECT %s, %s, 0, n, 0, 'answer', 0, %s FROM generate_series(0, %s - 1) AS n
"""
_END: Final = """
WITH job AS (UPDATE fencepost.jobs SET state = 'completed', finished_at = clock_timestamp() WHERE run_id = %(root)s)
UPDATE fencepost.runs SET state = 'completed', started_at = clock_timestamp(), finished_at = clock_timestamp(), output = '"done"'
WHERE run_id = %(root)s
"""


def lineages(connection: "psycopg.Connection[Any]") -> list[str]:
    """Roots of all lineages, oldest first."""
    return [str(row[0]) for row in connection.execute("SELECT root_run_id FROM fencepost.lineages ORDER BY created_at")]


def begin(connection: "psycopg.Connection[Any]", tenant: str, root: str, *, chunks: int, data: bytes) -> None:
    """Open the stream of a lineage, with so many chunks in it."""
    connection.execute(_OPEN, (root, tenant))
    connection.execute(_FILL, (root, tenant, data, chunks))


def finish(connection: "psycopg.Connection[Any]", root: str) -> None:
    """Complete a lineage's run."""
    connection.execute(_END, {"root": root})
