"""``fencepost diagnose``: the evidence of three investigations, each with a verdict and what to do next."""

import asyncio
from datetime import timedelta
from typing import Annotated, Final
from uuid import UUID

import typer

from consumer_sdk.double_completion import double_completion
from consumer_sdk.duplicates import duplicates
from consumer_sdk.finding import Finding, report, scope
from consumer_sdk.inspection import LARGEST_ID, DryRun, answering, check_text, inspecting, run_id, smallest_id, time_of
from consumer_sdk.lease_repair import preview, repair_leases
from consumer_sdk.stuck_leases import stuck_leases
from fencepost.console import DatabaseUrl, Inspector, JsonOutput, print_json
from fencepost.errors import RunNotFound

__all__ = ["diagnose"]

_COUNTED_MOST: Final = 100_000

diagnose = typer.Typer(help="Investigate: evidence, verdicts, and what to do next.", no_args_is_help=True)

_Run = Annotated[
    UUID | None, typer.Option("--run", help="Only this run, and those that it concerns.", metavar="RUN_ID", parser=run_id)
]
_Since = Annotated[
    float, typer.Option(min=0.001, max=87_840, help="Runs accepted within so many hours, by the times in their ids.")
]


@diagnose.command("duplicates")
def diagnose_duplicates(
    tenant: Annotated[str, typer.Option(help="Whose runs.")],
    run: _Run = None,
    since_hours: _Since = 24.0,
    database_url: DatabaseUrl = "",
    as_json: JsonOutput = False,
) -> None:
    """One intent was executed twice: which runs are alike, why their keys did not join them, and which ran more than once.

    Compares the inputs of the newest 200,000 runs of the window. With --run it looks at this run, its lineage, and the runs
    like it within --since-hours before and after it. Of inputs and fingerprints only the first 8 hex digits of a hash are
    shown. Exit code 1 if a promise is broken.

    Examples:

      fencepost diagnose duplicates --tenant acme --since-hours 48

      fencepost diagnose duplicates --tenant acme \\
        --run 01a2297b-0198-7227-a94b-e181bb24ee35
    """
    check_text(tenant=tenant)

    async def look() -> list[Finding]:
        async with inspecting(database_url) as inspector:
            now = (await inspector.rows("clock"))[0]["at"]
            around = (time_of(run) or now) if run else now
            since = around - timedelta(hours=since_hours)
            last = smallest_id(around + timedelta(hours=since_hours)) if run else LARGEST_ID
            looked_at = await _scope(inspector, run, smallest_id(since), last, tenant)
            if looked_at.verdict == "warn":
                return [looked_at]
            return [looked_at, *await duplicates(inspector, tenant, smallest_id(since), last, since, run)]

    with answering():
        findings = asyncio.run(look())
    summary = "Acceptance wrote all facts of each run together. Whether two runs were one wish is for a person to say."
    report(findings, as_json=as_json, summary=summary)


@diagnose.command("double-completion")
def diagnose_double_completion(
    run: _Run = None,
    since_hours: _Since = 24.0,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's runs.")] = None,
    database_url: DatabaseUrl = "",
    as_json: JsonOutput = False,
) -> None:
    """Two workers seem to have completed one run: whether more than one generation could write.

    Exit code 1 if a rule is broken. If none is, one generation ended each run, and what happened twice happened outside.

    Examples:

      fencepost diagnose double-completion \\
        --run 01a2297b-0198-7227-a94b-e181bb24ee35

      fencepost diagnose double-completion --since-hours 6 --json
    """
    check_text(tenant=tenant)

    async def look() -> list[Finding]:
        async with inspecting(database_url) as inspector:
            now = (await inspector.rows("clock"))[0]["at"]
            first, last = (run, run) if run else (smallest_id(now - timedelta(hours=since_hours)), LARGEST_ID)
            looked_at = await _scope(inspector, run, first, last, tenant)
            return [looked_at, *await double_completion(inspector, first, last, tenant)]

    summary = "Proven from the database's side: one generation ended each run. Look for effects outside, by their operation keys."
    with answering():
        findings = asyncio.run(look())
    report(findings, as_json=as_json, summary=summary)


async def _scope(inspector: Inspector, run: UUID | None, first: UUID, last: UUID, tenant: str | None) -> Finding:
    """Raises ``RunNotFound`` for a run that is not there: its rules would all hold."""
    if run is not None and not (await inspector.rows("scope", run, run, tenant, 1))[0]["runs"]:
        raise RunNotFound(f"tenant {tenant} has no run {run}" if tenant else f"there is no run {run}")
    count = (await inspector.rows("scope", first, last, tenant, _COUNTED_MOST))[0]["runs"]
    return scope(count, _COUNTED_MOST, around_one=run is not None and first != last)


@diagnose.command("stuck-leases")
def diagnose_stuck_leases(
    repair: Annotated[
        bool, typer.Option("--repair", help="Run the reaper's own statement in batches, each with an audit row.")
    ] = False,
    far_leases: Annotated[
        bool, typer.Option("--far-leases", help="With --repair: also end leases that reach more than a day ahead.")
    ] = False,
    actor: Annotated[str | None, typer.Option(help="With --repair: who, for the audit row.")] = None,
    reason: Annotated[str | None, typer.Option(help="With --repair: why, for the audit row.")] = None,
    unserved_minutes: Annotated[
        float,
        typer.Option(min=0.01, max=100_000, help="A job ready for so long, with no lease and no claim since, has no worker."),
    ] = 1.0,
    dry_run: DryRun = False,
    database_url: DatabaseUrl = "",
    as_json: JsonOutput = False,
) -> None:
    """Jobs remain leased, or nobody takes the ready ones: what keeps claims and the reaper from them.

    --repair ends or queues again what the reaper would, no more; run it as the role that owns the schema. Exit code 1 if
    something is stuck, or if a warning needs somebody now.

    Examples:

      fencepost diagnose stuck-leases

      fencepost diagnose stuck-leases --repair --dry-run \\
        --actor ana --reason "workers are down for the day"
    """
    if not repair:
        if actor is not None or reason is not None or dry_run or far_leases:
            raise typer.BadParameter("--actor, --reason, --far-leases and --dry-run go with --repair")
        findings = asyncio.run(_look_at_leases(database_url, unserved_minutes * 60))
        report(findings, as_json=as_json, summary="Nothing is stuck.", warned="Nothing is broken.")
        return
    if actor is None or reason is None:
        raise typer.BadParameter("--repair needs --actor and --reason, for the audit row")
    check_text(actor=actor, reason=reason)
    with answering():
        outcome = asyncio.run(_repair(database_url, actor, reason, far_leases=far_leases, dry_run=dry_run))
    if as_json:
        print_json({"dry_run": dry_run, **outcome})
    else:
        told = ", ".join(f"{count} {state}" for state, count in outcome.items() if count) or "nothing to repair"
        typer.echo(f"{'Would be' if dry_run else 'Done'}: {told}.")


async def _look_at_leases(database_url: str, unserved_seconds: float) -> list[Finding]:
    async with inspecting(database_url) as inspector:
        return await stuck_leases(inspector, unserved_seconds=unserved_seconds)


async def _repair(database_url: str, actor: str, reason: str, *, far_leases: bool, dry_run: bool) -> dict[str, int]:
    async with inspecting(database_url) as inspector:
        if dry_run:
            return await preview(inspector, actor, reason, far_leases=far_leases)
        return await repair_leases(inspector, actor, reason, far_leases=far_leases)
