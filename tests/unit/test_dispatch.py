"""Order per key with concurrency across keys: one delivery of a key at a time, in order, whatever becomes of each."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

from consumer_sdk.delivery import Again, Dead, Delivery, Done, Outcome
from consumer_sdk.dispatch import Dispatcher, _Lane
from consumer_sdk.identity import Identity
from consumer_sdk.message_handlers import MessageHandler, MessageHandlers
from consumer_sdk.testing import record

HANDLED: Final = Done("handled")
REJECTED: Final = Dead("rejected", "Terminal", "refused")
SOON: Final = Again(0.0, spent=True)
MUCH_LATER: Final = Again(3600.0, spent=False)
MOST: Final = 3


def handlers() -> tuple[MessageHandler, MessageHandler]:
    """One that handles messages each by itself, and one of batches."""
    app = MessageHandlers()

    async def handler(_one: Any, _two: Any) -> None: ...

    app.handler("single", step="s")(handler)
    app.batch_handler("batch", step="b", most=MOST)(handler)
    single, batch = app.all
    return single, batch


SINGLE, BATCH = handlers()


def delivery(key: str, handler: MessageHandler = SINGLE, **given: Any) -> Delivery:
    own = record(key=key)
    return Delivery(
        record=own, message=None, handler=handler, identity=Identity(str(own.offset), "", "s"), arrival=None, **given
    )  # fmt: skip


def key_of(one: Delivery) -> bytes:
    assert one.record.key is not None
    return one.record.key


async def quiet() -> None:
    """Let everything run that can: no handling ends by itself, and due timers take a turn of the loop."""
    for _ in range(10):
        await asyncio.sleep(0)


class Desk:
    """Handlings that end when the test says so, and what must hold of them at every step."""

    def __init__(self, kind: type[Dispatcher] = Dispatcher, *, concurrency: int = 2) -> None:
        self.at_work: list[tuple[tuple[Delivery, ...], asyncio.Future[Sequence[Outcome]]]] = []
        self.settled: list[tuple[Delivery, Outcome]] = []
        self.failures: list[BaseException] = []
        self.waiting: dict[bytes, list[Delivery]] = {}
        self.most_at_once = 0
        self._concurrency = concurrency
        self.dispatcher = kind(
            concurrency=concurrency,
            handle_one=self._handle_one,
            handle_batch=self._handle_batch,
            settled=self._settled,
            failed=self.failures.append,
        )

    async def add(self, *deliveries: Delivery) -> None:
        for one in deliveries:
            self.waiting.setdefault(key_of(one), []).append(one)
            self.dispatcher.add((key_of(one),), one)
        await self.idle()

    async def end(self, *outcomes: Outcome, of: int = 0) -> None:
        """The handling at this place ends with an outcome a delivery."""
        deliveries, result = self.at_work.pop(of)
        for one, outcome in zip(deliveries, outcomes, strict=True):
            one.attempts += isinstance(outcome, Again) and outcome.spent
        result.set_result(outcomes)
        await self.idle()

    async def idle(self) -> None:
        await quiet()
        if self.failures:
            raise self.failures[0]

    @property
    def keys(self) -> list[str]:
        """Of what is at work, in the order in which it was begun."""
        return [key_of(one).decode() for deliveries, _ in self.at_work for one in deliveries]

    async def _handle_one(self, one: Delivery) -> Outcome:
        (outcome,) = await self._handled(one)
        return outcome

    async def _handle_batch(self, handler: MessageHandler, deliveries: Sequence[Delivery]) -> Sequence[Outcome]:
        assert {one.handler for one in deliveries} == {handler}
        assert 1 <= len(deliveries) <= handler.batch
        assert len(deliveries) == 1 or not any(one.is_apart for one in deliveries)
        return await self._handled(*deliveries)

    async def _handled(self, *deliveries: Delivery) -> Sequence[Outcome]:
        for key, count in Counter(map(key_of, deliveries)).items():
            assert key.decode() not in self.keys, "two handlings of one key"
            assert [one for one in deliveries if key_of(one) == key] == self.waiting[key][:count], "overtaken"
        result: asyncio.Future[Sequence[Outcome]] = asyncio.get_running_loop().create_future()
        self.at_work.append((deliveries, result))
        singles = sum(not one[0].handler.batch for one, _ in self.at_work if one[0].handler)
        assert singles <= self._concurrency
        self.most_at_once = max(self.most_at_once, singles)
        return await result

    def _settled(self, one: Delivery, outcome: Outcome) -> None:
        self.settled.append((one, outcome))
        if not isinstance(outcome, Again):
            assert self.waiting[key_of(one)].pop(0) is one


@asynccontextmanager
async def desk(kind: type[Dispatcher] = Dispatcher, *, concurrency: int = 2) -> AsyncIterator[Desk]:
    opened = Desk(kind, concurrency=concurrency)
    try:
        yield opened
    finally:
        opened.dispatcher.stop()
        opened.dispatcher.cancel()
        await opened.dispatcher.finish(1)


# Order and concurrency


async def test_different_keys_overlap_and_one_key_does_not() -> None:
    """CONSUME-23."""
    async with desk(concurrency=5) as at:
        await at.add(*(delivery(key) for key in "aabac"))

        assert at.keys == ["a", "b", "c"]


async def test_at_most_so_many_are_handled_at_once() -> None:
    async with desk(concurrency=2) as at:
        await at.add(*(delivery(key) for key in "abcd"))
        assert at.keys == ["a", "b"]

        await at.end(HANDLED)
        assert at.keys == ["b", "c"]


async def test_who_waited_first_is_served_first() -> None:
    """A key with much to do does not starve the others."""
    async with desk(concurrency=1) as at:
        await at.add(*(delivery(key) for key in "aaabc"))
        served = []
        while at.at_work:
            served += at.keys
            await at.end(HANDLED)

        assert served == ["a", "b", "c", "a", "a"]


async def test_a_retry_lets_nothing_of_its_key_overtake() -> None:
    """CONSUME-23."""
    async with desk() as at:
        first, second = delivery("a"), delivery("a")
        await at.add(first, second)
        await at.end(SOON)
        assert at.at_work[0][0] == (first,)

        await at.end(HANDLED)
        assert at.at_work[0][0] == (second,)
        assert [one for one, _ in at.settled] == [first, first]


async def test_a_retry_that_waits_holds_no_slot() -> None:
    """CONSUME-19: another key's messages did not wait for all attempts."""
    async with desk(concurrency=1) as at:
        await at.add(*(delivery(key) for key in "aab"))
        await at.end(MUCH_LATER)

        assert at.keys == ["b"]
        await at.end(HANDLED)
        assert at.at_work == []
        await at.add(delivery("a"))
        assert at.at_work == []


async def test_what_is_given_up_lets_the_next_of_its_key_through() -> None:
    async with desk() as at:
        await at.add(delivery("a"), delivery("a"))
        await at.end(REJECTED)

        assert at.keys == ["a"]


async def test_a_lane_that_is_done_is_forgotten() -> None:
    """Keys are without number; lanes are not kept for those that have nothing waiting."""
    async with desk() as at:
        for key in "abc":
            await at.add(delivery(key))
            await at.end(HANDLED)

        assert at.dispatcher._lanes == {}
        assert at.dispatcher.active == 0


# Batches


async def test_a_batch_is_gathered_from_the_heads_of_many_lanes() -> None:
    async with desk() as at:
        await at.add(*(delivery(key, BATCH) for key in "abbcd"))
        await at.end(*[HANDLED] * len(at.keys))

        assert [key_of(one).decode() for one, _ in at.settled] + at.keys == ["a", "b", "b", "c", "d"]


async def test_a_batch_takes_only_the_first_run_of_a_lane_that_is_its_handler_s() -> None:
    async with desk() as at:
        blocker = delivery("x", BATCH)
        await at.add(blocker)
        await at.add(delivery("a", BATCH), delivery("a", SINGLE), delivery("a", BATCH))
        await at.end(HANDLED)
        assert [len(deliveries) for deliveries, _ in at.at_work] == [1]

        await at.end(HANDLED)
        assert [deliveries[0].handler for deliveries, _ in at.at_work] == [SINGLE]
        await at.end(HANDLED)
        assert [deliveries[0].handler for deliveries, _ in at.at_work] == [BATCH]


async def test_a_handler_has_one_batch_at_a_time_and_it_takes_no_slot() -> None:
    async with desk(concurrency=1) as at:
        await at.add(*(delivery(key, BATCH) for key in "abcd"), delivery("e"))

        assert sorted(len(deliveries) for deliveries, _ in at.at_work) == [1, 3]
        assert "d" not in at.keys


async def test_of_a_batch_what_follows_a_retry_in_its_lane_is_not_done() -> None:
    async with desk() as at:
        await at.add(delivery("x", BATCH))
        first, second, third = delivery("a", BATCH), delivery("a", BATCH), delivery("b", BATCH)
        await at.add(first, second, third)
        await at.end(HANDLED)
        assert at.at_work[0][0] == (first, second, third)

        await at.end(MUCH_LATER, MUCH_LATER, HANDLED)
        assert [one for one, _ in at.settled[1:]] == [first, third]
        assert at.at_work == []


@pytest.mark.parametrize("apart", [{"attempts": 1}, {"suspect": True}], ids=str)
async def test_what_failed_once_or_may_end_the_process_comes_alone(apart: dict[str, Any]) -> None:
    """CONSUME-22: it fails nobody else's batch."""
    async with desk() as at:
        await at.add(delivery("x", BATCH))
        await at.add(delivery("a", BATCH), delivery("a", BATCH, **apart), delivery("a", BATCH), delivery("b", BATCH))
        sizes = []
        while at.at_work:
            sizes.append(len(at.at_work[0][0]))
            await at.end(*[HANDLED] * sizes[-1])

        assert len(at.settled) == 5
        assert sum(sizes) == 5


async def test_what_comes_alone_waits_for_the_batch_before_it() -> None:
    async with desk() as at:
        await at.add(delivery("x", BATCH))
        await at.add(delivery("a", BATCH), delivery("b", BATCH, attempts=1), delivery("c", BATCH))
        served = []
        while at.at_work:
            served.append("".join(at.keys))
            await at.end(*[HANDLED] * len(at.keys))

        assert served == ["x", "a", "b", "c"]


# The end


async def test_after_a_stop_nothing_starts() -> None:
    """CONSUME-4."""
    async with desk(concurrency=1) as at:
        await at.add(*(delivery(key) for key in "aab"), *(delivery("c", BATCH) for _ in range(MOST + 1)))
        await at.end(SOON)  # a timer runs
        at.dispatcher.stop()
        for _ in list(at.at_work):
            await at.end(*[HANDLED] * len(at.at_work[0][0]))
        await at.add(delivery("d"), delivery("e", BATCH))

        assert at.at_work == []
        assert at.dispatcher.active == 0


async def test_a_retry_decided_after_the_stop_is_not_told() -> None:
    """It is neither done nor to be tried again here: it is delivered again, to whoever has the partition then."""
    async with desk() as at:
        await at.add(delivery("a"), delivery("a"))
        at.dispatcher.stop()
        await at.end(SOON)

        assert (at.settled, at.at_work) == ([], [])


async def test_what_ended_after_the_stop_is_told() -> None:
    async with desk() as at:
        await at.add(delivery("a"))
        at.dispatcher.stop()
        await at.end(HANDLED)

        assert [outcome for _, outcome in at.settled] == [HANDLED]


async def test_what_is_cancelled_has_no_outcome_and_is_no_failure() -> None:
    """CONSUME-3."""
    async with desk() as at:
        await at.add(delivery("a"), delivery("b", BATCH))
        at.dispatcher.stop()
        assert not await at.dispatcher.finish(0)
        at.dispatcher.cancel()

        assert await at.dispatcher.finish(1)
        assert (at.settled, at.failures) == ([], [])


@pytest.mark.parametrize("handler", [SINGLE, BATCH], ids=["single", "batch"])
async def test_a_handling_that_raises_ends_the_consumer_and_settles_nothing(handler: MessageHandler) -> None:
    async with desk() as at:
        await at.add(delivery("a", handler))
        error = RuntimeError("a fault of ours")
        at.at_work.pop()[1].set_exception(error)
        await quiet()

        assert (at.failures, at.settled) == ([error], [])


async def test_a_handling_that_nobody_has_cancelled_does_not_hold_its_lane_in_silence() -> None:
    async with desk() as at:
        await at.add(delivery("a"), delivery("a"))
        at.at_work.pop()[1].cancel()
        await quiet()

        assert [type(failure) for failure in at.failures] == [asyncio.CancelledError]


# All of it at random, with a seed that the test's name tells.


class ReleasesBeforeTheRetry(Dispatcher):
    """The broken model: while a delivery waits for its retry, the next of its key is let through."""

    def _settle(self, lane: _Lane, outcomes: Sequence[Outcome]) -> None:
        if isinstance(outcomes[0], Again) and len(lane.queue) > 1:
            self._settled(lane.queue[0], outcomes[0])
            lane.queue.rotate(-1)
            self._make_ready(lane)
            return
        super()._settle(lane, outcomes)


def outcomes_for(dice: random.Random, deliveries: Sequence[Delivery]) -> list[Outcome]:
    """Of each key, nothing is done behind what is to be tried again."""
    held_up: set[bytes] = set()
    outcomes: list[Outcome] = []
    for one in deliveries:
        usual: list[Outcome] = [HANDLED, HANDLED, REJECTED, SOON]
        outcome = Again(0.0, spent=False) if key_of(one) in held_up else dice.choice(usual)
        if isinstance(outcome, Again):
            held_up.add(key_of(one))
        outcomes.append(outcome)
    return outcomes


async def run_at_random(seed: int, kind: type[Dispatcher] = Dispatcher) -> Desk:
    """Deliveries of five keys come and end in any order; at the end all of them are done."""
    dice = random.Random(seed)
    async with desk(kind, concurrency=dice.randint(1, 4)) as at:
        left = dice.randint(20, 60)
        while left or at.at_work:
            if left and (not at.at_work or dice.random() < 0.5):
                left -= 1
                await at.add(delivery(dice.choice("abcde"), dice.choice([SINGLE, SINGLE, BATCH])))
            else:
                place = dice.randrange(len(at.at_work))
                await at.end(*outcomes_for(dice, at.at_work[place][0]), of=place)
        assert not any(at.waiting.values())
        assert at.dispatcher.active == 0
        return at


@pytest.mark.parametrize("seed", range(30))
async def test_at_random_a_key_is_handled_one_by_one_and_in_order(seed: int) -> None:
    """CONSUME-23."""
    at = await run_at_random(seed)

    assert at.most_at_once >= 1


async def test_keys_do_overlap_at_random() -> None:
    assert max([(await run_at_random(seed)).most_at_once for seed in range(10)]) > 1


async def test_a_dispatcher_that_lets_a_successor_overtake_a_retry_is_caught() -> None:
    """CONSUME-23, the broken model."""
    with pytest.raises(AssertionError, match="overtaken"):
        await asyncio.gather(*(run_at_random(seed, ReleasesBeforeTheRetry) for seed in range(30)))
