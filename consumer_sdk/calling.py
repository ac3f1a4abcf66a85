"""Calls a handler, so that whatever it raises ends its attempt and nothing else, and so that it takes no longer than it may."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog

__all__ = ["HandlerExited", "called", "called_within"]

_log = structlog.get_logger(__name__)

# What a call may need to clean up after it was cancelled. Short against the ledger's margin, which the record of its end must keep.
_CLEAN_UP_SECONDS: Final = 1.0
_REMEDY: Final = (
    "it catches its own cancellation, or waits without a bound while it cleans up (asyncpg's close() does, of a silent connection:"
    " terminate() does not): let asyncio.CancelledError pass"
)
#: The loop itself holds no task; those that nobody waits for any more would be collected while they run.
_left: "set[asyncio.Task[object]]" = set()


class HandlerExited(Exception):
    """A handler tried to end the process, or what it awaited was cancelled while it was not."""


async def called(function: Callable[..., Awaitable[object]], *arguments: object) -> object:
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


async def called_within(seconds: float, told: str, function: Callable[..., Awaitable[object]], *arguments: Any) -> object:
    """The same of a call that takes ``seconds`` at most; then it is cancelled. Raises ``TimeoutError``.

    One that does not end even so is not waited for: it is left to itself, and the log says that ``told`` did not end.
    """
    call = asyncio.create_task(called(function, *arguments))
    try:
        await asyncio.wait({call}, timeout=seconds)
    except asyncio.CancelledError:
        await _end(call, told)
        raise
    if not call.done():
        await _end(call, told)
        if not call.done() or call.cancelled():
            raise TimeoutError
    return call.result()


async def _end(call: "asyncio.Task[object]", told: str) -> None:
    call.cancel()
    try:
        await asyncio.wait({call}, timeout=_CLEAN_UP_SECONDS)
    finally:
        if not call.done():
            _left.add(call)
            _log.warning("call_does_not_end", call=told, left_behind=len(_left), remedy=_REMEDY)
        call.add_done_callback(_forget)


def _forget(call: "asyncio.Task[object]") -> None:
    _left.discard(call)
    if not call.cancelled():
        call.exception()  # nobody asks for it any more, and asyncio would complain of that
