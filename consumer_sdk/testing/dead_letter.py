"""A message that was given up, as the table ``fencepost.dead_letters`` keeps it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

__all__ = ["DeadLetter"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetter:
    """``state``: dead, redriving (an operator wants it handled anew), redriven or discarded."""

    dead_letter_id: UUID
    run_key: str
    tenant_id: str
    step: str
    consumer: str
    topic: str
    partition: int
    offset: int
    recorded_at: datetime
    event_type: str | None
    key: bytes | None = field(repr=False)
    payload: bytes | None = field(repr=False)
    header_names: Sequence[bytes] = field(repr=False)
    header_values: Sequence[bytes | None] = field(repr=False)
    reason: str
    error_class: str
    error_code: str
    attempts: int
    created_at: datetime
    state: str = "dead"
    generation: int = 0
    holder: str | None = None
    held_until: datetime | None = None
    redrives: int = 0
