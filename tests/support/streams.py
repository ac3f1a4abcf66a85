"""Streams as tests arrange and see them: lineages and chunks written as rows, and a client that reads frames."""

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import asyncpg
from starlette.types import Message

from fencepost.codec import PLAIN, PayloadCodec, lineage_codec
from producer_sdk.http.answers import Answer, result_answer
from producer_sdk.http.cursor import START
from producer_sdk.http.live import Live
from producer_sdk.http.metrics import RouteMetrics
from producer_sdk.http.slots import Slots
from producer_sdk.http.store import CUT_OFFSET, Chunk, LineageKey, Place, RouteStore, Standing
from producer_sdk.http.streaming import StreamRequest, Streams
from producer_sdk.http.watch import Watch
from tests.support.runs import Runs
from tests.support.waiting import eventually

__all__ = ["Client", "CountingStore", "Frame", "Lineages", "Server", "frames_of", "open_server"]

_START: Final = """
INSERT INTO fencepost.lineages (root_run_id, tenant_id, monitor_id, route, principal_hash, principal_version, newest_run_id)
VALUES ($1, $2, gen_random_uuid(), 'answers', $3, 1, $1) RETURNING monitor_id
"""
_OPEN: Final = """
INSERT INTO fencepost.streams (root_run_id, tenant_id, attempt, iteration) VALUES ($1, $2, $3, 0)
ON CONFLICT (root_run_id, tenant_id) DO UPDATE SET attempt = excluded.attempt
"""
_PUBLISH: Final = """
INSERT INTO fencepost.chunks (root_run_id, tenant_id, attempt, "offset", iteration, step, occurrence, data)
SELECT $1, $2, $3, c."offset", 0, $4, 0, c.data FROM unnest($5::bigint[], $6::bytea[]) AS c("offset", data)
"""
_END: Final = """
WITH job AS (
    UPDATE fencepost.jobs SET state = $3, finished_at = clock_timestamp(), dead_reason = $4 WHERE run_id = $1 AND tenant_id = $2
)
UPDATE fencepost.runs SET state = $5, finished_at = clock_timestamp(), started_at = clock_timestamp(), error_code = $6, output = $7,
       failure = $8
WHERE run_id = $1 AND tenant_id = $2
"""

_CONTINUE: Final = """
SELECT fencepost.continue_run($1, $2, $3, $4, gen_random_uuid(), 'report', 1, '{}', 3, NULL, interval '0', NULL, NULL)
"""
_REPLAY: Final = """
SELECT new_run_id FROM fencepost.replay_run($1, $2, gen_random_uuid(), 'ana', 'test', 3, interval '30 days')
"""


class Lineages:
    """What workers do to lineages, as rows on one connection. ``ring`` False: nobody is told of it."""

    def __init__(self, connection: "asyncpg.Connection[Any]", *, tenant: str = "acme", ring: bool = True) -> None:
        self.connection = connection
        self.tenant = tenant
        self._rings = ring

    async def start(self, *, principal_hash: bytes = bytes(32)) -> LineageKey:
        run_id = await Runs(self.connection, tenant=self.tenant).accept()
        await self.connection.fetchval(_START, run_id, self.tenant, principal_hash)
        return LineageKey(run_id, self.tenant)

    async def open(self, key: LineageKey, attempt: int = 0) -> None:
        """Open a stream attempt."""
        await self.connection.execute(_OPEN, *key, attempt)
        await self.ring(key)

    async def publish(
        self, key: LineageKey, *values: Any, attempt: int = 0, offset: int = 0, step: str = "answer", raw: bool = False
    ) -> None:
        """Store values as chunks from an offset on. ``raw``: they are the bytes that are stored."""
        data = list(values) if raw else [json.dumps(value, ensure_ascii=False).encode() for value in values]
        await self.connection.execute(_OPEN, *key, attempt)
        await self.insert(key, attempt, offset, data, step=step)
        await self.ring(key)

    async def insert(self, key: LineageKey, attempt: int, offset: int, data: Sequence[bytes], *, step: str = "answer") -> None:
        """Chunks and nothing else, for transactions that stay open."""
        await self.connection.execute(_PUBLISH, *key, attempt, step, list(range(offset, offset + len(data))), data)

    async def cut(self, key: LineageKey, attempt: int = 0) -> None:
        await self.connection.execute(_PUBLISH, *key, attempt, "answer", [CUT_OFFSET], [None])
        await self.ring(key)

    async def complete(self, key: LineageKey, output: Any, *, run_id: uuid.UUID | None = None) -> None:
        """``run_id``: the lineage's newest run, where that is not its first."""
        run = key if run_id is None else key._replace(root_run_id=run_id)
        await self._end(run, "completed", None, "completed", None, json.dumps(output).encode(), None)
        await self.ring(key)

    async def continued(self, key: LineageKey) -> uuid.UUID:
        """Claim the lineage's first run and end it by starting the next one."""
        runs = Runs(self.connection, tenant=self.tenant)
        held = await runs.claim_one()
        assert held.run_id == key.root_run_id
        run_id = await self.connection.fetchval(_CONTINUE, runs.worker, self.tenant, held.run_id, held.generation)
        assert isinstance(run_id, uuid.UUID)
        return run_id

    async def replayed(self, key: LineageKey) -> uuid.UUID:
        """Run a dead lineage anew, as an operator does."""
        run_id = await self.connection.fetchval(_REPLAY, self.tenant, key.root_run_id)
        assert isinstance(run_id, uuid.UUID)
        return run_id

    async def fail(self, key: LineageKey, *, failure: Any = None, reason: str = "handler_failed") -> None:
        told = None if failure is None else json.dumps(failure).encode()
        await self._end(key, "dead", reason, "failed", "out_of_stock", None, told)

    async def erase(self, key: LineageKey) -> None:
        await self.connection.execute("SELECT fencepost.erase_lineage($1, $2, 'ana', 'asked for')", key.tenant_id, key.root_run_id)

    async def forget(self, key: LineageKey, *offsets: int, attempt: int = 0) -> None:
        """Delete chunks, as their retention does."""
        await self.connection.execute(
            'DELETE FROM fencepost.chunks WHERE root_run_id = $1 AND tenant_id = $2 AND attempt = $3 AND "offset" = ANY($4)',
            *key, attempt, list(offsets),
        )  # fmt: skip

    async def emit(self, key: LineageKey, before: Place, data: Any, *, step: str = "answer", attempt: int = 1, **more: Any) -> None:
        """Send a live chunk, whoever listens."""
        payload = {
            "root": str(key.root_run_id), "tenant": key.tenant_id, "step": step, "occurrence": 0, "attempt": attempt, "index": 0,
            "before": list(before), "data": data, **more,
        }  # fmt: skip
        await self.connection.execute("SELECT pg_notify('fencepost_live', $1)", json.dumps([payload]))

    async def ring(self, *keys: LineageKey) -> None:
        if self._rings:
            await self.connection.execute("SELECT fencepost.ring_lineages($1)", [key.root_run_id for key in keys])

    async def _end(self, key: LineageKey, *values: Any) -> None:
        await self.connection.execute(_END, *key, *values)
        await self.ring(key)


@dataclass(frozen=True)
class Frame:
    """``id`` None: without one. ``event`` of a comment: ':'."""

    event: str
    data: Any
    id: str | None = None


def frames_of(body: bytes) -> list[Frame]:
    """The whole blocks of a stream, comments and all but the first ``retry``; what is cut off at the end does not count."""
    assert body.startswith(b"retry: 1000\n\n"), body[:100]
    return [_frame(block.decode()) for block in body.split(b"\n\n")[1:-1]]


def _frame(block: str) -> Frame:
    fields: dict[str, list[str]] = {}
    for line in block.split("\n"):
        assert "\r" not in line
        name, _, value = line.partition(":")
        fields.setdefault(name or ":", []).append(value.removeprefix(" "))
    if ":" in fields:
        return Frame(":", fields[":"][0])
    return Frame(fields["event"][0], json.loads("\n".join(fields["data"])), fields["id"][0] if "id" in fields else None)


@dataclass
class Client:
    """One client of an ASGI stream. ``taking`` cleared: it takes nothing more."""

    task: "asyncio.Task[Answer | None]" = field(init=False)
    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    complete: bool = False
    taking: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, message: Message) -> None:
        await self.taking.wait()
        assert not self.complete, "something follows the end"
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message["headers"])
            return
        self.body += message.get("body", b"")
        self.complete = not message.get("more_body", False)

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    @property
    def frames(self) -> list[Frame]:
        """So far."""
        return frames_of(self.body) if self.body else []

    async def opened(self) -> None:
        """Until the stream is open."""
        await eventually(lambda: b"retry" in self.body, message="the stream is open")

    async def sees(self, event: str, number: int = 1) -> None:
        """Until so many frames of that kind have come."""
        await eventually(lambda: sum(frame.event == event for frame in self.frames) >= number, message=f"{number} {event} frames")

    async def all(self) -> list[Frame]:
        """Every frame, once the stream has ended in order."""
        async with asyncio.timeout(15):
            assert await self.task is None
        assert self.complete
        return self.frames

    async def plain(self) -> Answer:
        """The answer in place of a stream."""
        async with asyncio.timeout(15):
            answer = await self.task
        assert answer is not None
        assert not self.status, "a stream was opened"
        return answer


class CountingStore:
    """A store that counts its statements. ``fail``: what the next reads of chunks raise."""

    def __init__(self, store: RouteStore) -> None:
        self._store = store
        self.reads = 0
        self.pages = 0
        self.places: list[Sequence[tuple[LineageKey, Place]]] = []
        self.page_bytes: list[int] = []
        self.fail: list[Exception] = []
        self.before_page: Callable[[], Awaitable[None]] | None = None

    async def read(self, keys: Sequence[LineageKey]) -> Sequence[Standing | None]:
        self.reads += 1
        return await self._store.read(keys)

    async def read_chunks(
        self, places: Sequence[tuple[LineageKey, Place]], *, most: int, most_bytes: int
    ) -> Sequence[Sequence[Chunk]]:
        self.pages += 1
        self.places.append(places)
        if self.fail:
            raise self.fail.pop(0)
        if self.before_page is not None:
            await self.before_page()
        pages = await self._store.read_chunks(places, most=most, most_bytes=most_bytes)
        self.page_bytes.append(max(sum(len(chunk.data or b"") for chunk in page) for page in pages))
        return pages

    async def arm(self, milliseconds: int) -> None:
        await self._store.arm(milliseconds)

    async def arm_live(self, milliseconds: int) -> None:
        await self._store.arm_live(milliseconds)


class Server:
    """A process that streams: its store, watch and streams."""

    def __init__(self, store: RouteStore, database_url: str, *, most: int, most_each: int, codec: PayloadCodec) -> None:
        self.store = CountingStore(store)
        self.codec = codec
        self.metrics = RouteMetrics()
        self.live = Live(dropped=lambda: self.metrics.frames("dropped"))
        counting: Any = self.store
        self.watch = Watch(counting, database_url, live=self.live)
        self.streams = Streams(
            counting, self.watch, slots=Slots(most=most, most_each=most_each), live=self.live, codec=codec, metrics=self.metrics
        )
        self.clients: list[Client] = []

    def client(
        self, key: LineageKey, cursor: Place = START, *, seconds: float = 60, live: bool = False, monitor: bool = False,
        owner: str = "ana", taking: bool = True, final: Callable[[Standing], Awaitable[Answer | None]] | None = None,
    ) -> Client:  # fmt: skip
        """A client that asks for a stream at once."""
        client = Client()
        if taking:
            client.taking.set()
        request = StreamRequest(
            route="answers", key=key, owner=owner, cursor=cursor, seconds=seconds, live=live, monitor=monitor,
            headers=[(b"x-test", b"1")], final=final or self._final, opened=lambda: None,
        )  # fmt: skip
        client.task = asyncio.create_task(self.streams.answer(request, client.receive, client.send))
        self.clients.append(client)
        return client

    async def _final(self, standing: Standing) -> Answer | None:
        return result_answer(standing, lineage_codec(self.codec, standing.data_key), success_status=201)


@asynccontextmanager
async def open_server(
    database_url: str, *, most: int = 100, most_each: int = 100, codec: PayloadCodec = PLAIN, pool: int = 2
) -> AsyncIterator[Server]:
    """A server in this process; clients that are left at the end are gone."""
    store = await RouteStore.open(database_url, size=pool, timeout_seconds=10)
    server = Server(store, database_url, most=most, most_each=most_each, codec=codec)
    watching = asyncio.create_task(server.watch.run())
    try:
        yield server
    finally:
        for client in server.clients:
            client.taking.set()
            client.task.cancel()
        await asyncio.gather(*(client.task for client in server.clients), return_exceptions=True)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await store.close()


def new_key(tenant: str = "acme") -> LineageKey:
    """Of a lineage that is not there."""
    return LineageKey(uuid.uuid4(), tenant)
