"""The payments example end to end: a shop, a provider in a bad mood, and two consumers that are killed, frozen and rebalanced.

The provider honours no key, so every request that reaches it charges: that each order is charged once is Fencepost's doing alone.
"""

import asyncio
import base64
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import asyncpg
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError

from demo.payments import Shop, create_orders
from demo.payments_audit import PaymentsAudit, audit_payments
from demo.payments_consumer import CHARGE, LIMITS, PROVIDER_PORT, TOPIC
from demo.payments_evidence import gather_evidence
from demo.provider_client import ProviderClient
from demo.view import View
from fencepost.devservices import Services, ServicesError, free_port
from fencepost.devservices.processes import Watchdog, tail

if TYPE_CHECKING:
    Connection = asyncpg.Connection[Any]

__all__ = ["ShopFloor"]

_PARTITIONS: Final = 6
_CONSUMERS: Final = ("payments-1", "payments-2")
_ASSIGNED: Final = "partitions_assigned"
_ORDERS_A_SECOND: Final = 15.0
_MOODS: Final[Mapping[str, float]] = {
    "fail-before": 0.03, "fail-after": 0.03, "hang": 0.02, "hang-up": 0.03, "too-many": 0.04, "unavailable": 0.03, "declined": 0.05,
}  # fmt: skip
_DELAY_SECONDS: Final = 0.02
# Longer than the client waits.
_HANG_SECONDS: Final = LIMITS.timeout_seconds + 1
_SESSION_SECONDS: Final = 6.0
_FROZEN_SECONDS: Final = _SESSION_SECONDS + 2.0
_CONSUMER: Final[Mapping[str, object]] = {
    "CONSUMER_CONCURRENCY": 20,
    "CONSUMER_SESSION_TIMEOUT_SECONDS": _SESSION_SECONDS,
    "CONSUMER_REBALANCE_GRACE_SECONDS": 2,
    "CONSUMER_COMMIT_INTERVAL_MS": 200,
    "CONSUMER_STOP_GRACE_SECONDS": 5,
    "CONSUMER_HTTP_PORT": 0,
}
_READY_SECONDS: Final = 20.0
_SETTLE_SECONDS: Final = 90.0
_STOP_SECONDS: Final = 15.0
_TICK_SECONDS: Final = 0.25
_LEFT: Final = """
SELECT (SELECT count(*) FROM payment_orders WHERE state = 'placed') AS placed,
       (SELECT count(*) FROM fencepost.effects WHERE state IN ('reserved', 'sent', 'unknown', 'absent')) AS open
"""


class ShopFloor:
    """The payments part of a run. Its relays are the run's own."""

    def __init__(self, services: Services, view: View, *, database_url: str, seconds: float, logs: Path) -> None:
        self._services = services
        self._view = view
        self._database_url = database_url
        self._seconds = seconds
        self._logs = logs
        name = uuid.uuid4().hex[:8]
        self._requests, self._ends = f"payments-{name}", f"payments-ended-{name}"
        self._provider_port = free_port()
        self._secret = f"1:{base64.b64encode(secrets.token_bytes(32)).decode()}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._watchdog = Watchdog()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """The table, the topics, the provider and two consumers, for as long as the block lasts."""
        self._connection = await asyncpg.connect(self._database_url)
        try:
            async with self._topics():
                await create_orders(self._connection)
                self._start_provider()
                for name in _CONSUMERS:
                    self._start_consumer(name)
                await self._until_ready()
                yield
        finally:
            self._connection.terminate()
            await asyncio.to_thread(self._stop_all)

    async def run(self) -> PaymentsAudit:
        """Place orders and disturb whoever handles them, wait until all have ended, and audit."""
        shop = Shop(self._database_url, self._requests, rate=_ORDERS_A_SECOND, seed=secrets.randbits(32))
        await self._act(shop)
        await self._until_ended(self._connection)
        return await self._audit(self._connection)

    async def _until_ready(self) -> None:
        """Each consumer has been told its partitions."""
        deadline = time.monotonic() + _READY_SECONDS
        while not all(_ASSIGNED in self._log(name).read_text() for name in _CONSUMERS):
            self._check()
            if time.monotonic() > deadline:
                raise ServicesError("the consumers did not start; try again on a less busy machine")
            await asyncio.sleep(_TICK_SECONDS)

    async def _act(self, shop: Shop) -> None:
        self._view.say(f"a shop places {_ORDERS_A_SECOND:g} orders a second; two consumers charge each at a provider in a bad mood")
        placing = asyncio.create_task(shop.run(self._seconds))
        try:
            await asyncio.sleep(self._seconds * 0.2)
            await self._disturb()
            await placing
        finally:
            placing.cancel()
            await asyncio.wait([placing])
        self._view.say(f"{len(shop.placed)} orders were placed; waiting until each has ended")

    async def _disturb(self) -> None:
        """Everything in turn, while orders go on."""
        pause = self._seconds * 0.15
        self._kill("payments-1")
        self._view.say("kill -9 payments-1, a consumer, in the middle of its work; and another in its place")
        self._start_consumer("payments-1")
        await asyncio.sleep(pause)
        self._kill("provider")
        self._view.say("kill -9 of the provider; it comes back with the book that it kept")
        self._start_provider()
        await asyncio.sleep(pause)
        self._processes["payments-2"].send_signal(signal.SIGSTOP)
        self._view.say(f"payments-2 is frozen for {_FROZEN_SECONDS:g} s, longer than its session and its calls' deadlines")
        await asyncio.sleep(_FROZEN_SECONDS)
        self._processes["payments-2"].send_signal(signal.SIGCONT)
        self._view.say("payments-2 goes on; payments-3 joins, and leaves again")
        self._start_consumer("payments-3")
        await asyncio.sleep(pause)
        self._processes["payments-3"].terminate()

    async def _until_ended(self, connection: "Connection") -> None:
        """What has not ended by the deadline is told by the audit."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < deadline:
            self._check()
            left = await connection.fetchrow(_LEFT)
            assert left is not None
            if not left["placed"] and not left["open"]:
                return
            await asyncio.sleep(_TICK_SECONDS)

    async def _audit(self, connection: "Connection") -> PaymentsAudit:
        """Looked at again until the relays have published the last end of an order, or the time is over."""
        provider = ProviderClient(self._provider_port, timeout_seconds=LIMITS.timeout_seconds)
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            evidence = await gather_evidence(
                connection, provider, operation=CHARGE, bootstrap_servers=self._services.bootstrap_servers, topic=self._ends
            )
            found = audit_payments(evidence)
            if found.kept or time.monotonic() > deadline:
                return found
            await asyncio.sleep(_TICK_SECONDS)

    # -- processes -----------------------------------------------------------------------------------------------

    def _start_provider(self) -> None:
        moods = [part for mood, share in _MOODS.items() for part in (f"--{mood}", str(share))]
        book = str(self._logs / "provider.book")
        times = ["--delay-seconds", str(_DELAY_SECONDS), "--hang-seconds", str(_HANG_SECONDS)]
        arguments = ["-m", "demo.provider", str(self._provider_port), "--book", book, "--forget-keys", *times, *moods]
        self._start("provider", arguments, {})

    def _start_consumer(self, name: str) -> None:
        settings: dict[str, object] = {
            **_CONSUMER,
            "DATABASE_URL": self._database_url,
            "KAFKA_BOOTSTRAP_SERVERS": self._services.bootstrap_servers,
            "CONSUMER_TOPICS": self._requests,
            "CONSUMER_GROUP": self._requests,
            "CONSUMER_MEMBER": name,
            "IDEMPOTENCY_SECRETS": self._secret,
        }
        environment = {f"FENCEPOST_{key}": str(value) for key, value in settings.items()}
        environment |= {PROVIDER_PORT: str(self._provider_port), TOPIC: self._ends}
        self._start(name, ["-m", "fencepost", "consumer", "run", "demo.payments_consumer:app"], environment)

    def _start(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("FENCEPOST_")}
        with self._log(name).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=kept | dict(environment),
                start_new_session=True,
            )
        self._processes[name] = process
        self._watchdog.guard(process.pid, signal.SIGKILL)

    def _kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait()

    def _check(self) -> None:
        """Raise if a process ended that nobody ended."""
        for name, process in self._processes.items():
            if name != "payments-3" and process.poll() is not None:
                raise ServicesError(f"{name} ended with {process.returncode}; its log ends:\n{tail(self._log(name))}")

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _stop_all(self) -> None:
        running = [process for process in self._processes.values() if process.poll() is None]
        try:
            for process in running:
                process.send_signal(signal.SIGCONT)
                process.terminate()
            deadline = time.monotonic() + _STOP_SECONDS
            for process in running:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        finally:
            self._watchdog.close()

    @asynccontextmanager
    async def _topics(self) -> AsyncIterator[None]:
        admin = AIOKafkaAdminClient(bootstrap_servers=self._services.bootstrap_servers)
        await admin.start()
        names = [self._requests, self._ends]
        try:
            await admin.create_topics([NewTopic(name, _PARTITIONS, 1) for name in names])
            yield
        finally:
            with contextlib.suppress(KafkaError):
                await admin.delete_topics(names)
            await admin.close()
