"""``fencepost dead-letters``: messages that consumers gave up, and what an operator does about them."""

import asyncio
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn
from uuid import UUID

import typer

from consumer_sdk.dead_letter_batches import Change
from consumer_sdk.dead_letter_changes import MOST_LETTERS, NO_LETTER, Request, perform
from consumer_sdk.dead_letter_filter import (
    AFTER,
    OPEN,
    ConsumerName,
    ErrorClass,
    ErrorCode,
    EventType,
    LetterFilter,
    NewerThan,
    OlderThan,
    TenantName,
    TopicName,
    WhichReason,
)
from consumer_sdk.dead_letter_story import cause, facts, header_rows, headers, next_steps, one_line, readable
from consumer_sdk.inspection import Actor, DryRun, Reason, id_of, inspecting, plain
from consumer_sdk.timeline import relative
from fencepost.console import DatabaseUrl, JsonOutput, print_json, seconds
from fencepost.tables import print_rows, width

__all__ = ["dead_letters"]

_COUNTED_MOST: Final = 1_000_000
_EFFECTS_MOST: Final = 1_000
_AUDIT_MOST: Final = 100
_HEADERS_MOST: Final = 100
_VALUE_BYTES: Final = 200
_PAYLOAD_BYTES: Final = 4_000
# The options of the filter by its parts, in the order of the help.
_FILTER: Final[Mapping[str, Any]] = {
    "consumer": ConsumerName,
    "tenant": TenantName,
    "topic": TopicName,
    "event_type": EventType,
    "dead_reason": WhichReason,
    "error_class": ErrorClass,
    "error_code": ErrorCode,
    "older_than": OlderThan,
    "newer_than": NewerThan,
}

dead_letters = typer.Typer(help="Messages that consumers gave up.", no_args_is_help=True)

_letter_id: Final = id_of("a dead letter", "`fencepost dead-letters list` shows them")

_State = Literal["open", "dead", "redriving", "redriven", "discarded", "all"]
_WhichState = Annotated[_State, typer.Option(help="open: dead or being redriven.")]
_After = Annotated[UUID | None, typer.Option(help=AFTER, metavar="ID", parser=_letter_id)]
_Ids = Annotated[list[UUID] | None, typer.Argument(help="Which dead letters; or say a filter.", metavar="ID...", parser=_letter_id)]
_AtMost = Annotated[int, typer.Option(min=1, max=MOST_LETTERS, help="Change at most so many, the oldest first.")]
_Rate = Annotated[float | None, typer.Option(min=0.01, max=10_000, help="So many a second; else as fast as it goes.")]
_Yes = Annotated[bool, typer.Option("--yes", help="Do not ask before what a filter found is changed.")]


def _filtered(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each part of the filter, which it gets as ``which``."""
    options = [Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=option) for name, option in _FILTER.items()]
    parameters: list[Parameter] = []
    for one in inspect.signature(command).parameters.values():
        parameters += options if one.name == "which" else [one.replace(kind=Parameter.KEYWORD_ONLY)]

    @wraps(command)
    def filtering(**given: Any) -> None:
        which = LetterFilter(**{name: given.pop(name) for name in _FILTER})
        command(which=which, **given)

    filtering.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    filtering.__annotations__ = {one.name: one.annotation for one in parameters}
    return filtering


def _states(state: _State) -> Sequence[str] | None:
    return {"open": OPEN, "all": None}.get(state, (state,))


@dead_letters.command("list")
@_filtered
def list_letters(
    which: LetterFilter,
    state: _WhichState = "open",
    newest_first: Annotated[bool, typer.Option("--newest-first", help="Else the oldest come first.")] = False,
    after: _After = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")] = 20,
    database_url: DatabaseUrl = "",
    as_json: JsonOutput = False,
) -> None:
    """List dead letters, oldest first. Keys, payloads and header values are not shown.

    Examples:

      fencepost dead-letters list

      fencepost dead-letters list --consumer payments \\
        --dead-reason invalid_payload --newer-than 2h --newest-first --json
    """
    statement = "list_newest_dead_letters" if newest_first else "list_dead_letters"
    found = asyncio.run(_matching(database_url, statement, which, state, (limit + 1,), after=after, newest_first=newest_first))
    shown = found[:limit]
    if as_json:
        print_json([plain(row) for row in shown])
        return
    if not shown:
        typer.echo("No dead letter fits.")
        return
    print_rows(["id", "tries", "age", "state", "consumer", "type", "reason: code"], [_line(row) for row in shown], whole=4)
    if len(found) > limit:
        typer.echo(f"There are more: --after {shown[-1]['dead_letter_id']}")


async def _matching(
    database_url: str,
    statement: str,
    which: LetterFilter,
    state: _State,
    limits: tuple[int, ...],
    *,
    after: UUID | None = None,
    newest_first: bool = False,
) -> Sequence[Any]:
    async with inspecting(database_url) as inspector:
        now = (await inspector.rows("clock"))[0]["at"]
        arguments = which.arguments(_states(state), now=now, after=after, newest_first=newest_first)
        return await inspector.rows(statement, *arguments, *limits)


def _line(row: Mapping[str, Any]) -> Sequence[object]:
    cells = (
        row["dead_letter_id"], row["attempts"], _age(row["created_at"], row["now"]), row["state"], row["consumer"],
        row["event_type"] or "?", cause(row),
    )  # fmt: skip
    return [one_line(str(cell)) for cell in cells]


def _age(at: datetime, now: datetime) -> str:
    return seconds((now - at).total_seconds())


@dead_letters.command()
@_filtered
def summary(
    which: LetterFilter,
    state: _WhichState = "open",
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many groups, the largest first.")] = 20,
    database_url: DatabaseUrl = "",
    as_json: JsonOutput = False,
) -> None:
    """Count dead letters by consumer, type, reason, error class and code: what a night's failures have in common.

    Counts the first million.

    Examples:

      fencepost dead-letters summary

      fencepost dead-letters summary --newer-than 45min --json
    """
    found = asyncio.run(_matching(database_url, "summarise_dead_letters", which, state, (_COUNTED_MOST, limit)))
    letters, groups = (found[0]["all_letters"], found[0]["all_groups"]) if found else (0, 0)
    if as_json:
        print_json({"letters": letters, "groups": groups, "largest": [_group(row) for row in found]})
        return
    if not found:
        typer.echo("No dead letter fits.")
        return
    titles = ["letters", "redriving", "oldest", "newest", "consumer", "type", "reason: code", "error class"]
    print_rows(titles, [_counted(row) for row in found], whole=4)
    rest = f"; shown are the largest {limit:,} of {groups:,} groups" if groups > limit else ""
    typer.echo(f"Dead letters: {letters:,}{' or more' if letters >= _COUNTED_MOST else ''}{rest}.")


def _group(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in plain(row).items() if name not in ("all_letters", "all_groups")}


def _counted(row: Mapping[str, Any]) -> Sequence[object]:
    oldest, newest = (_age(row[name], row["now"]) for name in ("oldest_at", "newest_at"))
    cells = (
        f"{row['letters']:,}", f"{row['redriving']:,}", oldest, newest, row["consumer"], row["event_type"] or "?",
        cause(row), row["error_class"],
    )  # fmt: skip
    return [one_line(cell) for cell in cells]


@dead_letters.command()
def show(
    dead_letter_id: Annotated[UUID, typer.Argument(help="Which dead letter.", metavar="ID", parser=_letter_id)],
    values: Annotated[
        bool, typer.Option("--values", help="Show key and header values, their beginning: they may be secret.")
    ] = False,
    payload: Annotated[bool, typer.Option("--payload", help="Show the payload, its beginning: it may be secret.")] = False,
    payload_to: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the original payload to this new file.")] = None,
    database_url: DatabaseUrl = "",
    as_json: JsonOutput = False,
) -> None:
    """Show a dead letter: where it came from, why it was given up, what its effects are, what operators did, and what to do next.

    Of headers the names, and the values of those that CloudEvents and W3C define. Other values, key and payload only where they
    are asked for, escaped and cut; the whole payload, byte for byte, in a file. Exit code 1 if there is no such dead letter.

    Examples:

      fencepost dead-letters show 01a2297b-0198-7227-a94b-e181bb24ee35

      fencepost dead-letters show 01a2297b-0198-7227-a94b-e181bb24ee35 \\
        --payload-to payload.bin
    """
    letter, effects, history, beginning, whole = asyncio.run(
        _shown(database_url, dead_letter_id, payload=payload, whole=payload_to is not None)
    )
    if payload_to is not None:
        _write(payload_to, whole)
    told = readable(beginning, letter["payload_bytes"]) if payload else None
    if as_json:
        print_json(_as_json(letter, effects, history, told, values=values))
        return
    for name, text in facts(letter, effects, values=values):
        _print_fact(name, text)
    if told is not None:
        _print_fact("content", told)
    _print_headers(letter, values=values)
    if history:
        typer.echo()
    for row in history:
        checked = ", effects checked" if row["effects_checked"] else ""
        _print_fact(
            "history", f"{row['command']} by {row['actor']}{checked}, {relative(row['created_at'], letter['now'])}: {row['reason']}"
        )
    for step in next_steps(letter, effects):
        typer.echo(f"\n{step}")
    typer.echo("\nMore: docs/runbooks/dead-letters.md")


async def _shown(
    database_url: str, dead_letter_id: UUID, *, payload: bool, whole: bool
) -> tuple[Any, Sequence[Any], Sequence[Any], bytes | None, bytes | None]:
    """The letter, its effects, what operators did, the payload's beginning, and all of it: each where it is wanted."""
    async with inspecting(database_url) as inspector:
        found = await inspector.rows("dead_letter", dead_letter_id, _HEADERS_MOST, _VALUE_BYTES)
        if not found:
            _say_no(NO_LETTER)
        letter = found[0]
        effects = await inspector.rows("effects_of", letter["tenant_id"], [letter["run_key"]], None, _EFFECTS_MOST)
        history = await inspector.rows("dead_letter_audit", dead_letter_id, _AUDIT_MOST)
        read = [(await inspector.rows("dead_letter_payload", dead_letter_id, most))[0]["payload"] if wanted else None
                for wanted, most in ((payload, _PAYLOAD_BYTES), (whole, None))]  # fmt: skip
    return letter, effects, history[::-1], read[0], read[1]


def _as_json(
    letter: Mapping[str, Any], effects: Sequence[Any], history: Sequence[Any], payload: str | None, *, values: bool
) -> dict[str, Any]:
    told = {name: value for name, value in plain(letter).items() if name not in ("header_names", "header_sizes", "header_values")}
    return {
        **told,
        "key": readable(letter["key"], letter["key_bytes"]) if values and letter["key_bytes"] is not None else None,
        "payload": payload,
        "headers": headers(letter, values=values),
        "effects": [plain(row) for row in effects],
        "history": [plain(row) for row in history],
        "next": next_steps(letter, effects),
    }


def _print_fact(name: str, text: str) -> None:
    typer.echo(textwrap.fill(one_line(text), width(), initial_indent=f"{name:<10}", subsequent_indent=" " * 10))


def _print_headers(letter: Mapping[str, Any], *, values: bool) -> None:
    if not letter["header_count"]:
        _print_fact("headers", "none")
        return
    typer.echo()
    print_rows(["header", "size", "value"], header_rows(letter, values=values))
    if letter["header_count"] > _HEADERS_MOST:
        typer.echo(f"and {letter['header_count'] - _HEADERS_MOST:,} headers more")


def _write(target: Path, payload: bytes | None) -> None:
    try:
        with target.open("xb") as file:
            file.write(payload or b"")
    except OSError as error:
        raise typer.BadParameter(f"--payload-to: {error.strerror}; name a new file in a directory that exists") from None


@dead_letters.command()
@_filtered
def redrive(
    actor: Actor,
    reason: Reason,
    which: LetterFilter,
    dead_letter_ids: _Ids = None,
    after: _After = None,
    at_most: _AtMost = MOST_LETTERS,
    rate: _Rate = None,
    effects_checked: Annotated[
        bool, typer.Option("--effects-checked", help="For ambiguous ones: somebody has looked up what became of their effects.")
    ] = False,
    wait: Annotated[float, typer.Option(min=0, max=3600, help="Wait so many seconds for the outcomes.")] = 0,
    yes: _Yes = False,
    dry_run: DryRun = False,
    database_url: DatabaseUrl = "",
    as_json: JsonOutput = False,
) -> None:
    """Have dead letters handled anew, by the consumer that gave them up, under the same identity. Mend the cause first.

    Each gets one attempt; effects that the ledger knows are not repeated. Leaves an audit row each. A filter is read once,
    before the first is changed. Ctrl-C stops between two batches; the same command goes on. Exit code 1 if one was refused, was
    not asked for, or was not handled within --wait.

    Examples:

      fencepost dead-letters redrive 01a2297b-0198-7227-a94b-e181bb24ee35 \\
        --actor ana --reason "schema mended" --wait 30

      fencepost dead-letters redrive --consumer payments --error-code bad_iban \\
        --newer-than 2h --rate 50 --dry-run \\
        --actor ana --reason "deploy 512 undone"
    """
    change = Change(verb="redrive", actor=actor, reason=reason, effects_checked=effects_checked)
    request = Request(
        change=change, ids=dead_letter_ids or [], which=which, after=after, at_most=at_most, rate=rate, wait=wait, yes=yes,
        dry_run=dry_run, as_json=as_json,
    )  # fmt: skip
    perform(database_url, request)


@dead_letters.command()
@_filtered
def discard(
    actor: Actor,
    reason: Reason,
    which: LetterFilter,
    dead_letter_ids: _Ids = None,
    after: _After = None,
    at_most: _AtMost = MOST_LETTERS,
    rate: _Rate = None,
    yes: _Yes = False,
    dry_run: DryRun = False,
    database_url: DatabaseUrl = "",
    as_json: JsonOutput = False,
) -> None:
    """Give dead letters up for good: they stay as evidence, and cannot be redriven. Leaves an audit row each.

    A filter is read once, before the first is changed. Ctrl-C stops between two batches; the same command goes on. Exit code 1
    if one was refused, or was not asked for.

    Examples:

      fencepost dead-letters discard 01a2297b-0198-7227-a94b-e181bb24ee35 \\
        --actor ana --reason "test data"

      fencepost dead-letters discard --topic load-test --older-than 1d \\
        --dry-run --actor ana --reason "test data"
    """
    request = Request(
        change=Change(verb="discard", actor=actor, reason=reason), ids=dead_letter_ids or [], which=which, after=after,
        at_most=at_most, rate=rate, wait=0, yes=yes, dry_run=dry_run, as_json=as_json,
    )  # fmt: skip
    perform(database_url, request)


def _say_no(message: str) -> NoReturn:
    typer.echo(f"fencepost: {message}", err=True)
    raise typer.Exit(1)
