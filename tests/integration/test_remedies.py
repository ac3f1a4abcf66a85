"""A remedy of Fencepost's is for what is Fencepost's: what a handler's own statement lacks stays the handler's error; and what a
broker refuses is told by its setting."""

from collections.abc import AsyncIterator
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg
import pytest

from consumer_sdk import MessageHandlers
from consumer_sdk.classification import classify
from consumer_sdk.identity import Identity
from consumer_sdk.run_store import ROLE
from consumer_sdk.transactions import Transactions
from fencepost.errors import ConfigurationError
from tests.support.consumers import Ping, stage
from tests.support.topics import TopicFactory

pytestmark = pytest.mark.services

PING: Final = Identity("0199c0de-0000-7000-8000-000000000001", "", "billing/charge")


@pytest.fixture
async def database(database_url: str) -> AsyncIterator["asyncpg.Connection[Any]"]:
    connection = await asyncpg.connect(database_url)
    await connection.execute("CREATE TABLE bookings (seat text)")
    yield connection
    await connection.close()


@pytest.fixture
async def transactions(database_url: str, database: object) -> AsyncIterator[Transactions]:
    own = Transactions(database_url, role=ROLE, size=1, limit_seconds=10)
    yield own
    own.close()


def recorded(transactions: Transactions) -> Any:
    return transactions.begin_recorded(PING, holder="c/1", limit_seconds=10)


@pytest.mark.parametrize(
    ("statement", "error", "kind"),
    [
        ("INSERT INTO seats VALUES ('13')", asyncpg.UndefinedTableError, "retryable"),
        ("SELECT reserve('13')", asyncpg.UndefinedFunctionError, "retryable"),
        ("CREATE TABLE shop.seats (seat text)", asyncpg.InvalidSchemaNameError, "retryable"),
        ("SET LOCAL ROLE fencepost_consumer; INSERT INTO bookings VALUES ('13')", asyncpg.InsufficientPrivilegeError, "terminal"),
    ],
    ids=["table", "function", "schema", "right"],
)
@pytest.mark.parametrize("begun", [Transactions.begin, recorded], ids=["run", "message"])
async def test_what_a_handler_s_own_statement_lacks_stays_its_own_error(
    transactions: Transactions, begun: Any, statement: str, error: type[asyncpg.PostgresError], kind: str
) -> None:
    """Who is told to migrate Fencepost's schema, or to grant its role, looks in the wrong place."""
    with pytest.raises(error) as raised:
        async with begun(transactions) as connection:
            await connection.execute(statement)
    failure = classify(raised.value)
    assert (failure.kind, failure.code) == (kind, f"sqlstate_{error.sqlstate.lower()}")
    assert failure.error_class.endswith(error.__name__)


async def test_what_fencepost_s_statement_lacks_in_a_handler_s_transaction_is_told_with_its_remedy(
    transactions: Transactions, database: Any
) -> None:
    function = await database.fetchval("SELECT 'fencepost.record_message'::regproc::oid::regprocedure::text")
    await database.execute(f"DROP FUNCTION {function}")
    with pytest.raises(ConfigurationError, match="run `fencepost migrate`"):
        async with recorded(transactions):
            raise AssertionError("nobody knows whether the message is handled")


async def test_a_right_that_fencepost_s_statement_lacks_is_told_with_the_role(database_url: str, database: Any) -> None:
    """It may see the schema, so that the refusal names a function and no schema."""
    name = f"producer_{uuid4().hex}"
    await database.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'x' IN ROLE fencepost_producer")
    address = urlsplit(database_url)
    url = urlunsplit(address._replace(netloc=f"{name}:x@{address.netloc.rpartition('@')[2]}"))
    refused = Transactions(url, role=ROLE, size=1, limit_seconds=10)
    try:
        with pytest.raises(ConfigurationError, match="grant fencepost_consumer"):
            async with recorded(refused):
                raise AssertionError("nobody knows whether the message is handled")
    finally:
        refused.close()
        await database.execute(f"DROP ROLE {name}")


async def test_a_session_time_out_that_the_broker_refuses_is_told_as_such(
    database_url: str, kafka: str, topic: TopicFactory
) -> None:
    app = MessageHandlers()

    @app.handler("ping", model=Ping, step="take")
    async def take(message: Any, context: Any) -> None: ...

    async with stage(database_url, kafka, topic) as one:
        with pytest.raises(ConfigurationError) as raised:
            await one.consumer(app, consumer_session_timeout_seconds=1).run()
    told = str(raised.value)
    for word in ("FENCEPOST_CONSUMER_SESSION_TIMEOUT_SECONDS: the broker refuses 1 s;", "group.min.session.timeout.ms"):
        assert word in told
    for word in ("FENCEPOST_CONSUMER_TOPICS", "FENCEPOST_CONSUMER_GROUP"):
        assert word not in told
