"""Dead letters in any number, as consumers leave them, without a consumer."""

import itertools
import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

import asyncpg

from consumer_sdk.inspection import smallest_id

__all__ = ["INDEXES", "bury", "states"]

#: What lists of many letters and their audit rows are read by.
INDEXES: Final = (
    "CREATE INDEX IF NOT EXISTS dead_letters_waiting_idx ON fencepost.dead_letters (dead_letter_id)"
    " WHERE state IN ('dead', 'redriving')",
    "CREATE INDEX IF NOT EXISTS audit_dead_letter_idx ON fencepost.audit ((detail ->> 'dead_letter_id'))"
    " WHERE detail ? 'dead_letter_id'",
)
_DEFAULTS: Final[dict[str, Any]] = {
    "tenant_id": "", "step": "payments/charge", "consumer": "payments", "topic": "orders", "partition": 0,
    "event_type": "order.placed", "key": b"o-1", "payload": b"{}", "header_names": [b"ce_id"], "header_values": [b"e-1"],
    "reason": "rejected", "error_class": "consumer_sdk.classification.Terminal", "error_code": "declined", "attempts": 1,
    "state": "dead",
}  # fmt: skip
_numbers: Final = itertools.count()


async def bury(
    connection: "asyncpg.Connection[Any]", number: int = 1, *, ago: timedelta = timedelta(0), **columns: Any
) -> list[UUID]:
    """Letters given up so long ago, by the database's clock; their ids, which rise."""
    at: datetime = await connection.fetchval("SELECT clock_timestamp()") - ago
    rows = [_row(at, columns) for _ in range(number)]
    names = list(rows[0])
    await connection.copy_records_to_table(
        "dead_letters", schema_name="fencepost", columns=names, records=[tuple(row.values()) for row in rows]
    )
    return [row["dead_letter_id"] for row in rows]


def _row(at: datetime, columns: dict[str, Any]) -> dict[str, Any]:
    offset = next(_numbers)
    identity = {"dead_letter_id": UUID(int=smallest_id(at).int + offset), "run_key": str(uuid.uuid4()), "offset": offset}
    return {**_DEFAULTS, **identity, "recorded_at": at, "created_at": at, "changed_at": at, **columns}


async def states(connection: "asyncpg.Connection[Any]", ids: Sequence[UUID] = ()) -> dict[str, int]:
    """How many letters are in each state: of these, or of all."""
    rows = await connection.fetch(
        "SELECT state, count(*)::integer AS letters FROM fencepost.dead_letters"
        " WHERE $1::uuid[] = '{}' OR dead_letter_id = ANY ($1) GROUP BY state",
        list(ids),
    )
    return {row["state"]: row["letters"] for row in rows}
