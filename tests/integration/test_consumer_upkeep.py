"""What a consumer does beside messages: memory within bounds, forgetting in time, and topics that are not what they were."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, Final

import pytest

from consumer_sdk import Message, MessageContext, MessageHandlers, plain_records
from tests.support.consumers import Ping, Stage, sample, stage
from tests.support.topics import TopicFactory, create_topic, delete_topic
from tests.support.waiting import eventually

pytestmark = pytest.mark.services

MEGABYTE: Final = 1024 * 1024
OLD_ROWS: Final = 2_500
FILL: Final = """
INSERT INTO fencepost.effects (run_key, tenant_id, iteration, step, occurrence, operation, state, holder, created_at, finished_at)
SELECT 'm' || n, '', 0, 'c/s', 0, 'fencepost.message', 'succeeded', 'me', now() - $2::interval, now() - $2
FROM generate_series(1, $1::integer) AS n
"""


@pytest.fixture
async def one(database_url: str, kafka: str, topic: TopicFactory) -> AsyncIterator[Stage]:
    async with stage(database_url, kafka, topic) as made:
        yield made


@pytest.fixture
def quick_upkeep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every half a second, in place of every half a minute."""
    monkeypatch.setattr("consumer_sdk.consumer._MAINTAIN_SECONDS", 0.5)


async def test_memory_is_bounded_by_bytes_and_fetching_goes_on_when_there_is_room(one: Stage) -> None:
    """CONSUME-24: 80 messages of 100 kB, and room for one megabyte."""
    release, app, most = asyncio.Event(), MessageHandlers(), list[int]()

    @app.handler("ping", step="slow")
    async def slow(_message: Message[Any], _context: MessageContext) -> None:
        assert consumer._assignment is not None
        most.append(consumer._assignment.bytes)
        await release.wait()

    for number in range(80):
        await one.send({"n": number, "filling": "x" * 100_000}, key=f"k{number}")
    async with one.running(app, consumer_max_in_flight_mb=1, consumer_concurrency=20) as consumer:
        await eventually(lambda: sample(consumer, "fencepost_consumer_paused") == 1)
        release.set()
        await one.until_committed({0: 80}, seconds=40)
        assert sample(consumer, "fencepost_consumer_rebalances_total") == 1
        await eventually(lambda: sample(consumer, "fencepost_consumer_in_flight_bytes") == 0)
    assert len(most) == 80
    assert 0.5 * MEGABYTE < max(most) < 1.5 * MEGABYTE


@pytest.mark.usefixtures("quick_upkeep")
async def test_what_is_past_its_retention_is_forgotten_all_of_it(one: Stage) -> None:
    """More than one batch of them, in one round; what is younger stays."""
    await one.connection.execute(FILL, OLD_ROWS, timedelta(days=31))
    app = MessageHandlers()

    @app.handler("ping", step="nothing")
    async def nothing(_message: Message[Any], _context: MessageContext) -> None: ...

    event = await one.send({"n": 1})
    async with one.running(app) as consumer:
        await one.until_committed({0: 1})
        await eventually(lambda: sample(consumer, "fencepost_consumer_forgotten_effects_total") == OLD_ROWS)
    assert await one.outcomes() == {event: "succeeded"}


@pytest.mark.usefixtures("quick_upkeep")
async def test_a_topic_that_is_made_anew_under_a_consumer_is_read_from_its_beginning(one: Stage) -> None:
    """Without a restart: nothing of the new one is passed over, though its offsets begin below the old one's place."""
    noted, app = list[object](), MessageHandlers()
    app.adapter(one.topic, plain_records(type="ping", source="legacy"))

    @app.handler("ping", model=Ping, step="note")
    async def note(message: Message[Ping], _context: MessageContext) -> None:
        noted.append(message.value.n)

    for number in range(3):
        await one.send_record(b'{"n": %d}' % number)
    async with one.running(app):
        await one.until_committed({0: 3})
        await delete_topic(one.kafka, one.topic)
        await create_topic(one.kafka, one.topic, 1)
        for number in range(10, 15):
            await one.send_record(b'{"n": %d}' % number)
        await eventually(lambda: set(noted) == {0, 1, 2, 10, 11, 12, 13, 14}, 40)
        await one.until_committed({0: 5}, seconds=40)
    async with one.running(app):
        await one.send_record(b'{"n": 15}')
        await one.until_committed({0: 6})
    assert noted[-1] == 15
