"""The database adapter of the ledger: one method a statement, on any connection or pool that can fetch."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from consumer_sdk.effects import EffectKey, Known, RunFence
from fencepost.statements import load_statements

__all__ = ["EFFECT_STATEMENTS", "EffectStore"]

EFFECT_STATEMENTS: Final = load_statements("consumer_sdk", "effects.sql")

Fetch = Callable[..., Awaitable[Sequence[Any]]]


class EffectStore:
    """``fetch`` runs a named statement of ``EFFECT_STATEMENTS``; ``holder`` is who the rows are held by."""

    def __init__(self, fetch: Fetch, holder: str) -> None:
        self._fetch = fetch
        self._holder = holder

    async def reserve(
        self,
        key: EffectKey,
        fence: RunFence,
        *,
        hold_seconds: float,
        fingerprint: bytes,
        version: int,
        provider_key: str,
        key_retention_seconds: float | None,
    ) -> tuple[int, int] | None:
        """(generation, earlier sends) of an effect that may be called; None if it is not to be had."""
        rows = await self._fetch(
            "reserve_effect",
            *key,
            *fence,
            self._holder,
            timedelta(seconds=hold_seconds),
            fingerprint,
            version,
            provider_key,
            None if key_retention_seconds is None else timedelta(seconds=key_retention_seconds),
        )
        return (rows[0]["generation"], rows[0]["sends"]) if rows else None

    async def read(self, key: EffectKey, *, margin_seconds: float) -> Known | None:
        """What is known of an effect; None if nobody has reserved it."""
        rows = await self._fetch("read_effect", *key, timedelta(seconds=margin_seconds))
        return _known(rows[0]) if rows else None

    async def send(self, key: EffectKey, fence: RunFence, *, generation: int, timeout_seconds: float) -> bool:
        """Right before the call. False: somebody else has the effect, or the run, by now."""
        return bool(await self._fetch("send_effect", *key, *fence, generation, timedelta(seconds=timeout_seconds)))

    async def finish(
        self,
        key: EffectKey,
        fence: RunFence,
        *,
        generation: int,
        state: str,
        result: bytes | None = None,
        reference: str | None = None,
        error_class: str | None = None,
        error_code: str | None = None,
    ) -> bool:
        """How the call ended. False: the record is no longer this generation's to write."""
        return bool(await self._fetch("finish_effect", *key, *fence, generation, state, result, reference, error_class, error_code))

    async def question(self, key: EffectKey, *, generation: int, margin_seconds: float) -> tuple[int, datetime] | None:
        """Take over an effect whose answer is not known: (generation, the database's time now); None if another did."""
        rows = await self._fetch("question_effect", *key, generation, timedelta(seconds=margin_seconds), self._holder)
        return (rows[0]["generation"], rows[0]["asked_at"]) if rows else None

    async def reconcile(
        self,
        key: EffectKey,
        *,
        generation: int,
        state: str,
        result: bytes | None,
        reference: str | None,
        asked_at: datetime,
        in_flight_seconds: float,
    ) -> bool:
        """Record what the provider said. False: another took over, or absence was seen too early to count."""
        in_flight = timedelta(seconds=in_flight_seconds)
        return bool(await self._fetch("reconcile_effect", *key, generation, state, result, reference, asked_at, in_flight))


def _known(row: Any) -> Known:
    return Known(
        state=row["state"],
        generation=row["generation"],
        fingerprint=row["fingerprint"],
        fingerprint_version=row["fingerprint_version"],
        provider_key=row["provider_key"],
        provider_reference=row["provider_reference"],
        result=row["result"],
        error_code=row["error_code"],
        sends=row["sends"],
        sent_at=row["sent_at"],
        lapsed=row["lapsed"],
        wait_seconds=row["wait_seconds"],
    )
