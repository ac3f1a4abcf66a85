"""How fast one consumer process handles messages, in batches, one by one and once more; and how large it grows.

A topic is filled beforehand by a relay, each repeat has a new database and a new group, and the sides of a repeat take turns in one
run. A message that is left out or handled twice fails the benchmark.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import psycopg

from benchmarks import backlog
from benchmarks.consuming import Consumed, consume, peak_mib
from benchmarks.lab import Lab
from benchmarks.measure import known_median, median_and_range, ratios
from benchmarks.message_backlog import filled_topic, set_back
from benchmarks.meter import Meter
from benchmarks.order_messages import SCHEMA
from benchmarks.report import Report
from benchmarks.statement_count import StatementCount

__all__ = ["consumer"]

_SMALL_BYTES: Final = 200
_LARGE_BYTES: Final = 1_000_000
# One by one takes so much longer that a part of the messages takes as long.
_ONE_BY_ONE_SHARE: Final = 5
_MICRO: Final = 1_000_000


@dataclass(kw_only=True)
class _Repeat:
    """The sides of one repeat, which saw the machine in the same minute."""

    batched: Consumed
    redelivery: Consumed
    one_by_one: Consumed
    by_hand: Consumed
    bare: Consumed
    bare_pooled: Consumed
    bare_domain_only: Consumed


def consumer(lab: Lab, *, repeats: int, rows: int, large_rows: int, seconds: float, concurrency: int) -> Report:
    """What ``one_by_one`` is compared with has the same concurrency."""
    fewer = rows // _ONE_BY_ONE_SHARE
    many, few = (filled_topic(lab, rows=count, payload_bytes=_SMALL_BYTES) for count in (rows, fewer))
    with lab.database() as template:
        with psycopg.connect(template, autocommit=True) as connection:
            connection.execute(SCHEMA)
        backlog.settle(template)
        sides = _Sides(lab, template, many=(many, rows), few=(few, fewer), seconds=seconds, concurrency=concurrency)
        found = [sides.repeat(backwards=bool(number % 2)) for number in range(repeats)]
        memory = {
            f"payload_{size}_bytes": _peak(lab, template, topic, seconds)
            for size, topic in (
                (_SMALL_BYTES, many),
                (_LARGE_BYTES, filled_topic(lab, rows=large_rows, payload_bytes=_LARGE_BYTES)),
            )
        }
    report = Report(benchmark="consumer", machine=lab.machine())
    report.figures = {"rows": rows, "concurrency": concurrency}
    by_side = {side: [getattr(one, side) for one in found] for side in _Repeat.__annotations__}
    report.figures |= {side: _figures(consumed) for side, consumed in by_side.items()} | {"memory": memory}
    rates = {side: [one.rate for one in consumed] for side, consumed in by_side.items()}
    report.ratios = {
        "one_by_one_vs_bare_commits": ratios(rates["one_by_one"], rates["bare"]),
        "one_by_one_vs_pooled_commits": ratios(rates["one_by_one"], rates["bare_pooled"]),
        "one_by_one_vs_by_hand": ratios(rates["one_by_one"], rates["by_hand"]),
        "batched_vs_one_by_one": ratios(rates["batched"], rates["one_by_one"]),
        "redelivery_vs_first": ratios(rates["redelivery"], rates["batched"]),
    }
    return report


class _Sides:
    """Each side with a database and a group of its own; the redelivery comes after the batches, in theirs."""

    def __init__(
        self, lab: Lab, template: str, *, many: tuple[str, int], few: tuple[str, int], seconds: float, concurrency: int
    ) -> None:
        self._lab = lab
        self._template = template
        self._many = many
        self._few = few
        self._seconds = seconds
        self._concurrency = concurrency

    def repeat(self, *, backwards: bool) -> _Repeat:
        """Every second repeat runs in the opposite order."""
        parts = [self._batched, self._one_by_one, self._bare, self._by_hand]
        found: dict[str, Consumed] = {}
        for part in reversed(parts) if backwards else parts:
            found |= part()
        return _Repeat(**found)

    def _batched(self) -> dict[str, Consumed]:
        (topic, rows), group = self._many, _group()
        with self._lab.database(self._template) as url:
            first = consume(self._lab, url, topic, rows=rows, handlers="batched", group=group)
            set_back(self._lab, group=group, topic=topic)
            backlog.settle(url)
            again = consume(self._lab, url, topic, rows=rows, handlers="batched", group=group, outcome="duplicate")
        return {"batched": first, "redelivery": again}

    def _one_by_one(self) -> dict[str, Consumed]:
        topic, rows = self._few
        with self._lab.database(self._template) as url:
            consumed = consume(
                self._lab, url, topic, rows=rows, handlers="one_by_one", group=_group(), consumer_concurrency=self._concurrency
            )
        return {"one_by_one": consumed}

    def _by_hand(self) -> dict[str, Consumed]:
        topic, rows = self._few
        given = {"topic": topic, "group": _group(), "rows": rows, "connections": self._concurrency}
        with (
            self._lab.database(self._template) as url,
            psycopg.connect(url, autocommit=True) as connection,
            self._lab.worker("by_hand", database_url=url, **given) as worker,
        ):
            statements, meter = StatementCount(connection), Meter(self._lab, connection)
            done = worker.run()
            counted, spent = statements.each(rows), meter.each(rows)
        consumer_us = done["cpu_seconds"] / rows * _MICRO
        return {"by_hand": Consumed(rate=rows / done["seconds"], consumer_us=consumer_us, statements=counted, **spent)}

    def _bare(self) -> dict[str, Consumed]:
        return {
            "bare": self._commits(),
            "bare_pooled": self._commits(pooled=True),
            "bare_domain_only": self._commits(inbox=False),
        }

    def _commits(self, *, inbox: bool = True, pooled: bool = False) -> Consumed:
        given = {"connections": self._concurrency, "inbox": inbox, "pooled": pooled, "seconds": self._seconds}
        with (
            self._lab.database(self._template) as url,
            psycopg.connect(url, autocommit=True) as connection,
            self._lab.worker("bare_commits", database_url=url, **given) as worker,
        ):
            statements, meter = StatementCount(connection), Meter(self._lab, connection)
            done = worker.run()
            commits = done["all_commits"]
            counted, spent = statements.each(commits), meter.each(commits)
        return Consumed(
            rate=done["commits"] / self._seconds,
            consumer_us=done["cpu_seconds"] / commits * _MICRO,
            statements=counted,
            **spent | {"kafka_us": None},
        )


def _group() -> str:
    return f"bench-{uuid.uuid4().hex[:8]}"


def _peak(lab: Lab, template: str, topic: str, seconds: float) -> dict[str, Any]:
    with lab.database(template) as url:
        return peak_mib(lab, url, topic, group=_group(), seconds=seconds)


def _figures(consumed: Sequence[Consumed]) -> dict[str, float | None]:
    return {
        **median_and_range("messages_per_second", [one.rate for one in consumed]),
        "consumer_cpu_us_per_message": median(one.consumer_us for one in consumed),
        "database_cpu_us_per_message": known_median(one.postgres_us for one in consumed),
        "kafka_cpu_us_per_message": known_median(one.kafka_us for one in consumed),
        "statements_per_message": known_median(one.statements for one in consumed),
        "wal_bytes_per_message": median(one.wal_bytes for one in consumed),
    }
