"""The relay's memory at full drain, sampled throughout, with small and with the largest payloads."""

from typing import Final

from benchmarks import backlog
from benchmarks.drain import PARTITIONS, drain_with_relay
from benchmarks.lab import Lab
from benchmarks.report import Report

__all__ = ["memory"]

_SMALL_BYTES: Final = 200
_LARGE_BYTES: Final = 1_000_000


def memory(lab: Lab, *, repeats: int, rows: int, large_rows: int) -> Report:
    """Each size in a database and on a topic of its own, a new relay for each drain."""
    report = Report(benchmark="memory", machine=lab.machine())
    for size, count in ((_SMALL_BYTES, rows), (_LARGE_BYTES, large_rows)):
        with lab.database() as url:
            topic = lab.topic(PARTITIONS)
            backlog.fill(url, topic, rows=count, payload_bytes=size)
            backlog.settle(url)
            drained = [drain_with_relay(lab, url, topic, count) for _ in range(repeats)]
        report.figures[f"payload_{size}_bytes"] = {
            "rows": count,
            "peak_rss_mib": max(one.peak_rss_mib for one in drained),
            "rows_per_second": max(one.rate for one in drained),
            "mib_per_second": max(one.rate for one in drained) * size / 1024**2,
        }
    return report
