"""What is taken from a consumer while it runs, a password, a secret, a topic, a broker; it tells of it, and loses nothing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg
import pytest

from consumer_sdk import Consumer, Effect, Message, MessageContext, MessageHandlers, Terminal
from fencepost.errors import ConfigurationError, InvariantViolated
from tests.support.consumers import Ping, Stage, stage
from tests.support.kafka_proxy import KafkaProxy
from tests.support.topics import TopicFactory, create_topic, delete_topic
from tests.support.waiting import eventually

pytestmark = pytest.mark.services

END_SECONDS: Final = 20.0
# A session's silence, and what the client needs after it.
AWAY_SECONDS: Final = 40.0
REDRIVE: Final = "SELECT outcome FROM fencepost.redrive_dead_letter($1, false, 'ana', 'mended')"
# As a disk does that lost a page: nothing that waiting mends.
BROKEN_PAGE: Final = """
CREATE FUNCTION break_page() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'invalid page' USING ERRCODE = 'XX001';
END
$$;
CREATE TRIGGER break_page BEFORE UPDATE ON fencepost.dead_letters FOR EACH ROW
WHEN (OLD.state = 'redriving') EXECUTE FUNCTION break_page();
"""


@pytest.fixture
async def one(database_url: str, kafka: str, topic: TopicFactory) -> AsyncIterator[Stage]:
    async with stage(database_url, kafka, topic) as made:
        yield made


@contextlib.asynccontextmanager
async def user_of_its_own(made: Stage) -> AsyncIterator[str]:
    """The stage's consumers connect as a user of their own from here on; its name."""
    name = f"breaker_{uuid4().hex}"
    await made.connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'old' IN ROLE fencepost_consumer")
    await made.connection.execute(f"GRANT INSERT ON seen TO {name}")
    address = urlsplit(made.database_url)
    made.database_url = urlunsplit(address._replace(netloc=f"{name}:old@{address.netloc.rpartition('@')[2]}"))
    try:
        yield name
    finally:
        await made.connection.execute(f"DROP OWNED BY {name}")
        await made.connection.execute(f"DROP ROLE {name}")


def writing() -> MessageHandlers:
    app = MessageHandlers()
    app.ignore("hello")

    @app.handler("ping", model=Ping, step="write", attempts=1)
    async def write(message: Message[Ping], context: MessageContext) -> None:
        async with context.transaction() as connection:
            await connection.execute("INSERT INTO seen VALUES ($1, $2)", message.event_id, message.value.n)

    @app.batch_handler("batch", model=Ping, step="write_many", attempts=1)
    async def write_many(messages: Sequence[Message[Ping]], connection: "asyncpg.Connection[Any]") -> None:
        rows = [(message.event_id, message.value.n) for message in messages]
        await connection.executemany("INSERT INTO seen VALUES ($1, $2)", rows)

    return app


async def ended(consumer: Consumer, running: "asyncio.Task[None]") -> BaseException | None:
    """What a consumer ends with that nobody has stopped."""
    try:
        await asyncio.wait([running], timeout=END_SECONDS)
        assert running.done(), "the consumer goes on"
        return running.exception()
    finally:
        consumer.stop()
        await asyncio.wait([running])


@pytest.mark.parametrize("kind", ["ping", "batch"])
async def test_a_password_that_was_changed_ends_the_consumer_and_costs_no_message(one: Stage, kind: str) -> None:
    """Connections that are open stay open; handlers' are opened when they are needed, and refused."""
    async with user_of_its_own(one) as user:
        consumer = one.consumer(writing())
        running = asyncio.create_task(consumer.run())
        await one.send({}, type="hello")
        await one.until_committed({0: 1})
        await one.connection.execute(f"ALTER ROLE {user} PASSWORD 'new'")
        for n in range(3):
            await one.send({"n": n}, type=kind, key=f"k-{n}")
        error = await ended(consumer, running)
        assert isinstance(error, ConfigurationError)
        assert "FENCEPOST_DATABASE_URL: the database refused the connection" in str(error)
        assert await one.dead() == []

        await one.connection.execute(f"ALTER ROLE {user} PASSWORD 'old'")
        async with one.running(writing()):
            await one.until_committed({0: 4})
        assert sorted(await one.seen()) == [0, 1, 2]


async def test_redrives_that_fail_in_an_unforeseen_way_end_the_consumer(one: Stage) -> None:
    """Else it would go on without them, and nobody would hear of it."""
    app = MessageHandlers()

    @app.handler("ping", model=Ping, step="refuse")
    async def refuse(message: Message[Ping], context: MessageContext) -> None:
        raise Terminal("refused")

    await one.send({"n": 1})
    consumer = one.consumer(app)
    running = asyncio.create_task(consumer.run())
    await one.until_committed({0: 1})
    (letter,) = await one.dead()
    await one.connection.execute(BROKEN_PAGE)
    assert await one.connection.fetchval(REDRIVE, letter["dead_letter_id"]) == "redriving"
    assert isinstance(await ended(consumer, running), InvariantViolated)


async def test_a_secret_that_is_missing_ends_the_consumer_and_costs_no_message(one: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FENCEPOST_IDEMPOTENCY_SECRETS", raising=False)
    app = MessageHandlers()

    @app.handler("ping", model=Ping, step="call")
    async def call(message: Message[Ping], context: MessageContext) -> None:
        async def send(effect: Effect) -> str:
            return "sent"

        await context.once("mail.send", request=message.value.n, call=send)

    await one.send({"n": 1})
    consumer = one.consumer(app)
    error = await ended(consumer, asyncio.create_task(consumer.run()))
    assert isinstance(error, ConfigurationError)
    assert "FENCEPOST_IDEMPOTENCY_SECRETS is required" in str(error)
    assert await one.dead() == []


async def test_a_consumer_whose_broker_is_away_is_not_ready_and_stops_in_order(one: Stage) -> None:
    """The client's polls just bring nothing then; and at its end it lets out that it has cancelled a fetch."""
    await one.send({"n": 1})
    async with contextlib.AsyncExitStack() as broker:
        proxy = await broker.enter_async_context(KafkaProxy(one.kafka))
        async with one.running(writing(), kafka_bootstrap_servers=proxy.address) as consumer:
            await one.until_committed({0: 1})
            await eventually(lambda: consumer._problems == [], AWAY_SECONDS)
            await broker.aclose()
            await eventually(lambda: consumer._problems == ["kafka: no answer"], AWAY_SECONDS)


async def test_a_topic_that_was_away_for_long_is_consumed_when_it_is_back(one: Stage) -> None:
    """Its partitions are nobody's meanwhile; the client finds them by itself, and not only after its usual five minutes."""
    await one.send({"n": 1})
    async with one.running(writing()) as consumer:
        await one.until_committed({0: 1})
        await delete_topic(one.kafka, one.topic)
        await eventually(lambda: consumer._assigned == frozenset(), AWAY_SECONDS)
        await create_topic(one.kafka, one.topic, 1)
        await one.send({"n": 2})
        await one.until_committed({0: 1}, seconds=60)
    assert await one.seen() == [1, 2]
