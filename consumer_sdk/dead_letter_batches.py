"""Redrives or discards many dead letters: in batches, at a pace, each letter at most once.

A batch is one statement, so it is one short transaction that has all of its letters and their audit rows, or none. Nothing is open
between batches: whoever stops there, or dies anywhere, loses nothing, and who asks again goes on with those that are still dead.
"""

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal
from uuid import UUID

from fencepost.console import Inspector

__all__ = ["BATCH", "OUTCOMES", "Answers", "Change", "change_letters", "planned", "stopped_by_signals", "wait_for_outcomes"]

BATCH: Final = 500
_WAIT_TICK_SECONDS: Final = 0.5
# How many letters a waiting operator reads a second, so that a long wait for many is no load.
_LOOKS_A_SECOND: Final = 2_000
_LOOKED_AT_ONCE: Final = 10_000

#: What may be said of each letter. The first is the one that was asked for.
OUTCOMES: Final = {
    "redrive": ("redriving", "not_dead", "changed", "ambiguous", "not_found"),
    "discard": ("discarded", "not_dead", "changed", "not_found"),
}

Answers = dict[UUID, dict[str, Any]]
"""``outcome`` and ``letter_state`` of each letter that was asked for."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What is to become of dead letters, for the audit by whom and why. ``effects_checked`` means something for redrives only."""

    verb: Literal["redrive", "discard"]
    actor: str
    reason: str
    effects_checked: bool = False

    @property
    def done(self) -> str:
        """The outcome that was asked for, and the state that it leaves."""
        return OUTCOMES[self.verb][0]

    @property
    def statement(self) -> str:
        """The statement that does it."""
        return f"{self.verb}_dead_letters"

    @property
    def arguments(self) -> tuple[object, ...]:
        """$3 and on of the statement."""
        return (self.effects_checked, self.actor, self.reason) if self.verb == "redrive" else (self.actor, self.reason)


def planned(letter: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """What a change would answer of a letter as it stands; the database decides anew when it is asked."""
    if letter["state"] is None:
        return {"outcome": "not_found", "letter_state": None}
    if letter["state"] != "dead":
        return {"outcome": "not_dead", "letter_state": letter["state"]}
    if change.verb == "redrive" and letter["reason"] == "ambiguous" and not change.effects_checked:
        return {"outcome": "ambiguous", "letter_state": "dead"}
    return {"outcome": change.done, "letter_state": change.done}


async def change_letters(
    inspector: Inspector,
    letters: Sequence[Mapping[str, Any]],
    change: Change,
    *,
    rate: float | None,
    stopping: asyncio.Event,
    told: Callable[[Answers], None],
) -> None:
    """Change the letters, in the order of their ids, until the last of them or until ``stopping``: a batch in hand is finished.

    ``rate`` is letters a second, None: as fast as it goes. ``told`` has the answers of each batch as soon as it is committed.
    Raises ``TransientError`` if the database goes away: the batch in hand is whole or it is not, and was not told.
    """
    ordered = sorted(letters, key=lambda letter: letter["dead_letter_id"])
    size = BATCH if rate is None else max(1, min(BATCH, int(rate)))
    for start in range(0, len(ordered), size):
        if stopping.is_set():
            return
        batch = ordered[start : start + size]
        next_at = time.monotonic() + (len(batch) / rate if rate else 0)
        ids, changes = [letter["dead_letter_id"] for letter in batch], [letter["changed_at"] for letter in batch]
        rows = await inspector.rows(change.statement, ids, changes, *change.arguments)
        told({row["dead_letter_id"]: {"outcome": row["outcome"], "letter_state": row["letter_state"]} for row in rows})
        if start + size < len(ordered):
            await _wait(stopping, next_at - time.monotonic())


async def wait_for_outcomes(
    inspector: Inspector, answers: Answers, seconds: float, *, stopping: asyncio.Event, told: Callable[[int], None]
) -> None:
    """Look until none of them is being redriven any more, the time is over, or ``stopping``; write states into the answers.

    ``told`` hears after each look how many still are.
    """
    until = time.monotonic() + seconds
    while True:
        waiting = _redriving(answers)
        for start in range(0, len(waiting), _LOOKED_AT_ONCE):
            for row in await inspector.rows("find_dead_letters", waiting[start : start + _LOOKED_AT_ONCE]):
                answers[row["dead_letter_id"]]["letter_state"] = row["state"]
        waiting, left = _redriving(answers), until - time.monotonic()
        if left <= 0 or stopping.is_set() or not waiting:
            return
        told(len(waiting))
        await _wait(stopping, min(left, max(_WAIT_TICK_SECONDS, len(waiting) / _LOOKS_A_SECOND)))


def _redriving(answers: Answers) -> list[UUID]:
    return [one for one, answer in answers.items() if answer["letter_state"] == "redriving"]


async def _wait(stopping: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0, seconds)):
            await stopping.wait()


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[asyncio.Event]:
    """An event that the first Ctrl-C or SIGTERM sets; a second one ends the process as it always does."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()

    def forget() -> None:
        for number in signals:
            loop.remove_signal_handler(number)

    def stop() -> None:
        stopping.set()
        forget()

    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        yield stopping
    finally:
        forget()
