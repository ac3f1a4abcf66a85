"""A recorder that fails must never turn work that was done into a failure."""

import functools
from collections.abc import Callable
from typing import ParamSpec

import structlog

__all__ = ["guarded"]

_P = ParamSpec("_P")


def guarded(record: Callable[_P, None]) -> Callable[_P, None]:
    """A failing recorder costs a sample, never a row or a run. Logged once a recorder, not once a row."""
    failed = False

    @functools.wraps(record)
    def recorded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        nonlocal failed
        try:
            record(*args, **kwargs)
        except Exception:  # noqa: BLE001 - a boundary: whatever a recorder raises must not reach the work
            if not failed:
                failed = True
                structlog.get_logger().exception("metric_failed", recorder=record.__name__)

    return recorded
