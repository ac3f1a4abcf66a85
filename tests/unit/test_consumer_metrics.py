"""The consumer's metrics: their names are an interface, and a recorder that fails costs a sample, never a message."""

from collections.abc import Callable, Iterable
from typing import Any, Final, get_args

import pytest
from prometheus_client import generate_latest
from structlog.testing import capture_logs

from consumer_sdk.consumer_metrics import ConsumerMetrics
from consumer_sdk.delivery import DEAD_REASONS, DeadReason, DoneOutcome

TYPES: Final = ["order.placed", "order.paid"]
TOPICS: Final = ["orders", "payments"]
# name, type and labels of every series family. A change here is a change of an interface: alerts and boards read it.
GOLDEN: Final = {
    "fencepost_consumer_build": ("info", ()),
    "fencepost_consumer_messages": ("counter", ("type", "outcome")),
    "fencepost_consumer_dead_letters": ("counter", ("reason",)),
    "fencepost_consumer_handler_seconds": ("histogram", ("type",)),
    "fencepost_consumer_batch_messages": ("histogram", ()),
    "fencepost_consumer_batches_split": ("counter", ()),
    "fencepost_consumer_statement_seconds": ("histogram", ("statement",)),
    "fencepost_consumer_database_errors": ("counter", ("statement",)),
    "fencepost_consumer_commits": ("counter", ("outcome",)),
    "fencepost_consumer_rebalances": ("counter", ()),
    "fencepost_consumer_partitions": ("gauge", ()),
    "fencepost_consumer_in_flight_messages": ("gauge", ()),
    "fencepost_consumer_in_flight_bytes": ("gauge", ()),
    "fencepost_consumer_oldest_unfinished_seconds": ("gauge", ()),
    "fencepost_consumer_paused": ("gauge", ()),
    "fencepost_consumer_lag_messages": ("gauge", ("topic",)),
    "fencepost_consumer_dead_letters_waiting": ("gauge", ()),
    "fencepost_consumer_dead_letters_oldest_seconds": ("gauge", ()),
    "fencepost_consumer_redrives": ("counter", ("outcome",)),
    "fencepost_consumer_effects": ("counter", ("outcome",)),
    "fencepost_consumer_forgotten_effects": ("counter", ()),
    "fencepost_consumer_event_loop_blocked_seconds": ("counter", ()),
}
RECORDINGS: Final[dict[str, Callable[[ConsumerMetrics], None]]] = {
    "message": lambda m: m.message("order.placed", "handled", 3),
    "dead": lambda m: m.dead("rejected"),
    "attempt": lambda m: m.attempt("order.placed", 0.5),
    "batch": lambda m: m.batch(7),
    "split": lambda m: m.split(),
    "statement": lambda m: m.statement("record", 0.001),
    "database_error": lambda m: m.database_error("known"),
    "commit": lambda m: m.commit("refused"),
    "assigned": lambda m: m.assigned(4),
    "revoked": lambda m: m.revoked(),
    "in_flight": lambda m: m.in_flight(5, 600, 7.5),
    "paused": lambda m: m.paused(True),
    "lag": lambda m: m.lag({"orders": 12, "payments": 0}),
    "waiting": lambda m: m.waiting(2, 90.0),
    "redrive": lambda m: m.redrive("redriven"),
    "effect": lambda m: m.effect("replayed"),
    "forgotten": lambda m: m.forgotten(8),
    "blocked": lambda m: m.blocked(1.5),
}
MESSAGES: Final = ("handled", "duplicate", "retried", "postponed", "dead", "ignored", "abandoned")
FROM_THE_START: Final[list[tuple[str, dict[str, str]]]] = [
    *(("messages_total", {"type": type_, "outcome": outcome}) for type_ in (*TYPES, "(other)") for outcome in MESSAGES),
    *(("dead_letters_total", {"reason": str(reason)}) for reason in DEAD_REASONS),
    *(("handler_seconds_count", {"type": type_}) for type_ in TYPES),
    *(("commits_total", {"outcome": outcome}) for outcome in ("committed", "refused", "failed")),
    *(("redrives_total", {"outcome": outcome}) for outcome in ("redriven", "dead", "released", "lost")),
    *(
        ("effects_total", {"outcome": outcome})
        for outcome in ("succeeded", "replayed", "failed", "absent", "unknown", "reconciled", "mismatch")
    ),
    *(
        ("database_errors_total", {"statement": statement})
        for statement in ("known", "record", "dead_letter", "redrive", "maintain", "measure")
    ),
    *(("lag_messages", {"topic": topic}) for topic in TOPICS),
    *(
        (name, {})
        for name in (
            "batches_split_total", "batch_messages_count", "rebalances_total", "partitions", "in_flight_messages",
            "in_flight_bytes", "oldest_unfinished_seconds", "paused", "dead_letters_waiting", "dead_letters_oldest_seconds",
            "forgotten_effects_total", "event_loop_blocked_seconds_total",
        )
    ),
]  # fmt: skip


class Broken:
    """An instrument that raises whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the recorder is broken")


@pytest.fixture
def metrics() -> ConsumerMetrics:
    return ConsumerMetrics(version="1.2.3", holder="consumer-0/abc", types=TYPES, topics=TOPICS)


def value(metrics: ConsumerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"fencepost_consumer_{name}", labels)


def test_the_names_types_and_labels_are_these(metrics: ConsumerMetrics) -> None:
    """OPS-2: every documented series, and nothing else."""
    instruments: Iterable[Any] = metrics.registry._collector_to_names
    found = {
        family.name: (family.type, tuple(instrument._labelnames)) for instrument in instruments for family in instrument.describe()
    }

    assert found == GOLDEN


@pytest.mark.parametrize(("name", "labels"), FROM_THE_START, ids=str)
def test_a_series_begins_at_0(metrics: ConsumerMetrics, name: str, labels: dict[str, str]) -> None:
    """increase() over a series that begins at 1 is 0: the first dead letter would tell nobody."""
    assert value(metrics, name, **labels) == 0


def test_every_counter_begins_at_0(metrics: ConsumerMetrics) -> None:
    """None is left out above: whatever labels it has, they are there from the start."""
    for family in metrics.registry.collect():
        if family.type == "counter":
            totals = [sample.value for sample in family.samples if sample.name.endswith("_total")]
            assert totals, family.name
            assert set(totals) == {0}, family.name


def test_every_outcome_and_reason_has_a_series() -> None:
    assert set(get_args(DoneOutcome)) <= set(MESSAGES)
    assert set(get_args(DeadReason)) == set(DEAD_REASONS)


def test_every_recorder_is_tried_below() -> None:
    public = {name for name in vars(ConsumerMetrics) if not name.startswith("_")}

    assert public == RECORDINGS.keys()


@pytest.mark.parametrize("recording", RECORDINGS)
def test_a_broken_recorder_raises_nothing(metrics: ConsumerMetrics, recording: str) -> None:
    """OPS-1."""
    for name in vars(metrics).keys() - {"registry", "_types"}:
        setattr(metrics, name, Broken())

    with capture_logs():
        for _ in range(3):
            RECORDINGS[recording](metrics)


def test_what_is_recorded_shows_its_exact_values(metrics: ConsumerMetrics) -> None:
    """OPS-2."""
    for name, record in RECORDINGS.items():
        if name != "revoked":
            record(metrics)

    assert value(metrics, "messages_total", type="order.placed", outcome="handled") == 3
    assert value(metrics, "dead_letters_total", reason="rejected") == 1
    assert value(metrics, "handler_seconds_sum", type="order.placed") == 0.5
    assert value(metrics, "batch_messages_sum") == 7
    assert value(metrics, "batches_split_total") == 1
    assert value(metrics, "statement_seconds_count", statement="record") == 1
    assert value(metrics, "database_errors_total", statement="known") == 1
    assert value(metrics, "commits_total", outcome="refused") == 1
    assert (value(metrics, "rebalances_total"), value(metrics, "partitions")) == (1, 4)
    assert (value(metrics, "in_flight_messages"), value(metrics, "in_flight_bytes")) == (5, 600)
    assert value(metrics, "oldest_unfinished_seconds") == 7.5
    assert value(metrics, "paused") == 1
    assert (value(metrics, "lag_messages", topic="orders"), value(metrics, "lag_messages", topic="payments")) == (12, 0)
    assert (value(metrics, "dead_letters_waiting"), value(metrics, "dead_letters_oldest_seconds")) == (2, 90)
    assert value(metrics, "redrives_total", outcome="redriven") == 1
    assert value(metrics, "effects_total", outcome="replayed") == 1
    assert value(metrics, "forgotten_effects_total") == 8
    assert value(metrics, "event_loop_blocked_seconds_total") == 1.5
    assert value(metrics, "build_info", version="1.2.3", holder="consumer-0/abc") == 1


def test_a_member_without_partitions_shows_none(metrics: ConsumerMetrics) -> None:
    metrics.assigned(4)
    metrics.revoked()

    assert (value(metrics, "partitions"), value(metrics, "rebalances_total")) == (0, 1)


@pytest.mark.parametrize("unknown", ["order.lost", None, "", "(other)"])
def test_a_type_that_the_consumer_does_not_know_makes_no_series(metrics: ConsumerMetrics, unknown: str | None) -> None:
    before = len(generate_latest(metrics.registry).splitlines())
    metrics.message(unknown, "dead")

    assert value(metrics, "messages_total", type="(other)", outcome="dead") == 1
    assert len(generate_latest(metrics.registry).splitlines()) == before


def test_a_clock_that_steps_back_shows_no_negative_time(metrics: ConsumerMetrics) -> None:
    metrics.attempt("order.placed", -1)
    metrics.in_flight(0, 0, -1)
    metrics.waiting(0, -1)

    assert value(metrics, "handler_seconds_sum", type="order.placed") == 0
    assert (value(metrics, "oldest_unfinished_seconds"), value(metrics, "dead_letters_oldest_seconds")) == (0, 0)
