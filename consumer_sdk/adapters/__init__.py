"""From a Kafka record to a message: one adapter for each form that producers write.

``cloud_events`` reads CloudEvents in binary and in structured mode, Fencepost's own messages among them; it is what a consumer
uses for a topic without an adapter. ``debezium_outbox`` makes one for topics of Debezium's outbox event router,
``plain_records`` one for topics whose records say nothing of themselves. Any callable of this shape is an adapter.

An adapter is pure, keeps the record's key and coordinates, and raises ``NotAMessage``, which quotes nothing of the record, for
whatever it cannot read; any other exception is a fault of its own.
"""

from consumer_sdk.adapters.adapter import Adapter
from consumer_sdk.adapters.cloudevents import cloud_events
from consumer_sdk.adapters.debezium import debezium_outbox
from consumer_sdk.adapters.plain import plain_records

__all__ = ["Adapter", "cloud_events", "debezium_outbox", "plain_records"]
