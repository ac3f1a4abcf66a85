"""The reference pages of the worker's and the consumer's settings and metrics."""

import sys

from consumer_sdk.consumer_metrics import ConsumerMetrics
from consumer_sdk.consumer_settings import ConsumerSettings
from consumer_sdk.worker_metrics import WorkerMetrics
from consumer_sdk.worker_settings import WorkerSettings
from fencepost.reference import metrics_page, settings_page, write_or_check

__all__ = ["pages"]


def pages() -> dict[str, str]:
    """By file name below docs/reference."""
    return {
        "worker-settings.md": settings_page(
            "Settings of the worker",
            WorkerSettings,
            relations="the lease margin is at most a third of the lease.",
        ),
        "worker-metrics.md": metrics_page(
            "Metrics of the worker",
            WorkerMetrics(version="0", worker_id="reference", workflows=[]).registry,
            remarks="Workflow labels are the workflows that the worker has handlers for; what its reaper finds of others reads "
            "`(other)`. Gauges of the queue are read from the database, so every worker of a workflow shows the same.",
        ),
        "consumer-settings.md": settings_page(
            "Settings of the consumer",
            ConsumerSettings,
            relations="the ledger remembers at least as long as every topic keeps its messages and FENCEPOST_CONSUMER_REPLAY_DAYS "
            "together; the dead-letter topic is none of the consumed ones.",
        ),
        "consumer-metrics.md": metrics_page(
            "Metrics of the consumer",
            ConsumerMetrics(version="0", holder="reference", types=[], topics=[]).registry,
            remarks="Type labels are the types that the consumer has handlers for; all else reads `(other)`. A consumer whose "
            "handlers have workflows shows the metrics of a worker as well.",
        ),
    }


if __name__ == "__main__":
    sys.exit(write_or_check(pages(), sys.argv[1:]))
