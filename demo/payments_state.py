"""Asks the database how the payments stand while they are at work. What they came to, the audit says."""

import asyncio
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from demo.payments_consumer import CHARGE

if TYPE_CHECKING:
    import asyncpg

__all__ = ["Counts", "PaymentsState"]

# A call that is past its deadline has no answer either, whoever made it.
_COUNTS: Final = """
SELECT (SELECT count(*) FROM payment_orders) AS orders,
       (SELECT count(*) FROM payment_orders WHERE state = 'placed') AS waiting,
       count(*) FILTER (WHERE state IN ('succeeded', 'applied')) AS charged,
       count(*) FILTER (WHERE state = 'failed') AS declined,
       count(*) FILTER (WHERE state = 'unknown' OR state = 'sent' AND deadline_at < clock_timestamp()) AS unknown,
       count(*) FILTER (WHERE state = 'applied') AS reconciled,
       (SELECT count(*) FROM fencepost.dead_letters) AS dead_letters,
       count(*) FILTER (WHERE state IN ('reserved', 'sent', 'unknown')) AS open
FROM fencepost.effects WHERE operation = $1
"""
_CALLING: Final = """
SELECT count(*) FROM fencepost.effects
WHERE operation = $1 AND state = 'sent' AND deadline_at > clock_timestamp() AND starts_with(holder, $2)
"""


class Counts(NamedTuple):
    """Orders, and the ledger's charges. ``waiting``: orders that have not ended. ``open``: charges not known to be over."""

    orders: int
    waiting: int
    charged: int
    declined: int
    unknown: int
    reconciled: int
    dead_letters: int
    open: int


class PaymentsState:
    """Looks through one connection."""

    def __init__(self, connection: "asyncpg.Connection[Any]") -> None:
        self._connection = connection
        self._one_at_a_time = asyncio.Lock()

    async def counts(self) -> Counts:
        async with self._one_at_a_time:
            row = await self._connection.fetchrow(_COUNTS, CHARGE)
        assert row is not None
        return Counts(**row)

    async def calling(self, consumer: str | None = None) -> int:
        """How many calls are out at this moment, a consumer's or all."""
        async with self._one_at_a_time:
            return int(await self._connection.fetchval(_CALLING, CHARGE, "" if consumer is None else f"{consumer}/"))

    async def ended(self) -> bool:
        """Whether every order has ended and no charge is open."""
        counts = await self.counts()
        return not counts.waiting and not counts.open
