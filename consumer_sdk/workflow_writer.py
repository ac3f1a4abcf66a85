"""What workflows write and read of themselves: batched, tried again while the lease may be trusted, refused by the fence."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from consumer_sdk.context import AttemptState
from consumer_sdk.run_writer import RunWriter
from consumer_sdk.steps import KeptStep, StepKey, StepRecord, Timer
from consumer_sdk.workflow_context import Publishing
from consumer_sdk.workflow_store import WorkflowStore
from fencepost.batching import Batcher
from fencepost.errors import WorkflowChanged
from fencepost.secrets import Secrets

__all__ = ["WorkflowWriter"]

# A result may have 1 MB: what one statement carries, or brings back.
_MOST_BYTES: Final = 4_000_000
_MOST_READ: Final = 50


class WorkflowWriter:
    """Steps and timers of one worker's workflows. Each write raises ``LeaseLost`` where the fence refused it."""

    def __init__(
        self, *, store: WorkflowStore, runs: RunWriter, secrets: Secrets, publisher: Callable[[AttemptState], Publishing]
    ) -> None:
        self._store = store
        self._runs = runs
        self.secrets = secrets
        self.publisher = publisher
        self._reads = Batcher[StepKey, KeptStep | None](self._read_all)
        self._records = Batcher[StepRecord, bool | None](self._record_all)

    async def read(self, state: AttemptState, key: StepKey) -> KeptStep | None:
        """What an earlier execution kept of a step; None if it did not come so far."""
        return await self._runs.patiently("read_steps", lambda: self._reads.put(key), state.trusted_until)

    async def record(self, state: AttemptState, key: StepKey, kept: KeptStep) -> None:
        """Keep what a step returned."""
        record = StepRecord(state.claim.key, key, kept)

        async def write() -> bool:
            recorded = await self._records.put(record)
            if recorded is None:
                await self._runs.refuse_unchanged("record_steps", state.claim.key)
            return recorded is True

        if not await self._runs.patiently("record_steps", write, state.trusted_until):
            raise WorkflowChanged(f"step {key.step}: something else is kept of it")

    async def begin_timer(self, state: AttemptState, key: StepKey, *, fingerprint: bytes, version: int, seconds: float) -> Timer:
        """Set a timer, or find it as it was set first."""
        claim = state.claim

        async def write() -> Timer:
            timer = await self._store.begin_timer(claim, key, fingerprint=fingerprint, version=version, seconds=seconds)
            return timer or await self._runs.refuse_unchanged("begin_timer", claim.key)

        return await self._runs.patiently("begin_timer", write, state.trusted_until)

    async def _read_all(self, keys: Sequence[StepKey]) -> Sequence[KeptStep | None]:
        found: list[KeptStep | None] = []
        for place in range(0, len(keys), _MOST_READ):
            found += await self._runs.timed("read_steps", self._store.read(keys[place : place + _MOST_READ]))
        return found

    async def _record_all(self, records: Sequence[StepRecord]) -> Sequence[bool | None]:
        found: list[bool | None] = []
        for some in _in_statements(records):
            recorded = await self._runs.timed("record_steps", self._store.record(some))
            found += [recorded.get(place) for place in range(len(some))]
        return found


def _in_statements(records: Sequence[StepRecord]) -> Iterator[Sequence[StepRecord]]:
    """The records in order, as many at a time as one statement should carry."""
    some: list[StepRecord] = []
    size = 0
    for record in records:
        length = len(record.kept.result or b"")
        if some and size + length > _MOST_BYTES:
            yield some
            some, size = [], 0
        some.append(record)
        size += length
    if some:
        yield some
