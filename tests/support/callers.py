"""The connections of a server in the test's own loop: each is served by a task, and none outlives the server.

A connection that nobody closed would be found by the garbage collector in the middle of another test, whose failure it would be.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

__all__ = ["Callers"]

# From the moment a connection is taken until `accept` hears of it the loop turns twice.
TURNS: Final = 5


class Callers:
    """``server = await asyncio.start_server(callers.accept, …)``, and ``await callers.close(server)``.

    Whatever ends a task, its connection is closed with it.
    """

    def __init__(self, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]) -> None:
        self._serve = serve
        self.tasks: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A plain function: a coroutine that is cancelled before it has begun closes nothing."""
        task = asyncio.create_task(self._serve(reader, writer))
        self.tasks.add(task)

        def left(_task: "asyncio.Task[None]") -> None:
            self.tasks.discard(task)
            if not writer.is_closing():  # what is closing may have something to say still
                writer.transport.abort()

        task.add_done_callback(left)

    async def close(self, server: asyncio.Server) -> None:
        """Close the server and its connections. One that it closes under, half made, would be left open by asyncio."""
        for listening in server.sockets:
            asyncio.get_running_loop().remove_reader(listening)
        await self._settled()
        server.close()
        await self.cut()

    async def cut(self) -> None:
        """Break every connection that is open now, those included that have been taken and not yet been served."""
        await self._settled()
        if tasks := set(self.tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _settled(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
