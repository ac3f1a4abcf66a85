"""A lane while this relay holds it: lease, planned cursor, the batch polled ahead, the batch in flight. State only."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fencepost.clock import lease_clock
from fencepost.errors import TransientError
from relay.cursor import Batch, Cursor, Row

__all__ = ["Flight", "Lane", "Receipt", "Stopped", "TopicUnavailable"]

Offsets = dict[str, dict[int, tuple[int, int]]]


class TopicUnavailable(TransientError):
    """The topic does not exist, or not yet; or nobody answers who would know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """Why a lane stands still. It keeps trying: slowly where the broker refuses a row, which ``event_id`` then names."""

    reason: Literal["refused_row", "unavailable"]
    topic: str | None
    error: str
    event_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What a mark writes: the cursor behind an acknowledged batch, and where its rows went."""

    lane: int
    generation: int
    sequence: int
    cursor: Cursor
    first_id: int | None
    last_id: int | None
    row_count: int
    late_count: int
    offsets: Offsets
    partition_counts: dict[str, int]


class Flight:
    """One batch on its way to the broker. Rows that were acknowledged are remembered and not sent again."""

    def __init__(self, lane: "Lane", batch: Batch, sequence: int) -> None:
        self.lane = lane
        self.batch = batch
        self.sequence = sequence
        self.to_send: Sequence[Row] = batch.rows
        self.outstanding = 0
        self.failed: list[Row] = []
        self.last_error: BaseException | None = None
        self.attempts = 0
        self.acknowledged_bytes = 0
        self.offsets: Offsets = {}
        self.partition_counts: dict[str, int] = {}
        # None: rows share Kafka batches with other lanes'. Else: none do, and at most so many rows go in one.
        self.narrow: int | None = None
        # Set by the timer of a retry and by nothing that reads a clock: a loop's timers may run a moment early by another
        # clock, and a flight that was "not yet due" then would wait for ever.
        self.due = True
        self.sent_at = 0.0
        self.started_at = lease_clock()

    def acknowledge(self, topic: str, partition: int, first: int, last: int) -> None:
        """Rows of this flight lie on ``partition`` from offset ``first`` to ``last``."""
        partitions = self.offsets.setdefault(topic, {})
        known = partitions.get(partition)
        partitions[partition] = (first, last) if known is None else (min(known[0], first), max(known[1], last))

    def fail(self, rows: Iterable[Row], error: BaseException) -> None:
        self.failed.extend(rows)
        self.last_error = error

    def prepare_retry(self) -> None:
        """What failed goes again, in id order, which is the order within each key."""
        self.to_send = sorted(self.failed, key=lambda row: row["id"])
        self.failed = []
        self.attempts += 1
        self.due = False

    def receipt(self) -> Receipt:
        rows = self.batch.rows  # in id order: late rows lie below the position, fresh ones above
        return Receipt(
            lane=self.lane.number,
            generation=self.lane.generation,
            sequence=self.sequence,
            cursor=self.batch.cursor,
            first_id=rows[0]["id"] if rows else None,
            last_id=rows[-1]["id"] if rows else None,
            row_count=len(rows),
            late_count=self.batch.late_count,
            offsets=self.offsets,
            partition_counts=self.partition_counts,
        )


@dataclass(kw_only=True, slots=True, eq=False)
class Lane:
    """``cursor`` and ``sequence`` are planned: what they will be once everything polled is marked.

    ``hungry`` says that the last poll was cut short, or that there was none yet: more is known to wait.
    """

    number: int
    generation: int
    trusted_until: float
    cursor: Cursor
    sequence: int
    marked_position: int
    ready: Batch | None = None
    flight: Flight | None = None
    unmarked: int = 0
    hungry: bool = True
    releasing: bool = False
    refusal: Stopped | None = None
    receipt: Receipt | None = None

    @property
    def trusted(self) -> bool:
        return lease_clock() < self.trusted_until

    def distrust(self) -> None:
        """The lease is lost: whatever still holds this lane must not send."""
        self.trusted_until = -math.inf

    @property
    def pollable(self) -> bool:
        return self.ready is None and not self.releasing and self.trusted

    def stopped(self, since: float) -> Stopped | None:
        """Why this lane stands still, if it does: a refused row, or a batch that has been under way since before ``since``."""
        if self.refusal is not None or self.flight is None:
            return self.refusal
        error = self.flight.last_error
        if self.flight.started_at >= since and not isinstance(error, TopicUnavailable):
            return None
        waiting = self.flight.to_send
        return Stopped(
            reason="unavailable",
            topic=waiting[0]["topic"] if waiting else None,
            error=str(error) or type(error).__name__ if error else "no answer from the broker",
        )

    @property
    def idle(self) -> bool:
        """Nothing polled, nothing in flight, nothing to mark: a batch boundary."""
        return self.ready is None and self.flight is None and self.unmarked == 0
