"""Tables that hold an id in 80 columns: few lines, and what people wrote is text, not markup.

In a pipe or a file nothing is wrapped, so that `grep` finds names whole.
"""

import os
import sys
from collections.abc import Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["print_rows", "printable", "width"]

# Longer than any row: names and reasons are bounded.
_UNBOUNDED: Final = 1_000_000


def width() -> int:
    """The columns of the terminal, or what COLUMNS says; without either, as many as a line takes."""
    bounded = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console().width if bounded else _UNBOUNDED


def printable(text: str) -> str:
    """The text without what a terminal would obey: names and reasons come from anybody."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[object]], *, whole: int = 1, title: str | None = None) -> None:
    """Print rows; cells of the first ``whole`` columns are never broken, so that they can be copied."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, title=title, title_justify="left", padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=number < whole, overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if cell is None else printable(str(cell))) for cell in row))
    Console(highlight=False, width=width()).print(table)
