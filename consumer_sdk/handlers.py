"""Which handler executes which workflow, under which limits. Everything about it is checked when it is registered."""

import json
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from consumer_sdk.context import RunContext
from consumer_sdk.reconcilers import Reconcilers
from consumer_sdk.registration import WORKFLOW, InputModel, check_function, check_model_and_retry, check_seconds
from consumer_sdk.retry import Retry
from fencepost.errors import ConfigurationError

__all__ = ["Handler", "HandlerFunction", "Handlers", "InputModel"]


HandlerFunction = Callable[[RunContext, Any], Coroutine[Any, Any, object]]
_Function = TypeVar("_Function", bound=HandlerFunction)


@dataclass(frozen=True, kw_only=True)
class Handler:
    """One workflow's handler. ``attempt_seconds``: the longest an attempt may take; ``progress_seconds``: the longest it may
    go without reporting progress. None: no such limit."""

    workflow: str
    function: HandlerFunction
    model: InputModel | None
    retry: Retry
    attempt_seconds: float | None
    progress_seconds: float | None

    def parse(self, payload: bytes) -> object:
        """The run's input as the handler takes it. Raises ``ValueError`` (pydantic's among them) if it does not fit."""
        return json.loads(payload.decode()) if self.model is None else self.model.model_validate_json(payload)


class Handlers(Reconcilers):
    """The workflows that a worker executes. Use ``handler`` as a decorator::

        handlers = Handlers()

        @handlers.handler("send_invoice", model=Invoice, retry=Retry(cap_seconds=60), attempt_seconds=30)
        async def send_invoice(context: RunContext, invoice: Invoice) -> dict[str, str]: ...

    What the function returns is the run's output: a pydantic model or a value that JSON can hold.
    """

    def __init__(self) -> None:
        super().__init__()
        self._handlers: dict[str, Handler] = {}

    @property
    def by_workflow(self) -> Mapping[str, Handler]:
        return dict(self._handlers)

    def handler(
        self,
        workflow: str,
        *,
        model: InputModel | None = None,
        retry: Retry | None = None,
        attempt_seconds: float | None = None,
        progress_seconds: float | None = None,
    ) -> Callable[[_Function], _Function]:
        """Register the decorated coroutine function. Raises ``ConfigurationError`` for what cannot work."""
        if callable(workflow):
            raise ConfigurationError('write @handlers.handler("the workflow\'s name"), with its name')
        if not WORKFLOW.fullmatch(workflow):
            raise ConfigurationError("workflow: must be 1 to 200 characters of a-z A-Z 0-9 _ . : -")
        if workflow in self._handlers:
            raise ConfigurationError(f"workflow {workflow}: has a handler already; register each workflow once")
        check_model_and_retry(f"workflow {workflow}", model, retry)
        for name, seconds in (("attempt_seconds", attempt_seconds), ("progress_seconds", progress_seconds)):
            check_seconds(f"workflow {workflow}: {name}", seconds)

        def register(function: _Function) -> _Function:
            check_function(f"workflow {workflow}: the handler", function, "context and input", 2)
            self._handlers[workflow] = Handler(
                workflow=workflow,
                function=function,
                model=model,
                retry=retry or Retry(),
                attempt_seconds=attempt_seconds,
                progress_seconds=progress_seconds,
            )
            return function

        return register
