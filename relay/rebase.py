"""``fencepost lanes rebase``: make a restored outbox its cluster's own."""

import asyncio
import getpass
from typing import Annotated, Any

import typer

from fencepost.console import DatabaseUrl, JsonOutput, print_json
from fencepost.errors import ConfigurationError
from relay.inspection import inspecting

__all__ = ["rebase"]


def rebase(
    reason: Annotated[str, typer.Option(help="Why, for the audit row.")] = "",
    actor: Annotated[str, typer.Option(help="Who; defaults to the user of this machine.")] = "",
    database_url: DatabaseUrl = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say whether it is needed, change nothing.")] = False,
    as_json: JsonOutput = False,
) -> None:
    """Restate cursors and rows in this cluster's transaction ids, after a restore from a dump.

    Use it when `fencepost relay run` says that the outbox comes from another cluster, and this copy is to publish from
    now on. Undelivered rows are published afterwards, delivered ones are not. The original, if it still runs, is
    another installation from then on. Needs the role that owns the schema, and no live relay on this database.

    Example:

      fencepost lanes rebase --reason "restored from the dump of 02:00"
    """
    if not dry_run and not reason.strip():
        raise ConfigurationError("--reason is required: it goes into the audit row")
    result = asyncio.run(_run(database_url, actor.strip() or getpass.getuser(), reason.strip(), dry_run=dry_run))
    if as_json:
        print_json(result)
    elif dry_run:
        typer.echo(
            "needed: this outbox comes from another cluster" if result["needed"] else "not needed: this is the cursors' own cluster"
        )
    else:
        typer.echo(
            f"{result['lanes']} lanes rebased; {result['undelivered_restated']} undelivered rows restated, "
            f"{result['delivered_restated']} delivered ones. Start the relays."
        )


async def _run(database_url: str, actor: str, reason: str, *, dry_run: bool) -> dict[str, Any]:
    async with inspecting(database_url) as inspector:
        if dry_run:
            return dict((await inspector.rows("rebase_preview"))[0])
        return dict((await inspector.rows("rebase", actor, reason))[0])
