"""Checks addresses before anything is done with them. An address holds a password, so no message quotes any part of it."""

import re
from typing import Final
from urllib.parse import urlsplit

from fencepost.errors import ConfigurationError

__all__ = ["check_bootstrap_servers", "check_database_url"]

_SHAPE: Final = "an address like postgresql://user:password@host:5432/database"
_ENCODE: Final = "in the password, percent-encode # / ? @ : and %"
_BROKER: Final = re.compile(r"(\[[0-9a-fA-F:]+\]|[^:/\s\[\]]+)(:\d{1,5})?")


def check_database_url(url: str, name: str = "FENCEPOST_DATABASE_URL") -> str:
    """The address without blanks around it. Raises ``ConfigurationError`` for one that can never work."""
    url = url.strip()
    if not url:
        raise ConfigurationError(f"{name} is required: set it in the environment")
    scheme = url.partition("://")[0]
    if scheme.startswith(("postgresql+", "postgres+")):
        raise ConfigurationError(f"{name} names a driver, as SQLAlchemy's addresses do; leave it out: {_SHAPE}")
    if scheme not in {"postgresql", "postgres"}:
        raise ConfigurationError(f"{name} is not {_SHAPE}")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ConfigurationError(f"{name} is not {_SHAPE}; {_ENCODE}") from None
    if parts.fragment or (parts.hostname is None and not parts.query):
        raise ConfigurationError(f"{name} is not {_SHAPE}; {_ENCODE}")
    return url


def check_bootstrap_servers(servers: str, name: str = "FENCEPOST_KAFKA_BOOTSTRAP_SERVERS") -> str:
    """The list without blanks and empty parts. Raises ``ConfigurationError`` for anything but host or host:port."""
    brokers = [part.strip() for part in servers.split(",") if part.strip()]
    if not brokers:
        raise ConfigurationError(f"{name} is blank: give it a value, or unset it where it has a default")
    for number, broker in enumerate(brokers, 1):
        if not _BROKER.fullmatch(broker):
            raise ConfigurationError(f"{name}: broker {number} is not host:port; write no scheme and no path")
    return ",".join(brokers)
