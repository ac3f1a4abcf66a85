"""The event loop of Fencepost's own processes: uvloop where it is installed, else asyncio's."""

import asyncio
from collections.abc import Callable

__all__ = ["fastest_loop"]


def fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """A factory for ``asyncio.Runner``; None means asyncio's own loop."""
    try:
        from uvloop import new_event_loop
    except ModuleNotFoundError:
        return None
    return new_event_loop
