"""What durable routes have while their application runs: the store, the watch, accepting transactions, slots. Opened at start-up,
and again and again while the database does not answer: until then each route answers 503."""

import asyncio
from collections.abc import Mapping
from typing import Final
from uuid import UUID

import structlog

from fencepost.codec import PayloadCodec
from fencepost.errors import ConfigurationError, TransientError
from fencepost.secrets import Secrets
from producer_sdk.http.accepting import Accepting
from producer_sdk.http.live import Live
from producer_sdk.http.operation import Operation, Site
from producer_sdk.http.pacing import StartPace
from producer_sdk.http.settings import RouteSettings
from producer_sdk.http.slots import Slots
from producer_sdk.http.store import RouteStore
from producer_sdk.http.streaming import Streams
from producer_sdk.http.transactions import PoolTransactions, Transactions
from producer_sdk.http.watch import Watch

__all__ = ["Runtime"]

_log = structlog.get_logger(__name__)

_REOPEN_SECONDS: Final = 1.0
# Of a request's time: a burst of starts waits for its connections, and what is left is enough to say that there was none.
_PATIENCE_FRACTION: Final = 0.5


class Runtime:
    """``ready`` once the database has answered. ``draining``: the process was told to end; nobody waits any more."""

    def __init__(
        self,
        *,
        settings: RouteSettings,
        secrets: Secrets,
        codec: PayloadCodec,
        site: Site,
        transactions: Transactions | None,
        operations: Mapping[str, Operation],
    ) -> None:
        self.settings = settings
        self.secrets = secrets
        self.codec = codec
        self.site = site
        self.metrics = metrics = site.metrics
        self.operations = operations
        self.waiters = Slots(
            most=settings.routes_max_waiters, most_each=settings.routes_max_waiters_per_principal, changed=metrics.waiters
        )
        self._stream_slots = Slots(
            most=settings.routes_max_streams, most_each=settings.routes_max_streams_per_principal, changed=metrics.streams
        )
        self.pace = StartPace()
        self.ready = asyncio.Event()
        self.draining = False
        self._url = settings.database_url.get_secret_value()
        self.transactions = transactions or PoolTransactions(
            self._url,
            size=settings.routes_start_connections,
            patience_seconds=settings.routes_request_deadline_seconds * _PATIENCE_FRACTION,
            timeout_seconds=settings.routes_database_seconds,
            idle_seconds=max(
                settings.routes_request_deadline_seconds,
                *(operation.request_deadline_seconds or 0.0 for operation in operations.values()),
                0.0,
            ),
        )
        self.accepting = Accepting(self)
        self.store: RouteStore
        self.watch: Watch
        self.streams: Streams
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Open everything; where the database does not answer, go on trying aside. Raises ``ConfigurationError``."""
        try:
            await self._open()
        except TransientError as error:
            _log.warning("database_unreachable", error=str(error), retry_seconds=_REOPEN_SECONDS)
            self._tasks.append(asyncio.create_task(self._open_later()))

    async def stop(self) -> None:
        """End what is open; starts whose COMMIT was sent are waited for, within a statement's time."""
        self.drain()
        await self.accepting.finish(self.settings.routes_database_seconds)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self.ready.is_set():
            self.ready.clear()
            await self.store.close()
        await self.transactions.close()

    def drain(self) -> None:
        """Let everybody who waits go with a pending answer, and nobody wait from now on."""
        self.draining = True
        if self.ready.is_set():
            self.watch.close()
            self.streams.close()

    def location_of(self, monitor_id: UUID) -> str:
        """The path of a lineage's monitor, below the application's root."""
        return f"{self.site.prefix}/operations/{monitor_id}"

    async def _open(self) -> None:
        settings = self.settings
        store = await RouteStore.open(
            self._url, size=settings.routes_read_connections, timeout_seconds=settings.routes_database_seconds
        )
        try:
            await store.arm(0)  # a missing schema or right is told now
            await self.transactions.open()
        except BaseException:
            await store.close()
            raise
        self.store = store
        live = Live(dropped=lambda: self.metrics.frames("dropped"))
        self.watch = Watch(store, self._url, live=live, listening=self.metrics.listening, read=self.metrics.read)
        self.streams = Streams(store, self.watch, slots=self._stream_slots, live=live, codec=self.codec, metrics=self.metrics)
        self._tasks.append(asyncio.create_task(self._watch()))
        self.ready.set()

    async def _watch(self) -> None:
        """Keep watching: without it everybody who waits would wait to the end of the budget."""
        while True:
            try:
                await self.watch.run()
            except Exception:  # noqa: BLE001 - a boundary: whatever ended it, those who wait need it
                _log.exception("watch_failed", retry_seconds=_REOPEN_SECONDS)
            await asyncio.sleep(_REOPEN_SECONDS)

    async def _open_later(self) -> None:
        while not self.ready.is_set():
            await asyncio.sleep(_REOPEN_SECONDS)
            try:
                await self._open()
            except TransientError as error:
                _log.warning("database_unreachable", error=str(error), retry_seconds=_REOPEN_SECONDS)
            except Exception as error:  # noqa: BLE001 - a boundary: what is missing may come, as a migration that runs beside
                told = str(error) if isinstance(error, ConfigurationError) else type(error).__name__
                _log.error("database_unusable", error=told, retry_seconds=_REOPEN_SECONDS)
