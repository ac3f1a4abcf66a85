"""The SQL functions under the SDK: the way in from every other language, and the table's own guard."""

import hashlib
import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fencepost.wire import MAX_PAYLOAD_BYTES
from producer_sdk import Event, InvalidEvent

LANES = 8
# Pinned: a lane that moved would let a key's newer rows overtake its older ones.
GOLDEN_LANES = {
    b"": 0,
    b"\x00": 4,
    b"\xff": 0,
    b"a": 7,
    b"k": 4,
    b"order-1": 7,
    b"order-2": 6,
    b"order-3": 4,
    "gr\u00fcn".encode(): 6,
}

REFUSAL = """
SELECT fencepost.refusal(%s::text, %s::text, %s::bytea, %s::bytea, %s::text[], %s::bytea[], %s::text, %s::text, %s::text,
    %s::text, %s::text, %s::text, %s::bigint, %s::text, %s::text)
"""


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


def value(connection: psycopg.Connection, sql: str, *parameters: object) -> Any:
    row = connection.execute(sql.encode(), parameters).fetchone()
    assert row is not None
    return row[0]


def near(limit: int) -> st.SearchStrategy[int]:
    return st.integers(min_value=max(0, limit - 2), max_value=limit + 2)


CHARACTERS = st.characters(exclude_characters="\0", exclude_categories=["Cs"])


def texts(limit: int) -> st.SearchStrategy[str]:
    """Short text, and text about as long as it may be, of characters with one or more bytes."""
    at_the_limit = st.builds(lambda size, end: "x" * (size - 1) + end, near(limit), st.sampled_from(["x", "\u00fc"]))
    return st.one_of(st.text(CHARACTERS, max_size=8), at_the_limit)


def byte_strings(limit: int) -> st.SearchStrategy[bytes]:
    return st.one_of(st.binary(max_size=8), st.builds(bytes, near(limit)))


TOPICS = st.one_of(
    st.from_regex(r"[a-zA-Z0-9._-]{1,9}", fullmatch=True),
    st.sampled_from([".", "..", "", "orders\n", "a b"]),
    texts(249),
)
HEADER_NAMES = st.one_of(
    texts(256),
    st.sampled_from(["ce_id", "CE_x", "ce", "cex", "Fencepost-a", "fencepost", "Content-Type", "tracestate", "ce%"]),
)
HEADERS: st.SearchStrategy[list[tuple[str, bytes]]] = st.one_of(
    st.just([]),
    st.lists(st.tuples(HEADER_NAMES, st.binary(max_size=4)), max_size=3),
    st.builds(lambda count: [("h", b"")] * count, near(64)),
    st.builds(lambda size: [("h", bytes(size))], near(32_767)),
)
ATTRIBUTES = st.one_of(st.none(), texts(256))
EVENTS = st.fixed_dictionaries(
    {
        "topic": st.one_of(st.just("orders"), TOPICS),
        "type": st.one_of(st.just("order.placed"), texts(256)),
        "key": st.one_of(st.none(), byte_strings(4096)),
        "payload": st.one_of(st.none(), byte_strings(4), st.sampled_from([bytes(MAX_PAYLOAD_BYTES + more) for more in (0, 1)])),
    },
    optional={
        "headers": HEADERS,
        "source": ATTRIBUTES,
        "content_type": ATTRIBUTES,
        "tenant_id": ATTRIBUTES,
        "run_id": ATTRIBUTES,
        "step": ATTRIBUTES,
        "operation": ATTRIBUTES,
        "fencing_token": st.one_of(st.none(), st.integers(-1, 1), st.just(2**63 - 1)),
        "traceparent": ATTRIBUTES,
        "tracestate": st.one_of(st.none(), texts(512)),
    },
)  # fmt: skip


def refused_by_sql(connection: psycopg.Connection, fields: dict[str, Any]) -> str | None:
    """The field that the table's own rules refuse."""
    headers = fields.get("headers", [])
    names, values = [name for name, _ in headers], [content for _, content in headers]
    others = ("source", "content_type", "tenant_id", "run_id", "step", "operation", "fencing_token")
    parameters = [fields["topic"], fields["type"], fields["key"], fields["payload"], names, values]
    parameters += [fields.get(name) for name in (*others, "traceparent", "tracestate")]
    refusal: str | None = connection.execute(REFUSAL.encode(), parameters).fetchone()[0]  # type: ignore[index]
    return None if refusal is None else refusal.partition(":")[0]


def refused_by_python(fields: dict[str, Any]) -> str | None:
    """The field that the SDK's rules refuse."""
    try:
        Event(**fields)
    except InvalidEvent as error:
        return error.field
    return None


def test_the_sdk_and_the_table_refuse_the_same_events_for_the_same_field(connection: psycopg.Connection) -> None:
    @settings(max_examples=400, deadline=None)
    @given(fields=EVENTS)
    def agree(fields: dict[str, Any]) -> None:
        assert refused_by_python(fields) == refused_by_sql(connection, fields)

    agree()


def test_a_rows_lane_comes_from_its_key_and_never_changes(connection: psycopg.Connection) -> None:
    lanes = {key: value(connection, "SELECT fencepost.lane_of(%s)", key) for key in GOLDEN_LANES}
    assert lanes == GOLDEN_LANES
    assert {key: int.from_bytes(hashlib.sha256(key).digest()[:2]) % LANES for key in GOLDEN_LANES} == GOLDEN_LANES


def test_keys_spread_evenly_over_the_lanes(connection: psycopg.Connection) -> None:
    rows = connection.execute(
        "SELECT fencepost.lane_of(convert_to('order-' || n, 'UTF8')) AS lane, count(*)"
        " FROM generate_series(1, 16000) AS n GROUP BY lane"
    ).fetchall()
    counts: dict[int, int] = dict(rows)
    assert set(counts) == set(range(LANES))
    assert all(1_850 < count < 2_150 for count in counts.values()), counts


def test_rows_without_a_key_spread_over_the_lanes(connection: psycopg.Connection) -> None:
    for _ in range(LANES):
        value(connection, "SELECT fencepost.enqueue('orders', 't', NULL, '')")
    assert value(connection, "SELECT count(DISTINCT lane) FROM fencepost.outbox") == LANES


def test_a_row_inserted_by_hand_gets_the_lane_of_its_key_and_its_weight(connection: psycopg.Connection) -> None:
    for key in GOLDEN_LANES:
        connection.execute("INSERT INTO fencepost.outbox (topic, event_type, key, payload) VALUES ('orders', 't', %s, 'p')", [key])
    value(connection, "SELECT fencepost.enqueue('orders', 't', 'k', 'p')")
    rows = connection.execute("SELECT key, lane, record_bytes FROM fencepost.outbox ORDER BY id").fetchall()
    assert rows == [(key, lane, 257 + len(key)) for key, lane in [*GOLDEN_LANES.items(), (b"k", GOLDEN_LANES[b"k"])]]


def test_a_row_inserted_by_hand_is_guarded_and_its_refusal_quotes_nothing(connection: psycopg.Connection) -> None:
    with pytest.raises(psycopg.errors.CheckViolation) as caught:
        connection.execute("INSERT INTO fencepost.outbox (topic, event_type, payload) VALUES ('a b', 't', 'secret')")
    assert "fencepost: topic: " in str(caught.value)
    assert "secret" not in f"{caught.value} {caught.value.diag.message_detail}"


def test_an_id_minted_in_sql_is_a_uuid_of_version_7(connection: psycopg.Connection) -> None:
    before = time.time()
    rows = connection.execute("SELECT fencepost.uuid_v7() FROM generate_series(1, 200)").fetchall()
    minted: list[UUID] = [event_id for (event_id,) in rows]
    assert {event_id.version for event_id in minted} == {7}
    assert {event_id.variant for event_id in minted} == {"specified in RFC 4122"}
    assert len(set(minted)) == 200
    assert all(abs((event_id.int >> 80) / 1000 - before) < 1 for event_id in minted)
    random_bits = [event_id.int & ((1 << 62) - 1) for event_id in minted]
    assert all(any(bits >> place & 1 for bits in random_bits) for place in range(62))


def test_enqueue_returns_the_id_that_it_wrote(connection: psycopg.Connection) -> None:
    minted = value(connection, "SELECT fencepost.enqueue('orders', 't', 'k', NULL)")
    given_id = value(connection, "SELECT fencepost.enqueue('orders', 't', 'k', '', event_id => %s)", UUID(int=7))
    rows = connection.execute("SELECT event_id, payload FROM fencepost.outbox ORDER BY id").fetchall()
    assert rows == [(minted, None), (given_id, b"")]
    assert given_id == UUID(int=7)


def test_enqueue_many_wants_one_element_an_event_in_every_array(connection: psycopg.Connection) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="one element an event"):
        value(connection, "SELECT fencepost.enqueue_many('{a,b}', '{t}', '{k}', '{p}', array[NULL]::uuid[])")


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM fencepost.outbox",
        "INSERT INTO fencepost.outbox (topic, event_type, key, payload) VALUES ('orders', 't', 'k', 'p')",
        "DELETE FROM fencepost.outbox",
        "SELECT * FROM fencepost.lanes",
        "SELECT * FROM fencepost.receipts",
        "SELECT nextval('fencepost.outbox_id_seq')",
        "SELECT setval('fencepost.doorbell_0', 2)",
        "SELECT fencepost.ring(0)",
    ],
)
def test_the_producer_role_may_only_call_the_functions(connection: psycopg.Connection, sql: str) -> None:
    connection.execute("SET ROLE fencepost_producer")
    value(connection, "SELECT fencepost.enqueue('orders', 't', 'k', 'p')")
    value(connection, "SELECT fencepost.enqueue_many('{a}', '{t}', '{k}', '{p}', array[NULL]::uuid[])")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute(sql.encode())


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT fencepost.enqueue(NULL, 't', 'k', 'secret')",
        "SELECT fencepost.enqueue('orders', NULL, 'k', 'secret')",
        "SELECT fencepost.enqueue_many(ARRAY[NULL], ARRAY['t'], ARRAY['k'::bytea], ARRAY['secret'::bytea], ARRAY[NULL]::uuid[])",
        "INSERT INTO fencepost.outbox (topic, event_type, key, payload) VALUES ('or ders', 't', 'k', 'secret')",
        "INSERT INTO fencepost.outbox (lane, topic, event_type, key, payload) VALUES (99, 'orders', 't', 'k', 'secret')",
    ],
)
def test_no_refusal_of_the_table_prints_the_row(connection: psycopg.Connection, statement: str) -> None:
    with pytest.raises(psycopg.errors.CheckViolation) as caught:
        connection.execute(statement.encode())
    said = f"{caught.value} {caught.value.diag.message_detail} {caught.value.diag.context}"
    assert "secret" not in said
    assert "736563726574" not in said


@pytest.mark.parametrize("lane", [-1, 0, 99])
def test_a_row_in_a_lane_that_is_not_its_keys_is_refused(connection: psycopg.Connection, lane: int) -> None:
    """Nobody would publish it, or it would overtake its key's rows in their own lane (4, here)."""
    with pytest.raises(psycopg.errors.CheckViolation, match="lane"):
        connection.execute(
            """INSERT INTO fencepost.outbox (lane, record_bytes, topic, event_type, key, payload)
               VALUES (%s, 258, 'orders', 't', 'k', 'p')""",
            (lane,),
        )


@pytest.mark.parametrize(
    ("ends", "names", "values"),
    [
        ("{1}", "{a,b,c}", "{x,y,z}"),
        ("{3}", "{a}", "{x}"),
        (None, "{a}", "{x}"),
        ("{1}", None, None),
        ("{-1}", "{}", "{}"),
        ("{NULL}", "{a}", "{x}"),
        ("{2}", "{{a,b}}", "{{x,y}}"),
    ],
)
def test_enqueue_many_refuses_headers_that_it_would_have_to_drop(
    connection: psycopg.Connection, ends: str | None, names: str | None, values: str | None
) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="header_ends"):
        connection.execute(
            """SELECT fencepost.enqueue_many(ARRAY['orders'], ARRAY['t'], ARRAY['k'::bytea], ARRAY['p'::bytea], ARRAY[NULL]::uuid[],
                                             %s::integer[], %s::text[], %s::bytea[])""",
            (ends, names, values),
        )
    assert value(connection, "SELECT count(*) FROM fencepost.outbox") == 0


def test_headers_in_more_than_one_dimension_are_refused(connection: psycopg.Connection) -> None:
    with pytest.raises(psycopg.errors.CheckViolation, match="flat arrays"):
        connection.execute(
            "SELECT fencepost.enqueue('orders', 't', 'k', 'p', header_names => '{{a,b},{c,d}}', header_values => '{{w,x},{y,z}}')"
        )
