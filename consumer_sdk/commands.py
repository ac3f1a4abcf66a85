"""The commands on runs: ``runs …`` and ``diagnose …``."""

import typer

from consumer_sdk.diagnose_command import diagnose
from consumer_sdk.runs_command import runs

__all__ = ["register"]


def register(root: typer.Typer) -> None:
    """Add the commands on runs to the root."""
    root.add_typer(runs, name="runs")
    root.add_typer(diagnose, name="diagnose")
