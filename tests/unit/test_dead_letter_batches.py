"""Changes of many dead letters: what is answered, in which batches, at what pace, and where they stop."""

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final, cast
from uuid import UUID

import pytest

from consumer_sdk.dead_letter_batches import BATCH, OUTCOMES, Answers, Change, change_letters, planned
from fencepost.console import Inspector

AT: Final = datetime(2026, 11, 30, tzinfo=UTC)


def change(verb: Any = "redrive", *, checked: bool = False) -> Change:
    return Change(verb=verb, actor="ana", reason="mended", effects_checked=checked)


def letters(number: int) -> list[dict[str, Any]]:
    return [{"dead_letter_id": UUID(int=place), "state": "dead", "reason": "rejected", "changed_at": AT} for place in range(number)]


class Asked:
    """Stands in for the database: does what is asked, and keeps in which batches it was."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.batches: list[list[int]] = []
        self.answers: Answers = {}
        self.stopping = asyncio.Event()
        self._stop_after = stop_after

    async def rows(self, name: str, *arguments: Any) -> Sequence[Any]:
        ids, changes, *_rest = arguments
        assert len(ids) == len(changes)
        self.batches.append([one.int for one in ids])
        if len(self.batches) == self._stop_after:
            self.stopping.set()
        return [{"dead_letter_id": one, "outcome": "redriving", "letter_state": "redriving"} for one in ids]

    async def change(self, many: list[dict[str, Any]], rate: float | None = None) -> None:
        inspector = cast(Inspector, self)
        await change_letters(inspector, many, change(), rate=rate, stopping=self.stopping, told=self.answers.update)


@pytest.mark.parametrize(
    ("state", "reason", "checked", "verb", "outcome"),
    [
        (None, None, False, "redrive", "not_found"),
        ("dead", "rejected", False, "redrive", "redriving"),
        ("dead", "ambiguous", False, "redrive", "ambiguous"),
        ("dead", "ambiguous", True, "redrive", "redriving"),
        ("dead", "ambiguous", False, "discard", "discarded"),
        ("redriving", "rejected", False, "redrive", "not_dead"),
        ("redriven", "ambiguous", False, "redrive", "not_dead"),
        ("discarded", "rejected", False, "discard", "not_dead"),
    ],
)
def test_what_would_be_answered(state: str | None, reason: str | None, checked: bool, verb: Any, outcome: str) -> None:
    answer = planned({"state": state, "reason": reason}, change(verb, checked=checked))
    assert answer["outcome"] == outcome
    assert outcome in OUTCOMES[verb]


async def test_batches_are_bounded_and_in_the_order_of_the_ids() -> None:
    asked = Asked()
    await asked.change(letters(2 * BATCH + 1)[::-1])
    assert [len(batch) for batch in asked.batches] == [BATCH, BATCH, 1]
    assert [place for batch in asked.batches for place in batch] == list(range(2 * BATCH + 1))
    assert len(asked.answers) == 2 * BATCH + 1


async def test_none_is_nothing_to_ask() -> None:
    asked = Asked()
    await asked.change([])
    assert asked.batches == []


async def test_a_stop_ends_behind_the_batch_in_hand() -> None:
    """Its answers are told; a pace does not hold the stop up."""
    for rate in (None, 0.01):
        asked = Asked(stop_after=2 if rate is None else 1)
        async with asyncio.timeout(10):
            await asked.change(letters(3 * BATCH), rate)
        assert len(asked.answers) == sum(map(len, asked.batches)) < 3 * BATCH


async def test_a_rate_is_kept_by_small_batches_with_pauses_between() -> None:
    asked, began = Asked(), time.monotonic()
    await asked.change(letters(9), rate=8)
    assert [len(batch) for batch in asked.batches] == [8, 1]
    assert time.monotonic() - began >= 1.0


async def test_less_than_one_a_second_is_one_at_a_time() -> None:
    asked = Asked(stop_after=1)
    await asked.change(letters(3), rate=0.5)
    assert asked.batches == [[0]]
