"""Tells of the process's end when it is asked for, and not when it comes.

A server waits for open answers before it ends an application's lifespan. Streams and waiting requests are such answers, so they
have to hear the signal itself.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

__all__ = ["told_of_the_end"]

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def told_of_the_end(tell: Callable[[], None]) -> Iterator[None]:
    """Within the block, ``tell`` is called in the running loop at SIGTERM and SIGINT, before whoever handles them so far.

    Enter it once the server has set its handlers: in the lifespan. Outside of the main thread Python has no signals; then the
    streams end with their budgets.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def on_signal(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(tell)
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)
        elif handler == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    for number in _SIGNALS:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number in _SIGNALS:
            if signal.getsignal(number) is on_signal and before[number] is not None:
                signal.signal(number, before[number])
