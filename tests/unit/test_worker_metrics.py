"""The worker's metrics: their names are an interface, and a recorder that fails costs a sample, never a run."""

from collections.abc import Callable, Iterable
from typing import Any, Final

import pytest
from prometheus_client import generate_latest
from structlog.testing import capture_logs

from consumer_sdk.worker_metrics import DEAD_REASONS, WorkerMetrics

# name, type and labels of every series family. A change here is a change of an interface: alerts and boards read it.
GOLDEN: Final = {
    "fencepost_worker_build": ("info", ()),
    "fencepost_attempts": ("counter", ("workflow", "outcome")),
    "fencepost_attempt_seconds": ("histogram", ("workflow",)),
    "fencepost_attempt_failures": ("counter", ("workflow", "kind")),
    "fencepost_dead_jobs": ("counter", ("workflow", "reason")),
    "fencepost_reaped_jobs": ("counter", ("state",)),
    "fencepost_active_attempts": ("gauge", ()),
    "fencepost_worker_slots": ("gauge", ()),
    "fencepost_claim_jobs": ("histogram", ()),
    "fencepost_worker_statement_seconds": ("histogram", ("statement",)),
    "fencepost_ready_jobs": ("gauge", ("workflow",)),
    "fencepost_oldest_ready_seconds": ("gauge", ("workflow",)),
    "fencepost_leases_lost": ("counter", ()),
    "fencepost_stale_writes_refused": ("counter", ("statement",)),
    "fencepost_worker_wakeups": ("counter", ("kind",)),
    "fencepost_worker_database_errors": ("counter", ("statement",)),
    "fencepost_worker_listening": ("gauge", ()),
    "fencepost_event_loop_blocked_seconds": ("counter", ()),
    "fencepost_expired_keys": ("counter", ()),
    "fencepost_forgotten_effects": ("counter", ()),
    "fencepost_effects": ("counter", ("outcome",)),
    "fencepost_chunks": ("counter", ("outcome",)),
}
RECORDINGS: Final[dict[str, Callable[[WorkerMetrics], None]]] = {
    "attempt_ended": lambda m: m.attempt_ended("report", "completed", 0.5),
    "attempt_failed": lambda m: m.attempt_failed("report", "retryable"),
    "dead": lambda m: m.dead("report", "attempts_exhausted"),
    "reaped": lambda m: m.reaped("dead"),
    "slots": lambda m: m.slots(3, 10),
    "claimed": lambda m: m.claimed(7),
    "statement": lambda m: m.statement("claim", 0.001),
    "queue": lambda m: m.queue("report", 12, 3.5),
    "lease_lost": lambda m: m.lease_lost(),
    "stale_refused": lambda m: m.stale_refused("complete"),
    "woken": lambda m: m.woken("ring"),
    "database_error": lambda m: m.database_error("renew"),
    "listening": lambda m: m.listening(True),
    "blocked": lambda m: m.blocked(1.5),
    "keys_expired": lambda m: m.keys_expired(4),
    "forgotten": lambda m: m.forgotten(8),
    "effect": lambda m: m.effect("succeeded"),
    "chunks": lambda m: m.chunks("stored", 2),
}


class Broken:
    """An instrument that raises whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the recorder is broken")


@pytest.fixture
def metrics() -> WorkerMetrics:
    return WorkerMetrics(version="1.2.3", worker_id="worker-0/abc", workflows=["report"])


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("fencepost_dead_jobs_total", {"workflow": workflow, "reason": reason})
        for workflow in ("report", "(other)")
        for reason in DEAD_REASONS
    ]
    + [
        ("fencepost_attempt_failures_total", {"workflow": "report", "kind": kind})
        for kind in ("retryable", "terminal", "ambiguous")
    ]
    + [
        ("fencepost_worker_database_errors_total", {"statement": name})
        for name in ("claim", "renew", "complete", "fail", "release")
    ]
    + [("fencepost_stale_writes_refused_total", {"statement": "complete"}), ("fencepost_reaped_jobs_total", {"state": "dead"})],
    ids=str,
)
def test_what_alerts_watch_begins_at_0(metrics: WorkerMetrics, name: str, labels: dict[str, str]) -> None:
    """increase() over a series that begins at 1 is 0: the first death would page nobody."""
    assert value(metrics, name, **labels) == 0


def test_the_names_types_and_labels_are_these(metrics: WorkerMetrics) -> None:
    """OPS-2: every documented series, and nothing else."""
    instruments: Iterable[Any] = metrics.registry._collector_to_names
    found = {
        family.name: (family.type, tuple(instrument._labelnames)) for instrument in instruments for family in instrument.describe()
    }

    assert found == GOLDEN


def test_every_recorder_is_tried_below() -> None:
    public = {name for name in vars(WorkerMetrics) if not name.startswith("_")}

    assert public == RECORDINGS.keys()


@pytest.mark.parametrize("recording", RECORDINGS)
def test_a_broken_recorder_raises_nothing(metrics: WorkerMetrics, recording: str) -> None:
    """OPS-1."""
    for name in vars(metrics).keys() - {"registry", "_workflows", "_series"}:
        setattr(metrics, name, Broken())

    with capture_logs():
        for _ in range(3):
            RECORDINGS[recording](metrics)


def test_a_recorded_run_shows_its_exact_values(metrics: WorkerMetrics) -> None:
    """OPS-2."""
    for record in RECORDINGS.values():
        record(metrics)

    assert value(metrics, "fencepost_attempts_total", workflow="report", outcome="completed") == 1
    assert value(metrics, "fencepost_attempt_seconds_sum", workflow="report") == 0.5
    assert value(metrics, "fencepost_attempt_failures_total", workflow="report", kind="retryable") == 1
    assert value(metrics, "fencepost_dead_jobs_total", workflow="report", reason="attempts_exhausted") == 1
    assert value(metrics, "fencepost_reaped_jobs_total", state="dead") == 1
    assert value(metrics, "fencepost_active_attempts") == 3
    assert value(metrics, "fencepost_worker_slots") == 10
    assert value(metrics, "fencepost_claim_jobs_sum") == 7
    assert value(metrics, "fencepost_worker_statement_seconds_count", statement="claim") == 1
    assert value(metrics, "fencepost_ready_jobs", workflow="report") == 12
    assert value(metrics, "fencepost_oldest_ready_seconds", workflow="report") == 3.5
    assert value(metrics, "fencepost_leases_lost_total") == 1
    assert value(metrics, "fencepost_stale_writes_refused_total", statement="complete") == 1
    assert value(metrics, "fencepost_worker_wakeups_total", kind="ring") == 1
    assert value(metrics, "fencepost_worker_database_errors_total", statement="renew") == 1
    assert value(metrics, "fencepost_worker_listening") == 1
    assert value(metrics, "fencepost_expired_keys_total") == 4
    assert value(metrics, "fencepost_forgotten_effects_total") == 8
    assert value(metrics, "fencepost_effects_total", outcome="succeeded") == 1
    assert value(metrics, "fencepost_worker_build_info", version="1.2.3", worker_id="worker-0/abc") == 1


def test_series_that_alerts_read_are_there_from_the_start(metrics: WorkerMetrics) -> None:
    for outcome in ("completed", "retried", "dead", "cancelled", "released", "lost"):
        assert value(metrics, "fencepost_attempts_total", workflow="report", outcome=outcome) == 0
    for outcome in ("succeeded", "replayed", "failed", "absent", "unknown", "reconciled", "mismatch"):
        assert value(metrics, "fencepost_effects_total", outcome=outcome) == 0
    for kind in ("ring", "poll"):
        assert value(metrics, "fencepost_worker_wakeups_total", kind=kind) == 0


def test_workflows_without_a_handler_share_one_name(metrics: WorkerMetrics) -> None:
    """What the reaper finds may be of any workflow: labels are a closed set."""
    for number in range(1000):
        metrics.dead(f"workflow-{number}", "attempts_exhausted")
        metrics.attempt_ended(f"workflow-{number}", "completed", 1)
        metrics.attempt_failed(f"workflow-{number}", "terminal")

    shown = {
        line.split('workflow="')[1].split('"')[0]
        for line in generate_latest(metrics.registry).decode().splitlines()
        if "workflow=" in line
    }
    assert shown == {"report", "(other)"}
    assert value(metrics, "fencepost_dead_jobs_total", workflow="(other)", reason="attempts_exhausted") == 1000


def test_no_gauge_is_ever_negative(metrics: WorkerMetrics) -> None:
    metrics.queue("report", 0, -3)
    metrics.attempt_ended("report", "completed", -1)

    assert value(metrics, "fencepost_oldest_ready_seconds", workflow="report") == 0
    assert value(metrics, "fencepost_attempt_seconds_sum", workflow="report") == 0
