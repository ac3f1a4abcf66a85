"""The examples run as they are written, each as a user starts it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from aiokafka import AIOKafkaProducer

from tests.support.topics import TopicFactory

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout


def committed(url: str) -> list[tuple[str, bytes]]:
    with psycopg.connect(url) as connection:
        return connection.execute(
            "SELECT event_id::text, key FROM fencepost.outbox JOIN orders ON key = convert_to('order-' || orders.id, 'UTF8')"
            " ORDER BY outbox.id"
        ).fetchall()


def test_the_producer_writes_orders_with_their_events(database_url: str) -> None:
    command = (sys.executable, str(EXAMPLES / "producer.py"), "--count", "2", "--interval", "0")
    lines = run(*command, FENCEPOST_DATABASE_URL=database_url).splitlines()
    rows = committed(database_url)
    assert [line.split()[-1] for line in lines] == [event_id for event_id, _ in rows]
    assert [key for _, key in rows] == [b"order-1", b"order-2"]


@pytest.mark.skipif(shutil.which("psql") is None, reason="psql is not installed")
def test_psql_writes_an_order_with_its_event(database_url: str) -> None:
    shown = run("psql", database_url, "--quiet", "--file", str(EXAMPLES / "enqueue.sql"))
    [(event_id, key)] = committed(database_url)
    assert event_id in shown
    assert key == b"order-1"


async def test_the_consumer_shows_each_message_once(kafka: str, topic: TopicFactory) -> None:
    name = await topic(partitions=1)
    ids = [str(uuid4()), str(uuid4())]
    producer = AIOKafkaProducer(bootstrap_servers=kafka)
    await producer.start()
    for event_id in (ids[0], ids[0], ids[1]):
        attributes = {"ce_specversion": "1.0", "ce_id": event_id, "ce_source": "shop", "ce_type": "order.placed"}
        headers = [(key, text.encode()) for key, text in attributes.items()]
        await producer.send_and_wait(name, b"{}", headers=headers)
    await producer.send_and_wait(name, b"{}")
    await producer.stop()
    command = (sys.executable, str(EXAMPLES / "consumer.py"), "--count", "2", "--topic", name)
    lines = run(*command, FENCEPOST_KAFKA_BOOTSTRAP_SERVERS=kafka).splitlines()
    assert [line.split()[2] for line in lines if " order.placed " in line] == ids
