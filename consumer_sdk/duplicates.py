"""Investigation: one intent was executed twice. Which runs are alike, what kept their keys apart, and which ran more than once."""

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
_EFFECTS_SHOWN: Final = 100
_KIN_MOST: Final = 1_000
_KEY_CHARACTERS: Final = 11
_TOMBSTONES_MOST: Final = 1_000
_Row = Mapping[str, Any]


async def duplicates(
    inspector: Inspector, tenant: str, first: UUID, last: UUID, since: datetime, only: UUID | None
) -> list[Finding]:
    """The findings on a tenant's runs from ``first`` to ``last``, or on the run ``only``, its lineage and those like it."""
    twins = await inspector.rows("twins", tenant, first, last, _RUNS_LOOKED_AT, SHOWN, _RUNS_SHOWN, only)
    kin = await inspector.rows("lineages", tenant, [only, *_ids(twins)], _KIN_MOST) if only else []
    bounds = (tenant, min(_ids(kin)), max(_ids(kin)), _ids(kin)) if kin else (tenant, first, last, None)
    again = await inspector.rows("executed_again", *bounds, _RUNS_SHOWN)
    replays = await inspector.rows("replays", *bounds, _RUNS_SHOWN)
    suspects = list(dict.fromkeys(str(row["root_run_id"]) for row in (*kin, *twins, *again, *replays)))
    effects = await inspector.rows("effects_of", tenant, suspects, None, _EFFECTS_SHOWN)
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
        _attempts(again),
        _effects(effects, suspects),
        _replays(replays),
        _policies(await inspector.rows("key_policies", tenant, first, last), tombstones),
    ]  # fmt: skip


def _ids(rows: Sequence[_Row]) -> list[UUID]:
    return [row["run_id"] for row in rows]


def _groups(twins: Sequence[_Row]) -> list[list[_Row]]:
    return [list(rows) for _, rows in groupby(twins, key=lambda row: (row["workflow"], row["input"]))]


def _alike(twins: Sequence[_Row]) -> Finding:
    if not twins:
        return Finding(
            look="identical inputs", verdict="ok", says="no run looked at has the input of one of another lineage, in its workflow"
        )
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
        "run_id": row["run_id"], "accepted_at": row["created_at"], "after_seconds": after, "state": row["state"],
        "input": row["input"],
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
    groups = ((group[0], why_apart(group)) for group in _groups(twins))
    reasons = [f"input {first['input']} of {first['workflow']}: {why}" for first, why in groups]
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


def _attempts(again: Sequence[_Row]) -> Finding:
    if not again:
        return Finding(look="attempts", verdict="ok", says="no run looked at was executed more than once")
    rows = [{name: row[name] for name in ("run_id", "attempts", "generations", "lost")} for row in again]
    return Finding(
        look="attempts", verdict="warn", rows=rows, says=f"runs that were executed more than once: {_count(again)}",
        next="each attempt must name the same operation at its provider; a lost one may have acted before it was fenced",
    )  # fmt: skip


def _count(rows: Sequence[_Row]) -> str:
    return f"{len(rows)} or more, the newest first" if len(rows) >= _RUNS_SHOWN else str(len(rows))


def _effects(found: Sequence[_Row], suspects: Sequence[str]) -> Finding:
    if not suspects:
        return Finding(look="effects", verdict="ok", says="no run stands out, so the ledger was not asked about any")
    if not found:
        return Finding(look="effects", verdict="ok", says="the ledger holds no outside effect of the runs that it was asked about")
    rows = [
        {
            "run_key": row["run_key"], "operation": row["operation"], "state": row["state"], "sends": row["sends"],
            "provider_key": row["provider_key"][:_KEY_CHARACTERS],
        }
        for row in found
    ]  # fmt: skip
    return Finding(
        look="effects", verdict="warn", rows=rows, says="what these runs did outside, as far as the ledger was asked",
        next="look each provider key up at the provider: `fencepost effects show` has them whole",
    )  # fmt: skip


def _replays(found: Sequence[_Row]) -> Finding:
    if not found:
        return Finding(look="replays", verdict="ok", says="no run looked at was run anew by an operator")
    rows = [{name: row[name] for name in ("run_id", "actor", "reason", "replay_of")} for row in found]
    return Finding(
        look="replays", verdict="warn", rows=rows, says=f"runs that operators ran anew: {_count(found)}",
        next="ask whether the first run had acted before it died",
    )  # fmt: skip


def _policies(rows: Sequence[Any], tombstones: int) -> Finding:
    more = f"{tombstones} or more" if tombstones >= _TOMBSTONES_MOST else tombstones
    says = f"key versions, profiles and schema versions in use; {more} keys of the window are past their retention (tombstones)"
    several = len({(row["key_version"], row["profile"]) for row in rows}) > 1
    return Finding(
        look="key policies", verdict="warn" if several else "ok", says=says, rows=[dict(row) for row in rows],
        next="several versions or profiles are in use: expected during a rotation only" if several else "",
    )  # fmt: skip
