"""Connections that are opened when they are first asked for: not every worker publishes, not every handler has effects."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final, Generic, Protocol, TypeVar

__all__ = ["Late"]

# A pool closes in 2 s at most, by force then.
_CLOSE_SECONDS: Final = 3.0


class _Closing(Protocol):
    async def close(self) -> None: ...


_Kind = TypeVar("_Kind", bound=_Closing)


class Late(Generic[_Kind]):
    """What ``open_it`` opens, once however many ask."""

    def __init__(self, open_it: Callable[[], Awaitable[_Kind]]) -> None:
        self._open = open_it
        self._opened: _Kind | None = None
        self._opening = asyncio.Lock()

    async def opened(self) -> _Kind:
        """It. Raises what opening it raises, and opens it anew for whoever asks next."""
        if self._opened is None:
            async with self._opening:
                if self._opened is None:
                    self._opened = await self._open()
        return self._opened

    async def close(self) -> None:
        """Close it, even if it is being opened at this moment for somebody who waits for it no more; not where that takes long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS), self._opening:
                if self._opened is not None:
                    await self._opened.close()
