"""The two routes of signed links: one gives a link to who may read the operation, the other streams to who has the link."""

import time
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import UUID

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, Field
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from producer_sdk.http.answers import NO_STORE, Answer, RunHeaders, problem_answer
from producer_sdk.http.monitor import answered, find_started
from producer_sdk.http.openapi import MONITOR_RESPONSES
from producer_sdk.http.routing import Parked, ParkingRoute
from producer_sdk.http.stamp import root_path
from producer_sdk.http.stream_link import LINK_HEADERS, LINK_PARAMETER, LINK_SECONDS, read_link, sign_link
from producer_sdk.http.stream_route import MonitorStream, stream_response

if TYPE_CHECKING:
    from producer_sdk.http.durable import Durable

__all__ = ["StreamLink", "link_router"]

_PROBLEMS: Final = {status: response for status, response in MONITOR_RESPONSES.items() if status != HTTPStatus.OK}


class StreamLink(BaseModel):
    """A link to an operation's stream, for `EventSource`."""

    url: str = Field(description="Path with a signature. Whoever has it may read the stream until it expires.")
    expires_in: int = Field(description="Seconds.")


def link_router(durable: "Durable") -> APIRouter:
    """The routes of signed links, for every operation."""
    router = APIRouter(route_class=ParkingRoute, prefix=durable.site.prefix, tags=["operations"])
    Asking = Annotated[Any, Depends(durable.principal)]
    Link = Annotated[list[str], Query(alias=LINK_PARAMETER)]

    @router.post("/operations/{monitor_id}/stream-link", response_model=StreamLink, responses=_PROBLEMS)
    async def give_link(monitor_id: str, principal: Asking) -> Response:
        """A short-lived link to the operation's stream."""
        return Parked(partial(_give_link, durable, principal, monitor_id))

    @router.get("/operations/{monitor_id}/stream", response_model=None, responses={**_PROBLEMS, **stream_response()})
    async def linked_stream(monitor_id: str, fencepost_link: Link = []) -> Response:  # noqa: B006 - FastAPI copies defaults
        """The operation's stream, for who has a link to it. Needs no other credentials."""
        return Parked(partial(_stream_to_link, durable, monitor_id, fencepost_link))

    return router


async def _give_link(durable: "Durable", principal: object, monitor_id: str, scope: Scope, _receive: Receive, send: Send) -> None:
    async def answer() -> Answer:
        started = await find_started(durable, scope, principal, monitor_id)
        runtime = started.runtime
        link = sign_link(runtime.secrets, started.key.tenant_id, started.monitor_id, now=time.time())
        path = f"{root_path(scope)}{runtime.location_of(started.monitor_id)}/stream"
        body = StreamLink(url=f"{path}?{LINK_PARAMETER}={link}", expires_in=LINK_SECONDS).model_dump_json().encode()
        return Answer(
            status=HTTPStatus.OK, outcome="link", media_type="application/json", body=body, headers=[NO_STORE, *LINK_HEADERS]
        )

    await answered(durable, scope, send, answer())


async def _stream_to_link(
    durable: "Durable", monitor_id: str, links: list[str], scope: Scope, receive: Receive, send: Send
) -> None:
    async def answer() -> Answer | None:
        stream = await _linked(durable, monitor_id, links, scope)
        if stream is None:
            return problem_answer("not-found").with_headers(LINK_HEADERS)
        await stream.send(scope, receive, send)
        return None

    await answered(durable, scope, send, answer())


async def _linked(durable: "Durable", monitor_id: str, links: list[str], scope: Scope) -> MonitorStream | None:
    """What the link is to; None for a link that is not good, before anything is looked up."""
    runtime = durable.usable_runtime()
    try:
        (link,), wanted = links, UUID(monitor_id)
    except ValueError:
        return None
    tenant_id = read_link(runtime.secrets, wanted, link, now=time.time())
    found = None if tenant_id is None else await runtime.store.find_monitor(tenant_id, wanted)
    operation = None if found is None else runtime.operations.get(found.route.partition(" ")[2])
    if found is None or operation is None:
        return None
    run_id = found.key.root_run_id if operation.run_id_header else None
    return MonitorStream(
        runtime=runtime,
        key=found.key,
        operation=operation,
        owner=found.principal_hash,
        run=RunHeaders(location=root_path(scope) + runtime.location_of(wanted), replayed=True, run_id=run_id),
        headers=[(name.encode(), value.encode()) for name, value in LINK_HEADERS],
    )
