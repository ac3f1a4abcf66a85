"""Topics whose records say nothing of themselves: what a message needs to be is set by the application, once."""

from consumer_sdk.adapters.adapter import Adapter, check_name, check_schema_version
from consumer_sdk.message import Message, Record, read_message
from fencepost.wire import CE_SOURCE, CE_TYPE, CONTENT_TYPE, SCHEMA_VERSION, TRACEPARENT, TRACESTATE

__all__ = ["plain_records"]


def plain_records(
    *,
    type: str,  # noqa: A002 - the attribute's name everywhere else
    source: str | None = None,
    schema_version: int = 1,
    content_type: str | None = "application/json",
) -> Adapter:
    """Return an adapter that makes a message of ``type`` of every record.

    ``source`` defaults to the topic. ``event_id`` is empty: such a message is known by topic, partition and offset alone, so one
    that its producer wrote twice is two. The time is the record's; headers are kept, trace context is read.
    """
    for field, text in (("type", type), ("source", source), ("content_type", content_type)):
        check_name(field, text)
    check_schema_version(schema_version)
    constants = {CE_TYPE: type.encode(), SCHEMA_VERSION: b"%d" % schema_version}
    if content_type is not None:
        constants[CONTENT_TYPE] = content_type.encode()

    def plain(record: Record) -> Message[None]:
        given = {name: value for name, value in record.headers if value is not None and name in (TRACEPARENT, TRACESTATE)}
        named = {CE_SOURCE: (source or record.topic).encode()}
        return read_message(record, given | named | constants, payload=record.value)

    return plain
