"""The audited repair of stuck leases: the reaper's own statement, in batches. No row is moved in another way."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from fencepost.console import Inspector

__all__ = ["preview", "repair_leases"]

_BATCH: Final = 100
_BATCHES_MOST: Final = 1_000
_COUNTED_MOST: Final = 100_000
_FATES: Final = ("queued", "dead", "cancelled")


async def preview(inspector: Inspector, *, far_leases: bool) -> dict[str, int]:
    """What would come of how many jobs; counted up to 100,000."""
    row = (await inspector.rows("reapable", _COUNTED_MOST, far_leases))[0]
    return {fate: row[fate] for fate in _FATES}


async def repair_leases(inspector: Inspector, actor: str, reason: str, *, far_leases: bool) -> dict[str, int]:
    """Reap until nothing is left, and say what came of how many jobs. Each batch is a transaction with its audit row.

    ``far_leases``: end leases first that reach further ahead than any worker's setting allows. Who holds one is fenced.
    """
    total: Counter[str] = Counter()
    for _ in range(_BATCHES_MOST):
        async with inspector.connection.transaction():
            ended = await inspector.rows("end_far_leases", _BATCH) if far_leases else []
            reaped = await inspector.rows("reap", _BATCH)
            if not ended and not reaped:
                break
            await inspector.rows("audit_repair", actor, reason, _detail(ended, reaped))
        total += Counter(row["state"] for row in reaped)
    return {fate: total[fate] for fate in _FATES}


def _detail(ended: Sequence[Any], reaped: Sequence[Any]) -> str:
    jobs = [{"run_id": str(row["run_id"]), **{name: row[name] for name in ("tenant_id", "state", "reason")}} for row in reaped]
    return json.dumps({"far_leases_ended": [str(row["run_id"]) for row in ended], "jobs": jobs})
