"""Batching: what comes in while a write is on its way shares the next one, and nobody waits for ever."""

import asyncio
from collections.abc import Sequence

import pytest

from fencepost.batching import Batcher
from fencepost.errors import InvariantViolated, TransientError

MOST = 500


class Writer:
    """Notes its batches; writes when ``go`` is set."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.go = asyncio.Event()
        self.failures: list[BaseException] = []
        self.active = self.most_active = 0

    async def write(self, items: Sequence[int]) -> Sequence[int]:
        self.batches.append(list(items))
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            await self.go.wait()
            if self.failures:
                raise self.failures.pop()
        finally:
            self.active -= 1
        return [item * 10 for item in items]


@pytest.fixture
def writer() -> Writer:
    return Writer()


async def all_tasks_have_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_single_item_is_written_alone_and_at_once(writer: Writer) -> None:
    writer.go.set()

    assert await Batcher(writer.write).put(1) == 10
    assert writer.batches == [[1]]


async def test_what_comes_in_during_a_write_goes_together_in_the_next(writer: Writer) -> None:
    batcher = Batcher(writer.write)
    first = asyncio.create_task(batcher.put(1))
    await all_tasks_have_run()
    others = [asyncio.create_task(batcher.put(number)) for number in range(2, 8)]
    await all_tasks_have_run()
    writer.go.set()

    assert await asyncio.gather(first, *others) == [10, 20, 30, 40, 50, 60, 70]
    assert writer.batches == [[1], [2, 3, 4, 5, 6, 7]]
    assert writer.most_active == 1


async def test_a_batch_has_a_bound(writer: Writer) -> None:
    batcher = Batcher(writer.write)
    writer.go.set()
    results = await asyncio.gather(*(batcher.put(number) for number in range(MOST * 2 + 1)))

    assert results == [number * 10 for number in range(MOST * 2 + 1)]
    assert [len(batch) for batch in writer.batches] == [MOST, MOST, 1]


async def test_a_failed_write_is_told_to_each_of_its_items_and_to_no_others(writer: Writer) -> None:
    batcher = Batcher(writer.write)
    writer.failures.append(TransientError("away"))
    together = [asyncio.create_task(batcher.put(number)) for number in (1, 2)]
    await all_tasks_have_run()
    later = asyncio.create_task(batcher.put(3))
    writer.go.set()

    results = await asyncio.gather(*together, later, return_exceptions=True)
    assert [type(result) for result in results] == [TransientError, TransientError, int]


async def test_an_item_whose_caller_gave_up_before_the_write_is_not_written(writer: Writer) -> None:
    batcher = Batcher(writer.write)
    first = asyncio.create_task(batcher.put(1))
    await all_tasks_have_run()
    second, third = asyncio.create_task(batcher.put(2)), asyncio.create_task(batcher.put(3))
    await all_tasks_have_run()
    second.cancel()
    await all_tasks_have_run()
    writer.go.set()

    assert list(await asyncio.gather(first, third)) == [10, 30]
    assert writer.batches == [[1], [3]]


async def test_a_caller_that_gives_up_does_not_take_the_others_with_it(writer: Writer) -> None:
    batcher = Batcher(writer.write)
    first, second = asyncio.create_task(batcher.put(1)), asyncio.create_task(batcher.put(2))
    await all_tasks_have_run()
    first.cancel()
    await all_tasks_have_run()
    writer.go.set()

    assert await second == 20
    assert writer.batches == [[1, 2]]


async def test_a_write_that_is_cancelled_ends_its_items(writer: Writer) -> None:
    batcher = Batcher(writer.write)
    waiting = asyncio.create_task(batcher.put(1))
    await all_tasks_have_run()
    assert batcher._writer is not None
    batcher._writer.cancel()
    await asyncio.wait([waiting])

    assert waiting.cancelled()
    writer.go.set()
    assert await batcher.put(2) == 20


@pytest.mark.parametrize("results", [[], [1, 2, 3]])
async def test_another_number_of_results_is_told_to_everybody(results: list[int]) -> None:
    async def write(_items: Sequence[int]) -> Sequence[int]:
        return results

    batcher = Batcher(write)
    answers = await asyncio.gather(batcher.put(1), batcher.put(2), return_exceptions=True)

    assert [type(answer) for answer in answers] == [InvariantViolated, InvariantViolated]
