"""Who asks: what an application's own dependency says of a request. Keys, runs and monitors belong to it."""

from dataclasses import dataclass, field
from typing import Final

from fencepost.secrets import Secrets, joined

__all__ = ["Principal"]

_DOMAIN: Final = b"fencepost principal"


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated client. ``tenant_id``: 1 to 256 bytes of UTF-8; ``id``: 1 to 3,000 characters, left out of ``repr``.

    Neither may be empty: a key without its owner would show one client's answers to another.
    """

    tenant_id: str
    id: str = field(repr=False)

    def digest(self, secrets: Secrets, version: int) -> bytes:
        """The 32 bytes that stand for the principal on what it has started."""
        return secrets.digest(version, joined(_DOMAIN, self.tenant_id.encode(), self.id.encode()))
