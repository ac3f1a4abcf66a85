"""From a record to its deliveries: read, matched with handlers, validated. What cannot be handled is a refusal, never an error."""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import structlog

from consumer_sdk.delivery import Arrival, Delivery, Redrive, Refusal
from consumer_sdk.evidence import problems_of
from consumer_sdk.identity import Identity, event_key, place_key, step_key
from consumer_sdk.message import Message, NotAMessage, Record, fill
from consumer_sdk.message_handlers import MessageHandler, MessageHandlers
from fencepost.wire import RUN_EVENT_TYPES

if TYPE_CHECKING:
    from consumer_sdk.incarnation import Incarnation

__all__ = ["Intake"]

_log = structlog.get_logger(__name__)

_NOT_A_MESSAGE: Final = "consumer_sdk.NotAMessage"


class Intake:
    """``incarnations``: what the topics' names mean now. ``oldest``: up to when the ledger remembers; None: for ever."""

    def __init__(
        self, handlers: MessageHandlers, *, consumer: str, incarnations: "Callable[[], Mapping[str, Incarnation]]"
    ) -> None:
        self._handlers = handlers
        self._consumer = consumer
        self._incarnations = incarnations
        self._steps: dict[MessageHandler, str] = {}
        self._unread_step = step_key(consumer, "")
        self._oldest_ms: int | None = None
        self.ignored = 0

    def remember_from(self, oldest: datetime | None) -> None:
        """The ledger remembers from then on."""
        self._oldest_ms = None if oldest is None else int(oldest.timestamp() * 1000)

    def deliveries(self, record: Record, arrival: Arrival | None) -> Sequence[Delivery]:
        """One delivery a handler, ready for it; one with a refusal where there is none; nothing for a type that is ignored."""
        deliveries = self.identified(record, arrival)
        for delivery in deliveries:
            self.validate(delivery)
        return deliveries

    def validate(self, delivery: Delivery) -> None:
        """Read the payload as the handler's model; a refusal where that cannot be."""
        message, handler = delivery.message, delivery.handler
        if message is None or handler is None:
            return
        value, refusal = self._value(delivery.record, message, handler)
        if refusal is not None:
            delivery.refusal, delivery.handler = refusal, None
        elif value is not None:
            fill(message, value)

    def identified(self, record: Record, arrival: Arrival | None) -> Sequence[Delivery]:
        """The same before payloads are validated, which is not worth its time for a message that was handled before."""
        try:
            message = self._handlers.adapter_of(record.topic)(record)
            if not isinstance(message, Message):
                raise TypeError("the adapter returned no message")
        except NotAMessage:
            return [self._unread(record, arrival, Refusal("undecodable", _NOT_A_MESSAGE, "not_a_message"))]
        except Exception as error:  # noqa: BLE001 - a boundary: an adapter is the author's, and no record may end the consumer
            refusal = Refusal("undecodable", type(error).__qualname__, "adapter_failed")
            return [self._unread(record, arrival, refusal)]
        handlers = self._handlers.handlers_of(message)
        if not handlers:
            return self._unhandled(record, message, arrival)
        deliveries = [self._delivery(record, message, handlers[0], arrival)]
        deliveries += [self._delivery(record, message.with_value(None), handler, arrival) for handler in handlers[1:]]
        if arrival is not None:
            arrival.left = len(deliveries)
        return deliveries

    def redeliveries(self, record: Record, identity: Identity, redrive: Redrive) -> Sequence[Delivery]:
        """A dead letter's record once more, for the handler that it was given up by, under its identity.

        Where no handler had taken it, all that take it now get it; the last of them ends the dead letter.
        """
        deliveries = self.deliveries(record, None)
        own = [one for one in deliveries if one.identity == identity] or list(deliveries)
        if not own:
            own = [self._unread(record, None, Refusal("unknown_type", "consumer_sdk.NoHandler", "type_ignored"))]
        for delivery in own:
            delivery.first_tried_at = -math.inf  # one attempt: no patience, and no further one
            if delivery.handler is not None:
                delivery.attempts = delivery.handler.attempts - 1
                delivery.suspect = True  # the operator's wish may end a process once, not for ever
            else:
                delivery.identity = identity
        own[-1].redrive = redrive
        return own

    def _delivery(self, record: Record, message: Message[None], handler: MessageHandler, arrival: Arrival | None) -> Delivery:
        step = self._steps.get(handler)
        if step is None:
            step = self._steps[handler] = step_key(self._consumer, handler.step)
        return Delivery(
            record=record,
            message=message,
            handler=handler,
            identity=Identity(self._run_key(record, message), message.tenant_id or "", step),
            arrival=arrival,
            suspect=arrival is not None and arrival.suspect,
        )

    def _value(self, record: Record, message: Message[None], handler: MessageHandler) -> tuple[object, Refusal | None]:
        if self._oldest_ms is not None and record.timestamp < self._oldest_ms:
            return None, Refusal("too_old", "consumer_sdk.TooOld", "older_than_ledger")
        if message.payload is None:
            return None, None if handler.tombstones else Refusal("tombstone", "consumer_sdk.Tombstone", "tombstone")
        payload = message.payload
        try:
            if not message.type.startswith(RUN_EVENT_TYPES):
                payload = self._handlers.codec.decode(payload)
        except Exception as error:  # noqa: BLE001 - a boundary: a codec is the author's
            return None, Refusal("undecodable", type(error).__qualname__, "codec_failed")
        try:
            return handler.value_of(payload), None
        except Exception as error:  # noqa: BLE001 - a boundary: a model is the author's
            told = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
            _log.warning("payload_refused", problems=problems_of(error), **told)
            return None, Refusal("invalid_payload", type(error).__qualname__, "invalid_payload")

    def _unhandled(self, record: Record, message: Message[None], arrival: Arrival | None) -> Sequence[Delivery]:
        known = self._handlers.is_known(message.type)
        if not known and self._handlers.is_ignored(message.type):
            self.ignored += 1
            if arrival is not None:
                arrival.done()
            return []
        refusal = (
            Refusal("unknown_version", "consumer_sdk.NoHandler", "no_handler_for_version")
            if known
            else Refusal("unknown_type", "consumer_sdk.NoHandler", "no_handler_for_type")
        )
        identity = Identity(self._run_key(record, message), message.tenant_id or "", self._unread_step)
        return [Delivery(record=record, message=message, handler=None, identity=identity, arrival=arrival, refusal=refusal)]

    def _unread(self, record: Record, arrival: Arrival | None, refusal: Refusal) -> Delivery:
        identity = Identity(self._place(record), "", self._unread_step)
        return Delivery(record=record, message=None, handler=None, identity=identity, arrival=arrival, refusal=refusal)

    def _run_key(self, record: Record, message: Message[Any]) -> str:
        return event_key(message) if message.event_id else self._place(record)

    def _place(self, record: Record) -> str:
        incarnation = self._incarnations()[record.topic]
        return place_key(record, cluster_id=incarnation.cluster_id, topic_id=incarnation.topic_id)
