"""The ledger's table in memory: the statements of ``effects.sql``, one method each, with the same parameters in the same order.

It stands where a ``StatementPool`` stands: whatever runs named statements by ``fetch`` runs on it. Each statement is atomic, as
one is in the database, and other tasks run before it, as they would while it travels there. Time is the test's.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from consumer_sdk.effects import EffectKey, RunFence
from consumer_sdk.testing.clock import Clock
from consumer_sdk.testing.effect_row import EffectRow
from consumer_sdk.testing.leases import Leases

__all__ = ["MemoryEffects"]

_ANSWERS: Final = frozenset({"succeeded", "failed", "unknown", "absent"})
_RESOLUTIONS: Final = frozenset({"applied", "absent", "disputed"})
_READ: Final = (
    "state", "generation", "fingerprint", "fingerprint_version", "provider_key", "provider_reference", "result",
    "result_is_plain", "error_code", "sends", "sent_at",
)  # fmt: skip

Answered = Mapping[str, Any]


class MemoryEffects:
    """The table, with the clock and the leases that its statements look at.

    ``clock.advance(seconds)`` lets time pass, ``leases.grant(owner)`` hands out a run's lease, ``row(key)`` shows what is known of
    an effect, and ``resolve`` is what an operator does about it. A message without a run needs no lease.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = Clock() if clock is None else clock
        self.leases = Leases(self.clock)
        self._rows: dict[EffectKey, EffectRow] = {}

    async def fetch(self, name: str, *arguments: Any) -> Sequence[Answered]:
        """The rows that the statement ``name`` answers with."""
        await asyncio.sleep(0)
        if name == "read_data_key":
            return self.read_data_key()
        answer: Answered | None = getattr(self, name)(EffectKey(*arguments[:6]), RunFence(*arguments[6:9]), *arguments[9:])
        return [] if answer is None else [answer]

    def row(self, key: EffectKey) -> EffectRow | None:
        """What is known of an effect; None if nobody has reserved it."""
        return self._rows.get(key)

    def rows(self) -> Mapping[EffectKey, EffectRow]:
        """All that is known, oldest first."""
        return dict(self._rows)

    def keep(self, key: EffectKey, row: EffectRow) -> None:
        """Have a row as it is: what a test begins with."""
        self._rows[key] = row

    def resolve(
        self, key: EffectKey, resolution: str, *, generation: int, result: bytes | None = None, reference: str | None = None
    ) -> str:
        """Close an effect as an operator does: ``resolved``, or ``not_found``, ``changed`` (another generation) or ``not_open``."""
        if resolution not in _RESOLUTIONS or (result is not None and resolution != "applied"):
            raise ValueError("applied, absent or disputed; only what was applied has a result")
        row, absent = self._rows.get(key), resolution == "absent"
        if row is None:
            return "not_found"
        if row.generation != generation:
            return "changed"
        if not self._is_open(row):
            return "not_open"
        # Absent begins anew: how long the provider knows the key counts from the next sending.
        self._rows[key] = replace(
            row, state=resolution, generation=generation + 1, result=result,
            result_is_plain=None if result is None else True, held_until=None,
            first_sent_at=None if absent else row.first_sent_at, provider_reference=_kept(reference, row),
            finished_at=None if absent else self.clock.now(),
        )  # fmt: skip
        return "resolved"

    # The statements. What each may change, and when, is said in effects.sql.

    def read_data_key(self) -> Sequence[Answered]:
        """Data keys are those of runs, and there are none here."""
        return [{"outcome": "not_found", "wrapped": None}]

    def reserve_effect(
        self, key: EffectKey, fence: RunFence, holder: str, hold: timedelta, fingerprint: bytes, version: int, provider_key: str,
        window: timedelta | None,
    ) -> Answered | None:  # fmt: skip
        if not self.leases.is_held(fence, key.tenant_id):
            return None
        now, row = self.clock.now(), self._rows.get(key)
        taken: dict[str, Any] = {"state": "reserved", "holder": holder, "held_until": now + hold, **_under(fence)}
        if row is None:
            bound: dict[str, Any] = _bound(fingerprint, version, provider_key)
            return self._written(key, EffectRow(created_at=now, **taken, **bound))
        if (row.fingerprint, row.fingerprint_version) != (fingerprint, version):
            return None
        if not self._may_be_taken(row, fence) or self._is_too_old(row, window):
            return None
        return self._written(key, replace(row, generation=row.generation + 1, **taken))

    def read_effect(
        self, key: EffectKey, fence: RunFence, margin: timedelta, in_flight: timedelta, window: timedelta | None
    ) -> Answered | None:
        row = self._rows.get(key)
        if row is None:
            return None
        return {column: getattr(row, column) for column in _READ} | {
            "held": self.leases.is_held(fence, key.tenant_id),
            "lapsed": self._is_lapsed(row, margin),
            "forgotten": (row.state == "absent" or self._is_left_behind(row)) and self._is_too_old(row, window),
            "wait_seconds": self._until(row.held_until or _later(row.deadline_at, margin)),
            "proof_seconds": self._until(_later(row.deadline_at, in_flight)),
        }

    def send_effect(self, key: EffectKey, fence: RunFence, generation: int, timeout: timedelta) -> Answered | None:
        row, now = self._mine(key, fence, generation), self.clock.now()
        if row is None or row.state != "reserved" or self._is_left_behind(row):
            return None
        if not self.leases.is_held(fence, key.tenant_id):
            return None  # its cancellation was asked for
        sent: dict[str, Any] = {"state": "sent", "held_until": None, "sends": row.sends + 1, "deadline_at": now + timeout}
        return self._written(key, replace(row, **sent, first_sent_at=row.first_sent_at or now, sent_at=now))

    def finish_effect(
        self, key: EffectKey, fence: RunFence, generation: int, state: str, result: bytes | None, reference: str | None,
        error_class: str | None, error_code: str | None,
    ) -> Answered | None:  # fmt: skip
        row = self._mine(key, fence, generation)
        if row is None or row.state != "sent" or state not in _ANSWERS:
            return None
        finished_at = self.clock.now() if state in {"succeeded", "failed"} else None
        return self._written(
            key,
            replace(
                row, state=state, result=result, provider_reference=_kept(reference, row), error_class=error_class,
                error_code=error_code, finished_at=finished_at,
            ),
        )  # fmt: skip

    def question_effect(self, key: EffectKey, fence: RunFence, generation: int, margin: timedelta, holder: str) -> Answered | None:
        row = self._mine(key, fence, generation)
        if row is None or not (row.state == "unknown" or self._is_lapsed(row, margin)):
            return None
        taken = replace(row, state="unknown", generation=row.generation + 1, holder=holder, **_under(fence))
        return {**self._written(key, taken), "asked_at": self.clock.now()}

    def reconcile_effect(
        self, key: EffectKey, fence: RunFence, generation: int, state: str, result: bytes | None, reference: str | None,
        asked_at: datetime, in_flight: timedelta,
    ) -> Answered | None:  # fmt: skip
        row = self._mine(key, fence, generation)
        if row is None or row.state != "unknown":
            return None
        if not (state == "applied" or (state == "absent" and self._is_proof(row, asked_at, in_flight))):
            return None
        finished_at = self.clock.now() if state == "applied" else None
        return self._written(
            key, replace(row, state=state, result=result, provider_reference=_kept(reference, row), finished_at=finished_at)
        )

    # What the statements ask of a row.

    def _mine(self, key: EffectKey, fence: RunFence, generation: int) -> EffectRow | None:
        """The row, if it is still this generation's and the run behind it is held. A cancellation takes no answer away."""
        row = self._rows.get(key)
        held = self.leases.is_held(fence, key.tenant_id, cancelled_too=True)
        return row if held and row is not None and row.generation == generation else None

    def _may_be_taken(self, row: EffectRow, fence: RunFence) -> bool:
        if row.state == "absent":
            return not _is_older(fence, row)
        if row.state != "reserved" or _is_older(fence, row):
            return False
        return self._is_left_behind(row) or fence.run_id != row.run_id or _is_newer(fence, row)

    def _is_left_behind(self, row: EffectRow) -> bool:
        return row.state == "reserved" and row.held_until is not None and row.held_until <= self.clock.now()

    def _is_lapsed(self, row: EffectRow, margin: timedelta) -> bool:
        return row.state == "sent" and row.deadline_at is not None and row.deadline_at + margin <= self.clock.now()

    def _is_too_old(self, row: EffectRow, window: timedelta | None) -> bool:
        """Whether the provider may have forgotten the key of what was sent."""
        return row.first_sent_at is not None and window is not None and row.first_sent_at + window <= self.clock.now()

    @staticmethod
    def _is_proof(row: EffectRow, asked_at: datetime, in_flight: timedelta) -> bool:
        return row.deadline_at is not None and row.deadline_at + in_flight <= asked_at

    def _is_open(self, row: EffectRow) -> bool:
        lapsed = self._is_lapsed(row, timedelta(0))
        return row.state in {"unknown", "absent"} or lapsed or (row.sends > 0 and self._is_left_behind(row))

    def _until(self, moment: datetime | None) -> float:
        return 0.0 if moment is None else max((moment - self.clock.now()).total_seconds(), 0.0)

    def _written(self, key: EffectKey, row: EffectRow) -> Answered:
        self._rows[key] = row
        return {"generation": row.generation, "provider_key": row.provider_key, "sends": row.sends}


def _under(fence: RunFence) -> dict[str, Any]:
    return {"run_id": fence.run_id, "run_generation": fence.generation}


def _bound(fingerprint: bytes, version: int, provider_key: str) -> dict[str, Any]:
    return {"fingerprint": fingerprint, "fingerprint_version": version, "provider_key": provider_key}


def _is_older(fence: RunFence, row: EffectRow) -> bool:
    """Whether the row was taken under a later lease of the same run."""
    return fence.run_id == row.run_id and (fence.generation or 0) < (row.run_generation or 0)


def _is_newer(fence: RunFence, row: EffectRow) -> bool:
    return fence.run_id == row.run_id and (fence.generation or 0) > (row.run_generation or 0)


def _kept(reference: str | None, row: EffectRow) -> str | None:
    return row.provider_reference if reference is None else reference


def _later(moment: datetime | None, by: timedelta) -> datetime | None:
    return None if moment is None else moment + by
