"""Signed links: what was signed is read, for as long as it is good, and nothing else tells anything."""

import base64
import logging
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.secrets import Secrets
from producer_sdk.http.stream_link import LINK_PARAMETER, LINK_SECONDS, RedactedLinks, read_link, redact_access_log, sign_link

SECRETS = Secrets({1: b"1" * 32, 2: b"2" * 32}, write=[1])
MONITOR = uuid.UUID(int=7)
NOW = 1_800_000_000.0
LINK = sign_link(SECRETS, "acmé", MONITOR, now=NOW)


def test_a_link_is_good_for_its_time() -> None:
    """SEC-7: short-lived."""
    assert read_link(SECRETS, MONITOR, LINK, now=NOW) == "acmé"
    assert read_link(SECRETS, MONITOR, LINK, now=NOW + LINK_SECONDS - 1) == "acmé"
    assert read_link(SECRETS, MONITOR, LINK, now=NOW + LINK_SECONDS) is None


def test_a_link_is_to_one_operation() -> None:
    """SEC-7: its id is swapped."""
    assert read_link(SECRETS, uuid.UUID(int=8), LINK, now=NOW) is None


@pytest.mark.parametrize("at", range(len(LINK)))
def test_no_character_of_a_link_can_be_changed(at: int) -> None:
    """SEC-7: the tenant, the expiry, the version of the secret, the signature, and the spelling."""
    for character in "AB_-=":
        changed = LINK[:at] + character + LINK[at + 1 :]
        assert changed == LINK or read_link(SECRETS, MONITOR, changed, now=NOW) is None
    assert read_link(SECRETS, MONITOR, LINK[:at], now=NOW) is None


@given(st.text(max_size=100) | st.binary(max_size=100).map(lambda content: base64.urlsafe_b64encode(content).decode()))
def test_what_nobody_signed_is_no_link(text: str) -> None:
    """SEC-7."""
    assert read_link(SECRETS, MONITOR, text, now=NOW) is None


def test_a_link_stays_good_while_its_secret_is_replaced_and_not_longer() -> None:
    """SEC-7: phases 2 to 4 of a replacement."""
    for write in ([1, 2], [2]):
        assert read_link(Secrets({1: b"1" * 32, 2: b"2" * 32}, write=write), MONITOR, LINK, now=NOW) == "acmé"
    assert read_link(Secrets({2: b"2" * 32}, write=[2]), MONITOR, LINK, now=NOW) is None
    assert read_link(Secrets({1: b"3" * 32}, write=[1]), MONITOR, LINK, now=NOW) is None


def test_an_access_log_shows_no_signature(caplog: pytest.LogCaptureFixture) -> None:
    """SEC-1, SEC-7: as uvicorn writes it, and in a message that is put together already."""
    logger = logging.getLogger("test.access")
    redact_access_log("test.access")
    redact_access_log("test.access")
    assert sum(isinstance(known, RedactedLinks) for known in logger.filters) == 1
    path = f"/operations/1/stream?a=1&{LINK_PARAMETER}={LINK}&b=2"
    with caplog.at_level(logging.INFO):
        logger.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", "GET", path, "1.1", 200)
        logger.info(f'"GET {path}"')
    assert LINK not in caplog.text
    assert caplog.text.count(f"?a=1&{LINK_PARAMETER}=...&b=2") == 2
