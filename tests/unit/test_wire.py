"""The wire format, pinned byte by byte: CloudEvents 1.0 in Kafka's binary mode."""

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.wire import Header, RecordEncoder
from tests.support.rows import PolledRow

POSTGRES_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
MICROSECOND: Final = timedelta(microseconds=1)


def microseconds(text: str) -> int:
    """A timestamp as the poll returns it."""
    return (datetime.fromisoformat(text) - POSTGRES_EPOCH) // MICROSECOND


MINIMAL: Final[dict[str, Any]] = {
    "id": 42,
    "event_id": "0192f0c1-7d3a-7b3c-8f00-0123456789ab",
    "created_at": microseconds("2024-11-05T06:07:08.000009+00:00"),
    "event_type": "order.placed",
    "source": None,
    "content_type": None,
    "tenant_id": None,
    "run_id": None,
    "step": None,
    "operation": None,
    "fencing_token": None,
    "traceparent": None,
    "tracestate": None,
    "header_names": None,
    "header_values": None,
}
FULL: Final[dict[str, Any]] = MINIMAL | {
    "source": "/shop/größe",
    "content_type": "application/json",
    "tenant_id": "acme",
    "run_id": "run-7",
    "step": "charge",
    "operation": "op-3",
    "fencing_token": 9_223_372_036_854_775_807,
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "tracestate": "vendor=1",
    "header_names": ["x-app", "x-empty", "x-app"],
    "header_values": ["Grüße".encode("latin-1"), b"", b"\x00\xff"],
}
GOLDEN_MINIMAL: Final = [
    ("ce_specversion", b"1.0"),
    ("ce_id", b"0192f0c1-7d3a-7b3c-8f00-0123456789ab"),
    ("ce_source", b"fencepost"),
    ("ce_type", b"order.placed"),
    ("ce_time", b"2024-11-05T06:07:08.000009Z"),
    ("ce_sequence", b"42"),
]
GOLDEN_FULL: Final = [
    ("ce_specversion", b"1.0"),
    ("ce_id", b"0192f0c1-7d3a-7b3c-8f00-0123456789ab"),
    ("ce_source", b"/shop/gr\xc3\xb6\xc3\x9fe"),
    ("ce_type", b"order.placed"),
    ("ce_time", b"2024-11-05T06:07:08.000009Z"),
    ("ce_sequence", b"42"),
    ("content-type", b"application/json"),
    ("ce_tenantid", b"acme"),
    ("ce_runid", b"run-7"),
    ("ce_step", b"charge"),
    ("ce_operation", b"op-3"),
    ("traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
    ("tracestate", b"vendor=1"),
    ("ce_fencingtoken", b"9223372036854775807"),
    ("x-app", b"Gr\xfc\xdfe"),
    ("x-empty", b""),
    ("x-app", b"\x00\xff"),
]


def headers_of(encoder: RecordEncoder, row: dict[str, Any]) -> list[Header]:
    return encoder.encode(PolledRow(row)).headers


@pytest.fixture
def encoder() -> RecordEncoder:
    return RecordEncoder("fencepost")


@pytest.mark.parametrize(("row", "golden"), [(MINIMAL, GOLDEN_MINIMAL), (FULL, GOLDEN_FULL)], ids=["minimal", "full"])
def test_a_row_has_exactly_these_headers(encoder: RecordEncoder, row: dict[str, Any], golden: list[tuple[str, bytes]]) -> None:
    assert headers_of(encoder, row) == golden


def test_what_is_remembered_of_one_row_does_not_show_in_the_next(encoder: RecordEncoder) -> None:
    assert [headers_of(encoder, row) for row in (FULL, MINIMAL, FULL, MINIMAL)] == [GOLDEN_FULL, GOLDEN_MINIMAL] * 2


def test_an_empty_text_is_a_header_and_an_absent_one_is_none(encoder: RecordEncoder) -> None:
    headers = headers_of(encoder, MINIMAL | {"tenant_id": ""})

    assert ("ce_tenantid", b"") in headers
    assert len(headers) == len(GOLDEN_MINIMAL) + 1


def test_names_and_values_that_do_not_pair_are_refused(encoder: RecordEncoder) -> None:
    with pytest.raises(ValueError, match="zip"):
        headers_of(encoder, MINIMAL | {"header_names": ["a", "b"], "header_values": [b""]})


@pytest.mark.parametrize(
    ("created_at", "text"),
    [
        ("2000-01-01T00:00:00+00:00", b"2000-01-01T00:00:00.000000Z"),
        ("2000-01-01T00:00:00.999999+00:00", b"2000-01-01T00:00:00.999999Z"),
        ("1999-12-31T23:59:59.999999+00:00", b"1999-12-31T23:59:59.999999Z"),
        ("1969-07-20T20:17:40.000001+00:00", b"1969-07-20T20:17:40.000001Z"),
        ("2024-02-29T23:59:59.500000+00:00", b"2024-02-29T23:59:59.500000Z"),
        ("2038-01-19T03:14:08+00:00", b"2038-01-19T03:14:08.000000Z"),
    ],
)
def test_times_are_rfc_3339_in_utc_with_microseconds(encoder: RecordEncoder, created_at: str, text: bytes) -> None:
    assert ("ce_time", text) in headers_of(encoder, MINIMAL | {"created_at": microseconds(created_at)})


@given(st.lists(st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1)), min_size=1, max_size=5))  # noqa: DTZ001 - made UTC below
def test_times_in_any_order_are_those_of_their_rows(moments: list[datetime]) -> None:
    encoder = RecordEncoder("fencepost")
    for moment in moments:
        created_at = (moment.replace(tzinfo=UTC) - POSTGRES_EPOCH) // MICROSECOND
        text = dict(headers_of(encoder, MINIMAL | {"created_at": created_at}))["ce_time"].decode()
        assert text == moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def test_the_record_timestamp_is_created_at_in_milliseconds() -> None:
    row = MINIMAL | {"created_at": microseconds("2024-11-05T06:07:08.123999+00:00")}

    assert RecordEncoder("fencepost").encode(PolledRow(row)).timestamp_ms == 1_730_786_828_123
    assert RecordEncoder.unix_seconds(row["created_at"]) == pytest.approx(1_730_786_828.123999)


@pytest.mark.parametrize("column", ["source", "event_type", "tenant_id", "run_id"])
def test_what_is_remembered_has_a_bound(encoder: RecordEncoder, column: str) -> None:
    """Run ids differ from row to row for ever; the memory that they take does not grow for ever."""
    bound = 16_384
    caches = [value for value in vars(encoder).values() if isinstance(value, dict)]

    for number in range(bound + 10):
        headers = headers_of(encoder, MINIMAL | {column: f"text-{number}"})
        assert any(value == f"text-{number}".encode() for _, value in headers)

    assert 0 < max(len(cache) for cache in caches) <= bound
