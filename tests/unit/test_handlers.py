"""The registry of handlers refuses what cannot work, when it is registered, and says what to do."""

import functools
import math
import uuid
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from consumer_sdk.handlers import Handler, Handlers
from consumer_sdk.loading import load_handlers, load_object
from consumer_sdk.message_handlers import MessageHandlers
from fencepost.errors import ConfigurationError
from fencepost.retry import Retry
from fencepost.workflows import Workflows


class Invoice(BaseModel):
    number: int


async def nothing(_context: Any, _value: Any) -> None: ...


def registered(workflow: str = "report", /, **options: Any) -> Handler:
    handlers = Handlers()
    handlers.handler(workflow, **options)(nothing)
    return handlers.by_workflow[workflow]


def test_a_decorated_function_is_registered_and_stays_as_it_is() -> None:
    handlers = Handlers()

    assert handlers.handler("report")(nothing) is nothing
    assert handlers.by_workflow["report"].function is nothing


def test_without_options_there_is_a_retry_and_no_limit() -> None:
    handler = registered()

    assert (handler.retry, handler.attempt_seconds, handler.progress_seconds, handler.model) == (Retry(), None, None, None)


@pytest.mark.parametrize("workflow", ["a", "A9_.:-", "x" * 200])
def test_a_workflow_has_the_names_that_acceptance_takes(workflow: str) -> None:
    assert registered(workflow).workflow == workflow


@pytest.mark.parametrize("workflow", ["", " ", "a b", "ä", "x" * 201, "a\n", "a/b"])
def test_another_name_is_refused(workflow: str) -> None:
    with pytest.raises(ConfigurationError, match="1 to 200 characters"):
        registered(workflow)


def test_a_workflow_has_one_handler() -> None:
    handlers = Handlers()
    handlers.handler("report")(nothing)

    with pytest.raises(ConfigurationError, match="workflow report: has a handler already"):
        handlers.handler("report")


class Callable:
    async def __call__(self, _context: Any, _value: Any) -> None: ...


async def _generator(_context: Any, _value: Any) -> Any:
    yield


@pytest.mark.parametrize(
    "function", [lambda _c, _v: None, print, 5, None, _generator], ids=["lambda", "print", "5", "None", "generator"]
)
def test_what_is_no_coroutine_function_is_refused(function: Any) -> None:
    with pytest.raises(ConfigurationError, match="async def"):
        Handlers().handler("report")(function)


def test_a_partial_of_a_coroutine_function_is_one() -> None:
    async def work(_tool: str, _context: Any, _value: Any) -> None: ...

    Handlers().handler("report")(functools.partial(work, "tool"))


@pytest.mark.parametrize("name", ["attempt_seconds", "progress_seconds"])
@pytest.mark.parametrize("seconds", [0, -1, 0.0009, math.inf, math.nan, 366 * 86_400 + 1])
def test_a_limit_out_of_range_is_refused(name: str, seconds: float) -> None:
    """JOB-38."""
    with pytest.raises(ConfigurationError, match=f"workflow report: {name} must be from 0.001"):
        registered(**{name: seconds})


@pytest.mark.parametrize("seconds", [0.001, 1, 366 * 86_400])
def test_a_limit_within_the_range_is_kept(seconds: float) -> None:
    assert registered(attempt_seconds=seconds).attempt_seconds == seconds


@pytest.mark.parametrize("model", [dict, 5, "Invoice"])
def test_a_model_must_be_pydantics(model: Any) -> None:
    with pytest.raises(ConfigurationError, match="model must be a pydantic model class"):
        registered(model=model)


@pytest.mark.parametrize("retry", [5, "none", Retry])
def test_a_retry_must_be_one(retry: Any) -> None:
    with pytest.raises(ConfigurationError, match="retry must be a"):
        registered(retry=retry)


def test_input_comes_as_the_model() -> None:
    assert registered(model=Invoice).parse(b'{"number": 4}') == Invoice(number=4)
    with pytest.raises(ValidationError):
        registered(model=Invoice).parse(b'{"number": "x"}')


@pytest.mark.parametrize("payload", [b"", b"{", b"\xff", b'{"a": 1} 2', "[1]".encode("utf-16")])
def test_input_without_a_model_is_json_in_utf_8(payload: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the kind is the contract
        registered().parse(payload)


def test_the_registered_handlers_cannot_be_changed_through_their_view() -> None:
    handlers = Handlers()
    handlers.handler("report")(nothing)
    dict(handlers.by_workflow).clear()
    handlers.by_workflow.clear()  # type: ignore[attr-defined]

    assert list(handlers.by_workflow) == ["report"]


found = Handlers()
found_workflows = Workflows()
found_by_mistake = MessageHandlers()


@found_workflows.workflow("order")
async def order(_context: Any, _value: None) -> None: ...


def test_handlers_are_found_by_module_and_attribute() -> None:
    assert load_object(f"{__name__}:found", Handlers) is found


def test_workflows_are_found_as_handlers_are() -> None:
    assert load_handlers(f"{__name__}:found") is found
    assert list(load_handlers(f"{__name__}:found_workflows").executors) == ["order"]


@pytest.mark.parametrize(
    ("place", "remedy"),
    [
        ("", "module:attribute"),
        ("handlers", "module:attribute"),
        (":handlers", "module:attribute"),
        ("json:", "module:attribute"),
        ("no_such_module_here:handlers", "there is no module no_such_module_here"),
        ("json.no_such:handlers", "there is no module json.no_such"),
        (".json:handlers", "full name"),
        ("json:dumps", "json:dumps is of type builtins.function; name a consumer_sdk.Handlers$"),
        ("json:absent", "json has nothing named absent; name a consumer_sdk.Handlers in it"),
        ("json:a:b", "json has nothing named a:b"),
    ],
)
def test_what_cannot_be_found_is_told_with_its_remedy(place: str, remedy: str) -> None:
    with pytest.raises(ConfigurationError, match=remedy):
        load_object(place, Handlers)


@pytest.mark.parametrize(
    ("attribute", "told"),
    [("found_by_mistake", "is of type consumer_sdk.message_handlers.MessageHandlers"), ("absent", "has nothing named absent")],
)
def test_a_worker_that_is_given_something_else_says_what_it_takes(attribute: str, told: str) -> None:
    """Most often it is the application, and its Durable is what is meant."""
    with pytest.raises(ConfigurationError, match=told) as raised:
        load_handlers(f"{__name__}:{attribute}")
    for taken in ("consumer_sdk.Handlers", "consumer_sdk.Workflows", "producer_sdk.http.Durable"):
        assert taken in str(raised.value)


async def _one(_context: Any) -> None:
    return None


async def _three(_context: Any, _value: Any, _more: Any) -> None:
    return None


async def _three_with_a_default(_context: Any, _value: Any, _more: Any = None) -> None:
    return None


@pytest.mark.parametrize("function", [_one, _three], ids=["one", "three"])
def test_a_handler_that_cannot_be_called_is_refused(function: Any) -> None:
    with pytest.raises(ConfigurationError, match="workflow report: the handler must take context and input"):
        Handlers().handler("report")(function)


def test_more_parameters_may_have_defaults() -> None:
    handlers = Handlers()
    handlers.handler("report")(_three_with_a_default)
    assert "report" in handlers.by_workflow


def test_a_decorator_without_its_name_is_told() -> None:
    wrong: Any = _three_with_a_default
    with pytest.raises(ConfigurationError, match="with its name"):
        Handlers().handler(wrong)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def broken(:\n    pass\n", r"importing (\w+) failed: SyntaxError at .*:1"),
        ("raise RuntimeError('token=SECRET')\n", r"importing (\w+) failed: RuntimeError at .*:1"),
        ("import no_such_dependency\n", r"(\w+) imports no_such_dependency, which is not installed"),
    ],
    ids=["syntax", "raises", "dependency"],
)
def test_a_module_with_a_fault_is_told_by_its_place_and_not_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, told: str
) -> None:
    name = f"handlers_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=told) as raised:
        load_object(f"{name}:handlers", Handlers)
    assert "SECRET" not in str(raised.value)
