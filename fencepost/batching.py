"""Writes that come in while one is on its way go together in the next: one round trip and one commit for all of them.

There is no timer. A single writer's latency is that of one statement, and a crowd shares statements by itself.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeVar

from fencepost.errors import InvariantViolated

__all__ = ["Batcher"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_MOST: Final = 500


class Batcher(Generic[_Item, _Result]):
    """``write`` takes a batch of at most 500 items and returns one result an item, in order."""

    def __init__(self, write: Callable[[Sequence[_Item]], Awaitable[Sequence[_Result]]]) -> None:
        self._write = write
        self._waiting: deque[tuple[_Item, asyncio.Future[_Result]]] = deque()
        self._writer: asyncio.Task[None] | None = None

    async def put(self, item: _Item) -> _Result:
        """Write the item with whatever else waits. What the write raises is raised for each of its items."""
        answer: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answer))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_all())
        return await answer

    async def _write_all(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MOST))]
            # Whoever was cancelled meanwhile is not written for: nobody would learn what became of it.
            batch = [(item, answer) for item, answer in batch if not answer.done()]
            if batch:
                await self._write_batch(batch)

    async def _write_batch(self, batch: "Sequence[tuple[_Item, asyncio.Future[_Result]]]") -> None:
        try:
            results = await self._write([item for item, _ in batch])
            if len(results) != len(batch):
                raise InvariantViolated("a batch was answered with another number of results than it has items")
        except BaseException as error:
            failure = error if isinstance(error, Exception) else asyncio.CancelledError()
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(failure)
            if not isinstance(error, Exception):
                raise
            return
        for (_, answer), result in zip(batch, results, strict=True):
            if not answer.done():
                answer.set_result(result)
