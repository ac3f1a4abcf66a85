"""A relay that wakes up after its lanes were taken sends nothing more of its lost tenure.

Answers or requests are held by a proxy between the relay and the broker, so "in mid-batch" is a state and not a moment.
The broken model, a producer that is stopped instead of discarded, runs through the same scenario and must publish late.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from relay.partitioner import partition_of
from relay.producer import Producer
from tests.support.fleet import SHORT_LEASE, metric, metric_reaches
from tests.support.kafka_proxy import PRODUCE, KafkaProxy
from tests.support.ledger import Ledger
from tests.support.outbox import Outbox
from tests.support.publisher import Publisher, row
from tests.support.records import Record, read_all
from tests.support.relay_process import RelayFactory
from tests.support.rows import PolledRow
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

PARTITIONS = 4
LARGE = 900_000
SEND_BUFFER_BYTES = 65_536


class StoppingProducer(Producer):
    """The broken model: aiokafka's own way out, which sends what is queued."""

    def _guard_requests(self) -> None:
        """No guard: the model trusts stop()."""

    async def discard(self) -> None:
        if not self._gone:
            await self._producer.stop()
            self._gone = True


def transports(client: Any) -> Sequence[asyncio.Transport]:
    return [connection._writer.transport for connection in client._conns.values() if connection._writer is not None]


def key_of(partition: int) -> str:
    """A key that lies in this partition."""
    return next(key for key in map(str, range(1000)) if partition_of(key.encode(), PARTITIONS) == partition)


def rows_for(partition: int, numbers: Sequence[int], *, topic: str, payload: bytes = b"old") -> list[PolledRow]:
    return [row(number, topic=topic, key=key_of(partition), payload=payload) for number in numbers]


async def publish_as_successor(bootstrap_servers: str, topic: str) -> None:
    async with AIOKafkaProducer(bootstrap_servers=bootstrap_servers) as producer:
        for partition in range(PARTITIONS):
            await producer.send_and_wait(topic, b"new", key_of(partition).encode(), partition)


async def woken_after_a_takeover(kafka: str, topic: str, kind: Callable[..., Producer]) -> list[Record]:
    """Freeze with one batch unanswered and one queued behind it, let a successor publish, wake; the records after its own."""
    async with KafkaProxy(kafka) as proxy:
        frozen = Publisher(proxy.address, kind=kind)
        await frozen.open(topic)
        proxy.answering.clear()
        in_flight = frozen.flight(0, rows_for(0, [1, 2], topic=topic))
        frozen.publishing.start([in_flight])
        await eventually(lambda: proxy.forwarded[PRODUCE] == 1, message="a request is on its way")
        queued = [frozen.flight(lane, rows_for(lane, [lane * 10], topic=topic)) for lane in (1, 2)]
        frozen.publishing.start(queued)

        await publish_as_successor(kafka, topic)
        proxy.answering.set()
        await frozen.lose([in_flight, *queued])

    records = await read_all(kafka, topic)
    last = {record.partition: record.offset for record in records if record.value == b"new"}
    return [record for record in records if record.offset > last[record.partition]]


async def test_a_relay_that_was_frozen_in_mid_batch_sends_nothing_after_its_successor(kafka: str, topic: TopicFactory) -> None:
    """LEASE-1."""
    assert await woken_after_a_takeover(kafka, await topic(partitions=PARTITIONS), Producer) == []


async def test_the_broken_model_that_stops_its_producer_publishes_late(kafka: str, topic: TopicFactory) -> None:
    late = await woken_after_a_takeover(kafka, await topic(partitions=PARTITIONS), StoppingProducer)

    assert [record.value for record in late] == [b"old", b"old"]


async def test_a_relay_that_has_not_noticed_its_loss_yet_sends_nothing_more(kafka: str, topic: TopicFactory) -> None:
    name = await topic(partitions=PARTITIONS)
    async with KafkaProxy(kafka) as proxy:
        woken = Publisher(proxy.address)
        await woken.open(name)
        proxy.answering.clear()
        in_flight = woken.flight(0, rows_for(0, [1], topic=name))
        woken.publishing.start([in_flight])
        await eventually(lambda: proxy.forwarded[PRODUCE] == 1, message="a request is on its way")
        queued = woken.flight(1, rows_for(1, [2], topic=name))
        woken.publishing.start([queued])

        queued.lane.distrust()
        proxy.answering.set()
        await eventually(lambda: woken.done == [in_flight], message="the answer of the first has arrived")
        await eventually(lambda: bool(queued.to_send), message="the second was given back unsent")

        assert proxy.received[PRODUCE] == 1
        await woken.publishing.close()


async def test_a_connection_that_comes_up_after_the_lease_carries_no_batch(kafka: str, topic: TopicFactory) -> None:
    name = await topic(partitions=PARTITIONS)
    async with KafkaProxy(kafka) as proxy:
        relay = Publisher(proxy.address)
        await relay.open(name)
        proxy.welcoming.clear()
        await proxy.cut()
        connections = proxy.connections
        flight = relay.flight(0, rows_for(0, [1], topic=name))
        relay.publishing.start([flight])
        await eventually(lambda: proxy.connections > connections, message="the producer connects anew")

        flight.lane.distrust()
        proxy.welcoming.set()
        relay.publishing.abandon([flight])
        await relay.publishing.close()

        assert proxy.received[PRODUCE] == 0
    assert await read_all(kafka, name) == []


async def test_half_a_request_in_the_buffer_is_not_finished_after_the_lease(kafka: str, topic: TopicFactory) -> None:
    name = await topic(partitions=PARTITIONS)
    async with KafkaProxy(kafka) as proxy:
        relay = Publisher(proxy.address)
        await relay.open(name)
        client = relay.producers[-1]._producer.client
        for transport in transports(client):
            # The kernel's own choice grows with what it has seen of the network, to more than all of these rows.
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        proxy.reading.clear()
        numbers = range(PARTITIONS * 4)
        rows = [row for number in numbers for row in rows_for(number % PARTITIONS, [number + 1], topic=name, payload=bytes(LARGE))]
        flights = [relay.flight(lane, rows[lane * PARTITIONS : (lane + 1) * PARTITIONS]) for lane in range(4)]
        relay.publishing.start(flights)

        def buffered() -> bool:
            return any(transport.get_write_buffer_size() for transport in transports(client))

        await eventually(buffered, message="a part of a request waits in the process")
        await relay.lose(flights)
        proxy.reading.set()
        await eventually(lambda: not proxy.open_connections, message="the broken connections are noticed")

        assert proxy.received[PRODUCE] == 0
    assert await read_all(kafka, name) == []


async def test_a_discarded_producer_leaves_no_task_behind(kafka: str, topic: TopicFactory) -> None:
    name = await topic(partitions=PARTITIONS)
    async with KafkaProxy(kafka) as proxy:
        relay = Publisher(proxy.address)
        await relay.open(name)
        proxy.answering.clear()
        flight = relay.flight(0, rows_for(0, [1], topic=name))
        relay.publishing.start([flight])
        await eventually(lambda: proxy.forwarded[PRODUCE] == 1, message="a request is on its way")

        await relay.lose([flight])

        sender = relay.producers[-1]._producer._sender.sender_task
        assert sender is not None
        assert sender.done()


@pytest.mark.parametrize("held", ["answers", "requests"])
async def test_a_frozen_relay_wakes_as_a_healthy_one_and_its_lost_tenure_stays_silent(
    held: str, database_url: str, kafka: str, topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """LEASE-1, as a process under SIGSTOP and SIGCONT."""
    ledger = await Ledger(database_url, await topic()).open()
    async with KafkaProxy(kafka) as proxy, Outbox(database_url) as outbox:
        frozen = start_relay(database_url, proxy.address, relay_name="frozen", batch_rows=50, **SHORT_LEASE)
        await outbox.settled(frozen=8)
        gate = proxy.answering if held == "answers" else proxy.sending
        gate.clear()
        await ledger.fill(2_000)
        await eventually(lambda: proxy.received[PRODUCE] > 0, message="a batch is on its way")
        frozen.pause()
        successor = start_relay(database_url, kafka, relay_name="successor", **SHORT_LEASE)
        await outbox.drained()
        after_takeover = await read_all(kafka, ledger.topic)
        on_the_way = proxy.received[PRODUCE]

        frozen.resume()
        gate.set()
        await metric_reaches(frozen, "fencepost_lane_losses_total", 8)
        await outbox.settled(frozen=4, successor=4)

        assert proxy.received[PRODUCE] == on_the_way, "not one request more"
        repeats = len(await read_all(kafka, ledger.topic)) - len(after_takeover)
        if held == "answers":
            assert repeats == 0
        generations = await outbox.generations()
        await ledger.fill(500)
        await outbox.drained()
        assert await outbox.generations() == generations
        assert await outbox.marked_rows() == len(ledger.committed), "the frozen relay's marks changed nothing"
        assert await metric(successor, "fencepost_lane_losses_total") == 0
    ledger.check(await read_all(kafka, ledger.topic))
