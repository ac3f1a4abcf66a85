"""A row that the broker refuses has neighbours in its Kafka batch; they are none of its business."""

import os

from relay.lane import Flight
from tests.support.publisher import Publisher, row
from tests.support.records import read_all
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually


async def test_a_lane_whose_row_did_not_fit_beside_a_refused_one_is_not_stopped_by_it(kafka: str, topic: TopicFactory) -> None:
    """PARK-5: the refused row fills its batch; the next lane's row opens it, does not fit, and goes in one of its own."""
    name = await topic(partitions=1, config={"max.message.bytes": "500000"})
    publisher = Publisher(kafka)
    await publisher.open(name)
    refused = publisher.flight(0, [row(1, topic=name, key="a", payload=os.urandom(900_000))])
    neighbour = publisher.flight(1, [row(2, topic=name, key="b", payload=os.urandom(200_000))])
    try:
        publisher.publishing.start([refused, neighbour])

        async def settled() -> bool:
            again: list[Flight] = [flight for flight in (neighbour,) if flight.to_send and flight.due and not flight.outstanding]
            if again and publisher.publishing.ready:
                publisher.publishing.start(again)
            return neighbour in publisher.done

        await eventually(settled, 30, message="the neighbour is published")
    finally:
        await publisher.publishing.close()

    assert refused.lane.refusal is not None
    assert refused.lane.refusal.event_id == refused.batch.rows[0]["event_id"]
    assert neighbour.lane.refusal is None
    assert [record.key for record in await read_all(kafka, name)] == [b"b"]
