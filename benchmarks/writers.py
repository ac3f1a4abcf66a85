"""What the relay costs the writers while it keeps up, everything on the same cores: windows with and without it in turn."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, Final

import psycopg

from benchmarks import backlog
from benchmarks.lab import BenchmarkFailed, Lab
from benchmarks.measure import each_us, growth, known_median, ratios
from benchmarks.report import Report

__all__ = ["Window", "neighbours", "writers"]

_PARTITIONS: Final = 8
_PAYLOAD_BYTES: Final = 200
_WARM_SECONDS: Final = 1.0
_DRAIN_SECONDS: Final = 120.0
_TICK_SECONDS: Final = 0.05
# What may be on its way when the writers stop: a second's worth would be no keeping up.
_BEHIND_SHARE_MOST: Final = 0.25
_MICRO: Final = 1_000_000
_WITHOUT: Final = "without"
_DOMAIN: Final = """
CREATE TABLE domain_orders (id integer PRIMARY KEY, version integer NOT NULL DEFAULT 0) WITH (fillfactor = 50);
INSERT INTO domain_orders (id) SELECT generate_series(0, 4999);
"""
_WAITING: Final = """
SELECT count(*) FROM fencepost.outbox AS o JOIN fencepost.cursors AS c USING (lane)
WHERE o.id > c.position AND o.id > (SELECT last_value FROM fencepost.outbox_id_seq) - 200000
"""


@dataclass(kw_only=True)
class Window:
    """One window. ``behind`` is how many rows were not delivered when the last writer had committed."""

    commits_per_second: float
    database_us: float | None
    relay_us: float = 0.0
    behind: int = 0


def writers(lab: Lab, *, repeats: int, seconds: float, count: int, wakeups: Sequence[str]) -> Report:
    """Windows without a relay stand on both sides of each window with one, and their mean is what it is compared with."""
    found: dict[str, list[Window]] = {_WITHOUT: [], **{wakeup: [] for wakeup in wakeups}}
    with lab.database() as url:
        topic = lab.topic(_PARTITIONS)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(_DOMAIN.encode())
        _window(lab, url, topic, count, seconds / 2, None)  # warms up
        found[_WITHOUT].append(_window(lab, url, topic, count, seconds, None))
        for _ in range(repeats):
            for wakeup in wakeups:
                found[wakeup].append(_window(lab, url, topic, count, seconds, wakeup))
                found[_WITHOUT].append(_window(lab, url, topic, count, seconds, None))
    report = Report(benchmark="writers", machine=lab.machine())
    report.figures = {"writers": count, "without_relay": _figures(found[_WITHOUT])}
    for place, wakeup in enumerate(wakeups):
        beside = neighbours(found[_WITHOUT], place, len(wakeups))
        name = "with_relay" if wakeup == wakeups[0] else f"with_relay_{wakeup}"
        report.figures[name] = {"wakeup": wakeup, **_figures(found[wakeup]), **_growth(found[wakeup], beside)}
        report.ratios[f"{name}_vs_without"] = ratios(
            [window.commits_per_second for window in found[wakeup]], [mean(w.commits_per_second for w in pair) for pair in beside]
        )
    return report


def neighbours(windows: Sequence[Window], place: int, variants: int) -> list[tuple[Window, Window]]:
    """The windows right before and after each window of the variant at ``place``."""
    befores = range(place, len(windows) - 1, variants)
    return [(windows[index], windows[index + 1]) for index in befores]


def _window(lab: Lab, url: str, topic: str, count: int, seconds: float, wakeup: str | None) -> Window:
    with ExitStack() as stack:
        connection = stack.enter_context(psycopg.connect(url, autocommit=True))
        relay = stack.enter_context(lab.relay(url, wakeup=wakeup)) if wakeup else None
        if relay is not None:
            _until_caught_up(connection)
        parameters: dict[str, Any] = {
            "database_url": url, "topic": topic, "writers": count, "seconds": seconds, "warm_seconds": _WARM_SECONDS,
            "payload_bytes": _PAYLOAD_BYTES,
        }  # fmt: skip
        worker = stack.enter_context(lab.worker("busy_writers", **parameters))
        database, relay_cpu = lab.postgres_cpu(), relay.cpu() if relay else 0.0
        done = worker.run()
        behind = _waiting(connection) if relay else 0
        database_after, relay_after = lab.postgres_cpu(), relay.cpu() if relay else 0.0
        commits = done["all_commits"]
        if behind > _BEHIND_SHARE_MOST * commits / (seconds + _WARM_SECONDS):
            raise BenchmarkFailed(f"the relay did not keep up: {behind} rows behind after {commits} commits")
    return Window(
        commits_per_second=done["commits"] / seconds,
        database_us=each_us(database, database_after, commits),
        relay_us=(relay_after - relay_cpu) / commits * _MICRO,
        behind=behind,
    )


def _waiting(connection: "psycopg.Connection[Any]") -> int:
    row = connection.execute(_WAITING).fetchone()
    assert row is not None
    return int(row[0])


def _until_caught_up(connection: "psycopg.Connection[Any]") -> None:
    """The windows without a relay have left a backlog, and a drain is another benchmark."""
    deadline = time.monotonic() + _DRAIN_SECONDS
    while _waiting(connection):
        if time.monotonic() > deadline:
            raise BenchmarkFailed("the relay did not drain the backlog of the window before")
        time.sleep(_TICK_SECONDS)
    backlog.settle_quickly(connection)


def _figures(windows: Sequence[Window]) -> dict[str, float | None]:
    return {
        "commits_per_second": median(window.commits_per_second for window in windows),
        "database_cpu_us_per_commit": known_median(window.database_us for window in windows),
        "relay_cpu_us_per_commit": median(window.relay_us for window in windows),
        "rows_behind_at_the_end_most": max(window.behind for window in windows),
    }


def _growth(windows: Sequence[Window], beside: Sequence[tuple[Window, Window]]) -> dict[str, float]:
    pairs = [
        growth(window.database_us, (before.database_us + after.database_us) / 2)
        for window, (before, after) in zip(windows, beside, strict=True)
        if window.database_us is not None and before.database_us is not None and after.database_us is not None
    ]
    return {"database_cpu_growth": median(pairs)} if pairs else {}
