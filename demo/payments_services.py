"""The payments' side as an operator runs it: a provider in every bad mood that honours no key, and consumers that charge at it."""

import asyncio
import base64
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Final

from demo.payments_consumer import LIMITS, PROVIDER_PORT, TOPIC
from demo.processes import Processes
from demo.provider_client import ProviderClient
from fencepost.devservices import ServicesError, free_port

__all__ = ["HANDLERS", "PROVIDER", "SESSION_SECONDS", "PaymentsServices"]

HANDLERS: Final = "demo.payments_consumer:app"
PROVIDER: Final = "provider"
#: The shortest that a broker allows by default.
SESSION_SECONDS: Final = 6.0

_MOODS: Final[Mapping[str, float]] = {
    "fail-before": 0.03, "fail-after": 0.03, "hang": 0.02, "hang-up": 0.03, "too-many": 0.04, "unavailable": 0.03, "declined": 0.05,
}  # fmt: skip
# Long enough that whoever is killed is in the middle of calls.
_DELAY_SECONDS: Final = 0.2
# Longer than the client waits.
_HANG_SECONDS: Final = LIMITS.timeout_seconds + 1
_SETTINGS: Final[Mapping[str, object]] = {
    "CONSUMER_CONCURRENCY": 20,
    "CONSUMER_SESSION_TIMEOUT_SECONDS": SESSION_SECONDS,
    "CONSUMER_REBALANCE_GRACE_SECONDS": 2,
    "CONSUMER_COMMIT_INTERVAL_MS": 200,
    "CONSUMER_STOP_GRACE_SECONDS": 5,
    "CONSUMER_HTTP_PORT": 0,
}
_ASSIGNED: Final = "partitions_assigned"
_READY_SECONDS: Final = 20.0
_TICK_SECONDS: Final = 0.1


class PaymentsServices:
    """Starts them. ``requests`` is the topic that asks for charges, ``ends`` the one that tells how orders ended."""

    def __init__(
        self,
        processes: Processes,
        *,
        database_url: str,
        bootstrap_servers: str,
        requests: str,
        ends: str,
        seed: int,
        handlers: str = HANDLERS,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.provider = ProviderClient(free_port(), timeout_seconds=LIMITS.timeout_seconds)
        self._processes = processes
        self._seed = seed
        self._handlers = handlers
        self._environment = {PROVIDER_PORT: str(self.provider.port), TOPIC: ends, **(environment or {})}
        self._settings = {
            **_SETTINGS,
            "DATABASE_URL": database_url,
            "KAFKA_BOOTSTRAP_SERVERS": bootstrap_servers,
            "CONSUMER_TOPICS": requests,
            "CONSUMER_GROUP": requests,
            "IDEMPOTENCY_SECRETS": f"1:{base64.b64encode(secrets.token_bytes(32)).decode()}",
        }

    def start_provider(self) -> None:
        """Start the provider, with the book that it kept."""
        moods = [part for mood, share in _MOODS.items() for part in (f"--{mood}", str(share))]
        times = ["--delay-seconds", str(_DELAY_SECONDS), "--hang-seconds", str(_HANG_SECONDS)]
        book = ["--book", str(self._processes.logs / "provider.book"), "--seed", str(self._seed), "--forget-keys"]
        self._processes.start(PROVIDER, ["-m", "demo.provider", str(self.provider.port), *book, *times, *moods])

    def start_consumer(self, name: str) -> None:
        """Start a consumer, which the ledger knows by this name and a nonce."""
        self._processes.start(
            name,
            ["-m", "fencepost", "consumer", "run", self._handlers],
            settings={**self._settings, "CONSUMER_MEMBER": name},
            environment=self._environment,
        )

    async def until_ready(self, consumers: Sequence[str]) -> None:
        """Each consumer has been told its partitions."""
        deadline = time.monotonic() + _READY_SECONDS
        while not all(_ASSIGNED in self._processes.log(name).read_text() for name in consumers):
            self._processes.check()
            if time.monotonic() > deadline:
                raise ServicesError("the consumers did not start; try again on a less busy machine")
            await asyncio.sleep(_TICK_SECONDS)
