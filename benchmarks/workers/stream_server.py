"""A service with one streaming route, served as documented. It ends at the signal that starts others."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Header
from pydantic import BaseModel

from benchmarks.workers import run_worker
from benchmarks.workers.serving import serve
from fencepost.secrets import Secrets
from producer_sdk.http import Durable, Principal, load_route_settings


class Prompt(BaseModel):
    text: str


def principal(x_user: Annotated[str, Header()]) -> Principal:
    return Principal("bench", x_user)


async def stream_server(kafka: str, database_url: str, port: int, streams: int) -> None:
    """Serve until told to end."""
    await serve(partial(application, database_url, streams), port)


def application(database_url: str, streams: int, started: asyncio.Event) -> FastAPI:
    """``POST /answers``: nobody executes its runs."""
    settings = load_route_settings(
        {
            "database_url": database_url,
            "routes_max_streams": streams,
            "routes_max_streams_per_principal": streams,
            "routes_read_connections": 8,
            "routes_start_connections": 2,
        }
    )
    durable = Durable(principal=principal, settings=settings, secrets=Secrets({1: b"benchmark" * 4}, write=[1]))
    router = durable.router()

    @durable.workflow("answer")
    async def answer(context: Any, prompt: Prompt) -> str:
        raise NotImplementedError

    @router.post("/answers")
    @durable.stream(answer, stream_seconds=3600)
    async def answers(prompt: Prompt) -> Prompt:
        return prompt

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        started.set()
        yield

    app = FastAPI(lifespan=lifespan)
    app.include_router(router)
    durable.install(app)
    return app


if __name__ == "__main__":
    run_worker(stream_server)
