"""Calls a handler, so that whatever it raises ends its attempt and nothing else, and so that it takes no longer than it may."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from fencepost.cancelling import cancelled

__all__ = ["CallEnded", "HandlerExited", "called", "called_within"]

# What a call may need to clean up after it was cancelled. Short against the ledger's margin, in which its end is to be recorded.
_CLEAN_UP_SECONDS: Final = 1.0
_REMEDY: Final = "it catches its own cancellation: let asyncio.CancelledError pass"
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


@dataclass(frozen=True, slots=True)
class CallEnded:
    """How a call ended: with a ``result``, or with an ``error``, ``TimeoutError`` where its time was over. ``interrupted``: whoever
    waited for it was cancelled meanwhile, and has to raise that when it has made use of the rest."""

    result: object = None
    error: Exception | None = None
    interrupted: asyncio.CancelledError | None = None

    def answer(self) -> object:
        """The result. Raises what the call did, or the cancellation."""
        if self.interrupted is not None:
            raise self.interrupted
        if self.error is not None:
            raise self.error
        return self.result


async def called_within(seconds: float, told: str, function: Callable[..., Awaitable[object]], *arguments: object) -> CallEnded:
    """How a call ended that may take ``seconds``; then it is cancelled, as it is when whoever waits for it is. Raises only their
    cancellation, where the call came to nothing that could be told.

    One that does not end even so, though it is cancelled twice, is not waited for: it is left to itself, and the log says that
    ``told`` did not end.
    """
    call = asyncio.create_task(called(function, *arguments))
    interrupted: asyncio.CancelledError | None = None
    try:
        await asyncio.wait({call}, timeout=seconds)
    except asyncio.CancelledError as raised:
        interrupted = raised
    if not call.done():
        await _end(call, told)
    if call.done() and not call.cancelled():
        error = call.exception()
        assert error is None or isinstance(error, Exception), "the rest has been made one"
        return CallEnded(None if error else call.result(), error, interrupted)
    if interrupted is not None:
        raise interrupted
    return CallEnded(error=TimeoutError())


async def _end(call: "asyncio.Task[object]", told: str) -> None:
    try:
        if not await cancelled(call, _CLEAN_UP_SECONDS):
            _tell(told)
    except asyncio.CancelledError:
        call.cancel()  # whoever waits has to go now, and leaves it without knowing whether it ends
        raise
    finally:
        if not call.done():
            _left.add(call)
        call.add_done_callback(_forget)


def _tell(told: str) -> None:
    import structlog  # whoever imports the SDK to test handlers needs no logs

    structlog.get_logger(__name__).warning("call_does_not_end", call=told, left_behind=len(_left) + 1, remedy=_REMEDY)


def _forget(call: "asyncio.Task[object]") -> None:
    _left.discard(call)
    if not call.cancelled():
        call.exception()  # nobody asks for it any more, and asyncio would complain of that
