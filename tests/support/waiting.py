"""Waiting for what another process does: bounded, and loud when it doesn't happen."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar, overload

Result = TypeVar("Result")

POLL_SECONDS: Final = 0.05
DEFAULT_SECONDS: Final = 15.0


@overload
def eventually(
    condition: Callable[[], Awaitable[Result]], timeout: float = ..., *, message: str = ...
) -> Coroutine[Any, Any, Result]: ...
@overload
def eventually(condition: Callable[[], Result], timeout: float = ..., *, message: str = ...) -> Coroutine[Any, Any, Result]: ...
async def eventually(
    condition: Callable[[], Any],
    timeout: float = DEFAULT_SECONDS,  # noqa: ASYNC109 - the bound is the purpose of this function
    *,
    message: str = "",
) -> Any:
    """Return the condition's first true result; fail with the last one when the time in seconds is over.

    The condition is a plain or an async callable. An AssertionError that it raises counts as not yet true.
    """
    deadline = time.monotonic() + timeout
    while True:
        last, failure = await _ask(condition)
        if failure is None and last:
            return last
        if time.monotonic() > deadline:
            what = message or getattr(condition, "__name__", "the condition")
            raise AssertionError(f"{what}: not true within {timeout:g} s, last result {last!r}") from failure
        await asyncio.sleep(POLL_SECONDS)


async def _ask(condition: Callable[[], Any]) -> tuple[Any, AssertionError | None]:
    try:
        result = condition()
        return (await result if inspect.isawaitable(result) else result), None
    except AssertionError as error:
        return None, error
