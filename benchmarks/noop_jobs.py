"""The handlers of the jobs benchmark: one that does nothing, so that what is measured is the worker."""

from typing import Final

from consumer_sdk import Handlers, RunContext

__all__ = ["WORKFLOW", "handlers"]

WORKFLOW: Final = "noop"

handlers = Handlers()


@handlers.handler(WORKFLOW)
async def noop(_context: RunContext, _value: object) -> None:
    """Returns at once."""
