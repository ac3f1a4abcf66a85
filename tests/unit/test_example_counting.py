"""The counting of the examples of durable routes: each number must be able to fail them."""

from argparse import ArgumentTypeError
from dataclasses import replace
from typing import Any

import pytest

from examples.durable_answers.drive import Driven
from examples.durable_answers.model import PARAGRAPHS, answer_to, tokens
from examples.durable_checkout.counting import Numbers, Result
from examples.durable_checkout.walk import Exchange
from examples.stage import port_number

RIGHT = Exchange(title="", request="", status=201, headers={}, body="", right=True)
NUMBERS = Numbers(
    orders=5, paid=3, declined=1, out_of_stock=1, charged_once=3, charged_twice=0, charged_for_nothing=0, shipped_once=3,
    shipped_twice=0, stock_adds_up=True,
)  # fmt: skip
RESULT = Result(exchanges=[RIGHT, RIGHT], crowd=2, answered=2, open_when_killed=1, numbers=NUMBERS)
DRIVEN = Driven(
    prompt="Why?", text=answer_to("Why?"), result=answer_to("Why?"), ids=["0.0", "0.1", "1.0", "1.1"], ids_before_reload=["0.0"],
    attempts=[1], kept_through_kill=1, live_chunks=1, requests_before_reload=3, connections_cut=1, state="done",
)  # fmt: skip


def test_an_answer_that_is_cut_says_so() -> None:
    whole, cut = (replace(RIGHT, body="x" * length).lines()[-2] for length in (110, 111))
    assert whole.endswith("xx")
    assert len(cut) == len(whole)
    assert cut.endswith("x…")


@pytest.mark.parametrize("port", ["99999", "65536", "-1", "http", ""])
def test_a_port_that_cannot_be_is_wrong_usage(port: str) -> None:
    with pytest.raises(ArgumentTypeError, match="0 to 65535"):
        port_number(port)
    assert port_number("65535") == 65_535


def test_a_run_that_kept_everything_is_kept() -> None:
    assert RESULT.kept
    assert RESULT.as_json()["kept"]
    assert DRIVEN.kept


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("charged_once", 2), ("charged_twice", 1), ("charged_for_nothing", 1), ("shipped_once", 2), ("shipped_twice", 1),
        ("orders", 6), ("declined", 0), ("stock_adds_up", False),
    ],
)  # fmt: skip
def test_a_number_that_does_not_hold_fails_the_checkout(name: str, value: Any) -> None:
    assert not replace(RESULT, numbers=replace(NUMBERS, **{name: value})).kept


@pytest.mark.parametrize(
    ("name", "value"), [("answered", 1), ("open_when_killed", 0), ("exchanges", [RIGHT, replace(RIGHT, right=False)])]
)
def test_a_wrong_answer_or_a_kill_in_quiet_fails_the_checkout(name: str, value: Any) -> None:
    assert not replace(RESULT, **{name: value}).kept


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("text", "cut"), ("result", None), ("result", "other"), ("ids", []), ("ids", ["0.0", "0.0"]), ("ids", ["0.0", "0.2"]),
        ("ids", ["0.1"]), ("ids", ["1.0", "0.0"]), ("ids_before_reload", ["0.0", "0.1", "0.1"]), ("attempts", []),
        ("live_chunks", 0), ("kept_through_kill", 0), ("connections_cut", 0), ("requests_before_reload", 2), ("state", "failed"),
    ],
)  # fmt: skip
def test_what_a_page_must_not_show_fails_the_drive(name: str, value: Any) -> None:
    assert not replace(DRIVEN, **{name: value}).kept


async def test_the_model_says_its_answer_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANSWERS_TOKEN_SECONDS", "0")
    said = [token for number in range(len(PARAGRAPHS)) async for token in tokens("Why?", number)]
    assert "".join(said) == answer_to("Why?")
    assert len(said) > 150
