"""Reads Fencepost's messages, and executes runs.

``Message`` is a record of a topic as a handler sees it. ``Handlers`` names what executes which workflow, ``Worker`` claims and
supervises, ``RunContext`` is what a handler sees of its run. ``Retryable``, ``Terminal`` and ``Ambiguous`` are how a handler
says what its failure means; ``Retry`` is how long to wait. ``RunContext.once`` makes an outside effect happen once: ``Effect``
is what the call sees, ``CallLimits`` bound it, ``Applied`` and ``Absent`` are what a reconciler answers.

``Worker`` and its settings need ``fencepost[consumer]``; they are imported when they are first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from consumer_sdk.classification import Ambiguous, Retryable, Terminal
from consumer_sdk.context import RunContext
from consumer_sdk.effects import Absent, Applied, CallLimits, Effect
from consumer_sdk.handlers import Handlers
from consumer_sdk.message import Message, NotAMessage, Record
from consumer_sdk.retry import Retry
from fencepost.errors import EffectFailed, EffectMismatch, EffectUnknown, LeaseLost

if TYPE_CHECKING:
    from consumer_sdk.worker import Worker
    from consumer_sdk.worker_settings import WorkerSettings, load_worker_settings

__all__ = [
    "Absent",
    "Ambiguous",
    "Applied",
    "CallLimits",
    "Effect",
    "EffectFailed",
    "EffectMismatch",
    "EffectUnknown",
    "Handlers",
    "LeaseLost",
    "Message",
    "NotAMessage",
    "Record",
    "Retry",
    "Retryable",
    "RunContext",
    "Terminal",
    "Worker",
    "WorkerSettings",
    "load_worker_settings",
]


_LATE = {
    "Worker": "consumer_sdk.worker",
    "WorkerSettings": "consumer_sdk.worker_settings",
    "load_worker_settings": "consumer_sdk.worker_settings",
}


def __getattr__(name: str) -> Any:
    # A service that only reads messages pays for no database driver and no metrics.
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
