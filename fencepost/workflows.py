"""What a workflow is, to the process that accepts it and to the one that executes it: name, version, types, limits, failures.

A run keeps the version that it was accepted under. Register a changed workflow under the next version, and keep the old function
registered until its runs have ended: a run whose version nobody has is parked for a person, never guessed at.
"""

import inspect
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, get_type_hints

from pydantic import TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation

from fencepost.codec import PLAIN, PayloadCodec
from fencepost.errors import ConfigurationError
from fencepost.registration import WORKFLOW, check_function, check_model_and_retry, check_seconds
from fencepost.retry import Retry

__all__ = ["Workflow", "WorkflowFunction", "Workflows"]

#: ``async def function(context: WorkflowContext, input: Model) -> Result``.
WorkflowFunction = Callable[[Any, Any], Coroutine[Any, Any, Any]]
_Function = TypeVar("_Function", bound=WorkflowFunction)

_MOST_ATTEMPTS: Final = 1_000
_MOST_VERSION: Final = 2**31 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Workflow:
    """One version of a workflow. ``failures``: the exceptions that a client is told of, and the HTTP status of each; such a failure
    ends the run at once, since the client would wait for attempts that end alike.

    ``input`` and ``result`` are read from the function's annotations. ``max_attempts`` and ``deadline_seconds`` are those of its
    runs, ``attempt_seconds`` and ``progress_seconds`` of each attempt; None: no such limit.
    """

    name: str
    version: int
    function: WorkflowFunction = field(repr=False)
    input: "TypeAdapter[Any]" = field(repr=False)
    result: "TypeAdapter[Any]" = field(repr=False)
    result_type: Any = field(repr=False)
    failures: Mapping[type[Exception], int]
    retry: Retry
    max_attempts: int
    deadline_seconds: float | None
    attempt_seconds: float | None
    progress_seconds: float | None

    def status_of(self, error: BaseException) -> int | None:
        """The HTTP status that ``failures`` gives the error: that of its nearest class; None if it is not for the client."""
        return next((self.failures[kind] for kind in type(error).__mro__ if kind in self.failures), None)


class Workflows:
    """A registry of workflows. Use ``workflow`` as a decorator::

        workflows = Workflows()

        @workflows.workflow("place_order", failures={OutOfStock: 422})
        async def place_order(context: WorkflowContext, order: PlaceOrder) -> Order: ...

    ``codec``: what inputs, results and all else of their runs is stored through, by whoever accepts and by whoever executes.
    """

    def __init__(self, codec: PayloadCodec = PLAIN) -> None:
        self.codec = codec
        self._workflows: dict[str, dict[int, Workflow]] = {}

    @property
    def workflows(self) -> Mapping[str, Mapping[int, Workflow]]:
        """Workflows by name and version."""
        return {name: dict(versions) for name, versions in self._workflows.items()}

    def newest(self, function: object) -> Workflow:
        """The workflow that the function was registered as. Raises ``ConfigurationError`` for another function."""
        for versions in self._workflows.values():
            for workflow in versions.values():
                if workflow.function is function:
                    return workflow
        raise ConfigurationError("this function is no workflow of this registry: decorate it with @....workflow(name) first")

    def workflow(
        self,
        name: str,
        *,
        version: int = 1,
        failures: Mapping[type[Exception], int] | None = None,
        retry: Retry | None = None,
        max_attempts: int = 5,
        deadline_seconds: float | None = None,
        attempt_seconds: float | None = None,
        progress_seconds: float | None = None,
    ) -> Callable[[_Function], _Function]:
        """Register the decorated coroutine function. Raises ``ConfigurationError`` for what cannot work."""
        what = f"workflow {name}"
        if callable(name) or not WORKFLOW.fullmatch(name):
            raise ConfigurationError('write @workflow("its name"): 1 to 200 characters of a-z A-Z 0-9 _ . : -')
        _check_number(f"{what}: version", version, _MOST_VERSION)
        _check_number(f"{what}: max_attempts", max_attempts, _MOST_ATTEMPTS)
        if version in self._workflows.get(name, ()):
            raise ConfigurationError(f"{what}: version {version} is registered already; give changed code the next version")
        check_model_and_retry(what, None, retry)
        limits = {
            "deadline_seconds": deadline_seconds,
            "attempt_seconds": attempt_seconds,
            "progress_seconds": progress_seconds,
        }
        for limit, seconds in limits.items():
            check_seconds(f"{what}: {limit}", seconds)
        checked = _checked_failures(what, failures or {})

        def register(function: _Function) -> _Function:
            check_function(f"{what}: the function", function, "context and input", 2)
            given, returned = _annotations(what, function)
            self._workflows.setdefault(name, {})[version] = Workflow(
                name=name,
                version=version,
                function=function,
                input=_adapter(what, "input", given),
                result=_adapter(what, "result", returned),
                result_type=returned,
                failures=checked,
                retry=retry or Retry(),
                max_attempts=max_attempts,
                **limits,
            )
            return function

        return register


def _annotations(what: str, function: WorkflowFunction) -> tuple[Any, Any]:
    """The types of input and result, as the function says them."""
    _, given, *_ = inspect.signature(function).parameters.values()
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigurationError(f"{what}: the annotation {error.name} names nothing; define it at the module's level") from error
    if given.name not in hints or "return" not in hints:
        raise ConfigurationError(f"{what}: annotate the input and the result, `-> None` if there is none; both are checked by it")
    return hints[given.name], hints["return"]


def _adapter(what: str, part: str, annotation: Any) -> "TypeAdapter[Any]":
    try:
        return TypeAdapter(annotation)
    except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation) as error:
        raise ConfigurationError(f"{what}: pydantic has no schema for the type of its {part}") from error


def _checked_failures(what: str, failures: Mapping[Any, Any]) -> Mapping[type[Exception], int]:
    for kind, status in failures.items():
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise ConfigurationError(f"{what}: failures maps exception classes to HTTP statuses")
        if type(status) is not int or not 400 <= status <= 599:
            raise ConfigurationError(f"{what}: failures[{kind.__name__}]: must be an HTTP status from 400 to 599")
    return dict(failures)


def _check_number(name: str, number: object, most: int) -> None:
    if type(number) is not int or not 1 <= number <= most:
        raise ConfigurationError(f"{name}: must be from 1 to {most}")
