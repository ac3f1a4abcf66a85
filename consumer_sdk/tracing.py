"""Spans of handlings, linked to the producer's trace, where the process uses OpenTelemetry; otherwise nothing at all.

A span a handling, of kind consumer and with a link to the message's own context (OpenTelemetry semantic conventions for messaging,
"Consumer spans"): one trace a message would make a redelivery look like the first.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from consumer_sdk.message import Message
from fencepost.clock import lease_clock

__all__ = ["Tracing"]

_ASK_SECONDS: Final = 1.0
_NO_SPAN: Final = nullcontext()


class Tracing:
    """``group`` is the consumer group that spans name."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._used = False
        self._ask_at = 0.0
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            self._trace: Any = None
            return
        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        self._tracer = trace.get_tracer("fencepost.consumer")

    def processing(self, message: Message[Any], step: str) -> AbstractContextManager[object]:
        """The span of one attempt at a message."""
        return self._span(message, step) if self._is_used else _NO_SPAN

    @property
    def _is_used(self) -> bool:
        """Whether anybody has set OpenTelemetry up, as of the last second. Its spans that go nowhere cost a fifth of a short
        handling, and asking each time, which looks into the environment, as much as a metric."""
        if self._used or self._trace is None or (now := lease_clock()) < self._ask_at:
            return self._used
        self._ask_at = now + _ASK_SECONDS
        self._used = not isinstance(self._trace.get_tracer_provider(), self._trace.ProxyTracerProvider)
        return self._used

    @contextmanager
    def _span(self, message: Message[Any], step: str) -> Iterator[object]:
        carrier = {name: value for name in ("traceparent", "tracestate") if (value := getattr(message, name))}
        producer = self._trace.get_current_span(self._propagator.extract(carrier)).get_span_context()
        attributes: dict[str, str | int] = {
            "messaging.system": "kafka",
            "messaging.operation.type": "process",
            "messaging.destination.name": message.topic,
            "messaging.destination.partition.id": str(message.partition),
            "messaging.kafka.offset": message.offset,
            "messaging.consumer.group.name": self._group,
            "fencepost.step": step,
        }
        links = [self._trace.Link(producer)] if producer.is_valid else []
        with self._tracer.start_as_current_span(
            f"process {message.topic}",
            kind=self._trace.SpanKind.CONSUMER,
            links=links,
            attributes=attributes,
            record_exception=False,  # its message may quote the payload
            set_status_on_exception=False,
        ) as span:
            yield span
