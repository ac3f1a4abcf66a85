"""The reference pages of the relay's settings and metrics."""

import sys

from fencepost.reference import metrics_page, settings_page, write_or_check
from relay.metrics import Metrics
from relay.settings import RelaySettings

__all__ = ["pages"]


def pages() -> dict[str, str]:
    """By file name below docs/reference."""
    return {
        "settings.md": settings_page(
            "Settings of the relay",
            RelaySettings,
            relations="the publish deadline and the lease margin together are shorter than the lease; the memory budget holds the "
            "largest record in flight and one polled.",
        ),
        "metrics.md": metrics_page(
            "Metrics of the relay",
            Metrics(version="0", relay_id="reference").registry,
            remarks="Topic labels are bounded: from the 201st topic on they read `(other)`. Gauges of a lane are shown by the "
            "relay that holds it.",
        ),
    }


if __name__ == "__main__":
    sys.exit(write_or_check(pages(), sys.argv[1:]))
