"""Fills outboxes with rows as a service would write them, and puts cursors back to the beginning."""

from typing import Any, Final

import psycopg

from benchmarks.measure import Mark

__all__ = [
    "OTHERS_LEASE",
    "delivered_rows",
    "fill",
    "give_lanes_away",
    "let_lanes_go",
    "receipts",
    "rewind",
    "settle",
    "settle_quickly",
    "wal_bytes",
]

_ROWS_PER_TRANSACTION: Final = 5_000
OTHERS_LEASE: Final = "benchmark/0"

# The row check is left out while filling: it costs the time of the fill and changes nothing in the rows.
_DROP_CHECK: Final = "ALTER TABLE fencepost.outbox DROP CONSTRAINT IF EXISTS outbox_row_check"
# Random bytes: what could be compressed would be smaller on disk than its size says. One transaction a slice, so the
# history has many transaction ids, as a real one does.
_FILL: Final = """
DO $$
DECLARE
    rows_left integer := {rows};
    slice integer;
    seed bigint := {seed};
BEGIN
    PERFORM set_config('synchronous_commit', 'off', false);
    WHILE rows_left > 0 LOOP
        slice := least(rows_left, {slice});
        INSERT INTO fencepost.outbox (lane, event_id, topic, event_type, key, payload, content_type, record_bytes)
        SELECT fencepost.lane_of(g.key), fencepost.uuid_v7(), '{topic}', 'order.changed', g.key, g.payload, 'application/json',
               fencepost.record_bytes(g.key, g.payload, NULL, NULL)
        FROM (
            SELECT convert_to('key-' || (seed + n) * 7919 % {keys}, 'UTF8') AS key, {payload} AS payload
            FROM generate_series(1, slice) AS n
        ) AS g;
        COMMIT;
        seed := seed + slice;
        rows_left := rows_left - slice;
    END LOOP;
END
$$
"""
_SMALL_PAYLOAD: Final = "substring(decode(repeat(md5((seed + n)::text), {times}), 'hex') FROM 1 FOR {size})"
# A megabyte of one repeated digest would be compressed to nothing; stored uncompressed it is read as it is.
_EXTERNAL: Final = "ALTER TABLE fencepost.outbox ALTER COLUMN payload SET STORAGE EXTERNAL"


def fill(url: str, topic: str, *, rows: int, keys: int = 5_000, payload_bytes: int = 200, seed: int = 0) -> None:
    """Write ``rows`` committed rows over ``keys`` keys."""
    payload = _SMALL_PAYLOAD.format(times=payload_bytes // 16 + 1, size=payload_bytes)
    slice_rows = max(1, min(_ROWS_PER_TRANSACTION, 16 * 1024 * 1024 // payload_bytes))
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_DROP_CHECK)
        connection.execute(_EXTERNAL)
        statement = _FILL.format(rows=rows, keys=keys, topic=topic, payload=payload, slice=slice_rows, seed=seed)
        connection.execute(statement.encode())


def settle(url: str) -> None:
    """Let the server finish its own work of the fill, so that nobody pays for it later."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
        connection.execute("CHECKPOINT")


def settle_quickly(connection: "psycopg.Connection[Any]") -> None:
    """Write out what a drain has dirtied, so that the next window does not pay for it."""
    connection.execute("CHECKPOINT")


def rewind(url: str) -> None:
    """Forget every delivery: the whole outbox is a backlog again."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("TRUNCATE fencepost.receipts, fencepost.relays")


def give_lanes_away(url: str) -> None:
    """Lease every lane to nobody in particular: a relay that starts now gets ready and has to wait."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "UPDATE fencepost.lanes SET lease_owner = %s, lease_expires_at = clock_timestamp() + interval '1 hour'",
            [OTHERS_LEASE],
        )


def let_lanes_go(connection: "psycopg.Connection[Any]") -> None:
    """Free the lanes and tell the relays."""
    connection.execute("UPDATE fencepost.lanes SET lease_owner = NULL, lease_expires_at = NULL")
    connection.execute("SELECT pg_notify('fencepost_lanes', '')")


def delivered_rows(connection: "psycopg.Connection[Any]") -> int:
    """Rows in all receipts."""
    row = connection.execute("SELECT coalesce(sum(row_count), 0) FROM fencepost.receipts").fetchone()
    return int(row[0]) if row else 0


def receipts(connection: "psycopg.Connection[Any]") -> list[Mark]:
    """Every receipt as a mark, by the server's clock."""
    found = connection.execute("SELECT extract(epoch FROM created_at)::float8, row_count FROM fencepost.receipts")
    return [Mark(at, rows) for at, rows in found.fetchall()]


def wal_bytes(connection: "psycopg.Connection[Any]") -> int:
    """How far the write-ahead log has got."""
    row = connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchone()
    assert row is not None
    return int(row[0])
