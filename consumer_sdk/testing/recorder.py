"""Stands in for the connection of a handler's transaction: it writes nothing, and remembers what it was asked to do."""

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

__all__ = ["RecordedCall", "Recorder"]


class RecordedCall(NamedTuple):
    """One call of a handler's on its connection. ``query``: the statement, or the table's name of a COPY."""

    method: str
    query: str
    arguments: tuple[Any, ...]


class Recorder:
    """The methods of an asyncpg connection that handlers use most. ``answers`` are given to the queries that they are under;
    to any other a read finds nothing."""

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.calls: list[RecordedCall] = []
        self._answers = answers

    async def execute(self, query: str, *arguments: Any, timeout: float | None = None) -> str:  # noqa: ASYNC109 - asyncpg's
        return str(self._answered("execute", query, arguments, ""))

    async def executemany(
        self, query: str, arguments: Iterable[Iterable[Any]], *, timeout: float | None = None  # noqa: ASYNC109 - asyncpg's
    ) -> None:  # fmt: skip
        self._answered("executemany", query, tuple(tuple(row) for row in arguments), None)

    async def fetch(self, query: str, *arguments: Any, timeout: float | None = None) -> Any:  # noqa: ASYNC109 - asyncpg's
        return self._answered("fetch", query, arguments, [])

    async def fetchrow(self, query: str, *arguments: Any, timeout: float | None = None) -> Any:  # noqa: ASYNC109 - asyncpg's
        return self._answered("fetchrow", query, arguments, None)

    async def fetchval(
        self, query: str, *arguments: Any, column: int = 0, timeout: float | None = None  # noqa: ASYNC109 - asyncpg's
    ) -> Any:  # fmt: skip
        return self._answered("fetchval", query, arguments, None)

    async def copy_records_to_table(self, table_name: str, *, records: Iterable[Iterable[Any]], **_options: Any) -> str:
        return str(self._answered("copy_records_to_table", table_name, tuple(tuple(row) for row in records), ""))

    def is_in_transaction(self) -> bool:
        """True: a handler has it for the length of a transaction."""
        return True

    def transaction(self) -> "_Savepoint":
        """What is asked in it is forgotten if it fails."""
        return _Savepoint(self.calls)

    def _answered(self, method: str, query: str, arguments: tuple[Any, ...], nothing: Any) -> Any:
        self.calls.append(RecordedCall(method, query, arguments))
        return self._answers.get(query, nothing)


class _Savepoint:
    def __init__(self, calls: list[RecordedCall]) -> None:
        self._calls = calls

    async def __aenter__(self) -> None:
        self._begun_at = len(self._calls)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            del self._calls[self._begun_at :]
