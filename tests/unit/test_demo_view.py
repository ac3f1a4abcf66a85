"""What the demo shows of the payments: the same numbers on a terminal and in a file."""

import io
from typing import Final

import pytest
from rich.console import Console

from demo.payments_audit import Evidence, Order, audit_payments
from demo.payments_state import Counts
from demo.view import PaymentsProgress, Progress, View, payments_table

PROGRESS: Final = PaymentsProgress(
    counts=Counts(orders=1_012, waiting=9, charged=998, declined=5, unknown=4, reconciled=33, dead_letters=2, open=7),
    states={"provider": "gone", "payments-1": "running", "payments-2": "frozen"},
)


def shown(*, terminal: bool) -> str:
    out = io.StringIO()
    with View(Console(file=out, force_terminal=terminal, width=120, color_system=None)) as view:
        view.show_payments(PROGRESS)
    return out.getvalue()


def test_without_a_terminal_the_payments_are_a_line_of_words() -> None:
    told = shown(terminal=False)

    assert "orders 1,012  charged 998  declined 5  unknown 4  reconciled 33  dead letters 2  payments-2 frozen" in told
    assert "payments-1" not in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize("word", ["orders", "charged", "unknown", "reconciled", "dead letters", "1,012", "998", "33", "frozen"])
def test_on_a_terminal_the_payments_are_a_table_with_what_became_of_each_process(word: str) -> None:
    assert word in shown(terminal=True)


def test_the_payments_stand_below_what_was_delivered_before() -> None:
    out = io.StringIO()
    with View(Console(file=out, force_terminal=True, width=120, color_system=None)) as view:
        view.show(Progress(committed=4_321))
        view.show_payments(PROGRESS)
    last = out.getvalue().rpartition("order service")[2]
    assert last.index("4,321") < last.index("1,012")


def test_the_table_at_the_end_shows_what_must_be_zero() -> None:
    out = io.StringIO()
    left = audit_payments(
        Evidence(orders=[Order("o-1", 5, "placed", None)], charges=[], declined=set(), repeats=3, ledger=[], completions=[])
    )

    Console(file=out, width=120, color_system=None).print(payments_table(left))

    rows = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in out.getvalue().splitlines() if "│" in line}
    assert (rows["orders"], rows["uncharged"], rows["repeats"], rows["completed_once"]) == ("1", "1", "3", "0")
