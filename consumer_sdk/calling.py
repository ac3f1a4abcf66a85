"""Calls a handler, so that whatever it raises ends its attempt and nothing else."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["HandlerExited", "called"]


class HandlerExited(Exception):
    """A handler tried to end the process, or what it awaited was cancelled while it was not."""


async def called(function: Callable[..., Coroutine[Any, Any, object]], *arguments: object) -> object:
    """What the handler returns. Raises ``HandlerExited`` for sys.exit() in a library, say, or a task's cancellation."""
    try:
        return await function(*arguments)
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        raise HandlerExited("the handler raised CancelledError, and nobody had cancelled it") from None
    except Exception:
        raise
    except BaseException as error:  # noqa: BLE001
        raise HandlerExited(f"the handler raised {type(error).__name__}") from None
