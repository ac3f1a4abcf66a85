"""A durable route as its author declares it, and what has come of one request to it."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, get_args, get_origin
from uuid import UUID

from fastapi import params
from pydantic import TypeAdapter
from starlette.types import Receive, Scope, Send

from fencepost.errors import ConfigurationError
from fencepost.workflows import Workflow
from producer_sdk.http.headers import Preference
from producer_sdk.http.metrics import RouteMetrics
from producer_sdk.http.principal import Principal
from producer_sdk.http.store import LineageKey, Standing

if TYPE_CHECKING:
    from producer_sdk.http.runtime import Runtime

__all__ = ["Call", "Operation", "Reply", "Site", "Started", "check_between", "check_handler"]

#: Of the time until the request's deadline: what a route leaves for its last read, and for its answer to travel.
START_MARGIN_SECONDS: Final = 1.0
WAIT_MARGIN_SECONDS: Final = 2.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """``name`` is the stable part of a key's scope. ``handler`` makes the workflow's input, once per key, inside the accepting
    transaction, which it gets as ``transaction_parameter``; ``arguments``: its other parameters.

    ``request_deadline_seconds`` None: the setting's. ``key_required`` None: for POST and PATCH. ``present`` shapes the result once.
    """

    name: str
    workflow: Workflow
    handler: Callable[..., Awaitable[Any]] = field(repr=False)
    arguments: frozenset[str]
    transaction_parameter: str | None
    reply: "Reply" = field(repr=False)
    wait_seconds: float
    request_deadline_seconds: float | None
    key_required: bool | None
    key_retention_seconds: float
    max_input_bytes: int | None
    starts_per_minute: int | None
    strict: bool
    run_id_header: bool
    form_field: str | None
    present: Callable[[Any], Any] | None = field(repr=False)
    presented: "TypeAdapter[Any] | None" = field(repr=False)

    def requires_key(self, method: str) -> bool:
        return method in {"POST", "PATCH"} if self.key_required is None else self.key_required


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """What every answer of one ``Durable`` needs, whether or not the database is there. ``prefix``: of monitors and problems."""

    prefix: str
    metrics: RouteMetrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A request to an operation, as far as its headers tell. Times are on ``lease_clock``.

    ``cached``: a middleware keeps answers of status 2xx. ``form``: an HTML form has sent it.
    """

    operation: Operation
    method: str
    success_status: int
    preference: Preference
    arrival: float
    deadline: float
    cached: bool = False
    form: bool = False

    @property
    def scope_operation(self) -> str:
        return f"{self.method} {self.operation.name}"

    @property
    def start_until(self) -> float:
        """When a start that is not committed is given up."""
        return self.deadline - START_MARGIN_SECONDS

    @property
    def granted_seconds(self) -> float:
        """The wait in force, from the arrival on: the route's, or less where the client or the deadline wants less."""
        if self.preference.respond_async:
            return 0.0
        budget = min(self.operation.wait_seconds, max(self.deadline - WAIT_MARGIN_SECONDS - self.arrival, 0.0))
        wished = self.preference.wait_seconds
        return budget if wished is None else min(budget, float(wished))

    @property
    def wait_until(self) -> float:
        return self.arrival + self.granted_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A known lineage, and the request that asks for it. ``replayed``: another request has started it. ``standing``: as it was read
    with the key; None where it was not. ``read``: what the reply made of the headers. ``headers``: what dependencies have set."""

    call: Call
    runtime: "Runtime"
    principal: Principal
    key: LineageKey
    monitor_id: UUID
    replayed: bool
    standing: Standing | None
    read: Any = None
    headers: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def operation(self) -> Operation:
        return self.call.operation


class Reply(Protocol):
    """How an operation answers once its lineage is known."""

    #: Whether the answer is sent piece by piece: under a middleware that collects answers it is refused.
    streams: bool

    def read(self, scope: Scope) -> Any:
        """Look at the request's headers, before anything is started. Raises ``Refused``."""

    async def __call__(self, started: Started, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Nothing of FastAPI's is open any more, and no connection is held."""

    def responses(self, operation: Operation) -> Mapping[int | str, dict[str, Any]]:
        """What the description of the API says of the answers besides the problems."""


def check_between(what: str, number: object, least: float, most: float) -> None:
    """Raise ``ConfigurationError`` for what is neither None nor a number of that range."""
    if number is None:
        return
    if isinstance(number, bool) or not isinstance(number, int | float) or not least <= number <= most:
        raise ConfigurationError(f"{what} must be from {least:g} to {most:g}")


def check_handler(what: str, handler: object) -> None:
    """Raise ``ConfigurationError`` for a handler that cannot work, or that would believe the client who it is."""
    if not inspect.iscoroutinefunction(handler):
        raise ConfigurationError(f"{what}: the handler must be an `async def` function that returns the workflow's input")
    for name, parameter in inspect.signature(handler, eval_str=True).parameters.items():
        if _is_bare_principal(parameter):
            raise ConfigurationError(
                f"{what}: {name}: Principal is a field of the body to FastAPI, so that the client would say who it is; write "
                f"{name}: Annotated[Principal, Depends(...)] with the dependency of Durable(principal=...)"
            )


def _is_bare_principal(parameter: inspect.Parameter) -> bool:
    """Whether FastAPI would read the principal from the request, since no ``Depends`` says where it comes from."""
    annotation, marks = parameter.annotation, [parameter.default]
    if get_origin(annotation) is Annotated:
        annotation, *extra = get_args(annotation)
        marks += extra
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    return any(issubclass(kind, Principal) for kind in kinds) and not any(isinstance(mark, params.Depends) for mark in marks)
