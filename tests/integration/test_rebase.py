"""A copy of the outbox in another cluster: nothing is published until it is rebased, and nothing is lost or repeated by it."""

import asyncio

import asyncpg
import pytest
from typer.testing import CliRunner, Result

from fencepost.cli import app
from fencepost.errors import ConfigurationError
from relay.app import verify_installation
from relay.cursor import Cursor, advance
from relay.lane import Receipt
from relay.store import Store

OLD_CLUSTERS_LEAD = 1_000_000_000


async def restored_copy(connection: asyncpg.Connection) -> None:
    """What a restore into a young cluster looks like: every stored transaction id lies far in its future."""
    await connection.execute("UPDATE fencepost.installation SET system_identifier = 1")
    await connection.execute("UPDATE fencepost.outbox SET xid = (xid::text::bigint + $1)::text::xid8", OLD_CLUSTERS_LEAD)
    await connection.execute(
        """
        UPDATE fencepost.receipts SET snapshot = format(
            '%s:%s:%s', pg_snapshot_xmin(snapshot)::text::bigint + $1, pg_snapshot_xmax(snapshot)::text::bigint + $1,
            (SELECT string_agg((xip::text::bigint + $1)::text, ',') FROM pg_snapshot_xip(snapshot) AS xip))::pg_snapshot
        """,
        OLD_CLUSTERS_LEAD,
    )


async def enqueue(connection: asyncpg.Connection, number: int) -> None:
    await connection.execute("SELECT fencepost.enqueue('orders', 'order.placed', 'one key', $1)", str(number).encode())


async def deliver(store: Store, held: dict[int, int]) -> list[int]:
    """Poll every lane once and mark what was found, as a relay would after publishing it."""
    cursors = await store.cursors(list(held))
    poll = await store.poll({lane: cursor for lane, (cursor, _) in cursors.items()}, row_limit=100, byte_limit=10**9)
    found: list[int] = []
    for lane, (cursor, sequence) in cursors.items():
        batch = advance(cursor, poll.rows.get(lane, ()), poll.snapshot, row_limit=100, byte_limit=10**9)
        found += [int(row["payload"]) for row in batch.rows]
        if batch.rows:
            await mark(store, lane, held[lane], sequence + 1, batch.cursor, [row["id"] for row in batch.rows])
    return found


async def mark(store: Store, lane: int, generation: int, sequence: int, cursor: Cursor, ids: list[int]) -> None:
    receipt = Receipt(
        lane=lane, generation=generation, sequence=sequence, cursor=cursor, first_id=min(ids), last_id=max(ids),
        row_count=len(ids), late_count=0, offsets={}, partition_counts={},
    )  # fmt: skip
    assert await store.mark([receipt]) == {lane}


async def rebase(database_url: str, reason: str) -> Result:
    arguments = ["lanes", "rebase", "--reason", reason, "--database-url", database_url]
    return await asyncio.to_thread(lambda: CliRunner().invoke(app(), arguments))


async def test_a_restored_outbox_publishes_nothing_until_it_is_rebased_and_then_loses_and_repeats_nothing(
    database_url: str,
) -> None:
    """DB-7, with a late row: undelivered below the position when the dump was taken."""
    connection = await asyncpg.connect(database_url)
    late_writer = await asyncpg.connect(database_url)
    store = await Store.open(database_url, relay_id="relay/1", timeout_seconds=10)
    try:
        held = dict(await store.claim(60, 100, []))
        late = late_writer.transaction()
        await late.start()
        await enqueue(late_writer, 1)
        await enqueue(connection, 2)
        assert await deliver(store, held) == [2]
        await late.commit()
        await enqueue(connection, 3)
        await store.release(held)

        await restored_copy(connection)
        with pytest.raises(ConfigurationError, match="fencepost lanes rebase"):
            await verify_installation(store)

        result = await rebase(database_url, "restored")
        assert result.exit_code == 0, result.output
        await verify_installation(store)
        await enqueue(connection, 4)
        held = dict(await store.claim(60, 100, []))
        assert await deliver(store, held) == [1, 3, 4]
        assert await deliver(store, held) == []
        assert await connection.fetchval("SELECT count(*) FROM fencepost.delivery WHERE NOT delivered") == 0
        assert await connection.fetchval("SELECT reason FROM fencepost.audit") == "restored"
    finally:
        await store.close()
        await late_writer.close()
        await connection.close()


async def test_rebase_is_refused_while_a_relay_holds_lanes(database_url: str) -> None:
    store = await Store.open(database_url, relay_id="relay/1", timeout_seconds=10)
    try:
        await store.claim(60, 1, [])
    finally:
        await store.close()
    result = await rebase(database_url, "by mistake")
    assert isinstance(result.exception, ConfigurationError)
    assert "a relay holds lanes" in str(result.exception)
