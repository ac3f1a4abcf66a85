"""What a benchmark found: figures of each side, and the ratios of the repeats; as a table and as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import rounded, spread

__all__ = ["Report"]


@dataclass(kw_only=True)
class Report:
    """``figures`` may nest; its numbers are medians where a repeat has one each. ``ratios`` has a number a repeat."""

    benchmark: str
    machine: Mapping[str, Any]
    figures: dict[str, Any] = field(default_factory=dict)
    ratios: dict[str, Sequence[float]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The JSON form, whose keys are an interface."""
        return {
            "benchmark": self.benchmark,
            "machine": dict(self.machine),
            "figures": _rounded(self.figures),
            "ratios": {name: spread(values) for name, values in self.ratios.items()},
        }

    def write(self, file: Path | None) -> None:
        """Print the tables, and write the JSON where a file is given."""
        if file is not None:
            file.write_text(json.dumps(self.as_json(), indent=2) + "\n")
        console = Console()
        console.print(", ".join(f"{name} {value}" for name, value in self.machine.items()), highlight=False, soft_wrap=True)
        console.print(self._figures())
        if self.ratios:
            console.print(self._ratios())

    def _figures(self) -> Table:
        table = Table(title=f"{self.benchmark}: figures", title_justify="left", show_header=False)
        table.add_column()
        table.add_column(justify="right", no_wrap=True)
        for name, value in _flat(_rounded(self.figures)):
            table.add_row(name, f"{value:,}" if isinstance(value, int | float) else str(value))
        return table

    def _ratios(self) -> Table:
        table = Table("ratio", title=f"{self.benchmark}: ratios", title_justify="left")
        for column in ("min", "median", "max"):
            table.add_column(column, justify="right")
        for name, values in self.ratios.items():
            table.add_row(name, *(f"{value:,}" for value in spread(values).values()))
        return table


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(inner) for name, inner in value.items()}
    return rounded(value) if isinstance(value, float) else value


def _flat(figures: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in figures.items():
        rows += _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(prefix + name, value)]
    return rows
