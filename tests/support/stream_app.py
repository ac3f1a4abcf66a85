"""An application that streams, as a process: ``python -m tests.support.stream_app``. Nobody executes its runs but the test.

Settings as those of routes, in the environment. ``X-User: tenant/id`` is whom it believes. ``/readyz`` says that it serves,
``/metrics`` shows its metrics.
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, Final

import uvicorn
from fastapi import Depends, FastAPI, Header, HTTPException, Response
from prometheus_client import generate_latest
from pydantic import BaseModel

from fencepost.devservices import free_port
from fencepost.devservices.processes import Watchdog
from producer_sdk.http import Durable, Principal
from producer_sdk.http.sockets import listening_socket
from tests.support.service_process import ServiceProcess, Setting

__all__ = ["StreamServer"]

SECONDS: Final = "STREAM_APP_SECONDS"
PORT: Final = "STREAM_APP_PORT"
_ROOT: Final = Path(__file__).resolve().parents[2]
_SECRETS: Final = "1:" + "MTIzNDU2Nzg5MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTI="


class Prompt(BaseModel):
    text: str


class Answer(BaseModel):
    text: str


class StreamServer(ServiceProcess):
    """The settings of routes without their prefix: ``max_streams=5``. ``stream_seconds``: the budget of its streams."""

    def __init__(
        self, database_url: str, *, log: Path, watchdog: Watchdog, stream_seconds: float = 60, **settings: Setting
    ) -> None:
        port = free_port()
        chosen = {f"routes_{name}": value for name, value in settings.items()}
        super().__init__(
            ("-m", "tests.support.stream_app"),
            chosen | {"database_url": database_url, "idempotency_secrets": _SECRETS},
            http_port=port,
            log=log,
            watchdog=watchdog,
            environment={"PYTHONPATH": str(_ROOT), PORT: str(port), SECONDS: str(stream_seconds)},
        )


def principal(x_user: Annotated[str | None, Header()] = None) -> Principal:
    if x_user is None:
        raise HTTPException(401)
    tenant, _, name = x_user.partition("/")
    return Principal(tenant, name)


class Handle:
    """A database handle, which its dependency closes."""

    is_open = True


async def handle() -> AsyncIterator[Handle]:
    opened = Handle()
    yield opened
    opened.is_open = False
    _closed.append(opened)


_closed: list[Handle] = []


def application() -> FastAPI:
    durable = Durable(principal=principal)
    router = durable.router()

    @durable.workflow("answer")
    async def answer(context: Any, prompt: Prompt) -> Answer:
        raise NotImplementedError

    @router.post("/answers", status_code=201)
    @durable.stream(answer, stream_seconds=float(os.environ[SECONDS]), live=True, run_id_header=True)
    async def answers(prompt: Prompt, handle: Annotated[Handle, Depends(handle)]) -> Prompt:
        assert handle.is_open
        return prompt

    @router.post("/drafts")
    @durable.route(answer, run_id_header=True, wait_seconds=0)
    async def drafts(prompt: Prompt) -> Prompt:
        return prompt

    app = FastAPI()

    @app.get("/readyz")
    async def readyz() -> None:
        return None

    @app.get("/closed")
    async def closed() -> int:
        return len(_closed)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(durable.site.metrics.registry))

    app.include_router(router)
    durable.install(app)
    return app


def main() -> None:
    server = uvicorn.Server(uvicorn.Config(application()))
    server.run(sockets=[listening_socket("127.0.0.1", int(os.environ[PORT]))])


if __name__ == "__main__":
    main()
