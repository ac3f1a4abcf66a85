"""Investigation: one intent was executed twice. Which runs are alike, what their keys were, and what kept them apart."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import groupby, pairwise
from typing import Any, Final
from uuid import UUID

from consumer_sdk.finding import SHOWN, Finding, violations
from fencepost.console import Inspector, seconds

__all__ = ["duplicates", "why_apart"]

_RUNS_LOOKED_AT: Final = 200_000
_RUNS_SHOWN: Final = 100
_TOMBSTONES_MOST: Final = 1_000
_Row = Mapping[str, Any]


async def duplicates(
    inspector: Inspector, tenant: str, first: UUID, last: UUID, since: datetime, only: UUID | None
) -> list[Finding]:
    """The findings on a tenant's runs with ids from ``first`` to ``last``, or on those like the run ``only``."""
    twins = await inspector.rows("twins", tenant, first, last, _RUNS_LOOKED_AT, SHOWN, _RUNS_SHOWN, only)
    replays = await inspector.rows("replays", tenant, [row["run_id"] for row in twins])
    tombstones = (await inspector.rows("tombstones", tenant, since, _TOMBSTONES_MOST))[0]["tombstones"]
    return [
        _alike(twins),
        _keys(twins),
        violations(
            "one transaction", await inspector.rows("acceptances", tenant, first, last, SHOWN),
            holds="run, first event, job and key of every run were written together",
            broken="runs whose facts were not written together",
            do="find who writes these tables besides fencepost.accept; after a restore, transactions do not compare",
        ),
        _attempts(twins),
        _replays(replays),
        _policies(await inspector.rows("key_policies", tenant, first, last), tombstones),
    ]  # fmt: skip


def _groups(twins: Sequence[_Row]) -> list[list[_Row]]:
    return [list(rows) for _, rows in groupby(twins, key=lambda row: (row["workflow"], row["input"]))]


def _alike(twins: Sequence[_Row]) -> Finding:
    if not twins:
        return Finding(look="identical inputs", verdict="ok", says="no two runs of one workflow have the same input")
    rows = []
    for group in _groups(twins):
        earlier = [None, *(row["created_at"] for row in group)]
        rows += [_member(row, before) for row, before in zip(group, earlier, strict=False)]
    return Finding(
        look="identical inputs", verdict="warn", rows=rows,
        says=f"runs that share their input with another: {len(twins)}, in groups: {len(_groups(twins))}",
        next="ask what each run did outside (its provider's ids) before any of them is compensated",
    )  # fmt: skip


def _member(row: _Row, before: datetime | None) -> dict[str, Any]:
    after = (row["created_at"] - before).total_seconds() if before else None
    return {
        "run_id": row["run_id"], "input": row["input"], "workflow": row["workflow"], "state": row["state"],
        "after_seconds": after,
    }  # fmt: skip


def _keys(twins: Sequence[_Row]) -> Finding:
    if not twins:
        return Finding(look="keys", verdict="ok", says="nothing to compare")
    rows = [
        {
            "run_id": row["run_id"], "key": _key(row),
            "fingerprint": row["fingerprint"], "profile": row["profile"], "schema": row["schema_version"],
        }
        for row in twins
    ]  # fmt: skip
    reasons = dict.fromkeys(f"input {group[0]['input']}: {why_apart(group)}" for group in _groups(twins))
    return Finding(look="keys", verdict="warn", says="why the keys did not join these runs", rows=rows, next="\n".join(reasons))


def _key(row: _Row) -> str:
    if row["replay_of"] is not None:
        return "replay"
    return f"v{row['key_version']}" if row["key_version"] else "none"


def why_apart(group: Sequence[_Row]) -> str:
    """Why runs of one input were not taken for one intent, from what their keys were."""
    roots = [row for row in group if row["replay_of"] is None]
    keyed = [row for row in roots if row["key_version"] is not None]
    if not keyed:
        return "none has a key; without one every call is an intent of its own, or the keys are past their retention"
    if len(keyed) < len(roots):
        return "some have no key: a caller that sends none, or a key whose retention ended before the retry came"
    same_form = len({(row["key_version"], row["profile"]) for row in keyed}) == 1
    if not same_form:
        return "keyed under different versions or profiles: compare the rotation's phases and the releases that ran"
    if len({row["schema_version"] for row in keyed}) > 1:
        return "accepted under different schema versions of the command: a retry across a deploy took a new key"
    if len({row["fingerprint"] for row in keyed}) > 1:
        return "different keys and different fingerprints: another scope, operation or set of fields; look at the caller's scope"
    gap = min((later["created_at"] - row["created_at"]).total_seconds() for row, later in pairwise(keyed))
    return f"one request under different keys, {seconds(gap)} apart: a retry that made a new key, or two wishes of one kind"


def _attempts(twins: Sequence[_Row]) -> Finding:
    rows = [
        {"run_id": row["run_id"], "attempts": row["attempts"], "generations": row["lease_generation"], "lost": row["lost"]}
        for row in twins if row["lease_generation"] > 1
    ]  # fmt: skip
    if not rows:
        return Finding(look="attempts", verdict="ok", says="none of these runs was executed more than once")
    return Finding(
        look="attempts", verdict="warn", rows=rows, says="these runs were executed more than once each",
        next="each attempt must name the same operation at its provider; a lost one may have acted before it was fenced",
    )  # fmt: skip


def _replays(rows: Sequence[Any]) -> Finding:
    if not rows:
        return Finding(look="replays", verdict="ok", says="no operator ran one of them anew")
    return Finding(look="replays", verdict="warn", says="operators ran these anew", rows=[dict(row) for row in rows],
                   next="ask whether the first run had acted before it died")  # fmt: skip


def _policies(rows: Sequence[Any], tombstones: int) -> Finding:
    more = f"{tombstones} or more" if tombstones >= _TOMBSTONES_MOST else tombstones
    says = f"key versions, profiles and schema versions in use; {more} keys of the window are past their retention (tombstones)"
    several = len({(row["key_version"], row["profile"]) for row in rows}) > 1
    return Finding(
        look="key policies", verdict="warn" if several else "ok", says=says, rows=[dict(row) for row in rows],
        next="several versions or profiles are in use: expected during a rotation only" if several else "",
    )  # fmt: skip
