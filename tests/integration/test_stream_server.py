"""Streams over HTTP from a process of their own: routes, monitors, links; clients that vanish or do not read; shutdown."""

import asyncio
import contextlib
import ctypes
import json
import socket
import struct
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import asyncpg
import httpx
import psutil
import pytest

from fencepost.devservices.processes import Watchdog
from producer_sdk.http.store import LineageKey, Place
from tests.support.stream_app import StreamServer
from tests.support.streams import Frame, Lineages, frames_of
from tests.support.waiting import eventually

StartServer = Callable[..., StreamServer]

OPEN: Final = "fencepost_route_streams"
PROMPT: Final = {"text": "Hello"}
_SO_ATTACH_FILTER: Final = 26
#: A program of the kernel's packet filter with one instruction: keep nothing.
_DROP_ALL: Final = struct.pack("HBBI", 0x06, 0, 0, 0)


@pytest.fixture
def start_server(database_url: str, tmp_path: Path, watchdog: Watchdog) -> Iterator[StartServer]:
    """Starts servers; those left at the end are killed."""
    servers: list[StreamServer] = []

    def start(**settings: Any) -> StreamServer:
        log = tmp_path / f"server-{len(servers)}.log"
        servers.append(StreamServer(database_url, log=log, watchdog=watchdog, **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
async def lineages(database_url: str) -> AsyncIterator[Lineages]:
    connection = await asyncpg.connect(database_url)
    yield Lineages(connection)
    await connection.close()


class Browser:
    """A client of one server, as one user."""

    def __init__(self, server: StreamServer, user: str = "acme/ana") -> None:
        self.http = httpx.AsyncClient(base_url=server.url, timeout=30, headers={"x-user": user})

    async def __aenter__(self) -> "Browser":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    def ask(self, key: str, cursor: str | None = None) -> "contextlib.AbstractAsyncContextManager[httpx.Response]":
        return self.http.stream("POST", "/answers", json=PROMPT, headers=_headers(key, cursor))

    async def all(self, key: str, cursor: str | None = None) -> tuple[httpx.Response, list[Frame]]:
        """A stream to its end."""
        async with self.ask(key, cursor) as answer:
            body = await answer.aread()
        assert answer.status_code == 200, body
        return answer, frames_of(body)

    async def plain(self, key: str, cursor: str | None = None) -> httpx.Response:
        return await self.http.post("/answers", json=PROMPT, headers=_headers(key, cursor))


def _headers(key: str, cursor: str | None) -> dict[str, str]:
    return {"idempotency-key": key} | ({} if cursor is None else {"last-event-id": cursor})


def lineage_of(answer: httpx.Response, tenant: str = "acme") -> LineageKey:
    return LineageKey(uuid.UUID(answer.headers["fencepost-run-id"]), tenant)


class Reading:
    """A stream that is read aside. ``frames`` so far."""

    def __init__(self, browser: Browser, key: str) -> None:
        self.body = bytearray()
        self.answer: httpx.Response | None = None
        self.task = asyncio.create_task(self._read(browser, key))

    async def _read(self, browser: Browser, key: str) -> None:
        async with browser.ask(key) as self.answer:
            async for piece in self.answer.aiter_bytes():
                self.body += piece

    @property
    def frames(self) -> list[Frame]:
        return frames_of(bytes(self.body))

    async def opened(self) -> LineageKey:
        await eventually(lambda: self.body, message="the stream is open")
        assert self.answer is not None
        return lineage_of(self.answer)


async def test_a_route_streams_and_resumes_as_its_source_says(start_server: StartServer, lineages: Lineages) -> None:
    """STREAM-2, STREAM-11, S2, S22, S26, S27, S30, S31: byte for byte; 200, though the route's success is 201."""
    server = start_server()
    await server.wait_ready()
    async with Browser(server) as browser:
        reading = Reading(browser, "k")
        key = await reading.opened()
        await lineages.publish(key, *({"token": word} for word in ("Hel", "lo", " ", "wide", "world")))
        await lineages.complete(key, {"answer": "Hello world"})
        await reading.task
        assert [frame.id for frame in reading.frames] == ["0.0", "0.1", "0.2", "0.3", "0.4", None]
        assert reading.answer is not None
        headers = reading.answer.headers
        assert reading.answer.status_code == 200
        assert headers["content-type"] == "text/event-stream"
        assert headers["cache-control"] == "no-cache, no-store, private"
        assert headers["x-accel-buffering"] == "no"
        assert not {"connection", "content-length", "idempotent-replayed", "x-idempotent-replayed"} & set(headers)
        async with browser.ask("k", "0.3") as again:
            body = await again.aread()
        frame, result = (
            b'event: progress\ndata: {"token": "world"}\nid: 0.4\n\n',
            b'event: result\ndata: {"answer": "Hello world"}\n\n',
        )
        assert body == b"retry: 1000\n\n" + frame + result
        assert again.headers["idempotent-replayed"] == again.headers["x-idempotent-replayed"] == "true"
        assert (await browser.plain("k", "0.9")).json()["type"] == "urn:fencepost:durable-route:stream-cursor-gone"


async def test_a_malformed_cursor_starts_nothing(start_server: StartServer, lineages: Lineages) -> None:
    """STREAM-3, S23, S26: the key is looked at before the cursor, and both before anything is stored."""
    server = start_server(stream_seconds=0)
    await server.wait_ready()
    async with Browser(server) as browser:
        for cursor in ("abc", "0", "0.1.2", "-1.0", "0.-1", "0.99999999999999999999", "0.end", ""):
            answer = await browser.plain("k", cursor)
            assert (answer.status_code, answer.json()["code"]) == (400, "fencepost.durable_route.stream_cursor_invalid")
            assert answer.headers["content-type"] == "application/problem+json"
        twice = [("idempotency-key", "k"), ("last-event-id", "0.1"), ("last-event-id", "0.1")]
        assert (await browser.http.post("/answers", json=PROMPT, headers=twice)).status_code == 400
        keyless = await browser.http.post("/answers", json=PROMPT, headers={"last-event-id": "abc"})
        assert keyless.json()["type"].endswith(":idempotency-key-missing")
        assert await lineages.connection.fetchval("SELECT count(*) FROM fencepost.runs") == 0
        answer, frames = await browser.all("k")
        assert frames == [Frame("pending", {"retry_after": 1})]
        assert await lineages.connection.fetchval("SELECT count(*) FROM fencepost.runs") == 1


async def test_everything_that_fastapi_holds_is_closed_before_the_first_chunk(
    start_server: StartServer, lineages: Lineages
) -> None:
    """STREAM-24, 9.7.32."""
    server = start_server()
    await server.wait_ready()
    async with Browser(server) as browser:
        reading = Reading(browser, "k")
        key = await reading.opened()
        assert (await browser.http.get("/closed")).json() == 1
        await lineages.publish(key, "a")
        await lineages.complete(key, "a")
        await reading.task
        assert reading.frames == [Frame("progress", "a", "0.0"), Frame("result", "a")]


async def test_a_full_cap_answers_202_with_the_run_started(start_server: StartServer, lineages: Lineages) -> None:
    """STREAM-13, STREAM-22, S21, S28, S34: of one principal, of the process, and a cap of nothing."""
    server, closed = start_server(max_streams=2, max_streams_per_principal=1), start_server(max_streams=0)
    await server.wait_ready()
    await closed.wait_ready()
    async with Browser(server) as ana, Browser(server, "acme/ben") as ben, Browser(server, "acme/carl") as carl:
        readings = [Reading(ana, "k"), Reading(ben, "k")]
        (key, other) = [await reading.opened() for reading in readings]
        assert key != other
        for browser in (ana, carl):
            answer = await browser.plain("k2")
            assert (answer.status_code, answer.headers["retry-after"]) == (202, "1")
            assert answer.headers["location"].startswith("/operations/")
            assert answer.headers["content-type"] == "application/json"
            assert await lineages.connection.fetchval("SELECT true FROM fencepost.runs WHERE run_id = $1", lineage_of(answer)[0])
        await lineages.complete(key, "done")
        await readings[0].task
        free = Reading(carl, "k2")
        await lineages.complete(await free.opened(), "done")
        await free.task
        assert free.frames == [Frame("result", "done")]
        readings[1].task.cancel()
    async with Browser(closed) as browser:
        assert (await browser.plain("k")).status_code == 202


async def test_a_browsers_event_source_reads_a_signed_link_and_stops(start_server: StartServer, lineages: Lineages) -> None:
    """STREAM-23, SEC-7, S25, 9.4.15, 9.4.16: two requests in all for what has ended, and a drop resumes by id."""
    server = start_server(stream_seconds=0.2)
    await server.wait_ready()
    async with Browser(server) as browser, httpx.AsyncClient(base_url=server.url) as stranger:
        first, _ = await browser.all("k")
        key = lineage_of(first)
        monitor = first.headers["location"]
        assert first.headers["link"] == f'<{monitor}>; rel="status"'
        given = await browser.http.post(f"{monitor}/stream-link")
        assert given.headers["referrer-policy"] == "no-referrer"
        assert given.headers["cache-control"] == "no-store"
        url = given.json()["url"]
        await lineages.publish(key, "a", "b")
        running = await stranger.get(url)
        assert (running.status_code, running.headers["content-type"]) == (200, "text/event-stream")
        assert running.headers["referrer-policy"] == "no-referrer"
        assert frames_of(running.content)[-1] == Frame("pending", {"retry_after": 1})
        await lineages.complete(key, "ab")
        ended = await stranger.get(url, headers={"last-event-id": "0.0"})
        assert frames_of(ended.content) == [Frame("progress", "b", "0.1"), Frame("result", "ab", "0.end")]
        stop = await stranger.get(url, headers={"last-event-id": "0.end"})
        assert (stop.status_code, stop.content) == (204, b"")
        events = await browser.http.get(monitor, headers={"accept": "text/event-stream"})
        assert frames_of(events.content)[-1] == Frame("result", "ab", "0.end")
        malformed = await stranger.get(url, headers={"last-event-id": "x"})
        assert malformed.status_code == 400
    log = server.log.read_text()
    assert urlsplit(url).query.partition("=")[2] not in log
    assert log.count("fencepost_link=...") == 4


async def test_a_link_that_is_not_good_tells_nothing(start_server: StartServer, lineages: Lineages) -> None:
    """SEC-4, SEC-7: changed, of another operation, of one that does not exist; and a good one reads and nothing else."""
    server = start_server(stream_seconds=0)
    await server.wait_ready()
    async with Browser(server) as ana, Browser(server, "acme/ben") as ben, httpx.AsyncClient(base_url=server.url) as stranger:
        for browser in (ana, ben):
            await browser.all("k")
        rows = await lineages.connection.fetch("SELECT monitor_id FROM fencepost.lineages ORDER BY created_at")
        own, other = [row["monitor_id"] for row in rows]
        url = (await ana.http.post(f"/operations/{own}/stream-link")).json()["url"]
        path, _, link = url.partition("?fencepost_link=")
        bad = [
            path, f"{path}?fencepost_link=", f"{path}?fencepost_link={link[:-1]}", f"{path}?fencepost_link=B{link[1:]}",
            f"{url}&fencepost_link={link}", url.replace(str(own), str(other)), url.replace(str(own), str(uuid.uuid4())),
            url.replace(str(own), "x"),
        ]  # fmt: skip
        answers = [await stranger.get(one) for one in bad]
        assert {(answer.status_code, answer.content) for answer in answers} == {(404, answers[0].content)}
        assert {answer.headers["referrer-policy"] for answer in answers} == {"no-referrer"}
        assert (await ben.http.post(f"/operations/{own}/stream-link")).status_code == 404
        assert (await stranger.post(f"/operations/{own}/stream-link")).status_code == 401
        assert (await stranger.get(url)).status_code == 200
        query = f"?fencepost_link={link}"
        assert (await stranger.post(f"/operations/{own}/cancel{query}")).status_code == 401
        assert (await stranger.get(f"/operations/{own}{query}")).status_code == 401
        assert (await stranger.post(f"{url}")).status_code == 405


def _told(reading: Reading) -> list[Frame]:
    """The frames so far but for the pings, which come by time."""
    return [frame for frame in reading.frames if frame.event != ":"]


async def test_live_chunks_go_out_without_ids_while_somebody_listens(start_server: StartServer, lineages: Lineages) -> None:
    """STREAM-17, S10, S11, S12, S15."""
    server = start_server()
    await server.wait_ready()
    async with Browser(server) as browser:
        reading = Reading(browser, "k")
        key = await reading.opened()
        send_live = "SELECT fencepost.send_live(ARRAY['{}'])"
        await eventually(lambda: lineages.connection.fetchval(send_live), message="somebody listens")
        await lineages.publish(key, "a")
        await lineages.emit(key, Place(0, 1), "Hel")
        await lineages.emit(key, Place(0, 0), "too late")
        await eventually(lambda: len(_told(reading)) == 2)
        reading.task.cancel()
        await lineages.publish(key, "b", offset=1)
        await lineages.complete(key, "ab")
        _, resumed = await browser.all("k", "0.0")
    first, activity = _told(reading)
    assert first == Frame("progress", "a", "0.0")
    assert activity == Frame("activity", {"step": "answer", "occurrence": 0, "attempt": 1, "index": 0, "data": "Hel"})
    assert resumed == [Frame("progress", "b", "0.1"), Frame("result", "ab")]


async def open_streams(server: StreamServer) -> float:
    return (await server.metrics())[OPEN]


async def test_the_slot_of_a_client_that_leaves_is_free_at_once(start_server: StartServer, lineages: Lineages) -> None:
    """STREAM-8, 9.4.18: the run goes on."""
    server = start_server(max_streams=1)
    await server.wait_ready()
    async with Browser(server) as browser:
        reading = Reading(browser, "k")
        key = await reading.opened()
        assert await open_streams(server) == 1
        reading.task.cancel()
        await asyncio.gather(reading.task, return_exceptions=True)
        await eventually(lambda: _is_free(server), 2, message="the slot is free")
        await lineages.publish(key, "a")
        await lineages.complete(key, "a")
        assert (await browser.all("k"))[1] == [Frame("progress", "a", "0.0"), Frame("result", "a")]
    ends = [name for name, value in (await server.metrics()).items() if "stream_ends" in name and value == 1]
    assert any('end="client_gone"' in name for name in ends)


async def _is_free(server: StreamServer) -> bool:
    return await open_streams(server) == 0


class RawClient:
    """A client by its socket: ``read`` takes as much as it likes, ``vanish`` cuts it off the network."""

    def __init__(self, server: StreamServer, key: str, user: str = "acme/ana") -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect(("127.0.0.1", server.http_port))
        body = json.dumps(PROMPT)
        self.socket.sendall(
            f"POST /answers HTTP/1.1\r\nhost: x\r\nx-user: {user}\r\nidempotency-key: {key}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n{body}".encode()
        )

    def vanish(self) -> None:
        """From now on the kernel drops what comes in for it, and acknowledges nothing."""
        program = ctypes.create_string_buffer(_DROP_ALL)
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))

    def close(self) -> None:
        self.socket.close()


async def test_the_slot_of_a_vanished_client_is_free_within_ten_seconds(start_server: StartServer) -> None:
    """STREAM-8: it says nothing any more and acknowledges nothing."""
    server = start_server()
    await server.wait_ready()
    client = RawClient(server, "k")
    await eventually(lambda: _has(server, 1))
    await asyncio.to_thread(client.socket.recv, 4096)
    client.vanish()
    await eventually(lambda: _is_free(server), 10, message="the slot is free")
    client.close()


async def _has(server: StreamServer, number: int) -> bool:
    return await open_streams(server) == number


async def test_a_client_that_does_not_read_costs_neither_memory_nor_the_others(
    start_server: StartServer, lineages: Lineages
) -> None:
    """STREAM-10, S39: 20 MB and ten clients, one of whom takes nothing; it resumes and misses nothing."""
    server = start_server()
    await server.wait_ready()
    async with Browser(server) as browser:
        readings = [Reading(browser, "k")]
        key = await readings[0].opened()
        readings += [Reading(browser, "k") for _ in range(8)]
        stuck = RawClient(server, "k")
        await eventually(lambda: _has(server, 10))
        process = psutil.Process(server.pid)
        before = peak = process.memory_info().rss
        for part in range(7):
            await lineages.publish(key, *["x" * 60_000] * 50, offset=50 * part)
            peak = max(peak, process.memory_info().rss)
        await lineages.complete(key, "done")
        await asyncio.gather(*(reading.task for reading in readings))
        peak = max(peak, process.memory_info().rss)
        for reading in readings:
            assert [frame.event for frame in reading.frames if frame.event != ":"] == ["progress"] * 350 + ["result"]
        assert peak - before < 40 * 2**20
        await eventually(lambda: _is_free(server), 20, message="the stream of the client that does not read is closed")
        stuck.close()
        _, resumed = await browser.all("k", "0.9")
    assert len(resumed) == 341


async def test_a_server_that_is_told_to_end_ends_each_stream_with_pending(start_server: StartServer, lineages: Lineages) -> None:
    """STREAM-21: at SIGTERM, not when all clients have left; another replica goes on behind the last id."""
    server, replica = start_server(), start_server()
    await server.wait_ready()
    await replica.wait_ready()
    async with Browser(server) as browser, Browser(replica) as elsewhere:
        readings = [Reading(browser, f"k{number}") for number in range(5)]
        keys = [await reading.opened() for reading in readings]
        for key in keys:
            await lineages.publish(key, "a")
        await eventually(lambda: all(len(reading.frames) == 1 for reading in readings))
        server.terminate()
        await asyncio.gather(*(reading.task for reading in readings))
        for reading in readings:
            assert reading.frames == [Frame("progress", "a", "0.0"), Frame("pending", {"retry_after": 1})]
        assert await server.wait(10) in (0, -15)
        for key in keys:
            await lineages.publish(key, "b", offset=1)
            await lineages.complete(key, "ab")
        _, rest = await elsewhere.all("k3", "0.0")
        assert rest == [Frame("progress", "b", "0.1"), Frame("result", "ab")]
    assert "Traceback" not in server.log.read_text()


async def test_a_hundred_streams_need_one_listening_connection_and_none_to_wait(
    start_server: StartServer, lineages: Lineages
) -> None:
    """STREAM-19, S36, 9.7.34: on a pool of 10."""
    server = start_server(max_streams_per_principal=100, read_connections=8, start_connections=2)
    await server.wait_ready()
    limits = httpx.Limits(max_connections=None)
    browser = Browser(server)
    await browser.http.aclose()
    browser.http = httpx.AsyncClient(base_url=server.url, timeout=30, headers={"x-user": "acme/ana"}, limits=limits)
    readings = [Reading(browser, f"k{number}") for number in range(100)]
    keys = [await reading.opened() for reading in readings]
    for number in range(3):
        for key in keys:
            await lineages.publish(key, number, offset=number)
        rows = await lineages.connection.fetch(
            "SELECT application_name, count(*) AS number, count(*) FILTER (WHERE state LIKE 'idle in%') AS held "
            "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() GROUP BY 1"
        )
        counted = {row["application_name"]: row["number"] for row in rows}
        assert counted["fencepost-listen"] == 1
        assert counted["fencepost-routes"] <= 10
        assert sum(row["held"] for row in rows) == 0
    for key in keys:
        await lineages.complete(key, "done")
    await asyncio.gather(*(reading.task for reading in readings))
    expected = [Frame("progress", number, f"0.{number}") for number in range(3)]
    for reading in readings:
        assert [frame for frame in reading.frames if frame.event != ":"] == [*expected, Frame("result", "done")]
    await browser.http.aclose()


async def test_what_a_server_logs_holds_nothing_of_a_stream(start_server: StartServer, lineages: Lineages) -> None:
    """S43, SEC-1: neither chunk, key, principal nor result."""
    server = start_server(max_streams=1)
    await server.wait_ready()
    async with Browser(server, "acme/principal-5f1c") as browser:
        reading = Reading(browser, "key-5f1c")
        key = await reading.opened()
        await lineages.publish(key, "chunk-5f1c")
        await browser.plain("key-5f1c-2")
        await lineages.complete(key, "result-5f1c")
        await reading.task
    assert "5f1c" not in server.log.read_text()
    assert '"POST /answers HTTP/1.1" 200' in server.log.read_text()
