"""What the operator's commands on runs share: statements of inspection.sql, ranges of run ids, and how a "no" ends.

Every look is bounded: by a limit, by a range of run ids, and by the inspector's 30 s for a statement.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Final
from uuid import UUID

import asyncpg
import typer

from fencepost import console
from fencepost.console import Inspector
from fencepost.errors import ReplayRefused, RunChanged, RunEnded, RunNotFound
from fencepost.statements import load_statements

__all__ = [
    "LARGEST_ID", "SMALLEST_ID", "Actor", "DryRun", "Reason", "RunId", "answering", "check_text", "id_of", "inspecting", "plain",
    "run_id", "smallest_id", "time_of",
]  # fmt: skip

_SQL: Final = {**load_statements("consumer_sdk", "runs.sql"), **load_statements("consumer_sdk", "inspection.sql")}
_ROLE: Final = "fencepost_operator"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

SMALLEST_ID: Final = UUID(int=0)
LARGEST_ID: Final = UUID(int=2**128 - 1)


def id_of(whose: str, remedy: str) -> Callable[[str], UUID]:
    """A parser of ids. It raises ``typer.BadParameter``, which does not quote: what was pasted may be a client's key."""

    def parsed(text: str) -> UUID:
        try:
            return UUID(text.strip())
        except ValueError:
            raise typer.BadParameter(f"must be the id of {whose}, a UUID; {remedy}") from None

    return parsed


run_id: Final = id_of("a run", "`fencepost runs list` shows them")
RunId = Annotated[UUID, typer.Argument(help="The run's id, as `fencepost runs list` shows it.", metavar="RUN_ID", parser=run_id)]
Actor = Annotated[str, typer.Option(help="Who does this, for the audit row.")]
Reason = Annotated[str, typer.Option(help="Why, for the audit row.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would happen, change nothing.")]


def inspecting(database_url: str) -> AbstractAsyncContextManager[Inspector]:
    """An inspector of runs, connected; raises what ``fencepost.console.inspecting`` does."""
    return console.inspecting(database_url, _SQL, role=_ROLE)


@contextmanager
def answering() -> Iterator[None]:
    """Where the answer is no: one line and exit code 1. Where the database refuses a value: wrong usage, exit code 2."""
    try:
        yield
    except (RunNotFound, RunChanged, RunEnded, ReplayRefused) as error:
        typer.echo(f"fencepost: {error}", err=True)
        raise typer.Exit(1) from error
    except asyncpg.CheckViolationError as error:
        raise typer.BadParameter(error.message.removeprefix("fencepost: ")) from error


def check_text(**values: str | None) -> None:
    """Refuse blanks, and what PostgreSQL could not hold as text, before anything is asked."""
    for name, value in values.items():
        if value is not None and (not value.strip() or value != value.encode("utf-8", "ignore").decode()):
            raise typer.BadParameter(f"--{name} must say something, in UTF-8")


def smallest_id(at: datetime) -> UUID:
    """The smallest UUIDv7 of a time: ids from it on are of that time or later, by the clock of who made them."""
    milliseconds = max(0, (at - _EPOCH) // timedelta(milliseconds=1))
    return UUID(int=milliseconds << 80 | 0x7 << 76 | 0x2 << 62)


def time_of(run_id: UUID) -> datetime | None:
    """When a UUIDv7 was made, by the clock of who made it; None for ids of another kind."""
    return _EPOCH + timedelta(milliseconds=run_id.int >> 80) if run_id.version == 7 else None


def plain(row: Any) -> dict[str, Any]:
    """A row as JSON holds it: times as text in UTC, durations in seconds."""
    return {name: _plain(value) for name, value in row.items()}


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return float(value)
    return str(value) if isinstance(value, UUID) else value
