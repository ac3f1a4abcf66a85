"""The statements of workflows on a real database: who may write under which lease, and what a repetition does."""

import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

import pytest
from uuid_utils.compat import uuid7

from consumer_sdk.jobs import Claim, Continuation, JobKey, Usage
from consumer_sdk.steps import KeptStep, StepKey, StepRecord
from consumer_sdk.workflow_store import WorkflowStore
from fencepost.devservices import Services
from tests.support.session import SharedServices
from tests.support.workflows import Hall, hall_on

KEPT: Final = KeptStep(b"f" * 32, 1, b"7")


@pytest.fixture(scope="module")
def hall_url(services: Services, shared_services: SharedServices) -> Iterator[str]:
    """The module's database."""
    url = services.create_database(shared_services.template_url)
    yield url
    services.drop_database(url)


@dataclass
class Desk:
    """A worker's store, and a run that the worker has claimed."""

    hall: Hall
    store: WorkflowStore
    claim: Claim

    @property
    def key(self) -> StepKey:
        return StepKey(str(self.claim.root_run_id), "acme", 0, "note", 0)

    async def records(self, *, kept: KeptStep = KEPT, key: StepKey | None = None) -> bool | None:
        """Whether the row is the lease's; None where the fence refused."""
        return (await self.store.record([StepRecord(self.claim.key, key or self.key, kept)])).get(0)

    async def sets_timer(self) -> bool:
        timer = await self.store.begin_timer(self.claim, self.key, fingerprint=b"f" * 32, version=1, seconds=60)
        return timer is not None

    async def continues(self, new_run_id: uuid.UUID | None = None) -> bool:
        following = Continuation(
            key=self.claim.key, new_run_id=new_run_id or uuid7(), workflow="order", workflow_version=1, input=b"1", max_attempts=5,
            deadline_seconds=None, started_after_seconds=0.0, usage=Usage(cost=1, detail={"tokens": 2}),
        )  # fmt: skip
        return await self.store.continue_run(following) is not None


async def claimed(hall: Hall) -> Claim:
    run = await hall.accept()
    held = await hall.runs.claim_one()
    return Claim(
        key=JobKey(run, "acme", held.generation), attempt=1, max_attempts=20, workflow="order", workflow_version=1, input=b"null",
        checkpoint=None, retry_delay_seconds=None, attempt_seconds=None, root_run_id=run, iteration=0, traceparent=None,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )  # fmt: skip


@pytest.fixture
async def desk(hall_url: str) -> AsyncIterator[Desk]:
    async with hall_on(hall_url) as hall:
        store = WorkflowStore(hall_url, worker_id="w1", timeout_seconds=10)
        yield Desk(hall, store, await claimed(hall))
        await store.close()


async def held(_desk: Desk) -> None: ...


async def expired(desk: Desk) -> None:
    await desk.hall.runs.expire_lease(desk.claim.key.run_id)


async def cancelled(desk: Desk) -> None:
    assert await desk.hall.runs.cancel(desk.claim.key.run_id) == "requested"


async def taken_over(desk: Desk) -> None:
    await expired(desk)
    await desk.hall.runs.by("w2").claim_one()


async def of_another_owner(desk: Desk) -> None:
    await desk.hall.connection.execute("UPDATE fencepost.jobs SET lease_owner = 'w2'")


async def of_an_older_generation(desk: Desk) -> None:
    desk.claim = replace(desk.claim, key=desk.claim.key._replace(generation=0))


async def erased(desk: Desk) -> None:
    outcome = await desk.hall.connection.fetchval(
        "SELECT outcome FROM fencepost.erase_lineage('acme', $1, 'ana', 'asked to')", desk.claim.key.run_id
    )
    assert outcome == "erased"


@pytest.mark.parametrize(
    ("standing", "may"),
    [
        (held, True), (expired, False), (cancelled, False), (taken_over, False), (of_another_owner, False),
        (of_an_older_generation, False), (erased, False),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)  # fmt: skip
@pytest.mark.parametrize("verb", [Desk.records, Desk.sets_timer, Desk.continues], ids=["step", "timer", "continuation"])
async def test_only_who_holds_the_run_writes(
    desk: Desk,
    standing: Callable[[Desk], Coroutine[Any, Any, None]],
    may: bool,
    verb: Callable[[Desk], Coroutine[Any, Any, object]],
) -> None:
    """JOB-6: a stale holder changes nothing, and so does one whose run is to be cancelled or was erased."""
    await standing(desk)
    before = await everything(desk)

    assert bool(await verb(desk)) is may
    assert (await everything(desk) != before) is may


async def everything(desk: Desk) -> list[Any]:
    tables = ("effects", "runs", "jobs", "run_events", "job_attempts")
    return [await desk.hall.connection.fetch(f"SELECT * FROM fencepost.{table} ORDER BY 1, 2, 3") for table in tables]


async def test_a_step_that_is_recorded_again_under_its_lease_is_recorded(desk: Desk) -> None:
    assert await desk.records() is True
    before = await everything(desk)

    assert await desk.records() is True
    assert await everything(desk) == before


async def test_a_step_that_is_kept_by_another_lease_or_for_other_arguments_is_not_overwritten(desk: Desk) -> None:
    assert await desk.records() is True
    assert await desk.records(kept=KEPT._replace(fingerprint=b"g" * 32)) is False
    await taken_over(desk)
    desk.claim = replace(desk.claim, key=desk.claim.key._replace(generation=2))
    other = WorkflowStore(desk.hall.database_url, worker_id="w2", timeout_seconds=10)
    recorded = await other.record([StepRecord(desk.claim.key, desk.key, KEPT._replace(result=b"8"))])
    await other.close()

    assert recorded == {0: False}
    assert (await desk.store.read([desk.key]))[0] == KEPT


async def test_a_batch_records_what_is_held_and_passes_over_what_is_locked(desk: Desk) -> None:
    """Whoever holds a row holds up nobody else's steps."""
    locked, free = await claimed(desk.hall), await claimed(desk.hall)
    records = [StepRecord(claim.key, StepKey(str(claim.root_run_id), "acme", 0, "note", 0), KEPT) for claim in (locked, free)]
    async with desk.hall.connection.transaction():
        await desk.hall.connection.execute("SELECT FROM fencepost.jobs WHERE run_id = $1 FOR UPDATE", locked.key.run_id)
        recorded = await desk.store.record([*records, StepRecord(free.key, records[1].key._replace(occurrence=1), KEPT)])

    assert recorded == {1: True, 2: True}


async def test_steps_are_read_by_their_places(desk: Desk) -> None:
    await desk.records(key=desk.key._replace(occurrence=1))
    keys = [desk.key, desk.key._replace(occurrence=1), desk.key._replace(tenant_id="other", occurrence=1)]

    assert await desk.store.read(keys) == [None, KEPT, None]


async def test_a_timer_that_is_set_again_is_the_one_that_was_set_first(desk: Desk) -> None:
    first = await desk.store.begin_timer(desk.claim, desk.key, fingerprint=b"f" * 32, version=1, seconds=60)
    second = await desk.store.begin_timer(desk.claim, desk.key, fingerprint=b"g" * 32, version=2, seconds=6_000)

    assert first is not None
    assert second is not None
    assert (second.fingerprint, second.fingerprint_version) == (first.fingerprint, first.fingerprint_version) == (b"f" * 32, 1)
    assert 55 < second.seconds_left <= first.seconds_left <= 60


async def test_a_continuation_that_is_repeated_starts_nothing_more(desk: Desk) -> None:
    following = uuid7()

    assert await desk.continues(following)
    assert not await desk.continues(following)
    assert [(row["run_id"], row["state"]) for row in await desk.hall.lineage(desk.claim.key.run_id)] == [
        (desk.claim.key.run_id, "continued"), (following, "queued"),
    ]  # fmt: skip
    (attempt,) = await desk.hall.runs.attempts(desk.claim.key.run_id)
    assert (attempt["outcome"], attempt["cost"], attempt["usage"]) == ("completed", 1, '{"tokens": 2}')
