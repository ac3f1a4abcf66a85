"""A handling's span: linked to the producer's trace, saying where the message was, and nothing that it held."""

from collections.abc import Iterator
from typing import Any, Final

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from consumer_sdk.message import Message
from consumer_sdk.testing import message
from consumer_sdk.tracing import Tracing

SECRET: Final = "marker-4711"
TRACE_ID: Final = 0x0AF7651916CD43DD8448EB211C80319C
SPAN_ID: Final = 0xB7AD6B7169203331
TRACEPARENT: Final = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What a process exports that has set OpenTelemetry up. Its own way of setting it up has no way back, so it is put in place."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


@pytest.fixture
def without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not set OpenTelemetry up."""
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)


def order(**options: Any) -> Message[Any]:
    return message("order.placed", {"card": SECRET}, topic="orders", partition=3, offset=99, key=SECRET, **options)


def handled(spans: InMemorySpanExporter, of: Message[Any]) -> ReadableSpan:
    with Tracing("billing").processing(of, "charge"):
        pass
    (span,) = spans.get_finished_spans()
    return span


def test_a_span_is_linked_to_the_producer_s_and_is_not_its_child(spans: InMemorySpanExporter) -> None:
    """A redelivery must not look like the first delivery."""
    span = handled(spans, order(traceparent=TRACEPARENT, tracestate="vendor=1"))

    (link,) = span.links
    assert (link.context.trace_id, link.context.span_id) == (TRACE_ID, SPAN_ID)
    assert link.context.trace_state.get("vendor") == "1"
    assert span.parent is None
    assert span.context is not None
    assert span.context.trace_id != TRACE_ID


def test_two_deliveries_are_two_traces_with_one_link(spans: InMemorySpanExporter) -> None:
    tracing = Tracing("billing")
    for _ in range(2):
        with tracing.processing(order(traceparent=TRACEPARENT), "charge"):
            pass
    first, second = spans.get_finished_spans()

    assert first.context is not None
    assert second.context is not None
    assert first.context.trace_id != second.context.trace_id
    assert {span.links[0].context.trace_id for span in (first, second)} == {TRACE_ID}


def test_a_span_says_where_the_message_was_and_who_handles_it(spans: InMemorySpanExporter) -> None:
    span = handled(spans, order())

    assert (span.name, span.kind) == ("process orders", trace.SpanKind.CONSUMER)
    assert dict(span.attributes or {}) == {
        "messaging.system": "kafka",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.destination.partition.id": "3",
        "messaging.kafka.offset": 99,
        "messaging.consumer.group.name": "billing",
        "fencepost.step": "charge",
    }


@pytest.mark.parametrize("traceparent", [None, "", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_message_without_a_readable_trace_has_a_span_without_a_link(spans: InMemorySpanExporter, traceparent: str | None) -> None:
    assert list(handled(spans, order(traceparent=traceparent)).links) == []


def test_what_a_handler_opens_is_a_child_of_its_span(spans: InMemorySpanExporter) -> None:
    with Tracing("billing").processing(order(), "charge"), trace.get_tracer("shop").start_as_current_span("charging"):
        pass
    inner, outer = spans.get_finished_spans()

    assert inner.parent is not None
    assert outer.context is not None
    assert inner.parent.span_id == outer.context.span_id


def test_an_error_leaves_no_text_in_the_span_and_goes_on(spans: InMemorySpanExporter) -> None:
    """Its message may quote the payload."""
    with pytest.raises(RuntimeError, match=SECRET), Tracing("billing").processing(order(), "charge"):
        raise RuntimeError(SECRET)
    (span,) = spans.get_finished_spans()

    assert span.end_time is not None
    assert SECRET not in span.to_json()


def test_neither_key_nor_payload_is_in_a_span(spans: InMemorySpanExporter) -> None:
    assert SECRET not in handled(spans, order()).to_json()


@pytest.mark.usefixtures("without_opentelemetry")
def test_without_opentelemetry_a_handling_has_no_span() -> None:
    with Tracing("billing").processing(order(traceparent=TRACEPARENT), "charge") as span:
        assert span is None
        assert not trace.get_current_span().get_span_context().is_valid


@pytest.mark.usefixtures("without_opentelemetry")
def test_opentelemetry_may_be_set_up_after_the_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    tracing = Tracing("billing")
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    with tracing.processing(order(), "charge"):
        pass

    assert len(exporter.get_finished_spans()) == 1
    provider.shutdown()
