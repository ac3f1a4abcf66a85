"""The stream answers of routes and monitors: what a request's headers ask for, and what they say of the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from starlette.types import Receive, Scope, Send

from fencepost.clock import lease_clock
from producer_sdk.http.answers import Answer, RunHeaders, problem_answer, send_answer
from producer_sdk.http.cursor import Finished, read_cursor
from producer_sdk.http.headers import field_values
from producer_sdk.http.operation import Operation, Started, check_between
from producer_sdk.http.problems import Refused
from producer_sdk.http.spans import mark_span
from producer_sdk.http.stamp import root_path
from producer_sdk.http.store import LineageKey, Place
from producer_sdk.http.streaming import StreamRequest
from producer_sdk.http.waiting import answer_call, final_answer, run_headers

if TYPE_CHECKING:
    from producer_sdk.http.runtime import Runtime

__all__ = ["DEFAULT_STREAM_SECONDS", "MonitorStream", "StreamReply", "stream_monitor", "stream_response"]

DEFAULT_STREAM_SECONDS: Final = 300.0
MOST_STREAM_SECONDS: Final = 3600.0

_CURSOR_HEADER: Final = "Last-Event-ID"
_MEDIA_TYPE: Final = "text/event-stream"
_OPENED: Final = Answer(status=HTTPStatus.OK, outcome="stream", media_type=_MEDIA_TYPE, body=b"")
_DESCRIPTION: Final = (
    "Server-Sent Events: `progress` frames with ids, `attempt` where what was shown begins anew, `activity` of the live layer, "
    "then one `result`, `problem` or `pending` frame. Resume with Last-Event-ID."
)


class StreamReply:
    """The reply of ``durable.stream``. ``stream_seconds``: after so long the stream ends with `pending`; 0 sends what is stored.
    ``live``: with the live chunks of the run, every one of which the caller may then see. Raises ``ConfigurationError``."""

    streams = True

    def __init__(self, *, stream_seconds: float = DEFAULT_STREAM_SECONDS, live: bool = False) -> None:
        check_between("stream_seconds", stream_seconds, 0, MOST_STREAM_SECONDS)
        self.stream_seconds = stream_seconds
        self.live = live

    def read(self, scope: Scope) -> Place:
        """Where the client wants to go on. Raises ``Refused``."""
        return read_cursor(field_values(scope["headers"], _CURSOR_HEADER))

    async def __call__(self, started: Started, scope: Scope, receive: Receive, send: Send) -> None:
        call, runtime, run = started.call, started.runtime, run_headers(started, scope)

        def opened() -> None:
            seconds = lease_clock() - call.arrival
            runtime.metrics.answered(call.operation.name, _OPENED.outcome, replayed=started.replayed, seconds=seconds)
            mark_span(call.operation.name, _OPENED.outcome)

        request = StreamRequest(
            route=call.operation.name,
            key=started.key,
            owner=_owner(started),
            cursor=started.read,
            seconds=self.stream_seconds,
            live=self.live,
            monitor=False,
            headers=[*_encoded(run), *started.headers],
            final=partial(final_answer, runtime, call.operation, started.key, success_status=call.success_status),
            opened=opened,
        )
        answer = await runtime.streams.answer(request, receive, send)
        if answer is not None:
            await answer_call(call, runtime.site, answer, scope, send, run=run, raw_headers=started.headers)

    def responses(self, operation: Operation) -> Mapping[int | str, dict[str, Any]]:
        """The stream in the description of the API."""
        return stream_response()


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorStream:
    """The stream of a monitor, for who may read it. ``owner``: digest of the principal whose slot it takes."""

    runtime: "Runtime"
    key: LineageKey
    operation: Operation
    owner: bytes
    run: RunHeaders
    headers: Sequence[tuple[bytes, bytes]] = ()

    async def send(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The stream; 204 to a client that has read its end, so that a browser asks no more; or a plain answer."""
        try:
            cursor = read_cursor(field_values(scope["headers"], _CURSOR_HEADER), on_monitor=True)
        except Refused as refused:
            await self._answer(problem_answer(refused.slug), scope, send)
            return
        if cursor is Finished.FINISHED:
            await send({"type": "http.response.start", "status": HTTPStatus.NO_CONTENT, "headers": [*self.headers]})
            await send({"type": "http.response.body"})
            return
        answer = await self.runtime.streams.answer(self._request(cursor), receive, send)
        if answer is not None:
            await self._answer(answer, scope, send)

    async def _answer(self, answer: Answer, scope: Scope, send: Send) -> None:
        mark_span(self.operation.name, answer.outcome)
        help_url = f"{root_path(scope)}{self.runtime.site.prefix}/problems"
        await send_answer(answer.with_headers(self.run.of(answer)), send, help_url=help_url, raw_headers=self.headers)

    def _request(self, cursor: Place) -> StreamRequest:
        reply = self.operation.reply
        seconds, live = (reply.stream_seconds, reply.live) if isinstance(reply, StreamReply) else (DEFAULT_STREAM_SECONDS, False)
        return StreamRequest(
            route=self.operation.name,
            key=self.key,
            owner=self.owner,
            cursor=cursor,
            seconds=seconds,
            live=live,
            monitor=True,
            headers=[*_encoded(self.run), *self.headers],
            final=partial(final_answer, self.runtime, self.operation, self.key, success_status=HTTPStatus.OK),
            opened=partial(mark_span, self.operation.name, _OPENED.outcome),
        )


def stream_response() -> dict[int | str, dict[str, Any]]:
    """What the description of the API says of a stream."""
    return {200: {"description": _DESCRIPTION, "content": {_MEDIA_TYPE: {"schema": {"type": "string"}}}}}


async def stream_monitor(started: Started, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request to a monitor that takes Server-Sent Events."""
    stream = MonitorStream(
        runtime=started.runtime,
        key=started.key,
        operation=started.operation,
        owner=_owner(started),
        run=run_headers(started, scope),
        headers=started.headers,
    )
    await stream.send(scope, receive, send)


def _owner(started: Started) -> bytes:
    """As the lineage's row names the principal, so that signed links, which know no more, take its slots as well."""
    secrets = started.runtime.secrets
    return started.principal.digest(secrets, secrets.write[0])


def _encoded(run: RunHeaders) -> list[tuple[bytes, bytes]]:
    """What an opened stream says of its run. Its monitor as well: it is not finished, or a browser wants a link to it."""
    headers = [*run.of(_OPENED), ("location", run.location), ("link", f'<{run.location}>; rel="status"')]
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
