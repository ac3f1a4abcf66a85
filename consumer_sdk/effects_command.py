"""``fencepost effects``: what the ledger knows of outside effects, and a person's word on those that nobody else can tell."""

import asyncio
import json
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, NoReturn
from uuid import UUID

import typer

from consumer_sdk.inspection import Actor, DryRun, Reason, answering, check_text, inspecting, plain
from consumer_sdk.timeline import relative
from fencepost.console import DatabaseUrl, JsonOutput, print_json, seconds
from fencepost.tables import print_rows, printable, width

__all__ = ["effects"]

_MOST_SHOWN: Final = 1_000
_MOST_RESULT_BYTES: Final = 1_000_000
_MOST_REFERENCE_CHARACTERS: Final = 200
_LARGEST: Final = 2**63 - 1
_LARGEST_INTEGER: Final = 2**31 - 1

effects = typer.Typer(help="Outside effects: what was sent, and what became of it.", no_args_is_help=True)

_State = Literal["open", "reserved", "sent", "succeeded", "failed", "unknown", "applied", "absent", "disputed"]
_Resolution = Literal["applied", "absent", "disputed"]
_Tenant = Annotated[str, typer.Argument(help="Whose effect; '' where the message has no tenant.", metavar="TENANT")]
_RunKey = Annotated[str, typer.Argument(help="The first run of the lineage, any run of it, or the event's id.", metavar="RUN_KEY")]


@effects.command("list")
def list_effects(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's; '' for messages without one.")] = None,
    state: Annotated[_State, typer.Option(help="open: those whose answer nobody knows, the oldest call first.")] = "open",
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")] = 20,
    database_url: DatabaseUrl = "",
    as_json: JsonOutput = False,
) -> None:
    """List effects: those that wait for a reconciler or a person, or those in one state, newest first.

    Examples:

      fencepost effects list

      fencepost effects list --tenant acme --state disputed --json
    """
    check_text(tenant=tenant or None)
    found = asyncio.run(_listed(database_url, tenant, state, limit))
    if as_json:
        print_json([plain(row) for row in found])
        return
    if not found:
        typer.echo("No effect is open." if state == "open" else "No effect fits.")
        return
    titles = ["run", "gen", "sends", "sent", "tenant", "step", "operation", "state"]
    print_rows(titles, [_line(row) for row in found], whole=4)


async def _listed(database_url: str, tenant: str | None, state: str, limit: int) -> Sequence[Any]:
    async with inspecting(database_url) as inspector:
        if state == "open":
            return await inspector.rows("open_effects", tenant, limit)
        return await inspector.rows("list_effects", tenant, state, limit)


def _line(row: Mapping[str, Any]) -> Sequence[object]:
    """What names an effect to the other commands reads as a shell takes it: a message may have no tenant."""
    sent = relative(row["sent_at"], row["now"]) or "never"
    run_key, tenant = shlex.quote(row["run_key"]), shlex.quote(row["tenant_id"])
    return run_key, row["generation"], row["sends"], sent, tenant, _step(row), row["operation"], row["state"]


def _step(row: Mapping[str, Any]) -> str:
    """The step, with its occurrence and iteration where there are several."""
    occurrence = f" #{row['occurrence']}" if row["occurrence"] else ""
    iteration = f" of iteration {row['iteration']}" if row["iteration"] else ""
    return f"{row['step']}{occurrence}{iteration}"


@effects.command()
def show(tenant: _Tenant, run_key: _RunKey, database_url: DatabaseUrl = "", as_json: JsonOutput = False) -> None:
    """Show the effects of a run, its retries and its replays, or of a message.

    Results are not shown. Exit code 1 if there is none.

    Example:

      fencepost effects show acme 01a2297b-0198-7227-a94b-e181bb24ee35
    """
    found = _found(database_url, tenant, run_key)
    if as_json:
        print_json([plain(row) for row in found])
        return
    for row in found:
        _print_effect(row)


def _found(database_url: str, tenant: str, run_key: str) -> Sequence[Any]:
    check_text(tenant=tenant or None, run_key=run_key)
    found = asyncio.run(_effects_of(database_url, tenant, run_key))
    if not found:
        _say_no(
            "the tenant has no effects of this run or message; `fencepost effects list` shows which have open ones,"
            " with --state which have others"
        )
    return found


async def _effects_of(database_url: str, tenant: str, run_key: str) -> Sequence[Any]:
    async with inspecting(database_url) as inspector:
        # A blank may have been pasted along, or be part of an event's id.
        keys = list(dict.fromkeys((run_key, run_key.strip())))
        return await inspector.rows("effects_of", tenant, keys, _as_run_id(run_key.strip()), _MOST_SHOWN)


def _as_run_id(run_key: str) -> UUID | None:
    try:
        return UUID(run_key)
    except ValueError:
        return None


def _print_effect(row: Mapping[str, Any]) -> None:
    typer.echo(f"\n{printable(row['operation'])}, step {printable(_step(row))}: {row['state']}")
    for name, text in _facts(row):
        typer.echo(textwrap.fill(printable(text), width(), initial_indent=f"  {name:<11}", subsequent_indent=" " * 13))


def _facts(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    lease = f", under generation {row['run_generation']} of run {row['run_id']}" if row["run_id"] else ""
    lines = [
        ("lineage", f"{row['run_key']} of tenant {shlex.quote(row['tenant_id'])}"),
        ("generation", f"{row['generation']}, last taken by {row['holder']}{lease}"),
        ("reserved", _when(row["created_at"], row["now"])),
        ("sends", f"{row['sends']}, the last {_when(row['sent_at'], row['now'])}" if row["sends"] else "none"),
    ]
    if row["provider_key"] is not None:  # a message's own row asks no provider
        lines.append(("key", row["provider_key"]))
    if row["provider_reference"] is not None:
        lines.append(("reference", row["provider_reference"]))
    if row["finished_at"] is not None:
        lines.append(("closed", _when(row["finished_at"], row["now"])))
    if row["error_code"] is not None:
        lines.append(("error", f"{row['error_code']} ({row['error_class']})"))
    if row["result_bytes"] is not None:
        lines.append(("result", f"{row['result_bytes']:,} B"))
    if row["state"] == "sent":
        left = (row["deadline_at"] - row["now"]).total_seconds()
        lines.append(("call", f"may still be out for {seconds(left)}" if left > 0 else "must have ended; nobody has said how"))
    return lines


def _when(at: datetime, now: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC, {relative(at, now)}"


@effects.command()
def resolve(
    tenant: _Tenant,
    run_key: _RunKey,
    resolution: Annotated[
        _Resolution,
        typer.Option("--as", help="applied: it happened; absent: it did not, send it again; disputed: nobody can tell, for good."),
    ],
    generation: Annotated[
        int, typer.Option(min=1, max=_LARGEST, help="Only if the effect still has this generation, as `effects show` said.")
    ],
    actor: Actor,
    reason: Reason,
    operation: Annotated[str | None, typer.Option(help="Which effect, if there are several.")] = None,
    step: Annotated[str | None, typer.Option(help="Of which step, if there are several.")] = None,
    occurrence: Annotated[int | None, typer.Option(min=0, max=_LARGEST_INTEGER, help="Which time, if there are several.")] = None,
    iteration: Annotated[int | None, typer.Option(min=0, max=_LARGEST_INTEGER, help="Of which iteration.")] = None,
    result: Annotated[str | None, typer.Option(help="With applied: what the handler gets, as JSON.", metavar="JSON")] = None,
    reference: Annotated[str | None, typer.Option(help="The provider's own name for what happened.")] = None,
    dry_run: DryRun = False,
    database_url: DatabaseUrl = "",
    as_json: JsonOutput = False,
) -> None:
    """Say what became of an effect whose answer nobody knows: ask the provider first, by its key.

    The next attempt or replay of the run goes on from there. Leaves an audit row. Exit code 1 if the effect is unknown, is not
    open, or was changed by another meanwhile.

    Example:

      fencepost effects resolve acme 01a2297b-0198-7227-a94b-e181bb24ee35 \\
        --as applied --result '{"charge": "ch_1"}' --generation 3 \\
        --actor ana --reason "found in the provider's dashboard"
    """
    check_text(tenant=tenant or None, actor=actor, reason=reason, operation=operation, step=step, reference=reference)
    payload = _payload(result, resolution)
    if reference is not None and len(reference) > _MOST_REFERENCE_CHARACTERS:
        raise typer.BadParameter(f"--reference must have at most {_MOST_REFERENCE_CHARACTERS} characters")
    wanted = {"operation": operation, "step": step, "occurrence": occurrence, "iteration": iteration}
    effect = _only(_found(database_url, tenant, run_key), wanted)
    key = [effect[name] for name in ("tenant_id", "run_key", "iteration", "step", "occurrence", "operation")]
    with answering():
        answer = asyncio.run(
            _resolve(database_url, (*key, generation, resolution, payload, reference, actor, reason), dry_run=dry_run)
        )
    _refuse(answer, generation)
    if as_json:
        print_json({"run_key": effect["run_key"], "tenant_id": tenant, "dry_run": dry_run, **plain(answer)})
    else:
        typer.echo(f"{'Would be' if dry_run else 'Now'} {answer['effect_state']}, generation {answer['effect_generation']}.")


def _payload(result: str | None, resolution: str) -> bytes | None:
    if result is None:
        return None
    if resolution != "applied":
        raise typer.BadParameter("--result goes with --as applied")
    try:
        payload = json.dumps(json.loads(result), separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise typer.BadParameter("--result must be JSON") from None
    if len(payload) > _MOST_RESULT_BYTES:
        raise typer.BadParameter(f"--result must have at most {_MOST_RESULT_BYTES} bytes")
    return payload


def _only(found: Sequence[Any], wanted: Mapping[str, object]) -> Mapping[str, Any]:
    """The one effect that is meant."""
    fitting = [row for row in found if all(value is None or row[name] == value for name, value in wanted.items())]
    if not fitting:
        _say_no("none of its effects is that one; `fencepost effects show` lists them")
    if len(fitting) > 1:
        raise typer.BadParameter("several effects fit; say which by --operation, --step, --occurrence and --iteration")
    return dict(fitting[0])


async def _resolve(database_url: str, arguments: tuple[object, ...], *, dry_run: bool) -> Mapping[str, Any]:
    """Do it; a dry run does it and takes it back, so that it gives the very answer."""
    async with inspecting(database_url) as inspector:
        transaction = inspector.connection.transaction()
        await transaction.start()
        answer: Mapping[str, Any] = (await inspector.rows("resolve_effect", *arguments))[0]
        await (transaction.rollback() if dry_run else transaction.commit())
        return answer


def _refuse(answer: Mapping[str, Any], expected: int) -> None:
    match answer["outcome"]:
        case "not_found":
            _say_no("there is no such effect")
        case "changed":
            _say_no(f"the effect has generation {answer['effect_generation']} and not {expected}; nothing was changed")
        case "not_open":
            _say_no(f"the effect is {answer['effect_state']}: there is nothing to resolve; nothing was changed")


def _say_no(message: str) -> NoReturn:
    typer.echo(f"fencepost: {printable(message)}", err=True)
    raise typer.Exit(1)
