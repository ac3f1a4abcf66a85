"""Others' messages are read here and ours there: Kafka's own console producer, the CloudEvents SDK, Debezium's router."""

import asyncio
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer
from cloudevents.core.bindings.kafka import KafkaMessage, from_kafka_event, to_binary_event, to_structured_event
from cloudevents.core.v1.event import CloudEvent

from consumer_sdk import Message
from consumer_sdk.adapters import cloud_events, debezium_outbox, plain_records
from fencepost.devservices.cache import cache_directory, filled_once
from fencepost.devservices.java import java_executable, kafka_jars
from fencepost.devservices.pins import KAFKA_VERSION
from producer_sdk import Event
from producer_sdk.asyncpg import enqueue_many
from tests.support.records import Record, read_all
from tests.support.relay_process import RelayFactory
from tests.support.topics import TopicFactory

PRODUCE_SECONDS: Final = 60
TRACE: Final = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


# The console producer


def kafka_tools() -> Path:
    """The directory with the jar of Kafka's command-line tools, which a broker does without; downloaded at the first call."""
    return filled_once(cache_directory() / f"kafka-tools-{KAFKA_VERSION}", _fetch_tools)


def _fetch_tools(directory: Path) -> None:
    from jgo.maven import MavenContext

    context = MavenContext(repo_cache=directory / "maven")
    jar = context.project("org.apache.kafka", "kafka-tools").at_version(KAFKA_VERSION).artifact().resolve()
    shutil.copy(jar, directory)
    shutil.rmtree(directory / "maven")


def produce_by_console(kafka: str, topic: str, *lines: str) -> None:
    """Hand lines of headers, key and value to kafka-console-producer, as a user's shell would."""
    properties = {"parse.headers": "true", "parse.key": "true", "headers.key.separator": "=", "null.marker": "NULL"}
    command = [
        java_executable(), "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
        "-cp", f"{kafka_tools()}/*:{kafka_jars()}/*", "org.apache.kafka.tools.ConsoleProducer",
        "--bootstrap-server", kafka, "--topic", topic,
        *(argument for name, value in properties.items() for argument in ("--reader-property", f"{name}={value}")),
    ]  # fmt: skip
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, timeout=PRODUCE_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_messages_of_kafkas_console_producer_are_read(kafka: str, topic: TopicFactory) -> None:
    name = await topic(partitions=1)
    core = "ce_specversion=1.0,ce_id={},ce_source=/shell,ce_type=order.placed"
    more = ",ce_time=2026-03-01T12:30:00Z,ce_fencingtoken=7,content-type=application/json,schema-version=2,x-größe=ä"
    lines = [
        core.format("a-1") + more + '\to-1\t{"total": 12.50}',
        "content-type=application/cloudevents+json\to-2\t"
        '{"specversion":"1.0","id":"a-2","source":"/shell","type":"order.placed","data":{"total":  1}}',
        core.format("a-3") + "\tNULL\tNULL",
    ]
    await asyncio.to_thread(produce_by_console, kafka, name, *lines)

    first, second, third = (cloud_events(record) for record in await read_all(kafka, name, count=3))
    assert (first.event_id, first.key, first.payload) == ("a-1", b"o-1", b'{"total": 12.50}')
    assert (first.fencing_token, first.schema_version, first.time.isoformat()) == (7, 2, "2026-03-01T12:30:00+00:00")
    assert dict(first.headers)["x-größe"] == "ä".encode()
    assert (second.event_id, second.key, second.payload) == ("a-2", b"o-2", b'{"total":  1}')
    assert (third.event_id, third.key, third.payload) == ("a-3", None, None)


# The CloudEvents SDK


async def produce(kafka: str, topic: str, *messages: KafkaMessage) -> None:
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        for message in messages:
            key = message.key.encode() if isinstance(message.key, str) else message.key
            await producer.send_and_wait(topic, message.value, key=key, headers=list(message.headers.items()))


EXTENSIONS: Final = {
    "tenantid": "acme", "runid": "run-1", "step": "charge", "operation": "card", "fencingtoken": 7, "sequence": "42",
    "traceparent": TRACE, "tracestate": "vendor=1", "partitionkey": "o-1",
}  # fmt: skip


def read_alike(messages: Sequence[Message[None]], event: CloudEvent) -> None:
    for message in messages:
        assert (message.event_id, message.source, message.type) == (event.get_id(), event.get_source(), event.get_type())
        assert (message.time, message.key) == (event.get_time(), b"o-1")
        assert (message.tenant_id, message.run_id, message.step, message.operation) == ("acme", "run-1", "charge", "card")
        assert (message.fencing_token, message.sequence) == (7, 42)
        assert (message.traceparent, message.tracestate) == (TRACE, "vendor=1")


@pytest.mark.parametrize(
    ("content_type", "data"),
    [
        ("application/json", {"total": 12.5, "größe": "ü", "none": None}),
        (None, {"total": 1}),
        ("text/plain", "Grüße"),
        ("application/octet-stream", b"\x00\xff"),
    ],
)
async def test_messages_of_the_cloudevents_sdk_are_read_in_both_modes(
    kafka: str, topic: TopicFactory, content_type: str | None, data: Any
) -> None:
    name = await topic(partitions=1)
    declared = {} if content_type is None else {"datacontenttype": content_type}
    event = CloudEvent({"source": "/shop", "type": "order.placed"} | declared | EXTENSIONS, data)
    await produce(kafka, name, to_binary_event(event), to_structured_event(event))

    binary, structured = (cloud_events(record) for record in await read_all(kafka, name, count=2))
    read_alike([binary, structured], event)
    if isinstance(data, dict):
        assert binary.json() == structured.json() == data
        assert structured.content_type == "application/json", "which is what no type means in this format"
    else:
        assert binary.payload == structured.payload == (data if isinstance(data, bytes) else data.encode())
        assert binary.content_type == structured.content_type == content_type


def by_the_sdk(record: Record) -> Any:
    """The record as the CloudEvents SDK reads it; it knows no null value."""
    return from_kafka_event(KafkaMessage(headers=dict(record.headers), key=record.key, value=record.value or b""))


async def test_what_the_relay_publishes_is_read_by_the_cloudevents_sdk(
    database_url: str, kafka: str, topic: TopicFactory, start_relay: RelayFactory
) -> None:
    name = await topic(partitions=1)
    written = Event.json(
        {"total": 12.5, "größe": "ü"}, topic=name, type="order.placed", key="o-1", source="/shop/größe", tenant_id="acme",
        run_id="run-1", step="charge", operation="card", fencing_token=2**63 - 1, traceparent=TRACE, tracestate="vendor=1",
        headers=[("x", b"1")],
    )  # fmt: skip
    plainest = Event(topic=name, type="order.gone", key=b"o-1", payload=None)
    connection = await asyncpg.connect(database_url)
    try:
        async with connection.transaction():
            await enqueue_many(connection, [written, plainest])
    finally:
        await connection.close()
    await start_relay(database_url, kafka, source="the-relay").wait_ready()

    records = await read_all(kafka, name, count=2)
    ours = [cloud_events(record) for record in records]
    theirs = [by_the_sdk(record) for record in records]
    for message, event in zip(ours, theirs, strict=True):
        assert (event.get_specversion(), event.get_id(), event.get_type()) == ("1.0", message.event_id, message.type)
        assert (event.get_source(), event.get_time()) == (message.source, message.time)
        assert event.get_datacontenttype() == message.content_type
        extensions = {
            "sequence": message.sequence, "tenantid": message.tenant_id, "runid": message.run_id, "step": message.step,
            "operation": message.operation, "fencingtoken": message.fencing_token,
        }  # fmt: skip
        assert {key: event.get_extension(key) for key in extensions} == {
            key: None if value is None else str(value) for key, value in extensions.items()
        }
        assert event.get_extension("partitionkey") == "o-1"
    assert [message.event_id for message in ours] == [str(written.event_id), str(plainest.event_id)]
    assert theirs[0].get_data() == ours[0].json() == {"total": 12.5, "größe": "ü"}
    assert (theirs[1].get_data(), ours[1].payload, ours[1].source) == (None, None, "the-relay")


# Debezium's outbox event router, and no convention at all


@pytest.mark.parametrize(
    ("event_id", "event_type", "value"),
    [
        (b"%s", b"OrderCreated", b'{"id": 1, "total": 12.50}'),
        (b'"%s"', b'"OrderCreated"', b'"{\\"id\\": 1, \\"total\\": 12.50}"'),
        (
            b'{"schema":{"type":"string","optional":false},"payload":"%s"}',
            b'{"schema":{"type":"string","optional":true},"payload":"OrderCreated"}',
            b'{"schema":{"type":"string","optional":true,"name":"io.debezium.data.Json","version":1},'
            b'"payload":"{\\"id\\": 1, \\"total\\": 12.50}"}',
        ),
    ],
    ids=["plain text", "JSON", "JSON with schemas"],
)
async def test_records_of_debeziums_outbox_router_are_read(
    kafka: str, topic: TopicFactory, event_id: bytes, event_type: bytes, value: bytes
) -> None:
    name = await topic(partitions=1)
    identity = str(uuid.uuid4())
    headers = {"id": event_id % identity.encode(), "eventType": event_type}
    await produce(kafka, name, KafkaMessage(headers=headers, key=b"1", value=value))

    (record,) = await read_all(kafka, name, count=1)
    message = debezium_outbox()(record)
    assert (message.event_id, message.type, message.key, message.source) == (identity, "OrderCreated", b"1", name)
    assert message.payload == b'{"id": 1, "total": 12.50}'


async def test_records_of_no_convention_are_read_by_what_the_application_says_of_their_topic(
    kafka: str, topic: TopicFactory
) -> None:
    name = await topic(partitions=1)
    await asyncio.to_thread(produce_by_console, kafka, name, "x=1\tk\tclicked", "x=2\tk\tNULL")
    first, second = (
        plain_records(type="click", content_type="text/plain")(record) for record in await read_all(kafka, name, count=2)
    )
    assert (first.event_id, first.type, first.payload, first.headers) == ("", "click", b"clicked", (("x", b"1"),))
    assert (second.offset, second.payload) == (1, None)
