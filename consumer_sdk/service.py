"""Runs a worker or a consumer as a process: signals, logs, and an end that waits for nobody who does not end."""

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

import structlog

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
    """Make the service within its loop, and run it until SIGTERM or Ctrl-C."""

    async def main() -> None:
        running = make()
        gc.freeze()
        # Thousands of messages in memory make a collection dear, and what they leave has no circles.
        gc.set_threshold(_GC_THRESHOLD, _GC_GENERATIONS, _GC_GENERATIONS)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, running.stop)
        loop.set_exception_handler(_log_loop_error)
        await running.run()
        # Stopped in order: a second signal must not turn exit code 0 into a kill while the interpreter ends.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
        if running.left_behind or _threads_of_handlers() or await _tasks_of_handlers():
            # The interpreter would wait for them without a bound. What they hold runs out, and others recover it.
            sys.stderr.flush()
            os._exit(0)

    with asyncio.Runner(loop_factory=fastest_loop()) as runner:
        runner.run(main())


def _threads_of_handlers() -> bool:
    return any(thread is not threading.main_thread() and not thread.daemon for thread in threading.enumerate())


async def _tasks_of_handlers() -> bool:
    """Whether calls that were left behind, or what handlers have begun, do not end even now."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    return bool(tasks and (await asyncio.wait(tasks, timeout=_END_SECONDS))[1])


def _log_loop_error(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A task of a handler's own that failed, say. Its class only: the message may quote what must not be logged."""
    error = context.get("exception")
    _log.error("loop_error", message=context.get("message"), error_class=type(error).__name__ if error else None)
