"""The reference pages of the worker's settings and metrics."""

import sys

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
    }


if __name__ == "__main__":
    sys.exit(write_or_check(pages(), sys.argv[1:]))
