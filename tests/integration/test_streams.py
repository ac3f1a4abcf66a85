"""Streams on PostgreSQL: what a client is sent, whatever happens between. The server is in this process, without HTTP."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import asyncpg
import pytest

from fencepost.codec import PLAIN
from fencepost.errors import TransientError
from producer_sdk.http.answers import Answer, result_answer
from producer_sdk.http.store import CUT_OFFSET, Place, Standing
from tests.support.streams import Frame, Lineages, Server, open_server
from tests.support.waiting import eventually


@pytest.fixture
async def connection(database_url: str) -> "AsyncIterator[asyncpg.Connection[Any]]":
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


@pytest.fixture
def lineages(connection: "asyncpg.Connection[Any]") -> Lineages:
    return Lineages(connection)


@pytest.fixture
async def server(database_url: str) -> AsyncIterator[Server]:
    async with open_server(database_url) as server:
        yield server


def progress(*values: Any, attempt: int = 0, offset: int = 0) -> list[Frame]:
    return [Frame("progress", value, f"{attempt}.{offset + number}") for number, value in enumerate(values)]


async def test_stored_chunks_come_in_order_then_one_result_frame_and_nothing_after_it(server: Server, lineages: Lineages) -> None:
    """STREAM-1, S1, S3, S6, S18, T7."""
    key = await lineages.start()
    await lineages.publish(key, *"abcde")
    await lineages.complete(key, {"answer": "abcde"})
    assert await server.client(key).all() == [*progress(*"abcde"), Frame("result", {"answer": "abcde"})]


async def test_a_resume_gets_what_follows_its_id_and_the_result_without_an_id(server: Server, lineages: Lineages) -> None:
    """STREAM-2, S19, S20, S22, S24."""
    key = await lineages.start()
    await lineages.publish(key, "Hel", "lo", " ", "wide", "world")
    await lineages.complete(key, {"answer": "Hello wide world"})
    assert await server.client(key, Place(0, 3)).all() == [
        Frame("progress", "world", "0.4"),
        Frame("result", {"answer": "Hello wide world"}),
    ]
    assert len(await server.client(key).all()) == 6
    assert await server.client(key, Place(0, 4)).all() == [Frame("result", {"answer": "Hello wide world"})]


async def test_a_stream_that_opened_before_the_first_chunk_misses_none(server: Server, lineages: Lineages) -> None:
    """STREAM-4, STREAM-25 with notifications, S4."""
    key = await lineages.start()
    early = server.client(key)
    await early.opened()
    await lineages.publish(key, "a", "b")
    await early.sees("progress", 2)
    early.left.set()
    async with asyncio.timeout(5):
        await early.task
    assert early.frames == progress("a", "b")
    await lineages.publish(key, "c", offset=2)
    late, resumed = server.client(key), server.client(key, Place(0, 1))
    await lineages.complete(key, "abc")
    assert await late.all() == [*progress("a", "b", "c"), Frame("result", "abc")]
    assert await resumed.all() == [*progress("c", offset=2), Frame("result", "abc")]


async def test_a_stream_shows_its_own_operation_only(server: Server, lineages: Lineages) -> None:
    """S41, STREAM-5: also where another tenant's lineage has the same id."""
    first, second = await lineages.start(), await lineages.start()
    other = Lineages(lineages.connection, tenant="other")
    foreign = await other.start()
    for number in range(3):
        await lineages.publish(first, f"first {number}", offset=number)
        await lineages.publish(second, f"second {number}", offset=number)
        await other.publish(foreign, f"foreign {number}", offset=number)
    await lineages.complete(first, "first")
    assert await server.client(first, Place(0, 0)).all() == [*progress("first 1", "first 2", offset=1), Frame("result", "first")]
    stranger = server.client(first._replace(tenant_id="other"))
    assert (await stranger.plain()).outcome == "result-unavailable"


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "running"])
async def test_a_cursor_that_nothing_stored_follows_is_gone(server: Server, lineages: Lineages, ended: bool) -> None:
    """STREAM-6: behind what retention has left, beyond what was ever stored, and the very start."""
    key = await lineages.start()
    await lineages.publish(key, *"abcde")
    await lineages.forget(key, 0, 1, 2)
    if ended:
        await lineages.complete(key, "abcde")
    for cursor in (Place(0, 0), Place(0, 1), Place(7, 0), Place(0, 5), Place(0, CUT_OFFSET), Place(0, -1)):
        assert (await server.client(key, cursor).plain()).outcome == "stream-cursor-gone", cursor
    for cursor in (Place(0, 2), Place(0, 3)):  # what follows it is there
        client = server.client(key, cursor, seconds=0)
        assert (await client.all())[:-1] == progress(*"abcde"[cursor.offset + 1 :], offset=cursor.offset + 1)


async def test_a_cursor_of_a_stream_without_chunks_is_gone(server: Server, lineages: Lineages) -> None:
    """STREAM-6: nothing was ever stored."""
    key = await lineages.start()
    assert (await server.client(key, Place(0, 0)).plain()).status == 410
    assert await server.client(key, seconds=0).all() == [Frame("pending", {"retry_after": 1})]


async def test_what_commits_out_of_order_is_sent_in_order(database_url: str, server: Server, lineages: Lineages) -> None:
    """STREAM-7: a reader that comes between the two commits, and one that resumes there."""
    key = await lineages.start()
    await lineages.publish(key, "a")
    slow = await asyncpg.connect(database_url)
    transaction = slow.transaction()
    await transaction.start()
    await Lineages(slow).insert(key, 0, 1, [b'"b"'])
    await lineages.publish(key, "c", offset=2)
    fresh, resumed = server.client(key), server.client(key, Place(0, 0))
    await fresh.sees("progress")
    assert fresh.frames == progress("a")
    assert resumed.frames == []
    await transaction.commit()
    await slow.close()
    await fresh.sees("progress", 3)
    await resumed.sees("progress", 2)
    await lineages.complete(key, "abc")
    assert await fresh.all() == [*progress("a", "b", "c"), Frame("result", "abc")]
    assert await resumed.all() == [*progress("b", "c", offset=1), Frame("result", "abc")]


async def test_a_stream_waits_for_a_first_chunk_that_commits_after_the_second(
    database_url: str, server: Server, lineages: Lineages
) -> None:
    """STREAM-7, at the very start: it is not taken for one that retention has deleted."""
    key = await lineages.start()
    await lineages.open(key)
    slow = await asyncpg.connect(database_url)
    transaction = slow.transaction()
    await transaction.start()
    await Lineages(slow).insert(key, 0, 0, [b'"a"'])
    await lineages.publish(key, "b", offset=1)
    client = server.client(key)
    await eventually(lambda: server.store.page_bytes, message="the first page was read")
    await transaction.commit()
    await slow.close()
    await client.sees("progress", 2)
    assert client.frames == progress("a", "b")


async def test_a_gap_that_nobody_can_close_any_more_is_passed(server: Server, lineages: Lineages) -> None:
    """STREAM-7: a lost write of an attempt that is over hides nothing of what was committed."""
    key = await lineages.start()
    await lineages.publish(key, "a")
    await lineages.publish(key, "c", offset=2)
    await lineages.publish(key, "A", attempt=1)
    await lineages.publish(key, "C", attempt=1, offset=2)
    client = server.client(key)
    await client.sees("progress", 3)
    held_back = [Frame("progress", "a", "0.0"), Frame("progress", "c", "0.2"), Frame("attempt", {"attempt": 1})]
    assert client.frames == [*held_back, *progress("A", attempt=1)]
    await lineages.complete(key, "AC")
    assert await client.all() == [
        *held_back, *progress("A", attempt=1), *progress("C", attempt=1, offset=2), Frame("result", "AC"),
    ]  # fmt: skip


@pytest.mark.parametrize("monitor", [False, True], ids=["route", "monitor"])
async def test_a_failure_after_200_is_a_problem_frame_that_holds_its_status(
    server: Server, lineages: Lineages, monitor: bool
) -> None:
    """STREAM-11, S27, T3, 9.2, 9.3: on a monitor with an id that ends a browser's asking (STREAM-23)."""
    key = await lineages.start()
    await lineages.publish(key, "a")
    await lineages.fail(key, failure={"type": "OutOfStock", "details": {"left": 0}, "status": 422})
    client = server.client(key, monitor=monitor)
    first, last = await client.all()
    assert client.status == 200
    assert client.headers == [
        (b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache, no-store, private"),
        (b"x-accel-buffering", b"no"), (b"x-test", b"1"),
    ]  # fmt: skip
    assert first == Frame("progress", "a", "0.0")
    assert (last.event, last.id, last.data["status"]) == ("problem", "0.end" if monitor else None, 422)
    assert (last.data["error_type"], last.data["error_details"]) == ("OutOfStock", {"left": 0})


async def test_a_budget_of_nothing_sends_what_is_stored_and_does_not_wait(server: Server, lineages: Lineages) -> None:
    """STREAM-12, S32, S33: also more than a page of it."""
    key = await lineages.start()
    await lineages.publish(key, *range(1000))
    client = server.client(key, seconds=0)
    assert await client.all() == [*progress(*range(1000)), Frame("pending", {"retry_after": 1})]
    assert server.store.pages == 4


async def test_a_budget_ends_in_pending_and_a_resume_goes_on(server: Server, lineages: Lineages) -> None:
    """STREAM-12, S19, S32."""
    key = await lineages.start()
    await lineages.publish(key, "a")
    assert await server.client(key, seconds=0.2).all() == [*progress("a"), Frame("pending", {"retry_after": 1})]
    await lineages.publish(key, "b", offset=1)
    await lineages.complete(key, "ab")
    assert await server.client(key, Place(0, 0), seconds=0.2).all() == [*progress("b", offset=1), Frame("result", "ab")]


async def test_full_slots_answer_pending_and_a_freed_one_is_usable_at_once(database_url: str, lineages: Lineages) -> None:
    """STREAM-13, S28, S34, S35: of the process, and of one principal."""
    key = await lineages.start()
    async with open_server(database_url, most=3, most_each=2) as server:
        open_ones = [server.client(key, owner="ana"), server.client(key, owner="ana"), server.client(key, owner="ben")]
        for client in open_ones:
            await client.opened()
        for owner in ("ana", "carl"):
            answer = await server.client(key, owner=owner).plain()
            assert (answer.status, dict(answer.headers)["retry-after"]) == (202, "1")
        open_ones[2].left.set()
        await open_ones[2].task
        assert (await server.client(key, owner="ana").plain()).status == 202
        carl = server.client(key, owner="carl")
        await lineages.complete(key, "done")
        assert await carl.all() == [Frame("result", "done")]
    async with open_server(database_url, most=0) as server:
        assert (await server.client(key).plain()).status == 202


async def test_a_retried_run_starts_over_visibly(server: Server, lineages: Lineages) -> None:
    """STREAM-14, STREAM-20, S7, S8: the attempt is told as soon as it is open, and again to who resumes before it."""
    key = await lineages.start()
    await lineages.publish(key, "a", "b", "c")
    client = server.client(key)
    await client.sees("progress", 3)
    await lineages.open(key, attempt=1)
    await client.sees("attempt")
    await lineages.publish(key, "A", "B", attempt=1)
    await lineages.complete(key, "AB")
    rest = [Frame("attempt", {"attempt": 1}), *progress("A", "B", attempt=1), Frame("result", "AB")]
    assert await client.all() == [*progress("a", "b", "c"), *rest]
    assert await server.client(key, Place(0, 1)).all() == [Frame("progress", "c", "0.2"), *rest]
    assert await server.client(key, Place(0, 2)).all() == rest
    assert await server.client(key, Place(1, 0)).all() == rest[2:]


FORGED = "x\n\nevent: result\ndata: forged\n\n"


async def test_line_ends_inside_a_chunk_stay_inside(server: Server, lineages: Lineages) -> None:
    """STREAM-15, 9.4.14: as JSON escapes them, and raw between its tokens."""
    values = ["a\nb", "a\rb", "a\r\nb", "a\u2028b\u2029", FORGED, "\ufeff", {"id: 7": ["\n\n"]}]
    key = await lineages.start()
    await lineages.publish(key, *values)
    spaced = [b'{\n"a":\r1,\r\n"b": 2}', b'\n\nevent: result\ndata: "forged"\n\n', b"\r\r"]
    await lineages.publish(key, spaced[0], offset=len(values), raw=True)
    await lineages.complete(key, {"text": FORGED})
    frames = await server.client(key).all()
    assert [frame.data for frame in frames] == [*values, {"a": 1, "b": 2}, {"text": FORGED}]
    assert [frame.event for frame in frames] == ["progress"] * 8 + ["result"]
    other = await lineages.start()
    await lineages.publish(other, *spaced[1:], raw=True)
    client = server.client(other, seconds=0)
    async with asyncio.timeout(5):
        await client.task
    assert client.body.count(b"event: result\n") == client.body.count(b"data: event: result\n") == 1
    assert client.body.count(b"\nevent: ") == 3  # two chunks and the end


async def test_a_stream_that_was_cut_says_so_with_the_greatest_offset(server: Server, lineages: Lineages) -> None:
    """S9: and a resume from there gets the result only."""
    key = await lineages.start()
    await lineages.publish(key, *range(10_000))
    await lineages.cut(key)
    client = server.client(key, Place(0, 9_997))
    await client.sees("truncated")
    await lineages.complete(key, "all of it")
    last = Frame("truncated", {}, f"0.{CUT_OFFSET}")
    assert await client.all() == [*progress(9_998, 9_999, offset=9_998), last, Frame("result", "all of it")]
    assert await server.client(key, Place(0, CUT_OFFSET)).all() == [Frame("result", "all of it")]


async def test_silence_is_filled_with_pings_that_move_nothing(server: Server, lineages: Lineages) -> None:
    """STREAM-9, S5, 9.4.17."""
    key = await lineages.start()
    await lineages.publish(key, "a")
    client = server.client(key)
    loop = asyncio.get_running_loop()
    await client.sees("progress")
    began = loop.time()
    await client.sees(":")
    assert loop.time() - began < 5.1
    assert client.frames == [*progress("a"), Frame(":", "ping")]
    await lineages.complete(key, "a")
    assert await client.all() == [*progress("a"), Frame(":", "ping"), Frame("result", "a")]


async def test_without_any_notification_everything_arrives_within_a_second_or_so(server: Server, lineages: Lineages) -> None:
    """STREAM-25, S36: a lost ring costs the floor's second and nothing else."""
    quiet = Lineages(lineages.connection, ring=False)
    key = await quiet.start()
    client = server.client(key)
    for number in range(2):
        await quiet.publish(key, number, offset=number)
        async with asyncio.timeout(2):
            await client.sees("progress", number + 1)
    await quiet.complete(key, "done")
    assert await client.all() == [*progress(0, 1), Frame("result", "done")]


async def test_an_erased_lineage_has_no_stream(server: Server, lineages: Lineages) -> None:
    """S29, S42, SEC-8: before it opens, and while it is open."""
    key = await lineages.start()
    await lineages.publish(key, "secret")
    client = server.client(key)
    await client.sees("progress")
    await lineages.erase(key)
    assert (await client.all())[1].data["status"] == 410
    answer = await server.client(key).plain()
    assert (answer.status, answer.outcome) == (410, "erased")
    assert b"secret" not in answer.body


async def test_what_was_erased_while_a_page_was_on_its_way_is_not_waited_for(server: Server, lineages: Lineages) -> None:
    """S29: the ring of the erasure is lost, and the lineage had ended, so nothing else reads it again."""
    key = await lineages.start()
    await lineages.publish(key, *range(600))
    await lineages.complete(key, "all")
    quiet = Lineages(lineages.connection, ring=False)

    async def erase_before_the_third() -> None:
        if server.store.pages == 3:
            await quiet.connection.execute("SELECT setval('fencepost.doorbell_lineages', 1)")
            await quiet.erase(key)

    server.store.before_page = erase_before_the_third
    frames = await server.client(key).all()
    assert frames[:-1] == progress(*range(512))
    assert (frames[-1].event, frames[-1].data["status"]) == ("problem", 410)


class _Reversing:
    """What it has not encoded begins with another byte, and cannot be read."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def encode(self, payload: bytes) -> bytes:
        return b"!" + payload[::-1]

    def decode(self, payload: bytes) -> bytes:
        if not payload.startswith(b"!"):
            raise self._error
        return payload[:0:-1]


@pytest.mark.parametrize("error", [ValueError("not mine"), RuntimeError("not mine")], ids=["ValueError", "RuntimeError"])
async def test_chunks_pass_through_the_payload_codec(database_url: str, lineages: Lineages, error: Exception) -> None:
    """S44, SEC-9: and one that it cannot read ends the stream as a result that it cannot read does (S29)."""
    codec = _Reversing(error)
    key, unreadable, result = await lineages.start(), await lineages.start(), await lineages.start()
    await lineages.publish(key, codec.encode(b'"a"'), raw=True)
    await lineages.publish(unreadable, codec.encode(b'"a"'), b'"b"', raw=True)
    await lineages.complete(result, "not encoded")
    async with open_server(database_url, codec=codec) as server:
        assert await server.client(key, seconds=0).all() == [*progress("a"), Frame("pending", {"retry_after": 1})]
        first, last = await server.client(unreadable).all()
        assert first == Frame("progress", "a", "0.0")
        assert (last.event, last.data["type"]) == ("problem", "urn:fencepost:durable-route:result-unavailable")
        assert (await server.client(result).plain()).status == 500


async def test_a_page_that_cannot_be_read_is_read_again(server: Server, lineages: Lineages) -> None:
    """R43, S45: a database that hiccups costs the stream nothing."""
    key = await lineages.start()
    client = server.client(key)
    await client.opened()
    server.store.fail = [TransientError("gone"), TransientError("gone")]
    await lineages.publish(key, "a")
    await client.sees("progress")
    server.store.fail = [TransientError("gone")]
    assert (await server.client(key).plain()).status == 202
    await lineages.complete(key, "a")
    assert await client.all() == [*progress("a"), Frame("result", "a")]


async def read_again(server: Server) -> None:
    """One turn of the floor."""
    before = server.store.reads
    server.watch.read_all()
    await eventually(lambda: server.store.reads > before)


async def test_idle_streams_share_one_read_and_need_no_page(server: Server, lineages: Lineages) -> None:
    """STREAM-19, S36, S45: counted by the floor's turns, not by time."""
    keys = [await lineages.start() for _ in range(100)]
    clients = [server.client(key) for key in keys]
    await asyncio.gather(*(client.opened() for client in clients))
    for key in keys[:2]:
        await lineages.publish(key, "a")
    await clients[1].sees("progress")
    before = server.store.reads, server.store.pages
    for _ in range(3):
        await read_again(server)
    assert server.store.reads - before[0] <= 3 + 2  # the floor's own second may fall between
    assert server.store.pages == before[1]
    quiet = Lineages(lineages.connection, ring=False)
    for key in keys:
        await quiet.complete(key, "done")
    await lineages.ring(*keys)
    for client in clients:
        assert (await client.all())[-1] == Frame("result", "done")


async def test_streams_that_have_news_together_share_a_page_statement(server: Server, lineages: Lineages) -> None:
    """STREAM-19, S45."""
    quiet = Lineages(lineages.connection, ring=False)
    keys = [await quiet.start() for _ in range(50)]
    for key in keys:
        await quiet.publish(key, "a")
    clients = [server.client(key) for key in keys]
    await asyncio.gather(*(client.sees("progress") for client in clients))
    assert server.store.pages <= 4
    for key in keys:
        await quiet.publish(key, "b", offset=1)
    before = server.store.pages
    await lineages.ring(*keys)
    await asyncio.gather(*(client.sees("progress", 2) for client in clients))
    assert server.store.pages - before <= 4


async def test_a_client_that_takes_nothing_holds_one_page(server: Server, lineages: Lineages) -> None:
    """STREAM-10, S39, S45: pages are read as it takes them, 256 chunks or 64 KiB each; another client is not delayed."""
    key = await lineages.start()
    text = "x" * 20_000
    await lineages.publish(key, *[text] * 200)
    stuck = server.client(key, taking=False)
    quick = server.client(key)
    await quick.sees("progress", 200)
    assert max(server.store.page_bytes) < 65_536 + 20_010
    pages = [place for places in server.store.places for place in places]
    assert len(pages) == 1 + 50
    stuck.taking.set()
    await lineages.complete(key, "x")
    assert len(await stuck.all()) == 201


async def test_at_the_end_of_the_process_each_stream_ends_with_one_pending_frame(
    database_url: str, server: Server, lineages: Lineages
) -> None:
    """STREAM-21, S19: streams that wait, that are in the middle of it, and that come too late."""
    idle, busy = await lineages.start(), await lineages.start()
    await lineages.publish(busy, *range(1000))
    waiting, stuck = server.client(idle), server.client(busy, taking=False)
    await waiting.opened()
    server.streams.close()
    assert await waiting.all() == [Frame("pending", {"retry_after": 1})]
    stuck.taking.set()
    sent = await stuck.all()
    assert sent[-1] == Frame("pending", {"retry_after": 1})
    assert len(sent) <= 1 + 256
    assert (await server.client(idle).plain()).status == 202
    async with open_server(database_url) as other:
        rest = await other.client(busy, Place(0, len(sent) - 2), seconds=0).all()
    assert [*sent[:-1], *rest[:-1]] == progress(*range(1000))


async def test_a_stream_follows_its_lineage_from_run_to_run(server: Server, lineages: Lineages) -> None:
    """S7, S38, S40, R37: as many as there are, by one read each; each continue-as-new opens an attempt."""
    key = await lineages.start()
    await lineages.publish(key, "first")
    client = server.client(key)
    await client.sees("progress")
    successor = await lineages.continued(key)
    await lineages.publish(key, "second", attempt=1)
    await lineages.complete(key, "done", run_id=successor)
    rest = [Frame("attempt", {"attempt": 1}), *progress("second", attempt=1), Frame("result", "done")]
    assert await client.all() == [*progress("first"), *rest]
    assert await server.client(key, Place(0, 0)).all() == rest


async def test_an_operators_replay_is_followed_as_well(server: Server, lineages: Lineages) -> None:
    """L14, S40."""
    key = await lineages.start()
    await lineages.publish(key, "a")
    await lineages.fail(key)
    assert [frame.event for frame in await server.client(key).all()] == ["progress", "problem"]
    replay = await lineages.replayed(key)
    resumed = server.client(key, Place(0, 0))
    await resumed.opened()
    await lineages.publish(key, "A", attempt=1)
    await lineages.complete(key, "done", run_id=replay)
    assert await resumed.all() == [Frame("attempt", {"attempt": 1}), *progress("A", attempt=1), Frame("result", "done")]


class Clock:
    """The loop's clock, to be moved."""

    def __init__(self) -> None:
        self._loop = cast(Any, asyncio.get_running_loop())
        self._time = self._loop.time
        self.ahead = 0.0
        self._loop.time = lambda: self._time() + self.ahead

    async def move(self, seconds: float) -> None:
        self.ahead += seconds
        await asyncio.sleep(0)

    def stop(self) -> None:
        self._loop.time = self._time


@pytest.fixture
async def clock() -> AsyncIterator[Clock]:
    clock = Clock()
    yield clock
    clock.stop()


async def stuck_client(server: Server, lineages: Lineages) -> Any:
    """One that has taken the beginning of its stream, and takes nothing more."""
    key = await lineages.start()
    client = server.client(key)
    await client.opened()
    client.taking.clear()
    await lineages.publish(key, "a")
    await eventually(lambda: server.store.pages == 1)
    await eventually(lambda: server.metrics.registry.get_sample_value("fencepost_route_frames_total", {"kind": "progress"}))
    return client, key


def ends(server: Server, end: str) -> float | None:
    return server.metrics.registry.get_sample_value("fencepost_route_stream_ends_total", {"route": "answers", "end": end})


async def test_a_client_that_takes_nothing_for_a_minute_loses_its_stream_and_nothing_else(
    server: Server, lineages: Lineages, clock: Clock
) -> None:
    """STREAM-10, S39."""
    client, key = await stuck_client(server, lineages)
    await clock.move(59)
    assert not client.task.done()
    await clock.move(1.5)
    async with asyncio.timeout(5):
        assert await client.task is None
    assert not client.complete
    assert ends(server, "slow_client") == 1
    assert await server.client(key, seconds=0).all() == [*progress("a"), Frame("pending", {"retry_after": 1})]


async def test_at_the_end_of_the_process_nobody_waits_long_for_a_client_that_takes_nothing(
    server: Server, lineages: Lineages, clock: Clock
) -> None:
    """STREAM-21."""
    client, _ = await stuck_client(server, lineages)
    server.streams.close()
    await clock.move(5.5)
    async with asyncio.timeout(5):
        assert await client.task is None
    assert ends(server, "slow_client") == 1


async def test_a_client_that_leaves_while_it_is_being_sent_to_frees_its_slot(server: Server, lineages: Lineages) -> None:
    """STREAM-8: whether or not the ASGI server says so to who sends."""
    client, _ = await stuck_client(server, lineages)
    client.left.set()
    async with asyncio.timeout(5):
        assert await client.task is None
    assert ends(server, "client_gone") == 1


async def test_a_result_that_cannot_be_read_yet_is_tried_again(server: Server, lineages: Lineages) -> None:
    """R43, S45."""
    key = await lineages.start()
    tries = 0

    async def final(standing: Standing) -> Answer | None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise TransientError("gone")
        return None if tries == 3 else result_answer(standing, PLAIN, success_status=200)

    client = server.client(key, final=final)
    await client.opened()
    await lineages.complete(key, "done")
    assert await client.all() == [Frame("result", "done")]
    tries = 0
    assert (await server.client(key, final=final).plain()).status == 202


async def test_live_chunks_stay_in_their_place_and_are_not_resent(server: Server, lineages: Lineages) -> None:
    """STREAM-17, S12, S13, S14, S15."""
    key = await lineages.start()
    await lineages.publish(key, "plan", step="plan")
    client, without = server.client(key, live=True), server.client(key)
    await client.sees("progress")
    await lineages.emit(key, Place(0, 2), "later")
    await lineages.emit(key, Place(0, 1), "superseded at once", step="plan", index=7)
    await lineages.publish(key, "text", offset=1)
    await client.sees("activity")
    await lineages.complete(key, "done")
    sent = await client.all()
    assert [frame for frame in sent if frame.event == "progress"] == progress("plan", "text")
    live = [frame.data["data"] for frame in sent if frame.event == "activity"]
    assert live[0] == "later"
    assert sent.index(Frame("progress", "text", "0.1")) < [frame.event for frame in sent].index("activity")
    assert await without.all() == [*progress("plan", "text"), Frame("result", "done")]
    assert await server.client(key, Place(0, 0), live=True).all() == [*progress("text", offset=1), Frame("result", "done")]


async def test_workers_are_asked_for_live_chunks_while_a_live_stream_is_open(server: Server, lineages: Lineages) -> None:
    """S10, S16, S36: by the process's one connection, and not for other streams."""
    send = "SELECT fencepost.send_live(ARRAY['{}'])"
    key = await lineages.start()
    plain = server.client(key)
    await plain.opened()
    await read_again(server)
    assert not await lineages.connection.fetchval(send)
    live = server.client(key, live=True)
    await live.opened()
    await eventually(lambda: lineages.connection.fetchval(send), message="somebody listens")
    await lineages.complete(key, "done")
    await asyncio.gather(live.all(), plain.all())
