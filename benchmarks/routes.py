"""Durable routes: what a stored answer costs beside a bare route, what a first request adds to its workflow, a crowd that waits.

One server process answers by HTTP, a worker process executes the runs, and clients are processes of their own. A request that is
answered otherwise than it should be fails the benchmark.
"""

import base64
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psutil
import psycopg

from benchmarks import backlog
from benchmarks.keep_alive import SHOPS
from benchmarks.lab import BenchmarkFailed, Lab, Service, Worker, cpu_seconds
from benchmarks.measure import median_and_range, ratios, summary_ms
from benchmarks.meter import Meter
from benchmarks.report import Report
from benchmarks.route_workflows import WORKFLOWS
from benchmarks.statement_count import StatementCount
from fencepost.devservices import free_port

__all__ = ["routes"]

_SECRET: Final = "benchmark" * 4
_CONNECTIONS: Final = 10
_KNOWN: Final = 100
_REPEAT: Final = ("bare", "replay", "replay", "bare")
_WARM_SECONDS: Final = 0.2
_PAUSE_SECONDS: Final = 0.02
_WORKFLOWS: Final = {"that_returns_at_once": 0.0, "that_works_50_ms": 0.05}
_CROWD_SECONDS: Final = 120.0
_TICK_SECONDS: Final = 0.05
_MICRO: Final = 1_000_000
_MILLI: Final = 1_000
_MIB: Final = 1024 * 1024

# What the bare route reads.
_ORDERS: Final = """
CREATE TABLE orders (shop bigint PRIMARY KEY, item text NOT NULL, quantity bigint NOT NULL, worked_seconds float8 NOT NULL)
"""
_FILL_ORDERS: Final = "INSERT INTO orders SELECT n, 'a book', 2, 0 FROM generate_series(0, %s - 1) AS n"
# By the database's clock, in the statement before the commit: this machine has one clock.
_ENDED: Final = """
SELECT run_id::text, extract(epoch FROM finished_at)::float8 FROM fencepost.runs
WHERE run_id = ANY(%s::uuid[]) AND finished_at IS NOT NULL
"""
_CONNECTED: Final = """
SELECT application_name, count(*) FROM pg_stat_activity
WHERE datname = current_database() AND application_name IN ('application', 'fencepost-routes') GROUP BY 1
"""
_LINEAGES: Final = "SELECT count(*) FROM fencepost.lineages"


@dataclass(kw_only=True)
class _Bench:
    """The server that is measured, and what else it needs."""

    lab: Lab
    url: str
    connection: "psycopg.Connection[Any]"
    server: Worker
    port: int

    def worker(self) -> AbstractContextManager[Service]:
        """A worker process that executes what the server starts."""
        secrets = f"1:{base64.b64encode(_SECRET.encode()).decode()}"
        return self.lab.job_worker(self.url, WORKFLOWS, idempotency_secrets=secrets)

    def calls(
        self, way: str, prefix: str, count: int, *, work_seconds: float = 0, pause_seconds: float = _PAUSE_SECONDS
    ) -> "list[dict[str, Any]]":
        """One after the other, by one client."""
        given = {"way": way, "prefix": prefix, "count": count, "pause_seconds": pause_seconds, "work_seconds": work_seconds}
        with self.lab.worker("route_calls", port=self.port, **given) as client:
            calls: list[dict[str, Any]] = client.run()
        return calls

    def windows(self, ways: Sequence[str], seconds: float) -> AbstractContextManager[Worker]:
        """Clients for one window after the other."""
        given = {"connections": _CONNECTIONS, "windows": list(ways), "seconds": seconds, "known": _KNOWN}
        return self.lab.worker("route_clients", port=self.port, warm_seconds=min(_WARM_SECONDS, seconds), **given)

    def started(self) -> int:
        row = self.connection.execute(_LINEAGES).fetchone()
        return int(row[0]) if row else 0

    def rss_mib(self) -> float:
        return float(psutil.Process(self.server.pid).memory_info().rss) / _MIB


def routes(lab: Lab, *, repeats: int, seconds: float, waiters: int, rows: int) -> Report:
    """``repeats`` times two windows of replays and two of bare requests; ``rows`` first requests of each kind, in turn."""
    report = Report(benchmark="routes", machine=lab.machine())
    report.figures = {"connections": _CONNECTIONS, "stored_answers": _KNOWN}
    with _bench(lab) as bench:
        with bench.worker():
            _store_answers(bench)
            first = {kind: _first_requests(bench, kind, rows, work_seconds) for kind, work_seconds in _WORKFLOWS.items()}
        backlog.settle(bench.url)
        rates = _rates(bench, repeats, seconds)
        for way in ("replay", "bare", "first_without_wait"):
            report.figures[way] = _cost(bench, way, seconds)
    for way, found in rates.items():
        report.figures[way] |= median_and_range("answers_per_second", found)
    report.figures["first_request"] = first
    with _bench(lab) as bench:
        report.figures[f"{waiters}_waiters"] = _crowd(bench, waiters, rows, seconds)
    report.ratios["replay_vs_bare_route"] = ratios(rates["replay"], rates["bare"])
    return report


@contextmanager
def _bench(lab: Lab) -> Iterator[_Bench]:
    port = free_port()
    with lab.database() as url, psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_ORDERS)
        connection.execute(_FILL_ORDERS, [SHOPS])
        with lab.worker("route_server", database_url=url, port=port, secret=_SECRET) as server:
            yield _Bench(lab=lab, url=url, connection=connection, server=server, port=port)


def _store_answers(bench: _Bench) -> None:
    """The answers that replays get; and everything is warm then."""
    bench.calls("first", "known", _KNOWN, pause_seconds=0)


def _first_requests(bench: _Bench, kind: str, count: int, work_seconds: float) -> dict[str, Any]:
    """``over_the_workflow_ms``: from the request to its answer, less what the workflow took. ``completion_to_client_ms``: from the
    statement that completes the run, with its commit, to the answer."""
    calls = bench.calls("first", kind, count, work_seconds=work_seconds)
    over = [(call["seconds"] - call["worked_seconds"]) * _MILLI for call in calls]
    return {"over_the_workflow_ms": summary_ms(over), "completion_to_client_ms": summary_ms(_since_completion_ms(bench, calls))}


def _since_completion_ms(bench: _Bench, answers: Sequence[dict[str, Any]]) -> list[float]:
    ended = dict(bench.connection.execute(_ENDED, [[answer["run"] for answer in answers]]).fetchall())
    if len(ended) != len(answers):
        raise BenchmarkFailed(f"{len(answers)} runs were answered and {len(ended)} have ended")
    return [(answer["at"] - ended[answer["run"]]) * _MILLI for answer in answers]


def _rates(bench: _Bench, repeats: int, seconds: float) -> dict[str, list[float]]:
    """Answers a second of each repeat, which has two windows of each way: what the machine does meanwhile meets both."""
    with bench.windows(_REPEAT * repeats, seconds) as clients:
        counts = [one["answers"] for one in clients.run()]
    by_repeat = [counts[start : start + len(_REPEAT)] for start in range(0, len(counts), len(_REPEAT))]
    return {way: [_answers(way, found) / (2 * seconds) for found in by_repeat] for way in ("replay", "bare")}


def _answers(way: str, counts: Sequence[int]) -> int:
    return sum(count for window, count in zip(_REPEAT, counts, strict=True) if window == way)


def _cost(bench: _Bench, way: str, seconds: float) -> dict[str, float | None]:
    """What one answer takes. The database's CPU is None where it cannot be seen."""
    with bench.windows([way], seconds) as clients:
        statements, meter, cpu = StatementCount(bench.connection), Meter(bench.lab, bench.connection), cpu_seconds(bench.server.pid)
        answers = clients.run()[0]["all"]
        cpu = cpu_seconds(bench.server.pid) - cpu
        spent = meter.each(answers)
    return {
        "server_cpu_us": cpu / answers * _MICRO,
        "database_cpu_us": spent["postgres_us"],
        "statements": statements.each(answers),
    }


def _crowd(bench: _Bench, count: int, calls: int, seconds: float) -> dict[str, Any]:
    """``bare_ms``: of an unrelated request whose row comes from the application's pool, alone and beside the crowd."""
    alone = _bare_ms(bench, calls)
    before = bench.rss_mib()
    with bench.lab.worker("route_waiters", port=bench.port, count=count) as crowd:
        _until_started(bench, count)
        beside = _bare_ms(bench, calls)
        share = _cpu_share(bench, seconds)
        connected = {f"connections_of_{name}": number for name, number in bench.connection.execute(_CONNECTED).fetchall()}
        grown = bench.rss_mib() - before
        with bench.worker():
            answers = crowd.run()
    return {
        "answered": len(answers),
        "bare_ms_alone": alone,
        "bare_ms": beside,
        "server_cpu_share_of_one_core": share,
        "server_rss_mib": before + grown,
        "server_rss_mib_of_the_crowd": grown,
        **connected,
        "completion_to_client_ms": summary_ms(_since_completion_ms(bench, answers)),
    }


def _bare_ms(bench: _Bench, count: int) -> dict[str, float]:
    return summary_ms([call["seconds"] * _MILLI for call in bench.calls("bare", "bare", count)])


def _cpu_share(bench: _Bench, seconds: float) -> float:
    began, cpu = time.monotonic(), cpu_seconds(bench.server.pid)
    time.sleep(seconds)
    return (cpu_seconds(bench.server.pid) - cpu) / (time.monotonic() - began)


def _until_started(bench: _Bench, count: int) -> None:
    deadline = time.monotonic() + _CROWD_SECONDS
    while bench.started() < count:
        if time.monotonic() > deadline:
            raise BenchmarkFailed(f"{bench.started()} of {count} runs were started in time")
        time.sleep(_TICK_SECONDS)
