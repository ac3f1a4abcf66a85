"""The relay's publishing side by itself, in the test's own process: lanes with leases that a test ends at will."""

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Final

from fencepost.clock import lease_clock
from relay.cursor import ORIGIN, Batch
from relay.lane import Flight, Lane
from relay.metrics import Metrics
from relay.producer import Producer
from relay.publishing import Publishing
from relay.wire import RecordEncoder
from tests.support.rows import PolledRow
from tests.support.waiting import eventually

LEASE_SECONDS: Final = 600.0
POSTGRES_EPOCH_SECONDS: Final = 946_684_800

MayConstruct = Callable[..., Producer]


def row(number: int, *, topic: str, key: str, payload: bytes) -> PolledRow:
    """A row as a poll returns it."""
    return PolledRow(
        id=number,
        event_id=str(uuid.UUID(int=number)),
        event_type="test",
        created_at=int((time.time() - POSTGRES_EPOCH_SECONDS) * 1_000_000),
        topic=topic,
        key=key.encode(),
        payload=payload,
        record_bytes=256 + len(key) + len(payload),
        late=False,
    )


class Publisher:
    """``Publishing`` with lanes held under leases. ``kind`` builds its producers."""

    def __init__(self, bootstrap_servers: str, *, deadline_seconds: float = 60.0, kind: MayConstruct = Producer) -> None:
        self.done: list[Flight] = []
        self.metrics = Metrics(version="test", relay_id="test")
        self.producers: list[Producer] = []

        def make(may_send: Callable[[], bool]) -> Producer:
            producer = kind(bootstrap_servers=bootstrap_servers, client_id="test", compression="none", may_send=may_send)
            self.producers.append(producer)
            return producer

        self.publishing = Publishing(
            make_producer=make,
            encoder=RecordEncoder("test"),
            metrics=self.metrics,
            deadline_seconds=deadline_seconds,
            done=self.done.append,
            changed=lambda: None,
        )

    async def open(self, topic: str) -> None:
        """Have a producer that knows the topic's leaders and is connected to them: nothing has to be asked before it can send."""
        self.publishing.open()
        await self.ready()
        producer = self.producers[-1]

        async def connected() -> bool:
            count = await producer.learn_topic(topic, 10.0)
            leaders = {producer.leader(topic, partition) for partition in range(count)}
            return bool(leaders) and all([node is not None and await producer._producer.client.ready(node) for node in leaders])

        await eventually(connected, 30.0, message="the topic has leaders")

    async def ready(self) -> None:
        """Wait for a producer at hand."""
        await eventually(lambda: self.publishing.ready, 30.0, message="there is a producer")

    def flight(self, lane: int, rows: Sequence[PolledRow]) -> Flight:
        """A batch of a lane that is held for a long time."""
        held = Lane(
            number=lane, generation=1, trusted_until=lease_clock() + LEASE_SECONDS, cursor=ORIGIN, sequence=0, marked_position=0
        )
        held.flight = Flight(held, Batch(rows=rows, late_count=0, cursor=ORIGIN, more=False), 1)
        return held.flight

    async def lose(self, flights: Sequence[Flight]) -> None:
        """The leases of these flights end, as a relay finds out after a freeze; then it stops."""
        for flight in flights:
            flight.lane.distrust()
        self.publishing.abandon(flights)
        await self.publishing.close()
