"""Moments that a clock would rarely hit, held open: a statement of the lease is on its way while something else happens.

The store is the real one on a real database; a gate keeps one of its answers back.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

from fencepost.clock import lease_clock
from fencepost.errors import TransientError
from relay.cursor import ORIGIN
from relay.lane import Lane, Receipt
from relay.metrics import Metrics
from relay.ownership import Ownership
from relay.settings import RelaySettings, load_settings
from relay.store import Store
from tests.support.outbox import Outbox
from tests.support.waiting import eventually

LANES: Final = 8
LEASE_SECONDS: Final = 600.0


class Gate:
    """Keeps back the answer of one statement of a store: it has been executed and its caller does not know yet."""

    def __init__(self, store: Store, name: str) -> None:
        self.reached, self.open = asyncio.Event(), asyncio.Event()
        statement = getattr(store, name)

        async def gated(*args: Any, **kwargs: Any) -> Any:
            answer = await statement(*args, **kwargs)
            self.reached.set()
            await self.open.wait()
            return answer

        setattr(store, name, gated)


class Relay:
    """Ownership with nothing around it."""

    def __init__(self, store: Store, relay_id: str, settings: RelaySettings) -> None:
        self.store = store
        self.lanes: dict[int, Lane] = {}
        self.lost: list[int] = []
        self.metrics = Metrics(version="test", relay_id=relay_id)
        self.ownership = Ownership(
            store=store,
            settings=settings,
            relay_id=relay_id,
            metrics=self.metrics,
            lanes=self.lanes,
            lost=lambda lane: self.lost.append(lane.number),
            changed=lambda: None,
            stopped=dict,
            taken_back=lambda receipt: None,
        )

    async def claim_all(self) -> None:
        async def holds_all() -> bool:
            await self.ownership.step()
            return len(self.lanes) == LANES

        await eventually(holds_all, message="it holds every lane")

    def sample(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(name) or 0.0


@pytest.fixture
def settings(database_url: str) -> RelaySettings:
    return load_settings(
        {
            "database_url": database_url,
            "kafka_bootstrap_servers": "nobody:1",
            "lease_seconds": LEASE_SECONDS,
            "publish_deadline_seconds": 10,
        }
    )


@asynccontextmanager
async def relay(settings: RelaySettings, relay_id: str) -> AsyncIterator[Relay]:
    store = await Store.open(settings.database_url.get_secret_value(), relay_id=relay_id, timeout_seconds=20)
    try:
        yield Relay(store, relay_id, settings)
    finally:
        await store.close()


@asynccontextmanager
async def running(work: Any) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
        await task
    finally:
        task.cancel()


def receipt(generation: int, sequence: int = 1) -> Receipt:
    lane = Lane(number=0, generation=generation, trusted_until=0, cursor=ORIGIN, sequence=0, marked_position=0)
    return Receipt(
        lane=lane.number, generation=generation, sequence=sequence, cursor=ORIGIN, first_id=1, last_id=1, row_count=1,
        late_count=0, offsets={}, partition_counts={},
    )  # fmt: skip


async def expire_leases(outbox: Outbox) -> None:
    """Let all leases end, by the database's clock."""
    await outbox.connection.execute("UPDATE fencepost.lanes SET lease_expires_at = clock_timestamp() WHERE lease_owner IS NOT NULL")


async def test_lanes_claimed_while_the_stop_begins_are_handed_back(settings: RelaySettings, database_url: str) -> None:
    """LEASE-14."""
    async with relay(settings, "a/1") as stopping, Outbox(database_url) as outbox:
        claim = Gate(stopping.store, "claim")
        await stopping.store.join("a", "test", LEASE_SECONDS, {})
        async with running(stopping.ownership.step()):
            await claim.reached.wait()
            await stopping.ownership.leave()
            claim.open.set()
        await stopping.ownership.step()

        async with asyncio.timeout(5):
            await stopping.ownership.without_lanes()
        assert await outbox.owners() == {}


async def test_a_relay_that_renews_while_it_leaves_is_no_member_afterwards(settings: RelaySettings, database_url: str) -> None:
    async with relay(settings, "a/1") as leaving, Outbox(database_url) as outbox:
        join = Gate(leaving.store, "join")
        async with running(leaving.ownership.step()):
            await join.reached.wait()
            await leaving.ownership.leave()
            # As if the join had been the later of the two in the database.
            await outbox.connection.execute(
                "INSERT INTO fencepost.relays (relay_id, name, version, expires_at) VALUES ('a/1', 'a', 'test', 'infinity')"
            )
            join.open.set()
        await leaving.ownership.release_all()

        assert await outbox.connection.fetchval("SELECT count(*) FROM fencepost.relays") == 0


async def test_trust_that_lapsed_while_a_renewal_was_on_its_way_does_not_come_back(settings: RelaySettings) -> None:
    async with relay(settings, "a/1") as slow:
        await slow.claim_all()
        renewal = Gate(slow.store, "renew")
        async with running(slow.ownership._renew()):
            await renewal.reached.wait()
            slow.lanes[3].trusted_until = lease_clock()
            renewal.open.set()

        assert slow.lost == [3]
        assert sorted(slow.lanes) == [0, 1, 2, 4, 5, 6, 7]


async def test_a_release_on_its_way_is_no_loss_and_ends_the_stop_only_when_it_is_done(
    settings: RelaySettings, database_url: str
) -> None:
    async with relay(settings, "a/1") as stopping, Outbox(database_url) as outbox:
        await stopping.claim_all()
        release = Gate(stopping.store, "release")
        await stopping.ownership.leave()
        gone = asyncio.create_task(stopping.ownership.without_lanes())
        async with running(stopping.ownership.step()):
            await release.reached.wait()
            stopping.ownership.expire()
            await asyncio.wait([gone], timeout=0)
            assert not gone.done(), "the stop waits for the statement"
            release.open.set()
        await gone

        assert stopping.lost == []
        assert stopping.sample("fencepost_lane_losses_total") == 0
        assert stopping.sample("fencepost_lane_releases_total") == LANES
        assert await outbox.owners() == {}


async def test_a_late_refusal_of_an_old_mark_leaves_the_lane_that_was_claimed_again(
    settings: RelaySettings, database_url: str
) -> None:
    async with relay(settings, "a/1") as owner, Outbox(database_url) as outbox:
        await owner.claim_all()
        old = owner.lanes[0].generation
        await expire_leases(outbox)
        for lane in owner.lanes.values():
            lane.distrust()
        owner.ownership.expire()
        await owner.claim_all()
        owner.lost.clear()

        owner.ownership.lose(0, old)

        assert owner.lost == []
        assert owner.lanes[0].generation == old + 1
        owner.ownership.lose(0, old + 1)
        assert owner.lost == [0]


async def test_what_a_former_owner_writes_late_changes_nothing(settings: RelaySettings, database_url: str) -> None:
    """LEASE-2."""
    async with relay(settings, "a/1") as former, relay(settings, "b/2") as owner, Outbox(database_url) as outbox:
        old = await former.store.claim(LEASE_SECONDS, LANES, [])
        await expire_leases(outbox)
        new = await owner.store.claim(LEASE_SECONDS, LANES, [])
        before = await state(outbox)

        assert await former.store.mark([receipt(old[0])]) == frozenset()
        assert await former.store.mark([receipt(new[0])]) == frozenset(), "the owner counts, too"
        assert not await former.store.renew(old, LEASE_SECONDS)
        assert await former.store.release(old) == frozenset()
        assert await state(outbox) == before
        assert await owner.store.mark([receipt(new[0])]) == {0}


async def state(outbox: Outbox) -> Sequence[object]:
    lanes = await outbox.connection.fetch("SELECT * FROM fencepost.lanes ORDER BY lane")
    cursors = await outbox.connection.fetch("SELECT * FROM fencepost.cursors ORDER BY lane")
    return [tuple(row) for row in (*lanes, *cursors)]


async def test_an_expired_lease_is_of_no_use_even_when_nobody_took_the_lane(settings: RelaySettings, database_url: str) -> None:
    async with relay(settings, "a/1") as former, Outbox(database_url) as outbox:
        held = await former.store.claim(LEASE_SECONDS, LANES, [])
        await expire_leases(outbox)

        assert await former.store.mark([receipt(held[0])]) == frozenset()
        assert not await former.store.renew(held, LEASE_SECONDS)


async def test_two_relays_that_reach_for_the_same_lanes_share_none(settings: RelaySettings, database_url: str) -> None:
    """LEASE-5."""
    async with (
        relay(settings, "a/1") as dead,
        relay(settings, "b/2") as one,
        relay(settings, "c/3") as other,
        Outbox(database_url) as outbox,
    ):
        before = await dead.store.claim(LEASE_SECONDS, LANES, [])
        await expire_leases(outbox)

        claims: Sequence[Mapping[int, int]] = await asyncio.gather(
            one.store.claim(LEASE_SECONDS, LANES, []), other.store.claim(LEASE_SECONDS, LANES, [])
        )

        assert not claims[0].keys() & claims[1].keys()
        claimed = {**claims[0], **claims[1]}
        assert claimed == {lane: before[lane] + 1 for lane in claimed}
        assert await outbox.owners() == dict.fromkeys(claims[0], "b/2") | dict.fromkeys(claims[1], "c/3")


async def test_a_mark_that_was_written_after_all_is_known_when_it_is_tried_again(settings: RelaySettings) -> None:
    async with relay(settings, "a/1") as owner:
        held = await owner.store.claim(LEASE_SECONDS, LANES, [])
        mark = receipt(held[0])
        assert await owner.store.marked_already([mark]) == frozenset()
        assert await owner.store.mark([mark]) == {0}

        with pytest.raises(TransientError, match="mark"):
            await owner.store.mark([mark])
        assert await owner.store.marked_already([mark]) == {(0, 1)}
