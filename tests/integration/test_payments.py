"""The payments example on real PostgreSQL and Kafka: orders are placed with their event or not at all, ended with one, counted.

No consumer here: a few statements stand in its place, so that each book is read from where the demo reads it.
"""

import asyncio
import contextlib
import json
import secrets
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from consumer_sdk import CallLimits, Effect, EffectFailed, EffectUnknown
from demo.payments import (
    CHARGE_REQUESTED,
    ORDER_DECLINED,
    ORDER_PAID,
    ChargeRequested,
    Shop,
    create_orders,
    mark_declined,
    mark_paid,
    place_order,
)
from demo.payments_audit import Completion, audit_payments
from demo.payments_evidence import gather_evidence, read_completions
from demo.payments_state import Counts, PaymentsState
from demo.provider import Moods, Provider, ProviderServer, Temper
from demo.provider_book import Book
from demo.provider_client import ProviderClient, ProviderError
from producer_sdk import TransactionRequired
from tests.support.effects import Bench, opened
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

ORDER: Final = ChargeRequested(order_id="o-1", customer="ana", amount=1_500)
ORDERS: Final = 60
#: A time-out that a busy machine meets now and then as well, which only makes for another case.
LIMITS: Final = CallLimits(timeout_seconds=0.5, in_flight_seconds=0.1)
_EVENTS: Final = "SELECT topic, event_type, key, payload FROM fencepost.outbox ORDER BY id"
_EFFECT: Final = """
INSERT INTO fencepost.effects (run_key, tenant_id, iteration, step, occurrence, operation, state, holder, fingerprint,
                               fingerprint_version, provider_key, finished_at, deadline_at, sends)
VALUES ($1, '', 0, 'charge', 0, 'provider.charge', 'applied', 'test', $2, 1, $1, clock_timestamp(), clock_timestamp(), 1)
"""


@pytest.fixture
async def connection(database_url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(database_url)
    await create_orders(connection)
    yield connection
    await connection.close()


@contextlib.contextmanager
def served(path: Path, temper: Temper, *, timeout_seconds: float) -> Iterator[ProviderClient]:
    book = Book(path)
    with ProviderServer(0, Provider(book, temper)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield ProviderClient(server.server_address[1], timeout_seconds=timeout_seconds)
        finally:
            server.shutdown()
            thread.join()
    book.close()


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[ProviderClient]:
    with served(tmp_path / "book", Temper(delay_seconds=0.0), timeout_seconds=20) as client:
        yield client


async def events(connection: Any) -> list[tuple[str, str, str, dict[str, Any]]]:
    """Topic, type, key and payload of what is in the outbox."""
    rows = await connection.fetch(_EVENTS)
    return [(row["topic"], row["event_type"], row["key"].decode(), json.loads(row["payload"])) for row in rows]


async def state(connection: Any) -> tuple[Any, ...]:
    return tuple(await connection.fetchrow("SELECT state, receipt, charged_by_token, ended_at IS NOT NULL FROM payment_orders"))


async def place(connection: Any) -> None:
    async with connection.transaction():
        await place_order(connection, ORDER, topic="payments")


async def test_an_order_is_placed_with_the_request_to_charge_it(connection: Any) -> None:
    await place(connection)

    assert await state(connection) == ("placed", None, None, False)
    wanted = {"order_id": "o-1", "customer": "ana", "amount": 1_500}
    assert await events(connection) == [("payments", CHARGE_REQUESTED, "ana", wanted)]
    assert ChargeRequested.model_validate_json(json.dumps(wanted)) == ORDER


async def test_an_order_is_not_placed_outside_a_transaction(connection: Any) -> None:
    with pytest.raises(TransactionRequired):
        await place_order(connection, ORDER, topic="payments")


async def test_a_paid_order_has_its_receipt_and_says_so(connection: Any) -> None:
    await place(connection)

    async with connection.transaction():
        await mark_paid(connection, ORDER, receipt="ch_1", token=3, topic="payments")

    assert await state(connection) == ("paid", "ch_1", 3, True)
    said = {"order_id": "o-1", "amount": 1_500, "receipt": "ch_1"}
    assert (await events(connection))[1:] == [("payments", ORDER_PAID, "ana", said)]


async def test_a_declined_order_says_so(connection: Any) -> None:
    await place(connection)

    async with connection.transaction():
        await mark_declined(connection, ORDER, topic="payments")

    assert await state(connection) == ("declined", None, None, True)
    said = {"order_id": "o-1", "amount": 1_500, "receipt": None}
    assert (await events(connection))[1:] == [("payments", ORDER_DECLINED, "ana", said)]


async def test_an_order_that_is_ended_twice_has_two_events_to_show_for_it(connection: Any) -> None:
    """The example must not hide a consumer that handles a message twice."""
    await place(connection)

    for _ in range(2):
        async with connection.transaction():
            await mark_paid(connection, ORDER, receipt="ch_1", token=3, topic="payments")

    assert [event[1] for event in await events(connection)] == [CHARGE_REQUESTED, ORDER_PAID, ORDER_PAID]


async def test_the_shop_rolls_some_orders_back_and_what_it_placed_has_an_event(connection: Any, database_url: str) -> None:
    shop = Shop(database_url, "payments", rate=400, seed=4)

    closing = asyncio.Event()
    running = asyncio.create_task(shop.run(closing))
    await eventually(lambda: len(shop.placed) + len(shop.rolled_back) >= 200, message="200 orders are placed or rolled back")
    closing.set()
    await running

    assert 0 < len(shop.rolled_back) < len(shop.placed)
    rows = await connection.fetch("SELECT order_id FROM payment_orders")
    assert sorted(row["order_id"] for row in rows) == sorted(shop.placed)
    assert [event[3]["order_id"] for event in await events(connection)] == shop.placed


async def test_the_four_books_are_had_from_where_they_are(
    connection: Any, provider: ProviderClient, kafka: str, topic: TopicFactory
) -> None:
    name = await topic(partitions=3)
    effect = Effect(key="fp_1", fencing_token=3, operation="provider.charge", sends=1)
    charge: Any = (await provider.charge(effect, order="o-1", amount=1_500)).result
    async with connection.transaction():
        await place_order(connection, ORDER, topic=name)
        await mark_paid(connection, ORDER, receipt=charge["charge"], token=charge["token"], topic=name)
        await connection.execute(_EFFECT, "fp_1", bytes(32))
    for _ in range(2):  # a relay may deliver twice
        await published(connection, kafka)

    evidence = await gather_evidence(connection, provider, operation="provider.charge", bootstrap_servers=kafka, topic=name)

    assert [(done.order_id, done.state, done.receipt) for done in evidence.completions] == [("o-1", "paid", charge["charge"])] * 2
    audit = audit_payments(evidence)
    assert audit.kept
    assert (audit.orders, audit.charged_once, audit.completed_once, audit.reconciled) == (1, 1, 1, 1)


async def test_a_topic_without_an_event_has_no_completions(kafka: str, topic: TopicFactory) -> None:
    found: list[Completion] = await asyncio.wait_for(read_completions(kafka, await topic(partitions=2)), 30)

    assert found == []


_CALL: Final = """
INSERT INTO fencepost.effects (run_key, tenant_id, iteration, step, occurrence, operation, state, holder, fingerprint,
                               fingerprint_version, provider_key, finished_at, deadline_at, sends)
VALUES ($1, '', 0, 'charge', 0, 'provider.charge', $2, $3, $4, 1, $1, CASE WHEN $2 = 'applied' THEN clock_timestamp() END,
        clock_timestamp() + $5::interval, 1)
"""


async def test_the_state_of_the_payments_tells_calls_that_are_out_from_those_that_nobody_has_an_answer_to(connection: Any) -> None:
    await place(connection)
    soon, past = timedelta(minutes=1), timedelta(minutes=-1)
    calls = (("sent", "c-1/a", soon), ("sent", "c-1/a", past), ("unknown", "c-10/b", past), ("applied", "c-2/c", past))
    for number, (state, holder, deadline) in enumerate(calls):
        await connection.execute(_CALL, f"fp_{number}", state, holder, bytes(32), deadline)
    payments = PaymentsState(connection)

    assert await payments.counts() == Counts(
        orders=1, waiting=1, charged=1, declined=0, unknown=2, reconciled=1, dead_letters=0, open=3
    )
    assert [await payments.calling(name) for name in ("c-1", "c-10", "c-2", None)] == [1, 0, 0, 1]
    assert not await payments.ended()


async def test_the_payments_have_ended_when_no_order_waits_and_no_charge_is_open(connection: Any) -> None:
    payments = PaymentsState(connection)
    await place(connection)
    async with connection.transaction():
        await mark_declined(connection, ORDER, topic="payments")

    assert await payments.ended()
    await connection.execute(_CALL, "fp_1", "sent", "c-1/a", bytes(32), timedelta(minutes=-1))
    assert not await payments.ended()


async def test_the_ledger_charges_each_order_once_at_a_provider_in_every_mood_that_forgets_keys(
    database_url: str, tmp_path: Path
) -> None:
    """LEDGER-2, 3, 9: the provider's own book has each order once, or declined; nothing came for a key that had been charged."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    moods = Moods(fail_before=0.1, fail_after=0.1, hang=0.1, hang_up=0.1, too_many=0.1, unavailable=0.1, declined=0.2)
    temper = Temper(moods=moods, seed=seed, forget_keys=True, hang_seconds=2 * LIMITS.timeout_seconds, delay_seconds=0.02)
    with served(tmp_path / "book", temper, timeout_seconds=LIMITS.timeout_seconds) as provider:
        async with opened(database_url) as bench:
            ended = await asyncio.gather(*(charged(bench, provider, f"o-{number}") for number in range(ORDERS)))
            keys = {row["provider_key"] for row in await bench.connection.fetch("SELECT provider_key FROM fencepost.effects")}
        book = await ProviderClient(provider.port, timeout_seconds=20).book()

    assert sorted(charge["order"] for charge in book["charges"]) == sorted(order for order, how in ended if how == "charged")
    assert book["declined"] == sorted(order for order, how in ended if how == "http_402")
    assert book["repeats"] == 0
    assert {charge["key"] for charge in book["charges"]} <= keys
    assert len(keys) == ORDERS


async def charged(bench: Bench, provider: ProviderClient, order: str) -> tuple[str, str]:
    """Ask the ledger until it has an answer, as a consumer's attempts would."""
    wanted = await bench.message()

    async def attempt() -> str | None:
        try:
            await bench.once(
                wanted, call=lambda effect: provider.charge(effect, order=order, amount=10), limits=LIMITS,
                reconciler=provider.charge_state,
            )  # fmt: skip
        except EffectFailed as error:
            return error.code
        except (EffectUnknown, ProviderError):
            return None
        return "charged"

    return order, await eventually(attempt, 60, message=f"{order} is charged or declined") or ""


async def published(connection: Any, kafka: str) -> None:
    """As a relay would: each row of the outbox becomes a record."""
    producer = AIOKafkaProducer(bootstrap_servers=kafka)
    await producer.start()
    try:
        for row in await connection.fetch("SELECT * FROM fencepost.outbox ORDER BY id"):
            attributes = {"ce_specversion": "1.0", "ce_id": str(row["event_id"]), "ce_source": "shop", "ce_type": row["event_type"]}
            headers = [(key, value.encode()) for key, value in attributes.items()]
            await producer.send_and_wait(row["topic"], row["payload"], key=row["key"], headers=headers)
    finally:
        await producer.stop()
