"""The storing side of streams on real PostgreSQL: who may give a chunk its place, what a reader sees of it, and what a chunk costs.

Races are held by locks and time is moved by moving rows. Models that are known to break are kept here.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, Final

import asyncpg
import pytest
from pydantic import BaseModel
from uuid_utils.compat import uuid7

from consumer_sdk.chunk_store import CHUNK_STATEMENTS, CUT_OFFSET, ChunkStore
from consumer_sdk.publishing import MAX_CHUNK_BYTES, MOST_STORED, Publisher
from fencepost.errors import InvalidCommand, InvariantViolated, LeaseLost, TransientError
from tests.support.chunks import CUT, Execution, Frame, Streams, gathered
from tests.support.commands import user_of
from tests.support.infinities import IN_MODELS, IN_PLAIN_VALUES
from tests.support.jobs import completion
from tests.support.runs import Runs
from tests.support.waiting import eventually

pytestmark = pytest.mark.services

WEEK: Final = timedelta(days=7)


@pytest.fixture
async def streams(database_url: str) -> AsyncIterator[Streams]:
    async with Streams.on(database_url) as streams:
        yield streams


@pytest.fixture
async def run_id(streams: Streams) -> uuid.UUID:
    return await streams.crew.runs.accept()


def places(frames: list[Frame]) -> list[str]:
    return [f"{frame.attempt}.{frame.offset}" for frame in frames]


def texts(frames: list[Frame]) -> list[object]:
    return [frame.chunk for frame in frames]


async def table(streams: Streams) -> list[str]:
    rows = await streams.database.fetch("SELECT t::text FROM (SELECT c.*, s.attempt AS now FROM fencepost.chunks AS c"
                                        " JOIN fencepost.streams AS s USING (root_run_id, tenant_id)) AS t ORDER BY 1")  # fmt: skip
    return [row[0] for row in rows]


# -- places --------------------------------------------------------------------------------------------------------------------


async def test_chunks_are_stored_in_order_without_gaps(streams: Streams, run_id: uuid.UUID) -> None:
    """STREAM-1: the ids are 0.0 to 0.4; each is there when its publish returns, and readers are rung after the commit."""
    execution = await streams.execute()
    for number in range(5):
        await execution.publish({"n": number}, step="answer")
        assert len(await streams.all(run_id)) == number + 1
    await execution.complete()

    assert await streams.all(run_id) == [Frame(0, number, {"n": number}) for number in range(5)]
    assert streams.rung == [run_id] * 5
    assert streams.counted["stored"] == 5


async def test_a_resume_gets_what_follows_its_cursor(streams: Streams, run_id: uuid.UUID) -> None:
    execution = await streams.execute()
    await execution.publish(*"abcde")
    reader = streams.reader(run_id)

    assert texts(await reader.read(most=2)) == ["a", "b"]
    assert texts(await reader.read()) == ["c", "d", "e"]
    assert await reader.read() == []
    reader.place = (0, 3)
    assert await reader.read() == [Frame(0, 4, "e")]


async def test_a_run_that_publishes_nothing_has_no_stream(streams: Streams, run_id: uuid.UUID) -> None:
    first = await streams.execute()
    await first.fail()
    await (await streams.execute()).complete()

    assert await streams.attempt(run_id) is None
    assert streams.rung == []


async def test_concurrent_publishes_of_a_run_are_stored_in_the_order_of_the_calls(streams: Streams, run_id: uuid.UUID) -> None:
    execution = await streams.execute()

    await asyncio.gather(*[execution.publish(number) for number in range(1_200)])

    assert await streams.all(run_id) == [Frame(0, number, number) for number in range(1_200)]


async def test_what_commits_later_is_never_behind_what_was_read(streams: Streams, run_id: uuid.UUID) -> None:
    """STREAM-7: the first of two publishes hangs before its commit. The second waits for it, so no reader can pass it."""
    execution = await streams.execute()
    await execution.publish("a")
    reader = streams.reader(run_id)
    assert texts(await reader.read()) == ["a"]
    gate = await streams.close_gate()
    first = asyncio.create_task(execution.publish("b"))
    await streams.crew.blocked()
    second = asyncio.create_task(execution.publish("c"))
    await asyncio.sleep(0)

    assert await reader.read() == []
    await streams.crew.blocked()  # by one session: the second has not been sent
    assert streams.rung == [run_id]  # of the chunk before: nobody is rung before the commit
    await gate.open()
    await asyncio.gather(first, second)
    assert streams.rung == [run_id] * 3
    assert await reader.read() == [Frame(0, 1, "b"), Frame(0, 2, "c")]


async def test_offsets_from_a_sequence_lose_a_chunk(streams: Streams, run_id: uuid.UUID) -> None:
    """The broken model of STREAM-7: numbers are drawn in one order and committed in another."""
    await (await streams.execute()).publish("first")
    await streams.database.execute("CREATE SEQUENCE public.offsets START 1")
    draw = (
        'INSERT INTO fencepost.chunks (root_run_id, tenant_id, attempt, "offset", iteration, step, occurrence, data)'
        " VALUES ($1, 'acme', 0, nextval('public.offsets'), 0, '', 0, $2)"
    )
    slow, fast = await streams.crew.connect(), await streams.crew.connect()
    reader = streams.reader(run_id)
    transaction = slow.transaction()
    await transaction.start()
    await slow.execute(draw, run_id, b'"slow"')
    await fast.execute(draw, run_id, b'"fast"')

    seen = await reader.read()
    await transaction.commit()
    seen += await reader.read()

    assert texts(seen) == ["first", "fast"]  # and never the slow one, which is stored
    assert texts(await streams.all(run_id)) == ["first", "slow", "fast"]


async def test_a_reader_of_state_first_and_chunks_then_misses_nothing(streams: Streams, run_id: uuid.UUID) -> None:
    """Whoever has seen that the run has ended has all of its chunks with the next read. In the other order not."""
    await streams.database.execute(
        "SELECT fencepost.start_lineage('acme', $1, gen_random_uuid(), 'r', sha256('p'), 1::smallint)", run_id
    )
    execution = await streams.execute()
    await execution.publish("a")
    reader, hasty = streams.reader(run_id), streams.reader(run_id)
    state = "SELECT state FROM fencepost.read_lineages($1, $2)"

    seen_hastily = await hasty.read()
    await execution.publish("b")
    await execution.complete()

    assert await streams.database.fetchval(state, [run_id], ["acme"]) == "completed"
    assert texts(seen_hastily) == ["a"]  # it would now read the state, and stop
    assert texts(await reader.read()) == ["a", "b"]


# -- one author ------------------------------------------------------------------------------------------------------------------


async def test_a_lost_lease_stores_no_chunk(streams: Streams, run_id: uuid.UUID) -> None:
    """STREAM-20: the next execution opens a stream attempt; the late chunk is LeaseLost, and no place has two contents."""
    first = await streams.execute("A")
    await first.publish("one", "two", step="answer")
    await first.lose()
    second = await streams.execute("B")
    assert await streams.attempt(run_id) == 1

    with pytest.raises(LeaseLost):
        await first.publish("late", step="answer")
    await second.publish("uno", step="answer")
    with pytest.raises(LeaseLost):
        await first.publish("later", step="answer")

    assert await streams.all(run_id) == [Frame(0, 0, "one"), Frame(0, 1, "two"), Frame(1, 0, "uno")]


async def test_an_expired_lease_stores_no_chunk_though_nobody_has_taken_it(streams: Streams, run_id: uuid.UUID) -> None:
    execution = await streams.execute()
    await execution.publish("a")
    await execution.lose()
    before = await table(streams)

    with pytest.raises(LeaseLost):
        await execution.publish("b")
    publisher = Publisher(execution.claim, await streams.writer())
    with pytest.raises(LeaseLost):
        await publisher.begin()

    assert await table(streams) == before


async def test_a_cancelled_run_stores_no_chunk(streams: Streams, run_id: uuid.UUID) -> None:
    execution = await streams.execute()
    await execution.publish("a")
    await streams.crew.runs.cancel(run_id)

    with pytest.raises(LeaseLost):
        await execution.publish("b")

    assert texts(await streams.all(run_id)) == ["a"]


async def test_whoever_waits_for_a_lost_lease_is_told_by_one_statement(streams: Streams, run_id: uuid.UUID) -> None:
    execution = await streams.execute()
    await execution.lose()

    raised = await gathered([execution.publish(number) for number in range(600)])

    assert {type(error) for error in raised} == {LeaseLost}
    assert await streams.all(run_id) == []


async def test_a_claim_waits_for_a_chunk_that_is_being_stored(streams: Streams, run_id: uuid.UUID) -> None:
    """The fence is the job's row: while a chunk is on its way nobody takes the run, so nobody counts places without it."""
    execution = await streams.execute("A")
    gate = await streams.close_gate()
    publishing = asyncio.create_task(execution.publish("a", step="answer"))
    await streams.crew.blocked()
    other = await streams.hand("B")

    assert await other.claim() == []
    elsewhere = Runs(await streams.crew.connect())
    expire = asyncio.create_task(elsewhere.expire_lease(run_id))
    await streams.crew.blocked(2)
    await gate.open()
    await asyncio.gather(publishing, expire)
    (claim,) = await other.claims()
    await streams.begin(claim, "B")
    assert await streams.attempt(run_id) == 1


async def test_an_execution_that_counts_anew_without_having_asked_is_found_out(streams: Streams, run_id: uuid.UUID) -> None:
    first = await streams.execute()
    await first.publish("a")
    await first.fail()
    careless = Publisher(await streams.claim(), await streams.writer())

    with pytest.raises(InvariantViolated):
        await careless.publish("", 0, "b")

    assert texts(await streams.all(run_id)) == ["a"]


# -- answers that get lost -------------------------------------------------------------------------------------------------------


async def test_an_unanswered_write_is_repeated_and_changes_nothing(
    streams: Streams, run_id: uuid.UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution = await streams.execute()
    lost = lose_answers(monkeypatch, "publish", 2)

    await execution.publish("a")
    await execution.publish("b")

    assert lost == [0]
    assert texts(await streams.all(run_id)) == ["a", "b"]


async def test_a_repetition_that_does_not_look_first_never_comes_to_an_end(
    streams: Streams, run_id: uuid.UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken model of the test above."""
    await streams.alter("publish_chunks", "NOT f.repeats OR", "true OR", lease_seconds=1)
    with pytest.raises(TransientError):
        await test_an_unanswered_write_is_repeated_and_changes_nothing(streams, run_id, monkeypatch)


async def test_an_unanswered_opening_opens_one_attempt(
    streams: Streams, run_id: uuid.UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await streams.execute()
    await first.publish("a")
    await first.fail()
    lost = lose_answers(monkeypatch, "open_stream", 2)

    second = await streams.execute()

    assert lost == [0]
    await second.publish("b")
    assert places(await streams.all(run_id)) == ["0.0", "1.0"]


async def test_an_unanswered_carry_copies_once(streams: Streams, run_id: uuid.UUID, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await streams.execute()
    await first.publish("a", "b", step="one")
    await first.record("one")
    await first.publish("c")
    await first.fail()
    second = await streams.execute()
    lost = lose_answers(monkeypatch, "carry", 1)

    await second.publisher.carry("one", 0)
    await second.publish("d")

    assert lost == [0]
    assert await streams.all(run_id) == [
        Frame(0, 0, "a"), Frame(0, 1, "b"), Frame(0, 2, "c"), Frame(1, 0, "a"), Frame(1, 1, "b"), Frame(1, 2, "d"),
    ]  # fmt: skip


def lose_answers(monkeypatch: pytest.MonkeyPatch, method: str, times: int) -> list[int]:
    """The statement is done, and its answer gets lost, so many times; what is left of them."""
    left = [times]
    real = getattr(ChunkStore, method)

    async def unanswered(self: ChunkStore, *arguments: Any, **named: Any) -> Any:
        answer = await real(self, *arguments, **named)
        if left[0]:
            left[0] -= 1
            raise TransientError("no answer")
        return answer

    monkeypatch.setattr(ChunkStore, method, unanswered)
    return left


async def test_a_statement_that_is_still_at_work_is_waited_for(streams: Streams, run_id: uuid.UUID) -> None:
    """A publish that timed out here may be stored there in the end: its repetition neither loses nor doubles it."""
    execution = await streams.execute(lease_seconds=3)  # a statement may take a third of that
    gate = await streams.close_gate()
    publishing = asyncio.create_task(execution.publish("a"))
    await streams.crew.blocked()
    await eventually(lambda: waiting_for(streams, 2), message="the first statement waits, and its repetition too")

    await gate.open()
    await publishing
    await execution.publish("b")

    assert await streams.all(run_id) == [Frame(0, 0, "a"), Frame(0, 1, "b")]


async def waiting_for(streams: Streams, sessions: int) -> bool:
    waiting: int = await streams.database.fetchval(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    return waiting >= sessions


async def test_a_publish_that_was_cancelled_on_its_way_leaves_no_gap(streams: Streams, run_id: uuid.UUID) -> None:
    """It has its place; whether it was stored is not known, so the next publish sees to it."""
    execution = await streams.execute()
    gate = await streams.close_gate()
    cancelled = asyncio.create_task(execution.publish("a"))
    await streams.crew.blocked()
    never_sent = asyncio.create_task(execution.publish("b"))
    following = asyncio.create_task(execution.publish("c"))
    await asyncio.sleep(0)
    for task in (cancelled, never_sent):
        task.cancel()
    await asyncio.wait([cancelled, never_sent])

    await gate.open()
    await following

    assert await streams.all(run_id) == [Frame(0, 0, "a"), Frame(0, 1, "c")]


async def test_a_locked_row_is_waited_for_and_not_taken_for_a_lost_lease(streams: Streams, run_id: uuid.UUID) -> None:
    execution = await streams.execute()
    holder = await streams.crew.connect()
    lock = holder.transaction()
    await lock.start()
    await holder.execute("SELECT FROM fencepost.jobs WHERE run_id = $1 FOR UPDATE", run_id)
    publishing = asyncio.create_task(execution.publish("a"))
    await eventually(lambda: statements(streams, "publish_chunks"), message="it was tried more than once")
    assert not publishing.done()

    await lock.rollback()
    await publishing
    assert texts(await streams.all(run_id)) == ["a"]


async def statements(streams: Streams, name: str) -> bool:
    """Whether a session of the streams' pool has asked why nothing was changed, after that statement."""
    asked: int = await streams.database.fetchval(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle' AND query LIKE $1",
        f"-- fencepost:{name}%",
    )
    return asked > 0


async def test_other_runs_do_not_wait_for_a_locked_row(streams: Streams, run_id: uuid.UUID) -> None:
    locked = await streams.execute()
    other_id = await streams.crew.runs.accept()
    other = await streams.execute()
    holder = await streams.crew.connect()
    lock = holder.transaction()
    await lock.start()
    await holder.execute("SELECT FROM fencepost.jobs WHERE run_id = $1 FOR UPDATE", run_id)

    publishing = asyncio.create_task(locked.publish("a"))
    await other.publish("b")

    assert not publishing.done()
    assert texts(await streams.all(other_id)) == ["b"]
    await lock.rollback()
    await publishing


# -- stream attempts -------------------------------------------------------------------------------------------------------------


async def test_a_retried_run_starts_over_visibly(streams: Streams, run_id: uuid.UUID) -> None:
    """STREAM-14: the reader is told at the start of the execution, before anything is published."""
    first = await streams.execute()
    await first.publish("a", "b", "c", step="answer")
    await first.fail()
    streams.rung.clear()
    second = await streams.execute()
    assert await streams.attempt(run_id) == 1
    assert streams.rung == [run_id]
    await second.publish("x", "y", step="answer")
    reader = streams.reader(run_id)
    reader.place = (0, 1)

    assert places(await streams.all(run_id)) == ["0.0", "0.1", "0.2", "1.0", "1.1"]
    assert await reader.read() == [Frame(0, 2, "c"), Frame(1, 0, "x"), Frame(1, 1, "y")]


async def test_an_execution_that_finds_nothing_unfinished_goes_on_in_place(streams: Streams, run_id: uuid.UUID) -> None:
    first = await streams.execute()
    await first.publish("a", step="one")
    await first.record("one")
    await first.fail()

    second = await streams.execute()
    await second.publisher.carry("one", 0)
    await second.publish("b", step="two")

    assert await streams.all(run_id) == [Frame(0, 0, "a"), Frame(0, 1, "b")]
    assert streams.counted["carried"] == 0


async def test_a_new_attempt_has_the_chunks_of_ended_steps_in_place(streams: Streams, run_id: uuid.UUID) -> None:
    first = await streams.execute()
    await first.publish("intro")
    await first.publish("a", "b", step="one")
    await first.record("one")
    await first.publish("c", step="two")  # left behind
    await first.fail()

    second = await streams.execute()
    await second.publish("intro")
    await second.publisher.carry("one", 0)
    await second.publish("C", step="two")

    newest = [frame for frame in await streams.all(run_id) if frame.attempt == 1]
    assert newest == [Frame(1, 0, "intro"), Frame(1, 1, "a"), Frame(1, 2, "b"), Frame(1, 3, "C")]
    assert streams.counted["carried"] == 2


async def test_what_was_left_behind_is_never_carried(streams: Streams, run_id: uuid.UUID) -> None:
    """A step that published, was cut off, and publishes nothing when it is executed again: its chunks of then are nobody's."""
    first = await streams.execute()
    await first.publish("stale", step="one")
    await first.fail()
    second = await streams.execute()
    await second.record("one")
    await second.publish("outside")
    await second.fail()

    third = await streams.execute()
    await third.publisher.carry("one", 0)
    await third.publish("outside")

    assert [frame for frame in await streams.all(run_id) if frame.attempt == 2] == [Frame(2, 0, "outside")]


async def test_chunks_that_keep_their_step_are_carried_though_nobody_wants_them(streams: Streams, run_id: uuid.UUID) -> None:
    """The broken model of the test above: an opening that leaves what was left behind as it is."""
    await streams.alter("open_stream", "AND c.step <> ''\n", "AND false\n")
    with pytest.raises(AssertionError, match="stale"):
        await test_what_was_left_behind_is_never_carried(streams, run_id)


async def test_chunks_are_carried_from_the_newest_attempt_that_has_them(streams: Streams, run_id: uuid.UUID) -> None:
    """An execution that opened an attempt and ended before it came to the step has not carried it."""
    first = await streams.execute()
    await first.publish("a", step="one")
    await first.record("one")
    await first.publish("b", step="two")
    await first.fail()
    second = await streams.execute()
    await second.publish("outside")
    await second.fail()

    third = await streams.execute()
    await third.publisher.carry("one", 0)

    assert [frame for frame in await streams.all(run_id) if frame.attempt == 2] == [Frame(2, 0, "a")]


async def test_occurrences_of_a_step_are_told_apart(streams: Streams, run_id: uuid.UUID) -> None:
    first = await streams.execute()
    await first.publish("a", step="one", occurrence=0)
    await first.record("one", 0)
    await first.publish("b", step="one", occurrence=1)
    await first.fail()

    second = await streams.execute()
    await second.publisher.carry("one", 0)
    await second.publish("B", step="one", occurrence=1)

    assert [frame.chunk for frame in await streams.all(run_id) if frame.attempt == 1] == ["a", "B"]


async def test_continue_as_new_opens_an_attempt_and_carries_nothing(streams: Streams, run_id: uuid.UUID) -> None:
    first = await streams.execute()
    await first.publish("a", step="one")
    await first.record("one")
    assert await continue_run(streams, first)

    second = await streams.execute()
    await second.publisher.carry("one", 0)
    await second.publish("b", step="one")

    assert (second.claim.root_run_id, second.claim.iteration) == (run_id, 1)
    assert await streams.all(run_id) == [Frame(0, 0, "a"), Frame(1, 0, "b")]


async def continue_run(streams: Streams, execution: Execution) -> bool:
    key = execution.claim.key
    return bool(
        await streams.database.fetchval(
            "SELECT fencepost.continue_run('A', $1, $2, $3, $4, 'report', 1, '{}', 3, NULL, interval '0', NULL, NULL)",
            key.tenant_id, key.run_id, key.generation, uuid7(),
        )
    )  # fmt: skip


async def test_a_replay_goes_on_with_the_lineages_stream(streams: Streams, run_id: uuid.UUID) -> None:
    """Two runs of a lineage: what the dead run's steps have published is there, what it left unfinished is cleared."""
    dead = await streams.execute()
    await dead.publish("a", step="one")
    await dead.record("one")
    await dead.publish("b", step="two")
    assert await dead.hand.fail(dead.claim.key)
    outcome, _ = await streams.crew.runs.replay(run_id)
    assert outcome == "replayed"

    again = await streams.execute()
    await again.publisher.carry("one", 0)
    await again.publish("B", step="two")

    assert again.claim.key.run_id != run_id
    assert await streams.all(run_id) == [Frame(0, 0, "a"), Frame(0, 1, "b"), Frame(1, 0, "a"), Frame(1, 1, "B")]


async def test_two_tenants_with_one_run_id_have_two_streams(streams: Streams) -> None:
    run_id = uuid7()
    for tenant in ("acme", "zeta"):
        await streams.crew.runs.accept(tenant=tenant, run_id=run_id)
        await (await streams.execute()).publish(tenant)

    assert texts(await streams.reader(run_id, "acme").read()) == ["acme"]
    assert texts(await streams.reader(run_id, "zeta").read()) == ["zeta"]


# -- bounds ----------------------------------------------------------------------------------------------------------------------


async def test_a_stream_that_is_cut_says_so(streams: Streams, run_id: uuid.UUID) -> None:
    """S9: 10,000 chunks, then the mark at the greatest offset; what follows is dropped and counted, and fails nobody."""
    execution = await streams.execute()
    await asyncio.gather(*[execution.publish(number) for number in range(MOST_STORED)])
    assert [frame.chunk for frame in (await streams.all(run_id))[-1:]] == [MOST_STORED - 1]

    await asyncio.gather(*[execution.publish("beyond") for _ in range(7)])
    await execution.publish("beyond")

    frames = await streams.all(run_id)
    assert frames[-2:] == [Frame(0, MOST_STORED - 1, MOST_STORED - 1), Frame(0, CUT_OFFSET, CUT)]
    assert len(frames) == MOST_STORED + 1
    assert (streams.counted["stored"], streams.counted["cut"]) == (MOST_STORED, 8)
    await execution.complete()


async def test_a_cut_stream_stays_cut_for_the_execution_that_goes_on_with_it(streams: Streams, run_id: uuid.UUID) -> None:
    first = await streams.execute()
    await asyncio.gather(*[first.publish(number, step="one") for number in range(MOST_STORED + 1)])
    await first.record("one")
    await first.fail()

    second = await streams.execute()
    await second.publisher.carry("one", 0)
    await second.publish("beyond", step="two")

    frames = await streams.all(run_id)
    assert (len(frames), frames[-1]) == (MOST_STORED + 1, Frame(0, CUT_OFFSET, CUT))


async def test_a_cut_step_is_carried_with_its_mark(streams: Streams, run_id: uuid.UUID) -> None:
    first = await streams.execute()
    await first.publish("intro")
    await asyncio.gather(*[first.publish(number, step="one") for number in range(MOST_STORED)])
    await first.record("one")
    await first.fail()

    second = await streams.execute()
    await second.publisher.carry("one", 0)  # one less than before: the intro has not come yet
    await second.publish("beyond")

    frames = [frame for frame in await streams.all(run_id) if frame.attempt == 1]
    assert (len(frames), frames[-2], frames[-1]) == (MOST_STORED, Frame(1, 9_998, 9_998), Frame(1, CUT_OFFSET, CUT))


async def test_a_carry_beyond_the_bound_cuts(streams: Streams, run_id: uuid.UUID) -> None:
    first = await streams.execute()
    await asyncio.gather(*[first.publish(number, step="one") for number in range(MOST_STORED)])
    await first.record("one")
    await first.fail()
    second = await streams.execute()
    await second.publish("ends it")
    await second.publisher.carry("one", 0)
    await second.publish("beyond")

    frames = [frame for frame in await streams.all(run_id) if frame.chunk not in range(MOST_STORED)]
    assert frames == [Frame(0, CUT_OFFSET, CUT)]  # nothing was left behind: it is the same attempt


async def test_a_chunk_may_have_65536_bytes_and_no_more(streams: Streams, run_id: uuid.UUID) -> None:
    execution = await streams.execute()
    longest = "x" * (MAX_CHUNK_BYTES - 2)

    await execution.publish(longest)
    with pytest.raises(InvalidCommand, match="chunk: 65537 bytes exceed the limit of 65536"):
        await execution.publish(longest + "x")
    await execution.publish("and on")

    assert texts(await streams.all(run_id)) == [longest, "and on"]


class Delta(BaseModel):
    text: str


@pytest.mark.parametrize(
    "chunk",
    [
        "\n", "\r", "\r\n", "\u2028", "x\n\nevent: result\ndata: forged\n\n", "a\x00b", {"\x00": "\u2029"}, [1, None, True, 1.5],
        "", {"nested": {"\n": ["\r\n"]}}, "\U0001f600", 2**80,
    ],
)  # fmt: skip
async def test_a_chunk_is_one_line_and_the_value_that_was_published(streams: Streams, run_id: uuid.UUID, chunk: object) -> None:
    """STREAM-15: nothing in a chunk can end its frame."""
    await (await streams.execute()).publish(chunk)

    (data,) = [row["data"] for row in await streams.database.fetch("SELECT data FROM fencepost.chunks")]
    assert not {b"\n", b"\r", b"\x00"} & {bytes([byte]) for byte in data}
    assert json.loads(data) == chunk


async def test_a_model_is_published_by_its_own_rules_and_in_one_line(streams: Streams, run_id: uuid.UUID) -> None:
    class Pretty(Delta):
        def model_dump_json(self, **_: Any) -> str:
            return super().model_dump_json(indent=2).replace("\n", "\r\n")

    execution = await streams.execute()
    await execution.publish(Delta(text="a\nb"), Pretty(text="c\nd"))

    rows = await streams.database.fetch('SELECT data FROM fencepost.chunks ORDER BY "offset"')
    assert [json.loads(row["data"]) for row in rows] == [{"text": "a\nb"}, {"text": "c\nd"}]
    assert not any(b"\n" in row["data"] or b"\r" in row["data"] for row in rows)


@pytest.mark.parametrize(
    "chunk",
    ["\ud800", {1, 2}, object(), b"bytes", *IN_PLAIN_VALUES.values(), *IN_MODELS.values()],
    ids=["half of a pair", "set", "object", "bytes", *IN_PLAIN_VALUES, *IN_MODELS],
)
async def test_what_json_cannot_hold_is_refused_and_takes_no_place(streams: Streams, run_id: uuid.UUID, chunk: object) -> None:
    execution = await streams.execute()
    with pytest.raises(InvalidCommand):
        await execution.publish(chunk)
    await execution.publish("next")

    assert await streams.all(run_id) == [Frame(0, 0, "next")]


class Reversing:
    """A codec that shows."""

    def encode(self, payload: bytes) -> bytes:
        return payload[::-1]

    def decode(self, payload: bytes) -> bytes:
        return payload[::-1]


class Doubling(Reversing):
    def encode(self, payload: bytes) -> bytes:
        return payload * 2


async def test_chunks_are_stored_through_the_codec(streams: Streams, run_id: uuid.UUID) -> None:
    execution = await streams.execute(codec=Reversing())
    await execution.publish({"secret": 1})

    assert await streams.database.fetchval("SELECT data FROM fencepost.chunks") == b'{"secret":1}'[::-1]


async def test_a_codec_that_makes_too_much_of_a_chunk_is_refused(streams: Streams, run_id: uuid.UUID) -> None:
    execution = await streams.execute(codec=Doubling())
    with pytest.raises(InvalidCommand, match="the codec makes"):
        await execution.publish("x" * 60_000)

    assert await streams.all(run_id) == []


# -- erasure and rights ----------------------------------------------------------------------------------------------------------


async def test_an_erasure_deletes_chunks_and_blocks_later_ones(streams: Streams, run_id: uuid.UUID) -> None:
    execution = await streams.execute()
    await execution.publish("a")
    await streams.database.execute("SELECT fencepost.erase_lineage('acme', $1, 'ana', 'asked')", run_id)

    with pytest.raises(LeaseLost):
        await execution.publish("b")

    assert await streams.all(run_id) == []


async def test_an_erasure_waits_for_a_chunk_that_is_being_stored(streams: Streams, run_id: uuid.UUID) -> None:
    execution = await streams.execute()
    await execution.publish("a")
    gate = await streams.close_gate()
    publishing = asyncio.create_task(execution.publish("b"))
    await streams.crew.blocked()
    eraser = await streams.crew.connect()
    erasing = asyncio.create_task(eraser.execute("SELECT fencepost.erase_lineage('acme', $1, 'ana', 'asked')", run_id))
    await streams.crew.blocked(2)

    await gate.open()
    await asyncio.gather(publishing, erasing)

    assert await streams.all(run_id) == []


async def test_the_workers_role_may_do_all_this_and_delete_nothing(streams: Streams, run_id: uuid.UUID) -> None:
    async with user_of("fencepost_consumer", streams.crew.url) as url:
        writer = await streams.writer(url=url)
        first = Publisher(await streams.claim(), writer)
        await first.publish("one", 0, "a")
        await streams.crew.runs.expire_lease(run_id)
        second = Publisher(await streams.claim(), writer)
        await second.begin()
        await second.publish("one", 0, "a")
        store = await ChunkStore.open(url, worker_id="A", timeout_seconds=10)
        assert not await store.send_live(["[]"])
        assert await store.forget(WEEK, limit=10) == 0
        user = await asyncpg.connect(url)
        for forbidden in ("DELETE FROM fencepost.chunks", "UPDATE fencepost.chunks SET data = ''"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await user.execute(forbidden)
        await user.close()
        await store.close()
        await writer.close()


async def test_a_streams_chunks_go_with_their_run(streams: Streams, run_id: uuid.UUID) -> None:
    await (await streams.execute()).publish("a")
    await streams.crew.runs.accept()
    await (await streams.execute()).publish("b")

    await streams.database.execute("DELETE FROM fencepost.runs WHERE run_id = $1", run_id)

    assert await streams.database.fetchval("SELECT count(*) FROM fencepost.chunks") == 1


# -- what a chunk costs ----------------------------------------------------------------------------------------------------------


async def reset(streams: Streams) -> None:
    await streams.database.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
    await streams.database.execute("SELECT pg_stat_statements_reset(0, oid, 0) FROM pg_database WHERE datname = current_database()")


async def costs(streams: Streams, statement: str) -> Any:
    return await streams.database.fetchrow(
        "SELECT sum(calls)::bigint AS calls, sum(wal_bytes - wal_fpi * 8192)::bigint AS wal_bytes,"
        " sum(shared_blks_hit + shared_blks_read)::bigint AS buffers"
        " FROM pg_stat_statements AS s JOIN pg_database AS d ON d.oid = s.dbid"
        " WHERE d.datname = current_database() AND toplevel AND query LIKE $1", f"-- fencepost:{statement}%",
    )  # fmt: skip


async def test_a_batch_of_500_chunks_is_one_statement(streams: Streams, run_id: uuid.UUID) -> None:
    """And a chunk's bytes of WAL are bounded: its row and its index entry, nothing else."""
    execution = await streams.execute()
    await execution.publish("opens")
    await reset(streams)

    await asyncio.gather(*[execution.publish({"token": "word "}) for _ in range(500)])

    found = await costs(streams, "publish_chunks")
    assert found["calls"] == 1
    assert found["wal_bytes"] / 500 <= 320
    assert found["buffers"] / 500 <= 8


async def test_a_chunk_of_each_of_100_runs_is_one_statement(streams: Streams) -> None:
    for _ in range(100):
        await streams.crew.runs.accept()
    claims = await (await streams.hand()).claims(100)
    executions = [await streams.begin(claim) for claim in claims]
    await asyncio.gather(*[execution.publish("opens") for execution in executions])
    await reset(streams)

    await asyncio.gather(*[execution.publish("a") for execution in executions])

    found = await costs(streams, "publish_chunks")
    assert (len(executions), found["calls"]) == (100, 1)
    assert len(streams.rung) == 200


async def test_a_memo_hit_without_chunks_costs_no_statement(streams: Streams, run_id: uuid.UUID) -> None:
    first = await streams.execute()
    for step in ("one", "two"):
        await first.record(step)
    await first.publish("a")
    await first.fail()
    second = await streams.execute()
    await reset(streams)

    for step in ("one", "two"):
        await second.publisher.carry(step, 0)

    assert (await costs(streams, "carry_chunks"))["calls"] is None


def test_every_statement_is_named_as_its_store_calls_it() -> None:
    assert set(CHUNK_STATEMENTS) == {"open_stream", "publish_chunks", "carry_chunks", "send_live", "forget_chunks"}


async def test_the_first_chunk_of_a_run_costs_no_more_statements_than_the_second(streams: Streams, run_id: uuid.UUID) -> None:
    execution = await streams.execute()
    await reset(streams)
    await execution.publish("a")

    assert (await costs(streams, ""))["calls"] == 1
    assert (await execution.hand.store.complete([completion(execution.claim.key)])) == {execution.claim.key}
