"""A connection of PostgreSQL that a test and the handlers it tests use side by side: they take turns."""

import asyncio
from typing import Any

import asyncpg

__all__ = ["TakingTurns"]


class TakingTurns(asyncpg.Connection):
    """The driver refuses a statement while another one is under way; here it waits. Transactions of two are still not apart."""

    def __init__(self, *arguments: Any, **given: Any) -> None:
        super().__init__(*arguments, **given)
        self._turn = asyncio.Lock()

    async def execute(self, query: str, *args: object, timeout: float | None = None) -> str:  # noqa: ASYNC109 - the driver's
        if args:  # comes to `_execute`
            return await super().execute(query, *args, timeout=timeout)
        async with self._turn:
            return await super().execute(query, timeout=timeout)

    async def _execute(self, *arguments: Any, **given: Any) -> Any:
        async with self._turn:
            return await super()._execute(*arguments, **given)  # type: ignore[misc]
