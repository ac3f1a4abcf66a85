"""Makes an outside effect happen once: the ledger's row is the permission to call, and the proof of the call.

The order is the whole point. The reservation commits, then ``sent`` commits, then the call goes out, then its answer
commits. Whoever dies in between leaves a row that says how far it came: before ``sent`` nothing has left, after it nobody
repeats the call until a reconciler or a person has said what became of it.
"""

import asyncio
import hmac
import json
from datetime import datetime
from typing import Final

from consumer_sdk.classification import Failure, classify, proven
from consumer_sdk.effect_store import EffectStore
from consumer_sdk.effects import Absent, Applied, Call, CallLimits, Effect, EffectKey, Known, Reconciler, RunFence, provider_key
from consumer_sdk.encoding import MAX_OUTPUT_BYTES, encoded
from fencepost.canonical_json import canonical_json
from fencepost.errors import EffectFailed, EffectMismatch, EffectUnknown, InvalidInput, LeaseLost
from fencepost.secrets import Secrets, joined

__all__ = ["Ledger"]

_DOMAIN: Final = b"fencepost effect request"
#: How long a reservation is another's before it counts as left behind: the time between two statements, amply.
_HOLD_SECONDS: Final = 10.0
#: How long after a call's own end the ledger waits for its answer: the time of one statement, amply.
_MARGIN_SECONDS: Final = 5.0
_MOST_ROUNDS: Final = 20
_LEAST_WAIT_SECONDS: Final = 0.05
_STATE_OF: Final = {"terminal": "failed", "retryable": "absent", "ambiguous": "unknown"}


class Ledger:
    """``secrets`` bind an effect to its request: fingerprints are HMACs, as those of idempotency keys are."""

    def __init__(self, store: EffectStore, secrets: Secrets) -> None:
        self._store = store
        self._secrets = secrets

    async def once(
        self, key: EffectKey, fence: RunFence, *, request: object, call: Call, limits: CallLimits, reconciler: Reconciler | None
    ) -> object:
        """The effect's result: of this call, or the recorded one of an earlier.

        Raises ``EffectFailed`` for a recorded refusal, ``EffectUnknown`` while its answer is not known, ``EffectMismatch`` if it is
        recorded for another request, ``LeaseLost`` if the run is no longer held; what the call raised, if it surely did nothing.
        """
        key = key.checked()
        canonical = _canonical(request)
        version = self._secrets.write[0]
        for _ in range(_MOST_ROUNDS):
            taken = await self._store.reserve(
                key,
                fence,
                hold_seconds=_HOLD_SECONDS,
                fingerprint=self._fingerprint(version, key, canonical),
                version=version,
                provider_key=provider_key(key),
                key_retention_seconds=limits.key_retention_seconds,
            )
            if taken is not None:
                return await self._called(key, fence, call, limits, generation=taken[0], sends=taken[1] + 1)
            known = await self._store.read(key, margin_seconds=_MARGIN_SECONDS)
            if known is None:
                raise LeaseLost("the run is no longer held; the effect was not reserved")
            self._require_same_request(known, key, canonical)
            if known.state in {"succeeded", "applied"}:
                return None if known.result is None else json.loads(known.result)
            if known.state in {"failed", "disputed"}:
                raise EffectFailed(known.error_code or known.state)
            version = known.fingerprint_version
            await self._resolved_or_waited(key, known, limits, reconciler)
        raise EffectUnknown("the effect stayed in other hands for too long")

    async def _resolved_or_waited(self, key: EffectKey, known: Known, limits: CallLimits, reconciler: Reconciler | None) -> None:
        """Come back when it makes sense to look again; otherwise raise ``EffectUnknown``."""
        if known.state == "unknown" or known.lapsed:
            await self._reconciled(key, known, limits, reconciler)
        elif known.state == "absent":
            raise EffectUnknown("the effect did not happen, and the provider's key is too old to send it again; a person decides")
        else:
            await asyncio.sleep(max(known.wait_seconds, _LEAST_WAIT_SECONDS))

    async def _called(
        self, key: EffectKey, fence: RunFence, call: Call, limits: CallLimits, *, generation: int, sends: int
    ) -> object:
        effect = Effect(key=provider_key(key), fencing_token=generation, operation=key.operation, sends=sends)
        if not await self._store.send(key, fence, generation=generation, timeout_seconds=limits.timeout_seconds):
            raise LeaseLost("the effect was taken over before it was sent")
        try:
            async with asyncio.timeout(limits.timeout_seconds):
                result = await call(effect)
        except Exception as error:
            await self._refused(key, fence, generation, error)
            raise  # pragma: no cover - _refused always raises
        # A result that JSON cannot hold does not undo the effect: it is recorded without one, and then told.
        try:
            payload: bytes | None = encoded("result", result, most=MAX_OUTPUT_BYTES)
        except InvalidInput:
            await self._finished(key, fence, generation, "succeeded")
            raise
        await self._finished(key, fence, generation, "succeeded", result=payload)
        return None if payload is None else json.loads(payload)

    async def _refused(self, key: EffectKey, fence: RunFence, generation: int, error: Exception) -> None:
        failure = classify(error)
        state = _STATE_OF[proven(error)]
        await self._finished(key, fence, generation, state, failure=failure)
        if state == "failed":
            raise EffectFailed(failure.code) from error
        if state == "unknown":
            raise EffectUnknown(f"the call ended without an answer: {failure.code}") from error
        raise error

    async def _finished(
        self,
        key: EffectKey,
        fence: RunFence,
        generation: int,
        state: str,
        *,
        result: bytes | None = None,
        failure: Failure | None = None,
    ) -> None:
        written = await self._store.finish(
            key,
            fence,
            generation=generation,
            state=state,
            result=result,
            error_class=failure.error_class if failure and state == "failed" else None,
            error_code=failure.code if failure and state == "failed" else None,
        )
        if not written:
            raise LeaseLost("the run or the effect is no longer held; its answer was not recorded")

    async def _reconciled(self, key: EffectKey, known: Known, limits: CallLimits, reconciler: Reconciler | None) -> None:
        """Ask the provider what became of the effect, and record the answer."""
        asked = await self._store.question(key, generation=known.generation, margin_seconds=_MARGIN_SECONDS)
        if asked is None:
            return  # somebody else asks, or has an answer: look again
        generation, asked_at = asked
        if reconciler is None:
            raise EffectUnknown(
                "nobody knows whether the effect happened, and no reconciler is registered; `fencepost effects list`"
            )
        effect = Effect(
            key=known.provider_key,
            fencing_token=generation,
            operation=key.operation,
            sends=known.sends,
            sent_at=known.sent_at,
            provider_reference=known.provider_reference,
        )
        async with asyncio.timeout(limits.timeout_seconds):
            answer = await reconciler(effect)
        if answer is None or not await self._recorded(key, generation, answer, asked_at, limits):
            raise EffectUnknown("the provider cannot say yet whether the effect happened")

    async def _recorded(
        self, key: EffectKey, generation: int, answer: Applied | Absent, asked_at: datetime, limits: CallLimits
    ) -> bool:
        applied = isinstance(answer, Applied)
        return await self._store.reconcile(
            key,
            generation=generation,
            state="applied" if applied else "absent",
            result=encoded("result", answer.result, most=MAX_OUTPUT_BYTES) if isinstance(answer, Applied) else None,
            reference=answer.reference if isinstance(answer, Applied) else None,
            asked_at=asked_at,
            in_flight_seconds=limits.in_flight_seconds,
        )

    def _fingerprint(self, version: int, key: EffectKey, canonical: bytes) -> bytes:
        return self._secrets.digest(version, joined(_DOMAIN, key.operation.encode(), canonical))

    def _require_same_request(self, known: Known, key: EffectKey, canonical: bytes) -> None:
        if not hmac.compare_digest(known.fingerprint, self._fingerprint(known.fingerprint_version, key, canonical)):
            raise EffectMismatch("the effect is recorded for another request; the handler or its input changed under the run")


def _canonical(request: object) -> bytes:
    dump = getattr(request, "model_dump", None)
    return canonical_json(request if dump is None else dump(mode="python"))
