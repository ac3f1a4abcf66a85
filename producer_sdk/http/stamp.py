"""The outermost layer of an application with durable routes: notes when a request arrived, before any middleware took its time."""

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from fencepost.clock import lease_clock

__all__ = ["ArrivalStamp", "arrival_of", "root_path"]

_ARRIVAL: Final = "fencepost.arrival"
_ROOT_PATH: Final = "fencepost.root_path"


class ArrivalStamp:
    """ASGI middleware, put outermost by ``durable.install``."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault(_ARRIVAL, lease_clock())
            scope.setdefault(_ROOT_PATH, scope.get("root_path", ""))
        await self.app(scope, receive, send)


def arrival_of(scope: Scope) -> float:
    """When the request arrived, on ``lease_clock``; now, where no stamp is installed."""
    arrival: float | None = scope.get(_ARRIVAL)
    return lease_clock() if arrival is None else arrival


def root_path(scope: Scope) -> str:
    """The path below which the application is served, without that of a mounted part of it."""
    path: str | None = scope.get(_ROOT_PATH)
    return (scope.get("root_path", "") if path is None else path).rstrip("/")
