"""What becomes of messages that cannot be handled: dead letters, retries, outages, poison in a batch, redrives."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any

import asyncpg
import pytest
from pydantic import BaseModel

from consumer_sdk import Message, MessageContext, MessageHandlers, RetryLater, Terminal, plain_records
from tests.support.consumers import SECRETS, Stage, stage
from tests.support.raw_records import record_batch, write_batch
from tests.support.tcp_proxy import TcpProxy
from tests.support.topics import TopicFactory, create_topic, delete_topic
from tests.support.waiting import eventually

pytestmark = pytest.mark.services


class Ping(BaseModel):
    """What is sent."""

    n: int


@pytest.fixture
async def one(database_url: str, kafka: str, topic: TopicFactory) -> AsyncIterator[Stage]:
    async with stage(database_url, kafka, topic) as made:
        yield made


def noting(*, tombstones: bool = False, version: int | None = None) -> tuple[MessageHandlers, list[int | None]]:
    """An app that notes what it is given; None for a tombstone."""
    app, noted = MessageHandlers(), list[int | None]()

    @app.handler("ping", model=Ping, step="note", tombstones=tombstones, version=version)
    async def note(message: Message[Ping | None], context: MessageContext) -> None:
        noted.append(None if message.value is None else message.value.n)

    return app, noted


async def test_bytes_that_cannot_be_read_are_a_dead_letter_between_two_handled_messages(one: Stage) -> None:
    """CONSUME-12: with the original bytes, headers and place; counted; the offset moves past all."""
    app, noted = noting()
    await one.send({"n": 1})
    await one.send_record(b"\xff\x00\xfe", key="odd", headers=[("who", "me"), ("ce_id", "x")])
    await one.send({"n": 2})
    async with one.running(app) as consumer:
        await one.until_committed({0: 3})
        reasons = consumer._metrics.registry.get_sample_value("fencepost_consumer_dead_letters_total", {"reason": "undecodable"})
    (letter,) = await one.dead()
    assert noted == [1, 2]
    assert reasons == 1
    assert (letter["payload"], letter["key"], letter["offset"], letter["topic"]) == (b"\xff\x00\xfe", b"odd", 1, one.topic)
    assert (letter["header_names"], letter["header_values"]) == ([b"who", b"ce_id"], [b"me", b"x"])


@pytest.mark.parametrize("tombstones", [False, True])
async def test_null_values_and_null_keys_take_the_documented_path(one: Stage, tombstones: bool) -> None:
    """CONSUME-13: without a handler of tombstones a dead letter, with one it is handled; a null key is nothing special."""
    app, noted = noting(tombstones=tombstones)
    await one.send(None, key="a")
    await one.send({"n": 1}, key=None)
    attributes = [("ce_specversion", b"1.0"), ("ce_id", b"t"), ("ce_source", b"s"), ("ce_type", b"ping")]
    await write_batch(one.kafka, one.topic, 0, bytes(record_batch([(None, None, attributes)])))
    async with one.running(app):
        await one.until_committed({0: 3})
    assert Counter(noted) == ({None: 2, 1: 1} if tombstones else {1: 1})
    assert [letter["reason"] for letter in await one.dead()] == ([] if tombstones else ["tombstone", "tombstone"])


async def test_what_does_not_fit_is_an_outcome_and_later_messages_flow(one: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    """CONSUME-14: a missing field, an unknown version, an unknown type: one dead letter each, no payload in the log."""
    app, noted = noting(version=1)
    await one.send({"secret": "s3cr3t"})
    await one.send({"n": 1}, headers={"schema-version": "2"})
    await one.send({"n": 1}, type="pong")
    await one.send({"n": 7})
    async with one.running(app):
        await one.until_committed({0: 4})
    assert noted == [7]
    assert [letter["reason"] for letter in await one.dead()] == ["invalid_payload", "unknown_version", "unknown_type"]
    assert "s3cr3t" not in "".join(capsys.readouterr())


async def test_types_that_are_ignored_are_passed_over(one: Stage) -> None:
    app, noted = noting()
    app.ignore("pong")
    await one.send({"n": 1}, type="pong")
    await one.send({"n": 2})
    async with one.running(app):
        await one.until_committed({0: 2})
    assert noted == [2]
    assert await one.dead() == []


async def test_a_failing_message_has_its_attempts_and_others_do_not_wait_for_them(one: Stage) -> None:
    """CONSUME-19: five attempts, one dead letter, the key's next message behind it; another key is done long before."""
    app, order = MessageHandlers(), list[str]()

    @app.handler("ping", model=Ping, step="fail", attempts=5)
    async def failing(message: Message[Ping], context: MessageContext) -> None:
        order.append(f"{message.value.n}/{context.attempt}")
        if message.value.n == 0:
            raise RetryError

    class RetryError(Exception):
        """Nobody knows it."""

    await one.send({"n": 0}, key="a")
    await one.send({"n": 1}, key="a")
    await one.send({"n": 2}, key="b")
    async with one.running(app):
        await one.until_committed({0: 3})
    (letter,) = await one.dead()
    assert (letter["reason"], letter["attempts"]) == ("attempts_exhausted", 5)
    assert order == ["0/1", "2/1", "0/2", "0/3", "0/4", "0/5", "1/1"]


async def test_retry_later_spends_no_attempt_and_has_an_end(one: Stage) -> None:
    app, attempts = MessageHandlers(), list[int]()

    @app.handler("ping", step="later", attempts=1, patience_seconds=0.5)
    async def later(message: Message[Any], context: MessageContext) -> None:
        attempts.append(context.attempt)
        raise RetryLater("not_now", seconds=0.2)

    await one.send({"n": 0})
    async with one.running(app):
        await one.until_committed({0: 1})
    assert set(attempts) == {1}
    assert len(attempts) > 1
    assert [letter["reason"] for letter in await one.dead()] == ["patience_exhausted"]


async def test_an_outage_of_the_database_is_nobodys_failure(one: Stage) -> None:
    """CONSUME-20: no attempt, no dead letter, no offset moved, the member stays; then each message is handled once."""
    app, calls = MessageHandlers(), Counter[int]()

    @app.handler("ping", model=Ping, step="write", attempts=1)
    async def write(message: Message[Ping], context: MessageContext) -> None:
        async with context.transaction() as connection:
            await connection.execute("INSERT INTO seen VALUES ($1, $2)", message.event_id, message.value.n)
            calls[context.attempt] += 1

    async with TcpProxy(one.database_url) as proxy:
        settings = {"database_url": proxy.url, "consumer_statement_seconds": 1}
        async with one.running(app, **settings) as consumer:
            await one.send({"n": 0})
            await one.until_committed({0: 1})
            await proxy.refuse()
            for number in range(1, 6):
                await one.send({"n": number}, key=f"k{number}")
            registry = consumer._metrics.registry
            await eventually(
                lambda: (registry.get_sample_value("fencepost_consumer_database_errors_total", {"statement": "known"}) or 0) >= 2,
                30,
            )
            assert await one.committed() == {0: 1}
            await proxy.accept()
            await one.until_committed({0: 6})
            assert registry.get_sample_value("fencepost_consumer_rebalances_total") == 1
    assert await one.connection.fetchval("SELECT count(*) FROM seen") == 6
    assert await one.dead() == []
    assert set(calls) == {1}


async def test_poison_in_a_batch_of_100_costs_only_itself(one: Stage) -> None:
    """CONSUME-22: number 37 violates a constraint; 99 effects, one dead letter, nobody else's attempt."""
    await one.connection.execute("ALTER TABLE seen ADD CHECK (n <> 37)")
    app, sizes = MessageHandlers(), list[int]()

    @app.batch_handler("ping", model=Ping, step="write", most=100)
    async def write(messages: Sequence[Message[Ping]], connection: "asyncpg.Connection[Any]") -> None:
        sizes.append(len(messages))
        await connection.executemany("INSERT INTO seen VALUES ($1, $2)", [(one.event_id, one.value.n) for one in messages])

    for number in range(100):
        await one.send({"n": number}, key=f"k{number % 7}")
    async with one.running(app):
        await one.until_committed({0: 100})
    rows = await one.connection.fetch("SELECT n FROM seen")
    (letter,) = await one.dead()
    assert sorted(row["n"] for row in rows) == [number for number in range(100) if number != 37]
    assert (letter["offset"], letter["reason"], letter["attempts"]) == (37, "rejected", 1)
    assert max(sizes) > 10


async def test_a_batch_keeps_the_order_of_each_key_when_one_is_tried_again(one: Stage) -> None:
    app, written = MessageHandlers(), defaultdict[bytes | None, list[int]](list)
    failed: list[int] = []

    @app.batch_handler("ping", model=Ping, step="write", attempts=3)
    async def write(messages: Sequence[Message[Ping]], connection: Any) -> None:
        if not failed and any(message.value.n == 10 for message in messages):
            if len(messages) == 1:
                failed.append(10)
            raise RuntimeError("passing")
        for message in messages:
            written[message.key].append(message.value.n)

    for number in range(40):
        await one.send({"n": number}, key=f"k{number % 4}")
    async with one.running(app):
        await one.until_committed({0: 40})
    assert failed == [10]
    assert sum(len(numbers) for numbers in written.values()) >= 40
    assert all([n for place, n in enumerate(ns) if n not in ns[:place]] == sorted(set(ns)) for ns in written.values())


async def test_a_redrive_skips_what_was_done_and_does_the_rest(one: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """CONSUME-25, LEDGER-11: asked for twice at once, by two consumers: the credit exists once, the rest runs once."""
    monkeypatch.setenv("FENCEPOST_IDEMPOTENCY_SECRETS", SECRETS)
    app, calls, mended = MessageHandlers(), list[str](), asyncio.Event()

    @app.handler("ping", model=Ping, step="credit")
    async def credit(message: Message[Ping], context: MessageContext) -> None:
        async def call(effect: Any) -> None:
            calls.append("credit")

        await context.once("bank.credit", request=message.value, call=call)
        if not mended.is_set():
            raise Terminal("broken")
        async with context.transaction() as connection:
            await connection.execute("INSERT INTO seen VALUES ($1, $2)", message.event_id, message.value.n)

    event = await one.send({"n": 1})
    async with one.running(app), one.running(app, consumer_group=f"{one.topic}-2", consumer_name=one.topic):
        await one.until_committed({0: 1})
        (letter,) = await one.dead()
        mended.set()
        asked = "SELECT outcome FROM fencepost.redrive_dead_letter($1, false, 'me', 'mended')"
        outcomes = [await one.connection.fetchval(asked, letter["dead_letter_id"]) for _ in range(2)]
        await eventually(lambda: _state_is(one, "redriven"))
        await one.send({"n": 1}, event_id=event)
        await one.until_committed({0: 2})
    assert outcomes == ["redriving", "not_dead"]
    assert calls == ["credit"]
    assert await one.connection.fetchval("SELECT count(*) FROM seen") == 1
    assert (await one.outcomes())[event] == "succeeded"


async def test_a_redrive_that_fails_is_dead_once_more(one: Stage) -> None:
    app = MessageHandlers()

    @app.handler("ping", step="fail", attempts=1)
    async def failing(message: Message[Any], context: MessageContext) -> None:
        raise Terminal("still_broken" if message.offset else "broken")

    await one.send({"n": 1})
    async with one.running(app):
        await one.until_committed({0: 1})
        (letter,) = await one.dead()
        await one.connection.execute("SELECT fencepost.redrive_dead_letter($1, false, 'me', 'why')", letter["dead_letter_id"])
        await eventually(lambda: _state_is(one, "dead"))
    (letter,) = await one.dead()
    assert (letter["attempts"], letter["redrives"], letter["error_code"]) == (2, 1, "broken")


async def test_a_dead_letter_and_its_outbox_row_are_one_commit(one: Stage) -> None:
    """X7: where the outbox row cannot be written, there is no dead letter and no outcome; the offset does not move."""
    app, _ = noting()
    dead_letters = f"{one.topic}-dead"
    await create_topic(one.kafka, dead_letters, 1)
    await one.connection.execute(
        "ALTER TABLE fencepost.outbox ADD CONSTRAINT none CHECK (event_type <> 'fencepost.message_dead_lettered')"
    )
    await one.send({"m": 1})
    async with one.running(app, consumer_dead_letter_topic=dead_letters) as consumer:
        registry = consumer._metrics.registry
        errors = "fencepost_consumer_messages_total"
        await eventually(lambda: (registry.get_sample_value(errors, {"type": "ping", "outcome": "postponed"}) or 0) >= 1)
        assert (await one.dead(), await one.outcomes(), await one.committed()) == ([], {}, {0: 0})
        await one.connection.execute("ALTER TABLE fencepost.outbox DROP CONSTRAINT none")
        await one.until_committed({0: 1})
    row = await one.connection.fetchrow("SELECT * FROM fencepost.outbox")
    assert row is not None
    headers = dict(zip(row["header_names"], row["header_values"], strict=True))
    assert (row["topic"], row["key"], row["payload"]) == (dead_letters, b"k", b'{"m": 1}')
    assert (headers["dead-letter-reason"], headers["original-ce_type"]) == (b"invalid_payload", b"ping")


async def test_a_topic_that_was_made_anew_is_read_from_its_beginning(one: Stage) -> None:
    """Offsets of the old one mean nothing, and records that are known by their place are new ones."""
    app, noted = MessageHandlers(), list[object]()
    app.adapter(one.topic, plain_records(type="ping", source="legacy"))

    @app.handler("ping", step="note")
    async def note(message: Message[Any], context: MessageContext) -> None:
        noted.append(message.value)

    for number in range(3):
        await one.send_record(b'{"n": %d}' % number)
    async with one.running(app):
        await one.until_committed({0: 3})
    await delete_topic(one.kafka, one.topic)
    await create_topic(one.kafka, one.topic, 1)
    for number in range(10, 15):
        await one.send_record(b'{"n": %d}' % number)
    async with one.running(app):
        await one.until_committed({0: 5})
    assert noted == [{"n": number} for number in (0, 1, 2, 10, 11, 12, 13, 14)]


async def _state_is(made: Stage, state: str) -> bool:
    return [letter["state"] for letter in await made.dead()] == [state]
