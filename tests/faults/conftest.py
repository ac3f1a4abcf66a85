"""Relays with a fault of their own, for the tests of this directory."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import pytest

from fencepost.devservices.processes import Watchdog
from tests.support.altered_relay import ROOT, AlteredRelay
from tests.support.relay_process import Setting


class AlteredFactory(Protocol):
    """``start_altered(database_url, kafka, {"CRASH_POINT": ...}, lease_seconds=5)``."""

    def __call__(self, database_url: str, kafka: str, fault: Mapping[str, str], **settings: Setting) -> AlteredRelay:
        """Start a relay with the fault that these environment variables name."""


@pytest.fixture
def start_altered(tmp_path: Path, watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> Iterator[AlteredFactory]:
    """Starts relays with a fault; those left at the end are killed."""
    relays: list[AlteredRelay] = []

    def start(database_url: str, kafka: str, fault: Mapping[str, str], **settings: Setting) -> AlteredRelay:
        log = tmp_path / f"altered-{len(relays) + 1}.log"
        with monkeypatch.context() as patch:
            patch.setenv("PYTHONPATH", str(ROOT))
            for name, value in fault.items():
                patch.setenv(name, value)
            relays.append(AlteredRelay(database_url, kafka, log=log, watchdog=watchdog, **settings))
        return relays[-1]

    yield start
    for relay in relays:
        relay.kill()
