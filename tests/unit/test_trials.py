"""What is counted before it is begun: in its turn, once for each time that it was begun and never ended, and nobody for another."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from consumer_sdk import trials as module
from consumer_sdk.delivery import Again, Done
from consumer_sdk.handling import Handling
from consumer_sdk.identity import Identity
from consumer_sdk.message_store import MessageStore
from consumer_sdk.trials import NotAlone, Trial, Trials
from fencepost.errors import TransientError


class Table:
    """The trials as the database has them. ``away``: it does not answer; ``answering``: cleared, its answer is on its way."""

    def __init__(self, **counted: int) -> None:
        self.counted = Counter({of(name): number for name, number in counted.items()})
        self.away = False
        self.answering = asyncio.Event()
        self.answering.set()

    async def begin_trial(self, identity: Identity) -> int:
        await self._answer()
        self.counted[identity] += 1
        number = self.counted[identity]
        await self.answering.wait()
        return number

    async def end_trial(self, identity: Identity, trials: int, left: int) -> None:
        await self._answer()
        if self.counted[identity] == trials:
            self.counted[identity] = left

    async def _answer(self) -> None:
        await asyncio.sleep(0)
        if self.away:
            raise TransientError("away")

    @property
    def rows(self) -> dict[str, int]:
        return {identity.run_key: number for identity, number in self.counted.items() if number}


class Crew:
    """Attempts that go on until they are told to end."""

    def __init__(self, table: Table, kind: type[Trials] = Trials) -> None:
        self.table = table
        self.trials = kind(cast("MessageStore", table))
        self.at_work: dict[str, Trial] = {}
        self._gates: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, *names: str, apart: bool = False, settled: bool = True) -> None:
        for name in names:
            self._gates[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._attempt(name, apart, settled))
        await quiet()

    async def _attempt(self, name: str, apart: bool, settled: bool) -> None:
        async with self.trials.begun(of(name), apart=apart) as trial:
            self.at_work[name] = trial
            try:
                await self._gates[name].wait()
                trial.settled = settled
            finally:
                del self.at_work[name]

    async def end(self, name: str) -> None:
        self._gates[name].set()
        await self._tasks[name]
        await quiet()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        with pytest.raises(asyncio.CancelledError):
            await self._tasks[name]
        await quiet()

    async def ended(self, name: str) -> BaseException | None:
        await asyncio.wait([self._tasks[name]])
        return self._tasks[name].exception()


@asynccontextmanager
async def crew(kind: type[Trials] = Trials, **counted: int) -> AsyncIterator[Crew]:
    made = Crew(Table(**counted), kind)
    try:
        yield made
    finally:
        for task in made._tasks.values():
            task.cancel()
        await asyncio.gather(*made._tasks.values(), return_exceptions=True)


def of(name: str) -> Identity:
    return Identity(name, "", "step")


async def quiet() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def test_while_it_is_at_work_it_is_counted_and_then_no_more() -> None:
    async with crew() as at:
        await at.begin("a")
        assert (at.table.rows, at.at_work["a"].number) == ({"a": 1}, 1)
        await at.end("a")
        assert at.table.rows == {}


async def test_the_times_that_never_ended_stay_until_there_is_an_outcome() -> None:
    async with crew(a=2) as at:
        await at.begin("a", settled=False)
        assert at.at_work["a"].number == 3
        await at.end("a")
        assert at.table.rows == {"a": 2}
        await at.begin("a")
        await at.end("a")
        assert at.table.rows == {}


async def test_what_is_cancelled_was_not_ended_by_its_process() -> None:
    async with crew(b=1) as at:
        await at.begin("a")
        await at.cancel("a")
        await at.begin("b")
        await at.cancel("b")
        assert at.table.rows == {"b": 1}


async def test_what_is_cancelled_while_it_is_counted_is_not_counted() -> None:
    """The database has counted it, and the answer is on its way."""
    async with crew() as at:
        at.table.answering.clear()
        await at.begin("a")
        assert at.table.rows == {"a": 1}
        asyncio.get_running_loop().call_later(0.01, at.table.answering.set)
        await at.cancel("a")
        assert at.table.rows == {}


async def test_first_trials_are_side_by_side_and_later_ones_apart() -> None:
    async with crew(x=1, y=1) as at:
        await at.begin("a", "b")
        assert sorted(at.at_work) == ["a", "b"]
        await at.begin("x", "y", "c")
        assert sorted(at.at_work) == ["a", "b"]
        await at.end("a")
        await at.end("b")
        assert sorted(at.at_work) == ["x"]
        await at.end("x")
        assert sorted(at.at_work) == ["y"]
        await at.end("y")
        assert sorted(at.at_work) == ["c"]


async def test_whatever_waits_for_its_turn_is_not_counted() -> None:
    """The process may end at each moment: then only those at work are blamed."""
    async with crew(x=1, y=1) as at:
        await at.begin("x", "y", "a")
        assert at.table.rows == {"x": 2, "y": 1}
        await at.begin("once", apart=True)
        await at.end("x")
        assert at.table.rows == {"y": 2}
        await at.end("y")
        assert at.table.rows == {"a": 1}
        await at.end("a")
        assert at.table.rows == {"once": 1}


async def test_one_that_waits_for_others_to_end_is_not_counted() -> None:
    async with crew(x=1) as at:
        await at.begin("a")
        await at.begin("x")
        assert at.table.rows == {"a": 1, "x": 1}
        await at.end("a")
        assert at.table.rows == {"x": 2}


async def test_one_attempt_only_is_apart_from_the_first() -> None:
    async with crew() as at:
        await at.begin("a", "b", apart=True)
        assert list(at.at_work) == ["a"]


async def test_without_the_database_nothing_is_begun() -> None:
    async with crew() as at:
        at.table.away = True
        await at.begin("a")
        assert isinstance(await at.ended("a"), TransientError)
        at.table.away = False
        await at.begin("b")
        assert list(at.at_work) == ["b"]


@pytest.mark.parametrize("again", ["a", "b"])
async def test_what_the_database_did_not_hear_is_told_later(again: str) -> None:
    """At the next begin of the same message, or at the next end of another."""
    async with crew() as at:
        await at.begin("a", settled=False)
        at.table.away = True
        await at.end("a")
        at.table.away = False
        assert at.table.rows == {"a": 1}
        await at.begin(again)
        assert at.at_work[again].number == 1
        await at.end(again)
        assert at.table.rows == {}


class CountsThenWaits(Trials):
    """The broken model: a message is counted, and waits for its turn then."""

    @asynccontextmanager
    async def begun(self, identity: Identity, *, apart: bool) -> AsyncIterator[Trial]:
        trial = await self._begin(identity)
        async with self._turn:
            yield trial


async def test_the_model_that_counts_before_the_turn_blames_who_waits() -> None:
    async with crew(CountsThenWaits, x=1, y=1) as at:
        await at.begin("x", "y")
        assert at.table.rows == {"x": 2, "y": 2}


# One that does not end


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TURN_SECONDS", 0.02)


@asynccontextmanager
async def stuck(trials: Trials, *, apart: bool) -> AsyncIterator[None]:
    """Beside a handling that does not end when it is cancelled; it has behind the block."""
    begun, let_go = asyncio.Event(), asyncio.Event()

    async def handling() -> None:
        async with trials.begun(of("stuck"), apart=apart):
            begun.set()
            with suppress(asyncio.CancelledError):
                await let_go.wait()
            await let_go.wait()

    task = asyncio.create_task(handling())
    await begun.wait()
    task.cancel()
    await quiet()
    try:
        yield
    finally:
        let_go.set()
        await task


async def began(trials: Trials, *names: str, apart: bool = False) -> list[bool]:
    async def one(name: str) -> bool:
        try:
            async with trials.begun(of(name), apart=apart) as trial:
                trial.settled = True
                return True
        except NotAlone:
            return False

    return await asyncio.gather(*(one(name) for name in names))


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("counted", [0, 1])
async def test_one_that_does_not_end_keeps_back_those_alone_that_are_to_be_apart(counted: int) -> None:
    """From the first time, or since they were counted before. They are not begun, and not blamed."""
    async with crew(x=counted) as at:
        async with stuck(at.trials, apart=False):
            assert await began(at.trials, "x", apart=not counted) == [False]
            assert at.table.counted[of("x")] == counted
            assert await began(at.trials, "a", "b", "c") == [True] * 3
        assert await began(at.trials, "x", apart=not counted) == [True]
        assert at.table.rows == {}


@pytest.mark.usefixtures("hasty")
async def test_one_that_is_apart_and_does_not_end_lets_the_others_go_and_come_again() -> None:
    async with crew() as at:
        async with stuck(at.trials, apart=True):
            assert await began(at.trials, "a", "b", "c") == [False] * 3
        assert await began(at.trials, "a", "b", "c") == [True] * 3
        assert at.table.rows == {}


@pytest.mark.usefixtures("hasty")
async def test_a_message_whose_turn_has_not_come_is_put_off_without_end_and_spends_nothing() -> None:
    """Its patience is with what is tried: a thousand that wait for each other are nobody's failure."""
    handling = Handling(
        consumer="bill",
        writer=cast("Any", SimpleNamespace(store=Table())),
        runs=None,
        tracing=cast("Any", None),
        metrics=cast("Any", None),
        stopping=asyncio.Event(),
    )
    delivery: Any = SimpleNamespace(
        identity=of("a"),
        handler=SimpleNamespace(attempts=3),
        redrive=None,
        postponed=0,
        attempts=0,
        delay_seconds=None,
        first_tried_at=1.0,
    )

    async def attempt() -> Any:
        return Done("handled")

    async with stuck(handling._trials, apart=True):
        for number in range(3):
            outcome = await handling.with_care(delivery, attempt)
            assert isinstance(outcome, Again)
            assert not outcome.spent
            assert (delivery.postponed, delivery.attempts, delivery.first_tried_at) == (number + 1, 0, None)
    assert await handling.with_care(delivery, attempt) == Done("handled")
