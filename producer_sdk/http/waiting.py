"""Answers with JSON: at once if the run has ended, else after waiting for it, outside of everything that FastAPI holds open.

A client that goes away frees its slot and changes nothing else: the run goes on, and the same request gets its result.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import structlog
from starlette.types import Receive, Scope, Send

from fencepost.clock import lease_clock
from fencepost.codec import PayloadCodec, lineage_codec
from fencepost.errors import TransientError
from fencepost.finite import finite_json
from producer_sdk.http.answers import (
    NO_STORE,
    Answer,
    RunHeaders,
    pending_answer,
    problem_answer,
    result_answer,
    send_answer,
)
from producer_sdk.http.operation import Call, Operation, Site, Started
from producer_sdk.http.runtime import Runtime
from producer_sdk.http.spans import mark_span
from producer_sdk.http.stamp import root_path
from producer_sdk.http.store import LineageKey, Standing
from producer_sdk.http.watch import Follower

__all__ = ["JsonReply", "answer_call", "final_answer", "leaving_client", "run_headers"]

_log = structlog.get_logger(__name__)


class JsonReply:
    """The reply of ``durable.route``."""

    streams = False

    def read(self, scope: Scope) -> None:
        """Nothing of the headers concerns it."""

    async def __call__(self, started: Started, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await _answer(started, receive)
        run = run_headers(started, scope)
        if started.call.form:
            answer = Answer(
                status=HTTPStatus.SEE_OTHER, outcome=answer.outcome, media_type="text/plain", body=b"", headers=[NO_STORE]
            )
            answer = answer.with_headers([("location", run.location)])
        await answer_call(started.call, started.runtime.site, answer, scope, send, run=run, raw_headers=started.headers)

    def responses(self, operation: Operation) -> Mapping[int | str, dict[str, Any]]:
        return {}


def run_headers(started: Started, scope: Scope) -> RunHeaders:
    """What each answer about a known run says of it."""
    return RunHeaders(
        location=root_path(scope) + started.runtime.location_of(started.monitor_id),
        replayed=started.replayed,
        run_id=started.key.root_run_id if started.operation.run_id_header else None,
    )


async def answer_call(
    call: Call,
    site: Site,
    answer: Answer,
    scope: Scope,
    send: Send,
    *,
    run: RunHeaders | None = None,
    raw_headers: tuple[tuple[bytes, bytes], ...] = (),
) -> None:
    """Send an answer to a durable route. ``run`` None: no run is known."""
    if answer.outcome == "pending" and (call.operation.strict or call.cached):
        answer = problem_answer("in-progress")
    headers = [("vary", "Prefer"), *_applied(call)]
    if run is not None:
        headers += run.of(answer)
    site.metrics.answered(
        call.operation.name, answer.outcome, replayed=run is not None and run.replayed, seconds=lease_clock() - call.arrival
    )
    mark_span(call.operation.name, answer.outcome)
    help_url = f"{root_path(scope)}{site.prefix}/problems"
    await send_answer(answer.with_headers(headers), send, help_url=help_url, raw_headers=raw_headers)


async def final_answer(
    runtime: Runtime, operation: Operation | None, key: LineageKey, standing: Standing, *, success_status: int
) -> Answer | None:
    """The final answer of a lineage, None while it has none. ``operation`` None: this process does not know it, or what shapes its
    results. Raises ``TransientError``."""
    codec = lineage_codec(runtime.codec, standing.data_key)
    if operation is not None and operation.present is not None and _is_to_be_shaped(standing):
        try:
            shaped = _shaped(operation, standing, codec)
        except Exception as error:  # noqa: BLE001 - a boundary: the author's function may raise anything, and the stream needs an end
            _log.error("result_not_shaped", route=operation.name, error=type(error).__name__)
            return problem_answer("result-unavailable")
        kept = await runtime.store.keep_answer(key, standing.run_id, shaped)
        if kept is None:
            return None  # erased or gone on meanwhile: the next read tells
        standing = replace(standing, answer=kept)
    return result_answer(standing, codec, success_status=success_status)


def _is_to_be_shaped(standing: Standing) -> bool:
    return standing.state == "completed" and not standing.erased and standing.answer is None


def _shaped(operation: Operation, standing: Standing, codec: PayloadCodec) -> bytes:
    assert operation.present is not None
    assert operation.presented is not None
    result = operation.workflow.result.validate_json(codec.decode(standing.output or b"null"))
    shaped = operation.presented.validate_python(operation.present(result))
    return codec.encode(finite_json(operation.presented, shaped))


async def _answer(started: Started, receive: Receive) -> Answer:
    try:
        return await _waited(started, receive)
    except TransientError as error:
        # The run exists, so a read that fails is no failure of it.
        _log.warning("lineage_not_read", error=str(error))
        return pending_answer()


async def _waited(started: Started, receive: Receive) -> Answer:
    if (answer := await _ended(started, started.standing)) is not None:
        return answer
    runtime = started.runtime
    if runtime.draining or started.call.wait_until <= lease_clock() or (started.operation.strict and started.replayed):
        return pending_answer()
    with runtime.waiters.take(started.principal) as free:
        if not free:
            return pending_answer()
        with runtime.watch.follow(started.key) as follower:
            async with leaving_client(follower, receive):
                return await _followed(started, follower)


async def _followed(started: Started, follower: Follower) -> Answer:
    while await follower.wait(started.call.wait_until - lease_clock()):
        if (answer := await _ended(started, follower.standing)) is not None:
            return answer
    return pending_answer()


async def _ended(started: Started, standing: Standing | None) -> Answer | None:
    if standing is None:
        return None
    return await final_answer(started.runtime, started.operation, started.key, standing, success_status=started.call.success_status)


@contextlib.asynccontextmanager
async def leaving_client(follower: Follower, receive: Receive) -> AsyncIterator[None]:
    """While the block runs, a client that goes away ends the follower's wait."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        follower.closing = True
        follower.heard.set()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        await asyncio.wait({watcher})
        if not watcher.cancelled() and (error := watcher.exception()) is not None:
            _log.warning("client_not_watched", error=type(error).__name__)


def _applied(call: Call) -> list[tuple[str, str]]:
    preference = call.preference
    if preference.respond_async:
        return [("preference-applied", "respond-async")]
    if preference.wait_seconds is not None:
        return [("preference-applied", f"wait={int(call.granted_seconds)}")]
    return []
