"""The event as the producer hands it over: immutable, and valid from the moment it exists."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from uuid_utils.compat import uuid7

from fencepost.errors import InvalidEvent
from producer_sdk.rules import check_event, key_bytes
from producer_sdk.tracing import current_trace

__all__ = ["Event"]

_JSON: Final = "application/json"


@dataclass(frozen=True, init=False, slots=True)
class Event:
    """One domain fact, to be published to ``topic`` after the transaction that it is enqueued in commits.

    Its ``repr`` leaves out key, payload and headers. To enqueue an equal fact a second time, build a second event.
    """

    topic: str
    type: str
    key: bytes | None = field(repr=False)
    payload: bytes | None = field(repr=False)
    event_id: UUID
    headers: tuple[tuple[str, bytes], ...] = field(repr=False)
    source: str | None
    content_type: str | None
    tenant_id: str | None
    run_id: str | None
    step: str | None
    operation: str | None
    fencing_token: int | None
    traceparent: str | None
    tracestate: str | None

    def __init__(
        self,
        *,
        topic: str,
        type: str,  # noqa: A002 - the word of CloudEvents and of the SQL function
        key: bytes | str | None,
        payload: bytes | None,
        event_id: UUID | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
        source: str | None = None,
        content_type: str | None = None,
        tenant_id: str | None = None,
        run_id: str | None = None,
        step: str | None = None,
        operation: str | None = None,
        fencing_token: int | None = None,
        traceparent: str | None = None,
        tracestate: str | None = None,
    ) -> None:
        """Check and keep an event. Sizes are in bytes of UTF-8; ``fencepost.wire`` holds the limits.

        ``key``: events of one key stay in order; at most 4,096 bytes, a ``str`` is encoded as UTF-8, None means that
        no order is asked for. ``payload``: at most 1,000,000 bytes; None is a tombstone and needs a key, empty is
        empty. ``event_id`` defaults to a new UUIDv7. ``headers``: the application's own, at most 64, together at most
        32,768 bytes. ``source`` defaults to the relay's. ``fencing_token``: 0 to 2**63 - 1. ``traceparent`` and
        ``tracestate`` default to OpenTelemetry's current span, where the process uses OpenTelemetry.

        Raises ``InvalidEvent``, which names field, limit and remedy and quotes neither key nor payload.
        """
        if traceparent is None:
            traceparent, ambient_tracestate = current_trace()
            tracestate = ambient_tracestate if tracestate is None else tracestate
        _set(
            self,
            {
                "topic": topic,
                "type": type,
                "key": key_bytes(key),
                "payload": payload,
                "event_id": uuid7() if event_id is None else event_id,
                "headers": headers,
                "source": source,
                "content_type": content_type,
                "tenant_id": tenant_id,
                "run_id": run_id,
                "step": step,
                "operation": operation,
                "fencing_token": fencing_token,
                "traceparent": traceparent,
                "tracestate": tracestate,
            },
        )
        check_event(self)
        _set(self, {"headers": tuple((name, value) for name, value in headers)})

    @classmethod
    def json(
        cls,
        value: object,
        *,
        topic: str,
        type: str,  # noqa: A002
        key: bytes | str | None,
        event_id: UUID | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
        source: str | None = None,
        tenant_id: str | None = None,
        run_id: str | None = None,
        step: str | None = None,
        operation: str | None = None,
        fencing_token: int | None = None,
        traceparent: str | None = None,
        tracestate: str | None = None,
    ) -> "Event":
        """Return an event with ``value`` as compact JSON in UTF-8 and the content type ``application/json``.

        Raises ``InvalidEvent`` as the constructor does, and for a value that JSON cannot hold.
        """
        return cls(
            topic=topic,
            type=type,
            key=key,
            payload=_json_bytes(value),
            event_id=event_id,
            headers=headers,
            source=source,
            content_type=_JSON,
            tenant_id=tenant_id,
            run_id=run_id,
            step=step,
            operation=operation,
            fencing_token=fencing_token,
            traceparent=traceparent,
            tracestate=tracestate,
        )


def _set(event: Event, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        object.__setattr__(event, name, value)


def _json_bytes(value: object) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except TypeError as error:
        reason = str(error)  # names types, never values
    except UnicodeEncodeError:
        reason = "it holds text that is not valid Unicode"
    except (ValueError, RecursionError):
        reason = "it holds NaN, an infinity, or itself, or it is nested too deeply"
    raise InvalidEvent("payload", f"must be a value that JSON can hold: {reason}", "convert it first, or pass bytes")
