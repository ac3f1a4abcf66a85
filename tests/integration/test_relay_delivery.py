"""What was written is what arrives: through the SQL functions, a real relay and a real broker, and back."""

import os
from typing import Any

import asyncpg
import pytest

from fencepost import wire
from producer_sdk import Event
from producer_sdk.asyncpg import enqueue, enqueue_many
from tests.support.fleet import metric
from tests.support.records import read_all
from tests.support.relay_process import RelayFactory
from tests.support.topics import TopicFactory, create_topic
from tests.support.waiting import eventually


@pytest.fixture
async def connection(database_url: str) -> Any:
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


async def all_delivered(connection: Any) -> None:
    async def delivered() -> bool:
        return bool(await connection.fetchval("SELECT coalesce(bool_and(delivered), false) FROM fencepost.delivery"))

    await eventually(delivered, 60, message="every row is delivered")


async def write(connection: Any, *events: Event) -> None:
    async with connection.transaction():
        await enqueue_many(connection, events)


PAYLOADS = [None, b"", b"null", b'{"list":[],"none":null}', b"\xff\xfe\x00\x80", os.urandom(1000)]
HEADERS = [("x-empty", b""), ("x-name", "Größe".encode()), ("x-name", b"\xff"), ("größe", b"1")]


async def test_payloads_keys_and_headers_arrive_byte_for_byte(
    connection: Any, database_url: str, kafka: str, topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """KAFKA-7: a null payload is a null value, an empty one a value of length 0, and nothing is converted on the way."""
    name = await topic(partitions=3)
    events = [
        Event(topic=name, type="t", key=key, payload=payload, headers=HEADERS)
        for payload in PAYLOADS
        for key in (b"", b"\x00\xff", b"key")
    ]
    await write(connection, *events)
    await start_relay(database_url, kafka).wait_ready()
    await all_delivered(connection)

    arrived = {dict(record.headers)["ce_id"].decode(): record for record in await read_all(kafka, name)}
    assert len(arrived) == len(events)
    for event in events:
        record = arrived[str(event.event_id)]
        assert (record.key, record.value) == (event.key, event.payload)
        assert list(record.headers)[-len(HEADERS) :] == HEADERS


async def test_the_largest_row_that_is_accepted_is_one_that_the_broker_takes(
    connection: Any, database_url: str, kafka: str, topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """The limits of the outbox fit together under the broker's default limit: no accepted row stops its lane."""
    name = await topic(partitions=1)
    longest = "x" * wire.MAX_ATTRIBUTE_BYTES
    headers = [(f"{number:0256d}", b"v" * (wire.MAX_HEADERS_BYTES // wire.MAX_HEADERS - 256)) for number in range(wire.MAX_HEADERS)]
    largest = Event(
        topic=name, type=longest, key=os.urandom(wire.MAX_KEY_BYTES), payload=os.urandom(wire.MAX_PAYLOAD_BYTES), headers=headers,
        source=longest, content_type=longest, tenant_id=longest, run_id=longest, step=longest, operation=longest,
        fencing_token=2**63 - 1, traceparent=longest, tracestate="x" * wire.MAX_TRACESTATE_BYTES,
    )  # fmt: skip
    assert sum(len(key) + len(value) for key, value in headers) == wire.MAX_HEADERS_BYTES
    await write(connection, largest)
    relay = start_relay(database_url, kafka)
    await relay.wait_ready()
    await all_delivered(connection)

    (record,) = await read_all(kafka, name)
    assert record.value == largest.payload
    assert await metric(relay, "fencepost_producer_rebuilds_total") == 0


async def test_topics_that_differ_in_case_are_two(
    connection: Any, database_url: str, kafka: str, topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """KAFKA-8."""
    lower = await topic(partitions=1)
    upper = lower.upper()
    await create_topic(kafka, upper, 1)
    await write(connection, *(Event(topic=name, type="t", key=b"k", payload=name.encode()) for name in (lower, upper, lower)))
    await start_relay(database_url, kafka).wait_ready()
    await all_delivered(connection)

    assert [record.value for record in await read_all(kafka, lower)] == [lower.encode()] * 2
    assert [record.value for record in await read_all(kafka, upper)] == [upper.encode()]


async def test_types_of_one_key_share_one_order(
    connection: Any, database_url: str, kafka: str, topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """ORDER-3: one transaction after another, while the relay runs."""
    name = await topic(partitions=4)
    await start_relay(database_url, kafka).wait_ready()
    written = []
    for number in range(100):
        for kind in ("created", "paid", "cancelled"):
            written.append(f"{number} {kind}".encode())
            async with connection.transaction():
                await enqueue(connection, Event(topic=name, type=kind, key=b"one", payload=written[-1]))
    await all_delivered(connection)

    assert [record.value for record in await read_all(kafka, name)] == written


async def test_rows_without_a_key_all_arrive_and_are_spread(
    connection: Any, database_url: str, kafka: str, topic: TopicFactory, start_relay: RelayFactory
) -> None:
    name = await topic(partitions=4)
    events = [Event(topic=name, type="t", key=None, payload=str(number).encode()) for number in range(200)]
    for start in range(0, len(events), 20):
        await write(connection, *events[start : start + 20])
    await start_relay(database_url, kafka).wait_ready()
    await all_delivered(connection)

    records = await read_all(kafka, name)
    assert sorted(int(record.value) for record in records) == list(range(200))
    assert await connection.fetchval("SELECT count(DISTINCT lane) FROM fencepost.outbox") == 8


async def test_commits_that_no_flush_has_secured_are_published_once_one_has(
    connection: Any, database_url: str, kafka: str, topic: TopicFactory, start_relay: RelayFactory
) -> None:
    """wait_for_flush, with a writer whose commits are asynchronous."""
    name = await topic(partitions=1)
    await connection.execute("SET synchronous_commit = off")
    await start_relay(database_url, kafka, wait_for_flush=True).wait_ready()
    for number in range(20):
        await write(connection, Event(topic=name, type="t", key=b"k", payload=str(number).encode()))
    last = await connection.fetchval("SELECT pg_current_wal_insert_lsn()")
    await all_delivered(connection)

    assert [int(record.value) for record in await read_all(kafka, name)] == list(range(20))
    assert await connection.fetchval("SELECT pg_current_wal_flush_lsn() >= $1::pg_lsn", last)


async def test_a_slot_of_someone_else_that_holds_back_vacuum_is_named(
    connection: Any, database_url: str, kafka: str, start_relay: RelayFactory
) -> None:
    """DB-12: an idle relay holds back nothing itself, and its metric says who does."""
    slot = f"test_{os.urandom(6).hex()}"
    await connection.execute("SELECT pg_create_logical_replication_slot($1, 'pgoutput')", slot)
    try:
        for _ in range(5):
            await connection.execute("SELECT pg_current_xact_id()")
        relay = start_relay(database_url, kafka)
        await relay.wait_ready()

        async def named() -> bool:
            return await metric(relay, 'fencepost_horizon_age_transactions{holder="slot"}') >= 5

        await eventually(named, 20, message="the slot's age shows")
        assert (
            await connection.fetchval(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'fencepost%' AND datname = current_database()"
                " AND state <> 'idle' AND backend_xmin IS NOT NULL AND clock_timestamp() - state_change > interval '5 seconds'"
            )
            == 0
        )
    finally:
        await connection.execute("SELECT pg_drop_replication_slot($1)", slot)
