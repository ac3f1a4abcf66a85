"""What comes in: records of every shape, read and matched with handlers. None of them stops the partition, and none is lost."""

import asyncio
import base64
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from pydantic import BaseModel

from consumer_sdk import Message, MessageContext, MessageHandlers, Record
from tests.support.consumers import SECRETS, Ping, Stage, sample, stage
from tests.support.topics import TopicFactory

pytestmark = pytest.mark.services

DAY_MS = 86_400_000
UUID = "0b9d4d2e-5f0a-4d8e-9c61-0a6f5a1f2f10"


@pytest.fixture
async def one(database_url: str, kafka: str, topic: TopicFactory) -> AsyncIterator[Stage]:
    async with stage(database_url, kafka, topic) as made:
        yield made


class Base64:
    """A codec that can be seen in the database."""

    def encode(self, payload: bytes) -> bytes:
        return base64.b64encode(payload)

    def decode(self, payload: bytes) -> bytes:
        return base64.b64decode(payload, validate=True)


class Priced(BaseModel):
    """What the stricter of two handlers takes."""

    n: int
    price: int


def noting(app: MessageHandlers, step: str = "note", **options: Any) -> list[Any]:
    """Register a handler that notes the values it is given."""
    noted: list[Any] = []

    async def note(message: Message[Any], _context: MessageContext) -> None:
        noted.append(message.value)

    app.handler("ping", step=step, **options)(note)
    return noted


def reasons(letters: list[Any]) -> list[tuple[str, str]]:
    return [(letter["reason"], letter["error_code"]) for letter in letters]


async def test_payloads_go_through_the_codec_in_and_results_out(one: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEPOST_IDEMPOTENCY_SECRETS", SECRETS)
    app, given = MessageHandlers(codec=Base64()), list[object]()

    @app.handler("ping", model=Ping, step="charge")
    async def charge(message: Message[Ping], context: MessageContext) -> None:
        async def call(_effect: Any) -> str:
            return "receipt"

        given.append((message.value.n, await context.once("card.charge", request=message.value, call=call)))

    attributes = [("ce_specversion", "1.0"), ("ce_id", "e"), ("ce_source", "test"), ("ce_type", "ping")]
    await one.send_record(base64.b64encode(b'{"n": 7}'), headers=attributes)
    await one.send({"n": 8})
    async with one.running(app):
        await one.until_committed({0: 2})
    assert given == [(7, "receipt")]
    stored = await one.connection.fetchval("SELECT result FROM fencepost.effects WHERE operation = 'card.charge'")
    assert base64.b64decode(stored) == b'"receipt"'
    assert reasons(await one.dead()) == [("undecodable", "codec_failed")]
    assert (await one.dead())[0]["payload"] == b'{"n": 8}'


async def test_of_two_handlers_one_can_refuse_what_the_other_takes(one: Stage) -> None:
    """The offset moves when both have their outcome; the dead letter is the refusing one's alone."""
    app = MessageHandlers()
    lenient, strict = noting(app, "lenient", model=Ping), noting(app, "strict", model=Priced)
    event = await one.send({"n": 1})
    await one.send({"n": 2, "price": 3})
    async with one.running(app):
        await one.until_committed({0: 2})
    (letter,) = await one.dead()
    assert (lenient, strict) == ([Ping(n=1), Ping(n=2)], [Priced(n=2, price=3)])
    assert (letter["run_key"], letter["step"], letter["reason"]) == (event, f"{one.topic}/strict", "invalid_payload")


async def test_the_offset_waits_for_each_handler_of_a_message(one: Stage) -> None:
    app, leave = MessageHandlers(), asyncio.Event()
    noted = noting(app, "quick")

    @app.handler("ping", step="slow")
    async def slow(_message: Message[Any], _context: MessageContext) -> None:
        assert noted == [{"n": 1}]
        await leave.wait()

    await one.send({"n": 1})
    async with one.running(app):
        await one.until_committed({0: 0})
        leave.set()
        await one.until_committed({0: 1})
    assert noted == [{"n": 1}]


async def test_a_handler_of_the_version_comes_before_one_of_any(one: Stage) -> None:
    app = MessageHandlers()
    any_version, second = noting(app, "any"), noting(app, "any", version=2)
    for version in ("1", "2", "3"):
        await one.send({"v": version}, headers={"schema-version": version})
    await one.send({"v": None})
    async with one.running(app):
        await one.until_committed({0: 4})
    assert ([value["v"] for value in any_version], [value["v"] for value in second]) == (["1", "3", None], ["2"])


async def test_every_type_without_a_handler_can_be_ignored(one: Stage) -> None:
    """They are counted, and leave no row; a version without a handler is a dead letter all the same."""
    app = MessageHandlers()
    noted = noting(app, version=1)
    app.ignore("*")
    await one.send({}, type="pong")
    await one.send({}, type="fencepost.run_queued")
    await one.send({"n": 1}, headers={"schema-version": "1"})
    await one.send({"n": 2}, headers={"schema-version": "2"})
    async with one.running(app) as consumer:
        await one.until_committed({0: 4})
        assert sample(consumer, "fencepost_consumer_messages_total", type="(other)", outcome="ignored") == 2
    assert noted == [{"n": 1}]
    assert reasons(await one.dead()) == [("unknown_version", "no_handler_for_version")]
    assert len(await one.outcomes()) == 2


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("ce_specversion", "1.0"), ("ce_source", "s"), ("ce_type", "ping")],
        [("ce_specversion", "0.1"), ("ce_id", "e"), ("ce_source", "s"), ("ce_type", "ping")],
        [("ce_specversion", "1.0"), ("ce_id", ""), ("ce_source", "s"), ("ce_type", "ping")],
        [("ce_specversion", "1.0"), ("ce_id", "e"), ("ce_id", "f"), ("ce_source", "s"), ("ce_type", "ping")],
        [("ce_specversion", "1.0"), ("ce_id", "e"), ("ce_source", "s"), ("ce_type", "ping"), ("schema-version", "two")],
    ],
    ids=["none", "no id", "another specification", "an empty id", "two ids", "no number"],
)
async def test_headers_that_make_no_message_are_a_dead_letter_between_two_messages(
    one: Stage, headers: list[tuple[str, str]]
) -> None:
    """CONSUME-12: known by its place, so that it is given up once, however often it is read."""
    app = MessageHandlers()
    noted = noting(app)
    await one.send({"n": 1})
    await one.send_record(b"{}", headers=headers)
    await one.send({"n": 2})
    async with one.running(app):
        await one.until_committed({0: 3})
    async with one.running(app, consumer_group=f"{one.topic}-again", consumer_name=one.topic):
        await one.until_committed({0: 3}, f"{one.topic}-again")
    assert noted == [{"n": 1}, {"n": 2}]
    (letter,) = await one.dead()
    assert (letter["reason"], letter["error_code"], letter["attempts"]) == ("undecodable", "not_a_message", 0)
    assert letter["header_values"] == [value.encode() for _, value in headers]


async def test_an_adapter_that_fails_is_no_end_of_the_consumer(one: Stage) -> None:
    app, noted = MessageHandlers(), list[object]()

    def broken(_record: Record) -> Message[None]:
        raise KeyError("secret")

    app.adapter(one.topic, broken)
    noted = noting(app)
    await one.send({"n": 1})
    async with one.running(app):
        await one.until_committed({0: 1})
    (letter,) = await one.dead()
    assert (letter["reason"], letter["error_class"], letter["error_code"]) == ("undecodable", "KeyError", "adapter_failed")
    assert noted == []


async def test_who_a_message_is(one: Stage) -> None:
    """CONSUME-9, CONSUME-16: a UUID wherever it comes from, another id with its source, each of them within its tenant."""
    app = MessageHandlers()
    noted = noting(app)
    sent = [
        (UUID, "s", "acme"), (UUID, "t", "acme"),  # one
        ("e", "s", "acme"), ("e", "t", "acme"), ("e", "s", "acme"),  # two
        ("e/t", "s", "acme"), ("t", "s/e", "acme"),  # two
        ("e", "s", "umbrella"), (UUID, "s", "umbrella"),  # two
    ]  # fmt: skip
    for number, (event, source, tenant) in enumerate(sent):
        await one.send(number, event_id=event, headers={"ce_source": source, "ce_tenantid": tenant})
    async with one.running(app):
        await one.until_committed({0: len(sent)})
    assert noted == [0, 2, 3, 5, 6, 7, 8]


async def test_a_message_that_the_ledger_may_have_forgotten_is_not_handled(one: Stage) -> None:
    """CONSUME-17: an error, not a second effect. One that is young enough is handled."""
    app = MessageHandlers()
    noted = noting(app)
    now = int(time.time() * 1000)
    producer = AIOKafkaProducer(bootstrap_servers=one.kafka)
    await producer.start()
    for age in (3, 1):
        attributes = [("ce_specversion", b"1.0"), ("ce_id", str(age).encode()), ("ce_source", b"s"), ("ce_type", b"ping")]
        await producer.send_and_wait(one.topic, b"%d" % age, timestamp_ms=now - age * DAY_MS, headers=attributes)
    await producer.stop()
    async with one.running(app, ledger_retention_days=2, consumer_replay_days=0, consumer_retention_check="warn"):
        await one.until_committed({0: 2})
    assert noted == [1]
    assert reasons(await one.dead()) == [("too_old", "older_than_ledger")]


async def test_payloads_of_no_model_are_json_or_a_dead_letter(one: Stage) -> None:
    app = MessageHandlers()
    noted = noting(app)
    attributes = [("ce_specversion", "1.0"), ("ce_source", "test"), ("ce_type", "ping")]
    for number, payload in enumerate([b"{", b"\xff", b"", b"null", b"NaN", b"[" * 100_000, b"1"]):
        await one.send_record(payload, headers=[*attributes, ("ce_id", str(number))])
    async with one.running(app):
        await one.until_committed({0: 7})
    assert noted[0] is None
    assert noted[-1] == 1
    assert {reason for reason, _ in reasons(await one.dead())} == {"invalid_payload"}
    assert len(noted) + len(await one.dead()) == 7
