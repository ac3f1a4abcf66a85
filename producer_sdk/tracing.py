"""Carries the current trace into events, if the process uses OpenTelemetry. Never loads it."""

import sys

from fencepost.wire import MAX_TRACESTATE_BYTES

__all__ = ["current_trace"]

_API = "opentelemetry.trace"


def current_trace() -> tuple[str | None, str | None]:
    """Return ``traceparent`` and ``tracestate`` of the current span, in W3C form; (None, None) without one.

    A process that has not imported the API has no current span, so looking among loaded modules is enough.
    """
    api = sys.modules.get(_API)
    if api is None:
        return None, None
    context = api.get_current_span().get_span_context()
    if not context.is_valid:
        return None, None
    traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    return traceparent, _fitting(context.trace_state.to_header())


def _fitting(tracestate: str) -> str | None:
    # What surrounds the write must not be able to refuse it: W3C lets a participant drop a long tracestate.
    return tracestate if 0 < len(tracestate) <= MAX_TRACESTATE_BYTES else None
