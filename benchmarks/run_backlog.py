"""Accepts runs in bulk, as services would; loads a long history of them; and asks how far a worker has got."""

from typing import Any, Final

import psycopg

from benchmarks.lab import BenchmarkFailed
from benchmarks.noop_jobs import WORKFLOW

__all__ = ["ACCEPT_RUNS", "accept_runs", "is_done", "jobs_per_second", "load_history"]

_INPUT_BYTES: Final = 200
_TEXT_BYTES: Final = _INPUT_BYTES - len('{"text": ""}')
_RUNS_PER_TRANSACTION: Final = 1_000

#: Accepts {count} runs, without keys, of four tenants.
ACCEPT_RUNS: Final = f"""
SELECT count(*) FROM generate_series(1, {{count}}) AS n CROSS JOIN LATERAL fencepost.accept(
    'tenant-' || n % 4, fencepost.uuid_v7(), '{WORKFLOW}', 1, 'fencepost.runs',
    convert_to(jsonb_build_object('text', repeat('x', {_TEXT_BYTES}))::text, 'UTF8'), interval '0', 5,
    NULL, NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL)
"""

# A history as years of work leave it. Triggers and foreign keys are left out while loading; the rows are those that an
# acceptance and a completed attempt leave. Run ids are older than those of the runs that come.
_FINISHED: Final = f"""
WITH run AS (
    INSERT INTO fencepost.runs (run_id, tenant_id, root_run_id, workflow, workflow_version, topic, state, version, event_sequence,
                                started_at, finished_at, input, output)
    SELECT r.run_id, 'tenant-' || r.n % {{tenants}}, r.run_id, '{WORKFLOW}', 1, 'fencepost.runs', 'completed', 3, 2, now(), now(),
           convert_to(repeat('x', {_INPUT_BYTES}), 'UTF8'), 'null'
    FROM (SELECT n, fencepost.uuid_v7() AS run_id FROM generate_series(1, {{count}}) AS n) AS r
    RETURNING run_id, tenant_id
), job AS (
    INSERT INTO fencepost.jobs
        (run_id, tenant_id, workflow, state, available_at, lease_generation, attempts, max_attempts, finished_at)
    SELECT run_id, tenant_id, '{WORKFLOW}', 'completed', now(), 1, 1, 5, now() FROM run
), event AS (
    INSERT INTO fencepost.run_events (run_id, tenant_id, sequence, type)
    SELECT run_id, tenant_id, sequence, CASE sequence WHEN 1 THEN 'run_queued' ELSE 'run_completed' END
    FROM run CROSS JOIN generate_series(1, 2) AS sequence
)
INSERT INTO fencepost.job_attempts (run_id, tenant_id, generation, number, worker, claimed_at, finished_at, outcome)
SELECT run_id, tenant_id, 1, 1, 'worker', now(), now(), 'completed' FROM run
"""
_FUTURE: Final = f"""
WITH run AS (
    INSERT INTO fencepost.runs (run_id, tenant_id, root_run_id, workflow, workflow_version, topic, event_sequence, input)
    SELECT r.run_id, 'tenant-' || r.n % {{tenants}}, r.run_id, '{WORKFLOW}', 1, 'fencepost.runs', 1,
           convert_to(repeat('x', {_INPUT_BYTES}), 'UTF8')
    FROM (SELECT n, fencepost.uuid_v7() AS run_id FROM generate_series(1, {{count}}) AS n) AS r
    RETURNING run_id, tenant_id
), event AS (
    INSERT INTO fencepost.run_events (run_id, tenant_id, sequence, type) SELECT run_id, tenant_id, 1, 'run_queued' FROM run
)
INSERT INTO fencepost.jobs (run_id, tenant_id, workflow, available_at, max_attempts)
SELECT run_id, tenant_id, '{WORKFLOW}', now() + interval '1 day' + random() * interval '300 days', 5 FROM run
"""
_OPEN: Final = """
SELECT EXISTS (SELECT FROM fencepost.jobs WHERE state = 'queued') OR EXISTS (SELECT FROM fencepost.jobs WHERE state = 'leased')
"""
_RATE: Final = """
SELECT count(*) FILTER (WHERE outcome = 'completed'), extract(epoch FROM max(finished_at) - min(claimed_at))::float8
FROM fencepost.job_attempts
"""


def accept_runs(url: str, count: int) -> None:
    """Accept ``count`` runs that are ready at once."""
    with psycopg.connect(url, autocommit=True) as connection:
        for begun in range(0, count, _RUNS_PER_TRANSACTION):
            connection.execute(ACCEPT_RUNS.format(count=min(_RUNS_PER_TRANSACTION, count - begun)).encode())


def load_history(url: str, rows: int, *, tenants: int) -> None:
    """``rows`` finished jobs and as many that are due in days, of so many tenants."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET session_replication_role = replica")
        connection.execute("SET synchronous_commit = off")
        for statement in (_FINISHED, _FUTURE):
            connection.execute(statement.format(count=rows, tenants=tenants).encode())


def is_done(connection: "psycopg.Connection[Any]") -> bool:
    """Whether no job is queued or leased any more."""
    row = connection.execute(_OPEN.encode()).fetchone()
    return row is not None and not row[0]


def jobs_per_second(connection: "psycopg.Connection[Any]", expected: int) -> float:
    """From the first claim to the last completion, by the database's clock. Each job must have been completed once."""
    row = connection.execute(_RATE.encode()).fetchone()
    if row is None or row[0] != expected:
        raise BenchmarkFailed(f"{row[0] if row else 0} attempts were completed for {expected} jobs")
    return expected / float(row[1])
