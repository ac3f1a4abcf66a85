"""Makes an outside effect happen once: the ledger's row is the permission to call, and the proof of the call.

The order is the whole point. The reservation commits, then ``sent`` commits, then the call goes out, then its answer
commits. Whoever dies in between leaves a row that says how far it came: before ``sent`` nothing has left, after it nobody
repeats the call until a reconciler or a person has said what became of it.
"""

import asyncio
import hmac
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from consumer_sdk.calling import CallEnded, called_within
from consumer_sdk.classification import classify, proven
from consumer_sdk.effect_store import EffectStore
from consumer_sdk.effects import (
    Absent,
    Answer,
    Applied,
    Call,
    CallLimits,
    Effect,
    EffectKey,
    Known,
    Reconciler,
    RunFence,
    Taken,
    provider_key,
)
from consumer_sdk.encoding import MAX_OUTPUT_BYTES, encoded
from fencepost.canonical_json import canonical_json
from fencepost.clock import lease_clock
from fencepost.codec import PLAIN, DataKeyCodec, PayloadCodec, lineage_codec
from fencepost.errors import (
    ConfigurationError,
    EffectFailed,
    EffectMismatch,
    EffectUnknown,
    InvalidInput,
    InvariantViolated,
    LeaseLost,
    RunErased,
    TransientError,
)
from fencepost.secrets import Secrets, joined

__all__ = ["Ledger", "LedgerUnusable", "ledger_secrets"]

_DOMAIN: Final = b"fencepost effect request"
#: How long a reservation is another's before it counts as left behind: the time between two statements, amply.
_HOLD_SECONDS: Final = 10.0
#: How long after a call's own end others leave its record alone: the time of one statement, amply. A later record is refused where
#: another has taken it over.
_MARGIN_SECONDS: Final = 5.0
_LEAST_PAUSE_SECONDS: Final = 0.05
_MOST_PAUSE_SECONDS: Final = 1.0
_MOST_REFERENCE_CHARACTERS: Final = 200
_NOBODY_TO_ASK: Final = "nobody knows whether the effect happened, and no reconciler is registered; `fencepost effects list`"
_STATE_OF: Final = {"terminal": "failed", "retryable": "absent", "ambiguous": "unknown"}


class LedgerUnusable(ConfigurationError):
    """This process cannot use the ledger. No work is at fault, and all that follows would fare alike: the process ends."""


def ledger_secrets(given: Secrets | None) -> Secrets:
    """What effects are bound with: the secrets that were given, or the environment's. Raises ``LedgerUnusable``."""
    if given is not None:
        return given
    try:
        return Secrets.from_environment()
    except ConfigurationError as error:
        raise LedgerUnusable(str(error)) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """What a handler asks for. ``canonical``: its request, in the form that fingerprints are made of."""

    key: EffectKey
    fence: RunFence
    canonical: bytes
    call: Call
    limits: CallLimits
    reconciler: Reconciler | None
    codec: PayloadCodec


class _Patience:
    """Looks again soon at first, then every second, and not for ever."""

    def __init__(self, seconds: float) -> None:
        self._ends_at = lease_clock() + seconds
        self._pause = _LEAST_PAUSE_SECONDS

    async def wait(self, seconds: float) -> None:
        if lease_clock() >= self._ends_at:
            raise EffectUnknown("the effect stayed in other hands for too long")
        await asyncio.sleep(max(min(self._pause, seconds), _LEAST_PAUSE_SECONDS))
        self._pause = min(2 * self._pause, _MOST_PAUSE_SECONDS)


class Ledger:
    """``secrets`` bind an effect to its request: fingerprints are HMACs, as those of idempotency keys are. ``count`` is told how
    each request for an effect ends."""

    def __init__(
        self,
        store: EffectStore,
        secrets: Secrets,
        *,
        codec: PayloadCodec = PLAIN,
        count: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._secrets = secrets
        self._codec = codec
        self._count = count

    async def once(
        self,
        key: EffectKey,
        fence: RunFence,
        *,
        request: object,
        call: Call,
        limits: CallLimits,
        reconciler: Reconciler | None,
        codec: PayloadCodec | None = None,
    ) -> object:
        """The effect's result: of this call, or the recorded one of an earlier. ``codec``: what it is stored through; None for
        the ledger's, or that of the lineage which the effect's run is of.

        Raises ``EffectFailed`` for a refusal, now or recorded, ``EffectUnknown`` while its answer is not known, ``EffectMismatch``
        if it is recorded for another request, ``LeaseLost`` if the run is no longer held, ``RunErased`` if a message is about a run
        that was erased; what the call raised, if it surely did nothing.
        """
        wanted = _Wanted(
            key=key.checked(),
            fence=fence,
            canonical=_canonical(request),
            call=call,
            limits=limits,
            reconciler=reconciler,
            codec=codec or await self._codec_of(key),
        )
        try:
            return await self._once(wanted)
        except EffectUnknown:
            self._count("unknown")
            raise
        except EffectMismatch:
            self._count("mismatch")
            raise

    async def _codec_of(self, key: EffectKey) -> PayloadCodec:
        """What is stored of a message that names a run belongs to the run's lineage, and goes with it."""
        if not isinstance(self._codec, DataKeyCodec):
            return self._codec
        _, data_key = await self._lineage(key)
        return lineage_codec(self._codec, data_key)

    async def _lineage(self, key: EffectKey) -> tuple[bool, bytes | None]:
        """Whether the lineage of the effect's run was erased, and its data key. An event's own key names no run."""
        try:
            run_id = UUID(key.run_key)
        except ValueError:
            return False, None
        return await self._store.data_key(run_id, key.tenant_id)

    async def _once(self, wanted: _Wanted) -> object:
        version = self._secrets.write[0]
        patience = _Patience(_HOLD_SECONDS + wanted.limits.timeout_seconds + 2 * _MARGIN_SECONDS)
        while True:
            taken = await self._reserved(wanted, version)
            if taken is not None:
                return await self._called(wanted, taken)
            known = await self._known(wanted)
            if known is None:
                raise await self._refusal(wanted)
            self._require_same_request(wanted, known)
            if known.state in {"succeeded", "applied", "failed", "disputed"}:
                return self._recorded_answer(wanted, known)
            if not known.held:
                raise await self._refusal(wanted)
            if known.fingerprint_version == version:
                await self._come_back(wanted, known, patience)
            version = known.fingerprint_version  # a row of before the secret was replaced is had under the secret it has

    async def _refusal(self, wanted: _Wanted) -> Exception:
        """Why an effect is not to be had by whoever asks."""
        if wanted.fence.run_id is None and (await self._lineage(wanted.key))[0]:
            return RunErased("the run that the message is about was erased; nothing new is done for it")
        return LeaseLost("the run is no longer held; the effect was left as it is")

    async def _reserved(self, wanted: _Wanted, version: int) -> Taken | None:
        return await self._store.reserve(
            wanted.key,
            wanted.fence,
            hold_seconds=_HOLD_SECONDS,
            fingerprint=self._fingerprint(version, wanted),
            version=version,
            provider_key=provider_key(wanted.key),
            limits=wanted.limits,
        )

    async def _known(self, wanted: _Wanted) -> Known | None:
        return await self._store.read(wanted.key, wanted.fence, margin_seconds=_MARGIN_SECONDS, limits=wanted.limits)

    def _recorded_answer(self, wanted: _Wanted, known: Known) -> object:
        self._count("replayed")
        if known.state in {"failed", "disputed"}:
            raise EffectFailed(known.error_code or known.state)
        if known.result is None:
            return None
        return json.loads(known.result if known.result_is_plain else wanted.codec.decode(known.result))

    async def _come_back(self, wanted: _Wanted, known: Known, patience: _Patience) -> None:
        """Return when it makes sense to look again; otherwise raise ``EffectUnknown``."""
        if known.state == "unknown" or known.lapsed:
            await self._reconciled(wanted, known, patience)
        elif known.forgotten:
            raise EffectUnknown("the effect did not happen, and the provider's key is too old to send it again; a person decides")
        else:
            await patience.wait(known.wait_seconds)

    async def _called(self, wanted: _Wanted, taken: Taken) -> object:
        began = lease_clock()  # before the statement: the call must not outlive the deadline that the row says
        if not await self._store.send(wanted.key, wanted.fence, generation=taken.generation, limits=wanted.limits):
            raise LeaseLost("the run or the effect was taken over before the call; nothing was sent")
        left = began + wanted.limits.timeout_seconds - lease_clock()
        if left <= 0:
            await self._finish(wanted, Answer(taken.generation, "absent"))
            self._count("absent")
            raise TransientError("the process stood still for longer than the call may take; nothing was sent")
        effect = Effect(
            key=taken.provider_key, fencing_token=taken.generation, operation=wanted.key.operation, sends=taken.sends + 1
        )
        ended = await called_within(left, wanted.key.operation, wanted.call, effect)
        try:
            return await self._recorded(wanted, taken, ended)
        except Exception as error:
            if ended.interrupted is None or isinstance(error, InvariantViolated):
                raise
            raise ended.interrupted from error

    async def _recorded(self, wanted: _Wanted, taken: Taken, ended: CallEnded) -> object:
        """The call's result, or what it failed of; a cancellation meanwhile, when what the call came to has been recorded."""
        result: object = None
        if ended.error is None:
            result = await self._record_success(wanted, taken, ended.result)
        else:
            await self._record_failure(wanted, taken, ended.error)
        if error := ended.interrupted or ended.error:
            raise error
        return result

    async def _record_success(self, wanted: _Wanted, taken: Taken, result: object) -> object:
        """A result that JSON cannot hold does not undo the effect: it is recorded without one, and then told."""
        applied = result if isinstance(result, Applied) else Applied(result)
        reference, refused, payload = _reference(applied), None, None
        try:
            payload = encoded("result", applied.result, most=MAX_OUTPUT_BYTES)
        except InvalidInput as error:
            refused = error
        await self._finish(wanted, Answer(taken.generation, "succeeded", _stored(wanted, payload), reference))
        self._count("succeeded")
        if refused is not None:
            raise refused
        return None if payload is None else json.loads(payload)

    async def _record_failure(self, wanted: _Wanted, taken: Taken, error: Exception) -> None:
        """Record what the failed call proves; raises what it means, unless that is the failure itself."""
        failure, state = classify(error), _STATE_OF[proven(error)]
        if state == "failed":
            told = Answer(taken.generation, state, error_class=failure.error_class, error_code=failure.code)
            await self._finish(wanted, told)
            self._count("failed")
            raise EffectFailed(failure.code) from error
        await self._finish(wanted, Answer(taken.generation, state))
        if state == "unknown":
            raise EffectUnknown(f"the call ended without an answer: {failure.code}") from error
        self._count("absent")

    async def _finish(self, wanted: _Wanted, answer: Answer) -> None:
        """Record the answer. It is known only here, so a database that is away for a moment does not lose it."""
        until, unanswered = lease_clock() + _MARGIN_SECONDS, False
        while True:
            try:
                async with asyncio.timeout(_MARGIN_SECONDS):  # a connection may be silent where a new one would not be
                    if await self._store.finish(wanted.key, wanted.fence, answer):
                        return
                    if unanswered and await self._is_finished(wanted, answer):
                        return
                raise LeaseLost("the run or the effect is no longer held; its answer was not recorded")
            except (TransientError, TimeoutError) as error:
                if unanswered and lease_clock() >= until:
                    raise TransientError(f"the effect's answer was not recorded: {type(error).__name__}") from error
                unanswered = True
            await asyncio.sleep(_LEAST_PAUSE_SECONDS)

    async def _is_finished(self, wanted: _Wanted, answer: Answer) -> bool:
        """Whether the write that was thought lost has been done."""
        known = await self._known(wanted)
        return known is not None and (known.generation, known.state) == (answer.generation, answer.state)

    async def _reconciled(self, wanted: _Wanted, known: Known, patience: _Patience) -> None:
        """Ask the provider what became of the effect, and record the answer."""
        if wanted.reconciler is None and known.state == "unknown":
            raise EffectUnknown(_NOBODY_TO_ASK)
        asked = await self._store.question(wanted.key, wanted.fence, generation=known.generation, margin_seconds=_MARGIN_SECONDS)
        if asked is None:
            await patience.wait(0)  # somebody else asks, or has an answer, or the run: look again
            return
        if wanted.reconciler is None:
            raise EffectUnknown(_NOBODY_TO_ASK)
        generation, asked_at = asked
        answer = await _asked(wanted.reconciler, _questioned(wanted, known, generation), wanted.limits)
        if await self._reconcile(wanted, generation, answer, asked_at):
            self._count("reconciled")
        elif isinstance(answer, Absent) and known.proof_seconds:
            left = str(math.ceil(known.proof_seconds))
            raise EffectUnknown("the provider has not seen the effect, which may still be on its way", retry_after=left)
        else:
            await patience.wait(0)

    async def _reconcile(self, wanted: _Wanted, generation: int, answer: Applied | Absent, asked_at: datetime) -> bool:
        applied = answer if isinstance(answer, Applied) else None
        return await self._store.reconcile(
            wanted.key,
            wanted.fence,
            generation=generation,
            state="applied" if applied else "absent",
            result=_stored(wanted, encoded("result", applied.result, most=MAX_OUTPUT_BYTES)) if applied else None,
            reference=_reference(applied) if applied else None,
            asked_at=asked_at,
            limits=wanted.limits,
        )

    def _fingerprint(self, version: int, wanted: _Wanted) -> bytes:
        return self._secrets.digest(version, joined(_DOMAIN, wanted.key.operation.encode(), wanted.canonical))

    def _require_same_request(self, wanted: _Wanted, known: Known) -> None:
        if not hmac.compare_digest(known.fingerprint, self._fingerprint(known.fingerprint_version, wanted)):
            raise EffectMismatch("the effect is recorded for another request; the handler or its input changed under the run")


def _stored(wanted: _Wanted, payload: bytes | None) -> bytes | None:
    return None if payload is None else wanted.codec.encode(payload)


def _questioned(wanted: _Wanted, known: Known, generation: int) -> Effect:
    return Effect(
        key=known.provider_key,
        fencing_token=generation,
        operation=wanted.key.operation,
        sends=known.sends,
        sent_at=known.sent_at,
        provider_reference=known.provider_reference,
    )


async def _asked(reconciler: Reconciler, effect: Effect, limits: CallLimits) -> Applied | Absent:
    """The provider's word. Whatever goes wrong in asking has no effect, and leaves the answer unknown."""
    try:
        ended = await called_within(limits.timeout_seconds, f"reconciler of {effect.operation}", reconciler, effect)
        answer = ended.answer()
    except Exception as error:
        raise EffectUnknown(f"the reconciler failed: {classify(error).code}") from error
    if answer is None:
        raise EffectUnknown("the provider cannot say yet whether the effect happened")
    if not isinstance(answer, Applied | Absent):
        raise EffectUnknown("the reconciler must return Applied(...), Absent() or None; what it returned proves nothing")
    return answer


def _reference(applied: Applied) -> str | None:
    """The provider's reference as the table holds it: an odd one must not cost the record of the effect."""
    if applied.reference is None:
        return None
    return str(applied.reference).encode(errors="replace").decode().replace("\0", "?")[:_MOST_REFERENCE_CHARACTERS]


def _canonical(request: object) -> bytes:
    dump = getattr(request, "model_dump", None)
    return canonical_json(request if dump is None else dump(mode="python"))
