"""The consumer: fetches within bounds, hands messages to their lanes, commits what is done, and stops in order.

Nothing is committed that is not done, and nothing counts as done before its outcome is committed in the database. Fetching,
handling and committing run side by side, so a handler that takes long neither leaves the group nor holds up other keys.
"""

import asyncio
import contextlib
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from secrets import token_hex
from typing import Any, Final

import structlog
from aiokafka import TopicPartition
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from consumer_sdk.assignment import Assignment
from consumer_sdk.batches import BatchHandling
from consumer_sdk.consumer_metrics import ConsumerMetrics
from consumer_sdk.consumer_settings import ConsumerSettings, unknown_consumer_variables
from consumer_sdk.faults import raise_fault
from consumer_sdk.forgetting import forget_old
from consumer_sdk.handling import Handling
from consumer_sdk.incarnation import Incarnation
from consumer_sdk.intake import Intake
from consumer_sdk.kafka_member import Committed, KafkaMember, UnreadableRecord
from consumer_sdk.message_handlers import MessageHandlers
from consumer_sdk.message_runs import MessageRuns
from consumer_sdk.message_store import MessageStore
from consumer_sdk.message_writer import MessageWriter
from consumer_sdk.redriving import Redriving
from consumer_sdk.retention_check import retention_problems
from consumer_sdk.starts import Start, note_of, start_of
from consumer_sdk.tracing import Tracing
from consumer_sdk.worker_settings import load_worker_settings
from fencepost import __version__
from fencepost.clock import lease_clock
from fencepost.errors import ConfigurationError, TransientError
from fencepost.health import HealthServer
from fencepost.secrets import Secrets

__all__ = ["Consumer"]

_log = structlog.get_logger(__name__)

_POLL_MS: Final = 200
_KEEP_ALIVE_SECONDS: Final = 1.0
_FAULT_PAUSE_SECONDS: Final = 0.5
_START_PAUSE_SECONDS: Final = 1.0
_WATCH_SECONDS: Final = 0.1
_BLOCKED_SECONDS: Final = 1.0
_LOOP_STALLED_SECONDS: Final = 30.0
_MEASURE_SECONDS: Final = 5.0
_MAINTAIN_SECONDS: Final = 30.0
_FORGET_MOST: Final = 1_000
_TRIALS_REMEMBERED: Final = timedelta(days=7)
_WAITING_MOST: Final = 10_000
_MOST_AT_ONCE: Final = 1_000
_END_SECONDS: Final = 2.0
_LAST_COMMIT_SECONDS: Final = 10.0


class Consumer:
    """Handles the messages of its topics with ``handlers``. ``run`` returns after ``stop``, and raises on what a restart must mend.

    ``secrets`` bind outside effects to their requests; they default to the environment's, read now if there are reconcilers, else
    when the first effect is asked for. ``holder`` names this process in the ledger; it has a nonce, so a restarted one is another.
    """

    def __init__(self, handlers: MessageHandlers, settings: ConsumerSettings, *, secrets: Secrets | None = None) -> None:
        if not handlers.all:
            raise ConfigurationError("the consumer has no handlers: register at least one type")
        self._handlers = handlers
        self._settings = settings
        self._secrets = Secrets.from_environment() if secrets is None and handlers.reconcilers else secrets
        self._process = token_hex(8)
        self.holder = f"{settings.consumer_member}/{self._process}"
        self._metrics = ConsumerMetrics(
            version=__version__,
            holder=self.holder,
            types=sorted({handler.type for handler in handlers.all}),
            topics=settings.topics,
        )
        self._incarnations: Mapping[str, Incarnation] = {}
        self._intake = Intake(handlers, consumer=settings.name, incarnations=lambda: self._incarnations)
        self._assigned: frozenset[TopicPartition] | None = None
        self._assignment: Assignment | None = None
        self._stopping = asyncio.Event()
        self._faulted = asyncio.Event()
        self._fault: BaseException | None = None
        self._ahead: set[TopicPartition] = set()
        self._committing = asyncio.Lock()
        self._ticked_at = lease_clock()
        self._problems: list[str] = ["starting"]
        self._kafka_problem: str | None = None
        self._database_problem: str | None = None
        self.http_port: int | None = None
        self.left_behind = 0

    def stop(self) -> None:
        """Ask for the graceful stop. Safe to call more than once."""
        self._stopping.set()

    async def run(self) -> None:
        """Run until stopped. Cancelling it is the hard stop: handlers are cancelled, and what is not done comes again."""
        settings = self._settings
        registry = _Registries([self._metrics.registry])
        health = HealthServer(
            settings.consumer_http_host,
            settings.consumer_http_port,
            prefix="FENCEPOST_CONSUMER_",
            registry=registry,  # type: ignore[arg-type]  # what is asked of it is `collect`
            live=self._not_live,
            ready=lambda: list(self._problems),
        )
        self.http_port = health.port
        try:
            async with contextlib.AsyncExitStack() as stack:
                store = await self._patiently("database", self._opened_store)
                if store is None:
                    return
                stack.push_async_callback(store.close)
                runs = await self._patiently("database", self._opened_runs) if self._workflows else None
                if runs is not None:
                    stack.push_async_callback(runs.close)
                    registry.add(runs.registry)
                if await self._patiently("database", lambda: self._remember(store)) is None:
                    return
                await self._run_parts(store, runs)
        finally:
            health.close()

    # Starting

    @property
    def _workflows(self) -> list[str]:
        return sorted({handler.workflow for handler in self._handlers.all if handler.workflow is not None})

    async def _opened_store(self) -> MessageStore:
        store = await MessageStore.open(
            self._settings.database_url.get_secret_value(),
            holder=self.holder,
            timeout_seconds=self._settings.consumer_statement_seconds,
            pooler=self._settings.consumer_pooler,
        )
        try:
            await store.known([])  # a missing schema or right is told now
            await store.dead_letters_waiting(self._settings.name, most=1)
        except BaseException:
            await store.close()
            raise
        return store

    async def _opened_runs(self) -> MessageRuns:
        overrides: dict[str, object] = {
            "database_url": self._settings.database_url,
            "worker_concurrency": self._settings.consumer_concurrency,
        }
        if self._settings.consumer_pooler:
            overrides["worker_wakeup"] = "poll"
        return await MessageRuns.open(
            load_worker_settings(overrides),
            owner=self.holder,
            workflows=self._workflows,
            reconcilers=self._handlers.reconcilers,
            secrets=self._secrets,
            codec=self._handlers.codec,
        )

    async def _remember(self, store: MessageStore) -> bool:
        days = self._settings.ledger_retention_days
        self._intake.remember_from(await store.oldest_remembered(timedelta(days=days)) if days else None)
        return True

    async def _patiently(self, what: str, attempt: Any) -> Any:
        """The attempt's result, for as long as it takes; None once stopped."""
        while not self._stopping.is_set():
            self._ticked_at = lease_clock()
            try:
                return await attempt()
            except TransientError as error:
                self._problems = [f"{what}: no answer"]
                _log.warning(f"{what}_unreachable", error=str(error), retry_seconds=_START_PAUSE_SECONDS)
                await self._pause(_START_PAUSE_SECONDS)
        _log.info("consumer_stopped", reason=f"stopped before the {what} answered")
        return None

    async def _run_parts(self, store: MessageStore, runs: MessageRuns | None) -> None:
        settings = self._settings
        writer = MessageWriter.on(
            settings.database_url.get_secret_value(),
            concurrency=settings.consumer_concurrency,
            statement_seconds=settings.consumer_statement_seconds,
            longest_attempt_seconds=max(handler.attempt_seconds for handler in self._handlers.all),
            pooler=settings.consumer_pooler,
            store=store,
            consumer=settings.name,
            holder=self.holder,
            dead_letter_topic=settings.consumer_dead_letter_topic or None,
            reconcilers=self._handlers.reconcilers,
            codec=self._handlers.codec,
            secrets=self._secrets,
            metrics=self._metrics,
        )
        self._handling = Handling(
            consumer=settings.name,
            writer=writer,
            runs=runs,
            tracing=Tracing(settings.consumer_group),
            metrics=self._metrics,
            stopping=self._stopping,
        )
        self._batching = BatchHandling(writer=writer, handling=self._handling, metrics=self._metrics)
        self._store = store
        try:
            member = await self._patiently("kafka", self._started_member)
            if member is None:
                return
            self._member: KafkaMember = member
            try:
                await self._consume(runs)
            finally:
                await member.stop()
        finally:
            await writer.close()

    async def _started_member(self) -> KafkaMember:
        member = KafkaMember(self._settings, client_id=f"fencepost-{self.holder}", revoked=self._revoked, assigned=self._assign)
        await member.start()
        try:
            await self._check_topics(member)
        except BaseException:
            await member.stop()
            raise
        return member

    async def _check_topics(self, member: KafkaMember) -> None:
        self._incarnations = await member.incarnations()
        settings, dead_letters = self._settings, self._settings.consumer_dead_letter_topic
        if dead_letters and not await member.has_topic(dead_letters):
            raise ConfigurationError(
                f"FENCEPOST_CONSUMER_DEAD_LETTER_TOPIC: there is no topic {dead_letters}; create it, or the relay waits for it"
            )
        problems = retention_problems(
            await member.retention_days(), ledger_days=settings.ledger_retention_days, replay_days=settings.consumer_replay_days
        )
        if problems and settings.consumer_retention_check == "refuse":
            raise ConfigurationError("; ".join(problems) + "; or set FENCEPOST_CONSUMER_RETENTION_CHECK=warn")
        for problem in problems:
            _log.warning("retention_too_short", problem=problem)

    async def _consume(self, runs: MessageRuns | None) -> None:
        settings = self._settings
        if unknown := unknown_consumer_variables():
            _log.warning("unknown_variables", names=unknown)
        _log.info(
            "consumer_started", version=__version__, name=settings.name, group=settings.consumer_group, topics=settings.topics
        )
        redriving = Redriving(
            consumer=settings.name,
            store=self._store,
            intake=self._intake,
            handling=self._handling,
            batching=self._batching,
            longest_attempt_seconds=max(handler.attempt_seconds for handler in self._handlers.all),
            replay=timedelta(days=settings.consumer_replay_days),
            metrics=self._metrics,
        )
        self._member.join()
        loops = [self._poll_forever(), self._commit_forever(), self._watch(), self._measure(), self._maintain()]
        loops += [redriving.run(self._stopping), *([runs.run()] if runs is not None else [])]
        tasks = [asyncio.create_task(loop) for loop in loops]
        polling, redrives = tasks[0], tasks[5]
        ends = [asyncio.create_task(event.wait()) for event in (self._stopping, self._faulted)]
        try:
            await asyncio.wait([*tasks, *ends], return_when=asyncio.FIRST_COMPLETED)
            if self._stopping.is_set() and not self._faulted.is_set():
                await self._finish(polling, redrives)
        finally:
            for task in [*tasks, *ends]:
                task.cancel()
            if self._assignment is not None:
                await self._assignment.close(0)
            await asyncio.wait([*tasks, *ends], timeout=_END_SECONDS)
        raise_fault("consumer", self._fault, tasks)
        _log.info("consumer_stopped")

    # Fetching

    async def _poll_forever(self) -> None:
        while True:
            try:
                if self._assigned is not None and self._assignment is None:
                    await self._begin(self._assigned)
                else:
                    await self._poll()
                self._kafka_problem = None
            except UnreadableRecord:
                await self._read_around()
            except TransientError as error:
                self._kafka_problem = "kafka: no answer"
                _log.warning("poll_failed", error=str(error))
                self._read_again()
                await asyncio.sleep(_FAULT_PAUSE_SECONDS)

    async def _poll(self) -> None:
        assignment = self._assignment
        if assignment is not None and not assignment.room.is_set():
            await self._wait_for_room(assignment)
            return
        most = max(min(assignment.most_records, _MOST_AT_ONCE), 1) if assignment is not None else 1
        await self._receive(await self._member.poll(most=most, milliseconds=_POLL_MS))

    async def _receive(self, records: Mapping[TopicPartition, Sequence[Any]]) -> None:
        """What comes before `_begin` has said where to begin is not wanted, and comes again."""
        assignment = self._assignment
        if assignment is None or not records:
            return
        if not assignment.receive(records):
            await self._start_over("offsets went back")
        else:
            self._mind_windows(assignment)

    def _read_again(self) -> None:
        """A poll that failed may have lost records that it had in hand: go back to what was received."""
        if self._assignment is not None:
            self._member.seek(self._assignment.next_offsets())

    async def _read_around(self) -> None:
        """A record cannot be unpacked: take what comes before it one by one, and read its batch by other means."""
        self._read_again()
        assignment = self._assignment
        for partition in () if assignment is None else assignment.partitions:
            try:
                while assignment is self._assignment and assignment is not None and assignment.room.is_set():
                    records = await self._member.poll(partition, most=1, milliseconds=_POLL_MS)
                    if not records:
                        break
                    await self._receive(records)
            except UnreadableRecord:
                await self._read_batch(partition)
            except TransientError:
                self._read_again()

    async def _read_batch(self, partition: TopicPartition) -> None:
        assignment = self._assignment
        if assignment is None:
            return
        offset = assignment.next_offsets()[partition]
        try:
            batch = await self._member.fetch_batch(partition, offset)
        except TransientError as error:
            _log.warning("poll_failed", error=str(error))
            self._read_again()
            return
        if assignment is not self._assignment:
            return
        _log.warning(
            "odd_header_name", topic=partition.topic, partition=partition.partition, offset=offset, records=len(batch.records)
        )
        await self._receive({partition: batch.records})
        assignment.skip_to(partition, batch.next_offset)
        self._member.seek({partition: batch.next_offset})

    async def _wait_for_room(self, assignment: Assignment) -> None:
        """Nothing is fetched while memory is full; the group still hears that this member is alive."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KEEP_ALIVE_SECONDS):
                await assignment.room.wait()
        if assignment.room.is_set() or assignment is not self._assignment:
            return
        self._metrics.paused(True)
        self._member.pause(assignment.partitions)
        try:
            while not assignment.room.is_set() and assignment is self._assignment:
                await self._receive(await self._member.poll(most=1, milliseconds=0))  # a paused partition may hand over one more
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_KEEP_ALIVE_SECONDS):
                        await assignment.room.wait()
        finally:
            self._metrics.paused(False)
            if assignment is self._assignment:
                self._member.resume(assignment.partitions - self._ahead)

    def _mind_windows(self, assignment: Assignment) -> None:
        """A partition that is far ahead of a record which is not done waits for it; the others go on."""
        ahead = set(assignment.ahead)
        if ahead != self._ahead:
            self._member.pause(ahead - self._ahead)
            self._member.resume(self._ahead - ahead)
            self._ahead = ahead

    # Assignments

    def _assign(self, partitions: Collection[TopicPartition]) -> None:
        self._assigned = frozenset(partitions)
        self._metrics.assigned(len(self._assigned))
        _log.info("partitions_assigned", partitions=len(self._assigned))

    async def _revoked(self) -> None:
        """The group takes the partitions back: finish or abandon what is at work, and commit what is done."""
        self._assigned = None
        assignment, self._assignment = self._assignment, None
        if assignment is None:
            return
        self._metrics.revoked()
        try:
            ended = await assignment.close(self._settings.consumer_rebalance_grace_seconds)
            _log.info("partitions_revoked", partitions=len(assignment.partitions), ended=ended)
            await self._let_go(assignment, ended=ended)
        except Exception as error:  # noqa: BLE001 - a boundary: what is raised here the client swallows
            self._fail(error)

    async def _begin(self, partitions: frozenset[TopicPartition]) -> None:
        """Go on where the group has left off: with offsets of this incarnation of the topic; otherwise at the beginning."""
        self._incarnations = await self._member.incarnations()
        if days := self._settings.ledger_retention_days:
            with contextlib.suppress(TransientError):
                self._intake.remember_from(await self._store.oldest_remembered(timedelta(days=days)))
        starts = await self._starts(partitions) if partitions else {}
        if self._assigned is not partitions:
            return
        assignment = self._made(starts)
        # Before the group is told that it is held, so that whoever takes it away has to say that it is left.
        self._assignment = assignment
        self._ahead = set()
        try:
            held = not starts or await self._hold(assignment)
        except TransientError:
            self._drop(assignment)
            raise
        if not held:
            self._drop(assignment)
            await asyncio.sleep(_FAULT_PAUSE_SECONDS)
        elif self._assignment is assignment:
            self._member.seek({partition: start.offset for partition, start in starts.items()})

    def _made(self, starts: Mapping[TopicPartition, Start]) -> Assignment:
        settings = self._settings
        return Assignment(
            starts,
            intake=self._intake,
            store=self._store,
            handling=self._handling,
            batching=self._batching,
            concurrency=settings.consumer_concurrency,
            most_messages=settings.consumer_max_in_flight,
            most_bytes=settings.consumer_max_in_flight_mb * 1024 * 1024,
            most_ahead=settings.consumer_max_ahead,
            metrics=self._metrics,
            failed=self._fail,
        )

    async def _hold(self, assignment: Assignment) -> bool:
        """Say that the partitions are held from now on. It also commits where a group begins that begins at the end: the next
        assignment must not pass over what came since."""
        async with self._committing:
            return assignment is self._assignment and await self._say(assignment, assignment.places(), held=True)

    def _drop(self, assignment: Assignment) -> None:
        """It has not begun."""
        if self._assignment is assignment:
            self._assignment = None

    async def _starts(self, partitions: frozenset[TopicPartition]) -> Mapping[TopicPartition, Start]:
        committed = await self._member.committed(partitions)
        beginnings, ends = await self._member.beginning_of(partitions), await self._member.end_of(partitions)
        starts = {
            partition: start_of(
                committed=committed.get(partition),
                incarnation=self._topic_id(partition),
                beginning=beginnings[partition],
                end=ends[partition],
                reset=self._settings.consumer_offset_reset,
                process=self._process,
            )
            for partition in partitions
        }
        for partition, start in starts.items():
            if start.surprise is not None:
                told = {"topic": partition.topic, "partition": partition.partition, "offset": start.offset}
                _log.warning("offset_unexpected", surprise=start.surprise, **told)
        return starts

    async def _start_over(self, reason: str) -> None:
        """The topics are not what they were: forget what is in memory and begin anew, without a rebalance."""
        _log.warning("starting_over", reason=reason)
        assignment, self._assignment = self._assignment, None
        if assignment is not None:
            await assignment.close(0)

    def _topic_id(self, partition: TopicPartition) -> str:
        return str(self._incarnations[partition.topic].topic_id)

    def _note(self, assignment: Assignment, partition: TopicPartition, *, held: bool) -> str:
        """While a message may have ended a process, nobody has let go of its partition in order."""
        held_by = "" if assignment.has_suspects(partition) else self._process if held else None
        return note_of(self._topic_id(partition), held_by=held_by)

    # Committing

    async def _commit_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.consumer_commit_interval_ms / 1000)
            if self._assignment is None:
                continue
            try:
                await self._commit(self._assignment)
            except TransientError as error:
                self._metrics.commit("failed")
                _log.warning("commit_failed", error=str(error))

    async def _commit(self, assignment: Assignment) -> None:
        """Commit what is done, if the assignment has not been taken away."""
        async with self._committing:
            if assignment is self._assignment and (offsets := assignment.committable()):
                await self._say(assignment, offsets, held=True)

    async def _let_go(self, assignment: Assignment, *, ended: bool) -> None:
        """The last commit of an assignment that is no longer this consumer's, so that no other can follow it. That it is let go of
        in order is said even where nothing was done; but not if handlers have not ``ended``."""
        try:
            async with asyncio.timeout(_LAST_COMMIT_SECONDS), self._committing:
                if offsets := assignment.places():
                    await self._say(assignment, offsets, held=not ended)
        except (TransientError, TimeoutError) as error:
            told = str(error) or "no answer in time"
            _log.warning("commit_failed", error=told, consequence="finished messages are delivered again, as duplicates")

    async def _say(self, assignment: Assignment, offsets: Mapping[TopicPartition, int], *, held: bool) -> bool:
        """Commit offsets with what is to be known beside them; whether they were accepted."""
        committed: dict[TopicPartition, Committed] = {
            partition: (offset, self._note(assignment, partition, held=held)) for partition, offset in offsets.items()
        }
        accepted = await self._member.commit(committed)
        self._metrics.commit("committed" if accepted else "refused")
        if accepted:
            assignment.committed(offsets)
        else:
            _log.info("commit_refused", consequence="the partitions have moved; their new owner finds what was done in the ledger")
        return accepted

    # What runs beside

    async def _watch(self) -> None:
        """Ten times a second: the delay of this loop tells of a handler that blocks it."""
        self._ticked_at = lease_clock()
        while True:
            late = lease_clock() - self._ticked_at - _WATCH_SECONDS
            self._ticked_at = lease_clock()
            if late > _BLOCKED_SECONDS:
                self._metrics.blocked(late)
                remedy = "a handler computes or waits without await: move that to a thread (asyncio.to_thread)"
                _log.warning("event_loop_blocked", seconds=round(late, 1), remedy=remedy)
            if (assignment := self._assignment) is not None:
                self._metrics.in_flight(assignment.messages, assignment.bytes, assignment.oldest_seconds)
                self._mind_windows(assignment)
            self._handling.in_hand.mind_late()
            problems = [
                self._kafka_problem or (None if self._member.has_coordinator else "kafka: no answer"),
                self._database_problem,
                None if self._assigned is not None else "kafka: no partitions yet",
            ]
            self._problems = [problem for problem in problems if problem is not None]
            await asyncio.sleep(_WATCH_SECONDS)

    async def _measure(self) -> None:
        while True:
            try:
                self._metrics.waiting(*await self._store.dead_letters_waiting(self._settings.name, most=_WAITING_MOST))
                self._database_problem = None
            except TransientError as error:
                self._database_problem = "database: no answer"
                self._metrics.database_error("measure")
                _log.warning("measure_failed", error=str(error))
            if (assignment := self._assignment) is not None:
                self._metrics.lag(self._lag(assignment))
            await asyncio.sleep(_MEASURE_SECONDS)

    def _lag(self, assignment: Assignment) -> Mapping[str, int]:
        lag = dict.fromkeys(self._settings.topics, 0)
        for partition, place in assignment.places().items():
            end = self._member.end_seen(partition)
            if end is not None:
                lag[partition.topic] += max(end - place, 0)
        return lag

    async def _maintain(self) -> None:
        """Forget what is past its retention, in bounded batches, and look whether the topics are still the same."""
        while True:
            await asyncio.sleep(_MAINTAIN_SECONDS * random.uniform(0.8, 1.2))  # noqa: S311 - nothing secret
            try:
                await self._forget()
                if self._incarnations != await self._member.incarnations():
                    await self._start_over("a topic was made anew")
            except TransientError as error:
                self._metrics.database_error("maintain")
                _log.warning("maintenance_failed", error=str(error))

    async def _forget(self) -> None:
        await self._store.forget_trials(_TRIALS_REMEMBERED, limit=_FORGET_MOST)
        days = self._settings.ledger_retention_days
        if days:
            self._intake.remember_from(await self._store.oldest_remembered(timedelta(days=days)))
        await forget_old(self._store, retention_days=days, told=self._metrics.forgotten)

    # Stopping

    async def _finish(self, polling: asyncio.Task[None], redrives: asyncio.Task[None]) -> None:
        """Fetch no more, let handlers end within the grace, commit what is done. What is not done is delivered again."""
        grace = self._settings.consumer_stop_grace_seconds
        ends_at = lease_clock() + grace
        polling.cancel()
        await asyncio.wait([polling], timeout=_END_SECONDS)
        assignment = self._assignment
        _log.info("consumer_stopping", messages=0 if assignment is None else assignment.messages, grace_seconds=grace)
        if assignment is not None:
            ended = await assignment.close(grace)
            self.left_behind = 0 if ended else assignment.messages
            if assignment is self._assignment:  # else a rebalance has taken it away meanwhile, and says so
                self._assignment = None
                await self._let_go(assignment, ended=ended)
        await asyncio.wait([redrives], timeout=max(ends_at - lease_clock(), 0.1))

    def _fail(self, error: BaseException) -> None:
        self._fault = self._fault or error
        self._faulted.set()

    async def _pause(self, seconds: float) -> None:
        """Wait, but not for a stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    def _not_live(self) -> list[str]:
        stalled = lease_clock() - self._ticked_at > _LOOP_STALLED_SECONDS
        return ["the event loop stands still"] if stalled else []


class _Registries:
    """Several registries as one, as far as a scrape needs it."""

    def __init__(self, registries: list[CollectorRegistry]) -> None:
        self._registries = registries

    def add(self, registry: CollectorRegistry) -> None:
        self._registries.append(registry)

    def collect(self) -> Iterator[Metric]:
        for registry in self._registries:
            yield from registry.collect()

    def restricted_registry(self, names: Collection[str]) -> "_Registries":
        return _Registries([registry.restricted_registry(names) for registry in self._registries])  # type: ignore[misc]
