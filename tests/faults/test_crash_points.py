"""A relay that ends at any point between claim and release loses nothing, and only what was not marked goes twice.

The points are enumerated in ``tests.support.altered_relay``; one test walks all of them. Each crash is followed by the next
point's relay, so whatever a crash leaves behind is also taken over.
"""

from collections import Counter
from typing import Final

import pytest

from fencepost.devservices.processes import tail
from tests.faults.conftest import AlteredFactory
from tests.support.altered_relay import CRASH_POINTS, EXIT_CODE, STOP_POINTS
from tests.support.ledger import Ledger, event_ids
from tests.support.outbox import Outbox
from tests.support.records import Record, read_all
from tests.support.relay_process import RelayFactory, Setting
from tests.support.topics import TopicFactory

LEASE: Final[dict[str, Setting]] = {
    "lease_seconds": 1.5,
    "publish_deadline_seconds": 0.9,
    "lease_margin_seconds": 0.2,
    "stop_grace_seconds": 5,
}
# In the middle of things; points that are not named end the process when they are reached first.
OCCURRENCE: Final = {
    "before a poll": 4,
    "after a poll": 4,
    "after a Kafka batch was acknowledged": 4,
    "after an acknowledgement was noted": 4,
    "before a mark": 3,
    "after a mark": 3,
}
ROWS_A_CRASH: Final = 60


class Tail:
    """What each reading of a topic adds to the one before."""

    def __init__(self) -> None:
        self._ends: Counter[int] = Counter()

    def new(self, records: list[Record]) -> list[Record]:
        added = [record for record in records if record.offset >= self._ends[record.partition]]
        self._ends.update(record.partition for record in added)
        return added


@pytest.mark.timeout(300)
async def test_whatever_point_a_relay_ends_at_nothing_is_lost_and_only_unmarked_rows_go_twice(
    database_url: str, kafka: str, topic: TopicFactory, start_altered: AlteredFactory, start_relay: RelayFactory
) -> None:
    """ORDER-8, KAFKA-5."""
    ledger = await Ledger(database_url, await topic()).open()
    topic_tail = Tail()
    async with Outbox(database_url) as outbox:
        for point in [*CRASH_POINTS, *STOP_POINTS]:
            marked = await outbox.delivered()
            await ledger.fill(ROWS_A_CRASH)
            fault = {"CRASH_POINT": point, "CRASH_AT": str(OCCURRENCE.get(point, 1))}
            relay = start_altered(database_url, kafka, fault, batch_rows=5, **LEASE)
            if point in STOP_POINTS:
                await outbox.progress(2)
                relay.terminate()
            assert await relay.wait() == EXIT_CODE, f"it ended {point}; its log ends:\n{tail(relay.log)}"

            sent = event_ids(topic_tail.new(await read_all(kafka, ledger.topic)))
            assert not marked & set(sent), f"{point}: a row that was marked before went again"
        marked = await outbox.delivered()
        start_relay(database_url, kafka, **LEASE)
        await outbox.drained()

        assert not marked & set(event_ids(topic_tail.new(await read_all(kafka, ledger.topic))))
        assert await outbox.marked_rows() == len(ledger.committed), "each row is marked once"
    assert ledger.check(await read_all(kafka, ledger.topic)).repeats > 0, "some crashes came between a send and its mark"
