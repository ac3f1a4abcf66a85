"""Which handler executes which workflow, under which limits. Everything about it is checked when it is registered."""

import inspect
import json
import math
import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from consumer_sdk.context import RunContext
from consumer_sdk.effects import Reconciler
from consumer_sdk.retry import Retry
from fencepost.errors import ConfigurationError

__all__ = ["WORKFLOW", "Handler", "HandlerFunction", "Handlers", "InputModel", "check_function", "check_seconds"]

WORKFLOW: Final = re.compile(r"[A-Za-z0-9_.:-]{1,200}")
_MOST_SECONDS: Final = 366 * 86_400.0

HandlerFunction = Callable[[RunContext, Any], Coroutine[Any, Any, object]]
_Function = TypeVar("_Function", bound=HandlerFunction)
_Reconciler = TypeVar("_Reconciler", bound=Reconciler)


@runtime_checkable
class InputModel(Protocol):
    """A pydantic model class, as far as it is needed here."""

    @classmethod
    def model_validate_json(cls, json_data: bytes) -> Any: ...


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


class Handlers:
    """The workflows that a worker executes. Use ``handler`` as a decorator::

        handlers = Handlers()

        @handlers.handler("send_invoice", model=Invoice, retry=Retry(cap_seconds=60), attempt_seconds=30)
        async def send_invoice(context: RunContext, invoice: Invoice) -> dict[str, str]: ...

    What the function returns is the run's output: a pydantic model or a value that JSON can hold.
    """

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._reconcilers: dict[str, Reconciler] = {}

    def reconciler(self, operation: str) -> Callable[[_Reconciler], _Reconciler]:
        """Register the decorated coroutine function as the one that asks the provider what became of an effect::

        @handlers.reconciler("stripe.charge")
        async def charge_state(effect: Effect) -> Applied | Absent | None: ...
        """
        if operation in self._reconcilers:
            raise ConfigurationError(f"operation {operation}: has a reconciler already; register each operation once")

        def register(function: _Reconciler) -> _Reconciler:
            check_function(f"operation {operation}: the reconciler", function, "the effect", 1)
            self._reconcilers[operation] = function
            return function

        return register

    @property
    def reconcilers(self) -> Mapping[str, Reconciler]:
        return dict(self._reconcilers)

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
        if model is not None and not isinstance(model, InputModel):
            raise ConfigurationError(f"workflow {workflow}: model must be a pydantic model class, or None for plain JSON")
        if not isinstance(retry, Retry | None):
            raise ConfigurationError(f"workflow {workflow}: retry must be a consumer_sdk.Retry, or None for the default")
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


def check_function(what: str, function: object, takes: str, arguments: int) -> None:
    if not inspect.iscoroutinefunction(function):
        raise ConfigurationError(f"{what} must be an `async def` function")
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except TypeError:
        raise ConfigurationError(f"{what} must take {takes}, and nothing else without a default") from None


def check_seconds(name: str, seconds: float | None) -> None:
    if seconds is None:
        return
    if not math.isfinite(seconds) or not 0.001 <= seconds <= _MOST_SECONDS:
        raise ConfigurationError(f"{name} must be from 0.001 to {_MOST_SECONDS:g} (366 days), or None for no limit")
