"""The contract of the ledger as tests: an outside effect happens once, and nobody claims to know what they don't.

Subclass it where pytest finds it, and say what to put to the test::

    class TestMyLedger(LedgerContract):
        @asynccontextmanager
        async def opened(self) -> AsyncIterator[LedgerHarness]:
            yield MemoryHarness()

It needs pytest, and no plugin. For assertions that tell what they compared, put
``pytest.register_assert_rewrite("consumer_sdk.testing.contract", "consumer_sdk.testing.statement_contract")`` into a conftest.
"""

import asyncio
from dataclasses import replace
from typing import Any, Final

import pytest

from consumer_sdk.classification import Ambiguous, Retryable, Terminal
from consumer_sdk.effects import Absent, Applied, CallLimits, Effect
from consumer_sdk.testing.bench import LIMITS, REQUEST, STATEMENTS, Bench, Pause, Provider, Wanted, sentence
from consumer_sdk.testing.harness import LedgerHarness
from consumer_sdk.testing.statement_contract import StatementContract
from fencepost.errors import EffectFailed, EffectMismatch, EffectUnknown, LeaseLost

__all__ = ["LedgerContract", "LedgerHarness"]

_QUICK: Final = CallLimits(timeout_seconds=0.05)
#: Longer than a call and its margin; longer than a request may be in flight after it.
_LAPSED_SECONDS: Final = 36.0
_PROVEN_SECONDS: Final = 91.0


class LedgerContract(StatementContract):
    """Subclass it and override ``opened``; ``limit_seconds`` bounds each test."""

    @sentence
    async def test_an_effect_that_succeeded_is_told_again_and_not_repeated(self, bench: Bench) -> None:
        """LEDGER-1."""
        for wanted in await bench.both():
            receipt = await bench.once(wanted)
            assert await bench.once(wanted) == receipt
            assert await bench.once(await bench.next_attempt(wanted)) == receipt
            row = await bench.row(wanted)
            assert (row["state"], row["sends"], row["provider_key"]) == ("succeeded", 1, bench.provider.calls[-1].key)
        assert len(bench.provider.book) == 2

    @sentence
    async def test_results_come_back_as_json_holds_them(self, bench: Bench) -> None:
        for result, told in ((None, None), (3.5, 3.5), ({"a": [1, "ü"]}, {"a": [1, "ü"]}), ((1, 2), [1, 2]), (False, False)):
            for wanted in await bench.both():

                async def call(_effect: Effect, result: object = result) -> object:
                    return Applied(result, reference="ch_7")

                assert await bench.once(wanted, call=call) == told
                assert await bench.once(wanted) == told
                assert (await bench.row(wanted))["provider_reference"] == "ch_7"
        assert bench.provider.book == []

    @sentence
    async def test_a_failure_after_an_effect_takes_nothing_back(self, bench: Bench) -> None:
        """LEDGER-14, in each class of error."""
        for wanted in await bench.both():
            receipt = await bench.once(wanted)
            for number, error in enumerate((Retryable("busy"), Terminal("declined"), Ambiguous("who_knows"), KeyError("bug"))):
                bench.provider.before.append(error)
                with pytest.raises(Exception):  # noqa: B017, PT011 - each its own
                    await bench.once(wanted.part(step=f"later-{number}"))
                assert await bench.once(wanted) == receipt
                assert await bench.state(wanted) == "succeeded"
        assert len(bench.provider.book) == 2

    @sentence
    async def test_effects_differ_by_each_part_of_their_identity(self, bench: Bench) -> None:
        """LEDGER-8: what continues as new starts a set of its own."""
        first = bench.message()
        parts: dict[str, Any] = {
            "run_key": bench.message().key.run_key, "tenant_id": "other", "iteration": 1, "step": "refund", "occurrence": 1,
            "operation": "card.refund",
        }  # fmt: skip
        for wanted in (first, *(first.part(**{name: part}) for name, part in parts.items())):
            await bench.once(wanted)
        assert len(bench.provider.book) == len(set(bench.provider.book)) == len(parts) + 1

    # What a failed call proves.

    @sentence
    async def test_a_refusal_is_told_again_and_the_provider_is_not_asked_again(self, bench: Bench) -> None:
        """LEDGER-5."""
        for wanted in await bench.both():
            calls = len(bench.provider.calls)
            bench.provider.before.append(Terminal("card_declined"))
            attempt = wanted
            for _ in range(3):
                with pytest.raises(EffectFailed, match="card_declined"):
                    await bench.once(attempt)
                attempt = await bench.next_attempt(attempt)
            row = await bench.row(wanted)
            assert (row["state"], row["error_code"], row["sends"]) == ("failed", "card_declined", 1)
            assert row["error_class"] is not None
            assert len(bench.provider.calls) == calls + 1

    @sentence
    async def test_a_call_that_surely_did_nothing_is_made_again_under_the_same_key(self, bench: Bench) -> None:
        for wanted in await bench.both():
            bench.provider.before.append(Retryable("busy"))
            with pytest.raises(Retryable):
                await bench.once(wanted)
            assert await bench.state(wanted) == "absent"
            await bench.once(await bench.next_attempt(wanted))
            first, second = bench.provider.calls[-2:]
            assert first.key == second.key
            assert (first.sends, second.sends) == (1, 2)
            assert second.fencing_token > first.fencing_token

    @sentence
    async def test_an_effect_that_was_delivered_and_then_timed_out_is_unknown(self, bench: Bench) -> None:
        """LEDGER-12: nothing repeats it."""
        for wanted in await bench.both():
            await _lost_answer(bench, wanted, happened=True)
            attempt = wanted
            for passed in (0.0, _LAPSED_SECONDS, 3_600.0):
                await bench.pass_time(passed)
                attempt = await bench.next_attempt(attempt)
                with pytest.raises(EffectUnknown):
                    await bench.once(attempt)
                assert await bench.state(wanted) == "unknown"
        assert len(bench.provider.book) == len(bench.provider.calls) == 2

    @sentence
    async def test_a_call_that_takes_too_long_is_cancelled_and_unknown(self, bench: Bench) -> None:
        for wanted in await bench.both():
            bench.provider.after.append(asyncio.Event())
            with pytest.raises(EffectUnknown):
                await bench.once(wanted, limits=_QUICK)
            assert await bench.state(wanted) == "unknown"

    @sentence
    async def test_a_cancelled_call_leaves_the_effect_as_sent(self, bench: Bench) -> None:
        """Neither failed nor free: nobody has said what became of it."""
        for wanted in await bench.both():
            bench.provider.reached.clear()
            bench.provider.before.append(asyncio.Event())
            calling = asyncio.create_task(bench.once(wanted))
            await bench.provider.reached.wait()
            calling.cancel()
            await asyncio.wait([calling])
            assert calling.cancelled()
            assert await bench.state(wanted) == "sent"

    @sentence
    async def test_another_request_under_the_same_effect_is_told_apart(self, bench: Bench) -> None:
        """LEDGER-6: whatever became of the first; nothing is changed by it."""
        for error in (None, Terminal("declined"), Retryable("busy"), TimeoutError()):
            for wanted in await bench.both():
                bench.provider.before.append(error)
                await bench.crashed(wanted)
                await _refuses_another_request(bench, wanted)
        for statement in ("reserve_effect", "send_effect"):
            for wanted in await bench.both():
                await bench.crashed(wanted, after=statement)
                await bench.pass_time(_PROVEN_SECONDS)
                await _refuses_another_request(bench, wanted)

    # What crashes leave behind.

    @sentence
    async def test_a_crash_after_sending_is_unknown_and_nothing_is_sent_again(self, bench: Bench) -> None:
        """LEDGER-2."""
        for wanted in await bench.both():
            await bench.crashed(wanted, after="send_effect")
            assert await bench.state(wanted) == "sent"
            await bench.pass_time(_LAPSED_SECONDS)
            attempt = wanted
            for _ in range(2):
                attempt = await bench.next_attempt(attempt)
                with pytest.raises(EffectUnknown):
                    await bench.once(attempt)
                assert await bench.state(wanted) == "unknown"
        assert bench.provider.calls == []

    @sentence
    async def test_a_crash_before_sending_is_taken_over_and_the_call_is_made_once(self, bench: Bench) -> None:
        """LEDGER-9: under the next token, and never unknown."""
        for wanted in await bench.both():
            calls = len(bench.provider.calls)
            await bench.crashed(wanted, after="reserve_effect")
            assert await bench.state(wanted) == "reserved"
            await bench.pass_time(11)
            assert (await bench.once(await bench.next_attempt(wanted)))["token"] == 2
            assert len(bench.provider.calls) == calls + 1
            assert await bench.state(wanted) == "succeeded"

    @sentence
    async def test_a_crash_at_any_statement_leaves_at_most_one_effect_and_the_next_attempts_end_right(self, bench: Bench) -> None:
        points: list[dict[str, str]] = [*({"after": name} for name in STATEMENTS), {"before": "finish_effect"}]
        ways: tuple[tuple[list[Any], list[Any]], ...] = (
            ([], []), ([Retryable("busy")], []), ([TimeoutError()], []), ([], [TimeoutError()])
        )  # fmt: skip
        for before, after in ways:
            for point in points:
                for wanted in await bench.both():
                    bench.provider = Provider()
                    bench.provider.before, bench.provider.after = list(before), list(after)
                    for crash in (point, point, {}):
                        await bench.crashed(wanted, reconciler=bench.provider.state, **crash)
                        await bench.pass_time(2 * _PROVEN_SECONDS)
                    assert await bench.once(wanted, reconciler=bench.provider.state), (point, before, after)
                    assert len(bench.provider.book) == 1, (point, before, after)

    @sentence
    async def test_a_replay_takes_over_what_its_predecessor_left_in_any_state(self, bench: Bench) -> None:
        """LEDGER-8: the lineage has one set of effects, and one charge."""
        for point in (
            {"after": "reserve_effect"},
            {"after": "send_effect"},
            {"before": "finish_effect"},
            {"after": "finish_effect"},
        ):
            wanted = await bench.next_attempt(await bench.run())
            bench.provider = Provider()
            await bench.crashed(wanted, **point)
            replay = replace(wanted, fence=await bench.harness.replay(wanted.fence, "w1"))
            await bench.pass_time(_PROVEN_SECONDS)
            await bench.once(replay, reconciler=bench.provider.state)
            await bench.once(replay)
            assert len(bench.provider.book) == 1, point

    # Reconciling.

    @sentence
    async def test_an_effect_that_the_provider_knows_is_applied_and_its_result_is_the_providers(self, bench: Bench) -> None:
        """LEDGER-3: at once, without another call."""
        for wanted in await bench.both():
            await _lost_answer(bench, wanted, happened=True)
            for _ in range(2):
                assert await bench.once(wanted, reconciler=bench.provider.state) == {"receipt": "found"}
            row, asked = await bench.row(wanted), bench.provider.asked[-1]
            assert (row["state"], row["provider_reference"], row["sends"]) == ("applied", "ch_1", 1)
            assert (asked.key, asked.fencing_token, asked.sends) == (row["provider_key"], 2, 1)
        assert len(bench.provider.calls) == len(bench.provider.asked) == 2

    @sentence
    async def test_absence_counts_only_when_no_request_can_be_on_its_way_any_more(self, bench: Bench) -> None:
        """LEDGER-4: then exactly one more call, with the same key and the next token."""
        for wanted in await bench.both():
            bench.provider = Provider()
            await _lost_answer(bench, wanted, happened=False)
            for passed in (0.0, _LAPSED_SECONDS, 50.0):
                await bench.pass_time(passed)
                with pytest.raises(EffectUnknown) as told:
                    await bench.once(wanted, reconciler=bench.provider.state)
                assert await bench.state(wanted) == "unknown"
            assert told.value.retry_after is not None
            await bench.pass_time(5)
            await bench.once(wanted, reconciler=bench.provider.state)
            first, second = bench.provider.calls
            assert (first.key, first.sends, second.sends) == (second.key, 1, 2)
            assert second.fencing_token == (await bench.row(wanted))["generation"] > first.fencing_token
            assert await bench.state(wanted) == "succeeded"

    @sentence
    async def test_absence_that_was_seen_too_early_does_not_count_however_late_it_is_told(self, bench: Bench) -> None:
        for wanted in await bench.both():
            await _lost_answer(bench, wanted, happened=False)

            async def slow(_effect: Effect) -> Absent:
                await bench.pass_time(2 * _PROVEN_SECONDS)
                return Absent()

            with pytest.raises(EffectUnknown):
                await bench.once(wanted, reconciler=slow)
            assert await bench.state(wanted) == "unknown"

    @sentence
    async def test_a_reconciler_that_cannot_tell_leaves_the_effect_unknown(self, bench: Bench) -> None:
        """LEDGER-4."""
        for answer in (None, True, RuntimeError("down")):
            for wanted in await bench.both():
                await _lost_answer(bench, wanted, happened=False)
                await bench.pass_time(_PROVEN_SECONDS)

                async def reconciler(_effect: Effect, answer: Any = answer) -> Any:
                    if isinstance(answer, Exception):
                        raise answer
                    return answer

                calls = len(bench.provider.calls)
                with pytest.raises(EffectUnknown):
                    await bench.once(wanted, reconciler=reconciler)
                assert await bench.state(wanted) == "unknown"
                assert len(bench.provider.calls) == calls

    @sentence
    async def test_an_effect_is_not_sent_again_once_the_provider_may_have_forgotten_its_key(self, bench: Bench) -> None:
        limits = CallLimits(timeout_seconds=30, in_flight_seconds=60, key_retention_seconds=1_000)
        for passed, sent in ((900, True), (911, False)):
            for wanted in await bench.both():
                calls = len(bench.provider.calls)
                bench.provider.before.append(Retryable("busy"))
                with pytest.raises(Retryable):
                    await bench.once(wanted, limits=limits)
                await bench.pass_time(passed)
                if sent:
                    assert await bench.once(wanted, limits=limits)
                    continue
                with pytest.raises(EffectUnknown):
                    await bench.once(wanted, limits=limits)
                assert await bench.state(wanted) == "absent"
                assert len(bench.provider.calls) == calls + 1

    @sentence
    async def test_without_a_reconciler_a_person_decides(self, bench: Bench) -> None:
        """LEDGER-15: nothing is written meanwhile, of two who decide one is told, and then the run goes on."""
        for resolution in ("applied", "absent", "disputed"):
            for wanted in await bench.both():
                await _lost_answer(bench, wanted, happened=False)
                before, calls = await bench.row(wanted), len(bench.provider.calls)
                for _ in range(2):
                    with pytest.raises(EffectUnknown):
                        await bench.once(wanted)
                assert await bench.row(wanted) == before
                generation = before["generation"]
                outcomes = [await bench.harness.resolve(wanted.key, resolution, generation=generation) for _ in range(2)]
                assert outcomes == ["resolved", "changed"]
                await _goes_on(bench, wanted, resolution)
                assert len(bench.provider.calls) == calls + (resolution == "absent")

    @sentence
    async def test_nobody_decides_about_an_effect_that_is_under_way_or_over(self, bench: Bench) -> None:
        wanted = bench.message()
        assert await bench.harness.resolve(wanted.key, "absent", generation=1) == "not_found"
        for point in ({"after": "reserve_effect"}, {"after": "send_effect"}, {}):
            for wanted in await bench.both():
                await bench.crashed(wanted, **point)
                assert await bench.harness.resolve(wanted.key, "absent", generation=1) == "not_open", point

    # Two at once, and pauses.

    @sentence
    async def test_of_many_who_ask_at_once_one_calls_and_all_get_its_result(self, bench: Bench) -> None:
        """LEDGER-16."""
        for wanted in await bench.both():
            book = len(bench.provider.book)
            results = await asyncio.gather(*(bench.once(wanted) for _ in range(8)))
            assert len(bench.provider.book) == book + 1
            assert all(result == results[0] for result in results)

    @sentence
    async def test_of_many_who_reconcile_at_once_one_is_heard(self, bench: Bench) -> None:
        """One more call at most, whatever each was told."""
        for wanted in await bench.both():
            bench.provider = Provider()
            await _lost_answer(bench, wanted, happened=False)
            await bench.pass_time(_PROVEN_SECONDS)
            results = await asyncio.gather(*(bench.once(wanted, reconciler=bench.provider.state) for _ in range(4)))
            assert len(bench.provider.book) == 1
            assert all(result == results[0] for result in results)

    @sentence
    async def test_a_holder_that_paused_before_its_call_does_not_make_it(self, bench: Bench) -> None:
        """LEDGER-7, LEDGER-9: somebody else has made it."""
        for wanted in await bench.both():
            book, pause = len(bench.provider.book), Pause(bench.fetch, "send_effect")
            first = asyncio.create_task(bench.once(wanted, fetch=pause.fetch))
            await pause.reached.wait()
            await bench.pass_time(11)
            later = await bench.next_attempt(wanted)
            receipt = await bench.once(later)
            pause.go.set()
            with pytest.raises(LeaseLost):
                await first
            assert len(bench.provider.book) == book + 1
            assert await bench.once(later) == receipt

    @sentence
    async def test_a_holder_that_paused_before_its_record_changes_nothing(self, bench: Bench) -> None:
        """LEDGER-7: token 1 records nothing after token 2."""
        for wanted in await bench.both():
            pause = Pause(bench.fetch, "finish_effect")
            first = asyncio.create_task(bench.once(wanted, fetch=pause.fetch))
            await pause.reached.wait()
            await bench.pass_time(_LAPSED_SECONDS)
            later = await bench.next_attempt(wanted)
            assert await bench.once(later, reconciler=bench.provider.state) == {"receipt": "found"}
            before = await bench.row(wanted)
            pause.go.set()
            with pytest.raises(LeaseLost):
                await first
            assert await bench.row(wanted) == before
        assert len(bench.provider.book) == 2

    @sentence
    async def test_an_earlier_call_that_ends_late_says_nothing_about_a_later_one_that_is_out(self, bench: Bench) -> None:
        """LEDGER-7: both rows say `sent`; the token tells them apart."""
        for wanted in await bench.both():
            bench.provider, gate, pause = Provider(), asyncio.Event(), Pause(bench.fetch, "finish_effect")
            bench.provider.before = [TimeoutError(), gate]
            first = asyncio.create_task(bench.once(wanted, fetch=pause.fetch))
            await pause.reached.wait()
            await bench.pass_time(_PROVEN_SECONDS + 5)
            later, bench.provider.reached = await bench.next_attempt(wanted), asyncio.Event()
            second = asyncio.create_task(bench.once(later, reconciler=bench.provider.state))
            await bench.provider.reached.wait()
            pause.go.set()
            with pytest.raises((LeaseLost, EffectUnknown)):
                await first
            assert await bench.state(wanted) == "sent"
            gate.set()
            assert (await second)["receipt"] == 1
            assert await bench.state(wanted) == "succeeded"

    @sentence
    async def test_whoever_comes_next_waits_for_a_call_that_is_still_out(self, bench: Bench) -> None:
        """LEDGER-13: past its deadline as well, until it must have ended; never a free slot."""
        wanted = bench.message()
        gate = asyncio.Event()
        bench.provider.before.append(gate)
        first = asyncio.create_task(bench.once(wanted))
        await bench.provider.reached.wait()
        await bench.pass_time(31)
        looks = Pause(bench.fetch, "read_effect", times=3)
        second = asyncio.create_task(bench.once(wanted, fetch=looks.fetch, reconciler=bench.provider.state))
        await looks.reached.wait()
        looks.go.set()
        gate.set()
        assert await first == await second
        assert bench.provider.asked == []
        assert len(bench.provider.book) == 1

    @sentence
    async def test_a_lease_that_ends_with_the_call_leaves_no_free_slot(self, bench: Bench) -> None:
        """LEDGER-13: sent just before; the next holder finds it unknown, or finds out."""
        wanted = await bench.run()
        pause = Pause(bench.fetch, "finish_effect")
        first = asyncio.create_task(bench.once(wanted, fetch=pause.fetch))
        await pause.reached.wait()
        await bench.harness.lapse(wanted.fence)
        pause.go.set()
        with pytest.raises(LeaseLost):
            await first
        assert await bench.state(wanted) == "sent"
        await bench.pass_time(_LAPSED_SECONDS)
        later = await bench.next_attempt(wanted)
        with pytest.raises(EffectUnknown):
            await bench.once(later)
        assert await bench.once(later, reconciler=bench.provider.state) == {"receipt": "found"}
        assert len(bench.provider.book) == 1

    @sentence
    async def test_a_run_that_is_not_held_or_to_be_cancelled_gets_no_effect(self, bench: Bench) -> None:
        for lose in (bench.harness.lapse, bench.harness.cancel):
            wanted = await bench.run()
            await lose(wanted.fence)
            with pytest.raises(LeaseLost):
                await bench.once(wanted)
            assert await bench.harness.row(wanted.key) is None
        assert bench.provider.calls == []


async def _lost_answer(bench: Bench, wanted: Wanted, *, happened: bool) -> None:
    """An effect whose call ended without an answer."""
    (bench.provider.after if happened else bench.provider.before).append(TimeoutError())
    with pytest.raises(EffectUnknown):
        await bench.once(wanted, limits=LIMITS)


async def _refuses_another_request(bench: Bench, wanted: Wanted) -> None:
    before, calls = await bench.row(wanted), len(bench.provider.calls)
    with pytest.raises(EffectMismatch):
        await bench.once(wanted, request={**REQUEST, "amount": 11}, reconciler=bench.provider.state)
    assert await bench.row(wanted) == before
    assert len(bench.provider.calls) == calls


async def _goes_on(bench: Bench, wanted: Wanted, resolution: str) -> None:
    if resolution == "disputed":
        with pytest.raises(EffectFailed):
            await bench.once(wanted)
    elif resolution == "applied":
        assert await bench.once(wanted) is None
    else:
        assert (await bench.once(wanted))["receipt"]
