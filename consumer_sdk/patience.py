"""A write that is done again while that may help: the database is away, or another transaction has locked the row."""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from fencepost.clock import lease_clock
from fencepost.errors import TransientError

__all__ = ["patiently"]

_Answer = TypeVar("_Answer")

_LEAST_PAUSE_SECONDS: Final = 0.05
_MOST_PAUSE_SECONDS: Final = 1.0


async def patiently(once: Callable[[], Awaitable[_Answer]], *, until: float, failed: Callable[[], object]) -> _Answer:
    """Do it, and again after each ``TransientError``, until that time of ``lease_clock`` and no longer, since after it the job may
    be another's. ``failed`` is told of each try that failed."""
    try:
        return await once()
    except TransientError:
        failed()

    async def again() -> _Answer:
        return await once()  # tenacity awaits what it can tell for a coroutine function, and no lambda

    def over(_: RetryCallState) -> bool:
        failed()
        return lease_clock() >= until

    retrying = AsyncRetrying(
        retry=retry_if_exception_type(TransientError),
        wait=wait_random_exponential(multiplier=_LEAST_PAUSE_SECONDS, max=_MOST_PAUSE_SECONDS),
        stop=over,
        reraise=True,
    )
    return await retrying(again)
