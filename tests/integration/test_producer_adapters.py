"""Every adapter keeps one contract: the event shares the caller's transaction, and a refusal leaves it to the caller."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from enum import StrEnum
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from fencepost.devservices import Services
from fencepost.wire import MAX_EVENTS_PER_CALL, MAX_PAYLOAD_BYTES
from producer_sdk import ConfigurationError, DuplicateEvent, Event, InvalidEvent, TransactionRequired
from tests.support.session import SharedServices
from tests.support.writers import SELF_BEGINNING, WRITERS, Writer

Open = Callable[..., Writer]

BAD_EVENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "unknown topic characters": ("topic", {"topic": "orders/eu"}),
    "empty topic": ("topic", {"topic": ""}),
    "over-long topic": ("topic", {"topic": "t" * 250}),
    "topic with NUL": ("topic", {"topic": "orders\0"}),
    "over-long key": ("key", {"key": b"k" * 4097}),
    "key of lone surrogates": ("key", {"key": "\ud800"}),
    "empty header name": ("headers", {"headers": [("", b"")]}),
    "over-long header name": ("headers", {"headers": [("h" * 257, b"")]}),
    "over-long headers": ("headers", {"headers": [("h", b"v" * 32_768)]}),
    "too many headers": ("headers", {"headers": [("h", b"")] * 65}),
    "reserved header prefix": ("headers", {"headers": [("CE_id", b"")]}),
    "our header prefix": ("headers", {"headers": [("fencepost-x", b"")]}),
    "reserved header": ("headers", {"headers": [("Content-Type", b"")]}),
    "header name that is no UTF-8": ("headers", {"headers": [(b"\xff".decode(errors="surrogateescape"), b"")]}),
    "header name with NUL": ("headers", {"headers": [("a\0b", b"")]}),
    "payload over the limit": ("payload", {"payload": b"x" * (MAX_PAYLOAD_BYTES + 1)}),
    "NUL in type": ("type", {"type": "a\0b"}),
    "NUL in tenant": ("tenant_id", {"tenant_id": "a\0b"}),
    "tombstone without key": ("payload", {"payload": None, "key": None}),
}


class Topic(StrEnum):
    ORDERS = "orders"


MIXED: list[dict[str, Any]] = [
    {"key": b"k", "payload": None, "topic": Topic.ORDERS},
    {"payload": b""},
    {"payload": b'{"a":[],"b":null}'},
    {"payload": b"\xff\xfe\x00\x80", "key": b"\xff\x00"},
    {
        "payload": b"p",
        "headers": [("empty", b""), ("gr\u00fc\u00dfe \u2713", "gr\u00fc\u00dfe".encode("latin-1")), ("empty", b"\x00")],
    },
    {"payload": b"p", "source": "s", "tenant_id": "t", "run_id": "r", "step": "1", "operation": "o"},
    {"payload": b"p", "fencing_token": 2**63 - 1, "traceparent": "00-1-2-01", "tracestate": "a=b", "content_type": "x/y"},
]


def event(**changes: Any) -> Event:
    """An event that may be written, with changes."""
    return Event(**({"topic": "orders", "type": "order.placed", "key": "o-1", "payload": b"{}"} | changes))


def forged(valid: Event, **changes: object) -> Event:
    """An event that went past the rules, as one of an older SDK on a newer schema would."""
    for name, value in changes.items():
        object.__setattr__(valid, name, value)
    return valid


@pytest.fixture(scope="module")
def module_database_url(services: Services, shared_services: SharedServices) -> Iterator[str]:
    """One database with a business table for all tests here: making one takes longer than such a test."""
    url = services.create_database(shared_services.template_url)
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE business (note text)")
    yield url
    services.drop_database(url)


@pytest.fixture
def database_url(module_database_url: str) -> str:
    """The module's database, emptied."""
    with psycopg.connect(module_database_url) as connection:
        connection.execute("DELETE FROM fencepost.outbox")
        connection.execute("DELETE FROM business")
    return module_database_url


@pytest.fixture(params=WRITERS)
def open_writer(request: pytest.FixtureRequest, database_url: str) -> Iterator[Open]:
    """Opens connections of each adapter."""
    opened: list[Writer] = []

    def open_one(**options: Any) -> Writer:
        opened.append(WRITERS[request.param](database_url, **options))
        return opened[-1]

    yield open_one
    for writer in opened:
        writer.close()


@pytest.fixture
def writer(open_writer: Open) -> Writer:
    return open_writer()


def query(url: str, sql: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(sql.encode()).fetchall()


def outbox_ids(url: str) -> list[UUID]:
    return [event_id for (event_id,) in query(url, "SELECT event_id FROM fencepost.outbox ORDER BY id")]


def notes(url: str) -> list[str]:
    return [note for (note,) in query(url, "SELECT note FROM business")]


def place_order(writer: Writer) -> None:
    writer.execute("INSERT INTO business VALUES ('order')")


class Abandoned(Exception):
    """The service gives its work up."""


@contextmanager
def rolled_back(part: AbstractContextManager[object]) -> Iterator[None]:
    """A transaction or savepoint that the service rolls back."""
    with suppress(Abandoned), part:
        yield
        raise Abandoned


def fail(writer: Writer) -> None:
    """Make the database abort the transaction."""
    with pytest.raises(Exception, match="division by zero"):
        writer.execute("SELECT 1 / 0")


def test_an_event_commits_with_the_domain_rows(writer: Writer, database_url: str) -> None:
    placed = event()
    with writer.transaction():
        place_order(writer)
        returned = writer.enqueue(placed)
        assert outbox_ids(database_url) == []
    assert returned == placed.event_id
    assert outbox_ids(database_url) == [placed.event_id]
    assert notes(database_url) == ["order"]


def test_a_rollback_leaves_nothing(writer: Writer, database_url: str) -> None:
    with rolled_back(writer.transaction()):
        place_order(writer)
        writer.enqueue(event())
        writer.enqueue_many([event(), event()])
    assert outbox_ids(database_url) == []
    assert notes(database_url) == []


def test_many_events_keep_their_order(writer: Writer, database_url: str) -> None:
    events = [event(key=f"k-{number % 3}") for number in range(50)]
    with writer.transaction():
        returned = writer.enqueue_many(events)
    assert returned == [one.event_id for one in events]
    assert outbox_ids(database_url) == returned


def test_no_events_are_no_statement_but_still_need_a_transaction(open_writer: Open, database_url: str) -> None:
    writer = open_writer()
    with writer.transaction():
        assert writer.enqueue_many([]) == []
    with pytest.raises(TransactionRequired):
        open_writer(autocommit=True).enqueue_many([])


def test_too_many_events_are_refused_before_any_statement(writer: Writer, database_url: str) -> None:
    with writer.transaction():
        place_order(writer)
        with pytest.raises(InvalidEvent, match=f"events: {MAX_EVENTS_PER_CALL + 1} in one call"):
            writer.enqueue_many([event()] * (MAX_EVENTS_PER_CALL + 1))
    assert notes(database_url) == ["order"]


@pytest.mark.parametrize("count", [1, 100])
def test_a_call_is_one_round_trip(writer: Writer, database_url: str, count: int) -> None:
    with psycopg.connect(database_url, autocommit=True) as monitor:
        if "pg_stat_statements" not in str(monitor.execute("SHOW shared_preload_libraries").fetchone()):
            pytest.skip("the given PostgreSQL does not load pg_stat_statements")
        monitor.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")

        def statements_of(*calls: Callable[[], object]) -> int:
            before = count_statements(monitor)
            with writer.transaction():
                for call in calls:
                    call()
            return count_statements(monitor) - before

        def select() -> None:
            writer.execute("SELECT 1")

        def enqueue() -> object:
            return writer.enqueue(event()) if count == 1 else writer.enqueue_many([event() for _ in range(count)])

        statements_of(select, enqueue)  # libraries ask the server about itself at first
        assert statements_of(select, enqueue) - statements_of(select) == 1


def count_statements(monitor: psycopg.Connection) -> int:
    """How many statements clients have run in the monitor's database, without the monitor's own."""
    row = monitor.execute(
        "SELECT coalesce(sum(calls), 0) FROM pg_stat_statements JOIN pg_database ON oid = dbid"
        " WHERE datname = current_database() AND query NOT LIKE '%pg_stat_statements%'"
    ).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
def test_what_is_written_is_what_was_given(writer: Writer, database_url: str, many: bool) -> None:
    events = [event(**changes) for changes in MIXED]
    with writer.transaction():
        if many:
            writer.enqueue_many(events)
        else:
            for one in events:
                writer.enqueue(one)
    stored = query(
        database_url,
        "SELECT event_id, topic, event_type, key, payload, header_names, header_values, source, content_type,"
        " tenant_id, run_id, step, operation, fencing_token, traceparent, tracestate FROM fencepost.outbox ORDER BY id",
    )
    assert stored == [
        (
            one.event_id, one.topic, one.type, one.key, one.payload,
            [name for name, _ in one.headers] or None, [value for _, value in one.headers] or None,
            one.source, one.content_type, one.tenant_id, one.run_id, one.step, one.operation,
            one.fencing_token, one.traceparent, one.tracestate,
        )
        for one in events
    ]  # fmt: skip


def test_bad_input_is_refused_before_any_statement(writer: Writer, database_url: str) -> None:
    with writer.transaction():
        place_order(writer)
        for what, (field, changes) in BAD_EVENTS.items():
            with pytest.raises(InvalidEvent) as caught:
                writer.enqueue(event(**changes))
            assert caught.value.field == field, what
            assert caught.value.limit, what
            assert caught.value.remedy, what
    assert notes(database_url) == ["order"]
    assert outbox_ids(database_url) == []


def test_a_refused_enqueue_leaves_the_callers_transaction_usable(writer: Writer, database_url: str) -> None:
    """WRITE-3, refused before a statement is sent."""
    with writer.transaction():
        place_order(writer)
        with pytest.raises(InvalidEvent, match=r"payload: has 1000001 bytes, may have 1000000;"), writer.savepoint():
            writer.enqueue(event(payload=b"x" * (MAX_PAYLOAD_BYTES + 1)))
    assert notes(database_url) == ["order"]
    assert outbox_ids(database_url) == []


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
def test_a_refusal_by_the_database_undoes_only_its_savepoint(writer: Writer, database_url: str, many: bool) -> None:
    """WRITE-3, refused by the table: the SDK's rules are not the only guard."""
    oversized = forged(event(), payload=b"secret" * MAX_PAYLOAD_BYTES)
    with writer.transaction():
        place_order(writer)
        with pytest.raises(InvalidEvent) as caught, writer.savepoint():
            writer.enqueue_many([event(), oversized]) if many else writer.enqueue(oversized)
        placed = event()
        writer.enqueue(placed)
    assert caught.value.field == "payload"
    assert caught.value.limit == "6000000 bytes exceed the limit of 1000000"
    assert caught.value.remedy
    assert "secret" not in "".join(traceback.format_exception(caught.value))
    assert notes(database_url) == ["order"]
    assert outbox_ids(database_url) == [placed.event_id]


def test_an_event_id_that_the_outbox_holds_is_refused(writer: Writer, database_url: str) -> None:
    placed = event()
    with writer.transaction():
        place_order(writer)
        writer.enqueue(placed)
        with pytest.raises(DuplicateEvent) as caught, writer.savepoint():
            writer.enqueue(event(event_id=placed.event_id))
        with pytest.raises(DuplicateEvent), writer.savepoint():
            writer.enqueue_many([event(event_id=UUID(int=7)), event(event_id=UUID(int=7))])
    assert caught.value.field == "event_id"
    assert caught.value.__cause__ is not None
    assert notes(database_url) == ["order"]
    assert outbox_ids(database_url) == [placed.event_id]


def test_a_connection_that_would_commit_each_row_alone_is_refused(open_writer: Open, database_url: str) -> None:
    writer = open_writer(autocommit=True)
    with pytest.raises(TransactionRequired, match="autocommit"):
        writer.enqueue(event())
    with pytest.raises(TransactionRequired, match="autocommit"):
        writer.enqueue_many([event()])
    assert outbox_ids(database_url) == []


@pytest.mark.parametrize("name", SELF_BEGINNING)
def test_a_library_that_begins_by_itself_needs_no_begin(name: str, database_url: str) -> None:
    writer = WRITERS[name](database_url)
    writer.enqueue(event())
    writer.execute("COMMIT")
    assert len(outbox_ids(database_url)) == 1
    writer.close()


def test_an_aborted_transaction_is_refused_and_says_what_to_do(writer: Writer, database_url: str) -> None:
    with rolled_back(writer.transaction()):
        fail(writer)
        with pytest.raises(TransactionRequired, match=r"aborted.*roll back") as caught:
            writer.enqueue(event())
    assert (caught.value.__cause__ is None) == writer.knows_aborted, "refused before sending, where that can be told"
    with writer.transaction():
        place_order(writer)
        with rolled_back(writer.savepoint()):
            fail(writer)
            with pytest.raises(TransactionRequired, match=r"aborted.*roll back"):
                writer.enqueue_many([event()])
    assert notes(database_url) == ["order"]
    assert outbox_ids(database_url) == []


def test_a_read_only_transaction_is_refused_and_says_what_to_do(writer: Writer, database_url: str) -> None:
    with rolled_back(writer.transaction()):
        writer.execute("SET TRANSACTION READ ONLY")
        with pytest.raises(TransactionRequired, match=r"read-only.*primary") as caught:
            writer.enqueue(event())
    assert caught.value.__cause__ is not None
    assert outbox_ids(database_url) == []


@pytest.mark.parametrize("name", WRITERS)
def test_a_database_without_the_schema_is_an_operators_error(name: str, empty_database_url: str) -> None:
    writer = WRITERS[name](empty_database_url)
    with pytest.raises(ConfigurationError, match="fencepost migrate"), writer.transaction():
        writer.enqueue(event())
    writer.close()


def test_a_user_without_the_producer_role_is_an_operators_error(writer: Writer) -> None:
    with rolled_back(writer.transaction()):
        writer.execute("SET LOCAL ROLE pg_monitor")  # any role that nobody made a producer
        with pytest.raises(ConfigurationError, match="fencepost_producer"):
            writer.enqueue(event())


def test_the_producer_role_is_all_that_a_service_needs(writer: Writer, database_url: str) -> None:
    with writer.transaction():
        writer.execute("SET LOCAL ROLE fencepost_producer")
        writer.enqueue(event())
        writer.enqueue_many([event(), event()])
    assert len(outbox_ids(database_url)) == 3


def test_any_other_error_passes_through_and_shows_no_payload(writer: Writer, database_url: str) -> None:
    placed = event(payload=b"secret")
    with psycopg.connect(database_url) as other, rolled_back(writer.transaction()):
        other.execute("LOCK TABLE fencepost.outbox")
        writer.execute("SET LOCAL lock_timeout = '1ms'")
        with pytest.raises(Exception, match="lock timeout") as caught:
            writer.enqueue(placed)
    assert not type(caught.value).__module__.startswith("fencepost")
    assert "secret" not in str(caught.value)


def test_the_same_key_meets_the_same_lane_by_every_way(writer: Writer, database_url: str) -> None:
    key = uuid4().bytes
    with writer.transaction():
        writer.enqueue(event(key=key))
        writer.enqueue_many([event(key=key)])
    lanes = query(database_url, "SELECT DISTINCT lane = fencepost.lane_of(key) FROM fencepost.outbox")
    assert lanes == [(True,)]
