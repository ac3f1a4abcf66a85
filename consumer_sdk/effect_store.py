"""The database adapter of the ledger: one method a statement, on any connection or pool that can fetch."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from consumer_sdk.effects import Answer, CallLimits, EffectKey, Known, RunFence, Taken
from fencepost.statements import load_statements

__all__ = ["EFFECT_STATEMENTS", "EffectStore"]

EFFECT_STATEMENTS: Final = load_statements("consumer_sdk", "effects.sql")

Fetch = Callable[..., Awaitable[Sequence[Any]]]


class EffectStore:
    """``fetch`` runs a named statement of ``EFFECT_STATEMENTS``; ``holder`` is who the rows are held by."""

    def __init__(self, fetch: Fetch, holder: str) -> None:
        self._fetch = fetch
        self._holder = holder

    async def data_key(self, run_id: UUID, tenant_id: str) -> tuple[bool, bytes | None]:
        """Whether a run's lineage was erased, and its data key, wrapped; None if it has none, or there is no such run."""
        row = (await self._fetch("read_data_key", tenant_id, run_id))[0]
        return row["outcome"] == "erased", row["wrapped"]

    async def reserve(
        self,
        key: EffectKey,
        fence: RunFence,
        *,
        hold_seconds: float,
        fingerprint: bytes,
        version: int,
        provider_key: str,
        limits: CallLimits,
    ) -> Taken | None:
        """An effect that may be called; None if it is not to be had."""
        hold, window = timedelta(seconds=hold_seconds), _interval(limits.resend_seconds)
        rows = await self._fetch(
            "reserve_effect", *key, *fence, self._holder, hold, fingerprint, version, provider_key, window
        )  # fmt: skip
        return Taken(rows[0]["generation"], rows[0]["provider_key"], rows[0]["sends"]) if rows else None

    async def read(self, key: EffectKey, fence: RunFence, *, margin_seconds: float, limits: CallLimits) -> Known | None:
        """What is known of an effect; None if nobody has reserved it."""
        margin, in_flight = timedelta(seconds=margin_seconds), timedelta(seconds=limits.in_flight_seconds)
        rows = await self._fetch("read_effect", *key, *fence, margin, in_flight, _interval(limits.resend_seconds))
        return Known(**dict(rows[0])) if rows else None

    async def send(self, key: EffectKey, fence: RunFence, *, generation: int, limits: CallLimits) -> bool:
        """Right before the call. False: somebody else has the effect, or the run, by now."""
        return bool(await self._fetch("send_effect", *key, *fence, generation, timedelta(seconds=limits.timeout_seconds)))

    async def finish(self, key: EffectKey, fence: RunFence, answer: Answer) -> bool:
        """How the call ended. False: the record is no longer this generation's to write."""
        return bool(await self._fetch("finish_effect", *key, *fence, *answer))

    async def question(
        self, key: EffectKey, fence: RunFence, *, generation: int, margin_seconds: float
    ) -> tuple[int, datetime] | None:
        """Take over an effect whose answer is not known: (generation, the database's time now); None if another did."""
        rows = await self._fetch("question_effect", *key, *fence, generation, timedelta(seconds=margin_seconds), self._holder)
        return (rows[0]["generation"], rows[0]["asked_at"]) if rows else None

    async def reconcile(
        self,
        key: EffectKey,
        fence: RunFence,
        *,
        generation: int,
        state: str,
        result: bytes | None,
        reference: str | None,
        asked_at: datetime,
        limits: CallLimits,
    ) -> bool:
        """Record what the provider said. False: another took over, or absence was seen too early to count."""
        in_flight = timedelta(seconds=limits.in_flight_seconds)
        return bool(await self._fetch("reconcile_effect", *key, *fence, generation, state, result, reference, asked_at, in_flight))


def _interval(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)
