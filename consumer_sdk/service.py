"""Runs a worker or a consumer as a process: signals, logs, and an end that waits for nobody who does not end."""

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

import structlog

from fencepost.ending import tell
from fencepost.loops import fastest_loop

__all__ = ["Service", "run_service"]

_log = structlog.get_logger(__name__)

_GC_THRESHOLD: Final = 20_000
_GC_GENERATIONS: Final = 50
_END_SECONDS: Final = 1.0


class Service(Protocol):
    """``left_behind`` is how many of its handlers did not end."""

    left_behind: int

    def stop(self) -> None: ...
    async def run(self) -> None: ...


def run_service(make: Callable[[], Service]) -> None:
    """Make the service within its loop, and run it until SIGTERM or Ctrl-C. Raises what it failed of. Where handlers have left
    what does not end, the process ends here, told and coded as the command would."""
    runner = asyncio.Runner(loop_factory=fastest_loop())
    fault: BaseException | None = None
    left_behind = False
    try:
        left_behind = runner.run(_run(make))
    except BaseException as error:  # noqa: BLE001 - a boundary: whatever ended the service, SystemExit of a handler's task too
        fault = error
    # The interpreter would wait for them without a bound. What they hold runs out, and others recover it.
    in_time = threading.Timer(0 if left_behind else _END_SECONDS, _exit, [fault])
    in_time.daemon = True
    in_time.start()
    with contextlib.suppress(BaseException):  # a task's sys.exit() while it cleans up must not take the fault's place
        runner.close()
    if _threads_of_handlers():
        _exit(fault)
    in_time.cancel()
    if fault is not None:
        raise fault


async def _run(make: Callable[[], Service]) -> bool:
    """Whether handlers were left behind."""
    running = make()
    gc.freeze()
    # Thousands of messages in memory make a collection dear, and what they leave has no circles.
    gc.set_threshold(_GC_THRESHOLD, _GC_GENERATIONS, _GC_GENERATIONS)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.stop)
    loop.set_exception_handler(_log_loop_error)
    try:
        await running.run()
    finally:
        # A second signal must not turn the exit code into a kill while the interpreter ends.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
    return bool(running.left_behind)


def _threads_of_handlers() -> bool:
    return any(thread is not threading.main_thread() and not thread.daemon for thread in threading.enumerate())


def _exit(fault: BaseException | None) -> None:
    code = 0
    if isinstance(fault, Exception):
        code = tell(fault)
    elif fault is not None:
        code = 1
    sys.stderr.flush()
    os._exit(code)


def _log_loop_error(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A task of a handler's own that failed, say. Its class only: the message may quote what must not be logged."""
    error = context.get("exception")
    _log.error("loop_error", message=context.get("message"), error_class=type(error).__name__ if error else None)
