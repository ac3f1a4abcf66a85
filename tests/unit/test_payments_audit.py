"""The audit of the payments: each of its counters must be able to fail, and a clean run has nothing to show but orders."""

from dataclasses import replace
from typing import Any, Final

import pytest

from demo.payments_audit import Completion, Evidence, LedgerRow, Order, PaymentsAudit, audit_payments
from demo.provider_book import Charge

PAID: Final = Order("o-1", 100, "paid", "ch_1")
ALSO_PAID: Final = Order("o-2", 200, "paid", "ch_2")
REFUSED: Final = Order("o-3", 300, "declined", None)
CHARGE: Final = Charge("ch_1", "fp_1", "o-1", 100, 1)
OTHER_CHARGE: Final = Charge("ch_2", "fp_2", "o-2", 200, 1)
PAID_EVENT: Final = Completion("e-1", "o-1", "paid", "ch_1")
ALSO_PAID_EVENT: Final = Completion("e-2", "o-2", "paid", "ch_2")
REFUSED_EVENT: Final = Completion("e-3", "o-3", "declined", None)

CLEAN: Final = Evidence(
    orders=[PAID, ALSO_PAID, REFUSED],
    charges=[CHARGE, OTHER_CHARGE],
    declined={"o-3"},
    repeats=0,
    ledger=[LedgerRow("fp_1", "succeeded"), LedgerRow("fp_2", "applied"), LedgerRow("fp_3", "failed")],
    completions=[PAID_EVENT, ALSO_PAID_EVENT, REFUSED_EVENT],
)
FOUND: Final = PaymentsAudit(
    orders=3, charged_once=2, charged_twice=0, declined=1, uncharged=0, completed_once=3, completed_twice=0, paid_without_charge=0,
    stray_charges=0, stray_completions=0, unrecorded_charges=0, repeats=0, unknown_left=0, reconciled=1,
)  # fmt: skip


def found(**changed: Any) -> PaymentsAudit:
    """What the audit says when these books are others."""
    return audit_payments(replace(CLEAN, **changed))


def test_a_clean_run_keeps_every_promise() -> None:
    assert found() == FOUND
    assert found().kept


def test_the_json_has_each_number_under_its_name() -> None:
    assert found().as_json() == vars(FOUND)


def test_nothing_at_all_is_kept() -> None:
    nothing = audit_payments(Evidence(orders=[], charges=[], declined=(), repeats=0, ledger=[], completions=[]))

    assert nothing.kept
    assert not any(nothing.as_json().values())


TWICE: Final = [CHARGE, Charge("ch_9", "fp_1", "o-1", 100, 2), OTHER_CHARGE]
TWICE_BY_KEYS: Final = [CHARGE, Charge("ch_9", "fp_2", "o-1", 100, 2), OTHER_CHARGE]
EVENTS: Final = [ALSO_PAID_EVENT, REFUSED_EVENT]
FAULTS: Final[tuple[tuple[str, dict[str, Any], dict[str, int]], ...]] = (
    ("charged twice under one key", {"charges": TWICE}, {"charged_once": 1, "charged_twice": 1}),
    ("charged twice under two keys", {"charges": TWICE_BY_KEYS}, {"charged_once": 1, "charged_twice": 1}),
    (
        "paid without a charge",
        {"charges": [OTHER_CHARGE]},
        {"charged_once": 1, "uncharged": 1, "paid_without_charge": 1, "completed_once": 2},
    ),
    (
        "paid with the receipt of another order's charge",
        {
            "orders": [PAID._replace(receipt="ch_2"), ALSO_PAID, REFUSED],
            "completions": [PAID_EVENT._replace(receipt="ch_2"), *EVENTS],
        },
        {"paid_without_charge": 1, "completed_once": 2},
    ),
    (
        "never charged, never declined",
        {
            "orders": [PAID._replace(state="placed", receipt=None), ALSO_PAID, REFUSED],
            "charges": [OTHER_CHARGE],
            "completions": EVENTS,
        },
        {"charged_once": 1, "uncharged": 1, "completed_once": 2},
    ),
    (
        "charged and left as placed",
        {"orders": [PAID._replace(state="placed", receipt=None), ALSO_PAID, REFUSED], "completions": EVENTS},
        {"completed_once": 2},
    ),
    (
        "charged and said to be declined",
        {
            "orders": [PAID._replace(state="declined", receipt=None), ALSO_PAID, REFUSED],
            "completions": [PAID_EVENT._replace(state="declined", receipt=None), *EVENTS],
        },
        {"completed_once": 2},
    ),
    ("declined without the provider's word", {"declined": ()}, {"declined": 0, "uncharged": 1}),
    ("no event of the end", {"completions": EVENTS}, {"completed_once": 2}),
    (
        "two events of the end",
        {"completions": [*CLEAN.completions, PAID_EVENT._replace(event_id="e-9")]},
        {"completed_once": 2, "completed_twice": 1},
    ),
    ("an event of another end", {"completions": [PAID_EVENT._replace(receipt="ch_9"), *EVENTS]}, {"completed_once": 2}),
    (
        "two ends of an order that was rolled back",
        {"completions": [*CLEAN.completions, Completion("e-8", "o-9", "paid", "x"), Completion("e-9", "o-9", "paid", "x")]},
        {"completed_twice": 1, "stray_completions": 2},
    ),
    (
        "one end of an order that was rolled back",
        {"completions": [*CLEAN.completions, Completion("e-8", "o-9", "declined", None)]},
        {"stray_completions": 1},
    ),
    (
        "a charge of an order that was rolled back",
        {"charges": [*CLEAN.charges, Charge("ch_9", "fp_2", "o-9", 100, 1)]},
        {"stray_charges": 1},
    ),
    ("a charge of another amount", {"charges": [CHARGE._replace(amount=1), OTHER_CHARGE]}, {"stray_charges": 1}),
    ("a charge without a row of the ledger", {"ledger": CLEAN.ledger[1:]}, {"unrecorded_charges": 1}),
    (
        "a charge that the ledger holds for absent",
        {"ledger": [LedgerRow("fp_1", "absent"), *CLEAN.ledger[1:]]},
        {"unrecorded_charges": 1},
    ),
    (
        "a charge whose answer nobody knows",
        {"ledger": [LedgerRow("fp_1", "sent"), *CLEAN.ledger[1:]]},
        {"unrecorded_charges": 1, "unknown_left": 1},
    ),
    ("a refusal whose answer nobody knows", {"ledger": [*CLEAN.ledger[:2], LedgerRow("fp_3", "unknown")]}, {"unknown_left": 1}),
    ("a refusal that a person closed", {"ledger": [*CLEAN.ledger[:2], LedgerRow("fp_3", "disputed")]}, {"unknown_left": 1}),
    ("a request after the charge, which a key may hide", {"repeats": 1}, {"repeats": 1}),
)  # fmt: skip


@pytest.mark.parametrize(("changed", "counted"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_a_fault_is_counted_and_breaks_the_promise(changed: dict[str, Any], counted: dict[str, int]) -> None:
    faulty = found(**changed)

    assert faulty == replace(FOUND, **counted)
    assert not faulty.kept


def test_an_event_that_is_delivered_again_is_one_event() -> None:
    assert found(completions=[*CLEAN.completions, PAID_EVENT]) == FOUND


def test_effects_that_had_to_be_asked_for_are_counted_and_break_nothing() -> None:
    asked = found(ledger=[LedgerRow("fp_1", "applied"), *CLEAN.ledger[1:]])

    assert asked == replace(FOUND, reconciled=2)
    assert asked.kept


def test_an_order_that_is_there_twice_is_an_error_of_the_book() -> None:
    with pytest.raises(ValueError, match="twice"):
        found(orders=[PAID, PAID])
