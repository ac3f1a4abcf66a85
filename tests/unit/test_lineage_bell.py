"""The bell of lineages: many in one ring, nobody waits for it, and what fails is told once."""

import asyncio
from collections.abc import Sequence
from typing import Final
from uuid import UUID

import asyncpg
import pytest
from structlog.testing import capture_logs

from consumer_sdk.lineage_bell import LineageBell
from fencepost.errors import TransientError

IDS: Final = [UUID(int=number) for number in range(5)]


class Line:
    """What rings. ``leave`` lets a ring end; ``errors`` meet one ring each."""

    def __init__(self) -> None:
        self.rung: list[list[UUID]] = []
        self.leave = asyncio.Event()
        self.errors: list[Exception] = []

    async def ring(self, ids: Sequence[UUID]) -> None:
        self.rung.append(list(ids))
        await self.leave.wait()
        if self.errors:
            raise self.errors.pop(0)


async def test_what_changes_while_a_ring_is_on_its_way_goes_out_together_and_once() -> None:
    line = Line()
    bell = LineageBell(line.ring)
    bell.ring([IDS[0]])
    await asyncio.sleep(0)
    for number in (1, 2, 1, 2):
        bell.ring([IDS[number]])
    line.leave.set()
    await bell.close()

    assert line.rung == [[IDS[0]], [IDS[1], IDS[2]]]


@pytest.mark.parametrize("kind", [TransientError, asyncpg.ProgramLimitExceededError])
async def test_a_ring_that_fails_is_told_once_until_one_goes_out_again(kind: type[Exception]) -> None:
    line = Line()
    line.leave.set()
    bell = LineageBell(line.ring)
    with capture_logs() as logs:
        for failures in (True, True, False, True):
            if failures:
                line.errors.append(kind("away"))
            bell.ring([IDS[0]])
            await bell.close()

    assert [entry["event"] for entry in logs] == ["lineages_not_rung"] * 2


async def test_closing_does_not_wait_for_a_ring_that_hangs() -> None:
    line = Line()
    bell = LineageBell(line.ring)
    bell.ring(IDS)

    async with asyncio.timeout(5):
        await bell.close()
    await asyncio.sleep(0)
    assert bell._ringing is not None
    assert bell._ringing.cancelled()


async def test_a_bell_that_was_never_rung_closes() -> None:
    await LineageBell(Line().ring).close()
