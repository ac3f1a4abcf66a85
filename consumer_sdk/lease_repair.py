"""The audited repair of stuck leases: the reaper's own statement, in batches. No row is moved in another way."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import asyncpg

from fencepost.console import Inspector
from fencepost.errors import ConfigurationError

__all__ = ["preview", "repair_leases"]

_BATCH: Final = 100
_BATCHES_MOST: Final = 1_000
_COUNTED_MOST: Final = 100_000
_FATES: Final = ("queued", "dead", "cancelled")


async def preview(inspector: Inspector, actor: str, reason: str, *, far_leases: bool) -> dict[str, int]:
    """What would come of how many jobs; counted up to 100,000. Raises what the repair would if this user may not repair."""
    await _rehearse(inspector, actor, reason)
    row = (await inspector.rows("reapable", _COUNTED_MOST, far_leases))[0]
    return {fate: row[fate] for fate in _FATES}


async def _rehearse(inspector: Inspector, actor: str, reason: str) -> None:
    """Every statement of the repair, on no job, and taken back: the database itself says who may."""
    transaction = inspector.connection.transaction()
    await transaction.start()
    try:
        with _as_owner():
            await inspector.rows("end_far_leases", 0)
            await inspector.rows("reap", 0)
            await inspector.rows("audit_repair", actor, reason, _detail([], []))
    finally:
        await transaction.rollback()


@contextmanager
def _as_owner() -> Iterator[None]:
    """Nobody is granted the right to move jobs: whoever repairs them does it as the owner, for this one command."""
    try:
        yield
    except ConfigurationError as error:
        if not isinstance(error.__cause__, asyncpg.InsufficientPrivilegeError):
            raise
        raise ConfigurationError(
            f"{error.__cause__}; run the repair as the role that owns the schema: --database-url postgresql://OWNER@…"
        ) from error


async def repair_leases(inspector: Inspector, actor: str, reason: str, *, far_leases: bool) -> dict[str, int]:
    """Reap until nothing is left, and say what came of how many jobs. Each batch is a transaction with its audit row.

    ``far_leases``: end leases first that reach further ahead than any worker's setting allows. Who holds one is fenced.
    """
    total: Counter[str] = Counter()
    for _ in range(_BATCHES_MOST):
        with _as_owner():
            ended, reaped = await _batch(inspector, actor, reason, far_leases=far_leases)
        if not ended and not reaped:
            break
        total += Counter(row["state"] for row in reaped)
    return {fate: total[fate] for fate in _FATES}


async def _batch(inspector: Inspector, actor: str, reason: str, *, far_leases: bool) -> tuple[Sequence[Any], Sequence[Any]]:
    """(far leases ended, jobs reaped)."""
    async with inspector.connection.transaction():
        ended = await inspector.rows("end_far_leases", _BATCH) if far_leases else []
        reaped = await inspector.rows("reap", _BATCH)
        if ended or reaped:
            await inspector.rows("audit_repair", actor, reason, _detail(ended, reaped))
    return ended, reaped


def _detail(ended: Sequence[Any], reaped: Sequence[Any]) -> str:
    jobs = [{"run_id": str(row["run_id"]), **{name: row[name] for name in ("tenant_id", "state", "reason")}} for row in reaped]
    return json.dumps({"far_leases_ended": [str(row["run_id"]) for row in ended], "jobs": jobs})
