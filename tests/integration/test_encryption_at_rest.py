"""A database that routes and a worker write by an encrypting codec: nothing in it shows what was said."""

import asyncio
import json
import secrets
import uuid
from collections.abc import AsyncIterator
from typing import Any, Final

import asyncpg
import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from consumer_sdk import (
    Effect,
    Handlers,
    Message,
    MessageContext,
    MessageHandlers,
    Terminal,
    Worker,
    WorkflowContext,
    WorkflowFailure,
    load_worker_settings,
)  # fmt: skip
from examples.encrypting_codec import EncryptingCodec
from producer_sdk.http import Durable, Principal, load_route_settings
from tests.support.consumers import SECRETS as CONSUMERS_SECRETS
from tests.support.consumers import stage
from tests.support.dumps import everything_stored
from tests.support.routes import SECRETS
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

MARKER: Final = "strictly-between-us"
FIRST, SECOND = secrets.token_bytes(32), secrets.token_bytes(32)
OLD: Final = EncryptingCodec({1: FIRST}, write=1)
BOTH: Final = EncryptingCodec({1: FIRST, 2: SECOND}, write=2)
NEW: Final = EncryptingCodec({2: SECOND}, write=2)


class Secret(BaseModel):
    text: str


class Refused(WorkflowFailure):
    """Mapped to 422."""


async def everybody() -> Principal:
    return Principal("acme", "ada")


class Service:
    """A server and a worker that share a codec."""

    def __init__(self, database_url: str, codec: EncryptingCodec) -> None:
        self.database_url = database_url
        settings = load_route_settings({"database_url": database_url})
        self.durable = Durable(principal=everybody, codec=codec, settings=settings, secrets=SECRETS)
        self.app = FastAPI()
        workflow = self.durable.workflow("keep", failures={Refused: 422})(_keep)
        router = self.durable.router()
        router.post("/kept")(self.durable.route(workflow, name="kept")(_same))
        router.post("/streamed")(self.durable.stream(workflow, name="streamed")(_same))
        self.app.include_router(router)
        self.durable.install(self.app)

    async def ask(self, *requests: tuple[str, str, str]) -> list[httpx.Response]:
        """The answers to requests of path, key and text, one after the other."""
        handlers = Handlers()
        handlers.include(self.durable)
        chosen = {"database_url": self.database_url, "worker_http_port": 0, "worker_stop_grace_seconds": 1}
        worker = Worker(handlers, load_worker_settings(chosen), secrets=SECRETS)
        working = asyncio.create_task(worker.run())
        try:
            transport = httpx.ASGITransport(self.app)
            async with (
                self.app.router.lifespan_context(self.app),
                httpx.AsyncClient(transport=transport, base_url="http://service", timeout=30) as client,
            ):
                await eventually(lambda: self.durable.runtime is not None and self.durable.runtime.watch.listening)
                return [
                    await client.post(path, headers={"idempotency-key": key}, json={"text": text}) for path, key, text in requests
                ]
        finally:
            worker.stop()
            await working


async def _keep(context: WorkflowContext, secret: Secret) -> Secret:
    async def said(text: str) -> str:
        await context.publish({"said": text})
        return text

    async def call(_effect: Effect) -> str:
        return secret.text

    await context.step("say", said, secret.text)
    await context.once("provider.keep", request=secret.text, call=call)
    await context.save({"seen": secret.text})
    if secret.text.startswith("no"):
        raise Refused(details={"text": secret.text})
    return secret


async def _same(secret: Secret) -> Secret:
    return secret


@pytest.fixture
async def connection(database_url: str) -> "AsyncIterator[asyncpg.Connection[Any]]":
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


async def test_nothing_that_is_stored_shows_what_was_said(database_url: str, connection: "asyncpg.Connection[Any]") -> None:
    """SEC-9, S44: input, chunk, step, effect, checkpoint, result and failure, through routes and a worker."""
    answers = await Service(database_url, OLD).ask(
        ("/kept", "k-1", MARKER), ("/streamed", "k-2", MARKER), ("/kept", "k-3", f"no, {MARKER}")
    )
    assert [answer.status_code for answer in answers] == [200, 200, 422]
    assert all(MARKER in answer.text for answer in answers)
    stored = await everything_stored(connection)
    assert "provider.keep" in stored
    assert "jobs.checkpoint" in stored
    assert MARKER not in stored


async def test_a_message_that_was_given_up_stays_as_encrypted_as_it_came(
    database_url: str, kafka: str, topic: TopicFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEC-9: the dead letter, its published copy, and the effect that was before it."""
    monkeypatch.setenv("FENCEPOST_IDEMPOTENCY_SECRETS", CONSUMERS_SECRETS)
    app = MessageHandlers(codec=OLD)
    read: list[object] = []

    @app.handler("ping", model=Secret, step="keep")
    async def keep(message: Message[Secret], context: MessageContext) -> None:
        async def call(_effect: Effect) -> str:
            return message.value.text

        read.append(await context.once("provider.keep", request=message.value.text, call=call))
        raise Terminal("refused")

    attributes = [("ce_specversion", "1.0"), ("ce_id", str(uuid.uuid4())), ("ce_source", "test"), ("ce_type", "ping")]
    published = await topic(partitions=1)
    async with stage(database_url, kafka, topic) as made:
        async with made.running(app, consumer_dead_letter_topic=published):
            await made.send_record(OLD.encode(json.dumps({"text": MARKER}).encode()), headers=attributes)
            await made.until_committed({0: 1})
        stored = await everything_stored(made.connection)
        (letter,) = await made.dead()
    assert read == [MARKER]
    assert json.loads(BOTH.decode(letter["payload"])) == {"text": MARKER}
    assert "fencepost.outbox.payload" in stored
    assert MARKER not in stored


async def test_after_a_key_was_exchanged_old_answers_are_replayed_and_new_ones_are_made(database_url: str) -> None:
    """SEC-9: rows of both keys are readable; without the old key its answers are not, and say so."""
    [first] = await Service(database_url, OLD).ask(("/kept", "k-1", MARKER))
    replayed, new = await Service(database_url, BOTH).ask(("/kept", "k-1", MARKER), ("/kept", "k-2", MARKER))
    assert (first.status_code, replayed.content, new.status_code) == (200, first.content, 200)
    assert replayed.headers["idempotent-replayed"] == "true"
    lost, kept = await Service(database_url, NEW).ask(("/kept", "k-1", MARKER), ("/kept", "k-2", MARKER))
    assert (lost.status_code, json.loads(lost.content)["code"]) == (500, "fencepost.durable_route.result_unavailable")
    assert kept.content == new.content
