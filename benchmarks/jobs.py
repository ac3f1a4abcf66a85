"""How many jobs that do nothing one worker process completes, beside procrastinate's worker; and what a claim costs.

Both work off a backlog that was there before they start, on the same server, each in a new database. Rates count from the
first claim to the last completion by the database's clock, so no side's start counts.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import Any, Final

import psycopg

from benchmarks import backlog, run_backlog
from benchmarks.claim_cost import claim_cost
from benchmarks.lab import BenchmarkFailed, Lab, Service
from benchmarks.measure import known_median, median_and_range, ratios
from benchmarks.meter import Meter
from benchmarks.report import Report
from benchmarks.statement_count import StatementCount

__all__ = ["Worked", "jobs"]

_HANDLERS: Final = "benchmarks.noop_jobs:handlers"
_BEST_CONCURRENCY: Final = 200
_DEFAULT_CONCURRENCY: Final = 10
# Its jobs take so much longer that a part of them takes as long.
_PROCRASTINATE_SHARE: Final = 8
_PROCRASTINATE_CONCURRENCY: Final = (10, 50, 200)
_PROCRASTINATE_RATE: Final = """
SELECT count(*) FILTER (WHERE type = 'succeeded'),
       extract(epoch FROM max(at) FILTER (WHERE type = 'succeeded') - min(at) FILTER (WHERE type = 'started'))::float8
FROM procrastinate_events
"""
_TICK_SECONDS: Final = 0.02
_WORK_SECONDS: Final = 600.0
_MICRO: Final = 1_000_000


@dataclass(kw_only=True)
class Worked:
    """One backlog worked off. CPU is microseconds a job, and None where it cannot be seen."""

    rate: float
    worker_us: float
    postgres_us: float | None
    wal_bytes: float
    statements: float | None


def jobs(lab: Lab, *, repeats: int, rows: int, history: int, claims: int) -> Report:
    """``vs_procrastinate`` compares with the best of its concurrencies in the same repeat."""
    if find_spec("procrastinate") is None:
        raise BenchmarkFailed("the baseline, procrastinate, is missing: install fencepost[dev]")
    ours: dict[int, list[Worked]] = {_BEST_CONCURRENCY: [], _DEFAULT_CONCURRENCY: []}
    theirs: list[dict[int, Worked]] = []
    with lab.database() as template:
        run_backlog.accept_runs(template, rows)
        backlog.settle(template)
        for _ in range(repeats):
            for concurrency, worked in ours.items():
                worked.append(_fencepost(lab, template, rows, concurrency))
            fewer = max(rows // _PROCRASTINATE_SHARE, 100)
            theirs.append({concurrency: _procrastinate(lab, fewer, concurrency) for concurrency in _PROCRASTINATE_CONCURRENCY})
    best = [max(one.values(), key=lambda worked: worked.rate) for one in theirs]
    report = Report(benchmark="jobs", machine=lab.machine())
    report.figures = {"rows": rows}
    report.figures |= {f"fencepost_concurrency_{concurrency}": _figures(worked) for concurrency, worked in ours.items()}
    report.figures["procrastinate"] = _figures(best) | {
        f"jobs_per_second_concurrency_{concurrency}": median(one[concurrency].rate for one in theirs)
        for concurrency in _PROCRASTINATE_CONCURRENCY
    }
    report.ratios["vs_procrastinate"] = ratios([one.rate for one in ours[_BEST_CONCURRENCY]], [one.rate for one in best])
    report.figures["claim"], of_claims = claim_cost(lab, repeats=repeats, history=history, claims=claims)
    report.ratios |= of_claims
    return report


def _fencepost(lab: Lab, template: str, rows: int, concurrency: int) -> Worked:
    with ExitStack() as stack:
        url = stack.enter_context(lab.database(template))
        connection = stack.enter_context(psycopg.connect(url, autocommit=True))
        # A worker that starts now gets ready, and its first claim waits for this lock.
        gate = stack.enter_context(psycopg.connect(url))
        gate.execute("LOCK TABLE fencepost.jobs IN EXCLUSIVE MODE")
        worker = stack.enter_context(lab.job_worker(url, _HANDLERS, worker_concurrency=concurrency))
        counted = StatementCount(connection)
        meter, cpu = Meter(lab, connection), worker.cpu()
        gate.rollback()
        _until_done(worker, connection)
        cpu = worker.cpu() - cpu
        return Worked(
            rate=run_backlog.jobs_per_second(connection, rows),
            worker_us=cpu / rows * _MICRO,
            statements=counted.each(rows),
            **_spent(meter, rows),
        )


def _until_done(worker: Service, connection: "psycopg.Connection[Any]") -> None:
    deadline = time.monotonic() + _WORK_SECONDS
    while not run_backlog.is_done(connection):
        worker.check()
        if time.monotonic() > deadline:
            raise BenchmarkFailed(f"the worker did not work off its jobs; its log ends:\n{worker.log_tail()}")
        time.sleep(_TICK_SECONDS)


def _procrastinate(lab: Lab, rows: int, concurrency: int) -> Worked:
    url = lab.services.create_database()
    try:
        with (
            lab.worker("procrastinate_jobs", database_url=url, rows=rows, concurrency=concurrency) as worker,
            psycopg.connect(url, autocommit=True) as connection,
        ):
            counted, meter = StatementCount(connection), Meter(lab, connection)
            cpu = worker.run()["cpu_seconds"]
            spent, statements = _spent(meter, rows), counted.each(rows)
            row = connection.execute(_PROCRASTINATE_RATE).fetchone()
        if row is None or row[0] != rows:
            raise BenchmarkFailed(f"procrastinate completed {row[0] if row else 0} of {rows} jobs")
        return Worked(rate=rows / row[1], worker_us=cpu / rows * _MICRO, statements=statements, **spent)
    finally:
        lab.services.drop_database(url)


def _spent(meter: Meter, rows: int) -> dict[str, Any]:
    spent = meter.each(rows)
    return {name: spent[name] for name in ("postgres_us", "wal_bytes")}


def _figures(worked: Sequence[Worked]) -> dict[str, float | None]:
    return {
        **median_and_range("jobs_per_second", [one.rate for one in worked]),
        "worker_cpu_us_per_job": median(one.worker_us for one in worked),
        "database_cpu_us_per_job": known_median(one.postgres_us for one in worked),
        "statements_per_job": known_median(one.statements for one in worked),
        "wal_bytes_per_job": median(one.wal_bytes for one in worked),
    }
