"""``fencepost migrate``: apply, preview or show the schema's migrations."""

import asyncio
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fencepost.addresses import check_database_url
from fencepost.console import naming_options
from migrations.runner import Migration, migrate, migration_states

__all__ = ["register"]

_EXAMPLES = """Create or upgrade the fencepost schema.

Examples:

  fencepost migrate

  fencepost migrate --dry-run

  fencepost migrate --status --json
"""


def register(root: typer.Typer) -> None:
    """Add the command to the root."""
    root.command("migrate", help=_EXAMPLES)(_migrate)


def _migrate(
    database_url: Annotated[
        str,
        typer.Option(
            envvar="FENCEPOST_DATABASE_URL", help="Database of the outbox; the role must own the schema.", show_envvar=True
        ),
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be applied.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Show every migration and when it was applied.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    with naming_options(FENCEPOST_DATABASE_URL="--database-url"):
        database_url = check_database_url(database_url)
    if status:
        _print_status(database_url, as_json=as_json)
        return

    def progress(migration: Migration) -> None:
        if not as_json:
            typer.echo(f"applying {migration.title}")

    applied = asyncio.run(migrate(database_url, dry_run=dry_run, progress=progress))
    titles = [migration.title for migration in applied]
    if as_json:
        typer.echo(json.dumps({"dry_run": dry_run, "migrations": titles}))
    elif dry_run:
        typer.echo("\n".join(f"would apply {title}" for title in titles) or "nothing to apply")
    else:
        typer.echo(f"{len(titles)} applied; the schema is current")


def _print_status(database_url: str, *, as_json: bool) -> None:
    states = asyncio.run(migration_states(database_url))
    if as_json:
        typer.echo(json.dumps([{"migration": state.migration.title, "applied_at": state.applied_at} for state in states]))
        return
    table = Table("migration", "applied", title="Migrations")
    for state in states:
        table.add_row(state.migration.title, state.applied_at or "pending")
    Console().print(table)
