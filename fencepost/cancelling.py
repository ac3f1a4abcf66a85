"""Ends what was asked to end."""

import asyncio
from typing import Any, Final

__all__ = ["REMEDY", "cancelled"]

#: For whoever wrote what does not end.
REMEDY: Final = "it catches its own cancellation, or waits without a bound while it cleans up: let asyncio.CancelledError pass"
_AGAIN_SECONDS: Final = 0.2


async def cancelled(task: "asyncio.Task[Any]", seconds: float) -> bool:
    """Cancel a task, which may take ``seconds`` to clean up, and once more then; whether it has ended.

    The second cancellation is for what waits without a bound while it cleans up, as asyncpg's close() does for the word of a
    connection that is silent.
    """
    for patience in (seconds, _AGAIN_SECONDS):
        task.cancel()
        await asyncio.wait({task}, timeout=patience)
        if task.done():
            return True
    return False
