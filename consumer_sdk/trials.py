"""Counts what may end its process: before it is begun, and no more once it has ended in whatever other way.

So what is counted is the times that were begun and never ended. A message that was counted before is begun apart from all others
that are counted, and is counted only once its turn has come, so that it is not blamed for what another did.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import structlog

from consumer_sdk.identity import Identity
from consumer_sdk.message_store import MessageStore

__all__ = ["NotAlone", "Trial", "Trials"]

_log = structlog.get_logger(__name__)

# How long an attempt that is over, and may have been cancelled, waits for the database to hear of it.
_ANSWER_SECONDS: Final = 2.0
# A message waits so long for its turn, and then makes room for others: of one that does not end nobody knows how long.
_TURN_SECONDS: Final = 1.0


class NotAlone(Exception):
    """Another message that may end the process is at work, and it is not this one's turn. Nothing was begun."""


@dataclass(slots=True)
class Trial:
    """``number`` counts the times that were begun and never ended, this one included. ``settled``: the message has its outcome."""

    number: int
    settled: bool = False

    @property
    def left(self) -> int:
        """How many count once this one has ended."""
        return 0 if self.settled else self.number - 1


class Trials:
    """The trials of one process. At most as many are owed to the database as there are doubtful messages in memory."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._turn = asyncio.Lock()
        self._beside = 0
        self._nobody_beside = asyncio.Event()
        self._nobody_beside.set()
        self._owed: dict[Identity, tuple[int, int]] = {}
        self._paying: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def begun(self, identity: Identity, *, apart: bool) -> AsyncIterator[Trial]:
        """A trial for as long as the block lasts. ``apart``: already the first is to be apart from all others.

        Raises ``NotAlone``, and ``TransientError`` where the database does not answer; then nothing was begun.
        """
        async with self._own_turn():
            trial = await self._begin_in_turn(identity, apart)
            if apart or trial.number > 1:
                async with self._ended(identity, trial):
                    yield trial
                return
            self._beside += 1
            self._nobody_beside.clear()
        try:
            async with self._ended(identity, trial):
                yield trial
        finally:
            self._beside -= 1
            if not self._beside:
                self._nobody_beside.set()

    @asynccontextmanager
    async def _own_turn(self) -> AsyncIterator[None]:
        await _soon(self._turn.acquire())
        try:
            yield
        finally:
            self._turn.release()

    async def _begin_in_turn(self, identity: Identity, apart: bool) -> Trial:
        if apart:
            await _soon(self._nobody_beside.wait())
        trial = await self._begin(identity)
        if trial.number > 1 and self._beside:
            # One of those may end the process, and this one has not begun.
            await self._end(identity, trial)
            await _soon(self._nobody_beside.wait())
            trial = await self._begin(identity)
        return trial

    async def _begin(self, identity: Identity) -> Trial:
        await self._pay(identity)
        beginning = asyncio.ensure_future(self._store.begin_trial(identity))
        try:
            return Trial(await asyncio.shield(beginning))
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # it is counted if the database says so, and only then
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await self._end(identity, Trial(await asyncio.shield(beginning)))
            raise

    @asynccontextmanager
    async def _ended(self, identity: Identity, trial: Trial) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self._end(identity, trial)

    async def _end(self, identity: Identity, trial: Trial) -> None:
        """In bounded time, also where the attempt is cancelled. What the database did not hear is owed until the next one ends."""
        self._owed[identity] = trial.number, trial.left
        task = asyncio.create_task(self._pay_all(identity))
        self._paying.add(task)
        task.add_done_callback(self._paying.discard)
        await asyncio.wait([task], timeout=_ANSWER_SECONDS)

    async def _pay_all(self, first: Identity) -> None:
        try:
            for identity in [first, *self._owed]:
                await self._pay(identity)
        except Exception as error:  # noqa: BLE001 - a boundary: whatever the driver raises, it is tried again
            _log.warning("trial_not_ended", error_class=type(error).__name__, owed=len(self._owed))

    async def _pay(self, identity: Identity) -> None:
        owed = self._owed.get(identity)
        if owed is None:
            return
        number, left = owed
        await self._store.end_trial(identity, number, left)
        if self._owed.get(identity) == owed:
            del self._owed[identity]


async def _soon(turn: Awaitable[object]) -> None:
    try:
        async with asyncio.timeout(_TURN_SECONDS):
            await turn
    except TimeoutError:
        raise NotAlone from None
