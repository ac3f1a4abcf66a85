"""The fixtures keep what their names promise: own databases, own topics, everything read back."""

import asyncio

import asyncpg
import psycopg
import pytest
from aiokafka import AIOKafkaProducer

from fencepost.devservices import Services, ServicesError
from tests.support.records import read_all
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually


@pytest.mark.parametrize("_", range(2))
async def test_each_test_has_a_migrated_database_of_its_own(database_url: str, _: int) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        assert await connection.fetchval("SELECT to_regclass('fencepost.outbox') IS NOT NULL")
        await connection.execute("CREATE TABLE only_here (id int)")
    finally:
        await connection.close()


def test_a_database_with_a_prepared_transaction_and_a_connection_can_be_dropped(services: Services) -> None:
    url = services.create_database()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int)")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO t VALUES (1)")
        connection.execute("PREPARE TRANSACTION 'left open'")
        services.drop_database(url)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")


def test_what_the_statements_of_a_dropped_database_cost_is_forgotten(services: Services) -> None:
    """Or the databases of a run would push one another's rarest statements out of the server's table."""
    counted = "SELECT count(*) > 0 FROM pg_stat_statements WHERE dbid = %s"
    with psycopg.connect(services.database_url, autocommit=True) as monitor:
        if monitor.execute("SELECT to_regclass('pg_stat_statements') IS NULL").fetchone() == (True,):
            pytest.skip("this server counts no statements")
        url = services.create_database()
        with psycopg.connect(url, autocommit=True) as connection:
            row = connection.execute("SELECT oid FROM pg_database WHERE datname = current_database()").fetchone()
        assert monitor.execute(counted, row).fetchone() == (True,)
        services.drop_database(url)
        assert monitor.execute(counted, row).fetchone() == (False,)


async def test_a_topic_is_read_back_whole_and_in_partition_order(kafka: str, topic: TopicFactory) -> None:
    name = await topic(partitions=3)
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        for number in range(9):
            await producer.send_and_wait(name, str(number).encode(), partition=number % 3)

    records = await read_all(kafka, name, count=9)

    assert [record.value for record in records] == [b"0", b"3", b"6", b"1", b"4", b"7", b"2", b"5", b"8"]


async def test_an_empty_topic_reads_as_no_records(kafka: str, topic: TopicFactory) -> None:
    assert await read_all(kafka, await topic(partitions=2)) == []


def test_shared_services_cannot_be_stopped_by_a_test(services: Services) -> None:
    with pytest.raises(ServicesError, match="own_services"):
        _ = services.broker
    with pytest.raises(ServicesError, match="own_services"):
        _ = services.postgres


async def test_eventually_returns_the_first_true_result() -> None:
    results = iter([0, None, 7])
    assert await eventually(lambda: next(results)) == 7


async def test_eventually_fails_with_the_last_result_when_time_is_over() -> None:
    async def never() -> str:
        await asyncio.sleep(0)
        return ""

    with pytest.raises(AssertionError, match=r"never: not true within 0.2 s, last result ''"):
        await eventually(never, 0.2)
