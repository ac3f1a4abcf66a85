"""Tells the request's span what came of it, where the process uses OpenTelemetry. Never loads it."""

import sys
from typing import Final

__all__ = ["mark_span"]

_API: Final = "opentelemetry.trace"


def mark_span(route: str, outcome: str) -> None:
    """Put route and outcome on the current span; the run that the request started is in the same trace by its traceparent."""
    api = sys.modules.get(_API)
    if api is not None:
        api.get_current_span().set_attributes({"fencepost.route": route, "fencepost.outcome": outcome})
