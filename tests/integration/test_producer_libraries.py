"""What only one library can show: modes and states that the shared contract has no word for."""

import asyncio
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import NullPool

import producer_sdk.django
import producer_sdk.psycopg
import producer_sdk.sqlalchemy
from producer_sdk import ConfigurationError, Event, TransactionRequired
from tests.support.writers import DjangoWriter


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def engine(database_url: str) -> Iterator[sqlalchemy.Engine]:
    url = sqlalchemy.make_url(database_url).set(drivername="postgresql+psycopg")
    engine = sqlalchemy.create_engine(url, poolclass=NullPool)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def event(payload: bytes = b"{}") -> Event:
    return Event(topic="orders", type="order.placed", key="o-1", payload=payload)


def count(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT count(*) FROM fencepost.outbox").fetchone()
    assert row is not None
    return int(row[0])


def test_psycopg_in_autocommit_takes_an_event_inside_a_transaction_block(database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        with connection.transaction():
            producer_sdk.psycopg.enqueue(connection, event())
        with pytest.raises(TransactionRequired):
            producer_sdk.psycopg.enqueue(connection, event())
    assert count(database_url) == 1


@pytest.mark.parametrize(
    "options",
    [{"row_factory": dict_row}, {"cursor_factory": psycopg.RawCursor}, {"cursor_factory": psycopg.ClientCursor}],
    ids=["dict_row", "raw", "client"],
)
def test_psycopgs_factories_change_nothing(database_url: str, options: dict[str, Any]) -> None:
    with psycopg.connect(database_url, **options) as connection:
        producer_sdk.psycopg.enqueue(connection, event())
        producer_sdk.psycopg.enqueue_many(connection, [event(), event()])
    assert count(database_url) == 3


def test_psycopgs_pipeline_raises_at_the_call(database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection, connection.pipeline():
        with connection.transaction():
            producer_sdk.psycopg.enqueue(connection, event())
        with connection.transaction(force_rollback=True):
            connection.execute("SET TRANSACTION READ ONLY")
            with pytest.raises(TransactionRequired, match="read-only"):
                producer_sdk.psycopg.enqueue(connection, event())
    assert count(database_url) == 1


def test_a_session_is_flushed_first_so_that_its_rows_hold_their_locks(engine: sqlalchemy.Engine) -> None:
    with Session(engine) as session:
        session.add(Order(id=1))
        producer_sdk.sqlalchemy.enqueue(session, event())
        assert not session.new
    with Session(engine, autoflush=False) as session:
        session.add(Order(id=1))
        producer_sdk.sqlalchemy.enqueue(session, event())
        assert session.new


def test_a_session_whose_flush_failed_is_refused(engine: sqlalchemy.Engine) -> None:
    with Session(engine) as session, session.begin():
        session.add(Order(id=1))
    with Session(engine) as session:
        session.add(Order(id=1))
        with pytest.raises(IntegrityError):
            session.flush()
        with pytest.raises(TransactionRequired, match="roll back") as caught:
            producer_sdk.sqlalchemy.enqueue(session, event())
        assert caught.value.__cause__ is not None


def test_a_connection_set_to_autocommit_is_refused(engine: sqlalchemy.Engine) -> None:
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        pytest.raises(TransactionRequired, match="autocommit"),
    ):
        producer_sdk.sqlalchemy.enqueue(connection, event())


def test_sqlalchemys_error_hides_the_parameters(engine: sqlalchemy.Engine) -> None:
    with engine.connect() as other, engine.connect() as connection:
        other.execute(sqlalchemy.text("LOCK TABLE fencepost.outbox"))
        connection.execute(sqlalchemy.text("SET LOCAL lock_timeout = '1ms'"))
        with pytest.raises(OperationalError) as caught:
            producer_sdk.sqlalchemy.enqueue(connection, event(b"secret"))
    assert "secret" not in str(caught.value)


def test_another_sqlalchemy_driver_is_an_operators_error() -> None:
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.connect() as connection, pytest.raises(ConfigurationError, match=r"postgresql\+psycopg"):
        producer_sdk.sqlalchemy.enqueue(connection, event())
    engine.dispose()


def test_django_without_autocommit_needs_no_atomic_block(database_url: str) -> None:
    from django.db import connections

    writer = DjangoWriter(database_url)
    connection = connections[writer.alias]
    connection.set_autocommit(False)
    producer_sdk.django.enqueue(event(), using=writer.alias)
    connection.commit()
    writer.close()
    assert count(database_url) == 1


def test_django_refuses_a_block_that_is_already_marked_for_rollback(database_url: str) -> None:
    from django.db import transaction

    writer = DjangoWriter(database_url)
    with writer.transaction():
        transaction.set_rollback(True, using=writer.alias)
        with pytest.raises(TransactionRequired, match="roll back"):
            producer_sdk.django.enqueue(event(), using=writer.alias)
    writer.close()


def test_a_pool_of_asyncpg_cannot_stand_for_a_connection(database_url: str) -> None:
    import asyncpg

    import producer_sdk.asyncpg

    async def enqueue_on_a_pool() -> None:
        async with asyncpg.create_pool(database_url, min_size=1, max_size=1) as pool:
            await producer_sdk.asyncpg.enqueue(pool, event())  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="acquire one from the pool"):
        asyncio.run(enqueue_on_a_pool())
    assert count(database_url) == 0
