"""The ledger on PostgreSQL keeps the contract that is shipped, and the one in memory answers as it does.

The second by a walk of statements, leases and time that is the same for both, at random from a seed that a failure tells.
"""

import random
import secrets
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from consumer_sdk.effects import EffectKey, RunFence
from consumer_sdk.testing import LedgerHarness, MemoryHarness
from consumer_sdk.testing.contract import LedgerContract
from fencepost.devservices import Services
from tests.support.effects import opened
from tests.support.runs import Runs
from tests.support.session import SharedServices

LEASE: Final = timedelta(hours=1)
WALKS: Final = 20
STEPS: Final = 80
HOLDERS: Final = ("w1", "w2")
FINGERPRINTS: Final = (b"f" * 32, b"f" * 32, b"g" * 32)
# Time passes in hundreds of seconds, and no sum of these comes within 20 of one: what a walk itself takes decides nothing.
TICK: Final = 100.0
HOLD: Final = timedelta(seconds=130)
TIMEOUT: Final = timedelta(seconds=330)
MARGIN: Final = timedelta(seconds=10)
IN_FLIGHT: Final = timedelta(seconds=540)
WINDOWS: Final = (timedelta(seconds=1_250), timedelta(seconds=1_250), None)
TOLERANCE_SECONDS: Final = 20.0
_TIMES: Final = ("created_at", "held_until", "first_sent_at", "sent_at", "deadline_at", "finished_at")
_PASS: Final = "UPDATE fencepost.effects SET " + ", ".join(f"{column} = {column} - $1::interval" for column in _TIMES)
_ASKED_AT: Final = 13  # where reconcile_effect takes it
_RESOLVE: Final = """
SELECT outcome FROM fencepost.resolve_effect($2, $1, $3, $4, $5, $6, $7, $8, NULL, NULL, 'ana', 'test')
"""


@pytest.fixture(scope="module")
def shared_url(services: Services, shared_services: SharedServices) -> Iterator[str]:
    """One database for all: each test has runs and keys of its own."""
    url = services.create_database(shared_services.template_url)
    yield url
    services.drop_database(url)


class PostgresHarness:
    """Time passes by moving rows, so what the database told of its time before is moved as well when it comes back."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._passed = timedelta(0)
        self._runs: dict[Any, Runs] = {}

    @asynccontextmanager
    async def ready(self) -> AsyncIterator["PostgresHarness"]:
        async with opened(self._url) as self._bench:
            yield self

    async def fetch(self, name: str, *arguments: Any) -> Sequence[Mapping[str, Any]]:
        given = list(arguments)
        if name == "reconcile_effect":
            given[_ASKED_AT] -= self._passed
        rows = [dict(row) for row in await self._bench.fetch(name, *given)]
        if name == "question_effect":
            rows = [row | {"asked_at": row["asked_at"] + self._passed} for row in rows]
        return rows

    async def row(self, key: EffectKey) -> Mapping[str, Any] | None:
        row = await self._bench.connection.fetchrow(
            "SELECT * FROM fencepost.effects WHERE (run_key, tenant_id, iteration, step, occurrence, operation) ="
            " ($1, $2, $3, $4, $5, $6)", *key,
        )  # fmt: skip
        return None if row is None else dict(row)

    async def advance(self, seconds: float) -> None:
        await self._bench.connection.execute(_PASS, timedelta(seconds=seconds))
        self._passed += timedelta(seconds=seconds)

    async def lease(self, owner: str, *, tenant_id: str) -> RunFence:
        # A workflow of its own, so that a claim finds this run and no other.
        runs = Runs(self._bench.connection, owner, tenant=tenant_id, workflow=f"order-{secrets.token_hex(8)}")
        await runs.accept(max_attempts=50)
        return await self._claimed(runs, owner)

    async def take_over(self, fence: RunFence, owner: str) -> RunFence:
        await self.lapse(fence)
        return await self._claimed(self._runs[fence.run_id], owner)

    async def replay(self, fence: RunFence, owner: str) -> RunFence:
        assert fence.run_id is not None
        runs = self._runs[fence.run_id]
        await runs.expire_lease(fence.run_id)
        held = await runs.claim_one(lease=LEASE)
        assert await runs.fail(held, delay=None, reason="not_retryable")
        outcome, _ = await runs.replay(fence.run_id, limit=STEPS)
        assert outcome == "replayed"
        return await self._claimed(runs, owner)

    async def lapse(self, fence: RunFence) -> None:
        assert fence.run_id is not None
        await self._runs[fence.run_id].expire_lease(fence.run_id)

    async def cancel(self, fence: RunFence) -> None:
        assert fence.run_id is not None
        assert await self._runs[fence.run_id].cancel(fence.run_id) == "requested"

    async def resolve(self, key: EffectKey, resolution: str, *, generation: int) -> str:
        return str(await self._bench.connection.fetchval(_RESOLVE, *key, generation, resolution))

    async def _claimed(self, runs: Runs, owner: str) -> RunFence:
        held = await runs.by(owner).claim_one(lease=LEASE)
        self._runs[held.run_id] = runs.by(owner)
        return RunFence(held.run_id, owner, held.generation)


class TestPostgresLedger(LedgerContract):
    """The ledger on PostgreSQL keeps the contract."""

    @pytest.fixture(autouse=True)
    def _database(self, shared_url: str) -> None:
        self.url = shared_url

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[LedgerHarness]:
        async with PostgresHarness(self.url).ready() as harness:
            yield harness


# -- side by side ---------------------------------------------------------------------------------------------------------


def new_key() -> EffectKey:
    return EffectKey(str(uuid.uuid4()), "acme", 0, "order", 0, "card.charge")


class Pair:
    """The same asked of both ledgers, whose answers must be the same; fences and times are each ledger's own."""

    def __init__(self, real: LedgerHarness, memory: LedgerHarness) -> None:
        self._both = (real, memory)
        self._key = new_key()
        self.fences: list[tuple[RunFence, RunFence]] = [(RunFence(None, None, None),) * 2]
        # The first is before all questions.
        self.asked: list[tuple[datetime, datetime]] = [(datetime.now(UTC) - timedelta(days=1),) * 2]
        self.last = "message"

    async def fetch(self, name: str, fences: tuple[RunFence, RunFence], *given: Any) -> Sequence[Mapping[str, Any]]:
        """Of each argument that is a pair of times, each ledger gets its own."""
        answers = []
        for number, harness in enumerate(self._both):
            own = [one[number] if isinstance(one, tuple) else one for one in given]
            answers.append(await harness.fetch(name, *self._key, *fences[number], *own))
        real, memory = answers
        assert len(real) == len(memory), (name, given)
        for one, other in zip(real, memory, strict=True):
            assert_same(one, {column: other[column] for column in one})
        if real and name == "question_effect":
            self.asked.append((real[0]["asked_at"], memory[0]["asked_at"]))
        return real

    async def move(self, verb: str, *given: Any, **options: Any) -> list[Any]:
        return [await getattr(harness, verb)(*given, **options) for harness in self._both]

    async def lease(self, verb: str, fences: tuple[RunFence, RunFence], holder: str) -> None:
        real, memory = [await getattr(one, verb)(fence, holder) for one, fence in zip(self._both, fences, strict=True)]
        assert (real.owner, real.generation) == (memory.owner, memory.generation)
        self.fences.append((real, memory))

    async def end(self, verb: str, fences: tuple[RunFence, RunFence]) -> None:
        for harness, fence in zip(self._both, fences, strict=True):
            await getattr(harness, verb)(fence)

    async def resolve(self, resolution: str, generation: int) -> None:
        real, memory = await self.move("resolve", self._key, resolution, generation=generation)
        assert real == memory

    async def compared(self, choose: random.Random) -> int:
        """The row's generation, once both ledgers hold the same. Of one that is over there is little to learn: soon, another."""
        real, memory = await self.move("row", self._key)
        assert (real is None) == (memory is None)
        if real is None:
            return 1
        for column, value in memory.items():
            if column in _TIMES and value is not None:
                since = (real[column] or datetime.max.replace(tzinfo=UTC)) - real["created_at"]
                assert abs((since - (value - memory["created_at"])).total_seconds()) < TOLERANCE_SECONDS, column
            elif column == "run_id":
                assert (real[column] is None) == (value is None)
            else:
                assert real[column] == value, column
        if real["finished_at"] is not None and choose.random() < 0.2:
            self._key = new_key()
            return 1
        return int(real["generation"])


def assert_same(real: Mapping[str, Any], memory: Mapping[str, Any]) -> None:
    for column, value in real.items():
        if column in {"wait_seconds", "proof_seconds"}:
            assert abs(value - memory[column]) < TOLERANCE_SECONDS, column
        elif column in {"asked_at", "sent_at"}:
            assert (value is None) == (memory[column] is None), column
        else:
            assert value == memory[column], column


async def step(pair: Pair, choose: random.Random, generation: int) -> str:
    """Do one thing to both, mostly what can change something; what it was."""
    under = choose.choice((generation, generation, generation, generation - 1))
    name = choose.choice((*MOVES, *STATEMENTS, *STATEMENTS, "reserve_effect", "send_effect", "finish_effect"))
    if name == "advance":
        await pair.move("advance", TICK * choose.choice((1, 1, 2, 4, 10)))
    elif name == "lease":
        await lease_step(pair, choose)
    elif name == "resolve":
        await pair.resolve(choose.choice(("absent", "absent", "applied", "disputed")), under)
    else:
        fences = choose.choice((pair.fences[-1], pair.fences[-1], choose.choice(pair.fences[-3:])))
        await pair.fetch(name, fences, *given(name, choose, pair, under))
    return name


def given(name: str, choose: random.Random, pair: Pair, under: int) -> tuple[Any, ...]:
    """What a statement is given beside identity and lease."""
    holder, fingerprint, window = choose.choice(HOLDERS), choose.choice(FINGERPRINTS), choose.choice(WINDOWS)
    match name:
        case "reserve_effect":
            return holder, HOLD, fingerprint, 1, f"fp_{under}", window
        case "read_effect":
            return MARGIN, IN_FLIGHT, window
        case "send_effect":
            return under, TIMEOUT
        case "finish_effect":
            state = choose.choice(("unknown", "unknown", "absent", "succeeded", "failed", "applied"))
            code = "refused" if state == "failed" else None
            return under, state, b"1" if state == "succeeded" else None, "ch_1", code, code
        case "question_effect":
            return under, MARGIN, holder
        case "reconcile_effect":
            state = choose.choice(("absent", "absent", "absent", "applied", "failed"))
            return under, state, b"2" if state == "applied" else None, None, choose.choice(pair.asked[-2:]), IN_FLIGHT
        case _:
            raise AssertionError(name)


async def lease_step(pair: Pair, choose: random.Random) -> None:
    """Hand a lease on: the newest, by what its run allows."""
    newest, holder = pair.fences[-1], choose.choice(HOLDERS)
    verb = choose.choice(NEXT[pair.last])
    pair.last = verb
    if verb == "message":
        pair.fences.append(pair.fences[0])
    elif verb == "lease":
        real, memory = await pair.move("lease", holder, tenant_id="acme")
        pair.fences.append((real, memory))
    elif verb in {"lapse", "cancel"}:
        await pair.end(verb, newest)
    else:
        await pair.lease(verb, newest, holder)


#: What may become of a lease after what became of it last; a run that is cancelled or forgotten has no other.
HELD: Final = ("take_over", "take_over", "replay", "lapse", "cancel", "message")
NEXT: Final = {
    "message": ("lease",), "lease": HELD, "take_over": HELD, "replay": HELD, "lapse": ("take_over", "lease"), "cancel": ("lease",),
}  # fmt: skip
STATEMENTS: Final = ("reserve_effect", "read_effect", "send_effect", "finish_effect", "question_effect", "reconcile_effect")
MOVES: Final = ("resolve", "advance", "advance", "advance", "lease", "lease", "lease")


async def test_the_ledger_in_memory_answers_as_the_one_on_postgresql_does(shared_url: str) -> None:
    seed = secrets.randbits(32)
    choose = random.Random(seed)
    for walk in range(WALKS):
        async with PostgresHarness(shared_url).ready() as real:
            pair, generation, done = Pair(real, MemoryHarness()), 1, []
            try:
                for _ in range(STEPS):
                    done.append(await step(pair, choose, generation))
                    generation = await pair.compared(choose)
            except Exception as error:
                raise AssertionError(f"seed {seed}, walk {walk}, after {done[-12:]}") from error
