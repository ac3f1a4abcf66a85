"""The service's secrets, by version, and the digests made with them: whoever reads the tables cannot try short inputs."""

import base64
import binascii
import hmac
import os
import re
from collections.abc import Mapping, Sequence
from typing import Final

from fencepost.errors import ConfigurationError

__all__ = ["MAX_SECRET_VERSION", "MAX_WRITTEN_VERSIONS", "MIN_SECRET_BYTES", "Secrets", "joined"]

MAX_SECRET_VERSION: Final = 32_767
# The output size of SHA-256; a shorter secret is easier to try than the digest.
MIN_SECRET_BYTES: Final = 32
MAX_WRITTEN_VERSIONS: Final = 2

_SECRETS_VARIABLE: Final = "FENCEPOST_IDEMPOTENCY_SECRETS"
_WRITE_VARIABLE: Final = "FENCEPOST_IDEMPOTENCY_WRITE"
_SECRETS_SHAPE: Final = (
    'write VERSION:BASE64, separated by commas; this makes a secret for version 1: echo "1:$(openssl rand -base64 32)"'
)
_WRITE_SHAPE: Final = "write one version, or two separated by a comma"


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


def joined(*parts: bytes) -> bytes:
    """The parts by their lengths, so that no two sequences of parts run together."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


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
