"""``fencepost runs``: list runs, tell one's story, cancel it, run dead work anew."""

import asyncio
import shlex
import textwrap
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, timedelta
from typing import Annotated, Any, Final, Literal
from uuid import UUID

import typer
from uuid_utils.compat import uuid7

from consumer_sdk.inspection import (
    LARGEST_ID,
    SMALLEST_ID,
    Actor,
    DryRun,
    Reason,
    RunId,
    answering,
    check_text,
    inspecting,
    plain,
)  # fmt: skip
from consumer_sdk.timeline import Entry, relative, timeline
from fencepost.console import DatabaseUrl, Inspector, JsonOutput, print_json, seconds
from fencepost.errors import ReplayRefused, RunChanged, RunEnded, RunNotFound
from fencepost.tables import print_rows, printable, width

__all__ = ["runs"]

_LARGEST_VERSION: Final = 2**63 - 1
_STORY_MOST: Final = 1_000
# The longest that the database takes; a ledger that is kept for ever is kept as long at least.
_LONGEST_RETENTION: Final = timedelta(days=3_660)
_NEVER: Final = 9999
_AMBIGUOUS: Final = "ambiguous"
_CUT_SHORT: Final = frozenset({"lease_expired", "attempt_deadline", "no_progress", "handler_cancelled"})

runs = typer.Typer(help="Runs: what was accepted, and what became of it.", no_args_is_help=True)

_State = Literal["queued", "running", "completed", "failed", "cancelled", "continued"]
_Tenant = Annotated[str | None, typer.Option(help="The run's tenant.")]
_NeededTenant = Annotated[str, typer.Option(help="The run's tenant.")]


@runs.command("list")
def list_runs(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    state: Annotated[_State | None, typer.Option(help="Only runs in this state.")] = None,
    workflow: Annotated[str | None, typer.Option(help="Only this workflow's.")] = None,
    parked: Annotated[bool, typer.Option("--parked", help="Only runs that wait for a person, whose workflow changed.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")] = 20,
    database_url: DatabaseUrl = "",
    as_json: JsonOutput = False,
) -> None:
    """List the newest runs, newest first.

    Examples:

      fencepost runs list --state failed

      fencepost runs list --parked

      fencepost runs list --tenant acme --workflow invoice --limit 100 --json
    """
    check_text(tenant=tenant, workflow=workflow)
    if parked and state is not None:
        raise typer.BadParameter("--parked and --state exclude each other: a parked run is running, or queued")
    found = asyncio.run(_list(database_url, tenant, workflow, state, limit, parked=parked))
    if as_json:
        print_json([plain(row) for row in found])
        return
    if not found:
        typer.echo("No run fits.")
        return
    print_rows(["run", "tries", "age", "tenant", "workflow", "state"], [_listed(row) for row in found], whole=3)


def _listed(row: Mapping[str, Any]) -> Sequence[object]:
    causes = dict.fromkeys(cause for cause in (row["dead_reason"], row["error_code"], row["parked_as"]) if cause)
    state = "parked" if row["parked_as"] else row["state"]
    state = f"{state}: {', '.join(causes)}" if causes else state
    age = seconds((row["now"] - row["created_at"]).total_seconds())
    return row["run_id"], f"{row['attempts']}/{row['max_attempts']}", age, row["tenant_id"], row["workflow"], state


async def _list(
    database_url: str, tenant: str | None, workflow: str | None, state: str | None, limit: int, *, parked: bool
) -> Sequence[Any]:
    async with inspecting(database_url) as inspector:
        if parked:
            return await inspector.rows("list_parked", tenant, workflow, limit)
        return await inspector.rows("list_runs", tenant, workflow, state, SMALLEST_ID, LARGEST_ID, limit)


@runs.command()
def show(run_id: RunId, tenant: _Tenant = None, database_url: DatabaseUrl = "", as_json: JsonOutput = False) -> None:
    """Tell a run's story: how it stands now, and everything that happened to it, its effects included, oldest first.

    Times are the database's, in UTC. Input, output and key are not shown. Exit code 1 if there is no such run.

    Examples:

      fencepost runs show 01a2297b-0198-7227-a94b-e181bb24ee35

      fencepost runs show 01a2297b-0198-7227-a94b-e181bb24ee35 \\
        --tenant acme --json
    """
    check_text(tenant=tenant)
    with answering():
        run, story, complete = asyncio.run(_story(database_url, run_id, tenant))
    if as_json:
        entries = [{"at": entry.at, "what": entry.what, "text": entry.text, **entry.facts} for entry in story]
        print_json({"run": plain(run), "timeline": [plain(entry) for entry in entries], "complete": complete})
        return
    _print_summary(run)
    _print_story(story, complete=complete)
    for line in _advice(run, cut_short=any(_was_cut_short(entry) for entry in story)):
        typer.echo(f"\n{line}")


async def _story(database_url: str, run_id: UUID, tenant: str | None) -> tuple[Mapping[str, Any], list[Entry], bool]:
    async with inspecting(database_url) as inspector, inspector.connection.transaction(isolation="repeatable_read", readonly=True):
        owner = tenant or await _tenant_of(inspector, run_id)
        found = await inspector.rows("run", run_id, owner)
        if not found:
            raise _not_found(f"tenant {owner} has no run {run_id}")
        run = found[0]
        attempts = await inspector.rows("run_attempts", run_id, owner, _STORY_MOST)
        events = await inspector.rows("run_events", run_id, owner, _STORY_MOST)
        audit = await inspector.rows("run_audit", run_id, owner, run["created_at"])
        effects = await inspector.rows("run_effects", str(run["root_run_id"]), owner, run_id, _STORY_MOST)
    complete = max(len(attempts), len(events), len(effects)) < _STORY_MOST
    return run, timeline(run, attempts[::-1], events[::-1], audit, effects), complete


async def _tenant_of(inspector: Inspector, run_id: UUID) -> str:
    tenants = [row["tenant_id"] for row in await inspector.rows("tenants_of", run_id)]
    if not tenants:
        raise _not_found(f"there is no run {run_id}")
    if len(tenants) > 1:
        raise typer.BadParameter(f"several tenants have a run {run_id}; say which by --tenant")
    return str(tenants[0])


def _not_found(what: str) -> RunNotFound:
    """For whoever pasted another id: they look alike."""
    remedy = "`fencepost runs list` shows the ids of runs; a key is none, nor is the id in a Location: see run_id_header"
    return RunNotFound(f"{what}; {remedy}")


def _print_summary(run: Mapping[str, Any]) -> None:
    typer.echo(f"Run {run['run_id']} of tenant {printable(run['tenant_id'])}")
    for name, text in _summary(run):
        typer.echo(textwrap.fill(printable(text), width(), initial_indent=f"  {name:<10}", subsequent_indent=" " * 12))


def _summary(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    now = run["now"]
    lines = [
        ("state", f"{run['state']}{_because(run)}; job {run['job_state']}; version {run['version']}"),
        ("workflow", f"{run['workflow']}, version {run['workflow_version']}, events to topic {run['topic']}"),
        ("attempts", f"{run['attempts']} of {run['max_attempts']} used; generation {run['lease_generation']}"),
        ("accepted", f"{run['created_at'].astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC, {relative(run['created_at'], now)}"),
        ("ended", relative(run["finished_at"], now) or "not yet"),
        ("lease", _lease(run)),
    ]
    if _is_parked(run):
        lines.append(("next", f"parked until it is resumed: {run['last_error_code']}"))
    elif run["job_state"] == "queued":
        ready = run["available_at"] > now
        lines.append(
            ("next", f"attempt {relative(run['available_at'], now)}" if ready else f"ready since {_for(run['available_at'], now)}")
        )
    if run["deadline_at"] is not None:
        lines.append(("deadline", relative(run["deadline_at"], now)))
    if run["cost_used"] or run["cost_limit"]:
        lines.append(("cost", f"{run['cost_used']} of {run['cost_limit'] or 'any'}"))
    if run["replay_of"] or run["replayed_as"]:
        links = [f"replay of {run['replay_of']}"] * bool(run["replay_of"]) + [f"replayed as {run['replayed_as']}"] * bool(
            run["replayed_as"]
        )
        lines.append(("lineage", ", ".join(links)))
    lines.append(
        (
            "sizes",
            f"input {_size(run['input_bytes'])}, output {_size(run['output_bytes'])}, checkpoint {_size(run['checkpoint_bytes'])}",
        )
    )
    return lines


def _is_parked(run: Mapping[str, Any]) -> bool:
    """Released for a person to look at; the database says so by a time that never comes."""
    return bool(run["job_state"] == "queued" and run["available_at"].year == _NEVER)


def _because(run: Mapping[str, Any]) -> str:
    if run["state"] == "failed":
        return f" ({run['dead_reason']}, error {run['error_code']})"
    return " (cancellation requested)" if run["cancel_requested_at"] and run["state"] != "cancelled" else ""


def _lease(run: Mapping[str, Any]) -> str:
    if run["lease_owner"] is None:
        return "none"
    expired = run["lease_expires_at"] <= run["now"]
    return f"{run['lease_owner']}, {'ran out' if expired else 'runs out'} {relative(run['lease_expires_at'], run['now'])}"


def _for(since: Any, now: Any) -> str:
    return seconds((now - since).total_seconds())


def _size(count: int | None) -> str:
    return "none" if count is None else f"{count:,} B"


def _print_story(story: Sequence[Entry], *, complete: bool) -> None:
    rows = [_told(entry, before) for entry, before in zip(story, [None, *story], strict=False)]
    typer.echo()
    print_rows(["UTC", "later by", "what", ""], rows, whole=3)
    if not complete:
        typer.echo(f"Only the newest {_STORY_MOST} attempts, effects and events are shown.")


def _told(entry: Entry, before: Entry | None) -> Sequence[object]:
    at = entry.at.astimezone(UTC)
    moment = f"{at:%H:%M:%S}.{at.microsecond // 1000:03}"
    if before is None:
        return moment, "", entry.what, entry.text
    new_day = at.date() != before.at.astimezone(UTC).date()
    moment = f"{at:%Y-%m-%d}\n{moment}" if new_day else moment
    return moment, _later((entry.at - before.at).total_seconds()), entry.what, entry.text


def _later(by: float) -> str:
    return f"+{by * 1_000:.0f} ms" if by < 1 else f"+{seconds(by)}"


def _advice(run: Mapping[str, Any], *, cut_short: bool) -> list[str]:
    names = f"{run['run_id']} --tenant {shlex.quote(printable(run['tenant_id']))}"
    if run["lease_owner"] is not None and run["lease_expires_at"] <= run["now"]:
        return ["The lease ran out: the next claim or the reaper takes the job. If nobody does, `fencepost diagnose stuck-leases`."]
    if run["state"] == "failed" and run["replayed_as"] is None:
        checked = "--effects-checked " * (run["dead_reason"] == _AMBIGUOUS)
        return [
            *_may_have_acted(run, cut_short=cut_short),
            f"To run it anew:\n  fencepost runs replay {names} {checked}--actor … --reason …",
        ]
    if _is_parked(run):
        return [
            f"Its workflow changed under it. Deploy what it began under, version {run['workflow_version']}, then:\n"
            f"  fencepost runs resume {names} --actor … --reason …\nMore: docs/guides/workflows.md"
        ]
    if run["job_state"] == "queued" and run["now"] - run["available_at"] > timedelta(minutes=1):
        return ["It is ready and nobody has claimed it: `fencepost diagnose stuck-leases` says which workflows have no worker."]
    return []


def _was_cut_short(entry: Entry) -> bool:
    """An attempt that was ended from outside, in the middle of whatever it did."""
    return entry.what == "lost" or entry.facts.get("error_code") in _CUT_SHORT


def _may_have_acted(run: Mapping[str, Any], *, cut_short: bool) -> list[str]:
    """What comes first at dead work that could have had an effect which nobody has recorded."""
    open_end = run["dead_reason"] == _AMBIGUOUS
    if not open_end and not cut_short:
        return []
    why = "its last error leaves open whether it acted" if open_end else "an attempt was cut short, and may have acted all the same"
    tenant, root = shlex.quote(printable(run["tenant_id"])), run["root_run_id"]
    return [
        f"First find out what it did: {why}. Ask the provider, by the id of its first run, {root},"
        f" or by the keys of\n  fencepost effects show {tenant} {root}\nMore: docs/runbooks/dead-work.md"
    ]


@runs.command()
def cancel(
    run_id: RunId,
    tenant: _NeededTenant,
    actor: Actor,
    reason: Reason,
    expected_version: Annotated[
        int | None, typer.Option(min=1, max=_LARGEST_VERSION, help="Only if the run still has this version, as `runs show` said.")
    ] = None,
    dry_run: DryRun = False,
    database_url: DatabaseUrl = "",
    as_json: JsonOutput = False,
) -> None:
    """Cancel a run: at once if nobody executes it, else its worker is told and can no longer complete it.

    Leaves an audit row. Exit code 1 if the run is unknown, has ended, or has another version than expected.

    Example:

      fencepost runs cancel 01a2297b-0198-7227-a94b-e181bb24ee35 \\
        --tenant acme --actor ana --reason "customer withdrew"
    """
    check_text(tenant=tenant, actor=actor, reason=reason)
    with answering():
        answer = asyncio.run(_cancel(database_url, (tenant, run_id, actor, reason, expected_version), dry_run=dry_run))
        _refuse_cancel(answer, run_id, tenant, expected_version)
    if as_json:
        print_json({"run_id": str(run_id), "tenant_id": tenant, "dry_run": dry_run, **plain(answer)})
        return
    done = (
        "Cancelled"
        if answer["outcome"] == "cancelled"
        else "Cancellation requested: its worker is told, and the run ends as cancelled"
    )
    typer.echo(f"{'Would be: ' * dry_run}{done}. The run is {answer['run_state']}, version {answer['run_version']}.")


def _refuse_cancel(answer: Mapping[str, Any], run_id: UUID, tenant: str, expected: int | None) -> None:
    match answer["outcome"]:
        case "not_found":
            raise _not_found(f"tenant {tenant} has no run {run_id}")
        case "ended":
            raise RunEnded(answer["run_state"])
        case "changed":
            raise RunChanged(f"the run has version {answer['run_version']} and not {expected}; nothing was changed")


@runs.command()
def resume(
    run_id: RunId,
    tenant: _NeededTenant,
    actor: Actor,
    reason: Reason,
    dry_run: DryRun = False,
    database_url: DatabaseUrl = "",
    as_json: JsonOutput = False,
) -> None:
    """Let a parked run go on: one whose workflow changed under it, once the code fits it again.

    Leaves an audit row. Exit code 1 if the run is unknown or not parked.

    Example:

      fencepost runs resume 01a2297b-0198-7227-a94b-e181bb24ee35 \\
        --tenant acme --actor ana --reason "version 1 is back"
    """
    check_text(tenant=tenant, actor=actor, reason=reason)
    with answering():
        answer = asyncio.run(_resume(database_url, (tenant, run_id, actor, reason), dry_run=dry_run))
        if answer["outcome"] == "not_found":
            raise _not_found(f"tenant {tenant} has no run {run_id}")
        if answer["outcome"] == "not_parked":
            raise RunChanged("the run is not parked; nothing was changed")
    if as_json:
        print_json({"run_id": str(run_id), "tenant_id": tenant, "dry_run": dry_run, **plain(answer)})
        return
    typer.echo(f"{'Would be: ' * dry_run}Resumed. Whichever worker claims the run next executes it from its beginning.")


async def _resume(database_url: str, arguments: tuple[object, ...], *, dry_run: bool) -> Mapping[str, Any]:
    async with inspecting(database_url) as inspector, _changing(inspector, dry_run=dry_run):
        answer: Mapping[str, Any] = (await inspector.rows("resume", *arguments))[0]
        return answer


@runs.command()
def replay(
    run_id: RunId,
    tenant: _NeededTenant,
    actor: Actor,
    reason: Reason,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="Replays that one lineage may have.")] = 3,
    ledger_retention_days: Annotated[
        float,
        typer.Option(
            envvar="FENCEPOST_LEDGER_RETENTION_DAYS", min=0, max=3_650,
            help="How long effects are remembered, 0 is for ever: as consumers and workers are told. A lineage that began earlier "
            "is not run anew: it could act twice.",
        ),
    ] = 30.0,
    ledger_retention_hours: Annotated[
        float | None,
        typer.Option(
            envvar="FENCEPOST_LEDGER_RETENTION_HOURS", min=0.001, max=87_840, show_default=False,
            help="The older name, in hours; at most as long as the days.",
        ),
    ] = None,
    effects_checked: Annotated[
        bool, typer.Option("--effects-checked", help="You know what an ambiguous run did outside. Goes to the audit row.")
    ] = False,
    dry_run: DryRun = False,
    database_url: DatabaseUrl = "",
    as_json: JsonOutput = False,
) -> None:  # fmt: skip
    """Run dead work anew, as a new run linked to the old one, which stays as it is.

    Leaves an audit row. Exit code 1 if the run is unknown, did not fail, was replayed already, or may not be. One that died as
    ambiguous may have acted: it needs --effects-checked.

    Example:

      fencepost runs replay 01a2297b-0198-7227-a94b-e181bb24ee35 \\
        --tenant acme --actor ana --reason "provider is back"
    """
    check_text(tenant=tenant, actor=actor, reason=reason)
    retention = _retention(ledger_retention_days, ledger_retention_hours)
    with answering():
        noted = f"{reason}; effects checked" if effects_checked else reason
        arguments = (tenant, run_id, uuid7(), actor, noted, limit, retention)
        answer = asyncio.run(_replay(database_url, arguments, effects_checked=effects_checked, dry_run=dry_run))
        _refuse_replay(answer, run_id, tenant)
    if as_json:
        print_json({"run_id": str(run_id), "tenant_id": tenant, "dry_run": dry_run, **plain(answer)})
    elif dry_run:
        typer.echo(f"Would be replayed, as replay {answer['replays']} of at most {limit} of its lineage.")
    else:
        typer.echo(f"Replayed as {answer['new_run_id']}: replay {answer['replays']} of at most {limit} of its lineage.")


def _retention(days: float, hours: float | None) -> timedelta:
    """The retention by either name; hours that go beyond what the ledger keeps are refused."""
    kept = timedelta(days=days) if days else _LONGEST_RETENTION
    if hours is None:
        return kept
    if timedelta(hours=hours) > kept:
        raise typer.BadParameter(
            f"FENCEPOST_LEDGER_RETENTION_HOURS ({hours:g}) is more than FENCEPOST_LEDGER_RETENTION_DAYS ({days:g}), after which "
            "effects are deleted: unset it, and give the days to consumers, workers and this command alike"
        )
    return timedelta(hours=hours)


def _refuse_replay(answer: Mapping[str, Any], run_id: UUID, tenant: str) -> None:
    match answer["outcome"]:
        case "not_found":
            raise _not_found(f"tenant {tenant} has no run {run_id}")
        case "not_dead":
            raise ReplayRefused("the run did not fail; only failed runs are run anew")
        case "already_replayed":
            raise ReplayRefused(f"the run was replayed as {answer['new_run_id']}; if that one failed, replay that one")
        case "budget_spent":
            raise ReplayRefused(f"its lineage was replayed {answer['replays']} times; find the cause, then raise --limit")
        case "too_old":
            raise ReplayRefused(
                "its lineage began before the ledger's retention: what it did may be forgotten, and would be done again"
            )


async def _refuse_unchecked(inspector: Inspector, tenant: str, run_id: UUID) -> None:
    """Raises ``ReplayRefused`` for a run that may have acted, unless somebody says that they know."""
    if (await inspector.rows("dead_reason", tenant, run_id))[0]["dead_reason"] == _AMBIGUOUS:
        raise ReplayRefused(
            "the run died as ambiguous: it may have acted, and would act again. Find out what it did, as `fencepost runs show"
            f" {run_id}` says; then add --effects-checked"
        )


async def _replay(database_url: str, arguments: tuple[Any, ...], *, effects_checked: bool, dry_run: bool) -> Mapping[str, Any]:
    async with inspecting(database_url) as inspector, _changing(inspector, dry_run=dry_run):
        answer: Mapping[str, Any] = (await inspector.rows("replay", *arguments))[0]
        if answer["outcome"] == "replayed" and not effects_checked:
            await _refuse_unchecked(inspector, *arguments[:2])
        return answer


async def _cancel(database_url: str, arguments: tuple[object, ...], *, dry_run: bool) -> Mapping[str, Any]:
    async with inspecting(database_url) as inspector, _changing(inspector, dry_run=dry_run):
        answer: Mapping[str, Any] = (await inspector.rows("cancel", *arguments))[0]
        return answer


@asynccontextmanager
async def _changing(inspector: Inspector, *, dry_run: bool) -> AsyncIterator[None]:
    """Do it; a dry run does it and takes it back, so that it gives the very answer."""
    transaction = inspector.connection.transaction()
    await transaction.start()
    try:
        yield
    except BaseException:
        await transaction.rollback()
        raise
    await (transaction.rollback() if dry_run else transaction.commit())
