"""What ``durable.install(app)`` adds: the outermost stamp, the runtime in the lifespan, and the routes of monitors and problems."""

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import structlog
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts

from fencepost.errors import ConfigurationError
from producer_sdk.http.ending import told_of_the_end
from producer_sdk.http.link_routes import link_router
from producer_sdk.http.monitor import monitor_router
from producer_sdk.http.probing import probe
from producer_sdk.http.routing import OPERATION, DurableRoute
from producer_sdk.http.settings import unknown_route_variables
from producer_sdk.http.stamp import ArrivalStamp
from producer_sdk.http.stream_link import redact_access_log

if TYPE_CHECKING:
    from producer_sdk.http.durable import Durable

__all__ = ["install"]

_log = structlog.get_logger(__name__)


def install(durable: "Durable", app: FastAPI) -> None:
    """See ``Durable.install``."""
    if not isinstance(app, FastAPI):
        raise ConfigurationError("durable.install takes the FastAPI application that is served")
    monitors = f"{durable.site.prefix}/operations/{{monitor_id}}"
    if any(context.path == monitors for context in iter_route_contexts(app.routes)):
        raise ConfigurationError(f"{monitors} is taken, by another Durable perhaps: pass a prefix= that it alone has")
    app.include_router(monitor_router(durable))
    app.include_router(link_router(durable))
    redact_access_log()
    app.add_middleware(ArrivalStamp)
    inner = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[Any]:
        _check_outermost(app)
        _check_routes(durable, app)
        async with _running(durable), inner(app) as state:
            durable.cached, durable.collected = await probe(durable, app)
            yield state

    app.router.lifespan_context = lifespan


@contextlib.asynccontextmanager
async def _running(durable: "Durable") -> AsyncIterator[None]:
    if durable.runtime is not None:
        raise ConfigurationError("one Durable serves one application")
    if unknown := unknown_route_variables():
        _log.warning("unknown_variables", names=unknown)
    runtime = durable.new_runtime()
    try:
        await runtime.start()
        durable.runtime, durable.started = runtime, True
        with told_of_the_end(runtime.drain):
            yield
    finally:
        durable.runtime = None
        await runtime.stop()


def _check_outermost(app: FastAPI) -> None:
    outermost: object = app.user_middleware[0].cls
    if outermost is not ArrivalStamp:
        raise ConfigurationError(
            "durable.install(app) must come after every app.add_middleware: time that a middleware outside of it takes would be "
            "missing from each request's deadline"
        )


def _check_routes(durable: "Durable", app: FastAPI) -> None:
    """Raises ``ConfigurationError`` for a durable handler that is served as an ordinary route."""
    for context in iter_route_contexts(app.routes):
        route = context.original_route
        endpoint = getattr(route, "endpoint", None)
        _, operation = getattr(endpoint, OPERATION, (None, None))
        if operation is not None and not isinstance(route, DurableRoute):
            raise ConfigurationError(f"route {operation.name}: put it on durable.router(), whose route class knows what to do")
        for declared in durable.operations.values():
            if declared.handler is endpoint:
                raise ConfigurationError(f"route {declared.name}: @durable.route goes below @router.post, or nothing is durable")
