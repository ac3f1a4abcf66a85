"""Investigation: jobs remain leased for ever. What keeps claims and the reaper from them."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from consumer_sdk.finding import SHOWN, Finding, violations
from fencepost.console import Inspector, seconds

__all__ = ["clock_finding", "plan_finding", "stuck_leases", "vacuum_finding"]

_COUNTED_MOST: Final = 100_000
_READY_MOST: Final = 10_000
_WORKFLOWS_MOST: Final = 100
_REPAIR: Final = "start or mend the workers, whose reaper ends these; meanwhile `fencepost diagnose stuck-leases --repair`"
_IDLE_SECONDS: Final = 60.0
_CLOCK_SECONDS: Final = 5.0
_ROWS_FOR_AN_INDEX: Final = 10_000


async def stuck_leases(inspector: Inspector, *, unserved_seconds: float) -> list[Finding]:
    """The findings, from the clock to the vacuum. ``unserved_seconds``: how long a ready job may wait for the first worker."""
    kept = await inspector.rows("vacuum")
    return [
        clock_finding((await inspector.rows("clock"))[0]["at"], datetime.now(UTC)),
        _expiry((await inspector.rows("lease_expiry", _COUNTED_MOST))[0]),
        _expired(await inspector.rows("expired_leases", SHOWN)),
        violations(
            "far leases", await inspector.rows("far_leases", SHOWN), holds="no lease reaches further than a day",
            broken="leases that reach further than a day",
            do="a mistake of unit (ms for s) or time zone: look at the lease settings and at who writes this table",
        ),
        *await _backlog(inspector, unserved_seconds),
        violations(
            "deadlines", await inspector.rows("overdue", SHOWN), holds="no job is past its deadline",
            broken="jobs past their deadline that have not ended", do=_REPAIR,
        ),
        _transactions(await inspector.rows("long_transactions", SHOWN)),
        _waiters(await inspector.rows("lock_waiters", SHOWN)),
        violations(
            "indexes", await inspector.rows("broken_indexes"), holds="the claim's indexes are there and valid",
            broken="indexes missing or invalid", do="REINDEX INDEX CONCURRENTLY, or make them as the migrations did",
        ),
        plan_finding((await inspector.rows("claim_plan"))[0][0], kept[0]["live_rows"] if kept else 0),
        vacuum_finding(kept),
    ]  # fmt: skip


def clock_finding(database: datetime, here: datetime) -> Finding:
    """How far the two clocks are apart."""
    apart = abs((here - database).total_seconds())
    says = (
        f"the database says {database:%Y-%m-%d %H:%M:%S} UTC, {seconds(apart)} from this machine; leases know only the database's"
    )
    if apart < _CLOCK_SECONDS:
        return Finding(look="clock", verdict="ok", says=says)
    return Finding(
        look="clock", verdict="warn", says=says, urgent=True,
        next="find out which clock is wrong; a step of the database's moves every lease",
    )  # fmt: skip


def _expiry(row: Mapping[str, Any]) -> Finding:
    if not row["leased"]:
        return Finding(look="lease expiry", verdict="ok", says="no job is leased")
    return Finding(look="lease expiry", verdict="ok", says=f"leased jobs: {row['leased']}", rows=[dict(row)])


def _expired(rows: Sequence[Any]) -> Finding:
    return violations(
        "expired leases", rows, holds="no lease ran out more than a minute ago", do=_REPAIR,
        broken="leases that ran out more than a minute ago and that nobody took",
    )  # fmt: skip


async def _backlog(inspector: Inspector, unserved_seconds: float) -> list[Finding]:
    rows = [dict(row) for row in await inspector.rows("backlog", _WORKFLOWS_MOST, _READY_MOST)]
    suspects = [row for row in rows if not row["leased"] and row["oldest_seconds"] > unserved_seconds]
    return [_waiting(rows), await _unserved(inspector, suspects, unserved_seconds)]


def _waiting(rows: Sequence[Mapping[str, Any]]) -> Finding:
    if all(row["oldest_seconds"] <= _IDLE_SECONDS for row in rows):
        return Finding(look="ready jobs", verdict="ok", says="no ready job waits for more than a minute", rows=rows)
    return Finding(
        look="ready jobs", verdict="warn", rows=rows, says="ready jobs wait for more than a minute", urgent=True,
        next="more workers, or more concurrency; for a workflow without any worker see the next look",
    )  # fmt: skip


async def _unserved(inspector: Inspector, suspects: Sequence[Mapping[str, Any]], unserved_seconds: float) -> Finding:
    names, waits = [row["workflow"] for row in suspects], [row["oldest_seconds"] for row in suspects]
    served = {row["workflow"] for row in await inspector.rows("served", names, waits)} if names else set()
    return violations(
        "unserved workflows", [{"workflow": name} for name in names if name not in served],
        holds=f"no workflow's ready job has waited for more than {seconds(unserved_seconds)} without a lease or a claim since",
        broken=f"workflows with a job ready for more than {seconds(unserved_seconds)}, no lease, and no claim since",
        do="deploy a worker with a handler registered under this very name",
    )  # fmt: skip


def _transactions(rows: Sequence[Any]) -> Finding:
    if not rows:
        return Finding(look="long transactions", verdict="ok", says="no transaction is older than a minute")
    return Finding(
        look="long transactions", verdict="warn", rows=[dict(row) for row in rows], says="transactions older than a minute",
        urgent=any(row["touches_jobs"] for row in rows),
        next="one that touches jobs may hold rows that claim and reaper then skip; end it: SELECT pg_terminate_backend(pid)",
    )  # fmt: skip


def _waiters(rows: Sequence[Any]) -> Finding:
    if not rows:
        return Finding(look="lock waiters", verdict="ok", says="nobody waits for a lock at the jobs table")
    return Finding(
        look="lock waiters", verdict="warn", rows=[dict(row) for row in rows], says="sessions wait for a lock at the jobs table",
        next="look at the one who blocks, not at the ones who wait",
    )  # fmt: skip


def plan_finding(explained: str, table_rows: int) -> Finding:
    """How the planner would look for expired leases: in a table of some size, by the index."""
    node = json.loads(explained)[0]["Plan"]
    nodes = [node, *_below(node)]
    scan = next((found for found in nodes if found.get("Relation Name") == "jobs"), node)
    how = scan["Node Type"] + (f" on {scan['Index Name']}" if "Index Name" in scan else "")
    if scan["Node Type"] == "Seq Scan" and table_rows > _ROWS_FOR_AN_INDEX:
        return Finding(
            look="claim plan",
            verdict="fail",
            says=f"expired leases are looked for by {how}",
            next="ANALYZE fencepost.jobs; then the indexes",
        )
    return Finding(look="claim plan", verdict="ok", says=f"expired leases are found by {how}")


def _below(node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [found for child in node.get("Plans", ()) for found in (child, *_below(child))]


def vacuum_finding(rows: Sequence[Any]) -> Finding:
    """Whether dead rows of the jobs table are cleared away; no row: nobody counts them."""
    if not rows:
        return Finding(
            look="vacuum", verdict="warn", says="the server keeps no statistics of the jobs table", next="set track_counts = on"
        )
    row = dict(rows[0])
    if not row["enabled"]:
        return Finding(look="vacuum", verdict="fail", says="autovacuum is off for the jobs table", rows=[row], next="turn it on")
    if row["dead_rows"] > 50_000 + row["live_rows"]:
        return Finding(look="vacuum", verdict="warn", says="more dead rows than live ones", rows=[row],
                       next="a long transaction holds vacuum back, or it is throttled: VACUUM fencepost.jobs")  # fmt: skip
    return Finding(look="vacuum", verdict="ok", says="autovacuum keeps up", rows=[row])
