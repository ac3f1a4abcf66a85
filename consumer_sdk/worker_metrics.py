"""Every metric of the worker. Names and labels are an interface; labels are closed sets or the workflows it has handlers for."""

from collections.abc import Sequence
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from consumer_sdk.classification import Kind
from fencepost.recording import guarded

__all__ = ["DEAD_REASONS", "WorkerMetrics"]

_SECONDS: Final = (0.001, 0.004, 0.016, 0.064, 0.25, 1, 4, 15, 60, 240, 900, 3600)
_PHASE: Final = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.25, 0.5, 1, 2.5, 5, 10)
_JOBS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_OTHER: Final = "(other)"
DEAD_REASONS: Final = (
    "attempts_exhausted", "deadline_exceeded", "cost_exhausted", "not_retryable", "ambiguous",
)  # fmt: skip
_REAPED: Final = ("queued", "dead", "cancelled")
_STATEMENTS: Final = (
    "claim", "renew", "complete", "fail", "release", "append_event", "guard", "maintain", "measure", "read_steps", "record_steps",
    "begin_timer", "continue_run",
)  # fmt: skip
_OUTCOMES: Final = ("completed", "continued", "refused", "retried", "dead", "cancelled", "released", "parked", "lost")
_EFFECTS: Final = ("succeeded", "replayed", "failed", "absent", "unknown", "reconciled", "mismatch")
_CHUNKS: Final = ("stored", "carried", "cut", "live_sent", "live_dropped", "forgotten")


class WorkerMetrics:
    """One registry a worker. Methods say what happened; which series that moves is decided here."""

    def __init__(self, *, version: str, worker_id: str, workflows: Sequence[str]) -> None:
        self.registry = registry = CollectorRegistry()
        self._workflows = frozenset(workflows)
        info = Info("fencepost_worker_build", "Version of the worker", registry=registry)
        info.info({"version": version, "worker_id": worker_id})
        self._attempts = Counter(
            "fencepost_attempts", "Attempts ended, by workflow and outcome: " + ", ".join(_OUTCOMES),
            ["workflow", "outcome"], registry=registry)  # fmt: skip
        self._seconds = Histogram(
            "fencepost_attempt_seconds", "From the claim of an attempt to its end, by workflow",
            ["workflow"], buckets=_SECONDS, registry=registry)  # fmt: skip
        self._failures = Counter(
            "fencepost_attempt_failures", "Failed attempts by workflow and kind: retryable, terminal, ambiguous",
            ["workflow", "kind"], registry=registry)  # fmt: skip
        self._dead = Counter(
            "fencepost_dead_jobs", "Jobs that died under this worker or were found dead by its reaper, by workflow and reason",
            ["workflow", "reason"], registry=registry)  # fmt: skip
        self._reaped = Counter(
            "fencepost_reaped_jobs", "Jobs that no claim could see, by the state they were put in",
            ["state"], registry=registry)  # fmt: skip
        self._active = Gauge("fencepost_active_attempts", "Attempts in progress in this worker", registry=registry)
        self._slots = Gauge("fencepost_worker_slots", "Most attempts at once in this worker", registry=registry)
        self._claims = Histogram("fencepost_claim_jobs", "Jobs that one claim leased", buckets=_JOBS, registry=registry)
        self._phase = Histogram(
            "fencepost_worker_statement_seconds", "Time of a statement: claim, renew, complete, fail, release, record_steps, …",
            ["statement"], buckets=_PHASE, registry=registry)  # fmt: skip
        self._ready = Gauge(
            "fencepost_ready_jobs", "Jobs ready to be claimed, by workflow, counted up to 10000",
            ["workflow"], registry=registry)  # fmt: skip
        self._oldest = Gauge(
            "fencepost_oldest_ready_seconds", "How long the oldest ready job has waited, by workflow",
            ["workflow"], registry=registry)  # fmt: skip
        self._losses = Counter("fencepost_leases_lost", "Leases lost: expired, taken over, or no longer trusted", registry=registry)
        self._stale = Counter(
            "fencepost_stale_writes_refused", "Writes that the fence refused, by statement",
            ["statement"], registry=registry)  # fmt: skip
        self._wakeups = Counter("fencepost_worker_wakeups", "Why an idle worker looked: ring, poll", ["kind"], registry=registry)
        self._database_errors = Counter(
            "fencepost_worker_database_errors", "Statements that failed for a passing reason, by statement",
            ["statement"], registry=registry)  # fmt: skip
        self._blocked = Counter(
            "fencepost_event_loop_blocked_seconds",
            "Time that a handler kept the event loop from everything else, renewals included",
            registry=registry)  # fmt: skip
        self._listening = Gauge("fencepost_worker_listening", "1 while the LISTEN connection is up", registry=registry)
        self._expired_keys = Counter("fencepost_expired_keys", "Idempotency keys turned into tombstones", registry=registry)
        self._forgotten = Counter("fencepost_forgotten_effects", "Ledger rows deleted after their retention", registry=registry)
        self._effects = Counter(
            "fencepost_effects", "Outside effects that handlers asked for, by outcome: " + ", ".join(_EFFECTS),
            ["outcome"], registry=registry)  # fmt: skip
        self._chunks = Counter(
            "fencepost_chunks", "Chunks of streams by what became of them: " + ", ".join(_CHUNKS),
            ["outcome"], registry=registry)  # fmt: skip
        self._series: dict[tuple[str, str], tuple[Counter, Histogram]] = {}
        self._begin_at_zero(workflows)

    def _begin_at_zero(self, workflows: Sequence[str]) -> None:
        """Every series begins at 0: `increase()` does not see the first count of one that begins at 1."""
        closed = (
            (self._wakeups, ("ring", "poll")),
            (self._effects, _EFFECTS),
            (self._chunks, _CHUNKS),
            (self._reaped, _REAPED),
        )
        for counter, labels in closed:
            for label in labels:
                counter.labels(label)
        for statement in _STATEMENTS:
            self._database_errors.labels(statement)
            self._stale.labels(statement)
        for workflow in (*workflows, _OTHER):
            for reason in DEAD_REASONS:
                self._dead.labels(workflow, reason)
        for workflow in workflows:
            for outcome in _OUTCOMES:
                self._attempts.labels(workflow, outcome)
            for kind in get_args(Kind):
                self._failures.labels(workflow, kind)

    def _ended_series(self, workflow: str, outcome: str) -> tuple[Counter, Histogram]:
        """Looked up once: a look-up an attempt would cost more than the counting."""
        if (workflow, outcome) not in self._series:
            self._series[workflow, outcome] = self._attempts.labels(workflow, outcome), self._seconds.labels(workflow)
        return self._series[workflow, outcome]

    def _workflow(self, workflow: str) -> str:
        return workflow if workflow in self._workflows else _OTHER

    @guarded
    def attempt_ended(self, workflow: str, outcome: str, seconds: float) -> None:
        counter, histogram = self._ended_series(self._workflow(workflow), outcome)
        counter.inc()
        histogram.observe(max(seconds, 0.0))

    @guarded
    def attempt_failed(self, workflow: str, kind: str) -> None:
        self._failures.labels(self._workflow(workflow), kind).inc()

    @guarded
    def dead(self, workflow: str, reason: str) -> None:
        self._dead.labels(self._workflow(workflow), reason).inc()

    @guarded
    def reaped(self, state: str) -> None:
        self._reaped.labels(state).inc()

    @guarded
    def slots(self, active: int, most: int) -> None:
        self._active.set(active)
        self._slots.set(most)

    @guarded
    def claimed(self, jobs: int) -> None:
        self._claims.observe(jobs)

    @guarded
    def statement(self, name: str, seconds: float) -> None:
        self._phase.labels(name).observe(seconds)

    @guarded
    def queue(self, workflow: str, ready: int, oldest_seconds: float) -> None:
        self._ready.labels(workflow).set(ready)
        self._oldest.labels(workflow).set(max(oldest_seconds, 0.0))

    @guarded
    def lease_lost(self) -> None:
        self._losses.inc()

    @guarded
    def stale_refused(self, statement: str) -> None:
        self._stale.labels(statement).inc()

    @guarded
    def woken(self, kind: str) -> None:
        self._wakeups.labels(kind).inc()

    @guarded
    def database_error(self, statement: str) -> None:
        self._database_errors.labels(statement).inc()

    @guarded
    def blocked(self, seconds: float) -> None:
        self._blocked.inc(seconds)

    @guarded
    def listening(self, up: bool) -> None:
        self._listening.set(1 if up else 0)

    @guarded
    def keys_expired(self, keys: int) -> None:
        self._expired_keys.inc(keys)

    @guarded
    def forgotten(self, rows: int) -> None:
        self._forgotten.inc(rows)

    @guarded
    def effect(self, outcome: str) -> None:
        self._effects.labels(outcome).inc()

    @guarded
    def chunks(self, outcome: str, chunks: int) -> None:
        self._chunks.labels(outcome).inc(chunks)
