"""What the operator's commands of the relay ask the database: the statements of inspection.sql, by name."""

from contextlib import AbstractAsyncContextManager
from typing import Final

from fencepost import console
from fencepost.console import Inspector
from fencepost.statements import load_statements

__all__ = ["inspecting"]

_SQL: Final = load_statements("relay", "inspection.sql")
_ROLE: Final = "fencepost_operator (to look) or fencepost_relay (to relay)"
_WRITERS: Final = {"rebase": "the role that owns the schema"}


def inspecting(database_url: str) -> AbstractAsyncContextManager[Inspector]:
    """An inspector of the outbox, connected; raises what ``fencepost.console.inspecting`` does."""
    return console.inspecting(database_url, _SQL, role=_ROLE, roles=_WRITERS)
