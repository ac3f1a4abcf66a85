"""Which handler executes which workflow, under which limits. Everything about it is checked when it is registered.

A plain handler takes a workflow's runs of any version. A workflow of a ``Workflows`` registry takes those of its own version.
"""

import json
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from consumer_sdk.context import RunContext
from consumer_sdk.reconcilers import Reconcilers
from fencepost.codec import PLAIN, PayloadCodec
from fencepost.errors import ConfigurationError
from fencepost.registration import WORKFLOW, InputModel, check_function, check_model_and_retry, check_seconds
from fencepost.retry import Retry
from fencepost.workflows import Workflow, Workflows

__all__ = ["Handler", "HandlerFunction", "Handlers", "InputModel", "MissingVersion", "Versions", "WorkflowHandler"]


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

    def of_version(self, _version: int) -> "Handler":
        """What executes a run of this version."""
        return self


@dataclass(frozen=True, kw_only=True)
class WorkflowHandler(Handler):
    """One version of a registered workflow."""

    definition: Workflow
    registry: Workflows

    @classmethod
    def of(cls, definition: Workflow, registry: Workflows) -> "WorkflowHandler":
        return cls(
            workflow=definition.name,
            function=definition.function,
            model=None,
            retry=definition.retry,
            attempt_seconds=definition.attempt_seconds,
            progress_seconds=definition.progress_seconds,
            definition=definition,
            registry=registry,
        )

    def parse(self, payload: bytes) -> object:
        return self.definition.input.validate_json(payload)


@dataclass(frozen=True, kw_only=True)
class MissingVersion:
    """Stands for a version of a workflow that nobody here has. ``is_newer`` than all that are here: other workers have it."""

    workflow: str
    version: int
    is_newer: bool
    retry: Retry = field(default_factory=Retry)
    attempt_seconds: None = None
    progress_seconds: None = None


@dataclass(frozen=True, kw_only=True)
class Versions:
    """The versions of one workflow that are registered here. ``attempt_seconds`` is that of the most patient one: a claim does not
    know the version of what it will get."""

    workflow: str
    handlers: Mapping[int, WorkflowHandler]

    @property
    def attempt_seconds(self) -> float | None:
        limits = [handler.attempt_seconds for handler in self.handlers.values()]
        return None if None in limits else max(limit for limit in limits if limit is not None)

    def of_version(self, version: int) -> WorkflowHandler | MissingVersion:
        """What executes a run of this version."""
        if version in self.handlers:
            return self.handlers[version]
        return MissingVersion(workflow=self.workflow, version=version, is_newer=version > max(self.handlers))


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
        self._registries: list[Workflows] = []

    @property
    def by_workflow(self) -> Mapping[str, Handler]:
        """The plain handlers."""
        return dict(self._handlers)

    @property
    def executors(self) -> Mapping[str, Handler | Versions]:
        """Everything that executes runs: plain handlers, and workflows with their versions. Raises ``ConfigurationError`` for a
        name that two of them have."""
        found: dict[str, Handler | Versions] = dict(self._handlers)
        for registry in self._registries:
            for name, versions in registry.workflows.items():
                if name in found:
                    raise ConfigurationError(f"workflow {name}: has a handler already; register each workflow once")
                handlers = {number: WorkflowHandler.of(definition, registry) for number, definition in versions.items()}
                found[name] = Versions(workflow=name, handlers=handlers)
        return found

    @property
    def codec(self) -> PayloadCodec:
        """What the runs are stored through: the registries' one. Raises ``ConfigurationError`` where they have several."""
        codecs = [registry.codec for registry in self._registries]
        if any(codec is not codecs[0] for codec in codecs):
            raise ConfigurationError("the included workflows have different codecs; give those of one worker the same object")
        return codecs[0] if codecs else PLAIN

    def include(self, workflows: Workflows) -> None:
        """Execute the workflows of a registry as well, those that are registered later among them."""
        if not isinstance(workflows, Workflows):
            raise ConfigurationError("include takes a fencepost.workflows.Workflows, for example a Durable")
        if workflows not in self._registries:
            self._registries.append(workflows)

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
