"""``fencepost lineages``: what is done to an operation as a whole, its first run and everything that went on from there."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, Final
from uuid import UUID

import asyncpg
import typer

from consumer_sdk.inspection import Actor, DryRun, Reason, answering, check_text, id_of, inspecting, plain
from fencepost.console import DatabaseUrl, Inspector, JsonOutput, print_json
from fencepost.errors import RunNotFound, TransientError

__all__ = ["lineages"]

# Another one of its writers may be the deadlock's victim next time; whoever writes without end is not waited for.
_MOST_TRIES: Final = 5

lineages = typer.Typer(help="Lineages: an operation's first run, and its replays and continuations.", no_args_is_help=True)

_operation_id: Final = id_of("a run or of its monitor", "`fencepost runs list` shows the runs")


@lineages.callback()
def _group() -> None:
    """With one command only, its name would otherwise not be said."""


@lineages.command()
def erase(
    tenant: Annotated[str, typer.Argument(help="The lineage's tenant.", metavar="TENANT")],
    operation: Annotated[UUID, typer.Argument(help="Any of its runs, or its monitor's id.", metavar="ID", parser=_operation_id)],
    actor: Actor,
    reason: Reason,
    dry_run: DryRun = False,
    database_url: DatabaseUrl = "",
    as_json: JsonOutput = False,
) -> None:
    """Erase a lineage's payloads: inputs, results, failures, chunks, checkpoints, kept steps and effects, dead letters, answers.

    A live run ends as cancelled, whatever its worker does from then on. Keys stay used: whoever comes again is told that the
    operation was erased. Backups and Kafka keep what they have: docs/how-to/erasure.md. Cannot be taken back.

    Leaves an audit row; keep personal data out of --reason. Exit code 1 if there is no such lineage, 0 if it was erased before.

    Example:

      fencepost lineages erase acme 01a2297b-0198-7227-a94b-e181bb24ee35 \\
        --actor ana --reason "request 4711 of the customer"
    """
    check_text(tenant=tenant, actor=actor, reason=reason)
    with answering():
        answer = asyncio.run(_erase(database_url, (tenant, operation, actor, reason), dry_run=dry_run))
        if answer["outcome"] == "not_found":
            raise RunNotFound("the tenant has no run and no monitor of this id; `fencepost runs list` shows the runs")
    if as_json:
        print_json({"tenant_id": tenant, "dry_run": dry_run, **plain(answer)})
    elif answer["outcome"] == "already_erased":
        typer.echo("Already erased. Nothing was changed.")
    else:
        count = "1 run" if answer["runs"] == 1 else f"{answer['runs']} runs"
        typer.echo(f"{'Would be erased' if dry_run else 'Erased'}: {count}.")


async def _erase(database_url: str, arguments: tuple[object, ...], *, dry_run: bool) -> Mapping[str, Any]:
    async with inspecting(database_url) as inspector:
        for _ in range(_MOST_TRIES - 1):
            try:
                return await _tried(inspector, arguments, dry_run=dry_run)
            except TransientError as error:
                if not isinstance(error.__cause__, asyncpg.DeadlockDetectedError):
                    raise
        return await _tried(inspector, arguments, dry_run=dry_run)


async def _tried(inspector: Inspector, arguments: tuple[object, ...], *, dry_run: bool) -> Mapping[str, Any]:
    """A dry run does it and takes it back, so that it gives the very answer."""
    transaction = inspector.connection.transaction(isolation="read_committed")
    await transaction.start()
    try:
        answer: Mapping[str, Any] = (await inspector.rows("erase", *arguments))[0]
    except BaseException:
        await transaction.rollback()
        raise
    await (transaction.rollback() if dry_run else transaction.commit())
    return answer
