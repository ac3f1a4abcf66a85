"""Investigation: two workers completed one run. Whether the database let more than one generation write."""

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

from consumer_sdk.finding import SHOWN, Finding, violations
from fencepost.console import Inspector

__all__ = ["double_completion"]

_EVIDENCE: Final = (
    "keep the rows as they are, stop the writer that is not a worker's statement, and see docs/runbooks/double-completion.md"
)
# statement -> what holds, what is broken.
_RULES: Final = {
    "terminal_events": (
        "a run has one terminal event, of its state, exactly when it has ended",
        "runs whose terminal events do not fit their state",
    ),
    "event_gaps": ("every run's events are numbered without a gap", "runs with a gap in their events"),
    "completions": ("a completed job has one completed attempt, under its last generation", "jobs whose completions do not fit"),
    "fences": ("every ending was written under the job's last generation", "endings written under another generation"),
    "alignment": ("states of run and job fit", "runs whose job is in another state"),
    "late_writes": (
        "no attempt wrote after a later generation was claimed",
        "attempts that wrote late, or stand open without a lease",
    ),
}


async def double_completion(inspector: Inspector, first: UUID, last: UUID, tenant: str | None) -> list[Finding]:
    """The findings on runs with ids from ``first`` to ``last``."""
    bounds = (first, last, tenant, SHOWN)
    findings = [await _guards(inspector)]
    for look, (holds, broken) in _RULES.items():
        findings.append(
            violations(look.replace("_", " "), await inspector.rows(look, *bounds), holds=holds, broken=broken, do=_EVIDENCE)
        )
    return [
        *findings,
        _contested(await inspector.rows("contested", *bounds)),
        _losing(await inspector.rows("losing_workers", *bounds)),
    ]


async def _guards(inspector: Inspector) -> Finding:
    return violations(
        "guards", await inspector.rows("missing_guards"),
        holds="the constraints and indexes that refuse a second ending are in force",
        broken="constraints or indexes that are missing or not valid", do="restore them as the migrations made them",
    )  # fmt: skip


def _contested(rows: Sequence[Any]) -> Finding:
    says = (
        f"runs that several generations held, the most contested first: {len(rows)}"
        if rows
        else "no run was held under more than one generation"
    )
    return Finding(look="generations", verdict="ok", says=says, rows=[dict(row) for row in rows])


def _losing(rows: Sequence[Any]) -> Finding:
    if not rows:
        return Finding(look="lost leases", verdict="ok", says="no worker lost a lease")
    return Finding(
        look="lost leases", verdict="warn", rows=[dict(row) for row in rows],
        says="workers lost leases; a handler may have gone on for a while, and what it did outside the database is not fenced",
        next="a worker that loses often is starved, frozen or cut off: look at its CPU, its pauses and its lease seconds",
    )  # fmt: skip
