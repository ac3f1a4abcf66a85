"""An operation's monitor: how it stands, and at its end the answer that its route gives; and its cancellation.

The id in the path is no permission. Who is not the principal that has started the operation gets the answer for an id that does
not exist.
"""

import hmac
from collections.abc import Awaitable
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import UUID

import structlog
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from fencepost.errors import ConfigurationError, RunEnded, RunNotFound, TransientError
from fencepost.secrets import Secrets
from producer_sdk.http.answers import NO_STORE, Answer, pending_answer, problem_answer, send_answer, state_answer
from producer_sdk.http.headers import Preference, field_values
from producer_sdk.http.openapi import MONITOR_RESPONSES, OperationState
from producer_sdk.http.operation import Call, Started
from producer_sdk.http.principal import Principal
from producer_sdk.http.problems import Refused, reference_page
from producer_sdk.http.routing import Parked, ParkingRoute
from producer_sdk.http.runtime import Runtime
from producer_sdk.http.stamp import arrival_of, root_path
from producer_sdk.http.store import Monitor
from producer_sdk.http.stream_route import stream_monitor
from producer_sdk.http.waiting import final_answer, run_headers

if TYPE_CHECKING:
    from producer_sdk.http.durable import Durable

__all__ = ["answered", "find_started", "monitor_router"]

_log = structlog.get_logger(__name__)

_EVENTS: Final = "text/event-stream"
#: A run may continue as another one between the look and the cancellation: one that runs away does so each few milliseconds.
_CANCEL_TRIES: Final = 30
_REASON: Final = "asked for by its client"
_MOST_ACTOR_BYTES: Final = 256


def monitor_router(durable: "Durable") -> APIRouter:
    """The routes of all monitors, and the page that problems link to."""
    router = APIRouter(route_class=ParkingRoute, prefix=durable.site.prefix, tags=["operations"])
    Asking = Annotated[Any, Depends(durable.principal)]

    @router.get("/operations/{monitor_id}", response_model=OperationState, responses=MONITOR_RESPONSES)
    async def monitor(monitor_id: str, request: Request, principal: Asking) -> Response:
        """How an operation stands; at its end its result. As `text/event-stream`, its stream."""
        wants_events = any(_EVENTS in line for line in field_values(request.scope["headers"], "accept"))
        return Parked(partial(_show, durable, principal, monitor_id, wants_events))

    @router.post("/operations/{monitor_id}/cancel", response_model=OperationState, responses=MONITOR_RESPONSES)
    async def cancel(monitor_id: str, principal: Asking) -> Response:
        """Cancel an operation, or ask for it where it is being worked on. What has ended stays as it is."""
        return Parked(partial(_cancel, durable, principal, monitor_id))

    @router.get("/problems", include_in_schema=False)
    async def problems() -> Response:
        return PlainTextResponse(reference_page(), media_type="text/markdown")

    return router


async def find_started(durable: "Durable", scope: Scope, principal: object, monitor_id: str) -> Started:
    """The lineage behind a monitor's id, for its principal. Raises ``Refused``, ``TransientError``, ``ConfigurationError``."""
    runtime = durable.usable_runtime()
    known = durable.checked_principal(principal)
    return _started(durable, runtime, scope, known, await _found(runtime, known, monitor_id))


async def _found(runtime: Runtime, principal: Principal, monitor_id: str) -> Monitor:
    found = await runtime.store.find_monitor(principal.tenant_id, _id(monitor_id))
    if found is None or not _is_theirs(found, principal, runtime.secrets):
        raise Refused("not-found")
    return found


def _started(durable: "Durable", runtime: Runtime, scope: Scope, principal: Principal, found: Monitor) -> Started:
    method, _, name = found.route.partition(" ")
    operation = runtime.operations.get(name)
    if operation is None:
        raise Refused("not-found")  # another application's, on the same database
    arrival = arrival_of(scope)
    call = Call(
        operation=operation,
        method=method,
        success_status=HTTPStatus.OK,
        preference=Preference(),
        arrival=arrival,
        deadline=arrival + durable.deadline_seconds(operation),
    )
    return Started(
        call=call,
        runtime=runtime,
        principal=principal,
        key=found.key,
        monitor_id=found.monitor_id,
        replayed=True,
        standing=None,
    )


async def answered(durable: "Durable", scope: Scope, send: Send, answer: Awaitable[Answer | None]) -> None:
    """Send what ``answer`` gives, or the problem that it ends with; None: it has sent something itself."""
    try:
        given = await answer
    except Refused as refused:
        given = problem_answer(refused.slug, members=refused.members, retry_after=refused.retry_after)
    except TransientError as error:
        _log.warning("monitor_unavailable", error=str(error))
        given = problem_answer("unavailable")
    except ConfigurationError as error:
        _log.error("monitor_misconfigured", error=str(error))
        given = problem_answer("misconfigured")
    if given is not None:
        await send_answer(given, send, help_url=f"{root_path(scope)}{durable.site.prefix}/problems")


async def _show(
    durable: "Durable", principal: object, monitor_id: str, wants_events: bool, scope: Scope, receive: Receive, send: Send
) -> None:
    async def answer() -> Answer | None:
        started = await find_started(durable, scope, principal, monitor_id)
        if wants_events:
            await stream_monitor(started, scope, receive, send)
            return None
        return await _as_it_stands(started, scope)

    await answered(durable, scope, send, answer())


async def _as_it_stands(started: Started, scope: Scope) -> Answer:
    standing = (await started.runtime.store.read([started.key]))[0]
    if standing is None:
        raise Refused("not-found")
    answer = await final_answer(started.runtime, started.operation, started.key, standing, success_status=HTTPStatus.OK)
    if answer is None:
        answer = pending_answer("running" if standing.state == "running" else "pending", status=HTTPStatus.OK)
    elif answer.outcome == "result":
        answer = answer.with_headers([NO_STORE])
    return answer.with_headers(run_headers(started, scope).of(answer))


async def _cancel(durable: "Durable", principal: object, monitor_id: str, scope: Scope, _receive: Receive, send: Send) -> None:
    async def answer() -> Answer:
        runtime, known = durable.usable_runtime(), durable.checked_principal(principal)
        for _ in range(_CANCEL_TRIES):
            found = await _found(runtime, known, monitor_id)
            started = _started(durable, runtime, scope, known, found)
            try:
                return await _cancelled(started, found.newest_run_id, scope)
            except RunEnded as ended:
                if ended.state != "continued":
                    return await _as_it_stands(started, scope)
            except RunNotFound:
                raise Refused("not-found") from None
        raise TransientError("the run goes on as another one again and again")

    await answered(durable, scope, send, answer())


async def _cancelled(started: Started, run_id: UUID, scope: Scope) -> Answer:
    actor, runtime = started.principal.id, started.runtime
    if len(actor.encode()) > _MOST_ACTOR_BYTES or actor.isspace():
        actor = started.principal.digest(runtime.secrets, runtime.secrets.write[0]).hex()
    outcome = await runtime.store.cancel(started.key.tenant_id, run_id, actor=actor, reason=_REASON)
    runtime.watch.look(started.key)
    if outcome == "cancelled":
        return state_answer("cancelled")
    answer = pending_answer("cancelling")
    return answer.with_headers(run_headers(started, scope).of(answer))


def _id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise Refused("not-found") from None


def _is_theirs(found: Monitor, principal: Principal, secrets: Secrets) -> bool:
    """A digest under a secret that is known no longer is nobody's."""
    if found.principal_version not in secrets.versions:
        return False
    return hmac.compare_digest(principal.digest(secrets, found.principal_version), found.principal_hash)
