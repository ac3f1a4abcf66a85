"""What the demo counts, and how: what the writers did against what a consumer read. Pure.

Nothing is taken from the relay's own word. An event counts as published where the consumer read it with the key and the
version that it was written with; whatever else the consumer read was not committed by anybody.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

__all__ = ["Audit", "Commit", "Event", "Reading", "Window", "audit", "latencies_ms", "percentile", "summary_ms"]

_MS: Final = 1_000


class Event(NamedTuple):
    """One fact: ``version`` counts the committed events of ``key`` from 1, in the order in which its row was locked."""

    event_id: str
    key: str
    version: int


class Commit(NamedTuple):
    """An event whose transaction committed; ``committed_at`` is when the writer learned of it, in Unix seconds."""

    event: Event
    committed_at: float


class Reading(NamedTuple):
    """A record as the consumer read it. Readings are kept in the order of each partition's offsets."""

    event: Event
    received_at: float


class Window(NamedTuple):
    """Commits from ``begin`` until before ``end``, in Unix seconds."""

    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Numbers of events, but for ``duplicates``: records beyond the first of an event."""

    committed: int
    published: int
    lost: int
    rolled_back: int
    rolled_back_published: int
    out_of_order: int
    duplicates: int

    @property
    def kept(self) -> bool:
        """Whether the three promises held. Duplicates break none: delivery is at least once."""
        return not (self.lost or self.rolled_back_published or self.out_of_order)


def audit(commits: Sequence[Commit], rolled_back: Collection[Event], readings: Sequence[Reading]) -> Audit:
    """Compare. Raises ``ValueError`` if the writers' own books contradict each other."""
    committed = {commit.event for commit in commits}
    if len(committed) != len(commits) or not committed.isdisjoint(rolled_back):
        raise ValueError("the writers recorded an event twice, or as committed and as rolled back")
    appearances = first_appearances(reading.event for reading in readings)
    published = committed & set(appearances)
    return Audit(
        committed=len(committed),
        published=len(published),
        lost=len(committed) - len(published),
        rolled_back=len(rolled_back),
        # Whatever nobody committed, also if no writer remembers it at all.
        rolled_back_published=len(appearances) - len(published),
        out_of_order=out_of_order(appearances),
        duplicates=len(readings) - len(appearances),
    )


def first_appearances(events: Iterable[Event]) -> list[Event]:
    """Each event once, where it came first."""
    return list(dict.fromkeys(events))


def out_of_order(appearances: Iterable[Event]) -> int:
    """How many events came after one of their key with the same or a higher version."""
    newest: Counter[str] = Counter()
    late = 0
    for event in appearances:
        late += event.version <= newest[event.key]
        newest[event.key] = max(newest[event.key], event.version)
    return late


def latencies_ms(commits: Iterable[Commit], received_at: Mapping[Event, float], window: Window) -> list[float]:
    """Commit to first reading, in milliseconds, of what was committed within the window and read at all."""
    return [
        max(0.0, received_at[event] - committed_at) * _MS
        for event, committed_at in commits
        if window.begin <= committed_at < window.end and event in received_at
    ]


def summary_ms(latencies: Sequence[float]) -> dict[str, float | None]:
    """Median and 99th percentile, rounded; None of nothing."""
    return {"p50": percentile(latencies, 0.5), "p99": percentile(latencies, 0.99)}


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile, rounded to hundredths; None of nothing."""
    if not values:
        return None
    return round(sorted(values)[max(0, math.ceil(share * len(values)) - 1)], 2)
