"""What one poll costs, by what lies behind and ahead of the cursor. Polls that return the same number of rows are compared.

One table serves as history and as backlog: a poll is a function of the cursors given to it, so a cursor at the end has
everything behind it and one at the beginning has everything ahead. It is compared with an empty table, and with one of a
few rows where rows are returned; all lie in databases of one server, and their polls are taken in turn.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

import psycopg

from benchmarks import backlog
from benchmarks.lab import BenchmarkFailed, Lab
from benchmarks.measure import ratios
from benchmarks.report import Report

__all__ = ["Cost", "buffers_of", "poll"]

_LANES: Final = list(range(8))
_BYTES: Final = 2_000_000
_CALLS: Final = 60
# Enough for each lane to have some; the first polls of a connection plan and load, and do not count.
_FEW_ROWS: Final = 64
_FIRST_CALLS: Final = 3
_CALL: Final = (
    "SELECT * FROM fencepost.poll(%s::smallint[], %s::bigint[], %s::text[], %s::text[], %s::bigint[], %s::integer, %s::bigint)"
)
_NO_AUTOVACUUM: Final = "ALTER TABLE fencepost.outbox SET (autovacuum_enabled = false)"
_LAST_IDS: Final = "SELECT lane, max(id) FROM fencepost.outbox GROUP BY lane ORDER BY lane"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Cursors to poll with, on one connection. ``rows`` is what the poll must return, the head not counted."""

    connection: "psycopg.Connection[Any]"
    positions: Sequence[int]
    snapshot: str
    row_limit: int
    rows: int

    def parameters(self) -> list[object]:
        count = len(_LANES)
        return [
            _LANES, list(self.positions), [self.snapshot] * count, [None] * count, [0] * count, self.row_limit, _BYTES
        ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One poll: median milliseconds at the client, and pages read or found in memory."""

    ms: float
    buffers: int


def poll(lab: Lab, *, repeats: int, rows: int) -> Report:
    """Statistics are taken while the tables are empty and stay so, but for the cases that say otherwise."""
    report = Report(benchmark="poll", machine=lab.machine())
    with ExitStack() as stack:
        urls = [stack.enter_context(lab.database()) for _ in range(3)]
        for url in urls:
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(_NO_AUTOVACUUM)
                connection.execute("ANALYZE")
        empty, small, large = (stack.enter_context(psycopg.connect(url, autocommit=True)) for url in urls)
        before_outage = _snapshot(large)
        backlog.fill(urls[1], "benchmark", rows=_FEW_ROWS, keys=_FEW_ROWS)
        backlog.fill(urls[2], "benchmark", rows=rows)
        history, ahead = _cases(large)
        _compare(report, repeats, {
            "empty": _cases(empty)[0], "long_history": history, "one_row_a_lane": _cases(small)[1], "long_backlog": ahead,
        })  # fmt: skip
        first = replace(ahead, snapshot=before_outage)
        report.figures["first_poll_after_an_outage"] = _figures([_cost(first, calls=5) for _ in range(repeats)])
        report.figures["held_open_transaction"] = _held_open(urls[2], history, repeats)
        large.execute("ANALYZE fencepost.outbox")
        report.figures["long_history_fresh_statistics"] = _figures([_cost(history) for _ in range(repeats)])
        report.figures["long_backlog_fresh_statistics"] = _figures([_cost(ahead) for _ in range(repeats)])
    report.figures["rows"] = rows
    return report


def _cases(connection: "psycopg.Connection[Any]") -> tuple[Case, Case]:
    """Everything behind the cursors, which finds nothing; and everything ahead of them, of which one row a lane is taken."""
    last = dict(connection.execute(_LAST_IDS).fetchall())
    positions = [last.get(lane, 0) for lane in _LANES]
    behind = Case(connection=connection, positions=positions, snapshot=_snapshot(connection), row_limit=1_000, rows=0)
    return behind, replace(behind, positions=[0] * len(_LANES), row_limit=1, rows=len(_LANES))


def _compare(report: Report, repeats: int, cases: Mapping[str, Case]) -> None:
    found: dict[str, list[Cost]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, cost in _in_turn(cases).items():
            found[name].append(cost)
    report.figures.update({name: _figures(costs) for name, costs in found.items()})
    for ours, theirs in (("long_history", "empty"), ("long_backlog", "one_row_a_lane")):
        name = f"{ours}_vs_empty"
        report.ratios[name] = ratios([cost.ms for cost in found[ours]], [cost.ms for cost in found[theirs]])
        report.ratios[f"{name}_buffers"] = ratios(
            [float(cost.buffers) for cost in found[ours]], [float(cost.buffers) for cost in found[theirs]]
        )


def _held_open(url: str, history: Case, repeats: int) -> dict[str, float]:
    """The cursor's snapshot shows a transaction in progress that has written and will not end."""
    with psycopg.connect(url) as holder:
        holder.execute("SELECT fencepost.enqueue('benchmark', 'order.changed', 'key'::bytea, ''::bytea)")
        # Its row lies behind the position, so every poll asks for it.
        positions = [position + 100 for position in history.positions]
        waiting = replace(history, snapshot=_snapshot(history.connection), positions=positions)
        found = _figures([_cost(waiting) for _ in range(repeats)])
        holder.rollback()
    return found


def _snapshot(connection: "psycopg.Connection[Any]") -> str:
    row = connection.execute("SELECT pg_current_snapshot()::text").fetchone()
    assert row is not None
    return str(row[0])


def _cost(case: Case, calls: int = _CALLS) -> Cost:
    return _in_turn({"": case}, calls)[""]


def _in_turn(cases: Mapping[str, Case], calls: int = _CALLS) -> dict[str, Cost]:
    """Poll each case so often, one after the other, so that a slow moment of the machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for call in range(calls + _FIRST_CALLS):
        for name, case in cases.items():
            milliseconds = _poll_ms(case)
            if call >= _FIRST_CALLS:
                times[name].append(milliseconds)
    return {name: Cost(ms=median(times[name]), buffers=_buffers(case)) for name, case in cases.items()}


def _poll_ms(case: Case) -> float:
    began = time.perf_counter()
    found = case.connection.execute(_CALL.encode(), case.parameters(), prepare=True).fetchall()
    elapsed = time.perf_counter() - began
    if len(found) - 1 != case.rows:
        raise BenchmarkFailed(f"a poll returned {len(found) - 1} rows in place of {case.rows}")
    return elapsed * 1_000


def _buffers(case: Case) -> int:
    row = case.connection.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {_CALL}".encode(), case.parameters()).fetchone()
    assert row is not None
    return buffers_of(row[0][0]["Plan"])


def buffers_of(plan: Mapping[str, Any]) -> int:
    """Pages that a plan touched, those of a function's own statements included."""
    return int(plan.get("Shared Hit Blocks", 0)) + int(plan.get("Shared Read Blocks", 0))


def _figures(costs: Sequence[Cost]) -> dict[str, float]:
    return {"ms": median(cost.ms for cost in costs), "buffers": median(cost.buffers for cost in costs)}
