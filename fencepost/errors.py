"""The error tree. A class says who must act.

- ``FencepostError``
    - ``ConfigurationError``: an operator; nothing starts.
    - ``InvalidEvent``: the producer's code; nothing was written. Names field, limit and remedy.
        - ``DuplicateEvent``: an event id that the outbox already holds.
    - ``TransactionRequired``: the producer's code; the event would not share the domain rows' fate.
    - ``TransientError``: nobody; wait and try again.
    - ``PermanentError``: this row; it cannot be published as it is.
    - ``LeaseLost``: nobody; drop the work, count it, go on.
    - ``InvariantViolated``: us; the process ends and its leases run out.
"""

__all__ = [
    "ConfigurationError",
    "DuplicateEvent",
    "FencepostError",
    "InvalidEvent",
    "InvariantViolated",
    "LeaseLost",
    "PermanentError",
    "TransactionRequired",
    "TransientError",
]


class FencepostError(Exception):
    """Root of every error that Fencepost raises on purpose."""


class ConfigurationError(FencepostError):
    """The set-up cannot work; the message names the setting and the remedy. An operator acts; nothing starts."""


class InvalidEvent(FencepostError, ValueError):
    """An event may not be written. ``field`` is the attribute, ``limit`` what it must keep, ``remedy`` what to do."""

    def __init__(self, field: str, limit: str, remedy: str) -> None:
        super().__init__(f"{field}: {limit}; {remedy}")
        self.field = field
        self.limit = limit
        self.remedy = remedy


class DuplicateEvent(InvalidEvent):
    """The outbox already holds a row with this event id; consumers would take the two for one event."""


class TransactionRequired(FencepostError):
    """The connection has no transaction that the event could commit with, or has one that can write nothing."""


class TransientError(FencepostError):
    """The environment's fault, and it passes: wait and try again. No attempt of any row is spent."""


class PermanentError(FencepostError):
    """This row cannot be published as it is; waiting does not help."""


class LeaseLost(FencepostError):
    """A write named a generation that no longer holds the lease; it changed nothing."""


class InvariantViolated(FencepostError):
    """A state that must not exist. The process ends: a lease expires safely, a wrong write does not."""
