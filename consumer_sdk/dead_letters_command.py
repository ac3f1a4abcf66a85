"""``fencepost dead-letters``: messages that consumers gave up, and what an operator does about them."""

import asyncio
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn
from uuid import UUID

import typer

from consumer_sdk.delivery import DeadReason
from consumer_sdk.inspection import Actor, DryRun, Reason, answering, check_text, inspecting, plain
from consumer_sdk.timeline import relative
from fencepost.console import DatabaseUrl, JsonOutput, print_json
from fencepost.tables import print_rows, printable, width

__all__ = ["dead_letters"]

_OPEN: Final = ["dead", "redriving"]
_WAIT_TICK_SECONDS: Final = 0.5
_MOST_AT_ONCE: Final = 1_000
_REFUSALS: Final = {
    "not_found": "there is no such dead letter",
    "not_dead": "it is {state}: somebody else was first, or it is over; nothing was changed",
    "ambiguous": "an effect may have happened that no ledger row tells of: find out, then say --effects-checked",
}

dead_letters = typer.Typer(help="Messages that consumers gave up.", no_args_is_help=True)

_State = Literal["open", "dead", "redriving", "redriven", "discarded", "all"]
_Ids = Annotated[list[UUID], typer.Argument(help="Which dead letters.", metavar="ID...")]


@dead_letters.command("list")
def list_letters(
    consumer: Annotated[str | None, typer.Option(help="Only this consumer's.")] = None,
    topic: Annotated[str | None, typer.Option(help="Only messages of this topic.")] = None,
    dead_reason: Annotated[DeadReason | None, typer.Option(help="Only those given up for this reason.")] = None,
    state: Annotated[_State, typer.Option(help="open: dead or being redriven.")] = "open",
    after: Annotated[UUID | None, typer.Option(help="Go on behind this one.", metavar="ID")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")] = 20,
    database_url: DatabaseUrl = "",
    as_json: JsonOutput = False,
) -> None:
    """List dead letters, oldest first. Keys, payloads and header values are not shown.

    Examples:

      fencepost dead-letters list

      fencepost dead-letters list --consumer payments --dead-reason invalid_payload --json
    """
    check_text(consumer=consumer, topic=topic)
    states = {"open": _OPEN, "all": None}.get(state, [state])
    found = asyncio.run(_rows(database_url, "list_dead_letters", consumer, topic, dead_reason, states, after, limit + 1))
    shown = found[:limit]
    if as_json:
        print_json([plain(row) for row in shown])
        return
    titles = ["id", "age", "consumer", "type", "topic", "offset", "reason", "code", "tries", "state"]
    print_rows(titles, [_line(row) for row in shown])
    if len(found) > limit:
        typer.echo(f"There are more: --after {shown[-1]['dead_letter_id']}")


async def _rows(database_url: str, statement: str, *arguments: object) -> Sequence[Any]:
    async with inspecting(database_url) as inspector:
        return await inspector.rows(statement, *arguments)


def _line(row: Mapping[str, Any]) -> Sequence[object]:
    place = f"{row['partition']}@{row['offset']}"
    return (
        row["dead_letter_id"], relative(row["created_at"], row["now"]), row["consumer"], row["event_type"] or "?", row["topic"],
        place, row["reason"], row["error_code"], row["attempts"], row["state"],
    )  # fmt: skip


@dead_letters.command()
def show(
    dead_letter_id: Annotated[UUID, typer.Argument(help="Which dead letter.", metavar="ID")],
    payload_to: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the original payload to this new file.")] = None,
    database_url: DatabaseUrl = "",
    as_json: JsonOutput = False,
) -> None:
    """Show a dead letter: where it came from, why it was given up, what its effects are, and what operators did.

    The payload is written only where a file is named for it. Exit code 1 if there is no such dead letter.

    Example:

      fencepost dead-letters show 01a2297b-0198-7227-a94b-e181bb24ee35 --payload-to payload.bin
    """
    letter, effects, history = asyncio.run(_shown(database_url, dead_letter_id))
    if payload_to is not None:
        _write(payload_to, asyncio.run(_rows(database_url, "dead_letter_payload", dead_letter_id))[0]["payload"])
    if as_json:
        print_json({**plain(letter), "effects": [plain(row) for row in effects], "history": [plain(row) for row in history]})
        return
    for name, text in _facts(letter, effects):
        typer.echo(textwrap.fill(printable(text), width(), initial_indent=f"{name:<10}", subsequent_indent=" " * 10))
    for row in history:
        typer.echo(f"{'history':<10}{printable(row['command'])} by {printable(row['actor'])}: {printable(row['reason'])}")


async def _shown(database_url: str, dead_letter_id: UUID) -> tuple[Any, Sequence[Any], Sequence[Any]]:
    async with inspecting(database_url) as inspector:
        found = await inspector.rows("dead_letter", dead_letter_id)
        if not found:
            _say_no("there is no such dead letter")
        letter = found[0]
        effects = await inspector.rows("effects_of", letter["tenant_id"], [letter["run_key"]], None, _MOST_AT_ONCE)
        history = await inspector.rows("dead_letter_audit", str(dead_letter_id))
    return letter, effects, history


def _facts(letter: Mapping[str, Any], effects: Sequence[Any]) -> list[tuple[str, str]]:
    size = "none (a tombstone)" if letter["payload_bytes"] is None else f"{letter['payload_bytes']:,} B"
    done = ", ".join(f"{row['operation']} {row['state']}" for row in effects if row["operation"] != "fencepost.message")
    return [
        ("message", f"{letter['event_type'] or 'unreadable'}, {letter['topic']}/{letter['partition']}@{letter['offset']}"),
        ("identity", f"{letter['run_key']}, step {letter['step']}"),
        ("reason", f"{letter['reason']}: {letter['error_code']} ({letter['error_class']}), after {letter['attempts']} attempts"),
        ("state", f"{letter['state']}, {relative(letter['changed_at'], letter['now'])}; redriven {letter['redrives']} times"),
        ("payload", size),
        ("headers", ", ".join(letter["headers"] or []) or "none"),
        ("effects", done or "none"),
    ]


def _write(target: Path, payload: bytes | None) -> None:
    try:
        with target.open("xb") as file:
            file.write(payload or b"")
    except OSError as error:
        raise typer.BadParameter(f"--payload-to: {error.strerror}; name a new file in a directory that exists") from None


@dead_letters.command()
def redrive(
    dead_letter_ids: _Ids,
    actor: Actor,
    reason: Reason,
    effects_checked: Annotated[
        bool, typer.Option("--effects-checked", help="For ambiguous ones: somebody has looked what became of their effects.")
    ] = False,
    wait: Annotated[float, typer.Option(min=0, max=3600, help="Wait so many seconds for the outcomes.")] = 0,
    dry_run: DryRun = False,
    database_url: DatabaseUrl = "",
    as_json: JsonOutput = False,
) -> None:
    """Have dead letters handled anew, by the consumer that gave them up, under the same identity. Mend the cause first.

    One attempt each: effects that the ledger knows are not repeated. Leaves an audit row each. Exit code 1 if one was refused, or
    was not handled within --wait.

    Example:

      fencepost dead-letters redrive 01a2297b-0198-7227-a94b-e181bb24ee35 --actor ana --reason "schema mended" --wait 30
    """
    check_text(actor=actor, reason=reason)
    arguments = (effects_checked, actor, reason)
    answers = _changed(database_url, "redrive_dead_letter", dead_letter_ids, arguments, dry_run=dry_run)
    if wait and not dry_run:
        answers = asyncio.run(_waited(database_url, answers, wait))
    _tell(answers, "redriving", dry_run=dry_run, as_json=as_json, waited=bool(wait) and not dry_run)


@dead_letters.command()
def discard(
    dead_letter_ids: _Ids,
    actor: Actor,
    reason: Reason,
    dry_run: DryRun = False,
    database_url: DatabaseUrl = "",
    as_json: JsonOutput = False,
) -> None:
    """Give dead letters up for good: they stay as evidence, and cannot be redriven. Leaves an audit row each.

    Exit code 1 if one was refused.

    Example:

      fencepost dead-letters discard 01a2297b-0198-7227-a94b-e181bb24ee35 --actor ana --reason "test data"
    """
    check_text(actor=actor, reason=reason)
    answers = _changed(database_url, "discard_dead_letter", dead_letter_ids, (actor, reason), dry_run=dry_run)
    _tell(answers, "discarded", dry_run=dry_run, as_json=as_json, waited=False)


_Answers = dict[UUID, dict[str, Any]]


def _changed(database_url: str, statement: str, ids: Sequence[UUID], arguments: tuple[object, ...], *, dry_run: bool) -> _Answers:
    with answering():
        return asyncio.run(_change(database_url, statement, ids, arguments, dry_run=dry_run))


async def _change(
    database_url: str, statement: str, ids: Sequence[UUID], arguments: tuple[object, ...], *, dry_run: bool
) -> _Answers:
    """Each by itself; a dry run does it and takes it back, so that it gives the very answers."""
    async with inspecting(database_url) as inspector:
        answers: _Answers = {}
        for one in dict.fromkeys(ids):
            transaction = inspector.connection.transaction()
            await transaction.start()
            answers[one] = dict((await inspector.rows(statement, one, *arguments))[0])
            await (transaction.rollback() if dry_run else transaction.commit())
    return answers


async def _waited(database_url: str, answers: _Answers, seconds: float) -> _Answers:
    """Look until none of them is being redriven any more, or the time is over."""
    until = time.monotonic() + seconds
    async with inspecting(database_url) as inspector:
        while True:
            for one, answer in answers.items():
                if answer["letter_state"] == "redriving":
                    answer["letter_state"] = (await inspector.rows("dead_letter", one))[0]["state"]
            waiting = any(answer["letter_state"] == "redriving" for answer in answers.values())
            if not waiting or time.monotonic() >= until:
                return answers
            await asyncio.sleep(_WAIT_TICK_SECONDS)


def _tell(answers: _Answers, done: str, *, dry_run: bool, as_json: bool, waited: bool) -> None:
    if as_json:
        print_json([{"dead_letter_id": str(one), "dry_run": dry_run, **answer} for one, answer in answers.items()])
    else:
        for one, answer in answers.items():
            typer.echo(f"{one}  {printable(_told(answer, dry_run=dry_run, waited=waited))}")
    refused = any(answer["outcome"] != done for answer in answers.values())
    failed = waited and any(answer["letter_state"] != "redriven" for answer in answers.values())
    if refused or failed:
        raise typer.Exit(1)


def _told(answer: Mapping[str, Any], *, dry_run: bool, waited: bool) -> str:
    if answer["outcome"] in _REFUSALS:
        return _REFUSALS[answer["outcome"]].format(state=answer["letter_state"])
    if waited and answer["letter_state"] == "redriving":
        return "still waiting: is a consumer of that name running?"
    if waited and answer["letter_state"] == "dead":
        return "failed again: `fencepost dead-letters show` says why"
    return f"would be {answer['letter_state']}" if dry_run else str(answer["letter_state"])


def _say_no(message: str) -> NoReturn:
    typer.echo(f"fencepost: {message}", err=True)
    raise typer.Exit(1)
