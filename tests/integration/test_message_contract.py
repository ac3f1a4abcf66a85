"""The consumer's tables on PostgreSQL keep the contract that is shipped; a handler's test may bring a connection of its own."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

import asyncpg
import pytest

from consumer_sdk import Message, MessageContext, Retryable
from consumer_sdk.consumer_metrics import ConsumerMetrics
from consumer_sdk.message_handlers import MessageHandlers
from consumer_sdk.message_store import MessageStore
from consumer_sdk.message_writer import MessageWriter
from consumer_sdk.run_store import ROLE
from consumer_sdk.testing import TEST_SECRETS, Done, Memory, event, handle
from consumer_sdk.testing.message_contract import MessageContract, MessageHarness
from fencepost.database import StatementPool
from fencepost.devservices import Services
from fencepost.statements import load_statements
from tests.support.session import SharedServices

_SECONDS: Final = 30.0


@pytest.fixture(scope="module")
def shared_url(services: Services, shared_services: SharedServices) -> Iterator[str]:
    """One database for all: each test has a consumer and events of its own."""
    url = services.create_database(shared_services.template_url)
    yield url
    services.drop_database(url)


class PostgresMessageHarness:
    """Dead letters in hand grow old by moving their rows."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._writers: list[MessageWriter] = []

    @asynccontextmanager
    async def ready(self) -> AsyncIterator["PostgresMessageHarness"]:
        statements = load_statements("consumer_sdk", "messages.sql")
        self._statements = await StatementPool.open(
            self._url, statements, role=ROLE, size=4, timeout_seconds=_SECONDS, server_settings={}
        )  # fmt: skip
        async with asyncpg.create_pool(self._url, min_size=1, max_size=3) as self._pool:
            await self._pool.execute("DROP TABLE IF EXISTS written; CREATE TABLE written (n serial, line text)")
            yield self
        for writer in self._writers:
            await writer.close()
        await self._statements.close()

    def writer(self, app: MessageHandlers, metrics: ConsumerMetrics, *, consumer: str, holder: str) -> MessageWriter:
        writer = MessageWriter.on(
            self._url, concurrency=2, statement_seconds=_SECONDS, longest_attempt_seconds=_SECONDS,
            store=MessageStore(self._statements, holder), consumer=consumer, holder=holder, dead_letter_topic=None,
            reconcilers=app.reconcilers, codec=app.codec, secrets=TEST_SECRETS, metrics=metrics,
        )  # fmt: skip
        self._writers.append(writer)
        return writer

    async def write(self, connection: Any, line: str) -> None:
        await connection.execute("INSERT INTO written (line) VALUES ($1)", line)

    async def written(self) -> Sequence[str]:
        return [row["line"] for row in await self._pool.fetch("SELECT line FROM written ORDER BY n")]

    async def rows(self, run_key: str) -> Sequence[Mapping[str, Any]]:
        return [dict(row) for row in await self._pool.fetch("SELECT * FROM fencepost.effects WHERE run_key = $1", run_key)]

    async def letters(self, consumer: str) -> Sequence[Mapping[str, Any]]:
        query = "SELECT * FROM fencepost.dead_letters WHERE consumer = $1 ORDER BY dead_letter_id"
        return [dict(row) for row in await self._pool.fetch(query, consumer)]

    async def ask(self, dead_letter_id: UUID, *, effects_checked: bool) -> str:
        query = "SELECT outcome FROM fencepost.redrive_dead_letter($1, $2, 'ana', 'test')"
        return str(await self._pool.fetchval(query, dead_letter_id, effects_checked))

    async def advance(self, seconds: float) -> None:
        passed = timedelta(seconds=seconds)
        await self._pool.execute("UPDATE fencepost.dead_letters SET held_until = held_until - $1::interval", passed)


class TestPostgresMessages(MessageContract):
    """The tables on PostgreSQL keep the contract."""

    @pytest.fixture(autouse=True)
    def _database(self, shared_url: str) -> None:
        self.url = shared_url

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[MessageHarness]:
        async with PostgresMessageHarness(self.url).ready() as harness:
            yield harness


async def test_a_handlers_test_may_write_in_a_database_of_its_own(database_url: str) -> None:
    """Inside a transaction that the test undoes in the end, as such tests like to."""
    app, errors = MessageHandlers(), [Retryable("busy")]

    @app.handler("order.placed", step="store")
    async def store(placed: Message[Any], context: MessageContext) -> None:
        async with context.transaction() as connection:
            await connection.execute("INSERT INTO orders VALUES ($1)", placed.value)
            if errors:
                raise errors.pop()

    connection = await asyncpg.connect(database_url)
    undone = connection.transaction()
    await undone.start()
    await connection.execute("CREATE TABLE orders (name text PRIMARY KEY)")
    handled = await handle(app, event("order.placed", "o-1"), memory=Memory(), connection=connection)
    assert await connection.fetchval("SELECT count(*) FROM orders") == 0
    assert (await handled.again()).outcome == Done("handled")
    assert await connection.fetchval("SELECT name FROM orders") == "o-1"
    await undone.rollback()
    await connection.close()
