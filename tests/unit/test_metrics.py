"""Metrics: their names are an interface, and a recorder that fails costs a sample, never a row."""

import importlib.util
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Final

import pytest
from prometheus_client import generate_latest
from structlog.testing import capture_logs

import relay.metrics
from relay.metrics import Metrics

# name, type and labels of every series family. A change here is a change of an interface: alerts and boards read it.
GOLDEN: Final = {
    "fencepost_relay_build": ("info", ()),
    "fencepost_published_rows": ("counter", ("topic", "outcome")),
    "fencepost_published_bytes": ("counter", ("topic",)),
    "fencepost_publish_seconds": ("histogram", ()),
    "fencepost_delivery_seconds": ("histogram", ()),
    "fencepost_batch_rows": ("histogram", ()),
    "fencepost_batch_bytes": ("histogram", ()),
    "fencepost_phase_seconds": ("histogram", ("phase",)),
    "fencepost_waiting_rows": ("gauge", ("lane",)),
    "fencepost_oldest_undelivered_seconds": ("gauge", ("lane",)),
    "fencepost_late_rows": ("counter", ()),
    "fencepost_lanes_owned": ("gauge", ()),
    "fencepost_lane_generation": ("gauge", ("lane",)),
    "fencepost_lane_claims": ("counter", ()),
    "fencepost_lane_releases": ("counter", ()),
    "fencepost_lane_losses": ("counter", ()),
    "fencepost_stale_marks_refused": ("counter", ()),
    "fencepost_lanes_stopped": ("gauge", ("reason",)),
    "fencepost_wakeups": ("counter", ("kind",)),
    "fencepost_producer_rebuilds": ("counter", ()),
    "fencepost_database_errors": ("counter", ("statement",)),
    "fencepost_listening": ("gauge", ()),
    "fencepost_horizon_age_seconds": ("gauge", ("holder",)),
    "fencepost_horizon_age_transactions": ("gauge", ("holder",)),
}
RECORDINGS: Final[dict[str, Callable[[Metrics], None]]] = {
    "acknowledged": lambda m: m.acknowledged("orders", 3, 300),
    "not_published": lambda m: m.not_published("orders", "retried", 2),
    "batch_done": lambda m: m.batch_done(rows=3, size=300, late=1, publish_seconds=0.01, age_seconds=0.02),
    "phase": lambda m: m.phase("poll", 0.001),
    "backlog": lambda m: m.backlog(3, 7, 1.5),
    "lanes": lambda m: m.lanes({3: 9}, ["refused_row"]),
    "lane_gone": lambda m: m.lane_gone(3),
    "claimed": lambda m: m.claimed(4),
    "released": lambda m: m.released(2),
    "lost": lambda m: m.lost(1),
    "stale_refused": lambda m: m.stale_refused(1),
    "woken": lambda m: m.woken("ring"),
    "producer_rebuilt": lambda m: m.producer_rebuilt(),
    "database_error": lambda m: m.database_error("poll"),
    "listening": lambda m: m.listening(True),
    "horizon": lambda m: m.horizon({"session": (60.0, 1000)}),
}


class Broken:
    """An instrument that raises whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the recorder is broken")


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(version="1.2.3", relay_id="relay-0")


@pytest.fixture
def module() -> ModuleType:
    """relay.metrics loaded once more: that a fault was logged already is remembered for a process."""
    path = relay.metrics.__file__
    assert path is not None
    spec = importlib.util.spec_from_file_location("relay_metrics_of_this_test", path)
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    return fresh


def broken(module: ModuleType) -> Metrics:
    made: Metrics = module.Metrics(version="1.2.3", relay_id="relay-0")
    for name in vars(made).keys() - {"registry", "_topics"}:
        setattr(made, name, Broken())
    return made


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_the_names_types_and_labels_are_these(metrics: Metrics) -> None:
    """OPS-2: every documented series, and nothing else."""
    instruments: Iterable[Any] = metrics.registry._collector_to_names
    found = {
        family.name: (family.type, tuple(instrument._labelnames)) for instrument in instruments for family in instrument.describe()
    }

    assert found == GOLDEN


def test_every_recorder_is_tried_below() -> None:
    public = {name for name in vars(Metrics) if not name.startswith("_")}

    assert public == RECORDINGS.keys()


@pytest.mark.parametrize("recording", RECORDINGS)
def test_a_broken_recorder_raises_nothing_and_is_logged_once(module: ModuleType, recording: str) -> None:
    """OPS-1: the fault is logged, not once per row."""
    metrics = broken(module)

    with capture_logs() as logs:
        for _ in range(1000):
            RECORDINGS[recording](metrics)

    assert [(log["event"], log["recorder"], log["log_level"]) for log in logs] == [("metric_failed", recording, "error")]


def test_recorders_work_while_another_is_broken(metrics: Metrics) -> None:
    metrics._batch_rows = Broken()  # type: ignore[assignment]

    with capture_logs():
        RECORDINGS["batch_done"](metrics)
    RECORDINGS["acknowledged"](metrics)

    assert value(metrics, "fencepost_published_rows_total", topic="orders", outcome="acknowledged") == 3


def test_a_recorded_run_shows_its_exact_values(metrics: Metrics) -> None:
    """OPS-2."""
    for record in RECORDINGS.values():
        record(metrics)

    assert value(metrics, "fencepost_published_rows_total", topic="orders", outcome="acknowledged") == 3
    assert value(metrics, "fencepost_published_bytes_total", topic="orders") == 300
    assert value(metrics, "fencepost_published_rows_total", topic="orders", outcome="retried") == 2
    assert value(metrics, "fencepost_late_rows_total") == 1
    assert value(metrics, "fencepost_lanes_owned") == 1
    assert value(metrics, "fencepost_lane_generation", lane="3") == 9
    assert value(metrics, "fencepost_lanes_stopped", reason="refused_row") == 1
    assert value(metrics, "fencepost_lanes_stopped", reason="unavailable") == 0
    assert value(metrics, "fencepost_stale_marks_refused_total") == 1
    assert value(metrics, "fencepost_horizon_age_seconds", holder="session") == 60
    assert value(metrics, "fencepost_horizon_age_transactions", holder="prepared") == 0


def test_a_lane_that_went_leaves_no_gauge(metrics: Metrics) -> None:
    """Its new owner shows them: two relays never disagree about a lane."""
    metrics.backlog(3, 7, 1.5)
    metrics.lanes({3: 9}, [])

    metrics.lane_gone(3)
    metrics.lane_gone(3)
    metrics.lanes({}, [])

    for name in ("waiting_rows", "oldest_undelivered_seconds", "lane_generation"):
        assert value(metrics, f"fencepost_{name}", lane="3") is None


def test_no_gauge_is_ever_negative(metrics: Metrics) -> None:
    """OPS-2: clocks that disagree must not show a row from the future."""
    metrics.backlog(3, 0, -5.0)
    metrics.horizon({"session": (-1.0, -1), "slot": (None, None)})

    assert value(metrics, "fencepost_oldest_undelivered_seconds", lane="3") == 0
    assert value(metrics, "fencepost_horizon_age_seconds", holder="session") == 0
    assert value(metrics, "fencepost_horizon_age_transactions", holder="slot") == 0


def test_topics_beyond_a_bound_share_one_name(metrics: Metrics) -> None:
    for number in range(1000):
        metrics.acknowledged(f"topic-{number}", 1, 1)
        metrics.not_published(f"topic-{number}", "retried", 1)

    shown = {
        line.split('topic="')[1].split('"')[0]
        for line in generate_latest(metrics.registry).decode().splitlines()
        if "topic=" in line
    }
    assert len(shown) == 201
    assert value(metrics, "fencepost_published_rows_total", topic="(other)", outcome="acknowledged") == 800
