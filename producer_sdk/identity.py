"""Who asks for what, as two digests: of the client's key in its scope, and of the request. Pure: no clock, no database.

The digests are HMACs under a secret of the service, so whoever reads the tables learns neither keys nor requests, and
cannot try short ones. A key never counts without its whole scope, and parts are joined by their lengths, so no two
identities run together. Nothing here quotes a key, a principal, a request or a secret.
"""

import base64
import binascii
import hmac
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Final, final

from fencepost.canonical_json import MAX_DEPTH, canonical_json
from fencepost.errors import ConfigurationError, InvalidInput, InvalidJson, KeyInvalid, KeyMissing

__all__ = [
    "CURRENT_PROFILE",
    "MAX_KEY_CHARACTERS",
    "MAX_SCOPE_CHARACTERS",
    "MAX_SECRET_VERSION",
    "MAX_TENANT_BYTES",
    "MAX_WRITTEN_VERSIONS",
    "MIN_SECRET_BYTES",
    "UNKEYED",
    "Scope",
    "Secrets",
    "Unkeyed",
    "check_key",
    "fingerprint",
    "key_hash",
    "request_of",
]

MAX_TENANT_BYTES: Final = 256
MAX_SCOPE_CHARACTERS: Final = 3_000
MAX_KEY_CHARACTERS: Final = 255
MAX_SECRET_VERSION: Final = 32_767
# The output size of SHA-256; a shorter secret is easier to try than the digest.
MIN_SECRET_BYTES: Final = 32
MAX_WRITTEN_VERSIONS: Final = 2

# Stored beside each new fingerprint, which is compared under the profile that it was made with.
CURRENT_PROFILE: Final = 1
PROFILES: Final[dict[int, Callable[[object], bytes]]] = {1: canonical_json}

_SECRETS_VARIABLE: Final = "FENCEPOST_IDEMPOTENCY_SECRETS"
_WRITE_VARIABLE: Final = "FENCEPOST_IDEMPOTENCY_WRITE"
_SECRETS_SHAPE: Final = (
    'write VERSION:BASE64, separated by commas; this makes a secret for version 1: echo "1:$(openssl rand -base64 32)"'
)
_WRITE_SHAPE: Final = "write one version, or two separated by a comma"
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


class Secrets:
    """The secrets that digests are made with, by version; ``repr`` shows versions only.

    A row is written under each version in ``write`` (one or two) and is unique for each. It is looked up under every
    version in ``versions``: those that are written first, then those that are only read, newest first.

    A secret is replaced in phases. Finish rolling out each phase before the next begins:

    ===== ============== ========= ==================================================================
    phase secrets        ``write`` go on when
    ===== ============== ========= ==================================================================
    0     1              1
    1     1, 2           1         every process can read version 2
    2     1, 2           1, 2      every process writes both
    3     1, 2           2         the key retention has passed: no live key is known by version 1 only
    4     2              2
    ===== ============== ========= ==================================================================

    Processes of two neighbouring phases share a written version, so the unique rows of one key collide even where neither
    process saw the other's. Phases 1 and 3 share none: between them one key could start two runs.
    """

    __slots__ = ("_by_version", "versions", "write")

    def __init__(self, secrets: Mapping[int, bytes], *, write: Sequence[int]) -> None:
        """``secrets``: at least 32 bytes each, versions 1 to 32,767. ``write``: versions that new rows are written under.

        Raises ``ConfigurationError``.
        """
        _check_secrets(secrets, "secrets")
        _check_write(write, secrets, "write")
        self._by_version: Final = dict(secrets)
        self.write: Final = tuple(write)
        self.versions: Final = self.write + tuple(sorted(secrets.keys() - set(write), reverse=True))

    @classmethod
    def from_environment(cls) -> "Secrets":
        """Read ``FENCEPOST_IDEMPOTENCY_SECRETS`` (``1:<base64>,2:<base64>``) and ``FENCEPOST_IDEMPOTENCY_WRITE`` (``1``,
        ``1,2``).

        The second may be left out while there is one secret. With more it is required: a secret that is added and written
        at once would skip the phases. Raises ``ConfigurationError``, which names the variable and the remedy.
        """
        secrets = _secrets_in(os.environ.get(_SECRETS_VARIABLE, ""))
        _check_secrets(secrets, _SECRETS_VARIABLE)
        write = _write_in(os.environ.get(_WRITE_VARIABLE), secrets)
        _check_write(write, secrets, _WRITE_VARIABLE)
        return cls(secrets, write=write)

    def digest(self, version: int, message: bytes) -> bytes:
        """Return the HMAC-SHA-256 of the message. Raises ``ConfigurationError`` for a version that is not known here."""
        secret = self._by_version.get(version)
        if secret is None:
            raise ConfigurationError(f"version {version} of the idempotency secrets is needed and not among {_SECRETS_VARIABLE}")
        return hmac.digest(secret, message, "sha256")

    def __repr__(self) -> str:
        return f"Secrets(versions={self.versions}, write={self.write})"


def key_hash(secrets: Secrets, version: int, scope: Scope, key: str) -> bytes:
    """Return the 32 bytes that stand for the key in its scope."""
    parts = (scope.tenant_id, scope.principal, scope.operation, key)
    return secrets.digest(version, _joined(_KEY_DOMAIN, *(part.encode() for part in parts)))


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
    return secrets.digest(version, _joined(_FINGERPRINT_DOMAIN, canonical(head), canonical(request)))


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


def _joined(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def _check_part(name: str, part: object) -> None:
    if not isinstance(part, str):
        raise InvalidInput(name, "must be text", "pass a str")
    if not 1 <= len(part) <= MAX_SCOPE_CHARACTERS:
        raise InvalidInput(name, f"has {len(part)} characters, must have 1 to {MAX_SCOPE_CHARACTERS}", "use an id or a name")
    if _NOT_TEXT.search(part):
        raise InvalidInput(name, "may hold neither U+0000 nor a lone surrogate", "use whole Unicode characters")


def _check_secrets(secrets: Mapping[int, bytes], name: str) -> None:
    if not secrets:
        raise ConfigurationError(f"{name} is empty: {_SECRETS_SHAPE}")
    for version, secret in secrets.items():
        if not _is_version(version):
            raise ConfigurationError(f"{name}: a version must be an integer from 1 to {MAX_SECRET_VERSION}")
        if not _is_long_enough(secret):
            raise ConfigurationError(f"{name}: version {version} must be {MIN_SECRET_BYTES} bytes or more; {_SECRETS_SHAPE}")
    if len(set(secrets.values())) < len(secrets):
        raise ConfigurationError(f"{name}: two versions hold one secret; make a new one. {_SECRETS_SHAPE}")


def _is_long_enough(secret: object) -> bool:
    return isinstance(secret, bytes) and len(secret) >= MIN_SECRET_BYTES


def _check_write(write: Sequence[int], secrets: Mapping[int, bytes], name: str) -> None:
    if not 1 <= len(write) <= MAX_WRITTEN_VERSIONS or len(set(write)) < len(write):
        raise ConfigurationError(f"{name} must name 1 to {MAX_WRITTEN_VERSIONS} different versions: {_WRITE_SHAPE}")
    if not all(_is_version(version) and version in secrets for version in write):
        raise ConfigurationError(f"{name} names a version that has no secret: add the secret, or take the version out")


def _is_version(version: object) -> bool:
    return isinstance(version, int) and not isinstance(version, bool) and 1 <= version <= MAX_SECRET_VERSION


def _secrets_in(text: str) -> dict[int, bytes]:
    if not text.strip():
        raise ConfigurationError(f"{_SECRETS_VARIABLE} is required: {_SECRETS_SHAPE}")
    entries = [_secret_in(entry, number) for number, entry in enumerate(text.split(","), 1)]
    secrets = dict(entries)
    if len(secrets) < len(entries):
        raise ConfigurationError(f"{_SECRETS_VARIABLE} gives one version twice: give each secret a version of its own")
    return secrets


def _secret_in(entry: str, number: int) -> tuple[int, bytes]:
    version, _, secret = entry.strip().partition(":")
    try:
        return _version_in(version), base64.b64decode(secret, validate=True)
    except (ValueError, binascii.Error):
        raise ConfigurationError(f"{_SECRETS_VARIABLE}: entry {number} is not VERSION:BASE64; {_SECRETS_SHAPE}") from None


def _write_in(text: str | None, secrets: Mapping[int, bytes]) -> tuple[int, ...]:
    if text is None and len(secrets) == 1:
        return tuple(secrets)
    if text is None:
        raise ConfigurationError(f"{_WRITE_VARIABLE} is required where {_SECRETS_VARIABLE} has several: {_WRITE_SHAPE}")
    try:
        return tuple(_version_in(version.strip()) for version in text.split(","))
    except ValueError:
        raise ConfigurationError(f"{_WRITE_VARIABLE} is not a list of versions: {_WRITE_SHAPE}") from None


def _version_in(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text):
        raise ValueError
    return int(text)
