"""What a claim costs, by what lies behind and ahead of it: the databases' claims are taken in turn, in one process.

Each claim finds the same few ready jobs. A claim commits, so its slowest ones are also the disk's.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any, Final

import psycopg

from benchmarks import backlog
from benchmarks.lab import Lab
from benchmarks.measure import percentile
from benchmarks.run_backlog import load_history

__all__ = ["claim_cost"]

_TENANTS: Final = 4
# What costs is how many tenants have future jobs only, so a part of the rows will do.
_MANY_TENANTS: Final = 1_000
_MANY_TENANTS_SHARE: Final = 10
_TABLES: Final = ("runs", "jobs", "run_events", "job_attempts")
_LONG: Final = ("long_history", "long_history_unanalysed", "many_tenants")

# By database and limit, in milliseconds.
_Times = Mapping[str, Mapping[str, Sequence[float]]]


def claim_cost(lab: Lab, *, repeats: int, history: int, claims: int) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Figures, and for each repeat the 99th percentile of all its claims against that with an empty history."""
    with ExitStack() as stack:
        urls = _databases(stack, lab, history)
        found: list[_Times] = []
        for _ in range(repeats):
            with lab.worker("claims", databases=urls, rounds=claims // 2) as worker:
                found.append(worker.run())
    figures = {
        name: {f"limit_{limit}_ms": _summary([repeat[name][limit] for repeat in found]) for limit in found[0][name]}
        for name in found[0]
    }
    return {"history_rows": history, **figures}, {f"{name}_vs_empty": _against_empty(found, name) for name in _LONG}


def _databases(stack: ExitStack, lab: Lab, history: int) -> dict[str, str]:
    """Statistics are those of empty tables and stay so, but in those that are analysed after the load."""
    empty, loaded, many = (stack.enter_context(lab.database()) for _ in range(3))
    for url in (empty, loaded, many):
        with psycopg.connect(url, autocommit=True) as connection:
            for table in _TABLES:
                connection.execute(f"ALTER TABLE fencepost.{table} SET (autovacuum_enabled = false)".encode())
            connection.execute("ANALYZE")
    load_history(loaded, history, tenants=_TENANTS)
    load_history(many, history // _MANY_TENANTS_SHARE, tenants=_MANY_TENANTS)
    unanalysed = stack.enter_context(lab.database(template=loaded))
    for url in (loaded, many):
        backlog.settle(url)
    return {"empty": empty, "long_history": loaded, "long_history_unanalysed": unanalysed, "many_tenants": many}


def _summary(repeats: Sequence[Sequence[float]]) -> dict[str, float]:
    return {
        "p50": median(percentile(times, 0.5) for times in repeats),
        "p99": median(percentile(times, 0.99) for times in repeats),
    }


def _against_empty(found: Sequence[_Times], name: str) -> list[float]:
    return [_p99(repeat[name]) / _p99(repeat["empty"]) for repeat in found]


def _p99(times: Mapping[str, Sequence[float]]) -> float:
    return percentile([one for limit in times.values() for one in limit], 0.99)
