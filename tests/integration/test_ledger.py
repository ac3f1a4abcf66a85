"""The ledger of effects on a real PostgreSQL: what each statement may change, and that no effect ever happens twice.

Time passes by moving rows; two holders meet at barriers; crashes are raised at every statement. LEDGER-1 to 18, J27 to J30,
J43, J54, X5.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import asyncpg
import httpx
import pytest
from structlog.testing import capture_logs

from consumer_sdk import calling, ledger
from consumer_sdk.classification import Ambiguous, Retryable, Terminal
from consumer_sdk.effect_store import EffectStore
from consumer_sdk.effects import Absent, Answer, Applied, CallLimits, Effect, RunFence, provider_key
from consumer_sdk.encoding import MAX_OUTPUT_BYTES
from consumer_sdk.ledger import Ledger
from fencepost.clock import lease_clock
from fencepost.codec import PLAIN
from fencepost.devservices import Services
from fencepost.errors import (
    ConfigurationError,
    EffectError,
    EffectFailed,
    EffectMismatch,
    EffectUnknown,
    InvalidInput,
    LeaseLost,
    TransientError,
)
from fencepost.secrets import Secrets
from tests.support.effects import CHARGE, REQUEST, Bench, Wanted, opened
from tests.support.infinities import IN_MODELS, IN_PLAIN_VALUES
from tests.support.session import SharedServices
from tests.support.waiting import eventually

LIMITS: Final = CallLimits()
QUICK: Final = CallLimits(timeout_seconds=0.05, in_flight_seconds=60)
MARGIN: Final = 5.0
FINGERPRINT: Final = b"f" * 32


@pytest.fixture(scope="module")
def shared_url(services: Services, shared_services: SharedServices) -> Iterator[str]:
    """One database for all: each test has runs and keys of its own."""
    url = services.create_database(shared_services.template_url)
    yield url
    services.drop_database(url)


@pytest.fixture
async def bench(shared_url: str) -> AsyncIterator[Bench]:
    async with opened(shared_url) as bench:
        yield bench


# -- states and statements ------------------------------------------------------------------------------------------------

# How a row looks in each state: (state, assignments). Times are the database's.
SENT: Final = "held_until = NULL, sends = 1, first_sent_at = clock_timestamp()"
SITUATIONS: Final[dict[str, tuple[str, str]]] = {
    "reserved": ("reserved", "held_until = clock_timestamp() + interval '10 s'"),
    "reserved, left behind": ("reserved", "held_until = clock_timestamp() - interval '1 s'"),
    "sent": ("sent", f"{SENT}, deadline_at = clock_timestamp() + interval '30 s'"),
    "sent, within the margin": ("sent", f"{SENT}, deadline_at = clock_timestamp() - interval '1 s'"),
    "sent, lapsed": ("sent", f"{SENT}, deadline_at = clock_timestamp() - interval '6 s'"),
    "unknown": ("unknown", f"{SENT}, deadline_at = clock_timestamp() - interval '6 s'"),
    "unknown, long ago": ("unknown", f"{SENT}, deadline_at = clock_timestamp() - interval '100 s'"),
    "succeeded": ("succeeded", f"{SENT}, deadline_at = clock_timestamp(), result = '1', finished_at = clock_timestamp()"),
    "failed": ("failed", f"{SENT}, deadline_at = clock_timestamp(), error_code = 'x', finished_at = clock_timestamp()"),
    "applied": ("applied", f"{SENT}, deadline_at = clock_timestamp(), result = '1', finished_at = clock_timestamp()"),
    "absent": ("absent", f"{SENT}, deadline_at = clock_timestamp()"),
    "absent, and its key forgotten": (
        "absent", "held_until = NULL, sends = 1, deadline_at = clock_timestamp(),"
        " first_sent_at = clock_timestamp() - interval '1 day'",
    ),
    "left behind, sent before, and its key forgotten": (
        "reserved", "sends = 1, first_sent_at = clock_timestamp() - interval '1 day', deadline_at = clock_timestamp(),"
        " held_until = clock_timestamp() - interval '1 s'",
    ),
    "disputed": ("disputed", f"{SENT}, deadline_at = clock_timestamp(), finished_at = clock_timestamp()"),
}  # fmt: skip
#: What each statement makes of a row; where nothing is said, it changes nothing.
ALLOWED: Final[dict[str, dict[str, str]]] = {
    "reserve": {"reserved, left behind": "reserved", "absent": "reserved"},
    "send": {"reserved": "sent"},
    "finish succeeded": dict.fromkeys(("sent", "sent, within the margin", "sent, lapsed"), "succeeded"),
    "finish failed": dict.fromkeys(("sent", "sent, within the margin", "sent, lapsed"), "failed"),
    "finish unknown": dict.fromkeys(("sent", "sent, within the margin", "sent, lapsed"), "unknown"),
    "finish absent": dict.fromkeys(("sent", "sent, within the margin", "sent, lapsed"), "absent"),
    "finish applied": {},
    "finish disputed": {},
    "finish reserved": {},
    "question": dict.fromkeys(("sent, lapsed", "unknown", "unknown, long ago"), "unknown"),
    "reconcile applied": dict.fromkeys(("unknown", "unknown, long ago"), "applied"),
    "reconcile absent": {"unknown, long ago": "absent"},
    "reconcile succeeded": {},
}


async def arranged(bench: Bench, wanted: Wanted, situation: str) -> None:
    await bench.store("w0").reserve(
        wanted.key, wanted.fence, hold_seconds=10, fingerprint=FINGERPRINT, version=1, provider_key="fp_1", limits=LIMITS
    )
    state, assignments = SITUATIONS[situation]
    await bench.connection.execute(
        f"UPDATE fencepost.effects SET state = $1, {assignments} WHERE run_key = $2", state, wanted.key.run_key
    )


async def done(bench: Bench, statement: str, wanted: Wanted, generation: int = 1, holder: str = "w1") -> bool:
    """Do one statement; whether it changed the row."""
    store, (key, fence) = bench.store(holder), (wanted.key, wanted.fence)
    verb, _, state = statement.partition(" ")
    if verb == "reserve":
        return bool(
            await store.reserve(key, fence, hold_seconds=10, fingerprint=FINGERPRINT, version=1, provider_key="fp_2", limits=LIMITS)
        )
    if verb == "send":
        return await store.send(key, fence, generation=generation, limits=LIMITS)
    if verb == "finish":
        result, code = (b"2" if state == "succeeded" else None), ("refused" if state == "failed" else None)
        return await store.finish(key, fence, Answer(generation, state, result, None, code, code))
    if verb == "question":
        return bool(await store.question(key, fence, generation=generation, margin_seconds=MARGIN))
    assert verb == "reconcile"
    asked_at = await bench.connection.fetchval("SELECT clock_timestamp()")
    return await store.reconcile(
        key, fence, generation=generation, state=state, result=None, reference="r", asked_at=asked_at, limits=LIMITS
    )  # fmt: skip


@pytest.mark.parametrize("statement", ALLOWED)
async def test_a_statement_changes_only_what_it_may(bench: Bench, statement: str) -> None:
    """Every state by every statement, of messages and of runs."""
    for situation in SITUATIONS:
        for wanted in (await bench.message(), await bench.run()):
            await arranged(bench, wanted, situation)
            before = await bench.row(wanted)
            changed = await done(bench, statement, wanted)
            after = await bench.row(wanted)
            expected = ALLOWED[statement].get(situation)
            assert changed == (expected is not None), (situation, wanted)
            assert after["state"] == expected if changed else after == before, (situation, wanted)
            assert after["provider_key"] == "fp_1"


@pytest.mark.parametrize("statement", [name for name, allowed in ALLOWED.items() if allowed])
@pytest.mark.parametrize("fence", ["owner", "generation", "expired", "ended", "given back", "another run's"])
async def test_a_holder_whose_lease_is_not_current_writes_nothing(bench: Bench, statement: str, fence: str) -> None:
    """J27, LEDGER-7: the run's lease, in each way that it can be another's."""
    wanted = await bench.run()
    situation = next(iter(ALLOWED[statement]))
    await arranged(bench, wanted, situation)
    before = await bench.row(wanted)
    run_id = wanted.fence.run_id
    assert run_id is not None
    if fence == "owner":
        stale = wanted.fence._replace(owner="w9")
    elif fence == "generation":
        stale = wanted.fence._replace(generation=0)
    elif fence == "another run's":
        stale = (await bench.run()).fence._replace(owner="w9")
    else:
        stale = wanted.fence
        move = {
            "expired": "lease_expires_at = clock_timestamp()",
            "ended": "state = 'completed', finished_at = clock_timestamp(), lease_owner = NULL, lease_expires_at = NULL",
            "given back": "state = 'queued', lease_owner = NULL, lease_expires_at = NULL",
        }[fence]  # fmt: skip
        await bench.connection.execute(f"UPDATE fencepost.jobs SET {move}, attempt_deadline_at = NULL WHERE run_id = $1", run_id)
    assert not await done(bench, statement, Wanted(key=wanted.key, fence=stale))
    assert await bench.row(wanted) == before


@pytest.mark.parametrize("statement", [name for name, allowed in ALLOWED.items() if allowed and name != "reserve"])
@pytest.mark.parametrize("generation", [0, 2])
async def test_a_write_under_another_generation_of_the_effect_changes_nothing(
    bench: Bench, statement: str, generation: int
) -> None:
    """Without a run the effect's own generation is the only fence."""
    wanted = await bench.message()
    await arranged(bench, wanted, next(iter(ALLOWED[statement])))
    before = await bench.row(wanted)
    assert not await done(bench, statement, wanted, generation)
    assert await bench.row(wanted) == before


async def test_each_take_over_raises_the_generation_and_nothing_lowers_it(bench: Bench) -> None:
    """LEDGER-17, for a message without a run as well."""
    for wanted in (await bench.message(), await bench.run()):
        seen: list[int] = []
        for _ in range(2):
            for situation, statement in (("reserved, left behind", "reserve"), ("absent", "reserve"), ("unknown", "question")):
                if not seen:
                    await arranged(bench, wanted, situation)
                else:
                    state, assignments = SITUATIONS[situation]
                    await bench.connection.execute(
                        f"UPDATE fencepost.effects SET state = $1, {assignments} WHERE run_key = $2", state, wanted.key.run_key
                    )
                assert await done(bench, statement, wanted, (await bench.row(wanted))["generation"])
                seen.append((await bench.row(wanted))["generation"])
        assert seen == sorted(set(seen))


async def test_a_later_lease_takes_a_reservation_over_at_once_and_an_older_one_never(bench: Bench) -> None:
    first = await bench.run()
    await arranged(bench, first, "reserved")
    assert not await done(bench, "reserve", first, holder="w1")
    second = await bench.taken_over(first)
    assert await done(bench, "reserve", second, holder="w2")
    row = await bench.row(first)
    assert (row["generation"], row["run_generation"], row["holder"]) == (2, 2, "w2")
    # As if the older holder had looked at its job before the newer one claimed it.
    await bench.connection.execute(
        "UPDATE fencepost.jobs SET lease_owner = 'w1', lease_generation = 1, attempts = 1 WHERE run_id = $1", first.fence.run_id
    )
    await bench.pass_time(minutes=1)
    assert not await done(bench, "reserve", first)
    assert await bench.row(first) == {**await bench.row(first), "generation": 2, "holder": "w2"}


async def test_a_reservation_whose_time_is_over_is_no_longer_sent(bench: Bench) -> None:
    wanted = await bench.message()
    await arranged(bench, wanted, "reserved")
    await bench.pass_time(seconds=11)
    assert not await done(bench, "send", wanted)


@pytest.mark.parametrize(
    "broken",
    [
        "state = 'odd'", "state = 'succeeded'", "held_until = NULL", "result = '1'", "error_code = 'x'", "generation = 0",
        "sends = -1", "fingerprint = 'short'", "finished_at = now()", "run_id = gen_random_uuid()", "run_generation = 1",
        "state = 'sent', held_until = NULL", "provider_reference = repeat('r', 1001)",
        "state = 'succeeded', held_until = NULL, finished_at = now(), result = convert_to(repeat('x', 1000001), 'UTF8')",
    ],
)  # fmt: skip
async def test_half_states_cannot_be_written(bench: Bench, broken: str) -> None:
    wanted = await bench.message()
    await arranged(bench, wanted, "reserved")
    with pytest.raises(asyncpg.CheckViolationError):
        await bench.connection.execute(f"UPDATE fencepost.effects SET {broken} WHERE run_key = $1", wanted.key.run_key)


# -- once -----------------------------------------------------------------------------------------------------------------


async def test_an_effect_takes_three_statements_and_one_that_is_known_takes_two(bench: Bench) -> None:
    """LEDGER-1: the same receipt, one call, one row."""
    for wanted in (await bench.message(), await bench.run()):
        bench.statements.clear()
        receipt = await bench.once(wanted)
        assert bench.statements == ["reserve_effect", "send_effect", "finish_effect"]
        bench.statements.clear()
        assert await bench.once(wanted) == receipt
        assert bench.statements == ["reserve_effect", "read_effect"]
        row = await bench.row(wanted)
        assert (row["state"], row["sends"], row["provider_key"]) == ("succeeded", 1, provider_key(wanted.key))
        assert bench.provider.calls[-1] == Effect(key=row["provider_key"], fencing_token=1, operation=CHARGE, sends=1)
    assert len(bench.provider.book) == 2
    assert bench.counted == ["succeeded", "replayed"] * 2


async def test_results_come_back_as_they_were_returned_and_as_json_holds_them(bench: Bench) -> None:
    for result, told in ((None, None), (3.5, 3.5), ({"a": [1, "ü"]}, {"a": [1, "ü"]}), ((1, 2), [1, 2]), (False, False)):
        wanted = await bench.message()

        async def call(_effect: Effect, result: object = result) -> object:
            return result

        assert await bench.once(wanted, call=call) == told
        assert await bench.once(wanted, call=call) == told


async def test_a_call_may_hand_over_the_providers_reference(bench: Bench) -> None:
    """J54; an odd one does not cost the record."""
    for given, kept in (("ch_7", "ch_7"), (None, None), (7, "7"), ("a\0b\ud800", "a?b?"), ("x" * 5000, "x" * 200)):
        wanted = await bench.message()

        async def call(_effect: Effect, given: Any = given) -> object:
            return Applied({"ok": True}, reference=given)

        assert await bench.once(wanted, call=call) == {"ok": True}
        assert (await bench.row(wanted))["provider_reference"] == kept


@pytest.mark.parametrize(
    "result",
    [object(), {1, 2}, float("nan"), "x" * MAX_OUTPUT_BYTES, "\ud800", *IN_PLAIN_VALUES.values(), *IN_MODELS.values()],
    ids=["object", "set", "float", "long", "half of a pair", *IN_PLAIN_VALUES, *IN_MODELS],
)
async def test_a_result_that_cannot_be_kept_does_not_undo_the_effect(bench: Bench, result: object) -> None:
    """Recorded as succeeded without a result, and told; the next attempt does not call again."""
    wanted = await bench.message()

    async def call(effect: Effect) -> object:
        bench.provider.book.append(effect.key)
        return result

    with pytest.raises(InvalidInput, match="result"):
        await bench.once(wanted, call=call)
    assert await bench.once(wanted, call=call) is None
    assert len(bench.provider.book) == 1
    assert (await bench.row(wanted))["state"] == "succeeded"


def answered(status: int, **headers: str) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://provider.test/")
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, request=request, headers=named))


FAILURES: Final[list[tuple[BaseException, str, type[Exception]]]] = [
    (answered(402), "failed", EffectFailed),
    (answered(404), "failed", EffectFailed),
    (answered(422), "failed", EffectFailed),
    (answered(429), "absent", httpx.HTTPStatusError),
    (answered(503, Retry_After="1"), "absent", httpx.HTTPStatusError),
    (answered(503), "unknown", EffectUnknown),
    (answered(500), "unknown", EffectUnknown),
    (answered(502), "unknown", EffectUnknown),
    (answered(408), "unknown", EffectUnknown),
    (answered(409), "unknown", EffectUnknown),
    (answered(303), "unknown", EffectUnknown),
    (Retryable("busy"), "absent", Retryable),
    (Terminal("declined"), "failed", EffectFailed),
    (Ambiguous("who_knows"), "unknown", EffectUnknown),
    (ConnectionRefusedError(), "absent", ConnectionRefusedError),
    (ConnectionResetError(), "unknown", EffectUnknown),
    (TimeoutError(), "unknown", EffectUnknown),
    (KeyError("receipt"), "unknown", EffectUnknown),
    (TransientError("database"), "unknown", EffectUnknown),
    (InvalidInput("x", "y", "z"), "unknown", EffectUnknown),
    (LeaseLost("inner"), "unknown", EffectUnknown),
    (ExceptionGroup("g", [Retryable("busy"), KeyError()]), "unknown", EffectUnknown),
    (ExceptionGroup("g", [answered(402), answered(500)]), "unknown", EffectUnknown),
]  # fmt: skip


def failure_name(value: object) -> str | None:
    if isinstance(value, httpx.HTTPStatusError):
        return f"http_{value.response.status_code}{'_later' if value.response.headers.get('retry-after') else ''}"
    return value.__name__ if isinstance(value, type) else (value if isinstance(value, str) else type(value).__name__)


@pytest.mark.parametrize(("error", "state", "raised"), FAILURES, ids=failure_name)
async def test_what_a_failed_call_proves(bench: Bench, error: Exception, state: str, raised: type[Exception]) -> None:
    """LEDGER-5, LEDGER-12, J43: refused for good, surely nothing, or unknown; never called again unless it surely did nothing."""
    wanted = await bench.run()
    bench.provider.after.append(error)  # the effect has taken place, whatever the error says
    with pytest.raises(raised):
        await bench.once(wanted)
    row = await bench.row(wanted)
    assert (row["state"], row["sends"]) == (state, 1)
    assert (row["error_code"] is not None) == (state == "failed")
    if state == "absent":
        assert (await bench.once(wanted))["token"] == 2
        assert [call.sends for call in bench.provider.calls] == [1, 2]
        assert len({call.key for call in bench.provider.calls}) == 1
        return
    for _ in range(2):
        with pytest.raises(EffectFailed if state == "failed" else EffectUnknown):
            await bench.once(wanted)
    assert len(bench.provider.calls) == 1


async def test_a_refusal_is_recorded_and_told_again_in_the_same_words(bench: Bench) -> None:
    """LEDGER-5."""
    wanted = await bench.run()
    bench.provider.before.append(answered(402))
    told = []
    for _ in range(2):
        with pytest.raises(EffectFailed) as refused:
            await bench.once(wanted)
        told.append((refused.value.code, str(refused.value)))
    assert told == [("http_402", told[0][1])] * 2
    assert (await bench.row(wanted))["error_class"] == "httpx.HTTPStatusError"
    assert len(bench.provider.calls) == 1
    assert bench.counted == ["failed", "replayed"]


async def test_a_call_that_takes_too_long_is_cancelled_and_unknown(bench: Bench) -> None:
    wanted = await bench.run()
    bench.provider.after.append(asyncio.Event())
    with pytest.raises(EffectUnknown, match="timeout"):
        await bench.once(wanted, limits=QUICK)
    assert await bench.state(wanted) == "unknown"
    assert len(bench.provider.book) == 1


async def test_a_call_that_does_not_end_when_it_is_cancelled_is_not_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It and the provider's question alike: both are the author's, and their time is the ledger's promise."""
    monkeypatch.setattr(calling, "_CLEAN_UP_SECONDS", 0.001)
    let_go = asyncio.Event()

    async def stubborn(_effect: Effect) -> Any:
        while not let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await let_go.wait()

    wanted = await bench.run()
    with capture_logs() as logs:
        with pytest.raises(EffectUnknown, match="timeout"):
            await bench.once(wanted, call=stubborn, limits=CallLimits(timeout_seconds=0.5))
        with pytest.raises(EffectUnknown, match="timeout"):
            await bench.once(wanted, limits=CallLimits(timeout_seconds=0.5), reconciler=stubborn)
    assert [entry["call"] for entry in logs] == [CHARGE, f"reconciler of {CHARGE}"]
    assert await bench.state(wanted) == "unknown"
    assert bench.provider.calls == []
    let_go.set()


async def test_a_cancelled_call_leaves_the_effect_as_sent(bench: Bench) -> None:
    """Neither failed nor free: nobody has said what became of it."""
    wanted = await bench.run()
    bench.provider.before.append(asyncio.Event())
    calling = asyncio.create_task(bench.once(wanted))
    await bench.provider.reached.wait()
    calling.cancel()
    await asyncio.wait([calling])
    assert calling.cancelled()
    assert await bench.state(wanted) == "sent"


@pytest.mark.parametrize("ends", ["well", "refused"])
async def test_what_a_call_came_to_is_recorded_though_its_handler_was_cancelled_meanwhile(bench: Bench, ends: str) -> None:
    """A call that ends what it has begun: the receipt is here, and nobody else will ever know. The cancellation stands."""
    wanted = await bench.run()
    begun = asyncio.Event()

    async def charge(effect: Effect) -> Any:
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        if ends == "refused":
            raise Terminal("declined")
        return await bench.provider.charge(effect)

    calling = asyncio.create_task(bench.once(wanted, call=charge))
    await begun.wait()
    calling.cancel()
    await asyncio.wait([calling])
    assert calling.cancelled()
    assert await bench.state(wanted) == ("succeeded" if ends == "well" else "failed")
    if ends == "well":
        assert await bench.once(wanted) == {"receipt": 1, "token": 1}
        assert len(bench.provider.book) == 1


async def test_another_request_under_the_same_effect_is_told_apart(bench: Bench) -> None:
    """LEDGER-6: in every state, and nothing is changed by it."""
    for situation in (None, *SITUATIONS):
        wanted = await bench.message()
        if situation is None:
            await bench.once(wanted)
        else:
            await arranged(bench, wanted, situation)
        before, calls = await bench.row(wanted), len(bench.provider.calls)
        with pytest.raises(EffectMismatch):
            await bench.once(wanted, request={**REQUEST, "amount": 11}, reconciler=bench.provider.state)
        assert await bench.row(wanted) == before
        assert len(bench.provider.calls) == calls
    assert bench.counted.count("mismatch") == len(SITUATIONS) + 1


async def test_effects_differ_by_tenant_run_iteration_step_occurrence_and_operation(bench: Bench) -> None:
    """X5, and tenants never see each other's: each part alone makes another effect and another provider key."""
    first = await bench.message()
    parts: dict[str, Any] = {
        "tenant_id": "other",
        "run_key": "another",
        "iteration": 1,
        "step": "refund",
        "occurrence": 1,
        "operation": "x",
    }
    for wanted in (first, *(Wanted(key=first.key._replace(**{name: part}), fence=first.fence) for name, part in parts.items())):
        assert await bench.once(wanted)
    assert len(bench.provider.book) == len(set(bench.provider.book)) == len(parts) + 1


@pytest.mark.parametrize(
    "part",
    [{"operation": ""}, {"operation": "x" * 257}, {"operation": "ü" * 129}, {"step": "\0"}, {"step": "\ud800"}, {"occurrence": -1},
     {"occurrence": 2**31}, {"occurrence": True}, {"run_key": ""}],
    ids=repr,
)  # fmt: skip
async def test_a_name_that_the_table_cannot_hold_is_refused_before_anything(bench: Bench, part: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        await bench.once(await bench.message(**part))
    assert bench.statements == []


# -- secrets --------------------------------------------------------------------------------------------------------------


def rotated(bench: Bench) -> Secrets:
    """A second version is written now; the first can still be read."""
    return Secrets({1: bench.secrets._by_version[1], 2: secrets.token_bytes(32)}, write=[2])


@pytest.mark.parametrize("situation", ["done", "absent", "left behind", "unknown"])
async def test_an_effect_of_before_a_secret_was_replaced_is_found_and_goes_on(bench: Bench, situation: str) -> None:
    wanted = await bench.run()
    bench.provider.before.append({"absent": Retryable("busy"), "unknown": TimeoutError()}.get(situation))
    if situation == "left behind":
        bench.provider.before.clear()
        await bench.store().reserve(
            wanted.key, wanted.fence, hold_seconds=10, version=1, provider_key=provider_key(wanted.key), limits=LIMITS,
            fingerprint=bench.ledger()._fingerprint(1, bench_wanted(wanted)),
        )  # fmt: skip
        wanted = await bench.taken_over(wanted)
    elif situation == "done":
        await bench.once(wanted)
    else:
        with pytest.raises((Retryable, EffectUnknown)):
            await bench.once(wanted)
        await bench.pass_time(minutes=2)
    result = await bench.once(wanted, secrets=rotated(bench), reconciler=bench.provider.state)
    assert result["receipt"] == 1
    assert len(bench.provider.book) == 1
    with pytest.raises(EffectMismatch):
        await bench.once(wanted, secrets=rotated(bench), request={})


def bench_wanted(wanted: Wanted) -> Any:
    """What the ledger makes its fingerprint of."""
    from consumer_sdk.ledger import _canonical, _Wanted

    return _Wanted(
        key=wanted.key, fence=wanted.fence, canonical=_canonical(REQUEST), call=_never, limits=LIMITS, reconciler=None,
        codec=PLAIN,
    )  # fmt: skip


async def _never(_effect: Effect) -> object:
    raise AssertionError


async def test_a_row_whose_secret_was_taken_out_is_told_and_not_repeated(bench: Bench) -> None:
    wanted = await bench.message()
    await bench.once(wanted)
    with pytest.raises(ConfigurationError, match="version 1"):
        await bench.once(wanted, secrets=Secrets({2: secrets.token_bytes(32)}, write=[2]))
    assert len(bench.provider.book) == 1


# -- reconciling ----------------------------------------------------------------------------------------------------------


async def lost_answer(bench: Bench, wanted: Wanted, *, happened: bool) -> None:
    """An effect whose call ended without an answer."""
    (bench.provider.after if happened else bench.provider.before).append(TimeoutError())
    with pytest.raises(EffectUnknown):
        await bench.once(wanted)


async def test_an_effect_found_at_the_provider_is_applied_and_its_result_is_the_providers(bench: Bench) -> None:
    """LEDGER-3: at once, without waiting for anything in flight."""
    for wanted in (await bench.message(), await bench.run()):
        await lost_answer(bench, wanted, happened=True)
        for _ in range(2):
            assert await bench.once(wanted, reconciler=bench.provider.state) == {"receipt": "found"}
        row = await bench.row(wanted)
        assert (row["state"], row["provider_reference"], row["sends"]) == ("applied", "ch_1", 1)
        asked = bench.provider.asked[-1]
        assert (asked.key, asked.fencing_token, asked.sends, asked.sent_at) == (
            provider_key(wanted.key), 2, 1, row["sent_at"],
        )  # fmt: skip
    assert len(bench.provider.calls) == 2
    assert len(bench.provider.asked) == 2
    assert bench.counted == ["unknown", "reconciled", "replayed", "replayed"] * 2


async def test_absence_counts_only_after_the_deadline_and_the_time_in_flight(bench: Bench) -> None:
    """LEDGER-4: then exactly one more call, with the same key and the next token."""
    wanted = await bench.run()
    await lost_answer(bench, wanted, happened=False)
    for passed in (0, 29, 60):
        await bench.pass_time(seconds=passed)
        with pytest.raises(EffectUnknown, match="on its way") as told:
            await bench.once(wanted, reconciler=bench.provider.state)
        assert await bench.state(wanted) == "unknown"
    assert told.value.retry_after == "1"
    await bench.pass_time(seconds=1)
    assert (await bench.once(wanted, reconciler=bench.provider.state))["receipt"] == 1
    first, second = bench.provider.calls
    assert first.key == second.key
    assert (second.sends, second.fencing_token) == (2, (await bench.row(wanted))["generation"])
    assert second.fencing_token > first.fencing_token
    assert await bench.state(wanted) == "succeeded"


async def test_an_absent_effect_is_not_sent_again_once_its_key_may_be_forgotten(bench: Bench) -> None:
    """The call has to arrive while the provider still knows the key."""
    limits = CallLimits(timeout_seconds=30, in_flight_seconds=60, key_retention_seconds=1000)
    for passed, resent in ((905, True), (911, False)):
        wanted = await bench.message()
        bench.provider.before.append(Retryable("busy"))
        with pytest.raises(Retryable):
            await bench.once(wanted, limits=limits)
        await bench.pass_time(seconds=passed)
        if resent:
            assert await bench.once(wanted, limits=limits)
            continue
        with pytest.raises(EffectUnknown, match="too old"):
            await bench.once(wanted, limits=limits)
        assert await bench.state(wanted) == "absent"
        assert await bench.once(wanted, limits=CallLimits(key_retention_seconds=None))


async def test_a_key_that_was_never_sent_is_never_too_old(bench: Bench) -> None:
    wanted = await bench.message()
    await arranged(bench, wanted, "reserved")
    await bench.pass_time(days=10)
    assert await done(bench, "reserve", wanted)


@pytest.mark.parametrize("answer", [None, True, False, {}, "applied", Absent, Applied, RuntimeError("down"), TimeoutError()])
async def test_only_the_two_answers_prove_anything(bench: Bench, answer: object) -> None:
    """LEDGER-4: a reconciler that cannot tell, fails or answers oddly leaves the effect unknown."""
    wanted = await bench.run()
    await lost_answer(bench, wanted, happened=False)
    await bench.pass_time(hours=1)

    async def reconciler(_effect: Effect) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(EffectUnknown):
        await bench.once(wanted, reconciler=reconciler)
    assert await bench.state(wanted) == "unknown"
    assert len(bench.provider.calls) == 1


async def test_a_reconciler_that_hangs_is_ended(bench: Bench) -> None:
    wanted = await bench.run()
    await lost_answer(bench, wanted, happened=False)

    async def reconciler(_effect: Effect) -> None:
        await asyncio.Event().wait()

    with pytest.raises(EffectUnknown, match="timeout"):
        await bench.once(wanted, limits=QUICK, reconciler=reconciler)


async def test_without_a_reconciler_nothing_is_written_again_and_again(bench: Bench) -> None:
    """LEDGER-15: an operator's `--generation` stays true while attempts go on."""
    wanted = await bench.run()
    await lost_answer(bench, wanted, happened=True)
    before = await bench.row(wanted)
    for _ in range(3):
        with pytest.raises(EffectUnknown, match="no reconciler"):
            await bench.once(wanted)
    assert await bench.row(wanted) == before


async def test_a_sent_effect_whose_time_is_over_becomes_unknown_and_nothing_else(bench: Bench) -> None:
    """LEDGER-2."""
    wanted = await bench.run()
    await crashed(bench, wanted, after="send_effect")
    await bench.pass_time(seconds=36)
    later = await bench.taken_over(wanted)
    for _ in range(2):
        with pytest.raises(EffectUnknown):
            await bench.once(later)
    assert await bench.state(wanted) == "unknown"
    assert bench.provider.calls == []


async def test_an_effect_taken_over_while_its_provider_was_asked_is_not_written_by_the_first_asker(bench: Bench) -> None:
    wanted = await bench.run()
    await lost_answer(bench, wanted, happened=True)
    asking, answer = asyncio.Event(), asyncio.Event()

    async def slow(_effect: Effect) -> Applied:
        asking.set()
        await answer.wait()
        return Applied("late")

    first = asyncio.create_task(bench.once(wanted, reconciler=slow))
    await asking.wait()
    second = await bench.taken_over(wanted)
    assert await bench.once(second, reconciler=bench.provider.state) == {"receipt": "found"}
    answer.set()
    assert await first == {"receipt": "found"}  # not what it was told late: what is recorded
    assert (await bench.row(wanted))["provider_reference"] == "ch_1"


# -- two at once, and pauses ----------------------------------------------------------------------------------------------


async def test_of_two_who_reserve_at_once_one_calls_and_both_get_its_result(bench: Bench) -> None:
    """LEDGER-16: in one process or in two, for a message as for a run."""
    for holders in (("w1", "w2"), ("w1", "w1")):
        wanted = await bench.message()
        book = len(bench.provider.book)
        results = await asyncio.gather(*(bench.once(wanted, holder=holder) for holder in holders for _ in range(4)))
        assert len(bench.provider.book) == book + 1
        assert all(result == results[0] for result in results)


async def test_whoever_waits_looks_again_soon_after_the_answer(bench: Bench) -> None:
    """Not only when the other's time is over."""
    wanted = await bench.message()
    gate = asyncio.Event()
    bench.provider.before.append(gate)
    first = asyncio.create_task(bench.once(wanted))
    await bench.provider.reached.wait()
    second = asyncio.create_task(bench.once(wanted, holder="w2"))
    await asyncio.sleep(0)
    gate.set()
    async with asyncio.timeout(3):
        assert await first == await second


async def test_nobody_waits_for_ever(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consumer_sdk.ledger._HOLD_SECONDS", -10.0)
    wanted = await bench.message()
    await arranged_by_ledger(bench, wanted)
    with pytest.raises(EffectUnknown, match="in other hands"):
        await bench.once(wanted, limits=CallLimits(timeout_seconds=0.001))


async def arranged_by_ledger(bench: Bench, wanted: Wanted) -> None:
    """Another has sent it a moment ago."""
    await crashed(bench, wanted, after="reserve_effect")
    await bench.connection.execute(
        "UPDATE fencepost.effects SET state = 'sent', held_until = NULL, deadline_at = clock_timestamp() + interval '1 hour'"
        " WHERE run_key = $1",
        wanted.key.run_key,
    )


async def test_a_pause_between_the_reservation_and_the_call_calls_nothing(bench: Bench) -> None:
    """LEDGER-7, LEDGER-9: the later holder has the effect; the paused one wakes up and changes nothing."""
    wanted = await bench.run()
    paused, go = Pause(bench, "send_effect"), asyncio.Event()
    paused.go = go
    first = asyncio.create_task(paused.ledger().once(wanted.key, wanted.fence, **bench_call(bench)))
    await paused.reached.wait()
    later = await bench.taken_over(wanted)
    receipt = await bench.once(later, holder="w2")
    go.set()
    with pytest.raises(LeaseLost):
        await first
    assert len(bench.provider.book) == 1
    assert await bench.once(later) == receipt


async def test_a_process_that_stood_still_after_it_marked_the_effect_as_sent_does_not_call_any_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call's time counts from before the mark: whoever wakes up after it might meet a second call."""
    wanted = await bench.run()
    store, asleep = bench.store(), [0.0]

    async def fetch(name: str, *arguments: object) -> Sequence[Any]:
        rows = await bench.fetch(name, *arguments)
        asleep[0] = 31.0 if name == "send_effect" else asleep[0]
        return rows

    monkeypatch.setattr("consumer_sdk.ledger.lease_clock", lambda: lease_clock() + asleep[0])
    store._fetch = fetch
    with pytest.raises(TransientError, match="stood still"):
        await Ledger(store, bench.secrets).once(wanted.key, wanted.fence, **bench_call(bench))
    assert bench.provider.calls == []
    assert await bench.state(wanted) == "absent"
    assert (await bench.once(wanted))["receipt"] == 1


async def test_a_pause_between_the_call_and_its_record_changes_nothing(bench: Bench) -> None:
    """LEDGER-7: token 1 records nothing after token 2; what the later holder found stands."""
    wanted = await bench.run()
    paused = Pause(bench, "finish_effect")
    first = asyncio.create_task(paused.ledger().once(wanted.key, wanted.fence, **bench_call(bench)))
    await paused.reached.wait()
    later = await bench.taken_over(wanted)
    await bench.pass_time(minutes=1)
    assert await bench.once(later, holder="w2", reconciler=bench.provider.state) == {"receipt": "found"}
    paused.go.set()
    with pytest.raises(LeaseLost):
        await first
    assert await bench.state(wanted) == "applied"
    assert len(bench.provider.book) == 1


async def test_the_next_holder_waits_for_a_call_that_is_still_out(bench: Bench) -> None:
    """LEDGER-13: it finds `sent`, then the result or `unknown`; never a free slot."""
    wanted = await bench.message()
    gate = asyncio.Event()
    bench.provider.before.append(gate)
    first = asyncio.create_task(bench.once(wanted))
    await bench.provider.reached.wait()
    await bench.pass_time(seconds=31)  # past the deadline, within the margin
    second = asyncio.create_task(bench.once(wanted, holder="w2", reconciler=bench.provider.state))
    await eventually(lambda: bench.statements.count("read_effect") >= 2, message="the second has looked again")
    assert bench.provider.asked == []
    gate.set()
    assert await first == await second


async def test_the_lineage_shares_its_effects(bench: Bench) -> None:
    """LEDGER-8, LEDGER-9, X5: a replay's leases count from 1 again, and it takes over what its predecessor left in any state."""
    for left in ("reserve_effect", "send_effect", "finish_effect"):
        wanted = await bench.run()
        for _ in range(3):
            wanted = await bench.taken_over(wanted, "w1")
        await crashed(bench, wanted, after=left)
        assert wanted.fence.run_id is not None
        await bench.runs.expire_lease(wanted.fence.run_id)
        held = await bench.runs.claim_one()
        await bench.runs.fail(held, delay=None, reason="not_retryable")
        outcome, replay = await bench.runs.replay(held.run_id)
        assert outcome == "replayed"
        assert replay is not None
        again = Wanted(key=wanted.key, fence=bench.fence(await bench.runs.claim_one(), "w1"))
        assert again.fence.generation == 1
        await bench.pass_time(minutes=2)
        book = len(bench.provider.book)
        await bench.once(again, reconciler=bench.provider.state)
        assert len(bench.provider.book) == (book if left == "finish_effect" else book + 1)
        assert await bench.state(wanted) == "succeeded"


async def test_a_run_that_is_to_be_cancelled_sends_nothing_more_and_still_records_an_answer(bench: Bench) -> None:
    wanted = await bench.run()
    gate = asyncio.Event()
    bench.provider.before.append(gate)
    calling = asyncio.create_task(bench.once(wanted))
    await bench.provider.reached.wait()
    assert wanted.fence.run_id is not None
    assert await bench.runs.cancel(wanted.fence.run_id) == "requested"
    gate.set()
    await calling
    assert await bench.state(wanted) == "succeeded"
    with pytest.raises(LeaseLost):
        await bench.once(wanted.of("card.refund"))
    assert len(bench.provider.calls) == 1


# -- crashes --------------------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process is gone."""


class Pause:
    """A ledger whose statement ``name`` waits before it is sent."""

    def __init__(self, bench: Bench, name: str) -> None:
        self._bench, self._name = bench, name
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    def ledger(self) -> Ledger:
        store = self._bench.store()
        store._fetch = self._fetch
        return Ledger(store, self._bench.secrets)

    async def _fetch(self, name: str, *arguments: object) -> Sequence[Any]:
        if name == self._name:
            self.reached.set()
            await self.go.wait()
        return await self._bench.fetch(name, *arguments)


def bench_call(bench: Bench, **options: Any) -> dict[str, Any]:
    return {"request": REQUEST, "call": bench.provider.charge, "limits": LIMITS, "reconciler": None, **options}


async def crashed(bench: Bench, wanted: Wanted, *, before: str | None = None, after: str | None = None, **options: Any) -> None:
    """An attempt whose process dies right before or right after a statement, if it gets there."""
    store, fetch = bench.store(), bench.fetch

    async def dies(name: str, *arguments: object) -> Sequence[Any]:
        if name == before:
            raise Crash
        rows = await fetch(name, *arguments)
        if name == after:
            raise Crash
        return rows

    store._fetch = dies
    ledger = Ledger(store, bench.secrets)
    # A crash after the send is one before the call: the call is never made.
    try:
        await ledger.once(wanted.key, wanted.fence, **bench_call(bench, **options))
    except (Crash, EffectError, Retryable):
        return


WAYS: Final[dict[str, tuple[list[Any], list[Any], bool]]] = {
    "it works": ([], [], True),
    "surely nothing happened": ([Retryable("busy")], [], True),
    "lost before the effect": ([TimeoutError()], [], True),
    "lost after the effect": ([], [TimeoutError()], True),
    "refused": ([Terminal("declined")] * 4, [], False),
}  # fmt: skip
STATEMENTS: Final = ("reserve_effect", "read_effect", "send_effect", "finish_effect", "question_effect", "reconcile_effect")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("with_run", [True, False], ids=["run", "message"])
async def test_a_crash_at_any_statement_leaves_at_most_one_effect_and_the_next_attempt_ends_right(
    bench: Bench, way: str, with_run: bool
) -> None:
    """Every crash point of a first attempt, and of the one that follows it; then an attempt that is left alone."""
    before, after, happens = WAYS[way]
    # Before a statement is after the one before it, but where a call of ours stands between.
    points: list[dict[str, str]] = [*({"after": name} for name in STATEMENTS), {"before": "finish_effect"}]
    for first in points:
        for second in points:
            wanted = await (bench.run() if with_run else bench.message())
            bench.provider.__init__()  # type: ignore[misc]
            bench.provider.before, bench.provider.after = list(before), list(after)
            for point in (first, second):
                await crashed(bench, wanted, reconciler=bench.provider.state, **point)
                await bench.pass_time(minutes=2)
            if happens:
                assert await ended(bench, wanted)
            else:
                with pytest.raises(EffectFailed):
                    await ended(bench, wanted)
            assert len(bench.provider.book) == (1 if happens else 0), (first, second)
            assert len(await bench.rows(wanted)) == 1


async def ended(bench: Bench, wanted: Wanted) -> object:
    """What attempts come to that nothing happens to but what the provider does."""
    for _ in range(2):
        try:
            return await bench.once(wanted, reconciler=bench.provider.state)
        except (EffectUnknown, Retryable):
            await bench.pass_time(minutes=2)
    return await bench.once(wanted, reconciler=bench.provider.state)


async def test_an_answer_survives_a_database_that_is_away_for_a_moment(bench: Bench) -> None:
    """Told once and lost once; and lost although it was written."""
    for written in (False, True):
        wanted = await bench.run()
        store, failures = bench.store(), [1, 1]

        async def fetch(name: str, *arguments: object, failures: list[int] = failures, written: bool = written) -> Sequence[Any]:
            if name == "finish_effect" and failures:
                failures.pop()
                if written:
                    await bench.fetch(name, *arguments)
                raise TransientError("no answer")
            return await bench.fetch(name, *arguments)

        store._fetch = fetch
        result = await Ledger(store, bench.secrets).once(wanted.key, wanted.fence, **bench_call(bench))
        assert result == await bench.once(wanted)
        assert await bench.state(wanted) == "succeeded"
    assert len(bench.provider.book) == 2


# -- in the user's own tables --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrived", [True, False])
async def test_an_answer_survives_one_connection_that_is_silent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, arrived: bool
) -> None:
    """The first try takes all the time that there is for it; the next one has another connection. Whether the first has arrived or
    not, the answer is recorded once."""
    monkeypatch.setattr(ledger, "_MARGIN_SECONDS", 1.0)
    wanted = await bench.run()
    silent: list[str] = []

    async def fetch(name: str, *arguments: object) -> Sequence[Any]:
        if name == "finish_effect" and not silent:
            silent.append(name)
            if arrived:
                await bench.fetch(name, *arguments)
            await asyncio.Event().wait()
        return await bench.fetch(name, *arguments)

    own = Ledger(EffectStore(fetch, "w1"), bench.secrets)
    answer = await own.once(
        wanted.key, wanted.fence, request=REQUEST, call=bench.provider.charge, limits=LIMITS, reconciler=None
    )  # fmt: skip
    assert (answer, silent) == ({"receipt": 1, "token": 1}, ["finish_effect"])
    assert await bench.state(wanted) == "succeeded"


async def test_an_answer_that_cannot_be_recorded_is_given_up_in_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row stays as sent, and is found out about later."""
    monkeypatch.setattr(ledger, "_MARGIN_SECONDS", 0.05)
    wanted = await bench.run()
    tries = 0

    async def fetch(name: str, *arguments: object) -> Sequence[Any]:
        nonlocal tries
        if name == "finish_effect":
            tries += 1
            await asyncio.Event().wait()
        return await bench.fetch(name, *arguments)

    own = Ledger(EffectStore(fetch, "w1"), bench.secrets)
    with pytest.raises(TransientError, match="not recorded"):
        await own.once(wanted.key, wanted.fence, request=REQUEST, call=bench.provider.charge, limits=LIMITS, reconciler=None)
    assert (tries, await bench.state(wanted)) == (2, "sent")


async def test_the_token_guards_the_users_own_table(bench: Bench) -> None:
    """LEDGER-17: 0 rows, 1 row, 1 row."""
    await bench.connection.execute("CREATE TABLE public.cards (id int PRIMARY KEY, token bigint)")
    await bench.connection.execute("INSERT INTO public.cards VALUES (1, 8)")
    update = "UPDATE public.cards SET token = $1 WHERE id = 1 AND token <= $1"
    assert [await bench.connection.execute(update, token) for token in (7, 8, 9)] == ["UPDATE 0", "UPDATE 1", "UPDATE 1"]


async def test_a_consumer_cannot_rewrite_what_an_effect_is(bench: Bench) -> None:
    """Identity, fingerprint and provider key are written once; nothing is deleted."""
    await bench.once(await bench.message())
    await bench.connection.execute("SET ROLE fencepost_consumer")
    for statement in (
        "UPDATE fencepost.effects SET fingerprint = fingerprint", "UPDATE fencepost.effects SET provider_key = 'x'",
        "UPDATE fencepost.effects SET tenant_id = 'x'", "DELETE FROM fencepost.effects", "TRUNCATE fencepost.effects",
    ):  # fmt: skip
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await bench.connection.execute(statement)
    await bench.connection.execute("SET ROLE fencepost_producer")
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await bench.connection.execute("SELECT FROM fencepost.effects")


def test_a_fence_without_a_run_is_all_none() -> None:
    assert RunFence(None, None, None) == (None, None, None)


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"timeout_seconds": 0}, "timeout_seconds"), ({"in_flight_seconds": -1}, "in_flight_seconds"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds"), ({"timeout_seconds": 90_000}, "timeout_seconds"),
        ({"key_retention_seconds": 90}, "key_retention_seconds"), ({"key_retention_seconds": float("inf")}, "key_retention"),
        ({"key_retention_seconds": float("nan")}, "key_retention"),
    ],
)  # fmt: skip
def test_limits_that_cannot_work_are_refused(limits: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        CallLimits(**limits)


def test_how_long_an_effect_may_be_sent_again_leaves_time_to_arrive() -> None:
    assert CallLimits(timeout_seconds=10, in_flight_seconds=20, key_retention_seconds=100).resend_seconds == 70
    assert CallLimits(key_retention_seconds=None).resend_seconds is None
    assert timedelta(seconds=LIMITS.resend_seconds or 0) == timedelta(days=1, seconds=-90)
