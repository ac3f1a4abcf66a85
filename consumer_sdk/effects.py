"""The words of the ledger: whose effect it is, what a call gets to see of it, and what a reconciler may answer."""

import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple
from uuid import UUID

from fencepost.errors import ConfigurationError, InvalidInput
from fencepost.secrets import joined

__all__ = [
    "Absent", "Answer", "Applied", "Call", "CallLimits", "Effect", "EffectKey", "Known", "Reconciler", "RunFence", "Taken",
    "provider_key",
]  # fmt: skip

_MOST_BYTES: Final = 256
# A message's step holds the names of its consumer and handler, and what the producer says of its own.
_MOST_STEP_BYTES: Final = 1_000
_MOST_OCCURRENCE: Final = 2**31 - 1
_TEXT: Final = re.compile("[^\0\ud800-\udfff]+")
_KEY_CHARACTERS: Final = 40
_MOST_SECONDS: Final = 86_400.0
_MOST_RETENTION_SECONDS: Final = 3_660 * 86_400.0


class EffectKey(NamedTuple):
    """The identity of an effect: run (or event), iteration, step, occurrence and operation, within a tenant."""

    run_key: str
    tenant_id: str
    iteration: int
    step: str
    occurrence: int
    operation: str

    def checked(self) -> "EffectKey":
        """Itself. Raises ``InvalidInput`` for a part that the table cannot hold."""
        for name in ("run_key", "step", "operation"):
            text = getattr(self, name)
            most = _MOST_STEP_BYTES if name == "step" else _MOST_BYTES
            if not isinstance(text, str) or not _TEXT.fullmatch(text) or len(text.encode()) > most:
                raise InvalidInput(name, f"must be text of 1 to {most} bytes without U+0000", "use a short, stable name")
        if type(self.occurrence) is not int or not 0 <= self.occurrence <= _MOST_OCCURRENCE:
            raise InvalidInput("occurrence", "must be an integer from 0", "count how often the step has run before")
        return self


class RunFence(NamedTuple):
    """The lease of the run behind an effect: run id, owner, generation. All None for a message without a run."""

    run_id: UUID | None
    owner: str | None
    generation: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """What a call and a reconciler see. Pass ``key`` as the provider's idempotency key, and ``fencing_token`` to whatever can
    refuse an older one. ``sends`` counts the calls that may have gone out, this one included."""

    key: str
    fencing_token: int
    operation: str
    sends: int
    sent_at: datetime | None = None
    provider_reference: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CallLimits:
    """Bounds of one kind of call, in seconds.

    ``timeout_seconds``: the call is cancelled after it. ``in_flight_seconds``: how long after that a request may still arrive
    at the provider; absence seen earlier proves nothing. ``key_retention_seconds``: how long the provider remembers the key;
    an effect is not sent again after it, None if it never forgets. Raises ``ConfigurationError``.
    """

    timeout_seconds: float = 30.0
    in_flight_seconds: float = 60.0
    key_retention_seconds: float | None = 86_400.0

    def __post_init__(self) -> None:
        for name in ("timeout_seconds", "in_flight_seconds"):
            if not 0.001 <= getattr(self, name) <= _MOST_SECONDS:
                raise ConfigurationError(f"{name} must be from 0.001 to {_MOST_SECONDS:g} seconds")
        retention = self.key_retention_seconds
        if retention is not None and not self.timeout_seconds + self.in_flight_seconds < retention <= _MOST_RETENTION_SECONDS:
            raise ConfigurationError(
                "key_retention_seconds must be longer than timeout_seconds and in_flight_seconds together, and at most ten"
                " years; None if the provider never forgets a key"
            )

    @property
    def resend_seconds(self) -> float | None:
        """How long after its first sending an effect may be sent again, so that the call arrives while the key is remembered."""
        retention = self.key_retention_seconds
        return None if retention is None else retention - self.timeout_seconds - self.in_flight_seconds


@dataclass(frozen=True, slots=True)
class Applied:
    """A reconciler's answer: the effect happened, with this result and the provider's reference. A call may return it as well,
    to have the provider's reference kept."""

    result: object = None
    reference: str | None = None


@dataclass(frozen=True, slots=True)
class Absent:
    """A reconciler's answer: the provider has proven that the effect did not happen."""


#: Makes the effect happen and returns its result, which JSON can hold.
Call = Callable[[Effect], Awaitable[object]]
#: Asks the provider what became of the effect; None: it cannot tell.
Reconciler = Callable[[Effect], Awaitable[Applied | Absent | None]]


class Taken(NamedTuple):
    """An effect that was reserved here. ``sends``: the calls that went out before."""

    generation: int
    provider_key: str
    sends: int


class Answer(NamedTuple):
    """How the call ended that was made under ``generation``."""

    generation: int
    state: str
    result: bytes | None = None
    reference: str | None = None
    error_class: str | None = None
    error_code: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What the ledger knows of an effect. ``held``: the run that asks is. ``lapsed``: the call must have ended, and nobody has said
    how. ``forgotten``: it could be sent again, but the provider may no longer know its key. ``wait_seconds``: until whoever has it
    must have let go; ``proof_seconds``: until absence counts. ``result_is_plain``: a person gave it, and no codec reads it."""

    state: str
    generation: int
    fingerprint: bytes
    fingerprint_version: int
    provider_key: str
    provider_reference: str | None
    result: bytes | None
    result_is_plain: bool | None
    error_code: str | None
    sends: int
    sent_at: datetime | None
    held: bool
    lapsed: bool
    forgotten: bool
    wait_seconds: float
    proof_seconds: float | None


def provider_key(key: EffectKey) -> str:
    """The key that a provider is given: the same at every attempt, and no other effect's."""
    parts: Sequence[object] = key
    digest = hashlib.sha256(joined(b"fencepost effect", *(str(part).encode() for part in parts)))
    return "fp_" + digest.hexdigest()[:_KEY_CHARACTERS]
