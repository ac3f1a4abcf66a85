"""Every metric of the relay. Names and labels are an interface; labels are closed sets or bounded topic names.

A recorder that fails must never turn a delivery into a failure: ``Metrics`` swallows nothing else, and logs the first.
"""

from collections.abc import Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from fencepost.recording import guarded

__all__ = ["Metrics"]

_MAX_TOPICS: Final = 200
_OTHER_TOPICS: Final = "(other)"
_STOP_REASONS: Final = ("refused_row", "unavailable")
_LATENCY: Final = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_PHASE: Final = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.25, 0.5, 1, 2.5, 5, 10)
_ROWS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)
_BYTES: Final = tuple(256 * 4**power for power in range(9))


class Metrics:
    """One registry a relay. Methods say what happened; which series that moves is decided here."""

    def __init__(self, *, version: str, relay_id: str) -> None:
        self.registry = registry = CollectorRegistry()
        info = Info("fencepost_relay_build", "Version of the relay", registry=registry)
        info.info({"version": version, "relay_id": relay_id})
        self._published = Counter(
            "fencepost_published_rows", "Rows by topic and outcome: acknowledged, retried, refused, timeout",
            ["topic", "outcome"], registry=registry)  # fmt: skip
        self._published_bytes = Counter(
            "fencepost_published_bytes", "Bytes of acknowledged rows by topic", ["topic"], registry=registry)  # fmt: skip
        self._ack = Histogram(
            "fencepost_publish_seconds", "From handing a batch to the producer to its last acknowledgement",
            buckets=_LATENCY, registry=registry)  # fmt: skip
        self._age = Histogram(
            "fencepost_delivery_seconds", "From created_at of a batch's oldest row (database clock) to its acknowledgement",
            buckets=_LATENCY, registry=registry)  # fmt: skip
        self._batch_rows = Histogram("fencepost_batch_rows", "Rows of a lane in a batch", buckets=_ROWS, registry=registry)
        self._batch_bytes = Histogram("fencepost_batch_bytes", "Bytes of a lane in a batch", buckets=_BYTES, registry=registry)
        self._phase = Histogram(
            "fencepost_phase_seconds", "Time of a phase: poll, publish, mark",
            ["phase"], buckets=_PHASE, registry=registry)  # fmt: skip
        self._waiting = Gauge(
            "fencepost_waiting_rows", "Undelivered rows by lane, counted up to 10000", ["lane"], registry=registry)  # fmt: skip
        self._oldest = Gauge(
            "fencepost_oldest_undelivered_seconds", "Age of the oldest undelivered row by lane",
            ["lane"], registry=registry)  # fmt: skip
        self._late = Counter("fencepost_late_rows", "Rows published after a row with a higher id", registry=registry)
        self._owned = Gauge("fencepost_lanes_owned", "Lanes that this relay holds", registry=registry)
        self._generation = Gauge("fencepost_lane_generation", "Lease generation of each held lane", ["lane"], registry=registry)
        self._claims = Counter("fencepost_lane_claims", "Lanes claimed", registry=registry)
        self._releases = Counter("fencepost_lane_releases", "Lanes handed over or released at a stop", registry=registry)
        self._losses = Counter("fencepost_lane_losses", "Lanes lost: expired, taken over, or no longer trusted", registry=registry)
        self._stale = Counter(
            "fencepost_stale_marks_refused", "Marks, renewals and releases that the fence refused", registry=registry
        )
        self._stopped = Gauge(
            "fencepost_lanes_stopped", "Held lanes that stand still, by reason: refused_row, unavailable", ["reason"],
            registry=registry)  # fmt: skip
        self._wakeups = Counter("fencepost_wakeups", "Why the relay looked: ring, poll, more", ["kind"], registry=registry)
        self._rebuilds = Counter("fencepost_producer_rebuilds", "Producers discarded and replaced", registry=registry)
        self._database_errors = Counter(
            "fencepost_database_errors", "Statements that failed for a passing reason, by statement", ["statement"],
            registry=registry)  # fmt: skip
        self._listening = Gauge("fencepost_listening", "1 while the LISTEN connection is up", registry=registry)
        self._horizon_seconds = Gauge(
            "fencepost_horizon_age_seconds", "How long the oldest session or prepared transaction has held back vacuum",
            ["holder"], registry=registry)  # fmt: skip
        self._horizon_transactions = Gauge(
            "fencepost_horizon_age_transactions", "How many transactions the oldest holder lies back", ["holder"],
            registry=registry)  # fmt: skip
        self._topics: set[str] = set()
        self._acknowledged: dict[str, tuple[Counter, Counter]] = {}
        for reason in _STOP_REASONS:
            self._stopped.labels(reason).set(0)
        for kind in ("ring", "poll", "more"):
            self._wakeups.labels(kind)

    def _topic(self, topic: str) -> str:
        if topic in self._topics:
            return topic
        if len(self._topics) >= _MAX_TOPICS:
            return _OTHER_TOPICS
        self._topics.add(topic)
        return topic

    @guarded
    def acknowledged(self, topic: str, rows: int, size: int) -> None:
        counters = self._acknowledged.get(topic)
        if counters is None:
            name = self._topic(topic)
            counters = self._published.labels(name, "acknowledged"), self._published_bytes.labels(name)
            if name == topic:
                self._acknowledged[topic] = counters
        counters[0].inc(rows)
        counters[1].inc(size)

    @guarded
    def not_published(self, topic: str, outcome: str, rows: int) -> None:
        self._published.labels(self._topic(topic), outcome).inc(rows)

    @guarded
    def batch_done(self, *, rows: int, size: int, late: int, publish_seconds: float, age_seconds: float) -> None:
        self._batch_rows.observe(rows)
        self._batch_bytes.observe(size)
        self._ack.observe(publish_seconds)
        self._age.observe(max(age_seconds, 0.0))
        if late:
            self._late.inc(late)

    @guarded
    def phase(self, name: str, seconds: float) -> None:
        self._phase.labels(name).observe(seconds)

    @guarded
    def backlog(self, lane: int, waiting: int, oldest_age_seconds: float) -> None:
        self._waiting.labels(str(lane)).set(waiting)
        self._oldest.labels(str(lane)).set(max(oldest_age_seconds, 0.0))

    @guarded
    def lanes(self, generations: dict[int, int], stopped_reasons: Sequence[str]) -> None:
        self._owned.set(len(generations))
        self._generation.clear()
        for lane, generation in generations.items():
            self._generation.labels(str(lane)).set(generation)
        for reason in _STOP_REASONS:
            self._stopped.labels(reason).set(stopped_reasons.count(reason))

    @guarded
    def lane_gone(self, lane: int) -> None:
        # A lane's gauges leave with its ownership: its new owner shows them, and two relays never disagree.
        for gauge in (self._waiting, self._oldest):
            if (str(lane),) in gauge._metrics:
                gauge.remove(str(lane))

    @guarded
    def claimed(self, lanes: int) -> None:
        self._claims.inc(lanes)

    @guarded
    def released(self, lanes: int) -> None:
        self._releases.inc(lanes)

    @guarded
    def lost(self, lanes: int) -> None:
        self._losses.inc(lanes)

    @guarded
    def stale_refused(self, writes: int) -> None:
        self._stale.inc(writes)

    @guarded
    def woken(self, kind: str) -> None:
        self._wakeups.labels(kind).inc()

    @guarded
    def producer_rebuilt(self) -> None:
        self._rebuilds.inc()

    @guarded
    def database_error(self, statement: str) -> None:
        self._database_errors.labels(statement).inc()

    @guarded
    def listening(self, up: bool) -> None:
        self._listening.set(1 if up else 0)

    @guarded
    def horizon(self, holders: dict[str, tuple[float | None, int | None]]) -> None:
        for holder in ("session", "prepared", "slot"):
            seconds, transactions = holders.get(holder, (0.0, 0))
            if holder != "slot":
                self._horizon_seconds.labels(holder).set(max(seconds or 0.0, 0.0))
            self._horizon_transactions.labels(holder).set(max(transactions or 0, 0))
