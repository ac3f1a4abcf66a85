"""The route class of durable routes: what is asked of a request, and in which order.

FastAPI parses a whole body before any dependency runs. Here the order is: arrival, the principal, the key, what the reply reads
(a stream's cursor), the body's size, strict JSON, the schema, the key's look-up, the handler in the accepting transaction. Then
everything that FastAPI holds open is closed, and only then does the reply wait or stream.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import structlog
from fastapi import Depends, params
from fastapi.datastructures import DefaultPlaceholder
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import SolvedDependency, get_dependant, solve_dependencies
from fastapi.routing import APIRoute, _effective_route_context_var
from pydantic_core import PydanticUndefined
from starlette.background import BackgroundTasks
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fencepost.clock import lease_clock
from fencepost.errors import ConfigurationError, KeyInvalid, KeyMissing, TransientError
from producer_sdk.http.accepting import NotKnown
from producer_sdk.http.accepting import Request as Accepted
from producer_sdk.http.answers import Answer, pending_answer, problem_answer
from producer_sdk.http.headers import KEY_HEADER, field_values, parse_key, preference_of
from producer_sdk.http.openapi import described
from producer_sdk.http.operation import START_MARGIN_SECONDS, Call, Operation, Site, Started
from producer_sdk.http.problems import Refused
from producer_sdk.http.requests import NO_BODY, bound_request, check_length, form_body, is_form, json_body, limited, refused_fields
from producer_sdk.http.stamp import arrival_of
from producer_sdk.http.waiting import answer_call
from producer_sdk.identity import check_key

if TYPE_CHECKING:
    from producer_sdk.http.durable import Durable
    from producer_sdk.http.runtime import Runtime

__all__ = ["OPERATION", "PROBE", "DurableRoute", "Parked", "ParkingRoute"]

_log = structlog.get_logger(__name__)

# What a dependency may need to clean up after it was cancelled. What follows is in time for the request's deadline.
_CLEAN_UP_SECONDS: Final = START_MARGIN_SECONDS / 2

#: The attribute of an endpoint that says which durable and operation it belongs to.
OPERATION: Final = "__fencepost_operation__"
#: A scope that holds this is one of the start-up probe's.
PROBE: Final = "fencepost.probe"
_PARKED: Final = "fencepost.parked"
_STORED_AS_IT_IS: Final = (
    "response_model_include",
    "response_model_exclude",
    "response_model_exclude_unset",
    "response_model_exclude_defaults",
    "response_model_exclude_none",
)

_Result = TypeVar("_Result")
Finish = Callable[[Scope, Receive, Send], Awaitable[None]]


class Parked(Response):
    """Sends nothing: the route finishes it once FastAPI's exit stacks are closed."""

    def __init__(self, finish: Finish) -> None:
        super().__init__()
        self._finish = finish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_PARKED] = self._finish


class ParkingRoute(APIRoute):
    """A route whose handler may return ``Parked``."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().handle(scope, receive, send)
        finish: Finish | None = scope.pop(_PARKED, None)
        if finish is not None:
            await finish(scope, receive, send)


class DurableRoute(ParkingRoute):
    """A durable route, where the endpoint is one; else FastAPI's own."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self._durable: Durable | None
        self._operation: Operation | None
        self._durable, self._operation = getattr(endpoint, OPERATION, (None, None))
        if self._durable is not None and self._operation is not None:
            _check_options(self._operation, endpoint, options)
            options["dependencies"] = [*(options.get("dependencies") or ()), Depends(self._durable.principal)]
            options = described(self._operation, options)
        super().__init__(path, endpoint, **options)
        if self._operation is not None and any(isinstance(field.field_info, params.Form) for field in self.dependant.body_params):
            raise ConfigurationError(f"route {self._operation.name}: take the body as a model; form_field lets HTML forms send it")

    @property
    def operation(self) -> Operation | None:
        return self._operation

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if self._durable is None or self._operation is None:
            return super().get_route_handler()
        # As in FastAPI: what include_router adds, dependencies first of all, is in the context and not in the route.
        context = _effective_route_context_var.get()
        route: Any = context if context is not None and context.original_route is self else self
        return _Handler(self._durable, self._operation, route)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._operation is not None and PROBE in scope:
            await scope[PROBE](self._operation, send)
            return
        await super().handle(scope, receive, send)


class _Handler:
    """Everything from the request to the reply, which it parks."""

    def __init__(self, durable: "Durable", operation: Operation, route: Any) -> None:
        self._durable = durable
        self._operation = operation
        self._dependant = _without_principal(route.dependant, durable)
        self._embed: bool = route._embed_body_fields
        self._takes_body = route.body_field is not None
        self._overrides = route.dependency_overrides_provider
        self._success_status: int = route.status_code or 200
        self._principal = _principal_dependant(durable, route.path_format)
        self._warned = False

    async def __call__(self, request: Request) -> Response:
        call = self._call(request)
        try:
            runtime = self._usable_runtime(call)
            accepted, started = await _until(call.start_until, self._looked_up(request, call, runtime), self._operation.name)
            if started is None:
                started = await runtime.accepting.start(accepted)
        except Refused as refused:
            answer = problem_answer(refused.slug, members=refused.members, retry_after=refused.retry_after)
        except NotKnown:
            answer = pending_answer()
        except TransientError as error:
            _log.warning("route_unavailable", route=self._operation.name, error=str(error))
            answer = problem_answer("unavailable")
        except ConfigurationError as error:
            _log.error("route_misconfigured", route=self._operation.name, error=str(error))
            answer = problem_answer("misconfigured")
        else:
            return Parked(partial(_reply, started, accepted.background))
        return Parked(partial(_answer, call, self._durable.site, answer))

    def _call(self, request: Request) -> Call:
        operation, headers = self._operation, request.scope["headers"]
        arrival = arrival_of(request.scope)
        cached = operation.name in self._durable.cached
        if cached and not self._warned and "authorization" in request.headers:
            self._warned = True
            _log.warning(
                "answers_are_cached_for_all",
                route=operation.name,
                remedy="the middleware that keeps answers may not know clients by Authorization: take it off this route",
            )
        deadline_seconds = self._durable.deadline_seconds(operation)
        return Call(
            operation=operation,
            method=request.method,
            success_status=self._success_status,
            preference=preference_of(field_values(headers, "prefer")),
            arrival=arrival,
            # A middleware that keeps answers has read the whole body before, and is to send the whole answer after.
            deadline=arrival + (deadline_seconds / 2 if cached else deadline_seconds),
            cached=cached,
            form=operation.form_field is not None and is_form(request.headers.get("content-type", "")),
        )

    def _usable_runtime(self, call: Call) -> "Runtime":
        runtime = self._durable.usable_runtime()
        if self._operation.reply.streams and (call.cached or self._operation.name in self._durable.collected):
            raise ConfigurationError("a middleware collects whole answers, which no stream can pass")
        return runtime

    async def _looked_up(self, request: Request, call: Call, runtime: "Runtime") -> tuple[Accepted, Started | None]:
        accepted = await self._accepted(request, call, runtime.settings.routes_max_body_bytes)
        return accepted, await runtime.accepting.look_up(accepted)

    async def _accepted(self, request: Request, call: Call, most_bytes: int) -> Accepted:
        operation = self._operation
        request = Request(request.scope, limited(request.receive, most_bytes), request._send)
        cache: dict[Any, Any] = {}
        solved = await self._solved(request, self._principal, cache)
        if solved.errors:
            raise refused_fields(solved.errors)
        principal = self._durable.checked_principal(solved.values["principal"])
        key = None if call.form else self._key(request)
        read = operation.reply.read(request.scope)
        check_length(request, most_bytes)
        try:
            raw = await request.body()
        except ClientDisconnect:
            raise NotKnown from None  # nobody reads the answer
        body: Any = NO_BODY
        if call.form:
            body = form_body(raw)
            key = self._form_key(request, body)
        elif self._takes_body:
            body = json_body(raw, request.headers.get("content-type", ""))
        solved = await self._solved(request, self._dependant, cache, body, before=solved)
        if solved.errors:
            raise refused_fields(solved.errors)
        return Accepted(
            call=call,
            principal=principal,
            key=key,
            read=read,
            bound=bound_request(self._dependant, solved.values, request, body, embedded=self._embed),
            arguments={name: value for name, value in solved.values.items() if name in operation.arguments},
            body_bytes=len(raw),
            headers=tuple(solved.response.headers.raw),
            background=solved.background_tasks,
        )

    async def _solved(
        self, request: Request, dependant: Dependant, cache: Any, body: Any = NO_BODY, before: SolvedDependency | None = None
    ) -> SolvedDependency:
        """As FastAPI solves it, and what principal and handler share is asked once. ``before``: what came of the principal's."""
        return await solve_dependencies(
            request=request,
            dependant=dependant,
            body=PydanticUndefined if body is NO_BODY else body,
            background_tasks=None if before is None else before.background_tasks,
            response=None if before is None else before.response,
            dependency_overrides_provider=self._overrides,
            dependency_cache=cache,
            async_exit_stack=request.scope["fastapi_inner_astack"],
            embed_body_fields=self._embed,
        )

    def _key(self, request: Request) -> str | None:
        try:
            return parse_key(field_values(request.scope["headers"], KEY_HEADER))
        except KeyMissing:
            if self._operation.requires_key(request.method):
                raise Refused("idempotency-key-missing") from None
            return None
        except KeyInvalid:
            raise Refused("idempotency-key-invalid") from None

    def _form_key(self, request: Request, fields: dict[str, Any]) -> str | None:
        assert self._operation.form_field is not None
        hidden = fields.pop(self._operation.form_field, None)
        if field_values(request.scope["headers"], KEY_HEADER):
            return self._key(request)
        if hidden is None:
            raise Refused("idempotency-key-missing")
        try:
            return check_key(hidden)
        except KeyInvalid:
            raise Refused("idempotency-key-invalid") from None


async def _until(deadline: float, work: Coroutine[Any, Any, _Result], route: str) -> _Result:
    """Raise ``NotKnown`` where the deadline comes first; a time-out of the application's own passes through. What does not end when
    it is cancelled twice is told of: it has to be waited for, since it has to end in this task."""
    task, seconds = asyncio.current_task(), max(deadline - lease_clock(), 0)
    assert task is not None
    limit, again = asyncio.timeout(seconds), _Again(task, route)
    again.arm(seconds)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if limit.expired():
            raise NotKnown from None
        raise
    except asyncio.CancelledError:
        if again.undone():
            raise NotKnown from None
        raise
    finally:
        again.undone()


class _Again:
    """Cancels once more what was cancelled at its deadline, and tells of it; why, see ``fencepost.cancelling``."""

    _timer: asyncio.TimerHandle

    def __init__(self, task: "asyncio.Task[Any]", route: str) -> None:
        self._task = task
        self._route = route
        self._cancelling = task.cancelling()
        self._done = False

    def arm(self, seconds: float) -> None:
        """For the deadline, and the second one from there on, not from now: of two cancellations in one turn of a loop that stood
        still the task would see one."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self._arm_second)

    def _arm_second(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_CLEAN_UP_SECONDS, self._cancel)

    def _cancel(self) -> None:
        self._done = True
        self._task.cancel()
        remedy = "a dependency of the route catches its cancellation, or waits without a bound while it cleans up: let it pass"
        _log.warning("dependency_does_not_end", route=self._route, remedy=remedy)

    def undone(self) -> bool:
        """Take it back, as whoever has cancelled a task must. Whether it was done, and nobody else has cancelled."""
        self._timer.cancel()
        done, self._done = self._done, False
        return done and self._task.uncancel() <= self._cancelling


async def _reply(started: Started, background: BackgroundTasks | None, scope: Scope, receive: Receive, send: Send) -> None:
    await started.operation.reply(started, scope, receive, send)
    if background is not None:
        await background()


async def _answer(call: Call, site: Site, answer: Answer, scope: Scope, _receive: Receive, send: Send) -> None:
    await answer_call(call, site, answer, scope, send)


def _principal_dependant(durable: "Durable", path: str) -> Dependant:
    dependency = Depends(durable.principal)

    async def holder(principal: Annotated[Any, dependency]) -> None: ...

    return get_dependant(path=path, call=holder)


def _without_principal(dependant: Dependant, durable: "Durable") -> Dependant:
    """The handler's dependencies without the principal, which is solved before them: there it only shows in the description."""
    others = [one for one in dependant.dependencies if one.name is not None or one.call is not durable.principal]
    return replace(dependant, dependencies=others)


def _check_options(operation: Operation, endpoint: Callable[..., Any], options: dict[str, Any]) -> None:
    """Refuse what would answer with another body than the stored one."""
    what = f"route {operation.name}"
    model = options.get("response_model")
    stored = endpoint.__annotations__["return"]
    if model is not None and not isinstance(model, DefaultPlaceholder) and model != stored:
        raise ConfigurationError(
            f"{what}: response_model is another type than the workflow's result, which is answered as it is stored; "
            "give durable.route(present=...) a function that shapes it once"
        )
    wrong = [name for name in _STORED_AS_IT_IS if options.get(name)]
    if not options.get("response_model_by_alias", True):
        wrong.append("response_model_by_alias")
    if not isinstance(options.get("response_class", DefaultPlaceholder(None)), DefaultPlaceholder):
        wrong.append("response_class")
    if wrong:
        raise ConfigurationError(
            f"{what}: {', '.join(wrong)} cannot change an answer that is stored; use durable.route(present=...)"
        )
