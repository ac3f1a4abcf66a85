"""Whatever the broker does, rows stay undelivered until it has them, lanes keep their order, and others are not held up."""

import asyncio

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from fencepost.devservices import Services
from tests.faults.conftest import AlteredFactory
from tests.support.fleet import LONG_LEASE, SHORT_LEASE, logged, metric, metric_reaches, problems
from tests.support.kafka_proxy import KafkaProxy
from tests.support.ledger import Ledger
from tests.support.outbox import Outbox
from tests.support.records import read_all
from tests.support.relay_process import RelayFactory, RelayProcess
from tests.support.topics import TopicFactory, create_topic
from tests.support.waiting import eventually

TIMEOUTS = 'fencepost_published_rows_total{outcome="timeout",topic="(any)"}'
REFUSED = 'fencepost_lanes_stopped{reason="refused_row"}'
UNAVAILABLE = 'fencepost_lanes_stopped{reason="unavailable"}'
REBUILDS = "fencepost_producer_rebuilds_total"
LOSSES = "fencepost_lane_losses_total"
OTHERS_DRAINED = "SELECT NOT EXISTS (SELECT FROM fencepost.delivery WHERE NOT delivered AND lane <> fencepost.lane_of('key-1'))"


def acknowledged(topic: str) -> str:
    return f'fencepost_published_rows_total{{outcome="acknowledged",topic="{topic}"}}'


async def oldest_age(relay: RelayProcess) -> float:
    samples = await relay.metrics()
    return max((value for name, value in samples.items() if name.startswith("fencepost_oldest_undelivered_seconds")), default=0.0)


async def test_an_outage_longer_than_every_deadline_costs_nothing_but_time(
    own_services: Services, own_database_url: str, own_topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """KAFKA-6, ORDER-1: no attempt is spent, nothing is parked, first appearances stay in order."""
    kafka, broker = own_services.bootstrap_servers, own_services.broker
    ledger = await Ledger(own_database_url, await own_topic()).open()
    done = asyncio.Event()
    async with Outbox(own_database_url) as outbox:
        relay = start_relay(own_database_url, kafka, **SHORT_LEASE)
        async with asyncio.TaskGroup() as group:
            group.create_task(ledger.write(2_000, seed=1, until=done))
            await outbox.progress(5)
            generations = await outbox.generations()
            await asyncio.to_thread(broker.stop)
            try:
                await metric_reaches(relay, TIMEOUTS, 1)
                await eventually(lambda: len(logged(relay, "kafka_unreachable")) > 3, 30, message="the broker was tried again")
                assert await problems(relay) == ["kafka: no answer"]
                assert await problems(relay, "/livez") == [], "a restart would not help"

                async def alarming() -> bool:
                    return await oldest_age(relay) > 3

                await eventually(alarming, 20, message="the age of the oldest row shows it")
            finally:
                done.set()
                await asyncio.to_thread(broker.start)
        await outbox.drained()

        assert await outbox.generations() == generations, "the lanes were renewed all the while"
        assert await outbox.marked_rows() == len(ledger.committed)
    assert await metric(relay, LOSSES) == 0
    await relay.wait_ready()
    ledger.check(await read_all(kafka, ledger.topic))


async def test_a_send_without_an_answer_is_no_delivery(
    own_services: Services, own_database_url: str, own_topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """KAFKA-2."""
    kafka, broker = own_services.bootstrap_servers, own_services.broker
    ledger = await Ledger(own_database_url, await own_topic()).open()
    async with Outbox(own_database_url) as outbox:
        relay = start_relay(own_database_url, kafka, **SHORT_LEASE)
        await ledger.fill(200)
        await outbox.drained()
        delivered = await outbox.delivered()
        broker.pause()
        try:
            await ledger.fill(500)
            await metric_reaches(relay, TIMEOUTS, 1)
            await metric_reaches(relay, REBUILDS, 1)

            assert await outbox.delivered() == delivered
        finally:
            broker.resume()
        await outbox.drained()
    ledger.check(await read_all(kafka, ledger.topic))


async def test_a_stop_works_while_the_broker_is_dead(
    own_services: Services, own_database_url: str, own_topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """KAFKA-3."""
    kafka, broker = own_services.bootstrap_servers, own_services.broker
    ledger = await Ledger(own_database_url, await own_topic()).open()
    async with Outbox(own_database_url) as outbox:
        relay = start_relay(own_database_url, kafka, **{**LONG_LEASE, "stop_grace_seconds": 3})
        await ledger.fill(200)
        await outbox.drained()
        polls = await metric(relay, 'fencepost_phase_seconds_count{phase="poll"}')
        broker.pause()
        try:
            await ledger.fill(500)
            await metric_reaches(relay, 'fencepost_phase_seconds_count{phase="poll"}', polls + 2)
            relay.terminate()

            assert await relay.wait(timeout=3 + 4) == 0
            assert await outbox.owners() == {}
            assert await outbox.undelivered() == 500
        finally:
            broker.resume()
        start_relay(own_database_url, kafka, **LONG_LEASE)
        await outbox.drained()
    ledger.check(await read_all(kafka, ledger.topic))


async def test_a_broker_that_stands_still_for_less_than_the_deadline_gets_no_row_twice(
    own_services: Services, own_database_url: str, own_topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """LEASE-12."""
    kafka, broker = own_services.bootstrap_servers, own_services.broker
    ledger = await Ledger(own_database_url, await own_topic()).open()
    async with Outbox(own_database_url) as outbox:
        relay = start_relay(own_database_url, kafka, **LONG_LEASE)
        await ledger.fill(200)
        await outbox.drained()
        broker.pause()
        try:
            await ledger.fill(2_000)

            async def felt() -> bool:
                return await oldest_age(relay) > 0.5

            await eventually(felt, 20, message="rows wait")
        finally:
            broker.resume()
        await outbox.drained()
    assert await metric(relay, REBUILDS) == 0
    assert ledger.check(await read_all(kafka, ledger.topic)).repeats == 0


async def test_a_broker_that_needs_half_the_deadline_for_each_answer_gets_no_row_twice(
    own_services: Services, own_database_url: str, own_topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """LEASE-12, with several batches a partition."""
    kafka = own_services.bootstrap_servers
    # One partition and rows large enough that a lane's batch is several of Kafka's, each with an answer of its own.
    ledger = await Ledger(own_database_url, await own_topic(partitions=1)).open()
    await ledger.fill(3_000, payload_bytes=2_000)
    async with KafkaProxy(kafka) as one, KafkaProxy(kafka) as other, Outbox(own_database_url) as outbox:
        one.answer_seconds = other.answer_seconds = 1.0
        lease = {"lease_seconds": 10, "publish_deadline_seconds": 2, "lease_margin_seconds": 1}
        relays = [start_relay(own_database_url, proxy.address, batch_rows=300, **lease) for proxy in (one, other)]
        await outbox.drained()

    reading = ledger.check(await read_all(kafka, ledger.topic))
    assert (reading.records, reading.repeats) == (3_000, 0)
    assert sum([await metric(relay, acknowledged(ledger.topic)) for relay in relays]) == 3_000


async def test_rows_of_a_missing_topic_wait_for_it_and_only_their_lane_does(
    own_services: Services, own_database_url: str, own_topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """ORDER-9 and PARK-4, as far as they hold before holds exist: the lane stands still, the others flow."""
    kafka = own_services.bootstrap_servers
    missing = await Ledger(own_database_url, f"{await own_topic()}-missing", keys=("key-1",)).open()
    good = await Ledger(own_database_url, await own_topic()).open()
    async with Outbox(own_database_url) as outbox:
        await missing.fill(50)
        await good.fill(2_000)
        relay = start_relay(own_database_url, kafka, batch_rows=100, **SHORT_LEASE)
        await eventually(lambda: outbox.is_true(OTHERS_DRAINED), 30, message="every other lane is drained")
        await metric_reaches(relay, UNAVAILABLE, 1)
        assert await metric(relay, UNAVAILABLE) == 1
        assert {entry["topic"] for entry in logged(relay, "topic_unavailable")} == {missing.topic}
        assert not await outbox.delivered() & missing.committed.keys()

        await create_topic(kafka, missing.topic)
        await outbox.drained()
        await eventually(lambda: _is(relay, UNAVAILABLE, 0), message="the lane is no longer stopped")
    assert missing.check(await read_all(kafka, missing.topic)).repeats == 0
    assert good.check(await read_all(kafka, good.topic)).repeats == 0


async def test_a_lane_that_stands_still_does_not_hold_up_a_stop(
    own_services: Services, own_database_url: str, own_topic: TopicFactory, start_relay: RelayFactory
) -> None:
    kafka = own_services.bootstrap_servers
    ledger = await Ledger(own_database_url, f"{await own_topic()}-missing").open()
    await ledger.fill(200)
    async with Outbox(own_database_url) as outbox:
        relay = start_relay(own_database_url, kafka, **LONG_LEASE)
        await eventually(lambda: len(logged(relay, "topic_unavailable")) > 1, 30, message="the topic is missed")
        relay.terminate()

        assert await relay.wait(timeout=float(LONG_LEASE["stop_grace_seconds"]) / 3) == 0
        assert await outbox.owners() == {}
        await create_topic(kafka, ledger.topic)
        start_relay(own_database_url, kafka, **LONG_LEASE)
        await outbox.drained()
    assert ledger.check(await read_all(kafka, ledger.topic)).repeats == 0


async def _is(relay: RelayProcess, name: str, value: float) -> bool:
    return await metric(relay, name) == value


@pytest.mark.timeout(120)
async def test_a_row_that_the_broker_refuses_stops_its_lane_loudly_and_goes_once_the_limit_allows(
    own_services: Services, own_database_url: str, own_topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """PARK-5, before holds exist: neither skipped nor lost, and no other lane repeats a row."""
    kafka = own_services.bootstrap_servers
    ledger = await Ledger(own_database_url, await own_topic()).open()
    async with Outbox(own_database_url) as outbox:
        await ledger.fill(500)
        before = set(ledger.committed)
        await ledger.fill(1, keys=["key-1"], payload_bytes=300_000)
        (large,) = ledger.committed.keys() - before
        await ledger.fill(2_000)
        await set_max_message_bytes(kafka, ledger.topic, 200_000)
        relay = start_relay(own_database_url, kafka, batch_rows=200, **SHORT_LEASE)

        await metric_reaches(relay, REFUSED, 1)
        await eventually(lambda: outbox.is_true(OTHERS_DRAINED), 30, message="every other lane is drained")
        assert [entry["event_id"] for entry in logged(relay, "row_refused")] == [large]
        assert await metric(relay, REFUSED) == 1
        assert large not in await outbox.delivered()
        assert await problems(relay) == [], "it would block the roll-out of its own fix"

        await set_max_message_bytes(kafka, ledger.topic, 1_048_588)
        await outbox.drained()
        await eventually(lambda: _is(relay, REFUSED, 0), message="the lane is no longer stopped")
    assert ledger.check(await read_all(kafka, ledger.topic)).repeats == 0


async def set_max_message_bytes(kafka: str, topic: str, most: int) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, {"max.message.bytes": str(most)})
        await admin.alter_configs([resource])
    finally:
        await admin.close()


async def test_batches_too_large_for_a_topic_are_cut_until_they_fit(
    own_services: Services, own_database_url: str, own_topic: TopicFactory, start_relay: RelayFactory
) -> None:
    kafka = own_services.bootstrap_servers
    ledger = await Ledger(own_database_url, await own_topic(config={"max.message.bytes": "20000"})).open()
    await ledger.fill(3_000, payload_bytes=500)
    async with Outbox(own_database_url) as outbox:
        relay = start_relay(own_database_url, kafka, **SHORT_LEASE)
        await outbox.drained()
    assert logged(relay, "row_refused") == []
    assert ledger.check(await read_all(kafka, ledger.topic)).repeats == 0


async def test_a_fatal_sequence_error_costs_a_producer_and_nothing_else(
    own_services: Services, own_database_url: str, own_topic: TopicFactory, start_altered: AlteredFactory
) -> None:
    """KAFKA-1."""
    kafka = own_services.bootstrap_servers
    ledger = await Ledger(own_database_url, await own_topic()).open()
    await ledger.fill(3_000)
    async with Outbox(own_database_url) as outbox:
        relay = start_altered(own_database_url, kafka, {"SEQUENCE_JUMPS_AT": "30"}, batch_rows=20, **LONG_LEASE)
        await outbox.drained()

        assert await outbox.marked_rows() == 3_000
    assert relay.running
    assert await metric(relay, REBUILDS) == 1
    assert await metric(relay, LOSSES) == 0
    assert "OutOfOrderSequence" in logged(relay, "batch_failed")[0]["error"]
    ledger.check(await read_all(kafka, ledger.topic))
