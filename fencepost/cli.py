"""The root of the command line. Packages add their commands through the entry-point group ``fencepost.commands``.

Exit codes: 0 done; 1 the answer is no (a check failed, an event is unknown); 2 wrong usage or set-up.
"""

import sys
from importlib.metadata import entry_points

import typer

from fencepost import __version__
from fencepost.errors import FencepostError

__all__ = ["app", "main"]

_GROUP = "fencepost.commands"


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
            _explain_missing(root, entry.name, error.name or "a package")
    return root


def _explain_missing(root: typer.Typer, name: str, package: str) -> None:
    @root.command(name, help=f"Not installed: needs {package}. Install fencepost with its extra, such as fencepost\\[relay].")
    def missing() -> None:
        typer.echo(f"fencepost {name} needs {package}: pip install 'fencepost[relay]' (for demo: 'fencepost[dev]')", err=True)
        raise typer.Exit(2)


def main() -> None:
    """The console script: errors of Fencepost's own are one line and exit code 2, never a traceback."""
    try:
        app()()
    except FencepostError as error:
        typer.echo(f"fencepost: {error}", err=True)
        sys.exit(2)
