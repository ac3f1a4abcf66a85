"""A connection that is lent out within a transaction, and notices when whoever has it ends that transaction, or sets something for
the session.

A statement that may do so is told by its words, and only then the transaction is looked at, before it and after it: two statements
more for such a one, and none for any other.
"""

import re
from typing import Any, Final

import asyncpg
from asyncpg.transaction import Transaction

__all__ = ["UNSET", "UNSET_ROLE", "WatchedConnection"]

#: Undoes SET ROLE, which RESET ALL leaves.
UNSET_ROLE: Final = "RESET SESSION AUTHORIZATION; RESET ROLE; "
#: Undoes SET and set_config as well: all is again as the session began. Not behind a pooler, which sets some of it for its clients.
UNSET: Final = f"RESET ALL; {UNSET_ROLE}"

_SPACE: Final = r"(?:\s++|--[^\n]*+(?:\n|\Z)|/\*[^*]*+\*++(?:[^/*][^*]*+\*++)*+/)*+"
# Of savepoints only is ROLLBACK TO. Too much may match, in a text say: it costs a look.
_ENDING: Final = re.compile(
    rf"(?:\A|;){_SPACE}(?:abort|begin|commit|end|prepare{_SPACE}transaction|start"
    rf"|rollback(?!{_SPACE}(?:(?:work|transaction){_SPACE})?to\b))\b",
    re.IGNORECASE,
)
# Not the SET of an UPDATE, nor what is set for the transaction alone. Too much may match here as well: it costs what undoes it.
_SETTING: Final = re.compile(
    rf"(?:\A|;){_SPACE}(?:set(?!{_SPACE}(?:local|constraints|transaction)\b)|reset|discard)\b"
    r"|set_config(?!\s*\([^()]*,\s*true\s*\))",
    re.IGNORECASE,
)
# One command that ends a transaction, and leaves none open.
_PLAIN_END: Final = frozenset({"abort", "commit", "end", "rollback"})


class WatchedConnection(asyncpg.Connection):
    """``was_ended``: the transaction that ``watch`` was called in has ended, whether or not another is open now. ``was_set``: a
    statement since has set something that may outlive it; what a function sets for the session is not seen."""

    was_ended: bool = False
    was_set: bool = False
    _top_xact: Transaction | None

    def watch(self) -> None:
        """A transaction has begun."""
        self.was_ended = self.was_set = False

    async def commit_by_owner(self) -> None:
        """End the transaction; whoever it is lent to has no business with it. Raises ``InFailedSQLTransactionError`` where
        PostgreSQL undid it: it only says ROLLBACK then."""
        self._top_xact = None  # the driver's own object of the transaction stays as it is, and nobody asks it any more
        if await super().execute("COMMIT") != "COMMIT":
            raise asyncpg.InFailedSQLTransactionError("a statement of the transaction had failed, and nothing was committed")

    def get_reset_query(self) -> str:
        """What a pool of the driver's sends before the connection is another's."""
        return f"{super().get_reset_query()}\n{UNSET_ROLE}"

    async def execute(self, query: str, *args: object, timeout: float | None = None) -> str:  # noqa: ASYNC109 - the driver's
        if args:  # one command, which comes to `_execute`
            return await super().execute(query, *args, timeout=timeout)
        self._note_settings(query)
        if _ENDING.search(query) is None:
            return await super().execute(query, timeout=timeout)
        before = await self._before(query)
        status: str = await super().execute(query, timeout=timeout)
        await self._after(before)
        return status

    async def _execute(self, query: str, *arguments: Any, **given: Any) -> Any:
        if _ENDING.match(query) is None:
            return await super()._execute(query, *arguments, **given)  # type: ignore[misc]
        before = await self._before(query)
        result = await super()._execute(query, *arguments, **given)  # type: ignore[misc]
        await self._after(before)
        return result

    def _get_statement(self, query: str, *arguments: Any, **given: Any) -> Any:
        """Where all but the plain `execute` comes by: prepared statements and cursors of the handler's own too."""
        self._note_settings(query)
        return super()._get_statement(query, *arguments, **given)  # type: ignore[misc]

    def _note_settings(self, query: str) -> None:
        if "set" in query.lower() and _SETTING.search(query) is not None:
            self.was_set = True

    async def _before(self, query: str) -> str | None:
        """Which transaction is open; None where there is nothing to look at afterwards."""
        if not self.is_in_transaction():
            return None
        if query.strip(" \n;").lower() in _PLAIN_END:
            self.was_ended = True
            return None
        return await self._transaction_now()

    async def _after(self, before: str | None) -> None:
        if before is not None and (not self.is_in_transaction() or await self._transaction_now() != before):
            self.was_ended = True

    async def _transaction_now(self) -> str:
        """One that has failed is undone at its end, whatever becomes of it until then."""
        try:
            return str(await self.fetchval("SELECT pg_current_xact_id()::text"))
        except asyncpg.InFailedSQLTransactionError:
            return ""
