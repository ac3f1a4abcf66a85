"""Streams against their contract: whatever executions, crashes, lost answers and replays there are, a reader has what it must.

The contract: after the last attempt frame there is exactly what the current execution has published, what is there of steps that
have ended, and nothing else; what was read before never changes. A machine of Hypothesis makes up the calls, on real PostgreSQL;
broken statements are kept, each of which it must catch.
"""

import asyncio
import uuid
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, NamedTuple

import asyncpg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from uuid_utils.compat import uuid7

from consumer_sdk.chunk_store import CHUNK_STATEMENTS, ChunkBatch, ChunkStore, Stream
from consumer_sdk.jobs import Claim
from consumer_sdk.run_store import ROLE
from fencepost.database import StatementPool
from fencepost.errors import InvariantViolated, LeaseLost, TransientError
from tests.support.chunks import Execution, Frame, Reader, Streams

pytestmark = pytest.mark.services

WORKERS: Final = ("A", "B")
SETTINGS: Final = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    database=None,
    print_blob=True,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
EMPTY: Final = (
    "DELETE FROM fencepost.job_replays; DELETE FROM fencepost.effects; DELETE FROM fencepost.runs; DELETE FROM fencepost.outbox"
)


class UnreliableStore(ChunkStore):
    """Does what it is asked. When ``forgets`` is set it loses one answer; while ``paused`` a publish waits before its statement."""

    forgets = False
    paused = False

    def pause(self) -> None:
        self.paused = True
        self.arrived, self.resumed, self.answered = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def resume(self) -> None:
        """Until the publish that waited has been done."""
        self.paused = False
        self.resumed.set()
        await self.answered.wait()

    async def publish(self, batches: Sequence[ChunkBatch]) -> frozenset[int]:
        waits = self.paused
        if waits:
            self.arrived.set()
            await self.resumed.wait()
        stored = await super().publish(batches)
        if waits:
            self.answered.set()
        self.answer()
        return stored

    async def open_stream(self, claim: Claim) -> Stream | None:
        stream = await super().open_stream(claim)
        self.answer()
        return stream

    async def carry(self, claim: Claim, **place: Any) -> tuple[int, bool] | None:
        carried = await super().carry(claim, **place)
        self.answer()
        return carried

    def answer(self) -> None:
        if self.forgets:
            self.forgets = False
            raise TransientError("no answer")


class Bench:
    """A database, from code that is not asynchronous; one for all examples of a test."""

    def __init__(self, url: str, statements: Mapping[str, str] = CHUNK_STATEMENTS) -> None:
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self.stores: dict[str, UnreliableStore] = {}
        self.streams = self.run(self._open(url, statements))

    async def _open(self, url: str, statements: Mapping[str, str]) -> Streams:
        setting = await asyncpg.connect(url)
        await setting.execute(
            f'ALTER DATABASE "{await setting.fetchval("SELECT current_database()")}" SET synchronous_commit = off'
        )
        await setting.close()
        streams = await self._stack.enter_async_context(Streams.on(url))
        for worker in WORKERS:
            pool = await StatementPool.open(url, statements, role=ROLE, size=2, timeout_seconds=20, server_settings={})
            self.stores[worker] = UnreliableStore(pool, worker)
            (await streams.writer(worker))._store._opened = self.stores[worker]
        return streams

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(call)

    def close(self) -> None:
        self.run(self._stack.aclose())
        self._runner.close()


class Step(NamedTuple):
    """A call of a step, or what is outside of all steps."""

    name: str
    occurrence: int


OUTSIDE: Final = Step("", 0)
steps = st.sampled_from([Step("one", 0), Step("one", 1), Step("two", 0)])
workers = st.sampled_from(WORKERS)


class Machine(RuleBasedStateMachine):
    """``shown``: what each stream attempt shows, in order. ``ended``: the iteration's steps that have ended, with their chunks."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self.bench = bench
        self.streams = bench.streams
        self.shown: list[list[tuple[Step, int]]] = []
        self.ended: dict[Step, list[int]] = {}
        self.iteration_of_stream = 0
        self.iteration = 0
        self.number = 0
        self.execution: Execution | None = None
        self.mine: list[tuple[Step, int]] = []
        self.passed: set[Step] = set()
        self.unsure = False
        self.past: list[Execution] = []
        self.readers: list[tuple[Reader, list[Frame]]] = []

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.bench.run(call)

    @initialize()
    def begin(self) -> None:
        for store in self.bench.stores.values():
            store.forgets = store.paused = False
        self.run(self.streams.database.execute(EMPTY))
        self.root: uuid.UUID = self.run(self.streams.crew.runs.accept(max_attempts=1_000))
        self.read_anew()

    # Executions.

    @precondition(lambda self: self.execution is None)
    @rule(worker=workers)
    def execute(self, worker: str) -> None:
        execution = self.run(self.streams.execute(worker))
        unfinished = bool(self.shown) and any(step not in self.ended for step, _ in self.shown[-1])
        if self.shown and (unfinished or self.iteration_of_stream != self.iteration):
            self.shown.append([])
            self.iteration_of_stream = self.iteration
        self.execution, self.mine, self.passed, self.unsure = execution, [], set(), False

    def over(self) -> None:
        assert self.execution is not None
        self.past.append(self.execution)
        self.execution = None

    @precondition(lambda self: self.execution is not None)
    @rule()
    def crash(self) -> None:
        assert self.execution is not None
        self.run(self.execution.lose())
        self.over()

    @precondition(lambda self: self.execution is not None)
    @rule()
    def fail(self) -> None:
        assert self.execution is not None
        self.run(self.execution.fail())
        self.over()

    @precondition(lambda self: self.execution is not None)
    @rule()
    def die_and_be_replayed(self) -> None:
        assert self.execution is not None
        key = self.execution.claim.key
        assert self.run(self.execution.hand.fail(key))
        outcome, _ = self.run(self.streams.crew.runs.replay(key.run_id, limit=1_000))
        assert outcome == "replayed"
        self.over()

    @precondition(lambda self: self.execution is not None)
    @rule()
    def continue_as_new(self) -> None:
        assert self.execution is not None
        key = self.execution.claim.key
        continued = self.streams.database.fetchval(
            "SELECT fencepost.continue_run($1, $2, $3, $4, $5, 'report', 1, '{}', 1000, NULL, interval '0', NULL, NULL)",
            self.execution.hand.worker_id, key.tenant_id, key.run_id, key.generation, uuid7(),
        )  # fmt: skip
        assert self.run(continued) is not None
        self.iteration += 1
        self.ended = {}
        self.over()

    # What an execution does.

    @precondition(lambda self: self.execution is not None)
    @rule(step=st.one_of(st.just(OUTSIDE), steps), chunks=st.integers(1, 3), forgets=st.booleans())
    def publish(self, step: Step, chunks: int, forgets: bool) -> None:
        """Not within a step that has ended: it is not called."""
        assert self.execution is not None
        if step in self.ended:
            return
        self.store.forgets = forgets
        numbers = [self.next_number() for _ in range(chunks)]

        async def at_once() -> None:
            assert self.execution is not None
            await asyncio.gather(*[self.execution.publisher.publish(*step, number) for number in numbers])

        self.run(at_once())
        self.unsure = False
        self.show([(step, number) for number in numbers])

    @precondition(lambda self: self.execution is not None and not self.unsure)
    @rule()
    def publish_and_be_cancelled(self) -> None:
        """The chunk was on its way, and arrives. The execution does not know, so it is what it sends first next time."""
        number = self.next_number()
        execution, store = self.execution, self.store
        assert execution is not None

        async def cancelled() -> None:
            store.pause()
            publishing = asyncio.create_task(execution.publish(number))
            await store.arrived.wait()
            publishing.cancel()
            await asyncio.wait([publishing])
            await store.resume()

        self.run(cancelled())
        self.unsure = True
        self.show([(OUTSIDE, number)])

    @precondition(lambda self: self.execution is not None)
    @rule(step=steps)
    def end_step(self, step: Step) -> None:
        assert self.execution is not None
        if step not in self.ended:
            self.run(self.execution.record(*step))
            self.ended[step] = [number for at, number in self.mine if at == step]
            self.passed.add(step)

    @precondition(lambda self: self.execution is not None)
    @rule(step=steps, forgets=st.booleans())
    def pass_step(self, step: Step, forgets: bool) -> None:
        """A step that ended in an earlier execution: once in each."""
        assert self.execution is not None
        if step not in self.ended or step in self.passed:
            return
        self.passed.add(step)
        self.store.forgets = forgets
        self.run(self.execution.publisher.carry(*step))
        self.store.forgets = False
        if self.shown and not any(at == step for at, _ in self.shown[-1]):
            self.shown[-1] += [(step, number) for number in self.ended[step]]

    # Whoever is not the holder any more, and whoever reads.

    @precondition(lambda self: self.past)
    @rule(turn=st.integers(0, 100), step=st.one_of(st.just(OUTSIDE), steps))
    def publish_late(self, turn: int, step: Step) -> None:
        self.refused(self.past[turn % len(self.past)], step)

    @precondition(lambda self: self.own_past())
    @rule(turn=st.integers(0, 100), step=st.one_of(st.just(OUTSIDE), steps))
    def publish_late_beside_oneself(self, turn: int, step: Step) -> None:
        """The worker holds the run again: it is its generation that does not let it through."""
        past = self.own_past()
        self.refused(past[turn % len(past)], step)

    def own_past(self) -> list[Execution]:
        """Executions of the current run by its current worker."""
        if self.execution is None:
            return []
        worker, run = self.execution.hand.worker_id, self.execution.claim.key.run_id
        return [late for late in self.past if (late.hand.worker_id, late.claim.key.run_id) == (worker, run)]

    def refused(self, late: Execution, step: Step) -> None:
        try:
            self.run(late.publisher.publish(*step, "late"))
        except LeaseLost:
            return
        raise AssertionError("a chunk was stored without a lease")

    @rule()
    def read_anew(self) -> None:
        self.readers.append((self.streams.reader(self.root), []))

    @rule(turn=st.integers(0, 100), most=st.sampled_from([1, 2, 1_000]))
    def read_on(self, turn: int, most: int) -> None:
        """A reader has always read a beginning of what there is."""
        reader, seen = self.readers[turn % len(self.readers)]
        seen += self.run(reader.read(most))
        assert seen == self.frames()[: len(seen)]

    # What must hold.

    @invariant()
    def the_stream_is_what_was_published(self) -> None:
        assert self.run(self.streams.all(self.root)) == self.frames()
        assert self.run(self.streams.attempt(self.root)) == (len(self.shown) - 1 if self.shown else None)

    @invariant()
    def the_last_attempt_holds_what_has_ended_and_what_is_the_current_executions(self) -> None:
        """Said anew, from the executions' side."""
        if self.execution is None or not self.shown:
            return
        last = self.shown[-1]
        assert [shown for shown in last if shown in self.mine] == self.mine
        for step, number in last:
            assert (step, number) in self.mine or number in self.ended.get(step, ()), "it belongs to nobody"
        for step in self.passed:
            assert [number for at, number in last if at == step] == self.ended[step]

    @property
    def store(self) -> UnreliableStore:
        assert self.execution is not None
        return self.bench.stores[self.execution.hand.worker_id]

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def show(self, chunks: list[tuple[Step, int]]) -> None:
        if not self.shown:
            self.shown.append([])
            self.iteration_of_stream = self.iteration
        self.shown[-1] += chunks
        self.mine += chunks

    def frames(self) -> list[Frame]:
        return [
            Frame(attempt, offset, number) for attempt, chunks in enumerate(self.shown) for offset, (_, number) in enumerate(chunks)
        ]


@pytest.fixture
def bench(database_url: str) -> Iterator[Bench]:
    bench = Bench(database_url)
    yield bench
    bench.close()


def test_a_reader_has_what_it_must_whatever_happens(bench: Bench) -> None:
    factory: Any = lambda: Machine(bench)  # noqa: E731 - Hypothesis reads the source of a lambda, and of no partial
    run_state_machine_as_test(factory, settings=SETTINGS)


BROKEN: Final = {
    "an unfinished step does not open an attempt": ("open_stream", " OR EXISTS (SELECT FROM unfinished)", ""),
    "another iteration does not open an attempt": ("open_stream", "(t.is_anothers OR", "(false OR"),
    "an expired lease stores": ("publish_chunks", "h.lease_expires_at > clock_timestamp()", "true"),
    "another generation stores": ("publish_chunks", "AND x.lease_generation = g.generation", ""),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_statement_is_found_out(database_url: str, fault: str) -> None:
    """The models that must fail."""
    name, right, wrong = BROKEN[fault]
    assert right in CHUNK_STATEMENTS[name]
    bench = Bench(database_url, {**CHUNK_STATEMENTS, name: CHUNK_STATEMENTS[name].replace(right, wrong)})
    factory: Any = lambda: Machine(bench)  # noqa: E731 - as above
    hunt = settings(SETTINGS, max_examples=400, phases=[Phase.generate])
    try:
        with pytest.raises((AssertionError, InvariantViolated)):
            run_state_machine_as_test(factory, settings=hunt)
    finally:
        bench.close()
