"""Signed links to the stream of one operation, for a browser's ``EventSource``, which can send neither headers nor a method.

Whoever has a link may read that one operation's stream until the link expires, and may do nothing else. It is asked for by an
authenticated request each time, it is short-lived, and neither a referrer nor an access log shows it. A link that was changed, is
past its time or belongs to another operation is one and the same nothing.
"""

import base64
import binascii
import hmac
import logging
import re
from typing import Any, Final
from uuid import UUID

from fencepost.errors import ConfigurationError
from fencepost.secrets import Secrets, joined

__all__ = ["LINK_HEADERS", "LINK_PARAMETER", "LINK_SECONDS", "RedactedLinks", "read_link", "redact_access_log", "sign_link"]

#: The query's parameter that holds the signature.
LINK_PARAMETER: Final = "fencepost_link"
#: How long a link is good for. A page that shows a longer stream asks for another.
LINK_SECONDS: Final = 300
#: On each answer to a link, and on the answer that gives one.
LINK_HEADERS: Final = (("referrer-policy", "no-referrer"),)

_DOMAIN: Final = b"fencepost stream link"
_VERSION_BYTES: Final = 2
_EXPIRY_BYTES: Final = 8
_MAC_BYTES: Final = 32
_MOST_CHARACTERS: Final = 600
_IN_A_LOG: Final = re.compile(rf"({LINK_PARAMETER}=)[^&\s\"']+")


def sign_link(secrets: Secrets, tenant_id: str, monitor_id: UUID, *, now: float, seconds: float = LINK_SECONDS) -> str:
    """The value of ``LINK_PARAMETER`` for that operation's stream. ``now``: seconds since the epoch."""
    version, expiry = secrets.write[0], int(now + seconds)
    head = version.to_bytes(_VERSION_BYTES, "big") + expiry.to_bytes(_EXPIRY_BYTES, "big")
    mac = _mac(secrets, version, expiry, tenant_id, monitor_id)
    return base64.urlsafe_b64encode(head + mac + tenant_id.encode()).rstrip(b"=").decode()


def read_link(secrets: Secrets, monitor_id: UUID, value: str, *, now: float) -> str | None:
    """The tenant whose operation the link is to; None for a link that is not good, whatever is wrong with it."""
    content = _decoded(value)
    mac_from = _VERSION_BYTES + _EXPIRY_BYTES
    tenant_from = mac_from + _MAC_BYTES
    try:
        version, expiry = int.from_bytes(content[:_VERSION_BYTES], "big"), int.from_bytes(content[_VERSION_BYTES:mac_from], "big")
        tenant_id = content[tenant_from:].decode()
        expected = _mac(secrets, version, expiry, tenant_id, monitor_id)
    except (ConfigurationError, UnicodeDecodeError):
        return None
    good = hmac.compare_digest(expected, content[mac_from:tenant_from])
    return tenant_id if good and now < expiry else None


class RedactedLinks(logging.Filter):
    """Takes the signatures of links out of log records, of whatever logger it is added to."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = _redacted(record.msg)
        if isinstance(record.args, tuple):
            record.args = tuple(map(_redacted, record.args))
        return True


def redact_access_log(name: str = "uvicorn.access") -> None:
    """Have a server's access log show no signature."""
    logger = logging.getLogger(name)
    if not any(isinstance(known, RedactedLinks) for known in logger.filters):
        logger.addFilter(RedactedLinks())


def _redacted(value: Any) -> Any:
    return _IN_A_LOG.sub(r"\1...", value) if isinstance(value, str) else value


def _mac(secrets: Secrets, version: int, expiry: int, tenant_id: str, monitor_id: UUID) -> bytes:
    parts = (tenant_id.encode(), monitor_id.bytes, expiry.to_bytes(_EXPIRY_BYTES, "big"), version.to_bytes(_VERSION_BYTES, "big"))
    return secrets.digest(version, joined(_DOMAIN, *parts))


def _decoded(value: str) -> bytes:
    """The bytes of the link; none for what is not the one spelling of any."""
    if len(value) > _MOST_CHARACTERS or not value.isascii():
        return b""
    try:
        content = base64.b64decode(value + "=" * (-len(value) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return b""
    return content if base64.urlsafe_b64encode(content).rstrip(b"=").decode() == value else b""
