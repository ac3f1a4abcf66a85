"""What is shipped for tests: the ledger in memory keeps the contract, broken ones do not, and builders build what is real."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from aiokafka.structs import ConsumerRecord
from pydantic import BaseModel

import consumer_sdk.testing
from consumer_sdk import CallLimits, Effect, Message, NotAMessage
from consumer_sdk.effect_store import EFFECT_STATEMENTS
from consumer_sdk.effects import EffectKey, RunFence
from consumer_sdk.testing import (
    TEST_SECRETS,
    Clock,
    EffectRow,
    MemoryEffects,
    MemoryHarness,
    event,
    memory_ledger,
    message,
    record,
)
from consumer_sdk.testing.contract import LedgerContract, LedgerHarness
from fencepost import wire
from fencepost.errors import InvalidCommand, LeaseLost
from relay.wire import RecordEncoder
from tests.unit.test_imports import HEAVY, loaded_by

MESSAGE: Final = RunFence(None, None, None)
KEY: Final = EffectKey("event-1", "acme", 0, "charge", 0, "card.charge")


class TestMemoryLedger(LedgerContract):
    """The ledger in memory keeps the contract."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[LedgerHarness]:
        yield MemoryHarness()


# -- broken ledgers, each of which the contract must catch ----------------------------------------------------------------


class ForgetsSent(MemoryEffects):
    """Calls without having written that it will."""

    def send_effect(self, key: EffectKey, fence: RunFence, generation: int, timeout: timedelta) -> Mapping[str, Any] | None:
        row = self._mine(key, fence, generation)
        return None if row is None or row.state != "reserved" else {"generation": generation}

    def finish_effect(self, key: EffectKey, fence: RunFence, generation: int, *answer: Any) -> Mapping[str, Any] | None:
        super().send_effect(key, fence, generation, timedelta(seconds=30))
        return super().finish_effect(key, fence, generation, *answer)


class ResendsUnknown(MemoryEffects):
    """Takes an effect whose answer is unknown for a free one."""

    def _may_be_taken(self, row: EffectRow, fence: RunFence) -> bool:
        return row.state == "unknown" or super()._may_be_taken(row, fence)


class ResendsLapsed(MemoryEffects):
    """Takes a call whose time is over for one that never was."""

    def _may_be_taken(self, row: EffectRow, fence: RunFence) -> bool:
        return self._is_lapsed(row, timedelta(0)) or super()._may_be_taken(row, fence)


class TakesAnyReservation(MemoryEffects):
    """Two who ask at once both get it."""

    def _may_be_taken(self, row: EffectRow, fence: RunFence) -> bool:
        return row.state in {"reserved", "absent"}


class IgnoresGenerations(MemoryEffects):
    """Lets whoever called write, whoever has the effect by now."""

    def _mine(self, key: EffectKey, fence: RunFence, generation: int) -> EffectRow | None:
        row = self.row(key)
        return None if row is None else super()._mine(key, fence, row.generation)


class IgnoresLeases(MemoryEffects):
    """Checks the lease when it reserves, and never again."""

    def _mine(self, key: EffectKey, fence: RunFence, generation: int) -> EffectRow | None:
        return super()._mine(key, MESSAGE, generation)


class KeepsItsToken(MemoryEffects):
    """Takes over under the token of the one before."""

    def reserve_effect(self, key: EffectKey, fence: RunFence, *given: Any) -> Mapping[str, Any] | None:
        before = self.row(key)
        taken = super().reserve_effect(key, fence, *given)
        if taken is None or before is None:
            return taken
        return self._written(key, replace(self._rows[key], generation=before.generation))


class MakesAnotherKey(MemoryEffects):
    """Gives the provider another key when it sends again."""

    def reserve_effect(self, key: EffectKey, fence: RunFence, *given: Any) -> Mapping[str, Any] | None:
        taken = super().reserve_effect(key, fence, *given)
        if taken is None or taken["generation"] == 1:
            return taken
        return self._written(key, replace(self._rows[key], provider_key=f"fp_{taken['generation']}"))


class TrustsEarlyAbsence(MemoryEffects):
    """Believes that what has not arrived yet will not."""

    @staticmethod
    def _is_proof(row: EffectRow, asked_at: datetime, in_flight: timedelta) -> bool:
        return True


class ProvesAbsenceByTheTimeOfTelling(MemoryEffects):
    """Counts absence from when it is told instead of when it was seen."""

    def reconcile_effect(
        self, key: EffectKey, fence: RunFence, generation: int, state: str, result: bytes | None, reference: str | None,
        asked_at: datetime, in_flight: timedelta,
    ) -> Mapping[str, Any] | None:  # fmt: skip
        return super().reconcile_effect(key, fence, generation, state, result, reference, self.clock.now(), in_flight)


class AsksInTwos(MemoryEffects):
    """Lets everybody who has read an unknown effect go and ask, on the word of what it has read."""

    def question_effect(
        self, key: EffectKey, fence: RunFence, generation: int, margin: timedelta, holder: str
    ) -> Mapping[str, Any] | None:
        row = self.row(key)
        return None if row is None else super().question_effect(key, fence, row.generation, margin, holder)


class ForgetsRefusals(MemoryEffects):
    """Takes a refusal for something that may go better next time."""

    def finish_effect(self, key: EffectKey, fence: RunFence, generation: int, *answer: Any) -> Mapping[str, Any] | None:
        written = super().finish_effect(key, fence, generation, *answer)
        if written is not None and answer[0] == "failed":
            del self._rows[key]
        return written


class SendsForEver(MemoryEffects):
    """Sends again what the provider may have forgotten."""

    def _is_too_old(self, row: EffectRow, window: timedelta | None) -> bool:
        return False


class IgnoresRequests(MemoryEffects):
    """Takes what was meant for another request."""

    def reserve_effect(self, key: EffectKey, fence: RunFence, *given: Any) -> Mapping[str, Any] | None:
        row = self.row(key)
        if row is not None:
            given = (*given[:2], row.fingerprint, row.fingerprint_version, *given[4:])
        return super().reserve_effect(key, fence, *given)


BROKEN: Final[dict[type[MemoryEffects], tuple[str, ...]]] = {
    ForgetsSent: ("test_a_crash_after_sending_is_unknown_and_nothing_is_sent_again",
                  "test_a_cancelled_call_leaves_the_effect_as_sent"),
    ResendsUnknown: ("test_an_effect_that_was_delivered_and_then_timed_out_is_unknown",
                     "test_without_a_reconciler_a_person_decides"),
    ResendsLapsed: ("test_a_crash_after_sending_is_unknown_and_nothing_is_sent_again",
                    "test_a_lease_that_ends_with_the_call_leaves_no_free_slot"),
    TakesAnyReservation: ("test_of_many_who_ask_at_once_one_calls_and_all_get_its_result",),
    IgnoresGenerations: ("test_an_earlier_call_that_ends_late_says_nothing_about_a_later_one_that_is_out",
                         "test_a_write_under_another_generation_of_the_effect_changes_nothing"),
    IgnoresLeases: ("test_a_lease_that_ends_with_the_call_leaves_no_free_slot",
                    "test_a_holder_whose_lease_is_not_current_writes_nothing"),
    KeepsItsToken: ("test_a_crash_before_sending_is_taken_over_and_the_call_is_made_once",
                    "test_each_take_over_raises_the_generation_and_nothing_lowers_it"),
    MakesAnotherKey: ("test_a_call_that_surely_did_nothing_is_made_again_under_the_same_key",),
    TrustsEarlyAbsence: ("test_absence_counts_only_when_no_request_can_be_on_its_way_any_more",),
    ProvesAbsenceByTheTimeOfTelling: ("test_absence_counts_from_when_it_was_seen",
                                      "test_absence_that_was_seen_too_early_does_not_count_however_late_it_is_told"),
    AsksInTwos: ("test_a_write_under_another_generation_of_the_effect_changes_nothing",),
    ForgetsRefusals: ("test_a_refusal_is_told_again_and_the_provider_is_not_asked_again",),
    SendsForEver: ("test_an_effect_is_not_sent_again_once_the_provider_may_have_forgotten_its_key",),
    IgnoresRequests: ("test_another_request_under_the_same_effect_is_told_apart",),
}  # fmt: skip


def put_to_the_test(effects: Callable[[], MemoryEffects]) -> LedgerContract:
    class Contract(LedgerContract):
        limit_seconds = 5.0

        @asynccontextmanager
        async def opened(self) -> AsyncIterator[LedgerHarness]:
            yield MemoryHarness(effects())

    return Contract()


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_the_contract_catches_a_broken_ledger(broken: type[MemoryEffects]) -> None:
    contract = put_to_the_test(broken)
    for name in BROKEN[broken]:
        with pytest.raises((Exception, pytest.fail.Exception)):
            getattr(contract, name)()


@pytest.mark.parametrize("name", sorted({name for names in BROKEN.values() for name in names}))
def test_the_contract_lets_a_right_one_pass_where_it_catches_broken_ones(name: str) -> None:
    getattr(put_to_the_test(MemoryEffects), name)()


def test_a_ledger_that_hangs_is_caught_by_the_clock() -> None:
    class Hangs(MemoryEffects):
        async def fetch(self, name: str, *arguments: Any) -> Any:
            await asyncio.Event().wait()

    contract = put_to_the_test(Hangs)
    contract.limit_seconds = 0.05
    with pytest.raises(TimeoutError):
        contract.test_an_effect_that_succeeded_is_told_again_and_not_repeated()


# -- the ledger in memory -------------------------------------------------------------------------------------------------


async def charge(effect: Effect) -> object:
    return {"key": effect.key}


async def once(effects: MemoryEffects, fence: RunFence = MESSAGE) -> object:
    return await memory_ledger(effects).once(
        KEY, fence, request={}, call=charge, limits=CallLimits(), reconciler=None
    )  # fmt: skip


async def test_a_users_test_sees_the_row_and_the_result() -> None:
    effects = MemoryEffects()
    result = await once(effects)
    row = effects.row(KEY)
    assert row is not None
    assert (row.state, result) == ("succeeded", {"key": row.provider_key})
    assert effects.rows() == {KEY: row}


async def test_there_is_a_method_for_each_statement_and_no_other_name_is_answered() -> None:
    effects = MemoryEffects()
    assert all(callable(getattr(effects, name)) for name in EFFECT_STATEMENTS)
    with pytest.raises(AttributeError):
        await effects.fetch("drop_effects", *KEY, *MESSAGE)


async def test_a_lease_with_a_time_ends_by_the_clock_and_one_without_does_not() -> None:
    effects = MemoryEffects()
    short, long = effects.leases.grant("w1", seconds=30), effects.leases.grant("w1")
    effects.clock.advance(30)
    with pytest.raises(LeaseLost):
        await once(effects, short)
    assert await once(effects, long)


def test_a_clock_moves_only_when_it_is_told_to_and_never_back() -> None:
    start = datetime(2030, 1, 1, tzinfo=UTC)
    clock = Clock(start)
    clock.advance(1.5)
    assert clock.now() == start + timedelta(seconds=1.5)
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1)
    assert Clock().now().tzinfo is not None


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("state", "odd"), ("state", "succeeded"), ("held_until", None), ("result", b"1"), ("error_code", "x"), ("generation", 0),
        ("sends", -1), ("fingerprint", b"short"), ("fingerprint", None), ("fingerprint_version", None), ("provider_key", None),
        ("run_generation", 1), ("finished_at", datetime(2030, 1, 1, tzinfo=UTC)),
        ("provider_reference", "r" * 1001), ("state", "sent"),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_half_states_cannot_be_written(column: str, value: Any) -> None:
    now = datetime.now(UTC)
    row = EffectRow(
        state="reserved",
        holder="w1",
        created_at=now,
        held_until=now,
        fingerprint=b"f" * 32,
        fingerprint_version=1,
        provider_key="fp",
    )
    with pytest.raises(ValueError, match="cannot hold"):
        replace(row, **{column: value})


def test_a_resolution_that_the_database_refuses_is_refused() -> None:
    effects = MemoryEffects()
    for resolution, result in (("succeeded", None), ("absent", b"1")):
        with pytest.raises(ValueError, match="applied, absent or disputed"):
            effects.resolve(KEY, resolution, generation=1, result=result)


def test_the_secrets_of_tests_do_not_show() -> None:
    assert "everybody" not in repr(TEST_SECRETS)


# -- builders -------------------------------------------------------------------------------------------------------------


class Order(BaseModel):
    order: str


def test_a_record_has_what_aiokafkas_has() -> None:
    built = record(b"12", key="k", topic="orders", partition=2, offset=7, headers=[("a", None)], timestamp=5)
    assert all(hasattr(built, one.name) for one in fields(ConsumerRecord))
    assert (built.topic, built.partition, built.offset, built.key, built.value) == ("orders", 2, 7, b"k", b"12")
    assert (built.headers, built.timestamp, built.serialized_key_size, built.serialized_value_size) == ((("a", None),), 5, 1, 2)
    assert record(key=None).serialized_key_size == record().serialized_value_size == -1


def test_a_record_does_not_show_what_it_carries() -> None:
    assert "secret" not in repr(record(b"secret", key="secret", headers=[("secret", b"secret")]))


def test_records_come_one_after_the_other_and_each_event_has_an_id_of_its_own() -> None:
    first, second = message("order.placed", "first"), message("order.placed", "second")
    assert first.offset < second.offset
    assert first.sequence is not None
    assert second.sequence is not None
    assert first.sequence < second.sequence
    assert first.event_id != second.event_id
    assert (first.key, first.tenant_id, first.topic, first.partition) == (second.key, "acme", "events", 0)


def test_an_event_is_what_the_relay_publishes() -> None:
    moment = datetime(2030, 1, 1, 12, 30, 0, 123_456, UTC)
    built = event(
        "order.placed", {"a": 1}, topic="orders", key="o-1", event_id="01a2", source="shop", time=moment, sequence=42,
        tenant_id="t", run_id="r", step="s", operation="o", fencing_token=7, traceparent="00-x", tracestate="v=1",
        headers=[("mine", b"\xff")], schema_version=3,
    )  # fmt: skip
    microseconds = int((moment - datetime(2000, 1, 1, tzinfo=UTC)).total_seconds() * 1_000_000)
    row: Any = (
        None, 42, None, 1, microseconds, "01a2", "orders", "order.placed", b"o-1", b'{"a":1}', "shop", "application/json", "t",
        "r", "s", "o", 7, "00-x", "v=1", [wire.SCHEMA_VERSION, "mine"], [b"3", b"\xff"],
    )  # fmt: skip
    published = RecordEncoder("default").encode(row)
    assert (built.topic, built.key, built.value, built.timestamp) == published[:4]
    assert list(built.headers) == published.headers


def test_a_message_is_what_a_handler_gets() -> None:
    value = Order(order="o-1")
    received: Message[Order] = message("order.placed", value, tenant_id=None, schema_version=2, headers=[("mine", b"1")])
    assert received.value is value
    assert received.json() == {"order": "o-1"}
    assert (received.type, received.schema_version, received.tenant_id) == ("order.placed", 2, None)
    assert received.headers == ((wire.SCHEMA_VERSION, b"2"), ("mine", b"1"))
    assert received.time.tzinfo is not None


def test_a_payload_is_json_or_bytes_as_they_are_or_nothing() -> None:
    assert json.loads(event("t", {"a": [1, "ü"]}).value or b"") == {"a": [1, "ü"]}
    assert event("t", b"\xff").value == b"\xff"
    assert event("t").value is None
    with pytest.raises(InvalidCommand, match="value"):
        event("t", object())


def test_a_foreign_record_is_no_message() -> None:
    with pytest.raises(NotAMessage):
        Message.from_record(record(b"{}", headers=[("content-type", b"application/json")]))


# -- what an import costs -------------------------------------------------------------------------------------------------


def test_the_package_brings_no_test_runner_and_no_client() -> None:
    runners = {"pytest", "_pytest", "hypothesis"}
    assert loaded_by("import consumer_sdk.testing") & (HEAVY | runners) == set()
    assert loaded_by("from consumer_sdk.testing import handle") & (runners | {"aiokafka"}) == set()


def test_the_public_surface_is_this() -> None:
    assert all(getattr(consumer_sdk.testing, name) for name in consumer_sdk.testing.__all__)
    assert consumer_sdk.testing.__all__ == [
        "Again", "BuiltRecord", "Clock", "Dead", "DeadLetter", "Done", "EffectRow", "EventOptions", "Handled", "LedgerHarness",
        "Leases", "Memory", "MemoryEffects", "MemoryHarness", "MemoryMessages", "RecordedCall", "Recorder", "Step", "TEST_SECRETS",
        "event", "handle", "handle_many", "memory_ledger", "message", "record", "redrive",
    ]  # fmt: skip
