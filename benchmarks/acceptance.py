"""What acceptance costs beside the inserts that it replaces: the same rows by ``accept`` and by bare statements, in turn.

Client and database share the machine, so several client processes share the connections: none of them can be the one core
that hides what the database does. Whose CPU it was is part of the figures.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import psycopg

from benchmarks import backlog
from benchmarks.lab import Lab
from benchmarks.measure import known_median, median_and_range, ratios
from benchmarks.meter import Meter
from benchmarks.report import Report

__all__ = ["acceptance"]

_CONNECTIONS: Final = 8
_PROCESSES: Final = 2
_INPUT_BYTES: Final = 200
_MICRO: Final = 1_000_000
_WARM_SECONDS: Final = 1.0
# Each way in the database it writes to. The last two write the outbox row themselves.
_DATABASE_OF: Final = {"accept": "fencepost", "replay": "fencepost", "bare": "bare", "single_statement": "single_statement"}
_NO_TRIGGER: Final = "ALTER TABLE fencepost.run_events DISABLE TRIGGER publish"


@dataclass(kw_only=True)
class Window:
    """Transactions of one way for some seconds. CPU is microseconds a transaction."""

    commits_per_second: float
    client_us: float
    postgres_us: float | None
    wal_bytes: float


def acceptance(lab: Lab, *, repeats: int, seconds: float) -> Report:
    """One window for each way a repeat, every second repeat in the opposite order."""
    found: dict[str, list[Window]] = {way: [] for way in _DATABASE_OF}
    with ExitStack() as stack:
        urls = {name: stack.enter_context(lab.database()) for name in sorted(set(_DATABASE_OF.values()))}
        for name in ("bare", "single_statement"):
            with psycopg.connect(urls[name], autocommit=True) as connection:
                connection.execute(_NO_TRIGGER)
        for repeat in range(repeats):
            for way in list(found)[:: -1 if repeat % 2 else 1]:
                found[way].append(_window(lab, urls[_DATABASE_OF[way]], way, seconds))
    report = Report(benchmark="acceptance", machine=lab.machine())
    report.figures = {"connections": _CONNECTIONS, "client_processes": _PROCESSES, "input_bytes": _INPUT_BYTES}
    report.figures |= {way: _figures(windows) for way, windows in found.items()}
    rates = {way: [window.commits_per_second for window in windows] for way, windows in found.items()}
    report.ratios = {
        "vs_bare_insert": ratios(rates["accept"], rates["bare"]),
        "vs_bare_single_statement": ratios(rates["accept"], rates["single_statement"]),
    }
    return report


def _window(lab: Lab, url: str, way: str, seconds: float) -> Window:
    parameters: Mapping[str, Any] = {
        "database_url": url, "way": way, "connections": _CONNECTIONS // _PROCESSES, "seconds": seconds,
        "warm_seconds": min(_WARM_SECONDS, seconds), "input_bytes": _INPUT_BYTES,
    }  # fmt: skip
    with ExitStack() as stack:
        connection = stack.enter_context(psycopg.connect(url, autocommit=True))
        workers = [stack.enter_context(lab.worker("acceptors", **parameters)) for _ in range(_PROCESSES)]
        backlog.settle_quickly(connection)
        meter = Meter(lab, connection)
        for worker in workers:
            worker.go()
        done = [worker.result() for worker in workers]
        commits = sum(one["all_commits"] for one in done)
        spent = meter.each(commits)
    return Window(
        commits_per_second=sum(one["commits"] for one in done) / seconds,
        client_us=sum(one["cpu_seconds"] for one in done) / commits * _MICRO,
        postgres_us=spent["postgres_us"],
        wal_bytes=spent["wal_bytes"],
    )


def _figures(windows: Sequence[Window]) -> dict[str, float | None]:
    return {
        **median_and_range("commits_per_second", [window.commits_per_second for window in windows]),
        "client_cpu_us_per_commit": median(window.client_us for window in windows),
        "database_cpu_us_per_commit": known_median(window.postgres_us for window in windows),
        "client_share_of_cpu": known_median(
            None if window.postgres_us is None else window.client_us / (window.client_us + window.postgres_us) for window in windows
        ),
        "wal_bytes_per_commit": median(window.wal_bytes for window in windows),
    }
