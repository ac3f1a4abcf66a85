"""The ledger forgets what is past its retention, and nothing that could still be needed."""

import uuid
from datetime import timedelta
from typing import Any, Final

import asyncpg
import pytest

from consumer_sdk.message_store import MessageStore
from tests.support.commands import user_of
from tests.support.runs import Runs

pytestmark = pytest.mark.services

WEEK: Final = timedelta(days=7)
INSERT: Final = """
INSERT INTO fencepost.effects (run_key, tenant_id, iteration, step, occurrence, operation, state, holder, created_at, finished_at)
VALUES ($1, 'acme', 0, 's', 0, 'fencepost.message', 'succeeded', 'h', clock_timestamp() - $2::interval,
        clock_timestamp() - $2::interval)
"""
OF_RUN: Final = """
INSERT INTO fencepost.effects (run_key, tenant_id, iteration, step, occurrence, operation, state, run_id, run_generation, holder,
                               fingerprint, fingerprint_version, provider_key, created_at, finished_at)
VALUES ($1::uuid::text, 'acme', 0, 's', 0, 'charge', 'succeeded', $1, 1, 'h', sha256('x'), 1, 'k',
        clock_timestamp() - interval '30 days', clock_timestamp() - interval '30 days')
"""
LETTER: Final = """
INSERT INTO fencepost.dead_letters (run_key, tenant_id, step, consumer, topic, "partition", "offset", recorded_at, header_names,
                                    header_values, reason, error_class, error_code, attempts, state)
VALUES ($1, 'acme', 's', 'c', 't', 0, 0, now(), '{}', '{}', 'rejected', 'X', 'x', 1, $2)
"""


async def kept(connection: "asyncpg.Connection[Any]") -> set[str]:
    return {row["run_key"] for row in await connection.fetch("SELECT run_key FROM fencepost.effects")}


async def test_only_what_is_old_and_over_is_forgotten(database_url: str) -> None:
    """X6: not what is younger, of a living run, or of a dead letter that may be redriven. By the consumer's role."""
    connection = await asyncpg.connect(database_url)
    runs = Runs(connection)
    living, ended = await runs.accept(), await runs.accept()
    await connection.execute("SELECT fencepost.cancel_run('acme', $1, 'me', 'why')", ended)
    for run_id in (living, ended):
        await connection.execute(OF_RUN, run_id)
    for name, age in (("young", timedelta(days=6)), ("old", timedelta(days=8)), ("open", WEEK * 2), ("closed", WEEK * 2)):
        await connection.execute(INSERT, name, age)
    await connection.execute(LETTER, "open", "dead")
    await connection.execute(LETTER, "closed", "discarded")
    async with user_of("fencepost_consumer", database_url) as url:
        store = await MessageStore.open(url, holder="h", timeout_seconds=10)
        forgotten = await store.forget(WEEK, limit=100)
        assert await store.forget(WEEK, limit=100) == 0
        await store.close()
        user = await asyncpg.connect(url)
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await user.execute("DELETE FROM fencepost.effects")
        await user.close()
    assert forgotten == 3
    assert await kept(connection) == {str(living), "young", "open"}
    await connection.close()


async def test_a_batch_of_forgetting_is_bounded(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    for _ in range(5):
        await connection.execute(INSERT, uuid.uuid4().hex, WEEK * 2)
    assert await connection.fetchval("SELECT fencepost.forget_effects($1, 3)", WEEK) == 3
    assert len(await kept(connection)) == 2
    await connection.close()
