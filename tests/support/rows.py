"""Rows as a poll returns them, made by a test: values by name, and all of them in the order of the columns."""

from collections.abc import Iterator
from typing import Any

from relay.cursor import COLUMNS

__all__ = ["PolledRow"]


class PolledRow(dict[str, Any]):
    """Columns that are not given are null."""

    def __iter__(self) -> Iterator[Any]:
        return iter([self.get(column) for column in COLUMNS])
