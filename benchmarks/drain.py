"""How fast a backlog drains: Fencepost, the bare loop and the naive relay in turn, on the same rows.

Rates are taken between the first mark and the last, so no side's start counts. A side that leaves a record out or
publishes one twice fails the benchmark.
"""

import time
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import psycopg

from benchmarks import backlog
from benchmarks.lab import BenchmarkFailed, Lab, Service
from benchmarks.measure import Mark, known_median, rate_between_marks, ratios
from benchmarks.meter import Meter
from benchmarks.report import Report

__all__ = ["Drained", "drain", "drain_with_relay"]

PARTITIONS: Final = 8
_PAGES: Final = (1_000, 3_000)
_SAMPLE_SECONDS: Final = 0.02
# Memory is looked at more often than the receipts are counted.
_SAMPLES_A_LOOK: Final = 5
_STILL_SECONDS: Final = 30.0
_MICRO: Final = 1_000_000


@dataclass(kw_only=True)
class Drained:
    """One drain. CPU is microseconds a row, and None where it cannot be seen."""

    rate: float
    cpu_us: float
    postgres_us: float | None
    kafka_us: float | None
    wal_bytes: float
    peak_rss_mib: float = 0.0


def drain(lab: Lab, *, repeats: int, rows: int, naive_rows: int) -> Report:
    """``vs_bare_loop`` compares with the better page size of the same repeat."""
    ours: list[Drained] = []
    bare: list[dict[int, Drained]] = []
    naive: list[Drained] = []
    with lab.database() as url:
        topic = lab.topic(PARTITIONS)
        backlog.fill(url, topic, rows=rows)
        backlog.settle(url)
        _drain_with_worker(lab, url, topic, "bare_loop", rows, page=_PAGES[0])  # warms the broker and the caches for all
        for repeat in range(repeats):
            for side in ("fencepost", "bare") if repeat % 2 == 0 else ("bare", "fencepost"):
                if side == "fencepost":
                    ours.append(drain_with_relay(lab, url, topic, rows))
                else:
                    bare.append({page: _drain_with_worker(lab, url, topic, "bare_loop", rows, page=page) for page in _PAGES})
            naive.append(_drain_with_worker(lab, url, topic, "naive", naive_rows, rows=naive_rows))
    best = [max(pages.values(), key=lambda drained: drained.rate) for pages in bare]
    report = Report(benchmark="drain", machine=lab.machine())
    report.figures = {
        "rows": rows,
        "fencepost": _figures(ours) | {"peak_rss_mib": max(one.peak_rss_mib for one in ours)},
        "bare_loop": _figures(best) | {f"rate_with_page_{page}": median(one[page].rate for one in bare) for page in _PAGES},
        "naive": _figures(naive),
    }
    rates = [one.rate for one in ours]
    report.ratios = {
        "vs_bare_loop": ratios(rates, [one.rate for one in best]),
        "vs_naive": ratios(rates, [one.rate for one in naive]),
    }
    return report


def drain_with_relay(lab: Lab, url: str, topic: str, rows: int, **settings: object) -> Drained:
    """Start a relay, let it get ready, give it the lanes, and wait until it has marked every row."""
    backlog.rewind(url)
    backlog.give_lanes_away(url)
    before = lab.records_on(topic, PARTITIONS)
    with lab.relay(url, **settings) as relay, psycopg.connect(url, autocommit=True) as connection:
        meter, cpu = Meter(lab, connection), relay.cpu()
        backlog.let_lanes_go(connection)
        peak = _until_drained(relay, connection, rows)
        cpu = relay.cpu() - cpu
        spent = meter.each(rows)
        marks = backlog.receipts(connection)
    _must_be_whole(lab, topic, before, rows)
    return Drained(rate=rate_between_marks(marks), cpu_us=cpu / rows * _MICRO, peak_rss_mib=peak, **spent)


def _until_drained(relay: Service, connection: "psycopg.Connection[Any]", rows: int) -> float:
    """Returns the highest memory seen, in MiB. A relay that stands still fails the benchmark soon."""
    peak, delivered, moved_at = 0.0, 0, time.monotonic()
    while delivered < rows:
        for _ in range(_SAMPLES_A_LOOK):
            peak = max(peak, relay.rss_mib())
            time.sleep(_SAMPLE_SECONDS)
        relay.check()
        before, delivered = delivered, backlog.delivered_rows(connection)
        if delivered > before:
            moved_at = time.monotonic()
        if time.monotonic() - moved_at > _STILL_SECONDS:
            raise BenchmarkFailed(f"the relay stands still after {delivered} of {rows} rows; its log ends:\n{relay.log_tail()}")
    return max(peak, relay.rss_mib())


def _drain_with_worker(lab: Lab, url: str, topic: str, name: str, expected: int, **parameters: object) -> Drained:
    before = lab.records_on(topic, PARTITIONS)
    with (
        lab.worker(name, database_url=url, topic=topic, **parameters) as worker,
        psycopg.connect(url, autocommit=True) as connection,
    ):
        meter = Meter(lab, connection)
        found = worker.run()
        spent = meter.each(expected)
    _must_be_whole(lab, topic, before, expected)
    marks = [Mark(at, rows) for at, rows in found["marks"]]
    return Drained(rate=rate_between_marks(marks), cpu_us=found["cpu_seconds"] / expected * _MICRO, **spent)


def _must_be_whole(lab: Lab, topic: str, before: int, rows: int) -> None:
    published = lab.records_on(topic, PARTITIONS) - before
    if published != rows:
        raise BenchmarkFailed(f"{published} records were published for {rows} rows")


def _figures(drained: list[Drained]) -> dict[str, float | None]:
    return {
        "rows_per_second": median(one.rate for one in drained),
        "cpu_us_per_row": median(one.cpu_us for one in drained),
        "postgres_cpu_us_per_row": known_median(one.postgres_us for one in drained),
        "kafka_cpu_us_per_row": known_median(one.kafka_us for one in drained),
        "wal_bytes_per_row": median(one.wal_bytes for one in drained),
    }
