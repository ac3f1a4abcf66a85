"""Live chunks: sent to whoever listens, whole or marked, and nothing at all while nobody does."""

import asyncio
import base64
import json
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import asyncpg
import pytest

from fencepost.errors import InvalidCommand
from tests.support.chunks import Streams
from tests.support.infinities import IN_MODELS, IN_PLAIN_VALUES
from tests.support.waiting import eventually

pytestmark = pytest.mark.services


@pytest.fixture
async def streams(database_url: str) -> AsyncIterator[Streams]:
    async with Streams.on(database_url) as streams:
        yield streams


class Listening:
    """Who listens to live chunks, and what was heard."""

    def __init__(self) -> None:
        self.payloads: list[str] = []

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [chunk for payload in self.payloads for chunk in json.loads(payload)]

    async def on(self, connection: "asyncpg.Connection[Any]") -> "Listening":
        await connection.add_listener("fencepost_live", lambda _c, _p, _n, payload: self.payloads.append(str(payload)))
        return self

    def has(self, chunks: int) -> Callable[[], bool]:
        return lambda: len(self.chunks) >= chunks


@pytest.fixture
async def listening(streams: Streams) -> Listening:
    await streams.database.execute("SELECT fencepost.arm_live(60000)")
    return await Listening().on(await streams.crew.connect())


async def test_a_live_chunk_says_whose_it_is_and_is_not_stored(streams: Streams, listening: Listening) -> None:
    run_id = await streams.crew.runs.accept()
    execution = await streams.execute()
    await execution.publish("stored", step="answer")

    execution.publisher.emit("answer", 0, {"text": "Hel\n\0"})
    execution.publisher.emit("answer", 0, "lo")
    execution.publisher.emit("", 0, [1])
    await eventually(listening.has(3))

    whose = {"root": str(run_id), "tenant": "acme", "attempt": 1, "before": [0, 1]}
    assert listening.chunks == [
        {**whose, "step": "answer", "occurrence": 0, "index": 0, "data": {"text": "Hel\n\0"}},
        {**whose, "step": "answer", "occurrence": 0, "index": 1, "data": "lo"},
        {**whose, "step": "", "occurrence": 0, "index": 0, "data": [1]},
    ]
    assert [frame.chunk for frame in await streams.all(run_id)] == ["stored"]
    assert streams.counted["live_sent"] == 3


async def test_nothing_is_sent_while_nobody_listens(streams: Streams) -> None:
    """And hardly anything is asked: whether anybody does, now and then."""
    await streams.crew.runs.accept()
    execution = await streams.execute()
    await streams.database.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
    deaf = await Listening().on(await streams.crew.connect())
    for number in range(100):
        execution.publisher.emit("", 0, number)
    await eventually(lambda: streams.counted["live_dropped"] == 100)
    for number in range(100):
        execution.publisher.emit("", 0, number)

    assert streams.counted["live_dropped"] == 200
    calls = await streams.database.fetchval(
        "SELECT sum(calls) FROM pg_stat_statements AS s JOIN pg_database AS d ON d.oid = s.dbid"
        " WHERE d.datname = current_database() AND query LIKE '-- fencepost:send_live%'"
    )
    assert calls == 1
    assert deaf.payloads == []


async def test_whoever_begins_to_listen_is_heard_of(streams: Streams) -> None:
    await streams.crew.runs.accept()
    execution = await streams.execute()
    execution.publisher.emit("", 0, "unheard")
    await eventually(lambda: streams.counted["live_dropped"] == 1)
    await streams.database.execute("SELECT fencepost.arm_live(60000)")
    late = await Listening().on(await streams.crew.connect())

    def emitted() -> bool:
        execution.publisher.emit("", 0, "heard")
        return bool(late.chunks)

    await eventually(emitted)
    # What was dropped has counted: the gap shows.
    assert late.chunks[0]["index"] > 0


async def test_chunks_of_one_turn_go_in_few_notifications_in_order(streams: Streams, listening: Listening) -> None:
    await streams.crew.runs.accept()
    execution = await streams.execute()

    for number in range(500):
        execution.publisher.emit("answer", 0, f"token {number}")
    await eventually(listening.has(500))

    assert [chunk["index"] for chunk in listening.chunks] == list(range(500))
    assert len(listening.payloads) <= 20
    assert max(len(payload.encode()) for payload in listening.payloads) < 8_000


async def test_a_full_queue_drops_what_is_newest(streams: Streams, listening: Listening) -> None:
    await streams.crew.runs.accept()
    execution = await streams.execute()

    for number in range(1_500):
        execution.publisher.emit("answer", 0, number)
    await eventually(listening.has(1_000))

    assert [chunk["data"] for chunk in listening.chunks] == list(range(1_000))
    assert (streams.counted["live_sent"], streams.counted["live_dropped"]) == (1_000, 500)


async def test_a_chunk_that_is_too_long_is_marked(streams: Streams, listening: Listening) -> None:
    await streams.crew.runs.accept()
    execution = await streams.execute()

    execution.publisher.emit("answer", 0, "x" * 6_998)
    execution.publisher.emit("answer", 0, "x" * 6_999)
    execution.publisher.emit("\x01" * 250, 0, "x" * 6_990)  # the envelope takes the room
    await eventually(listening.has(3))

    assert [len(chunk.get("data", "")) for chunk in listening.chunks] == [6_998, 0, 0]
    assert [chunk.get("truncated") for chunk in listening.chunks] == [None, True, True]


async def test_live_chunks_go_through_the_codec(streams: Streams, listening: Listening) -> None:
    class Reversing:
        def encode(self, payload: bytes) -> bytes:
            return payload[::-1]

        def decode(self, payload: bytes) -> bytes:
            return payload[::-1]

    await streams.crew.runs.accept()
    execution = await streams.execute(codec=Reversing())

    execution.publisher.emit("", 0, {"secret": 1})
    await eventually(listening.has(1))

    (chunk,) = listening.chunks
    assert "data" not in chunk
    assert base64.b64decode(chunk["encoded"])[::-1] == b'{"secret":1}'


async def test_what_json_cannot_hold_is_refused(streams: Streams) -> None:
    await streams.crew.runs.accept()
    execution = await streams.execute()
    for chunk in ("\ud800", object(), *IN_PLAIN_VALUES.values(), *IN_MODELS.values()):
        with pytest.raises(InvalidCommand):
            execution.publisher.emit("", 0, chunk)


FULL: Final = """
CREATE OR REPLACE FUNCTION fencepost.send_live(payloads text[]) RETURNS boolean LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'too many notifications in the NOTIFY queue' USING ERRCODE = '54000'; END $$
"""


@pytest.mark.parametrize("fault", ["DROP FUNCTION fencepost.send_live", FULL], ids=["missing", "full"])
async def test_what_cannot_be_sent_delays_and_fails_nobody(streams: Streams, fault: str) -> None:
    run_id = await streams.crew.runs.accept()
    execution = await streams.execute()
    await streams.database.execute(fault)

    execution.publisher.emit("", 0, "lost")
    await execution.publish("stored")
    await eventually(lambda: streams.counted["live_dropped"] == 1)

    assert [frame.chunk for frame in await streams.all(run_id)] == ["stored"]


async def test_a_writer_that_is_closed_drops_what_waits(streams: Streams, listening: Listening) -> None:
    await streams.crew.runs.accept()
    execution = await streams.execute()
    execution.publisher.emit("", 0, uuid.uuid4().hex)

    await (await streams.writer()).close()

    assert [task for task in asyncio.all_tasks() if task.get_name() == "live chunks"] == []
