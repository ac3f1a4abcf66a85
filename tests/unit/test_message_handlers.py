"""The registry of messages' handlers refuses what cannot work, when it is registered, and says what to do."""

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import pytest
from pydantic import BaseModel, ValidationError

from consumer_sdk.adapters import cloud_events, plain_records
from consumer_sdk.message_handlers import MessageHandler, MessageHandlers
from consumer_sdk.testing import message
from fencepost.codec import PLAIN
from fencepost.errors import ConfigurationError
from fencepost.retry import Retry

TYPE: Final = "order.placed"


class Order(BaseModel):
    number: int


async def nothing(_message: Any, _context: Any) -> None: ...


async def another(_message: Any, _context: Any) -> None: ...


async def one(_message: Any) -> None: ...


async def three(_message: Any, _context: Any, _more: Any) -> None: ...


async def three_with_a_default(_message: Any, _context: Any, _more: Any = None) -> None: ...


async def generator(_message: Any, _context: Any) -> Any:
    yield


def registered(type: Any = TYPE, /, **options: Any) -> MessageHandler:  # noqa: A002
    app = MessageHandlers()
    app.handler(type, **{"step": "store"} | options)(nothing)
    return app.all[0]


def batched(**options: Any) -> MessageHandler:
    app = MessageHandlers()
    app.batch_handler(TYPE, **{"step": "store"} | options)(nothing)
    return app.all[0]


EITHER: Final = pytest.mark.parametrize("register", [registered, batched], ids=["handler", "batch_handler"])
Register = Callable[..., MessageHandler]


def test_a_decorated_function_is_registered_and_stays_as_it_is() -> None:
    app = MessageHandlers()

    assert app.handler(TYPE, step="store")(nothing) is nothing
    assert app.batch_handler(TYPE, step="bulk")(another) is another
    assert [(handler.step, handler.function) for handler in app.all] == [("store", nothing), ("bulk", another)]


def test_without_options_every_bound_has_its_default() -> None:
    handler = registered()

    assert (handler.retry, handler.attempts, handler.attempt_seconds, handler.patience_seconds) == (Retry(), 5, 60, 3600)
    assert (handler.model, handler.version, handler.tombstones, handler.workflow, handler.batch) == (None, None, False, None, 0)
    assert batched().batch == 500


@pytest.mark.parametrize(
    ("options", "field", "remedy"),
    [
        ({"step": ""}, "step", "1 to 64 characters of a-z A-Z 0-9 _ . : -"),
        ({"step": "a b"}, "step", "1 to 64 characters"),
        ({"step": "a/b"}, "step", "1 to 64 characters"),
        ({"step": "x" * 65}, "step", "1 to 64 characters"),
        ({"step": "a\n"}, "step", "1 to 64 characters"),
        ({"model": dict}, "model", "a pydantic model class, or None"),
        ({"model": "Order"}, "model", "a pydantic model class, or None"),
        ({"version": 0}, "version", "a whole number from 1, or None for any"),
        ({"version": True}, "version", "a whole number from 1, or None for any"),
        ({"version": "1"}, "version", "a whole number from 1, or None for any"),
        ({"retry": 5}, "retry", "a consumer_sdk.Retry, or None"),
        ({"retry": Retry}, "retry", "a consumer_sdk.Retry, or None"),
        ({"attempts": 0}, "attempts", "from 1 to 100"),
        ({"attempts": 101}, "attempts", "from 1 to 100"),
        ({"attempts": 1.5}, "attempts", "from 1 to 100"),
        ({"attempts": True}, "attempts", "from 1 to 100"),
        ({"attempt_seconds": 0}, "attempt_seconds", "from 0.001"),
        ({"attempt_seconds": math.nan}, "attempt_seconds", "from 0.001"),
        ({"attempt_seconds": math.inf}, "attempt_seconds", "from 0.001"),
        ({"attempt_seconds": None}, "attempt_seconds", "a number"),
    ],
    ids=str,
)
@EITHER
def test_what_cannot_work_is_refused_by_name(register: Register, options: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        register(**options)
    assert str(refused.value).startswith(f"type {TYPE}: {field} must be {remedy}")


@pytest.mark.parametrize("patience", [-1, math.nan, math.inf, 7 * 86_400 + 1])
def test_patience_ends(patience: float) -> None:
    with pytest.raises(ConfigurationError, match=f"type {TYPE}: patience_seconds must be from 0 to 604800"):
        registered(patience_seconds=patience)


@pytest.mark.parametrize("workflow", ["", "a b", "a/b", "é", "x" * 201])
def test_a_workflow_has_the_names_that_acceptance_takes(workflow: str) -> None:
    with pytest.raises(ConfigurationError, match="workflow"):
        registered(workflow=workflow)


@pytest.mark.parametrize("most", [0, 1001, 1.5, True, "5"])
def test_a_batch_has_a_bound(most: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"type {TYPE}: most must be from 1 to 1000"):
        batched(most=most)


@pytest.mark.parametrize(
    "options",
    [
        {"step": "x" * 64}, {"step": "A9_.:-"}, {"version": 1}, {"attempts": 1}, {"attempts": 100}, {"attempt_seconds": 0.001},
        {"model": Order}, {"retry": Retry(cap_seconds=3)},
    ],
    ids=str,
)  # fmt: skip
@EITHER
def test_what_can_work_is_kept(register: Register, options: dict[str, Any]) -> None:
    (name, value), handler = next(iter(options.items())), register(**options)

    assert getattr(handler, name) == value


@pytest.mark.parametrize("type", ["", "x" * 257, "é" * 129, 5, None], ids=["empty", "long", "long in bytes", "5", "None"])
def test_a_type_is_one_that_a_message_can_have(type: Any) -> None:  # noqa: A002
    for register in (registered, MessageHandlers().ignore):
        with pytest.raises(ConfigurationError, match="type: must be text of 1 to 256 bytes"):
            register(type)


def test_a_decorator_without_its_type_is_told() -> None:
    wrong: Any = nothing
    with pytest.raises(ConfigurationError, match=r'write @app\.handler\("the type", step="\.\.\."\)'):
        MessageHandlers().handler(wrong, step="store")(nothing)


@pytest.mark.parametrize(
    "function", [lambda _m, _c: None, print, 5, None, generator], ids=["lambda", "print", "5", "None", "generator"]
)
def test_what_is_no_coroutine_function_is_refused(function: Any) -> None:
    app = MessageHandlers()
    for decorator in (app.handler, app.batch_handler):
        with pytest.raises(ConfigurationError, match=f"type {TYPE}: the handler must be an `async def` function"):
            decorator(TYPE, step="store")(function)
    assert app.all == []


@pytest.mark.parametrize("function", [one, three], ids=["one", "three"])
def test_a_handler_that_cannot_be_called_is_refused(function: Any) -> None:
    app = MessageHandlers()
    with pytest.raises(ConfigurationError, match="must take message and context, and nothing else without a default"):
        app.handler(TYPE, step="store")(function)
    with pytest.raises(ConfigurationError, match="must take messages and connection, and nothing else without a default"):
        app.batch_handler(TYPE, step="store")(function)


@pytest.mark.parametrize("function", [three_with_a_default, functools.partial(three, 1)], ids=["default", "partial"])
def test_whatever_takes_two_is_a_handler(function: Any) -> None:
    MessageHandlers().handler(TYPE, step="store")(function)


@pytest.mark.parametrize("version", [None, 2])
def test_a_step_has_one_handler_of_a_type_and_version(version: int | None) -> None:
    app = MessageHandlers()
    app.handler(TYPE, step="store", version=version)(nothing)

    for decorator in (app.handler, app.batch_handler):
        with pytest.raises(ConfigurationError, match=f"type {TYPE}: step store has a handler already; name each step once"):
            decorator(TYPE, step="store", version=version)(another)


# Which handler takes a message


def steps_of(app: MessageHandlers, version: int, type: str = TYPE) -> list[tuple[str, int | None]]:  # noqa: A002
    found = app.handlers_of(message(type, None, schema_version=version))
    return [(handler.step, handler.version) for handler in found]


@pytest.fixture
def app() -> MessageHandlers:
    """Step "store" has a handler of version 2 and one for the rest, "mail" only one for the rest, "audit" only one of 3."""
    app = MessageHandlers()
    for step, version in (("store", None), ("store", 2), ("mail", None), ("audit", 3)):
        app.handler(TYPE, step=step, version=version)(nothing)
    return app


@pytest.mark.parametrize(
    ("version", "steps"),
    [
        (1, [("store", None), ("mail", None)]),
        (2, [("store", 2), ("mail", None)]),
        (3, [("store", None), ("mail", None), ("audit", 3)]),
    ],
)
def test_each_step_takes_a_message_once_by_the_handler_of_its_version(
    app: MessageHandlers, version: int, steps: list[tuple[str, int | None]]
) -> None:
    """CONSUME-9."""
    assert steps_of(app, version) == steps


def test_a_type_without_a_handler_is_not_known_nor_ignored(app: MessageHandlers) -> None:
    assert steps_of(app, 1, "order.paid") == []
    assert (app.is_known("order.paid"), app.is_ignored("order.paid"), app.is_known(TYPE)) == (False, False, True)
    assert steps_of(app, 1) != []


def test_types_are_ignored_by_name_or_all_that_have_no_handler(app: MessageHandlers) -> None:
    app.ignore("order.paid", "order.sent")
    assert [app.is_ignored(one) for one in ("order.paid", "order.sent", "order.lost")] == [True, True, False]

    app.ignore("*")
    assert app.is_ignored("order.lost")


# Payloads, adapters, reconcilers


def test_a_payload_comes_as_the_model() -> None:
    handler = registered(model=Order)

    assert handler.value_of(b'{"number": 4}') == Order(number=4)
    with pytest.raises(ValidationError):
        handler.value_of(b'{"number": "x"}')


def test_a_tombstone_has_no_value() -> None:
    assert registered(model=Order).value_of(None) is None


@pytest.mark.parametrize("payload", [b"", b"{", b"\xff", b'{"a": 1} 2', "[1]".encode("utf-16")])
def test_a_payload_without_a_model_is_json_in_utf_8(payload: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the kind is the contract
        registered().value_of(payload)


def test_a_topic_is_read_by_its_adapter_and_by_default_as_cloud_events() -> None:
    app, adapter = MessageHandlers(), plain_records(type="sensor.read")
    app.adapter("sensors", adapter)

    assert app.adapter_of("sensors") is adapter
    assert app.adapter_of("orders") is cloud_events
    with pytest.raises(ConfigurationError, match="topic sensors: has an adapter already"):
        app.adapter("sensors", adapter)


def test_an_operation_has_one_reconciler() -> None:
    app = MessageHandlers()

    async def asks(_effect: Any) -> None: ...

    assert app.reconciler("card")(asks) is asks
    assert app.reconcilers == {"card": asks}
    with pytest.raises(ConfigurationError, match="operation card: has a reconciler already; register each operation once"):
        app.reconciler("card")
    wrong: Any = nothing
    with pytest.raises(ConfigurationError, match="operation mail: the reconciler must take the effect"):
        app.reconciler("mail")(wrong)


def test_payloads_are_plain_unless_a_codec_is_given() -> None:
    codec: Any = object()

    assert MessageHandlers().codec is PLAIN
    assert MessageHandlers(codec=codec).codec is codec
