"""How the benchmarks' services are served: as documented, in the worker's own process."""

import asyncio
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from benchmarks.workers import ready_and_wait
from producer_sdk.http.sockets import listening_socket

__all__ = ["serve"]


async def serve(application: Callable[[asyncio.Event], FastAPI], port: int) -> None:
    """Serve until told to end, by the signal that starts other workers. The application sets the event in its lifespan."""
    started = asyncio.Event()
    server = uvicorn.Server(uvicorn.Config(application(started), access_log=False, log_level="warning"))
    serving = asyncio.create_task(server.serve(sockets=[listening_socket("127.0.0.1", port)]))
    await started.wait()
    await ready_and_wait()
    server.should_exit = True
    await serving
