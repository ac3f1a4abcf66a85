"""The words of the ledger: whose effect it is, what a call gets to see of it, and what a reconciler may answer."""

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple
from uuid import UUID

from fencepost.errors import ConfigurationError, InvalidInput
from fencepost.secrets import joined

__all__ = ["Absent", "Applied", "Call", "CallLimits", "Effect", "EffectKey", "Known", "Reconciler", "RunFence", "provider_key"]

_MOST_BYTES: Final = 256
_KEY_CHARACTERS: Final = 40
_MOST_SECONDS: Final = 86_400.0


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
            size = len(getattr(self, name).encode())
            if not 1 <= size <= _MOST_BYTES:
                raise InvalidInput(name, f"has {size} bytes, must have 1 to {_MOST_BYTES}", "use a short, stable name")
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
        if self.key_retention_seconds is not None and self.key_retention_seconds <= self.timeout_seconds + self.in_flight_seconds:
            raise ConfigurationError("key_retention_seconds must be longer than timeout_seconds and in_flight_seconds together")


@dataclass(frozen=True, slots=True)
class Applied:
    """A reconciler's answer: the effect happened, with this result and the provider's reference."""

    result: object = None
    reference: str | None = None


@dataclass(frozen=True, slots=True)
class Absent:
    """A reconciler's answer: the provider has proven that the effect did not happen."""


#: Makes the effect happen and returns its result, which JSON can hold.
Call = Callable[[Effect], Awaitable[object]]
#: Asks the provider what became of the effect; None: it cannot tell.
Reconciler = Callable[[Effect], Awaitable[Applied | Absent | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What the ledger knows of an effect. ``lapsed``: its call must have ended, and nobody has said how. ``wait_seconds``: until
    whoever has it now must have let go."""

    state: str
    generation: int
    fingerprint: bytes
    fingerprint_version: int
    provider_key: str
    provider_reference: str | None
    result: bytes | None
    error_code: str | None
    sends: int
    sent_at: datetime | None
    lapsed: bool
    wait_seconds: float


def provider_key(key: EffectKey) -> str:
    """The key that a provider is given: the same at every attempt, and no other effect's."""
    parts: Sequence[object] = key
    digest = hashlib.sha256(joined(b"fencepost effect", *(str(part).encode() for part in parts)))
    return "fp_" + digest.hexdigest()[:_KEY_CHARACTERS]
