"""The arithmetic of the benchmarks. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

__all__ = [
    "Mark",
    "delays_ms",
    "each_us",
    "growth",
    "known_median",
    "median_and_range",
    "percentile",
    "rate_between_marks",
    "ratios",
    "rounded",
    "spread",
    "summary_ms",
]

_MICRO = 1_000_000


class Mark(NamedTuple):
    """So many rows were marked delivered at this moment, in Unix seconds."""

    at: float
    rows: int


def rate_between_marks(marks: Iterable[Mark]) -> float:
    """Rows a second between the first mark and the last, so that no side's start and first batch count."""
    ordered = sorted(marks)
    if len(ordered) < 2 or ordered[-1].at <= ordered[0].at:
        raise ValueError("a rate needs marks at two moments; take more rows")
    first = ordered[0].at
    return sum(mark.rows for mark in ordered if mark.at > first) / (ordered[-1].at - first)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Each repeat against the baseline of the same repeat."""
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def each_us(before: float | None, after: float | None, count: int) -> float | None:
    """Microseconds of CPU for each of ``count``, from two readings in seconds; None where they cannot be read."""
    return None if before is None or after is None else (after - before) / count * _MICRO


def known_median(values: Iterable[float | None]) -> float | None:
    """The median of what could be measured; None if nothing could."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def median_and_range(name: str, values: Sequence[float]) -> dict[str, float]:
    """The median under ``name``, and beside it the least and the most."""
    return {name: median(values), f"{name}_least": min(values), f"{name}_most": max(values)}


def growth(with_it: float, without: float) -> float:
    """By how much something grew: 0.05 is 5 % more."""
    return with_it / without - 1


def spread(values: Sequence[float]) -> dict[str, float]:
    """Least, middle and greatest of the repeats."""
    return {"min": rounded(min(values)), "median": rounded(median(values)), "max": rounded(max(values))}


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def summary_ms(delays: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and number of delays in milliseconds."""
    return {"p50": rounded(percentile(delays, 0.5)), "p99": rounded(percentile(delays, 0.99)), "count": len(delays)}


def delays_ms(began: Mapping[str, float], ended: Mapping[str, float]) -> list[float]:
    """From beginning to end of each id, in milliseconds. Raises ``ValueError`` for an id without an end."""
    if missing := len(began.keys() - ended.keys()):
        raise ValueError(f"{missing} of {len(began)} messages never reached the consumer")
    return [(ended[name] - at) * 1_000 for name, at in began.items()]


def rounded(value: float) -> float:
    """Three significant digits, or whole numbers from 1,000 on."""
    if value == 0 or not math.isfinite(value):
        return value
    digits = 2 - math.floor(math.log10(abs(value)))
    return round(value, max(digits, 0))
