"""The relay as a process: builds the parts, runs them until a signal, stops in order.

The stop: leave the fleet, finish what is in flight within the grace, mark it, release every lane so that a successor
starts at once. What the grace does not suffice for is discarded unsent; nothing is lost by it.
"""

import asyncio
import contextlib
import gc
import secrets
import signal
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final

import structlog

from fencepost import __version__
from fencepost.clock import lease_clock
from fencepost.errors import ConfigurationError, FencepostError, InvariantViolated, TransientError
from fencepost.health import HealthServer
from relay.bell import Bell
from relay.engine import Engine
from relay.lane import Lane
from relay.metrics import Metrics
from relay.ownership import Ownership
from relay.producer import Producer
from relay.publishing import Publishing
from relay.settings import ENVIRONMENT_PREFIX, RelaySettings, unknown_variables
from relay.store import Store
from relay.wire import RecordEncoder

__all__ = ["Relay", "verify_installation"]

_log = structlog.get_logger(__name__)

_WATCH_SECONDS: Final = 0.1
_BACKLOG_SECONDS: Final = 5.0
_HORIZON_SECONDS: Final = 30.0
_BACKLOG_MOST: Final = 10_000
_LOOP_STALLED_SECONDS: Final = 30.0
_START_PAUSE_SECONDS: Final = 1.0
_LEAVE_SECONDS: Final = 2.0


async def verify_installation(store: Store) -> None:
    """Raises ``ConfigurationError`` on a replica, and in a cluster that the cursors are not from."""
    installation = await store.installation()
    if installation.in_recovery:
        raise ConfigurationError("FENCEPOST_DATABASE_URL leads to a replica; the relay reads from the primary only")
    if not installation.same_cluster:
        raise ConfigurationError(
            "this outbox was restored or moved from another cluster: its cursors hold that cluster's transaction ids, and "
            "nothing is published. If this copy is to replace the original, run `fencepost lanes rebase`"
        )


@dataclass(frozen=True, kw_only=True)
class _Parts:
    engine: Engine
    publishing: Publishing
    ownership: Ownership
    bell: Bell | None


class Relay:
    """One relay. ``run`` returns after a stop that was asked for, and raises on a fault that a restart must mend."""

    def __init__(self, settings: RelaySettings) -> None:
        self.relay_id = f"{settings.relay_name}/{secrets.token_hex(8)}"
        self._settings = settings
        self._metrics = Metrics(version=__version__, relay_id=self.relay_id)
        self._stopping = asyncio.Event()
        self._lanes: dict[int, Lane] = {}
        self._ticked_at = lease_clock()
        self._problems: list[str] = ["starting"]
        self._stuck_seconds = 0.0
        self._fault: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.health: HealthServer | None = None

    def stop(self) -> None:
        """Ask for the graceful stop. Safe to call more than once."""
        self._stopping.set()

    async def run(self) -> None:
        """Run until stopped."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.set_exception_handler(self._on_loop_error)
        settings = self._settings
        self.health = HealthServer(
            settings.http_host,
            settings.http_port,
            prefix=ENVIRONMENT_PREFIX,
            registry=self._metrics.registry,
            live=self._not_live,
            ready=self._not_ready,
        )
        try:
            store = await self._open_store()
            if store is not None:
                try:
                    await self._run_parts(store)
                finally:
                    await store.close()
        finally:
            self.health.close()

    async def _open_store(self) -> Store | None:
        """Wait for the database for as long as it takes, or until stopped."""
        timeout = min(self._settings.lease_seconds / 2, 30.0)
        while not self._stopping.is_set():
            self._ticked_at = lease_clock()
            try:
                store = await Store.open(
                    self._settings.database_url.get_secret_value(), relay_id=self.relay_id, timeout_seconds=timeout
                )
                try:
                    await verify_installation(store)
                except BaseException:
                    await store.close()
                    raise
                return store
            except TransientError as error:
                self._problems = ["database: no answer"]
                remedy = "see FENCEPOST_DATABASE_URL; the relay goes on once the database answers"
                _log.warning("database_unreachable", error=str(error), retry_seconds=_START_PAUSE_SECONDS, remedy=remedy)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_START_PAUSE_SECONDS):
                        await self._stopping.wait()
        return None

    def _assemble(self, store: Store) -> _Parts:
        """Build the parts and tell them of one another. Nothing runs yet."""
        settings = self._settings
        bell: Bell | None = None
        if settings.wakeup == "listen":
            bell = Bell(
                database_url=settings.database_url.get_secret_value(),
                store=store,
                metrics=self._metrics,
                lanes=lambda: sorted(self._lanes),
                ring=lambda: engine.ring(),  # noqa: PLW0108 - the engine is built below
                lanes_changed=lambda: ownership.look_now(),  # noqa: PLW0108
            )
        engine = Engine(settings=settings, store=store, metrics=self._metrics, lanes=self._lanes, bell=bell)
        publishing = Publishing(
            make_producer=self._make_producer,
            encoder=RecordEncoder(settings.source),
            metrics=self._metrics,
            deadline_seconds=settings.publish_deadline_seconds,
            done=engine.flight_done,
            changed=engine.changed,
        )
        ownership = Ownership(
            store=store,
            settings=settings,
            relay_id=self.relay_id,
            metrics=self._metrics,
            lanes=self._lanes,
            lost=engine.lane_lost,
            changed=engine.changed,
            stopped=engine.stopped,
            taken_back=engine.mark_taken_back,
        )
        engine.connect(publishing, ownership)
        return _Parts(engine=engine, publishing=publishing, ownership=ownership, bell=bell)

    async def _run_parts(self, store: Store) -> None:
        parts = self._assemble(store)
        parts.publishing.open()
        _tune_garbage_collection()
        if unknown := unknown_variables():
            _log.warning("unknown_variables", names=unknown)
        _log.info("relay_started", version=__version__, name=self._settings.relay_name, wakeup=self._settings.wakeup)
        tasks = [asyncio.create_task(work) for work in self._work(parts, store)]
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            ends: list[asyncio.Future[Any]] = [*tasks, stopping, self._fault]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._stopping.is_set() and not self._fault.done():
                await self._finish(parts)
        finally:
            stopping.cancel()
            await self._end(tasks, parts)
        if self._fault.done():
            raise InvariantViolated("a step of the relay failed in an unforeseen way; the process ends") from self._fault.result()
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    def _work(self, parts: _Parts, store: Store) -> list[Coroutine[Any, Any, None]]:
        """What runs side by side until the stop."""
        work = [
            parts.engine.poll_forever(),
            parts.engine.mark_forever(),
            self._own(parts),
            self._watch(parts),
            self._measure(store),
        ]
        if parts.bell is not None:
            work.append(parts.bell.run())
        return work

    def _on_loop_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback that failed has left a step undone, which nothing would ever notice: the process ends, its leases run
        out. What a library forgot to look at is only logged."""
        error = context.get("exception")
        said = f"{type(error).__name__}: {error}" if error else None
        _log.warning("loop_error", relay_id=self.relay_id, message=context.get("message"), error=said)
        if error is not None and "handle" in context and not self._fault.done():
            self._fault.set_result(error)

    def _make_producer(self, may_send: Any) -> Producer:
        return Producer(
            bootstrap_servers=self._settings.kafka_bootstrap_servers,
            client_id=self.relay_id.replace("/", "-"),
            compression=self._settings.compression,
            may_send=may_send,
        )

    async def _own(self, parts: _Parts) -> None:
        # A relay joins the fleet once it can publish: until then the others' shares are not cut for it.
        await parts.publishing.first_ready.wait()
        await parts.ownership.run()

    async def _watch(self, parts: _Parts) -> None:
        """Ten times a second: what the clock decides."""
        engine, publishing, ownership = parts.engine, parts.publishing, parts.ownership
        while True:
            self._ticked_at = now = lease_clock()
            ownership.expire()
            publishing.watch()
            problems = []
            if now - ownership.database_seen_at > max(self._settings.renew_interval_seconds, 2.0):
                problems.append("database: no answer")
            if not publishing.ready:
                problems.append("kafka: no answer")
            self._problems = problems
            self._stuck_seconds = engine.stuck_seconds()
            self._metrics.lanes(
                {lane.number: lane.generation for lane in self._lanes.values()}, [what.reason for what in engine.stopped().values()]
            )
            await asyncio.sleep(_WATCH_SECONDS)

    async def _measure(self, store: Store) -> None:
        """The gauges that cost a query: bounded, and never in the way of a poll."""
        horizon_at = 0.0
        while True:
            try:
                positions = {lane.number: lane.marked_position for lane in self._lanes.values()}
                for backlog in await store.backlog(positions, _BACKLOG_MOST) if positions else ():
                    if backlog.lane in self._lanes:
                        self._metrics.backlog(backlog.lane, backlog.waiting, backlog.oldest_age_seconds)
                if lease_clock() >= horizon_at:
                    self._metrics.horizon(await store.horizon())
                    horizon_at = lease_clock() + _HORIZON_SECONDS
            except TransientError as error:
                self._metrics.database_error("measure")
                _log.warning("measure_failed", error=str(error))
            await asyncio.sleep(_BACKLOG_SECONDS)

    async def _finish(self, parts: _Parts) -> None:
        _log.info("relay_stopping", lanes=sorted(self._lanes), grace_seconds=self._settings.stop_grace_seconds)
        parts.engine.draining = True
        try:
            async with asyncio.timeout(_LEAVE_SECONDS):
                await parts.ownership.leave()
        except (TransientError, TimeoutError) as error:
            _log.warning("leave_failed", error=str(error))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.stop_grace_seconds):
                await parts.ownership.without_lanes()

    async def _end(self, tasks: list[asyncio.Task[None]], parts: _Parts) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await parts.publishing.close()  # before the release: nothing of ours may leave once another may own the lanes
        try:
            async with asyncio.timeout(_LEAVE_SECONDS):
                if parts.bell is not None:
                    await parts.bell.disarm()
                await parts.ownership.release_all()
        except (FencepostError, TimeoutError) as error:
            _log.warning("release_failed", error=str(error), consequence="the lanes become free when their leases end")
        _log.info("relay_stopped")

    def _not_live(self) -> list[str]:
        problems = []
        if lease_clock() - self._ticked_at > _LOOP_STALLED_SECONDS:
            problems.append("the event loop stands still")
        if self._stuck_seconds > max(_LOOP_STALLED_SECONDS, self._settings.lease_seconds) and not self._problems:
            problems.append("lanes are held and not polled")
        return problems

    def _not_ready(self) -> list[str]:
        return list(self._problems)


def _tune_garbage_collection() -> None:
    # What has been imported stays; walking it again and again, and every young row a few times, cost a tenth of the drain.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
