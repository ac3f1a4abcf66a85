"""How an operator changes dead letters: says which, sees how many, confirms, watches, and is told what became of them."""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn
from uuid import UUID

import typer

from consumer_sdk.dead_letter_batches import (
    OUTCOMES,
    Answers,
    Change,
    change_letters,
    planned,
    stopped_by_signals,
    wait_for_outcomes,
)
from consumer_sdk.dead_letter_filter import LetterFilter
from consumer_sdk.dead_letter_story import one_line
from consumer_sdk.inspection import answering, check_text, inspecting
from fencepost.console import print_json
from fencepost.errors import TransientError

__all__ = ["MOST_LETTERS", "NO_LETTER", "Request", "perform"]

NO_LETTER: Final = "there is no such dead letter; `fencepost dead-letters list --state all` shows all there are"
#: Letters that one command changes at most.
MOST_LETTERS: Final = 100_000
_EXAMPLES: Final = 5
_TOLD_MOST: Final = 20
_PROGRESS_SECONDS: Final = 2.0

_SAYS: Final = {
    "not_found": NO_LETTER,
    "not_dead": "it is {state}: somebody else was first, or it is over; nothing was changed",
    "changed": "it was redriven by another meanwhile and is dead again: look at it anew; nothing was changed",
    "ambiguous": "an effect may have happened that no ledger row tells of: find out, then say --effects-checked",
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line said. Either ``ids`` or ``which``."""

    change: Change
    ids: Sequence[UUID]
    which: LetterFilter
    after: UUID | None
    at_most: int
    rate: float | None
    wait: float
    yes: bool
    dry_run: bool
    as_json: bool

    def __post_init__(self) -> None:
        check_text(actor=self.change.actor, reason=self.change.reason)
        if bool(self.ids) == self.which.says_anything:
            raise typer.BadParameter("say which: either ids, or a filter such as --consumer")
        if self.ids and (self.after is not None or len(self.ids) > self.at_most):
            raise typer.BadParameter("--after and --at-most go with a filter")


@dataclass(frozen=True, kw_only=True)
class _Found:
    """The letters that are meant, as they stood; ``more`` fit than may be changed at once."""

    letters: Sequence[Mapping[str, Any]]
    more: bool

    def __str__(self) -> str:
        return f"Dead letters that fit: {len(self.letters):,}{' and more' if self.more else ''}"


def perform(database_url: str, request: Request) -> None:
    """Do what was asked for, and end: exit code 1 if a letter was refused, was not asked for, or did not end well in time."""
    found = asyncio.run(_find(database_url, request))
    answers: Answers = {}
    if request.dry_run:
        answers = {letter["dead_letter_id"]: planned(letter, request.change) for letter in found.letters}
    elif found.letters:
        _confirm(found, request)
        with answering():
            asyncio.run(_carry_out(database_url, found, request, answers))
    _tell(found, request, answers)


async def _find(database_url: str, request: Request) -> _Found:
    async with inspecting(database_url) as inspector:
        if request.ids:
            letters = await inspector.rows("find_dead_letters", list(dict.fromkeys(request.ids)))
        else:
            now = (await inspector.rows("clock"))[0]["at"]
            arguments = request.which.arguments(["dead"], now=now, after=request.after)
            letters = await inspector.rows("match_dead_letters", *arguments, request.at_most + 1)
    return _Found(letters=letters[: request.at_most], more=len(letters) > request.at_most)


def _confirm(found: _Found, request: Request) -> None:
    """A filter may mean more than its author thinks: the number is typed, or --yes was said."""
    if request.ids or request.yes:
        return
    for letter in found.letters[:_EXAMPLES]:
        typer.echo(f"{letter['dead_letter_id']}  {letter['reason']}", err=True)
    these = "these" if found.more else "them"
    typer.echo(f"{found}. Type {len(found.letters)} to {request.change.verb} {these}: ", nl=False, err=True)
    answer = sys.stdin.readline()
    if answer.replace(",", "").strip() != str(len(found.letters)):
        _say_no("not confirmed; nothing was changed. Without a terminal say --yes, after a --dry-run")


async def _carry_out(database_url: str, found: _Found, request: Request, answers: Answers) -> None:
    watch = _Watch(len(found.letters), answers)
    with stopped_by_signals() as stopping:
        async with inspecting(database_url) as inspector:
            try:
                await change_letters(
                    inspector, found.letters, request.change, rate=request.rate, stopping=stopping, told=watch.told
                )
                if request.wait:
                    await wait_for_outcomes(inspector, answers, request.wait, stopping=stopping, told=watch.waits)
            except TransientError:
                typer.echo(watch.ended(), err=True)
                raise


_GO_ON: Final = "The same command goes on with those that are still dead."


class _Watch:
    """Collects the answers of the batches, and says on stderr how far they have come, now and then."""

    def __init__(self, all_of_them: int, answers: Answers) -> None:
        self._all = all_of_them
        self._answers = answers
        self._said_at = time.monotonic()

    def told(self, batch: Answers) -> None:
        """A batch is done."""
        self._answers.update(batch)
        if len(self._answers) < self._all:
            self._say(f"{len(self._answers):,} of {self._all:,}")

    def waits(self, waiting: int) -> None:
        """So many are still being redriven."""
        self._say(f"{waiting:,} are being redriven")

    def ended(self) -> str:
        """How far it came before the database went away."""
        if len(self._answers) == self._all:
            return f"All {self._all:,} were asked for; what became of them `fencepost dead-letters summary` tells."
        return f"{len(self._answers):,} of {self._all:,}; the batch in hand is whole or was not done. {_GO_ON}"

    def _say(self, text: str) -> None:
        if time.monotonic() - self._said_at >= _PROGRESS_SECONDS:
            self._said_at = time.monotonic()
            typer.echo(text, err=True)


def _tell(found: _Found, request: Request, answers: Answers) -> None:
    change, waited = request.change, bool(request.wait) and not request.dry_run
    counts = Counter(answer["outcome"] for answer in answers.values())
    left = len(found.letters) - len(answers)
    if request.as_json:
        print_json({
            "dry_run": request.dry_run,
            "found": len(found.letters),
            "more": found.more,
            "not_asked": left,
            "outcomes": {outcome: counts[outcome] for outcome in OUTCOMES[change.verb]},
            "letters": [{"dead_letter_id": str(one), **answer} for one, answer in answers.items()],
        })  # fmt: skip
    else:
        _print(found, request, answers, counts, waited=waited)
    if left:
        last = f" --after {max(answers)} leaves out those that were asked." if answers and not request.ids else ""
        typer.echo(f"Stopped: {left:,} were not asked. {_GO_ON}{last}", err=True)
    refused = counts.total() > counts[change.done]
    failed = waited and any(answer["letter_state"] != "redriven" for answer in answers.values())
    if refused or failed or left:
        raise typer.Exit(1)


def _print(found: _Found, request: Request, answers: Answers, counts: Counter[str], *, waited: bool) -> None:
    change = request.change
    if not found.letters:
        typer.echo("No dead letter fits; nothing was changed.")
        return
    if request.ids:
        listed = [one for one in dict.fromkeys(request.ids) if one in answers]
    else:
        would = "; nothing was changed" if request.dry_run else ""
        typer.echo(f"{found}{would}.")
        listed = [one for one, answer in answers.items() if request.dry_run or answer["outcome"] != change.done or _is_dead(answer)]
        listed = listed[: _EXAMPLES if request.dry_run else _TOLD_MOST]
    for one in listed:
        typer.echo(f"{one}  {one_line(_told(answers[one], dry_run=request.dry_run, waited=waited))}")
    if len(answers) > 1:
        typer.echo(f"{'would be: ' * request.dry_run}{_counted(counts, OUTCOMES[change.verb])}")
    if waited and len(answers) > 1:
        states = Counter(str(answer["letter_state"]) for answer in answers.values())
        typer.echo(f"now: {_counted(states, _STATES)}")
        if states["redriving"]:
            typer.echo(f"Of those redriving: {_WAITING}")


_STATES: Final = ("redriven", "redriving", "dead", "discarded")
_WAITING: Final = "still waiting: is a consumer of that name running?"


def _is_dead(answer: Mapping[str, Any]) -> bool:
    return bool(answer["letter_state"] == "dead")


def _counted(counts: Mapping[str, int], names: Sequence[str]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {counts[name]:,}" for name in names if counts.get(name))


def _told(answer: Mapping[str, Any], *, dry_run: bool, waited: bool) -> str:
    if answer["outcome"] in _SAYS:
        return _SAYS[answer["outcome"]].format(state=answer["letter_state"])
    if waited and answer["letter_state"] == "redriving":
        return _WAITING
    if waited and _is_dead(answer):
        return "failed again: `fencepost dead-letters show` says why"
    return f"would be {answer['letter_state']}" if dry_run else str(answer["letter_state"])


def _say_no(message: str) -> NoReturn:
    typer.echo(f"fencepost: {message}", err=True)
    raise typer.Exit(1)
