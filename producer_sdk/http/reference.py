"""The reference pages of durable routes: their problems, settings and metrics."""

import sys

from fencepost.reference import metrics_page, settings_page, write_or_check
from producer_sdk.http.metrics import RouteMetrics
from producer_sdk.http.problems import reference_page
from producer_sdk.http.settings import RouteSettings

__all__ = ["pages"]


def pages() -> dict[str, str]:
    """By file name below docs/reference."""
    return {
        "durable-routes.md": reference_page(),
        "route-settings.md": settings_page(
            "Settings of durable routes",
            RouteSettings,
            relations="a statement of Fencepost's takes less than a request may.",
        ),
        "route-metrics.md": metrics_page(
            "Metrics of durable routes",
            RouteMetrics().registry,
            remarks="In the application's own process: `durable.registry`, which the application serves where it likes. Route "
            "labels are the names of its durable routes.",
        ),
    }


if __name__ == "__main__":
    sys.exit(write_or_check(pages(), sys.argv[1:]))
