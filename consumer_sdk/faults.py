"""How a worker and a consumer end when a part of them has failed: told by class and place, never by message."""

import asyncio
import traceback
from collections.abc import Sequence
from typing import Final

import structlog

from fencepost.errors import ConfigurationError, InvariantViolated

__all__ = ["raise_fault"]

_log = structlog.get_logger(__name__)

_MOST_FRAMES: Final = 12


def raise_fault(service: str, fault: BaseException | None, loops: Sequence[asyncio.Task[None]]) -> None:
    """Raise what ended the service: ``fault``, or else what the first of its loops failed of. Nothing, if nothing did."""
    for loop in loops:
        if fault is None and loop.done() and not loop.cancelled():
            fault = loop.exception()
    if isinstance(fault, ConfigurationError):
        raise fault
    if fault is not None:
        # The frames and the class, not the message: a PostgreSQL error's detail quotes rows.
        frames = traceback.extract_tb(fault.__traceback__)[-_MOST_FRAMES:]
        stack = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        _log.error(f"{service}_failed", error_class=type(fault).__name__, at=stack)
        raise InvariantViolated(f"a part of the {service} failed in an unforeseen way; the process ends") from fault
