"""Which failures of a workflow a client is told of, and how its code is made of a class's name."""

from json import loads
from typing import Final

import pytest
from structlog.testing import capture_logs

from consumer_sdk import WorkflowContext
from consumer_sdk.classification import Ambiguous
from consumer_sdk.told_failures import MAX_DETAILS_BYTES, told_failure
from fencepost.errors import InvariantViolated, LeaseLost, TransientError, WorkflowChanged, WorkflowFailure
from fencepost.workflows import Workflows


class OutOfStock(WorkflowFailure): ...


workflows: Final = Workflows()


@workflows.workflow("order", failures={OutOfStock: 422, Exception: 500})
async def order(context: WorkflowContext, _value: None) -> None: ...


@workflows.workflow("strict", failures={OutOfStock: 422})
async def strict(context: WorkflowContext, _value: None) -> None: ...


ORDER: Final = workflows.newest(order)
STRICT: Final = workflows.newest(strict)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("OutOfStock", "out_of_stock"), ("HTTPError", "http_error"), ("Http2Error", "http2_error"), ("E", "e"), ("x_Y", "x_y"),
        ("Größe", "gr_e"), ("_", "workflow_failure"), ("A" * 70, "a" * 64), ("Ab" * 40, ("ab_" * 40)[:64].rstrip("_")),
    ],
)  # fmt: skip
def test_the_code_is_the_classs_name_in_snake_case(name: str, code: str) -> None:
    told = told_failure(ORDER, type(name, (Exception,), {})())

    assert told is not None
    assert told.failure.code == code
    assert loads(told.payload) == {"type": name, "details": None, "status": 500}


def test_the_nearest_class_gives_the_status() -> None:
    told = told_failure(ORDER, OutOfStock(details=[1]))

    assert told is not None
    assert loads(told.payload) == {"type": "OutOfStock", "details": [1], "status": 422}


@pytest.mark.parametrize("error", [LeaseLost("x"), TransientError("x"), WorkflowChanged("x"), InvariantViolated("x")], ids=repr)
@pytest.mark.parametrize("grouped", [False, True], ids=["alone", "in a group"])
def test_what_is_not_the_workflows_word_is_never_told(error: Exception, grouped: bool) -> None:
    assert told_failure(ORDER, ExceptionGroup("", [error]) if grouped else error) is None


@pytest.mark.parametrize(
    ("others", "is_told"),
    [
        ([], True), ([ValueError()], True), ([TransientError("x")], True), ([ExceptionGroup("", [ValueError()])], True),
        ([Ambiguous("sent")], False), ([LeaseLost("x")], False), ([ExceptionGroup("", [Ambiguous("sent")])], False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("first", [False, True], ids=["before them", "after them"])
def test_together_it_is_told_unless_another_leaves_open_what_happened(others: list[Exception], is_told: bool, first: bool) -> None:
    members = [OutOfStock(), *others] if first else [*others, OutOfStock()]

    assert (told_failure(STRICT, ExceptionGroup("", members)) is not None) is is_told


def test_a_plain_handlers_failures_are_told_to_nobody() -> None:
    assert told_failure(None, OutOfStock()) is None


@pytest.mark.parametrize(
    "details", [object(), "x" * (MAX_DETAILS_BYTES + 100), float("nan"), {1, 2}], ids=["object", "long", "nan", "set"]
)
def test_details_that_cannot_be_kept_are_left_out_and_logged(details: object) -> None:
    with capture_logs() as logs:
        told = told_failure(STRICT, OutOfStock(details=details))

    assert told is not None
    assert loads(told.payload)["details"] is None
    assert [(entry["event"], entry["type"]) for entry in logs] == [("failure_details_refused", "OutOfStock")]
