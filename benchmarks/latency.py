"""Commit to consumer at a low, steady rate, with some work between the enqueue and the commit; and Kafka alone beside it."""

from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from typing import Any, Final

from benchmarks.lab import Lab
from benchmarks.measure import delays_ms, ratios, summary_ms
from benchmarks.report import Report

__all__ = ["latency"]

_PARTITIONS: Final = 8
_RATE: Final = 100.0
_WORK_SECONDS: Final = 0.005
_PAYLOAD_BYTES: Final = 200
_DIRECT: Final = "direct"
# A relay that has just started still settles; so does the broker's first use of a topic.
_WARM_SECONDS: Final = 2.0


def latency(lab: Lab, *, repeats: int, seconds: float, writers: tuple[int, ...], wakeup: str) -> Report:
    """One window for Kafka alone and one for each number of writers, in turn; the relay has its defaults."""
    windows: dict[str, list[dict[str, float]]] = defaultdict(list)
    with lab.database() as url:
        topic, direct_topic = lab.topic(_PARTITIONS), lab.topic(_PARTITIONS)
        with lab.relay(url, wakeup=wakeup) as relay, lab.worker("consumer", topics=[topic, direct_topic]) as consumer:
            began: dict[str, list[dict[str, float]]] = defaultdict(list)
            _write(lab, url, topic, writers=2, seconds=_WARM_SECONDS)
            _produce(lab, direct_topic, seconds=_WARM_SECONDS)
            cpu = relay.cpu()
            for _ in range(repeats):
                began[_DIRECT].append(_produce(lab, direct_topic, seconds=seconds))
                for count in writers:
                    began[f"writers_{count}"].append(_write(lab, url, topic, writers=count, seconds=seconds))
            cpu = relay.cpu() - cpu
            arrived = consumer.run()
        for side, per_repeat in began.items():
            windows[side] = [summary_ms(delays_ms(ids, arrived)) for ids in per_repeat]
    report = Report(benchmark="latency", machine=lab.machine())
    report.figures = {
        "rate_per_second": _RATE,
        "work_ms_between_enqueue_and_commit": _WORK_SECONDS * 1_000,
        "wakeup": wakeup,
        "relay_cpu_share_of_one_core": cpu / (seconds * repeats * (len(writers) + 1)),
        **{f"{side}_ms": _figures(found) for side, found in windows.items()},
    }
    report.ratios = {
        f"{side}_vs_direct_{share}": ratios([one[share] for one in found], [one[share] for one in windows[_DIRECT]])
        for side, found in windows.items()
        if side != _DIRECT
        for share in ("p50", "p99")
    }
    return report


def _write(lab: Lab, url: str, topic: str, *, writers: int, seconds: float) -> dict[str, float]:
    parameters: Mapping[str, Any] = {
        "database_url": url, "topic": topic, "writers": writers, "rate": _RATE, "seconds": seconds,
        "work_seconds": _WORK_SECONDS, "payload_bytes": _PAYLOAD_BYTES,
    }  # fmt: skip
    with lab.worker("steady_writers", **parameters) as worker:
        committed: dict[str, float] = worker.run()
    return committed


def _produce(lab: Lab, topic: str, *, seconds: float) -> dict[str, float]:
    with lab.worker("direct_producer", topic=topic, rate=_RATE, seconds=seconds, payload_bytes=_PAYLOAD_BYTES) as worker:
        sent: dict[str, float] = worker.run()
    return sent


def _figures(found: list[dict[str, float]]) -> dict[str, float]:
    return {
        "p50": median(one["p50"] for one in found),
        "p99": median(one["p99"] for one in found),
        "p99_best": min(one["p99"] for one in found),
        "p99_worst": max(one["p99"] for one in found),
        "messages": sum(one["count"] for one in found),
    }
