"""Reads Fencepost's messages, and executes runs.

``Message`` is a record of a topic as a handler sees it. ``Handlers`` names what executes which workflow, ``Worker`` claims and
supervises, ``RunContext`` is what a handler sees of its run. ``Retryable``, ``Terminal`` and ``Ambiguous`` are how a handler
says what its failure means; ``Retry`` is how long to wait. ``RunContext.once`` makes an outside effect happen once: ``Effect``
is what the call sees, ``CallLimits`` bound it, ``Applied`` and ``Absent`` are what a reconciler answers.

``Workflows`` names workflows with their versions, ``Handlers.include`` has a worker execute them, ``WorkflowContext`` is what one
sees of its run. ``WorkflowFailure`` is a refusal that the client is told of.

``MessageHandlers`` names what handles which type of message, ``Consumer`` fetches them and keeps count, ``MessageContext`` is what
a handler sees beside the ``Message``; ``RetryLater`` puts one off. ``cloud_events``, ``debezium_outbox`` and ``plain_records`` are
how records are read.

``Worker``, ``Consumer`` and their settings need ``fencepost[consumer]``; they are imported when they are first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from consumer_sdk.adapters import Adapter, cloud_events, debezium_outbox, plain_records
from consumer_sdk.classification import Ambiguous, Retryable, RetryLater, Terminal
from consumer_sdk.context import RunContext
from consumer_sdk.effects import Absent, Applied, CallLimits, Effect
from consumer_sdk.handlers import Handlers
from consumer_sdk.message import Message, NotAMessage, Record
from consumer_sdk.message_context import MessageContext
from consumer_sdk.message_handlers import MessageHandlers
from fencepost.codec import PayloadCodec
from fencepost.errors import (
    AlreadyHandled,
    EffectFailed,
    EffectMismatch,
    EffectUnknown,
    LeaseLost,
    WorkflowChanged,
    WorkflowFailure,
)
from fencepost.retry import Retry
from fencepost.workflows import Workflows

if TYPE_CHECKING:
    from consumer_sdk.consumer import Consumer
    from consumer_sdk.consumer_settings import ConsumerSettings, load_consumer_settings
    from consumer_sdk.worker import Worker
    from consumer_sdk.worker_settings import WorkerSettings, load_worker_settings
    from consumer_sdk.workflow_context import WorkflowContext

__all__ = [
    "Absent",
    "Adapter",
    "AlreadyHandled",
    "Ambiguous",
    "Applied",
    "CallLimits",
    "Consumer",
    "ConsumerSettings",
    "Effect",
    "EffectFailed",
    "EffectMismatch",
    "EffectUnknown",
    "Handlers",
    "LeaseLost",
    "Message",
    "MessageContext",
    "MessageHandlers",
    "NotAMessage",
    "PayloadCodec",
    "Record",
    "Retry",
    "RetryLater",
    "Retryable",
    "RunContext",
    "Terminal",
    "Worker",
    "WorkerSettings",
    "WorkflowChanged",
    "WorkflowContext",
    "WorkflowFailure",
    "Workflows",
    "cloud_events",
    "debezium_outbox",
    "load_consumer_settings",
    "load_worker_settings",
    "plain_records",
]


_LATE = {
    "Consumer": "consumer_sdk.consumer",
    "ConsumerSettings": "consumer_sdk.consumer_settings",
    "load_consumer_settings": "consumer_sdk.consumer_settings",
    "Worker": "consumer_sdk.worker",
    "WorkerSettings": "consumer_sdk.worker_settings",
    "load_worker_settings": "consumer_sdk.worker_settings",
    "WorkflowContext": "consumer_sdk.workflow_context",
}


def __getattr__(name: str) -> Any:
    # A service that only reads messages pays for no database driver and no metrics.
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
