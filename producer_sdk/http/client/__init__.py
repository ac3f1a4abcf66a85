"""A client of durable routes that implements their contract: one key an operation, the same bytes each time, until the answer is
final. ``AsyncDurableClient`` and ``DurableClient`` need httpx (``fencepost[http]``); ``javascript()`` is the client for browsers.
"""

from pathlib import Path

from producer_sdk.http.client.clients import AsyncDurableClient, DurableClient, NoStream
from producer_sdk.http.client.conversation import (
    Activity,
    AnswerNotReady,
    Attempt,
    Chunk,
    DurableAnswer,
    DurableProblem,
    Frame,
    Patience,
    Result,
    Truncated,
    new_key,
)
from producer_sdk.http.client.events import Event, EventParser, UnexpectedAnswer

__all__ = [
    "Activity",
    "AnswerNotReady",
    "AsyncDurableClient",
    "Attempt",
    "Chunk",
    "DurableAnswer",
    "DurableClient",
    "DurableProblem",
    "Event",
    "EventParser",
    "Frame",
    "NoStream",
    "Patience",
    "Result",
    "Truncated",
    "UnexpectedAnswer",
    "javascript",
    "new_key",
]


def javascript() -> Path:
    """The JavaScript client, ``durable.js``: a module for browsers to be served as a static file."""
    return Path(__file__).with_name("durable.js")
