"""Settings and readings that tests of several relays share."""

import json
from collections.abc import Mapping
from typing import Any, Final

import httpx

from tests.support.relay_process import RelayProcess, Setting
from tests.support.waiting import eventually

#: A lease that a test can wait out.
SHORT_LEASE: Final[Mapping[str, Setting]] = {
    "lease_seconds": 3,
    "publish_deadline_seconds": 1.5,
    "lease_margin_seconds": 0.3,
    "stop_grace_seconds": 10,
}
#: A lease that no test waits out: whatever needs its end fails.
LONG_LEASE: Final[Mapping[str, Setting]] = {
    "lease_seconds": 120,
    "publish_deadline_seconds": 60,
    "lease_margin_seconds": 2,
    "stop_grace_seconds": 30,
}


async def metric(relay: RelayProcess, name: str) -> float:
    """One sample; 0 if the series has none yet."""
    return (await relay.metrics()).get(name, 0.0)


async def metric_reaches(relay: RelayProcess, name: str, least: float, seconds: float = 20.0) -> None:
    """Wait until a sample is at least so high. A relay that does not answer yet is asked again."""

    async def reached() -> bool:
        try:
            return await metric(relay, name) >= least
        except httpx.HTTPError:
            return False

    await eventually(reached, seconds, message=f"{name} reaches {least:g}")


async def problems(relay: RelayProcess, path: str = "/readyz") -> list[str] | None:
    """What the relay says is wrong; None when it does not answer."""
    try:
        async with httpx.AsyncClient(timeout=5) as client:
            answer = await client.get(relay.url + path)
    except httpx.HTTPError:
        return None
    return list(answer.json()["problems"])


def logged(relay: RelayProcess, event: str) -> list[dict[str, Any]]:
    """The log's entries of one event."""
    *lines, _unfinished = relay.log.read_text().split("\n")
    entries = [json.loads(line) for line in lines if line.startswith("{")]
    return [entry for entry in entries if entry["event"] == event]
