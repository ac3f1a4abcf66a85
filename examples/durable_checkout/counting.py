"""What the story comes to: orders, the provider's own book, shipments and stock, compared with one another."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import asyncpg

from examples.durable_checkout.walk import Exchange

__all__ = ["STOCK", "Numbers", "Result", "count"]

#: Item, price in cents and how many there are. How an amount ends decides what the provider does.
STOCK: Final = (("lamp", 4_900, 500), ("chair", 12_904, 10), ("sofa", 89_902, 3), ("piano", 950_000, 0))

_PAID: Final = "SELECT id::text FROM shop.orders WHERE state = 'paid'"
_STATES: Final = "SELECT state, count(*) FROM shop.orders GROUP BY state"
_SHIPPED: Final = "SELECT order_id::text FROM shop.shipments"
_WHOLE: Final = """
SELECT s.item, s.available + coalesce(sum(o.quantity), 0) AS whole
FROM shop.stock AS s LEFT JOIN shop.orders AS o ON o.item = s.item AND o.state = 'paid' GROUP BY s.item
"""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Counted at the end. ``charged_for_nothing``: charges of orders that are not paid."""

    orders: int
    paid: int
    declined: int
    out_of_stock: int
    charged_once: int
    charged_twice: int
    charged_for_nothing: int
    shipped_once: int
    shipped_twice: int
    stock_adds_up: bool

    @property
    def hold(self) -> bool:
        once = self.charged_once == self.shipped_once == self.paid > 0
        ended = self.orders == self.paid + self.declined + self.out_of_stock
        never = self.charged_twice == self.charged_for_nothing == self.shipped_twice == 0
        return once and ended and never and self.stock_adds_up


@dataclass(frozen=True, kw_only=True)
class Result:
    """The story's outcome. ``answered``: how many of the crowd's clients got their 201, each for an order of its own."""

    exchanges: Sequence[Exchange]
    crowd: int
    answered: int
    open_when_killed: int
    numbers: Numbers

    @property
    def kept(self) -> bool:
        told_right = all(exchange.right for exchange in self.exchanges) and self.answered == self.crowd
        return told_right and self.open_when_killed > 0 and self.numbers.hold

    def as_json(self) -> dict[str, Any]:
        return {
            "kept": self.kept,
            "crowd": self.crowd,
            "answered": self.answered,
            "open_when_killed": self.open_when_killed,
            **asdict(self.numbers),
            "exchanges": [exchange.as_json() for exchange in self.exchanges],
        }


async def count(connection: "asyncpg.Connection[Any]", book: dict[str, Any]) -> Numbers:
    """``book`` is the provider's own."""
    paid = {row["id"] for row in await connection.fetch(_PAID)}
    states = Counter({row["state"]: row["count"] for row in await connection.fetch(_STATES)})
    charges = Counter(charge["order"] for charge in book["charges"])
    shipments = Counter(row["order_id"] for row in await connection.fetch(_SHIPPED))
    whole = {row["item"]: row["whole"] for row in await connection.fetch(_WHOLE)}
    return Numbers(
        orders=states.total(),
        paid=states["paid"],
        declined=states["declined"],
        out_of_stock=states["out_of_stock"],
        charged_once=sum(charges[order] == 1 for order in paid),
        charged_twice=sum(times > 1 for times in charges.values()),
        charged_for_nothing=len(charges.keys() - paid),
        shipped_once=sum(shipments[order] == 1 for order in paid),
        shipped_twice=sum(times > 1 for times in shipments.values()),
        stock_adds_up=whole == {item: available for item, _, available in STOCK},
    )
