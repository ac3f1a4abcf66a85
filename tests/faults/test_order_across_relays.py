"""Order per key, nothing lost and nothing invented, while relays come, go, die and freeze; planned changes repeat no row."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.support.fleet import LONG_LEASE, SHORT_LEASE, metric
from tests.support.ledger import Ledger
from tests.support.outbox import Outbox
from tests.support.records import read_all
from tests.support.relay_process import RelayFactory, RelayProcess
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

WRITERS = 3
MOST_TRANSACTIONS = 1_500
LEASE_END_SECONDS = 30.0


class Fleet:
    """Relays with names of their own on one database."""

    def __init__(self, start: Callable[[str], RelayProcess], outbox: Outbox) -> None:
        self._start = start
        self._outbox = outbox
        self.relays: dict[str, RelayProcess] = {}
        self._started = 0

    async def add(self) -> str:
        self._started += 1
        name = f"relay{self._started}"
        self.relays[name] = self._start(name)
        await self.relays[name].wait_ready()
        return name

    async def some_owner(self) -> str:
        """A relay of the fleet that holds lanes."""

        async def owner() -> str:
            names = {owner.partition("/")[0] for owner in (await self._outbox.owners()).values()}
            return min(names & self.relays.keys(), default="")

        return await eventually(owner, LEASE_END_SECONDS, message="a relay holds lanes")

    async def kill_one(self) -> None:
        victim = await self.some_owner()
        self.relays.pop(victim).kill()
        await self.add()

    async def freeze_one(self) -> None:
        victim = await self.some_owner()
        self.relays[victim].pause()

        async def leases_ended() -> bool:
            return not await self._outbox.lanes_of(victim)

        await eventually(leases_ended, LEASE_END_SECONDS, message="the frozen relay's leases end")
        if len(self.relays) > 1:
            await self._outbox.progress(3)
        self.relays[victim].resume()

    async def restart_one(self) -> None:
        victim = await self.some_owner()
        relay = self.relays.pop(victim)
        relay.terminate()
        assert await relay.wait() == 0
        await self.add()


@pytest.mark.parametrize("relays", [1, 2, 3])
async def test_every_key_stays_in_order_while_relays_are_killed_frozen_and_restarted(
    relays: int, database_url: str, kafka: str, topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """ORDER-2 in small, LEASE-9, KAFKA-5; the million rows are `scripts/bench soak`."""
    ledger = await Ledger(database_url, await topic()).open()
    done = asyncio.Event()
    async with Outbox(database_url) as outbox:
        fleet = Fleet(lambda name: start_relay(database_url, kafka, relay_name=name, batch_rows=10, **SHORT_LEASE), outbox)
        for _ in range(relays):
            await fleet.add()
        async with asyncio.TaskGroup() as group:
            for seed in range(WRITERS):
                group.create_task(ledger.write(MOST_TRANSACTIONS, seed=seed, until=done))
            faults: list[Callable[[], Awaitable[None]]] = [fleet.freeze_one, fleet.kill_one, fleet.restart_one]
            for fault in faults:
                await outbox.progress(5)
                await fault()
            done.set()
        await outbox.drained()

    reading = ledger.check(await read_all(kafka, ledger.topic, count=len(ledger.committed)))

    assert reading.records >= len(ledger.committed) > 0


async def test_lanes_move_to_relays_that_join_during_a_drain_and_no_row_goes_twice(
    database_url: str, kafka: str, topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """LEASE-6, the planned hand-over; LEASE-9."""
    ledger = await Ledger(database_url, await topic()).open()
    await ledger.fill(8_000)
    async with Outbox(database_url) as outbox:
        first = start_relay(database_url, kafka, relay_name="first", batch_rows=4, **LONG_LEASE)
        await outbox.progress(5, name="first")
        second = start_relay(database_url, kafka, relay_name="second", batch_rows=4, **LONG_LEASE)
        await outbox.settled(first=4, second=4)
        moved = await outbox.undelivered()
        await outbox.drained()

        assert moved > 0, "the lanes moved while rows were waiting"
        assert await outbox.receipts("second") > 0
        assert sorted((await outbox.generations()).values()) == [1] * 4 + [2] * 4, "each lane that moved was claimed once more"
        assert await outbox.marked_rows() == len(ledger.committed)
    for relay in (first, second):
        assert await metric(relay, "fencepost_lane_losses_total") == 0
        assert await metric(relay, "fencepost_stale_marks_refused_total") == 0
    assert ledger.check(await read_all(kafka, ledger.topic)).repeats == 0


async def test_a_graceful_stop_in_mid_drain_hands_over_at_once_and_no_row_goes_twice(
    database_url: str, kafka: str, topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """LEASE-14."""
    ledger = await Ledger(database_url, await topic()).open()
    await ledger.fill(8_000)
    async with Outbox(database_url) as outbox:
        leaving = start_relay(database_url, kafka, relay_name="leaving", batch_rows=4, **LONG_LEASE)
        staying = start_relay(database_url, kafka, relay_name="staying", batch_rows=4, **LONG_LEASE)
        await outbox.settled(leaving=4, staying=4)
        waiting = await outbox.undelivered()
        leaving.terminate()
        assert await leaving.wait() == 0
        # The lease is far longer than this wait may be: what hands the lanes over is the release.
        await outbox.settled(staying=8)
        await outbox.drained()

        assert waiting > 0, "the stop came in mid-drain"
        assert max((await outbox.generations()).values()) <= 3
        assert await outbox.marked_rows() == len(ledger.committed)
    assert await metric(staying, "fencepost_lane_losses_total") == 0
    assert ledger.check(await read_all(kafka, ledger.topic)).repeats == 0


async def test_in_a_rolling_restart_each_lane_changes_hands_once(
    database_url: str, kafka: str, topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """LEASE-14."""
    ledger = await Ledger(database_url, await topic()).open()
    done = asyncio.Event()
    async with Outbox(database_url) as outbox:
        old = start_relay(database_url, kafka, relay_name="pod", **LONG_LEASE)
        await outbox.settled(pod=8)
        before = set((await outbox.owners()).values())
        async with asyncio.TaskGroup() as group:
            group.create_task(ledger.write(MOST_TRANSACTIONS, seed=1, until=done))
            await outbox.progress(3)
            start_relay(database_url, kafka, relay_name="pod", **LONG_LEASE)

            async def shared() -> bool:
                owners = list((await outbox.owners()).values())
                return sorted(owners.count(owner) for owner in set(owners)) == [4, 4]

            await eventually(shared, message="old and new share the lanes")
            old.terminate()
            assert await old.wait() == 0

            async def replaced() -> bool:
                owners = await outbox.owners()
                return len(owners) == 8 and not before & set(owners.values())

            await eventually(replaced, message="the new one holds every lane")
            done.set()
        await outbox.drained()

        assert set((await outbox.generations()).values()) == {2}
    assert ledger.check(await read_all(kafka, ledger.topic)).repeats == 0


async def test_a_relay_killed_in_mid_drain_and_started_again_needs_no_more_than_a_lease(
    database_url: str, kafka: str, topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """LEASE-10, LEASE-6 by expiry."""
    ledger = await Ledger(database_url, await topic()).open()
    await ledger.fill(4_000)
    async with Outbox(database_url) as outbox:
        killed = start_relay(database_url, kafka, relay_name="pod", batch_rows=20, **SHORT_LEASE)
        await outbox.progress(5)
        killed.kill()
        waiting = await outbox.undelivered()
        start_relay(database_url, kafka, relay_name="pod", **SHORT_LEASE)
        await outbox.drained()

        assert waiting > 0
        assert set((await outbox.generations()).values()) == {2}
        assert await outbox.marked_rows() == len(ledger.committed), "a row is marked once, however often it was sent"
    ledger.check(await read_all(kafka, ledger.topic))
