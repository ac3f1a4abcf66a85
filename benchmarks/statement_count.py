"""How many statements a database was sent, from ``pg_stat_statements``."""

from typing import Any, Final

import psycopg

__all__ = ["StatementCount"]

_RESET: Final = "SELECT pg_stat_statements_reset(0, (SELECT oid FROM pg_database WHERE datname = current_database()), 0)"
_CALLS: Final = """
SELECT coalesce(sum(calls), 0)::float8 FROM pg_stat_statements
WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


class StatementCount:
    """Counts from when it is made; the connection that asks is not counted from then on."""

    def __init__(self, connection: "psycopg.Connection[Any]") -> None:
        self._connection = connection
        try:
            connection.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
            connection.execute("SET pg_stat_statements.track = 'none'")
            connection.execute(_RESET)
        except (psycopg.errors.FeatureNotSupported, psycopg.errors.ObjectNotInPrerequisiteState, psycopg.errors.UndefinedFile):
            self._counts = False
        else:
            self._counts = True

    def each(self, count: int) -> float | None:
        """Statements for each of ``count``; None where the server does not count them."""
        if not self._counts:
            return None
        row = self._connection.execute(_CALLS).fetchone()
        assert row is not None
        return float(row[0]) / count
