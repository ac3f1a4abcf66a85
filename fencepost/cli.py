"""The root of the command line. Packages add their commands through the entry-point group ``fencepost.commands``.

Exit codes: 0 done; 1 the answer is no (a check failed, an event is unknown), or a service ended on a fault that a restart may
mend; 2 wrong usage or set-up.
"""

import inspect
import re
import sys
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Annotated

import typer

from fencepost import __version__
from fencepost.ending import tell
from fencepost.errors import FencepostError

__all__ = ["app", "main"]

_GROUP = "fencepost.commands"
# What each entry point would have added, and the extra that it needs.
_COMMANDS = {
    "relay": ("relay", "status", "trace", "check", "lanes"),
    "worker": ("worker", "consumer", "runs", "lineages", "effects", "dead-letters", "diagnose"),
}
_EXTRAS = {"demo": "dev", "worker": "consumer"}


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fencepost {__version__}")
        raise typer.Exit


def app() -> typer.Typer:
    """The root with every installed package's commands on it."""
    root = typer.Typer(
        name="fencepost",
        help="Outbox relay from PostgreSQL to Kafka: nothing committed is lost, nothing rolled back published, each key in order.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )

    @root.callback()
    def options(
        version: bool = typer.Option(False, "--version", help="Print the version and exit.", callback=_version, is_eager=True),
    ) -> None:
        pass

    for entry in sorted(entry_points(group=_GROUP), key=lambda entry: entry.name):
        try:
            entry.load()(root)
        except ModuleNotFoundError as error:
            for command in _COMMANDS.get(entry.name, (entry.name,)):
                _explain_missing(root, command, _reason(entry, error.name or "a package"))
    _lay_out_helps(root)
    return root


def _lay_out_helps(typed: typer.Typer) -> None:
    """Typer wraps the lines of the source as they are, which at other widths leaves stubs."""
    for command in typed.registered_commands:
        command.help = _laid_out(command.help or inspect.getdoc(command.callback) or "")
    for group in typed.registered_groups:
        if group.typer_instance is not None:
            _lay_out_helps(group.typer_instance)


def _laid_out(text: str) -> str:
    """Each paragraph as one line; examples, which are indented, as they stand."""
    first, *rest = (part if part.startswith(" ") else part.replace("\n", " ") for part in re.split(r"\n{2,}", text.strip()))
    # Typer cleans what follows the first paragraph as a docstring of its own, whose first line does not count for the indent.
    return "\n\n\n".join([first, "\n\n".join(rest)]) if rest else first


def _reason(entry: EntryPoint, missing: str) -> str:
    ours = entry.module.partition(".")[0]
    if missing.partition(".")[0] == ours:
        hiding = find_spec(ours)
        place = hiding.origin if hiding and hiding.origin else "nowhere"
        return f"Fencepost's package {ours!r} is hidden by another one ({place}): start elsewhere, or rename that one"
    # From a clone: no package index has Fencepost, and a stranger's package may have its name there.
    return f"it needs {missing}: in a clone of Fencepost, pip install '.[{_EXTRAS.get(entry.name, 'relay')}]'"


def _explain_missing(root: typer.Typer, command: str, reason: str) -> None:
    anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @root.command(command, help="Not available here; run it to see why.", context_settings=anything)
    def missing(arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
        typer.echo(f"fencepost {command}: {reason}", err=True)
        raise typer.Exit(2)


def main() -> None:
    """The console script: errors of Fencepost's own are one line and an exit code, never a traceback."""
    try:
        app()()
    except FencepostError as error:
        sys.exit(tell(error))
