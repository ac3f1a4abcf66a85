"""Transactions that write a run's first facts as fast as they can: by ``accept``, or by an application's own statements.

Every way writes the same rows into the same five tables, but for the replay, which writes none. What a way without
Fencepost would leave out as well (checks, the keyed digests, the look for an earlier run) is left out there.
"""

import hashlib
import json
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from uuid import UUID

import asyncpg
from uuid_utils.compat import uuid7

from benchmarks.workers import commit_repeatedly, ready_and_wait, run_worker
from producer_sdk import Command, Scope, Secrets, Submission
from producer_sdk.asyncpg import accept, accept_many

if TYPE_CHECKING:
    _Connection: TypeAlias = asyncpg.Connection[Any]
else:
    _Connection = asyncpg.Connection

_TENANT: Final = "acme"
_WORKFLOW: Final = "noop"
_TOPIC: Final = "fencepost.runs"
_SCOPE: Final = Scope(tenant_id=_TENANT, principal="user-1", operation="POST /orders")
_SECRETS: Final = Secrets({1: b"benchmark" * 4}, write=[1])
_KNOWN_KEYS: Final = 1_000
_EMPTY_INPUT_BYTES: Final = len('{"text":""}')

# $1 run, $2 tenant, then as named. Trigger `publish` is off in the databases that these are used in.
_RUN: Final = """
INSERT INTO fencepost.runs (run_id, tenant_id, root_run_id, workflow, workflow_version, topic, input, event_sequence)
VALUES ($1, $2, $1, $3, 1, $4, $5, 1)
"""
_JOB: Final = """
INSERT INTO fencepost.jobs (run_id, tenant_id, workflow, available_at, max_attempts) VALUES ($1, $2, $3, clock_timestamp(), 5)
"""
_EVENT: Final = "INSERT INTO fencepost.run_events (run_id, tenant_id, sequence, type) VALUES ($1, $2, 1, 'run_queued')"
_KEY: Final = """
INSERT INTO fencepost.idempotency_keys
    (key_hash, key_version, tenant_id, run_id, fingerprint, fingerprint_profile, schema_version, expires_at)
VALUES ($3, 1, $2, $1, $4, 1, 1, clock_timestamp() + interval '1 day')
"""
_OUTBOX: Final = """
INSERT INTO fencepost.outbox (lane, topic, event_type, key, payload, content_type, tenant_id, run_id, record_bytes)
VALUES (fencepost.lane_of($1), $3, 'fencepost.run_queued', $1, $4, 'application/json', $2, $5,
        fencepost.record_bytes($1, $4, NULL, NULL))
"""
_ALL: Final = """
WITH run AS (
    INSERT INTO fencepost.runs (run_id, tenant_id, root_run_id, workflow, workflow_version, topic, input, event_sequence)
    VALUES ($1, $2, $1, $3, 1, $4, $5, 1)
), job AS (
    INSERT INTO fencepost.jobs (run_id, tenant_id, workflow, available_at, max_attempts)
    VALUES ($1, $2, $3, clock_timestamp(), 5)
), event AS (
    INSERT INTO fencepost.run_events (run_id, tenant_id, sequence, type) VALUES ($1, $2, 1, 'run_queued')
), key AS (
    INSERT INTO fencepost.idempotency_keys
        (key_hash, key_version, tenant_id, run_id, fingerprint, fingerprint_profile, schema_version, expires_at)
    VALUES ($6, 1, $2, $1, $7, 1, 1, clock_timestamp() + interval '1 day')
)
INSERT INTO fencepost.outbox (lane, topic, event_type, key, payload, content_type, tenant_id, run_id, record_bytes)
VALUES (fencepost.lane_of($8), $4, 'fencepost.run_queued', $8, $9, 'application/json', $2, $10,
        fencepost.record_bytes($8, $9, NULL, NULL))
"""


async def _accepted(connection: _Connection, text: str) -> None:
    command = Command(workflow=_WORKFLOW, input={"text": text})
    async with connection.transaction():
        await accept(connection, command, _SCOPE, secrets.token_hex(16), secrets=_SECRETS)


async def _replayed(connection: _Connection, text: str) -> None:
    command = Command(workflow=_WORKFLOW, input={"text": text})
    async with connection.transaction():
        accepted = await accept(connection, command, _SCOPE, _known_key(random.randrange(_KNOWN_KEYS)), secrets=_SECRETS)
    assert not accepted.created


async def _inserted(connection: _Connection, text: str) -> None:
    run_id, payload, key_hash, fingerprint = _rows(text)
    name, event = str(run_id), _event(run_id)
    async with connection.transaction():
        await connection.execute(_RUN, run_id, _TENANT, _WORKFLOW, _TOPIC, payload)
        await connection.execute(_JOB, run_id, _TENANT, _WORKFLOW)
        await connection.execute(_EVENT, run_id, _TENANT)
        await connection.execute(_KEY, run_id, _TENANT, key_hash, fingerprint)
        await connection.execute(_OUTBOX, name.encode(), _TENANT, _TOPIC, event, name)


async def _inserted_at_once(connection: _Connection, text: str) -> None:
    run_id, payload, key_hash, fingerprint = _rows(text)
    name, event = str(run_id), _event(run_id)
    async with connection.transaction():
        await connection.execute(
            _ALL, run_id, _TENANT, _WORKFLOW, _TOPIC, payload, key_hash, fingerprint, name.encode(), event, name
        )


WAYS: Final[Mapping[str, Callable[[_Connection, str], Awaitable[None]]]] = {
    "accept": _accepted,
    "replay": _replayed,
    "bare": _inserted,
    "single_statement": _inserted_at_once,
}


def _rows(text: str) -> tuple[UUID, bytes, bytes, bytes]:
    """Run id, input, hash of a key and of the request, as an application that does without Fencepost would have them."""
    payload = json.dumps({"text": text}, separators=(",", ":")).encode()
    key = hashlib.sha256(secrets.token_hex(16).encode()).digest()
    return uuid7(), payload, key, hashlib.sha256(payload).digest()


def _event(run_id: UUID) -> bytes:
    """What the trigger would put into the outbox."""
    return json.dumps({
        "run_id": str(run_id), "tenant_id": _TENANT, "sequence": 1, "type": "run_queued", "workflow": _WORKFLOW,
        "workflow_version": 1, "state": "queued", "occurred_at": datetime.now(UTC).isoformat(),
    }).encode()  # fmt: skip


def _known_key(number: int) -> str:
    return f"known-{number}"


async def acceptors(
    kafka: str, database_url: str, way: str, connections: int, seconds: float, warm_seconds: float, input_bytes: int
) -> dict[str, float]:
    """Commits counted over ``seconds``, after ``warm_seconds`` that do not count; and the CPU of all of them here."""
    pool = [await asyncpg.connect(database_url) for _ in range(connections)]
    try:
        text = "x" * (input_bytes - _EMPTY_INPUT_BYTES)
        if way == "replay":
            await _accept_known(pool[0], text)
        await ready_and_wait()
        began = time.process_time()
        work = [partial(WAYS[way], connection, text) for connection in pool]
        counts = await commit_repeatedly(work, seconds=seconds, warm_seconds=warm_seconds)
        return {**counts, "cpu_seconds": time.process_time() - began}
    finally:
        for connection in pool:
            await connection.close()


async def _accept_known(connection: _Connection, text: str) -> None:
    command = partial(Command, workflow=_WORKFLOW, input={"text": text})
    async with connection.transaction():
        submissions = [Submission(command(), _SCOPE, _known_key(number)) for number in range(_KNOWN_KEYS)]
        await accept_many(connection, submissions, secrets=_SECRETS)


if __name__ == "__main__":
    run_worker(acceptors)
