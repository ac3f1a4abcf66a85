"""Who asks for what, as two digests: of the client's key in its scope, and of the request. Pure: no clock, no database.

The digests are HMACs under a secret of the service, so whoever reads the tables learns neither keys nor requests, and
cannot try short ones. A key never counts without its whole scope, and parts are joined by their lengths, so no two
identities run together. Nothing here quotes a key, a principal, a request or a secret.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from typing import Final, final

from fencepost.canonical_json import MAX_DEPTH, canonical_json
from fencepost.errors import ConfigurationError, InvalidInput, InvalidJson, KeyInvalid, KeyMissing
from fencepost.secrets import Secrets, joined

__all__ = [
    "CURRENT_PROFILE",
    "MAX_KEY_CHARACTERS",
    "MAX_SCOPE_CHARACTERS",
    "MAX_TENANT_BYTES",
    "UNKEYED",
    "Scope",
    "Unkeyed",
    "check_key",
    "fingerprint",
    "key_hash",
    "request_of",
]

MAX_TENANT_BYTES: Final = 256
MAX_SCOPE_CHARACTERS: Final = 3_000
MAX_KEY_CHARACTERS: Final = 255

# Stored beside each new fingerprint, which is compared under the profile that it was made with.
CURRENT_PROFILE: Final = 1
PROFILES: Final[dict[int, Callable[[object], bytes]]] = {1: canonical_json}

_KEY: Final = re.compile(rf"[\x20-\x7e]{{1,{MAX_KEY_CHARACTERS}}}")
_NOT_TEXT: Final = re.compile("[\0\ud800-\udfff]")
_KEY_DOMAIN: Final = b"fencepost idempotency key"
_FINGERPRINT_DOMAIN: Final = b"fencepost request fingerprint"


@final
class Unkeyed:
    """The type of ``UNKEYED``, its only instance."""

    __slots__ = ()
    _instance: "Unkeyed | None" = None

    def __new__(cls) -> "Unkeyed":
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def __repr__(self) -> str:
        return "UNKEYED"

    def __reduce__(self) -> str:
        return "UNKEYED"


UNKEYED: Final = Unkeyed()
"""In place of a key: the author says that each call is a run of its own. No key is never a key that all calls share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Whose key it is: a key means something within one tenant, one principal and one operation only.

    ``tenant_id``: 1 to 256 bytes of UTF-8. ``principal``: who is authenticated, 1 to 3,000 characters; ``repr`` leaves it
    out. ``operation``: what is asked for, such as ``POST /orders``, 1 to 3,000 characters. Raises ``InvalidInput``.
    """

    tenant_id: str
    principal: str = field(repr=False)
    operation: str

    def __post_init__(self) -> None:
        for name in ("tenant_id", "principal", "operation"):
            _check_part(name, getattr(self, name))
        size = len(self.tenant_id.encode())
        if size > MAX_TENANT_BYTES:
            raise InvalidInput("tenant_id", f"has {size} bytes, may have {MAX_TENANT_BYTES}", "use the tenant's id")


def check_key(key: object) -> str:
    """Return the key: 1 to 255 printable ASCII characters. Raises ``KeyMissing`` for None, ``KeyInvalid`` for others."""
    if key is None:
        raise KeyMissing("an idempotency key is required: send one that is new for each intent and the same for each retry")
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise KeyInvalid(f"the idempotency key must be text of 1 to {MAX_KEY_CHARACTERS} printable ASCII characters")
    return key


def key_hash(secrets: Secrets, version: int, scope: Scope, key: str) -> bytes:
    """Return the 32 bytes that stand for the key in its scope."""
    parts = (scope.tenant_id, scope.principal, scope.operation, key)
    return secrets.digest(version, joined(_KEY_DOMAIN, *(part.encode() for part in parts)))


def fingerprint(
    secrets: Secrets,
    version: int,
    *,
    scope: Scope,
    workflow: str,
    schema_version: int,
    request: object,
    profile: int = CURRENT_PROFILE,
) -> bytes:
    """Return the 32 bytes that stand for the request: equal for equal requests of one scope, workflow and schema version.

    ``request`` is what ``request_of`` gave, never the workflow's input: times and ids of the server are not the client's.
    To compare with a stored fingerprint, pass the version and profile stored with it. Raises ``InvalidJson`` for what has
    no canonical form, ``ConfigurationError`` for a version or profile that is not known here.
    """
    canonical = PROFILES.get(profile)
    if canonical is None:
        raise ConfigurationError(f"fingerprint profile {profile} is unknown: a newer release wrote this key; upgrade this process")
    head = [profile, scope.operation, scope.tenant_id, scope.principal, workflow, schema_version]
    # Two documents and not one, so that the request has the whole depth that the parser allows.
    return secrets.digest(version, joined(_FINGERPRINT_DOMAIN, canonical(head), canonical(request)))


def request_of(value: object) -> object:
    """Return what is fingerprinted of an input: of a pydantic model the fields that the client set, at every level.

    A new field with a default therefore changes no old fingerprint. Serializers, aliases and computed fields play no
    part, since they are the server's; a field that a validator assigns counts as set. JSON values pass as they are, so
    a model with fields that have no canonical form, such as URLs and sets, can be passed as the dict of its JSON form.
    Raises ``InvalidJson`` for a dataclass, which does not say what was set.
    """
    return _request_of(value, 0)


def _request_of(value: object, depth: int) -> object:
    if depth > MAX_DEPTH:
        raise InvalidJson("request", f"is nested deeper than {MAX_DEPTH}, or holds itself", "pass a flatter value")
    if hasattr(type(value), "model_fields_set"):
        value = _fields_set(value)
    if isinstance(value, dict):
        return {name: _request_of(member, depth + 1) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_request_of(item, depth + 1) for item in value]
    if is_dataclass(value):
        raise InvalidJson("request", "holds a dataclass, which does not say what the client set", "pass a pydantic model or a dict")
    return value


def _fields_set(model: object) -> dict[str, object]:
    # Not model_dump: it adds computed fields, and all fields of a nested dataclass.
    values = {**vars(model), **(getattr(model, "model_extra", None) or {})}
    return {name: values[name] for name in getattr(model, "model_fields_set", ())}


def _check_part(name: str, part: object) -> None:
    if not isinstance(part, str):
        raise InvalidInput(name, "must be text", "pass a str")
    if not 1 <= len(part) <= MAX_SCOPE_CHARACTERS:
        raise InvalidInput(name, f"has {len(part)} characters, must have 1 to {MAX_SCOPE_CHARACTERS}", "use an id or a name")
    if _NOT_TEXT.search(part):
        raise InvalidInput(name, "may hold neither U+0000 nor a lone surrogate", "use whole Unicode characters")
