"""What became of the orders, counted from four books that know nothing of one another. Pure.

The shop's orders, the provider's charges, the ledger's effects and the events that came out of Kafka must tell the same story.
The provider's book decides what was charged; nobody's word but its own counts there.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal, NamedTuple

from demo.provider_book import Charge

__all__ = ["Completion", "Evidence", "LedgerRow", "Order", "PaymentsAudit", "audit_payments"]

#: States of the ledger that say: the effect happened.
_HAPPENED: Final = frozenset({"succeeded", "applied"})
#: States of the ledger in which nobody knows whether it happened.
_OPEN: Final = frozenset({"sent", "unknown", "disputed"})

State = Literal["placed", "paid", "declined"]


class Order(NamedTuple):
    """An order whose transaction committed, as the shop's table has it at the end."""

    order_id: str
    amount: int
    state: State
    receipt: str | None


class LedgerRow(NamedTuple):
    """An effect: the key that the provider was given, and what the ledger says became of it."""

    provider_key: str
    state: str


class Completion(NamedTuple):
    """An event that says how an order ended. Records of the same ``event_id`` are one event."""

    event_id: str
    order_id: str
    state: State
    receipt: str | None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The four books. ``declined`` and ``repeats`` are the provider's as well: orders that it refused for good, and requests that
    came for a key after its charge."""

    orders: Sequence[Order]
    charges: Sequence[Charge]
    declined: Collection[str]
    repeats: int
    ledger: Sequence[LedgerRow]
    completions: Sequence[Completion]


@dataclass(frozen=True, kw_only=True)
class PaymentsAudit:
    """Numbers of orders, but where something else is said.

    ``orders`` is the sum of ``charged_once``, ``charged_twice`` (or more often), ``declined`` (by the provider, not charged, and
    ended so) and ``uncharged`` (neither). ``completed_once``: ended by one event that tells the provider's truth.
    ``paid_without_charge``: the receipt is of no charge of the order. ``stray_charges``: charges of no committed order, or of
    another amount. ``unrecorded_charges``: charges that the ledger does not know to have happened. ``repeats``: requests that
    reached the provider after the charge of their key. ``unknown_left``: effects that nobody knows the answer to.
    ``stray_completions``: ends told of no committed order. ``reconciled``: effects that are known by asking the provider.
    """

    orders: int
    charged_once: int
    charged_twice: int
    declined: int
    uncharged: int
    completed_once: int
    completed_twice: int
    paid_without_charge: int
    stray_charges: int
    stray_completions: int
    unrecorded_charges: int
    repeats: int
    unknown_left: int
    reconciled: int

    @property
    def kept(self) -> bool:
        """Whether each order was charged once or declined, was completed once, and every money movement is accounted for."""
        faults = (
            self.charged_twice, self.uncharged, self.completed_twice, self.paid_without_charge, self.stray_charges,
            self.stray_completions, self.unrecorded_charges, self.repeats, self.unknown_left,
        )  # fmt: skip
        return not any(faults) and self.completed_once == self.orders

    def as_json(self) -> dict[str, int]:
        return asdict(self)


def audit_payments(evidence: Evidence) -> PaymentsAudit:
    """Compare. Raises ``ValueError`` if an order is there twice."""
    amounts = {order.order_id: order.amount for order in evidence.orders}
    if len(amounts) != len(evidence.orders):
        raise ValueError("the shop's table has an order twice")
    charges = _by_order(evidence.charges)
    charged = Counter(min(len(charges[order]), 2) for order in amounts)
    declined = sum(_is_declined(order, charges, evidence.declined) for order in evidence.orders)
    completions = _events(evidence.completions)
    happened = {row.provider_key for row in evidence.ledger if row.state in _HAPPENED}
    return PaymentsAudit(
        orders=len(amounts),
        charged_once=charged[1],
        charged_twice=charged[2],
        declined=declined,
        uncharged=charged[0] - declined,
        completed_once=sum(_is_completed(order, completions[order.order_id], charges) for order in evidence.orders),
        completed_twice=sum(len(events) > 1 for events in completions.values()),
        paid_without_charge=sum(order.state == "paid" and not _has_receipt(order, charges) for order in evidence.orders),
        stray_charges=sum(charge.amount != amounts.get(charge.order) for charge in evidence.charges),
        stray_completions=sum(len(events) for order, events in completions.items() if order not in amounts),
        unrecorded_charges=sum(charge.key not in happened for charge in evidence.charges),
        repeats=evidence.repeats,
        unknown_left=sum(row.state in _OPEN for row in evidence.ledger),
        reconciled=sum(row.state == "applied" for row in evidence.ledger),
    )


_Charges = Mapping[str, Sequence[Charge]]


def _by_order(charges: Iterable[Charge]) -> "defaultdict[str, list[Charge]]":
    found: defaultdict[str, list[Charge]] = defaultdict(list)
    for charge in charges:
        found[charge.order].append(charge)
    return found


def _events(completions: Iterable[Completion]) -> "defaultdict[str, list[Completion]]":
    """By order; a record that was delivered again is the event that it was."""
    found: defaultdict[str, list[Completion]] = defaultdict(list)
    for event in dict.fromkeys(completions):
        found[event.order_id].append(event)
    return found


def _is_declined(order: Order, charges: _Charges, declined: Collection[str]) -> bool:
    return order.state == "declined" and order.order_id in declined and not charges[order.order_id]


def _is_completed(order: Order, events: Sequence[Completion], charges: _Charges) -> bool:
    """One event, of what the table says, which is what the provider says."""
    told = [(event.state, event.receipt) for event in events] == [(order.state, order.receipt)]
    true = _has_receipt(order, charges) if order.state == "paid" else order.state == "declined" and not charges[order.order_id]
    return told and true


def _has_receipt(order: Order, charges: _Charges) -> bool:
    return any(charge.charge == order.receipt for charge in charges[order.order_id])
