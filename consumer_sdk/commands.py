"""The consumer's commands: ``consumer``, ``worker``, ``runs``, ``lineages``, ``effects``, ``dead-letters`` and ``diagnose``."""

import typer

from consumer_sdk.consumer_command import consumer
from consumer_sdk.dead_letters_command import dead_letters
from consumer_sdk.diagnose_command import diagnose
from consumer_sdk.effects_command import effects
from consumer_sdk.lineages_command import lineages
from consumer_sdk.runs_command import runs
from consumer_sdk.worker_command import worker

__all__ = ["register"]


def register(root: typer.Typer) -> None:
    """Add the consumer's commands to the root."""
    root.add_typer(consumer, name="consumer")
    root.add_typer(worker, name="worker")
    root.add_typer(runs, name="runs")
    root.add_typer(lineages, name="lineages")
    root.add_typer(effects, name="effects")
    root.add_typer(dead_letters, name="dead-letters")
    root.add_typer(diagnose, name="diagnose")
