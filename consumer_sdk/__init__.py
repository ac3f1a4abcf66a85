"""Reads Fencepost's messages: a Kafka record in CloudEvents' binary mode becomes a ``Message``.

Works with any client whose records look like aiokafka's; loads none of them.
"""

from consumer_sdk.message import Message, NotAMessage, Record

__all__ = ["Message", "NotAMessage", "Record"]
