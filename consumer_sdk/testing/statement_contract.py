"""The contract of the ledger's statements: which states each may change, under which lease and which generation."""

import uuid
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import datetime
from typing import Final

from consumer_sdk.effect_store import EffectStore
from consumer_sdk.effects import Answer
from consumer_sdk.testing.bench import LIMITS, Bench, Wanted, sentence
from consumer_sdk.testing.harness import LedgerHarness

__all__ = ["StatementContract"]

_HOLD_SECONDS: Final = 10.0
_MARGIN_SECONDS: Final = 5.0
_FINGERPRINT: Final = b"f" * 32
_DAY_SECONDS: Final = 86_400.0

# How an effect comes to be where it is: statements, and seconds that pass. A call may take 30, its request may be in flight for 60.
_SENT: Final = ("reserve", "send")
_SITUATIONS: Final[dict[str, tuple[str | float, ...]]] = {
    "reserved": ("reserve",),
    "reserved, left behind": ("reserve", 11.0),
    "sent": _SENT,
    "sent, within the margin": (*_SENT, 31.0),
    "sent, lapsed": (*_SENT, 36.0),
    "unknown": (*_SENT, "finish unknown", 36.0),
    "unknown, long ago": (*_SENT, "finish unknown", 91.0),
    "succeeded": (*_SENT, "finish succeeded"),
    "failed": (*_SENT, "finish failed"),
    "applied": (*_SENT, "finish unknown", "reconcile applied"),
    "absent": (*_SENT, "finish absent"),
    "absent, and its key forgotten": (*_SENT, "finish absent", _DAY_SECONDS),
    "absent again": (*_SENT, "finish absent", *_SENT, "finish absent"),
    "left behind, sent before": (*_SENT, "finish absent", "reserve", 11.0),
    "left behind, sent before, and its key forgotten": (*_SENT, "finish absent", "reserve", _DAY_SECONDS),
    "disputed": (*_SENT, "finish unknown", "resolve disputed"),
}
_OUT: Final = ("sent", "sent, within the margin", "sent, lapsed")
_UNKNOWN: Final = ("unknown", "unknown, long ago")
_FREE: Final = ("reserved, left behind", "absent", "absent again", "left behind, sent before")
#: What each statement makes of an effect; where nothing is said, it changes nothing.
_ALLOWED: Final[dict[str, dict[str, str]]] = {
    "reserve": dict.fromkeys(_FREE, "reserved"),
    "send": {"reserved": "sent"},
    "finish succeeded": dict.fromkeys(_OUT, "succeeded"),
    "finish failed": dict.fromkeys(_OUT, "failed"),
    "finish unknown": dict.fromkeys(_OUT, "unknown"),
    "finish absent": dict.fromkeys(_OUT, "absent"),
    "finish applied": {},
    "finish disputed": {},
    "finish reserved": {},
    "question": dict.fromkeys(("sent, lapsed", *_UNKNOWN), "unknown"),
    "reconcile applied": dict.fromkeys(_UNKNOWN, "applied"),
    "reconcile absent": {"unknown, long ago": "absent"},
    "reconcile succeeded": {},
}
_WRITES: Final = {statement: next(iter(allowed)) for statement, allowed in _ALLOWED.items() if allowed}


class StatementContract:
    """``LedgerContract`` includes it."""

    limit_seconds: float = 60.0

    def opened(self) -> AbstractAsyncContextManager[LedgerHarness]:
        """A ledger to put to the test."""
        raise NotImplementedError

    @sentence
    async def test_a_statement_changes_only_what_it_may(self, bench: Bench) -> None:
        for statement, allowed in _ALLOWED.items():
            for situation in _SITUATIONS:
                for wanted in await bench.both():
                    await _arranged(bench, wanted, situation)
                    before = await bench.row(wanted)
                    changed = await _done(bench, wanted, statement)
                    after = await bench.row(wanted)
                    place = f"{statement} of an effect that is {situation}: {wanted.fence}"
                    assert changed == (situation in allowed), place
                    assert after["state"] == allowed[situation] if changed else after == before, place
                    assert after["provider_key"] == before["provider_key"], place

    @sentence
    async def test_a_holder_whose_lease_is_not_current_writes_nothing(self, bench: Bench) -> None:
        for statement, situation in _WRITES.items():
            for lost in ("another owner", "an older generation", "a later generation", "lapsed", "taken over", "another tenant"):
                wanted = await bench.run()
                await _arranged(bench, wanted, situation)
                before = await bench.row(wanted)
                stale = await _lost(bench, wanted, lost)
                assert not await _done(bench, stale, statement, generation=before["generation"]), (statement, lost)
                assert await bench.row(wanted) == before, (statement, lost)

    @sentence
    async def test_a_write_under_another_generation_of_the_effect_changes_nothing(self, bench: Bench) -> None:
        """Without a run the effect's own generation is the only fence."""
        for statement, situation in _WRITES.items():
            if statement == "reserve":
                continue  # it makes the generation
            for wanted in await bench.both():
                await _arranged(bench, wanted, situation)
                before = await bench.row(wanted)
                for other in (before["generation"] - 1, before["generation"] + 1):
                    assert not await _done(bench, wanted, statement, generation=other), statement
                assert await bench.row(wanted) == before, statement

    @sentence
    async def test_each_take_over_raises_the_generation_and_nothing_lowers_it(self, bench: Bench) -> None:
        """LEDGER-17."""
        for wanted in await bench.both():
            seen = []
            for step in ("reserve", 11.0, "reserve", "send", 36.0, "question", "question", 91.0, "reconcile absent", "reserve"):
                await _step(bench, wanted, step)
                seen.append((await bench.row(wanted))["generation"])
            assert seen == [1, 1, 2, 2, 2, 3, 4, 4, 4, 5]

    @sentence
    async def test_a_later_lease_takes_a_reservation_over_at_once_and_an_older_one_never(self, bench: Bench) -> None:
        first = await bench.run()
        await _arranged(bench, first, "reserved")
        assert not await _done(bench, first, "reserve")
        second = await bench.next_attempt(first)
        assert await _done(bench, second, "reserve")
        await bench.pass_time(60)
        assert not await _done(bench, first, "reserve")
        row = await bench.row(first)
        assert (row["generation"], row["run_generation"], row["holder"]) == (2, 2, "w2")

    @sentence
    async def test_a_replay_takes_a_reservation_over_although_its_leases_count_from_1_again(self, bench: Bench) -> None:
        """LEDGER-8."""
        wanted = await bench.next_attempt(await bench.next_attempt(await bench.run()))
        await _arranged(bench, wanted, "reserved")
        replay = replace(wanted, fence=await bench.harness.replay(wanted.fence, "w1"))
        assert replay.fence.generation == 1
        assert await _done(bench, replay, "reserve")
        assert (await bench.row(wanted))["run_id"] == replay.fence.run_id

    @sentence
    async def test_a_run_that_is_to_be_cancelled_sends_nothing_and_still_records_answers(self, bench: Bench) -> None:
        for statement, situation in _WRITES.items():
            wanted = await bench.run()
            await _arranged(bench, wanted, situation)
            await bench.harness.cancel(wanted.fence)
            assert await _done(bench, wanted, statement) == (statement not in {"reserve", "send"}), statement
            known = await _store(bench, wanted).read(wanted.key, wanted.fence, margin_seconds=_MARGIN_SECONDS, limits=LIMITS)
            assert known is not None
            assert not known.held

    @sentence
    async def test_absence_counts_from_when_it_was_seen(self, bench: Bench) -> None:
        """Not from when it is told: a request on its way may have arrived between the two."""
        for wanted in await bench.both():
            for step in (*_SENT, "finish unknown", 80.0):
                await _step(bench, wanted, step)
            asked = await _asked(bench, wanted)
            await bench.pass_time(60)
            assert not await _done(bench, wanted, "reconcile absent", asked_at=asked)
            assert await _done(bench, wanted, "reconcile absent")

    @sentence
    async def test_what_is_read_of_an_effect_says_how_long_to_wait_for_it(self, bench: Bench) -> None:
        told = {
            "reserved": (False, False, 10, 0), "sent": (False, False, 35, 90), "sent, within the margin": (False, False, 4, 59),
            "sent, lapsed": (True, False, 0, 54), "unknown, long ago": (False, False, 0, 0), "absent": (False, False, 35, 90),
            "absent, and its key forgotten": (False, True, 0, 0), "succeeded": (False, False, 35, 90),
            "left behind, sent before, and its key forgotten": (False, True, 0, 0), "reserved, left behind": (False, False, 0, 0),
        }  # fmt: skip
        for situation, (lapsed, forgotten, wait, proof) in told.items():
            for wanted in await bench.both():
                await _arranged(bench, wanted, situation)
                known = await _store(bench, wanted).read(wanted.key, wanted.fence, margin_seconds=_MARGIN_SECONDS, limits=LIMITS)
                assert known is not None
                assert (known.lapsed, known.forgotten, known.held) == (lapsed, forgotten, True), situation
                # The time of the ledger under test may run on while it is asked.
                assert wait - 3 <= known.wait_seconds <= wait, situation
                assert proof - 3 <= (known.proof_seconds or 0) <= proof, situation


def _store(bench: Bench, wanted: Wanted) -> EffectStore:
    return EffectStore(bench.fetch, wanted.fence.owner or "w1")


async def _arranged(bench: Bench, wanted: Wanted, situation: str) -> None:
    for step in _SITUATIONS[situation]:
        await _step(bench, wanted, step)


async def _step(bench: Bench, wanted: Wanted, step: str | float) -> None:
    if not isinstance(step, str):
        await bench.pass_time(step)
    elif step.startswith("resolve "):
        generation = (await bench.row(wanted))["generation"]
        assert await bench.harness.resolve(wanted.key, step.removeprefix("resolve "), generation=generation) == "resolved"
    else:
        assert await _done(bench, wanted, step), step


async def _done(
    bench: Bench, wanted: Wanted, statement: str, *, generation: int | None = None, asked_at: datetime | None = None
) -> bool:
    """Do one statement, under the effect's own generation; whether it changed anything."""
    verb, _, state = statement.partition(" ")
    if verb == "reserve":
        return bool(await _reserved(bench, wanted))
    store, (key, fence) = _store(bench, wanted), (wanted.key, wanted.fence)
    under = (await bench.row(wanted))["generation"] if generation is None else generation
    if verb == "send":
        return await store.send(key, fence, generation=under, limits=LIMITS)
    if verb == "finish":
        result, code = (b"2" if state == "succeeded" else None), ("refused" if state == "failed" else None)
        return await store.finish(key, fence, Answer(under, state, result, None, code, code))
    if verb == "question":
        return bool(await store.question(key, fence, generation=under, margin_seconds=_MARGIN_SECONDS))
    seen = await _asked(bench, wanted) if asked_at is None else asked_at
    return await store.reconcile(
        key, fence, generation=under, state=state, result=None, reference="r", asked_at=seen, limits=LIMITS
    )  # fmt: skip


async def _reserved(bench: Bench, wanted: Wanted) -> object:
    return await _store(bench, wanted).reserve(
        wanted.key, wanted.fence, hold_seconds=_HOLD_SECONDS, fingerprint=_FINGERPRINT, version=1,
        provider_key=f"fp_{uuid.uuid4().hex}", limits=LIMITS,
    )  # fmt: skip


async def _asked(bench: Bench, wanted: Wanted) -> datetime:
    """The ledger's time now, which it tells with the question of another effect."""
    other = bench.message()
    for step in (*_SENT, "finish unknown"):
        await _step(bench, other, step)
    answer = await _store(bench, other).question(other.key, other.fence, generation=1, margin_seconds=_MARGIN_SECONDS)
    assert answer is not None
    return answer[1]


async def _lost(bench: Bench, wanted: Wanted, how: str) -> Wanted:
    """The same effect under a lease that does not hold."""
    fence = wanted.fence
    assert fence.generation is not None
    if how == "lapsed":
        await bench.harness.lapse(fence)
    elif how == "taken over":
        await bench.harness.take_over(fence, "w2")
    elif how == "another tenant":
        return replace(wanted, fence=await bench.harness.lease("w1", tenant_id="other"))
    elif how == "another owner":
        return replace(wanted, fence=fence._replace(owner="w9"))
    else:
        other = -1 if how == "an older generation" else 1
        return replace(wanted, fence=fence._replace(generation=fence.generation + other))
    return wanted
