"""Every metric of the consumer. Names and labels are an interface; labels are closed sets, or types and topics that it knows."""

from collections.abc import Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from consumer_sdk.delivery import DEAD_REASONS
from fencepost.recording import guarded

__all__ = ["ConsumerMetrics"]

_SECONDS: Final = (0.001, 0.004, 0.016, 0.064, 0.25, 1, 4, 15, 60, 240)
_STATEMENT: Final = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.25, 0.5, 1, 2.5, 5, 10)
_BATCH: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_OTHER: Final = "(other)"
_OUTCOMES: Final = ("handled", "duplicate", "retried", "postponed", "dead", "ignored", "abandoned")
_EFFECTS: Final = ("succeeded", "replayed", "failed", "absent", "unknown", "reconciled", "mismatch")
_COMMITS: Final = ("committed", "refused", "failed")
_REDRIVES: Final = ("redriven", "dead", "released", "lost")
_STATEMENTS: Final = ("known", "record", "dead_letter", "redrive", "maintain", "measure", "handler")


class ConsumerMetrics:
    """One registry a consumer. Methods say what happened; which series that moves is decided here."""

    def __init__(self, *, version: str, holder: str, types: Sequence[str], topics: Sequence[str]) -> None:
        self.registry = registry = CollectorRegistry()
        self._types = frozenset(types)
        info = Info("fencepost_consumer_build", "Version of the consumer", registry=registry)
        info.info({"version": version, "holder": holder})
        self._messages = Counter(
            "fencepost_consumer_messages", "Deliveries by type and outcome: " + ", ".join(_OUTCOMES),
            ["type", "outcome"], registry=registry)  # fmt: skip
        self._dead = Counter(
            "fencepost_consumer_dead_letters", "Messages given up, by reason", ["reason"], registry=registry)  # fmt: skip
        self._seconds = Histogram(
            "fencepost_consumer_handler_seconds", "Time of an attempt at a message, or at a batch, by type",
            ["type"], buckets=_SECONDS, registry=registry)  # fmt: skip
        self._batches = Histogram(
            "fencepost_consumer_batch_messages", "Messages that one transaction committed",
            buckets=_BATCH, registry=registry)  # fmt: skip
        self._split = Counter("fencepost_consumer_batches_split", "Batches that failed and were tried in halves", registry=registry)
        self._statements = Histogram(
            "fencepost_consumer_statement_seconds", "Time of a statement: record, dead_letter",
            ["statement"], buckets=_STATEMENT, registry=registry)  # fmt: skip
        self._database_errors = Counter(
            "fencepost_consumer_database_errors", "Statements that failed for a passing reason, by statement",
            ["statement"], registry=registry)  # fmt: skip
        self._commits = Counter(
            "fencepost_consumer_commits", "Offset commits by outcome: " + ", ".join(_COMMITS),
            ["outcome"], registry=registry)  # fmt: skip
        self._rebalances = Counter("fencepost_consumer_rebalances", "Assignments received from the group", registry=registry)
        self._partitions = Gauge("fencepost_consumer_partitions", "Partitions assigned to this member", registry=registry)
        self._in_flight = Gauge("fencepost_consumer_in_flight_messages", "Messages in memory", registry=registry)
        self._in_flight_bytes = Gauge("fencepost_consumer_in_flight_bytes", "Bytes of messages in memory", registry=registry)
        self._oldest = Gauge(
            "fencepost_consumer_oldest_unfinished_seconds", "How long the oldest message that was received is not done",
            registry=registry)  # fmt: skip
        self._paused = Gauge("fencepost_consumer_paused", "1 while nothing is fetched, because memory is full", registry=registry)
        self._lag = Gauge(
            "fencepost_consumer_lag_messages", "Offsets between the commit and the end of the partitions assigned here, by topic",
            ["topic"], registry=registry)  # fmt: skip
        self._waiting = Gauge(
            "fencepost_consumer_dead_letters_waiting", "Dead letters that wait for an operator, counted up to 10000",
            registry=registry)  # fmt: skip
        self._waiting_seconds = Gauge(
            "fencepost_consumer_dead_letters_oldest_seconds", "How long the oldest of them has waited",
            registry=registry)  # fmt: skip
        self._redrives = Counter(
            "fencepost_consumer_redrives", "Dead letters handled anew, by outcome: " + ", ".join(_REDRIVES),
            ["outcome"], registry=registry)  # fmt: skip
        self._effects = Counter(
            "fencepost_consumer_effects", "Outside effects that handlers of messages asked for, by outcome: " + ", ".join(_EFFECTS),
            ["outcome"], registry=registry)  # fmt: skip
        self._forgotten = Counter(
            "fencepost_consumer_forgotten_effects", "Ledger rows deleted after their retention", registry=registry)  # fmt: skip
        self._blocked = Counter(
            "fencepost_consumer_event_loop_blocked_seconds", "Time that a handler kept the event loop from everything else",
            registry=registry)  # fmt: skip
        # Every series begins at 0: `increase()` does not see the first count of one that begins at 1.
        self._series: dict[tuple[str, str], Counter] = {}
        for known in (*types, _OTHER):
            for outcome in _OUTCOMES:
                self._series[known, outcome] = self._messages.labels(known, outcome)
        self._attempts = {known: self._seconds.labels(known) for known in types}
        for reason in DEAD_REASONS:
            self._dead.labels(reason)
        for outcome in _COMMITS:
            self._commits.labels(outcome)
        for outcome in _REDRIVES:
            self._redrives.labels(outcome)
        for outcome in _EFFECTS:
            self._effects.labels(outcome)
        for statement in _STATEMENTS:
            self._database_errors.labels(statement)
        for topic in topics:
            self._lag.labels(topic)

    def _type(self, type: str | None) -> str:  # noqa: A002 - the word of CloudEvents
        return type if type in self._types else _OTHER

    @guarded
    def message(self, type: str | None, outcome: str, count: int = 1) -> None:  # noqa: A002 - the word of CloudEvents
        self._series[self._type(type), outcome].inc(count)

    @guarded
    def dead(self, reason: str) -> None:
        self._dead.labels(reason).inc()

    @guarded
    def attempt(self, type: str, seconds: float) -> None:  # noqa: A002 - the word of CloudEvents
        self._attempts[type].observe(max(seconds, 0.0))

    @guarded
    def batch(self, messages: int) -> None:
        self._batches.observe(messages)

    @guarded
    def split(self) -> None:
        self._split.inc()

    @guarded
    def statement(self, name: str, seconds: float) -> None:
        self._statements.labels(name).observe(seconds)

    @guarded
    def database_error(self, statement: str) -> None:
        self._database_errors.labels(statement).inc()

    @guarded
    def commit(self, outcome: str) -> None:
        self._commits.labels(outcome).inc()

    @guarded
    def assigned(self, partitions: int) -> None:
        self._rebalances.inc()
        self._partitions.set(partitions)

    @guarded
    def revoked(self) -> None:
        self._partitions.set(0)

    @guarded
    def in_flight(self, messages: int, size: int, oldest_seconds: float) -> None:
        self._in_flight.set(messages)
        self._in_flight_bytes.set(size)
        self._oldest.set(max(oldest_seconds, 0.0))

    @guarded
    def paused(self, paused: bool) -> None:
        self._paused.set(1 if paused else 0)

    @guarded
    def lag(self, by_topic: Mapping[str, int]) -> None:
        for topic, messages in by_topic.items():
            self._lag.labels(topic).set(messages)

    @guarded
    def waiting(self, letters: int, oldest_seconds: float) -> None:
        self._waiting.set(letters)
        self._waiting_seconds.set(max(oldest_seconds, 0.0))

    @guarded
    def redrive(self, outcome: str) -> None:
        self._redrives.labels(outcome).inc()

    @guarded
    def effect(self, outcome: str) -> None:
        self._effects.labels(outcome).inc()

    @guarded
    def forgotten(self, rows: int) -> None:
        self._forgotten.inc(rows)

    @guarded
    def blocked(self, seconds: float) -> None:
        self._blocked.inc(seconds)
