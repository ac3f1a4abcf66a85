"""The statements of messages.sql, each by two sessions and in the order that suits it least, and what they cost.

Time is moved by moving rows. Whoever waits is seen to wait in pg_locks before the other goes on.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any, Final, TypeVar
from uuid import UUID

import asyncpg
import pytest

from consumer_sdk import Message, MessageContext, MessageHandlers
from consumer_sdk.delivery import Dead, Redrive
from consumer_sdk.identity import Identity
from consumer_sdk.message_store import Copy, MessageStore
from consumer_sdk.run_store import PLANNER
from fencepost.statements import load_statements
from tests.support.consumers import Ping, Stage, stage
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

pytestmark = pytest.mark.services

SQL: Final = load_statements("consumer_sdk", "messages.sql")
_T = TypeVar("_T")

CONSUMER: Final = "billing"
DEAD: Final = Dead("rejected", "Refused", "no")
HOLD_SECONDS: Final = 60.0
LIMIT_SECONDS: Final = 30.0
MOST: Final = 100
REDRIVE: Final = "SELECT outcome FROM fencepost.redrive_dead_letter($1, false, 'ana', 'mended')"
#: Rows of a ledger that is big for a plan made when it was empty.
BIG: Final = 50_000
FILL_LEDGER: Final = """
INSERT INTO fencepost.effects (run_key, tenant_id, iteration, step, occurrence, operation, state, holder, finished_at)
SELECT 'm' || n, 'acme', 0, 'billing/write', 0, 'fencepost.message', 'succeeded', 'h', now()
FROM generate_series(1, $1::integer) AS n
"""
FILL_LETTERS: Final = """
INSERT INTO fencepost.dead_letters (run_key, tenant_id, step, consumer, topic, "partition", "offset", recorded_at, header_names,
                                    header_values, reason, error_class, error_code, attempts, state)
SELECT $2 || n, 'acme', 's', $3, 't', 0, n, now(), '{}', '{}', 'rejected', 'X', 'x', 1, $4 FROM generate_series(1, $1::integer) AS n
"""


def message(name: str, *, tenant: str = "acme", step: str = "billing/write") -> Identity:
    return Identity(name, tenant, step)


def record(offset: int = 7, value: bytes | None = b"{}") -> Any:
    return SimpleNamespace(
        topic="orders", partition=0, offset=offset, key=b"k", value=value, headers=(("a", b"1"), ("b", None)), timestamp=1_000
    )


class Sessions:
    """Two holders, each with a store of its own, a connection for each one's transactions, and one that looks on."""

    def __init__(self, url: str, stores: Sequence[MessageStore], connections: Sequence["asyncpg.Connection[Any]"]) -> None:
        self.url = url
        self.a, self.b = stores
        self.in_a, self.in_b, self.looking = connections

    async def give_up(self, who: MessageStore, one: Identity, *, copy: Copy | None = None, offset: int = 7) -> UUID | None:
        return await who.store_dead(
            one, record(offset), DEAD, consumer=CONSUMER, event_type="placed", attempts=3, copy=copy
        )  # fmt: skip

    async def redriving(self, name: str = "m1") -> Identity:
        """A message that was given up, and is to be handled anew."""
        one = message(name)
        dead_letter_id = await self.give_up(self.a, one)
        assert await self.looking.fetchval(REDRIVE, dead_letter_id) == "redriving"
        return one

    async def taken(self, who: MessageStore, *, limit: int = MOST) -> list[Redrive]:
        letters = await who.claim_redrives(CONSUMER, hold_seconds=HOLD_SECONDS, limit=limit)
        return [letter.redrive for letter in letters]

    async def lapse(self) -> None:
        """Whoever has dead letters in hand has had them for too long."""
        await self.looking.execute("UPDATE fencepost.dead_letters SET held_until = clock_timestamp() WHERE held_until IS NOT NULL")

    async def letter(self) -> Mapping[str, Any]:
        (row,) = await self.looking.fetch("SELECT * FROM fencepost.dead_letters")
        return dict(row)

    async def outcome(self, one: Identity) -> tuple[str, int, str] | None:
        """State, generation and holder of a message's row."""
        row = await self.looking.fetchrow(
            "SELECT state, generation, holder FROM fencepost.effects WHERE run_key = $1 AND tenant_id = $2 AND step = $3", *one
        )
        return None if row is None else tuple(row)

    async def waits(self, doing: Coroutine[Any, Any, _T]) -> "asyncio.Task[_T]":
        """Begin it, and return when it waits for another session."""
        task = asyncio.create_task(doing)

        async def blocked() -> bool:
            assert not task.done(), "it did not wait"
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            return bool(await self.looking.fetchval(waiting))

        await eventually(blocked, message="a session waits")
        return task


@pytest.fixture
async def sessions(database_url: str) -> AsyncIterator[Sessions]:
    stores = [await MessageStore.open(database_url, holder=name, timeout_seconds=20) for name in "ab"]
    connections = [await asyncpg.connect(database_url) for _ in range(3)]
    yield Sessions(database_url, stores, connections)
    for connection in connections:
        await connection.close(timeout=5)
    for store in stores:
        await store.close()


# -- recording ------------------------------------------------------------------------------------------------------------


async def test_a_message_is_recorded_once_for_each_tenant_and_step(sessions: Sessions) -> None:
    one = message("m1")
    others = [message("m1", tenant=""), message("m1", step="billing/mail"), message("m1", step="shipping/write"), message("m2")]
    assert await sessions.a.record([one]) == {one}
    assert await sessions.b.record([one, *others]) == set(others)
    assert await sessions.b.record([one, *others]) == frozenset()
    assert await sessions.outcome(one) == ("succeeded", 1, "a")
    assert await sessions.a.known([message("m3"), one, message("m3", tenant=""), others[0]]) == {1, 3}


async def test_copies_in_one_batch_are_one_message(sessions: Sessions) -> None:
    one, other = message("m1"), message("m2")
    assert await sessions.a.record([one, other, one, one]) == {one, other}


async def test_the_function_that_records_one_message_answers_as_the_statement_does(sessions: Sessions) -> None:
    one = message("m1")
    call = "SELECT fencepost.record_message($1, $2, $3, $4)"
    async with sessions.in_a.transaction():
        assert await sessions.in_a.fetchval(call, *one, "a") is True
        second = await sessions.waits(sessions.in_b.fetchval(call, *one, "b"))
    assert await second is False
    assert await sessions.b.record([one]) == frozenset()
    assert await sessions.outcome(one) == ("succeeded", 1, "a")


@pytest.mark.parametrize(
    "half",
    [
        "generation = 0", "sends = -1", "finished_at = NULL", "held_until = now()", "error_code = 'x'",
        "run_id = gen_random_uuid()", "run_generation = 1", "fingerprint = sha256('x')", "fingerprint_version = 1",
        "provider_key = 'k'", "state = 'reserved'", "state = 'nonsense'", "result = repeat('x', 1000001)::bytea",
        "provider_reference = repeat('x', 1001)",
    ],
)  # fmt: skip
async def test_a_messages_row_in_a_half_state_is_refused(sessions: Sessions, half: str) -> None:
    await sessions.a.record([message("m1")])
    with pytest.raises(asyncpg.CheckViolationError):
        await sessions.looking.execute(f"UPDATE fencepost.effects SET {half}")


@pytest.mark.parametrize("ends", ["commits", "rolls back"])
async def test_a_second_delivery_waits_for_the_first_ones_transaction(sessions: Sessions, ends: str) -> None:
    """It is a duplicate if that commits, and the first to handle the message if it does not."""
    one, transaction = message("m1"), sessions.in_a.transaction()
    await transaction.start()
    assert await sessions.a.record_within(sessions.in_a, [one], limit_seconds=LIMIT_SECONDS) == {one}
    assert await sessions.b.known([one]) == frozenset()
    second = await sessions.waits(sessions.b.record([one]))
    await (transaction.commit() if ends == "commits" else transaction.rollback())
    assert await second == (frozenset() if ends == "commits" else {one})
    assert await sessions.outcome(one) == ("succeeded", 1, "a" if ends == "commits" else "b")


async def test_two_batches_in_opposite_order_do_not_wait_for_one_another_crosswise(sessions: Sessions) -> None:
    """Both wait at the first message, for a third transaction, with nothing of the others in hand."""
    batch = [message(f"m{number}") for number in range(1, 5)]
    holding = sessions.looking.transaction()
    await holding.start()
    await sessions.looking.execute(FILL_LEDGER, 1)
    watching = await asyncpg.connect(sessions.url)
    tasks = [asyncio.create_task(sessions.a.record(batch)), asyncio.create_task(sessions.b.record(batch[::-1]))]

    async def both_wait() -> bool:
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        return bool(await watching.fetchval(waiting) == 2)

    await eventually(both_wait, message="both wait")
    await holding.rollback()
    recorded = await asyncio.gather(*tasks)
    await watching.close()
    assert sorted(one for batch in recorded for one in batch) == batch


async def test_a_transaction_is_bounded_from_its_first_statement_on_and_only_it_is(sessions: Sessions) -> None:
    async def bounds() -> list[str]:
        return [
            await sessions.in_a.fetchval(f"SHOW {name}") for name in ("statement_timeout", "idle_in_transaction_session_timeout")
        ]

    before = await bounds()
    async with sessions.in_a.transaction():
        await sessions.a.record_within(sessions.in_a, [message("m1")], limit_seconds=1.5)
        assert await bounds() == ["1500ms", "1500ms"]
    assert await bounds() == before
    one = await sessions.redriving("m2")
    (redrive,) = await sessions.taken(sessions.a)
    async with sessions.in_a.transaction():
        await sessions.a.finish_redrive_within(sessions.in_a, redrive, one, limit_seconds=2)
        assert await bounds() == ["2s", "2s"]
    assert await bounds() == before


# -- giving up ------------------------------------------------------------------------------------------------------------


async def test_a_message_is_given_up_once_and_not_after_it_was_handled(sessions: Sessions) -> None:
    one, handled = message("m1"), message("m2")
    await sessions.a.record([handled])
    assert await sessions.give_up(sessions.a, one) is not None
    before = await sessions.letter()
    assert await sessions.give_up(sessions.b, one, offset=8) is None
    assert await sessions.give_up(sessions.b, handled) is None
    assert await sessions.letter() == before
    assert (before["state"], before["offset"], before["attempts"], before["header_values"]) == (
        "dead", 7, 3, [b"1", None],
    )  # fmt: skip
    assert await sessions.outcome(one) == ("failed", 1, "a")
    assert await sessions.outcome(handled) == ("succeeded", 1, "a")


@pytest.mark.parametrize("ends", ["commits", "rolls back"])
async def test_giving_up_waits_for_a_handler_that_is_about_to_commit(sessions: Sessions, ends: str) -> None:
    one, transaction = message("m1"), sessions.in_a.transaction()
    await transaction.start()
    await sessions.a.record_within(sessions.in_a, [one], limit_seconds=LIMIT_SECONDS)
    second = await sessions.waits(sessions.give_up(sessions.b, one))
    await (transaction.commit() if ends == "commits" else transaction.rollback())
    assert (await second is None) == (ends == "commits")
    assert await sessions.outcome(one) == (("succeeded", 1, "a") if ends == "commits" else ("failed", 1, "b"))


async def test_the_copy_is_written_with_the_dead_letter_or_neither_is(sessions: Sessions) -> None:
    def copy(topic: str) -> Copy:
        return Copy(topic=topic, key=b"k", payload=b"{}", headers=(("x", b"1"),), content_type=None, traceparent=None)

    with pytest.raises(asyncpg.PostgresError):
        await sessions.give_up(sessions.a, message("m1"), copy=copy("no topic's name: " + "x" * 300))
    assert await sessions.outcome(message("m1")) is None
    assert await sessions.looking.fetchval("SELECT count(*) FROM fencepost.dead_letters") == 0

    await sessions.give_up(sessions.a, message("m1"), copy=copy("dead"))
    await sessions.give_up(sessions.b, message("m1"), copy=copy("dead"))
    await sessions.give_up(sessions.a, message("m2", tenant=""))
    rows = await sessions.looking.fetch("SELECT topic, tenant_id, event_type FROM fencepost.outbox")
    assert [tuple(row) for row in rows] == [("dead", "acme", "fencepost.message_dead_lettered")]


async def test_a_message_that_is_given_up_again_has_a_dead_letter_as_young_as_that(sessions: Sessions) -> None:
    """The ledger has forgotten it since. Its redrive is not too old, and stale hands stay stale."""
    one = await sessions.redriving()
    (stale,) = await sessions.taken(sessions.a)
    assert await sessions.a.finish_redrive(stale, one)
    month = timedelta(days=30)
    await sessions.looking.execute(
        "UPDATE fencepost.dead_letters SET created_at = created_at - $1::interval, changed_at = changed_at - $1", month
    )
    await sessions.looking.execute(
        "UPDATE fencepost.effects SET created_at = created_at - $1::interval, finished_at = now() - $1", month
    )
    assert await sessions.a.forget(timedelta(days=7), limit=MOST) == 1
    before = await sessions.letter()

    given_up_at: datetime = await sessions.looking.fetchval("SELECT clock_timestamp()")
    assert await sessions.give_up(sessions.b, one, offset=9) == before["dead_letter_id"]
    after = await sessions.letter()
    assert min(after["created_at"], after["changed_at"]) >= given_up_at
    assert (after["state"], after["offset"], after["holder"]) == ("dead", 9, None)
    assert (after["redrives"], after["generation"]) == (before["redrives"], before["generation"]) == (1, 1)

    assert await sessions.looking.fetchval(REDRIVE, after["dead_letter_id"]) == "redriving"
    (letter,) = await sessions.b.claim_redrives(CONSUMER, hold_seconds=HOLD_SECONDS, limit=MOST)
    assert letter.created_at > await sessions.b.oldest_remembered(timedelta(days=7))
    assert not await sessions.a.finish_redrive(stale, one)
    assert (await sessions.letter())["redrives"] == 2


# -- redrives -------------------------------------------------------------------------------------------------------------


async def test_two_who_take_redrives_take_each_letter_once(sessions: Sessions) -> None:
    """In the same moment: neither waits, and what one has in an open transaction the other passes."""
    for number in range(6):
        await sessions.redriving(f"m{number}")
    arguments = (CONSUMER, timedelta(seconds=HOLD_SECONDS))
    async with sessions.in_a.transaction():
        first = await sessions.in_a.fetch(SQL["claim_redrives"], "a", *arguments, 2)
        second = await asyncio.wait_for(sessions.taken(sessions.b, limit=3), 10)
    third = await sessions.taken(sessions.b)
    taken = [row["dead_letter_id"] for row in first] + [one.dead_letter_id for one in (*second, *third)]
    assert [len(first), len(second), len(third)] == [2, 3, 1]
    assert len(set(taken)) == 6
    assert await sessions.taken(sessions.a) == []


async def test_only_what_an_operator_asked_for_is_taken_and_only_by_its_consumer(sessions: Sessions) -> None:
    await sessions.give_up(sessions.a, message("m1"))
    await sessions.redriving("m2")
    assert await sessions.a.claim_redrives("shipping", hold_seconds=HOLD_SECONDS, limit=MOST) == []
    letters = await sessions.a.claim_redrives(CONSUMER, hold_seconds=HOLD_SECONDS, limit=MOST)
    assert [letter.identity for letter in letters] == [message("m2")]
    assert (letters[0].record.value, letters[0].record.headers) == (b"{}", (("a", b"1"), ("b", None)))


async def test_a_hand_that_has_lapsed_is_taken_over_and_writes_nothing_more(sessions: Sessions) -> None:
    one = await sessions.redriving()
    (stale,) = await sessions.taken(sessions.a)
    assert await sessions.taken(sessions.b) == []
    await sessions.lapse()
    (current,) = await sessions.taken(sessions.b)
    assert (current.dead_letter_id, current.generation) == (stale.dead_letter_id, stale.generation + 1)
    letter, outcome = await sessions.letter(), await sessions.outcome(one)

    assert not await sessions.a.finish_redrive(stale, one)
    assert not await sessions.a.fail_redrive(stale, DEAD)
    assert not await sessions.a.release_redrive(stale)
    async with sessions.in_a.transaction():
        ended = await sessions.a.finish_redrive_within(sessions.in_a, stale, one, limit_seconds=LIMIT_SECONDS)
    assert ended == (False, False)
    assert (await sessions.letter(), await sessions.outcome(one)) == (letter, outcome)

    assert await sessions.b.finish_redrive(current, one)
    assert (await sessions.letter())["state"] == "redriven"
    assert await sessions.outcome(one) == ("succeeded", 2, "b")
    assert not await sessions.b.finish_redrive(current, one)
    assert await sessions.outcome(one) == ("succeeded", 2, "b")


@pytest.mark.parametrize("ends", ["commits", "rolls back"])
async def test_a_redrive_that_two_finish_at_once_is_finished_once(sessions: Sessions, ends: str) -> None:
    one, transaction = await sessions.redriving(), sessions.in_a.transaction()
    (redrive,) = await sessions.taken(sessions.a)
    await transaction.start()
    first = await sessions.a.finish_redrive_within(sessions.in_a, redrive, one, limit_seconds=LIMIT_SECONDS)
    second = await sessions.waits(sessions.b.finish_redrive(redrive, one))
    await (transaction.commit() if ends == "commits" else transaction.rollback())
    assert (first, await second) == ((True, True), ends == "rolls back")
    assert await sessions.outcome(one) == ("succeeded", 2, "a" if ends == "commits" else "b")


async def test_a_redrive_of_what_another_delivery_has_handled_ends_and_handles_nothing(sessions: Sessions) -> None:
    """Its message's row was forgotten, and it came again."""
    one = await sessions.redriving()
    (redrive,) = await sessions.taken(sessions.a)
    await sessions.looking.execute("DELETE FROM fencepost.effects")
    await sessions.b.record([one])
    async with sessions.in_a.transaction():
        ended = await sessions.a.finish_redrive_within(sessions.in_a, redrive, one, limit_seconds=LIMIT_SECONDS)
    assert ended == (True, False)
    assert await sessions.outcome(one) == ("succeeded", 1, "b")


async def test_a_redrive_that_failed_is_dead_again_and_counted(sessions: Sessions) -> None:
    one = await sessions.redriving()
    (redrive,) = await sessions.taken(sessions.a)
    assert await sessions.a.fail_redrive(redrive, Dead("ambiguous", "Lost", "timeout"))
    letter = await sessions.letter()
    assert (letter["state"], letter["reason"], letter["error_code"], letter["attempts"]) == ("dead", "ambiguous", "timeout", 4)
    assert (letter["holder"], letter["held_until"]) == (None, None)
    assert not await sessions.a.fail_redrive(redrive, DEAD)
    assert await sessions.taken(sessions.b) == []
    assert await sessions.outcome(one) == ("failed", 1, "a")


async def test_a_redrive_that_is_given_back_is_anothers_at_once(sessions: Sessions) -> None:
    await sessions.redriving()
    (redrive,) = await sessions.taken(sessions.a)
    assert await sessions.a.release_redrive(redrive)
    (again,) = await sessions.taken(sessions.b)
    assert (again.generation, again.attempts) == (redrive.generation + 1, redrive.attempts)
    assert not await sessions.a.release_redrive(redrive)
    assert await sessions.taken(sessions.a) == []


async def test_what_waits_for_an_operator_is_counted_up_to_a_bound_with_its_age(sessions: Sessions) -> None:
    assert await sessions.a.dead_letters_waiting(CONSUMER, most=MOST) == (0, 0.0)
    await sessions.looking.execute(FILL_LETTERS, 5, "m", CONSUMER, "dead")
    await sessions.looking.execute(FILL_LETTERS, 2, "x", "shipping", "dead")
    await sessions.looking.execute(FILL_LETTERS, 2, "y", CONSUMER, "discarded")
    await sessions.looking.execute(
        "UPDATE fencepost.dead_letters SET created_at = created_at - interval '1 hour' WHERE run_key = 'm1'"
    )
    waiting, oldest = await sessions.a.dead_letters_waiting(CONSUMER, most=MOST)
    assert waiting == 5
    assert 3_600 <= oldest < 3_700
    assert (await sessions.a.dead_letters_waiting(CONSUMER, most=3))[0] == 3


# -- trials ---------------------------------------------------------------------------------------------------------------


async def test_of_two_who_begin_a_message_at_once_the_second_counts_the_first(sessions: Sessions) -> None:
    one = message("m1")
    async with sessions.in_a.transaction():
        assert await sessions.in_a.fetchval(SQL["begin_trial"], *one) == 1
        second = await sessions.waits(sessions.b.begin_trial(one))
    assert await second == 2
    assert await sessions.a.begin_trial(message("m1", step="billing/mail")) == 1


async def test_a_trial_that_ended_counts_no_more_however_often_it_is_said(sessions: Sessions) -> None:
    one = message("m1")
    for number in (1, 2):
        assert await sessions.a.begin_trial(one) == number
    for _ in range(2):
        await sessions.a.end_trial(one, 2, 1)
    assert await sessions.b.begin_trial(one) == 2
    await sessions.a.end_trial(one, 1, 0)  # what a process says that has lost count
    assert await sessions.b.begin_trial(one) == 3
    for _ in range(2):
        await sessions.b.end_trial(one, 3, 0)
    assert await sessions.b.begin_trial(one) == 1


async def test_trials_of_long_ago_are_forgotten_in_batches_and_nobody_waits(sessions: Sessions) -> None:
    week = timedelta(days=7)
    for number in range(5):
        await sessions.a.begin_trial(message(f"m{number}"))
    await sessions.looking.execute(
        "UPDATE fencepost.message_trials SET begun_at = begun_at - $1::interval WHERE run_key <> 'm0'", week
    )
    async with sessions.in_a.transaction():
        assert await sessions.in_a.fetchval(SQL["begin_trial"], *message("m1")) == 2
        assert await asyncio.wait_for(sessions.b.forget_trials(week, limit=2), 10) == 2
        assert await asyncio.wait_for(sessions.b.forget_trials(week, limit=2), 10) == 1
    assert await sessions.b.forget_trials(week, limit=2) == 0
    assert [row[0] for row in await sessions.looking.fetch("SELECT run_key FROM fencepost.message_trials ORDER BY 1")] == [
        "m0",
        "m1",
    ]


async def test_what_the_ledger_remembers_is_told_by_the_databases_clock(sessions: Sessions) -> None:
    before: datetime = await sessions.looking.fetchval("SELECT clock_timestamp()")
    oldest = await sessions.a.oldest_remembered(timedelta(days=3))
    after: datetime = await sessions.looking.fetchval("SELECT clock_timestamp()")
    assert before <= oldest + timedelta(days=3) <= after


# -- what they cost -------------------------------------------------------------------------------------------------------


class Prepared:
    """A session that has known its tables empty, and has its plans from then."""

    def __init__(self, connection: "asyncpg.Connection[Any]") -> None:
        self.connection = connection

    async def prepare(self, name: str, types: str, arguments: str) -> None:
        await self.connection.execute(f"PREPARE {name} ({types}) AS {SQL[name]}")
        for _ in range(6):
            await self.connection.execute(f"EXECUTE {name} ({arguments})")

    async def buffers(self, name: str, arguments: str) -> int:
        """Pages that it touches, found or read."""
        explained = await self.connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE {name} ({arguments})")
        plan = json.loads(explained)[0]["Plan"]
        return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])


@pytest.fixture(params=["direct", "through a pooler"])
async def prepared(request: pytest.FixtureRequest, database_url: str) -> AsyncIterator[Prepared]:
    connection = await asyncpg.connect(database_url, server_settings=PLANNER if request.param == "direct" else {})
    for table in ("effects", "dead_letters"):
        await connection.execute(f"ALTER TABLE fencepost.{table} SET (autovacuum_enabled = false)")
    yield Prepared(connection)
    await connection.close()


def columns(names: Sequence[str]) -> str:
    """Identities as literals."""
    texts = ", ".join(f"'{name}'" for name in names)
    return f"ARRAY[{texts}], array_fill('acme'::text, ARRAY[{len(names)}]), array_fill('billing/write'::text, ARRAY[{len(names)}])"


async def test_looking_up_messages_costs_a_probe_each_in_a_big_ledger_that_was_not_analysed(prepared: Prepared) -> None:
    await prepared.prepare("known_messages", "text[], text[], text[]", columns(["x"]))
    await prepared.connection.execute(FILL_LEDGER, BIG)
    names = [f"m{number}" for number in range(1, BIG, BIG // 250)] + [f"new{number}" for number in range(250)]
    assert await prepared.buffers("known_messages", columns(names)) <= 6 * len(names)


async def test_recording_messages_costs_an_insert_each_in_a_big_ledger(prepared: Prepared) -> None:
    """Half of them are there already. An insert descends three indexes, of which one it had to look into before."""
    await prepared.prepare("record_messages", "text[], text[], text[], text, text, text", columns(["x"]) + ", 'h', '0', '0'")
    await prepared.connection.execute(FILL_LEDGER, BIG)
    names = [f"m{number}" for number in range(1, BIG, BIG // 250)] + [f"new{number}" for number in range(250)]
    assert await prepared.buffers("record_messages", columns(names) + ", 'h', '0', '0'") <= 20 * len(names)


async def test_taking_redrives_costs_nothing_where_everything_waits_for_an_operator(prepared: Prepared) -> None:
    """10,000 dead letters and 10,000 that are over, and none or one to be redriven."""
    arguments = f"'h', '{CONSUMER}', interval '60 s', 10"
    await prepared.prepare("claim_redrives", "text, text, interval, integer", arguments)
    await prepared.connection.execute(FILL_LETTERS, 10_000, "d", CONSUMER, "dead")
    await prepared.connection.execute(FILL_LETTERS, 10_000, "o", CONSUMER, "redriven")
    assert await prepared.buffers("claim_redrives", arguments) <= 10
    await prepared.connection.execute(FILL_LETTERS, 1, "r", CONSUMER, "redriving")
    assert await prepared.buffers("claim_redrives", arguments) <= 100


CALLS: Final = """
SELECT coalesce(substring(query FROM '^-- fencepost:([a-z_]+)'), substring(query FROM '^[a-zA-Z]+')) AS name,
       sum(calls)::int AS calls
FROM pg_stat_statements AS s JOIN pg_database AS d ON d.oid = s.dbid WHERE d.datname = current_database() AND toplevel GROUP BY 1
"""
#: What a message has a share in. All else goes by time.
OF_MESSAGES: Final = (
    "known_messages", "record_message", "record_messages", "BEGIN", "COMMIT", "ROLLBACK", "SAVEPOINT", "RELEASE", "SET", "INSERT",
)  # fmt: skip


@pytest.fixture
async def counted(database_url: str, kafka: str, topic: TopicFactory) -> AsyncIterator[Stage]:
    async with stage(database_url, kafka, topic) as made:
        await made.connection.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
        yield made


async def handle_all(made: Stage, app: MessageHandlers, messages: int) -> float:
    """Statements a message, of a topic that is full before anybody consumes."""
    for number in range(messages):
        await made.send({"n": number}, key=f"k{number % 20}")
    reset = "SELECT pg_stat_statements_reset(0, oid, 0) FROM pg_database WHERE datname = current_database()"
    await made.connection.execute(reset)
    async with made.running(app):
        await made.until_committed({0: messages})
    assert len(await made.seen()) == messages
    found: dict[str, int] = {row["name"]: row["calls"] for row in await made.connection.fetch(CALLS)}
    return sum(found.get(name, 0) for name in OF_MESSAGES) / messages


async def test_a_message_costs_six_statements(counted: Stage) -> None:
    """BEGIN, two bounds and its row, which go out together; the handler's own statement; COMMIT. Looking up goes by the batch."""
    app = MessageHandlers()

    @app.handler("ping", model=Ping, step="write")
    async def write(message: Message[Ping], context: MessageContext) -> None:
        async with context.transaction() as connection:
            await connection.execute("INSERT INTO seen VALUES ($1, $2)", message.event_id, message.value.n)

    assert await handle_all(counted, app, 200) <= 6.25


async def test_a_batch_costs_four_round_trips_whatever_is_in_it(counted: Stage) -> None:
    app = MessageHandlers()

    @app.batch_handler("ping", model=Ping, step="write")
    async def write(batch: Any, connection: Any) -> None:
        ids, numbers = [one.event_id for one in batch], [one.value.n for one in batch]
        await connection.execute("INSERT INTO seen SELECT * FROM unnest($1::text[], $2::integer[])", ids, numbers)

    assert await handle_all(counted, app, 300) <= 0.25


def test_every_statement_is_tried_above_or_where_it_is_named() -> None:
    """forget_effects: test_forgetting.py; record_message: test_handler_transactions.py."""
    assert set(SQL) == {
        "known_messages", "record_message", "record_messages", "store_dead_letter", "claim_redrives", "finish_redrive",
        "fail_redrive", "release_redrive", "begin_trial", "end_trial", "forget_trials", "oldest_remembered", "forget_effects",
        "dead_letters_waiting",
    }  # fmt: skip
