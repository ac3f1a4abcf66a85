"""A row of the ledger in memory: the columns and the checks of the table ``fencepost.effects``."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

__all__ = ["EffectRow"]

_ENDED: Final = frozenset({"succeeded", "failed", "applied", "disputed"})
_STATES: Final = frozenset({"reserved", "sent", "unknown", "absent"}) | _ENDED
_MOST_RESULT_BYTES: Final = 1_000_000
_MOST_REFERENCE_BYTES: Final = 1_000
_FINGERPRINT_BYTES: Final = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class EffectRow:
    """What is known of an effect. Raises ``ValueError`` for a row that the table would refuse."""

    state: str
    holder: str
    created_at: datetime
    generation: int = 1
    run_id: UUID | None = None
    run_generation: int | None = None
    held_until: datetime | None = None
    fingerprint: bytes | None = None
    fingerprint_version: int | None = None
    provider_key: str | None = None
    provider_reference: str | None = None
    result: bytes | None = None
    result_is_plain: bool | None = None
    error_class: str | None = None
    error_code: str | None = None
    sends: int = 0
    first_sent_at: datetime | None = None
    sent_at: datetime | None = None
    deadline_at: datetime | None = None
    finished_at: datetime | None = None

    def __post_init__(self) -> None:
        broken = [rule for rule, kept in self._rules().items() if not kept]
        if broken:
            raise ValueError(f"a row that the ledger cannot hold: {', '.join(broken)}")

    def _rules(self) -> Mapping[str, bool]:
        bound = self.fingerprint is not None  # a message's own row is bound to no request
        return {
            "state": self.state in _STATES,
            "held_until": (self.held_until is not None) == (self.state == "reserved"),
            "finished_at": (self.finished_at is not None) == (self.state in _ENDED),
            "result": self.result is None or self.state in {"succeeded", "applied"},
            "length of result": len(self.result or b"") <= _MOST_RESULT_BYTES,
            "error_code": (self.error_code is not None) == (self.state == "failed"),
            "deadline_at": self.deadline_at is not None or self.state in {"reserved", "succeeded"} or not bound,
            "run_id": (self.run_id is None) == (self.run_generation is None),
            "generation": self.generation > 0,
            "sends": self.sends >= 0,
            "fingerprint": not bound or len(self.fingerprint or b"") == _FINGERPRINT_BYTES,
            "fingerprint_version": bound == (self.fingerprint_version is not None),
            "provider_key": bound == (self.provider_key is not None),
            "length of provider_reference": len((self.provider_reference or "").encode()) <= _MOST_REFERENCE_BYTES,
        }
