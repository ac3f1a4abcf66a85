"""Nothing that is emitted shows what was said: every logger at its most verbose, every span, every metric, every problem.

Each secret of these tests is a marker, and all that came out is searched for the markers.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import httpx
import pytest
import structlog
import uvicorn
from fastapi import FastAPI
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import generate_latest
from pydantic import BaseModel
from structlog.testing import capture_logs

from consumer_sdk import (
    Applied,
    Effect,
    Message,
    MessageContext,
    MessageHandlers,
    Retryable,
    Terminal,
    WorkflowContext,
    WorkflowFailure,
)
from consumer_sdk.worker import Worker
from fencepost.devservices import Services
from tests.support.consumers import SECRETS, Ping, stage
from tests.support.emptied import emptied
from tests.support.relay_process import RelayFactory
from tests.support.routes import DOMAIN, SOON, Shop, bearer, slug
from tests.support.session import SharedServices
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

KEY, SCOPE, INPUT, CHUNK, MESSAGE = "key-7f3a9", "user-9c1bd", "item-2d4e7", "chunk-5b8c2", "message-8a6f1"
RESULT, REFERENCE, CHECKPOINT, DETAIL = "result-3e7d4", "reference-6c2a8", "checkpoint-1f9b5", "detail-4d8e3"
MARKERS: Final = (KEY, SCOPE, INPUT, CHUNK, MESSAGE, RESULT, REFERENCE, CHECKPOINT, DETAIL)
#: Loggers of the test's own client; and one that tells every byte that it sends, which Fencepost's processes keep silent.
SILENT: Final = ("httpx", "httpcore", "aiokafka")
ERASE: Final = "SELECT fencepost.erase_lineage(tenant_id, run_id, 'ana', 'asked') FROM fencepost.runs"
TRACE: Final = 5


@pytest.fixture(scope="module")
def secrecy_url(services: Services, shared_services: SharedServices) -> Iterator[str]:
    url = services.create_database(shared_services.template_url)
    yield url
    services.drop_database(url)


@pytest.fixture
async def shop(secrecy_url: str) -> AsyncIterator[Shop]:
    connection = await emptied(secrecy_url)
    await connection.execute(DOMAIN)
    yield Shop(secrecy_url, connection)
    await connection.close()


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger, level = logging.getLogger(name), logging.getLogger(name).level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


class Emitted:
    """All that came out of this process: structured lines with their tracebacks, lines of libraries, spans."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        self._spans = InMemorySpanExporter()
        self.lines: list[Any] = []
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self.tracer = provider.get_tracer("test")

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        names = [None, *(name for name in logging.root.manager.loggerDict if not name.startswith(SILENT))]
        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(self._caplog.at_level(TRACE, logger=name))
            for name in SILENT:
                stack.enter_context(_quiet(name))
            self.lines = stack.enter_context(capture_logs(processors=[structlog.processors.format_exc_info]))
            yield

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._spans.get_finished_spans())

    def text(self) -> str:
        return "\n".join([*map(str, self.lines), self._caplog.text, *(span.to_json() for span in self.spans)])

    @property
    def loggers(self) -> set[str]:
        return {record.name for record in self._caplog.records}


@pytest.fixture
def emitted(caplog: pytest.LogCaptureFixture) -> Emitted:
    return Emitted(caplog)


def markers_in(text: str) -> list[str]:
    return [marker for marker in MARKERS if marker in text]


# -- routes and their worker --------------------------------------------------------------------------------------------------


class Said(BaseModel):
    text: str
    end: str = "well"


class Refused(WorkflowFailure):
    """Mapped to 422."""


class Speaker:
    """POST /told and POST /streamed of a workflow that stores and publishes a marker of each kind, and ends as it is told."""

    def __init__(self, shop: Shop, emitted: Emitted) -> None:
        self.shop = shop
        self.emitted = emitted
        self.gate = asyncio.Event()

    def routes(self, app: FastAPI) -> None:
        durable = self.shop.durable
        workflow = durable.workflow("tell", failures={Refused: 422}, retry=SOON)(self._tell)
        router = durable.router()
        router.post("/told")(durable.route(workflow, name="told", wait_seconds=1)(_same))
        router.post("/streamed")(durable.stream(workflow, name="streamed", live=True)(_same))
        app.include_router(router)
        app.add_middleware(_Spanned, tracer=self.emitted.tracer)

    async def _tell(self, context: WorkflowContext, said: Said) -> dict[str, str]:
        async def say(text: str) -> str:
            context.emit({"chunk": CHUNK})
            await context.publish({"chunk": CHUNK})
            return text

        await context.step("say", say, said.text)
        await context.once("provider.keep", request=said.text, call=_keep)
        await context.event("told", {"detail": DETAIL})
        await context.save({"seen": CHECKPOINT})
        match said.end:
            case "refused":
                raise Refused(MESSAGE)
            case "retried" if context.attempt == 1:
                raise Retryable("busy") from ValueError(MESSAGE)
            case "broken":
                raise RuntimeError(MESSAGE)
            case "waiting":
                await self.gate.wait()
        return {"result": RESULT}


async def _same(said: Said) -> Said:
    return said


async def _keep(_effect: Effect) -> Applied:
    return Applied({"kept": RESULT}, reference=REFERENCE)


class _Spanned:
    """A span a request, as OpenTelemetry's instrumentations make it."""

    def __init__(self, app: Any, tracer: Any) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._tracer.start_as_current_span(f"{scope['method']} {scope['path']}"):
            await self._app(scope, receive, send)


@contextlib.asynccontextmanager
async def served(shop: Shop, app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """By a real server in this process, which tells whatever it can."""
    config = uvicorn.Config(app, port=0, log_level="trace", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    try:
        await eventually(lambda: server.started and shop.durable.runtime is not None and shop.durable.runtime.watch.listening)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client
    finally:
        server.should_exit = True
        await serving


async def asked(client: httpx.AsyncClient, number: int, path: str = "/told", **body: Any) -> httpx.Response:
    headers = bearer(f"acme/{SCOPE}") | {"idempotency-key": f"{KEY}-{number}"}
    return await client.post(path, headers=headers, json={"text": INPUT} | body)


async def test_logs_spans_metrics_and_problems_of_routes_and_workers_are_clean(shop: Shop, emitted: Emitted) -> None:
    """SEC-1, SEC-3, R49, S43, L12: success, conflict, failures, streams, retries, a wait that ends, and an erasure."""
    speaker = Speaker(shop, emitted)
    with emitted.listening():
        async with served(shop, shop.app(prepare=speaker.routes)) as client, shop.working() as worker:
            well = [await asked(client, 1), await asked(client, 1), await asked(client, 2, "/streamed")]
            assert all(RESULT in answer.text for answer in well)
            assert CHUNK in well[-1].text
            retried = await asked(client, 3, end="retried")
            assert RESULT in retried.text
            problems = [
                await asked(client, 1, text="another " + INPUT),
                await asked(client, 4, end="refused"),
                await asked(client, 5, end="broken"),
                await asked(client, 6, text=[INPUT]),
                await asked(client, 6, text=INPUT * 1_000_000),
                await client.get(f"/operations/{uuid.uuid4()}", headers=bearer(f"acme/{SCOPE}")),
            ]
            assert [slug(problem) for problem in problems] == [
                "idempotency-key-reused", "workflow-failed", "attempts-exhausted", "request-invalid", "input-too-large",
                "not-found",
            ]  # fmt: skip
            failed_stream = (await asked(client, 7, "/streamed", end="broken")).text.partition("event: problem")[2]
            waiting = await asked(client, 8, end="waiting")
            assert waiting.status_code == 202
            await shop.connection.execute(ERASE)
            gone = [await asked(client, number, path) for number, path in ((1, "/told"), (2, "/streamed"), (8, "/told"))]
            assert [slug(answer) for answer in gone] == ["erased"] * 3
            speaker.gate.set()
            told = [failed_stream, *(f"{answer.headers}{answer.text}" for answer in [*problems, waiting, *gone])]
            metrics = generate_latest(shop.durable.registry).decode() + generate_latest(_registry(worker)).decode()
    assert markers_in(emitted.text()) == []
    assert markers_in(metrics) == []
    assert markers_in("\n".join(told)) == []
    assert {line["event"] for line in emitted.lines} >= {"worker_started", "attempt_failed", "workflow_refused", "job_dead"}
    assert emitted.loggers >= {"uvicorn.error", "uvicorn.access"}
    outcomes = {dict(span.attributes or {}).get("fencepost.outcome") for span in emitted.spans}
    assert outcomes >= {"result", "stream", "pending", "idempotency-key-reused", "workflow-failed", "attempts-exhausted", "erased"}
    assert 'route="streamed"' in metrics
    assert 'workflow="tell"' in metrics


def _registry(worker: Worker) -> Any:
    return worker._metrics.registry


# -- messages and the relay ---------------------------------------------------------------------------------------------------


async def test_logs_and_metrics_of_consumers_and_the_relay_are_clean(
    database_url: str, kafka: str, topic: TopicFactory, emitted: Emitted, start_relay: RelayFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """SEC-1, L12: key, headers, payload, effect and error messages of messages that succeed, fail and are given up."""
    monkeypatch.setenv("FENCEPOST_IDEMPOTENCY_SECRETS", SECRETS)
    app = MessageHandlers()

    @app.handler("ping", model=Ping, step="keep", retry=SOON, attempts=2)
    async def keep(message: Message[Ping], context: MessageContext) -> None:
        await context.once("provider.keep", request=INPUT, call=_keep)
        match message.value.n:
            case 1:
                raise RuntimeError(MESSAGE)
            case 2:
                raise Terminal("refused") from ValueError(MESSAGE)

    published = await topic(partitions=1)
    async with stage(database_url, kafka, topic) as made:
        with emitted.listening():
            async with made.running(app, consumer_dead_letter_topic=published) as consumer:
                for number in range(3):
                    await made.send({"n": number, "text": INPUT}, key=KEY, headers={"ce_tenantid": SCOPE, "x-name": DETAIL})
                await made.send({"n": INPUT}, key=KEY)
                await made.send_record(INPUT.encode(), key=KEY, headers=[("ce_type", "ping")])
                await made.until_committed({0: 5})
                relay = start_relay(database_url, kafka, log_level="debug")
                await relay.wait_ready()
                metrics = generate_latest(consumer._metrics.registry).decode()
        assert {row["reason"] for row in await made.dead()} >= {"rejected"}
    assert markers_in(emitted.text()) == []
    assert markers_in(metrics) == []
    assert markers_in(relay.log.read_text()) == []
    assert relay.log.read_text() != ""
    assert {line["event"] for line in emitted.lines} >= {"consumer_started"}
