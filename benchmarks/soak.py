"""The soak: writers and relays go on while relays, brokers and the database are killed, frozen and restarted, one at a time.

It promises a verdict that takes nobody's word: what the writers committed is compared with what the topic holds, from the
first offset on. The schedule of faults comes from the seed. Everything it starts ends with it, on Ctrl-C too.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psycopg
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError

from benchmarks.lab import Lab, Worker
from benchmarks.report import Report
from demo.audit import Commit, Event, Reading, audit
from fencepost import wire
from fencepost.devservices import start_services
from fencepost.devservices.kafka import Broker
from fencepost.devservices.processes import Watchdog, tail

__all__ = ["Books", "Verdict", "judge", "resolve", "soak", "split_keys"]

_PARTITIONS: Final = 8
_RELAYS: Final = ("relay-a", "relay-b", "relay-c")
_LEASE_SECONDS: Final = 5.0
_RELAY_SETTINGS: Final[Mapping[str, object]] = {
    "LEASE_SECONDS": _LEASE_SECONDS, "PUBLISH_DEADLINE_SECONDS": 2.5, "LEASE_MARGIN_SECONDS": 0.5, "HTTP_PORT": 0, "SOURCE": "soak",
}  # fmt: skip
_WRITERS: Final = 6
_RATE: Final = 120.0
_FIRST_PAUSE_SECONDS: Final = 3.0
# Short ones, too: the next fault may meet a fleet that has not recovered from the last.
_PAUSE_SECONDS: Final = (0.2, 5.0)
_DOWN_SECONDS: Final = (0.5, 5.0)
_FROZEN_SECONDS: Final = (_LEASE_SECONDS + 0.5, _LEASE_SECONDS + 4.0)
_BROKER_FROZEN_SECONDS: Final = (1.0, 8.0)
_DATABASE_FROZEN_SECONDS: Final = (1.0, 7.0)
_RELAY_STOP_SECONDS: Final = 40.0
_WRITERS_STOP_SECONDS: Final = 90.0
# Lease, deadline, a rebuilt producer and a broker's election fit in it several times.
_HEAL_SECONDS: Final = 90.0
_READ_SECONDS: Final = 120.0
_TOPIC_SECONDS: Final = 60.0
_REQUEST_MILLISECONDS: Final = 5_000
_TICK_SECONDS: Final = 0.25
_EVIDENCE: Final = 20
# Counts that are zero unless a promise was broken, by the relay or by the database under it.
_BROKEN: Final = (
    "lost", "rolled_back_published", "out_of_order", "split_keys", "commits_the_database_lost", "ghosts_in_the_outbox",
)  # fmt: skip
_BACKENDS: Final = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name LIKE 'fencepost%'"
_UNDELIVERED: Final = "SELECT count(*) FROM fencepost.delivery WHERE NOT delivered"
_OLDEST: Final = """
SELECT coalesce(extract(epoch FROM clock_timestamp() - min(created_at)), 0)::float8 FROM fencepost.delivery WHERE NOT delivered
"""
_EVENT_IDS: Final = "SELECT event_id::text FROM fencepost.outbox"
_UPDATES: Final = "SELECT pg_stat_force_next_flush(), n_tup_upd FROM pg_stat_all_tables WHERE relid = 'fencepost.outbox'::regclass"
# The statistics above are lost with a crash of the server; a row that was written again has another xmin than its xid says.
_REWRITTEN: Final = "SELECT count(*) FROM fencepost.outbox WHERE xmin::text::bigint <> xid::text::bigint & 4294967295"
_RECEIPTS: Final = """
SELECT o.event_id::text, o.lane, o.id, o.xid::text, r.sequence, r.generation, r.relay_id, r.position, r.snapshot::text,
       r.target::text, r.late_position, r.first_id, r.last_id, r.row_count, r.late_count, r.created_at::text
FROM fencepost.outbox AS o LEFT JOIN LATERAL (
    SELECT * FROM fencepost.receipts AS r WHERE r.lane = o.lane AND r.position >= o.id ORDER BY r.sequence LIMIT 3
) AS r ON true
WHERE o.event_id = ANY (%s::uuid[]) ORDER BY o.id, r.sequence
"""


# -- the verdict, pure -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Books:
    """What the writers say: ``unknown`` are events whose COMMIT had no answer."""

    committed: Sequence[Event]
    rolled_back: Sequence[Event]
    unknown: Sequence[Event]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``counts`` for the table, ``evidence`` for whoever looks for the cause."""

    counts: Mapping[str, int]
    evidence: Mapping[str, Sequence[Event]]

    @property
    def kept(self) -> bool:
        """Whether the promises held. Duplicates break none."""
        return not any(self.counts[name] for name in _BROKEN)


def resolve(books: Books, in_outbox: Collection[str]) -> tuple[list[Event], list[Event]]:
    """(committed, rolled back), where the database decides what nobody knew."""
    became = [event for event in books.unknown if event.event_id in in_outbox]
    vanished = [event for event in books.unknown if event.event_id not in in_outbox]
    return [*books.committed, *became], [*books.rolled_back, *vanished]


def split_keys(records: Iterable[tuple[int, Event]]) -> int:
    """How many keys lie in more than one partition."""
    partitions: defaultdict[str, set[int]] = defaultdict(set)
    for partition, event in records:
        partitions[event.key].add(partition)
    return sum(len(found) > 1 for found in partitions.values())


def late_events(appearances: Iterable[Event]) -> list[Event]:
    """Those that first appeared after one of their key with the same or a higher version."""
    newest: Counter[str] = Counter()
    late = []
    for event in appearances:
        if event.version <= newest[event.key]:
            late.append(event)
        newest[event.key] = max(newest[event.key], event.version)
    return late


def judge(books: Books, in_outbox: Collection[str], records: Sequence[tuple[int, Event]]) -> Verdict:
    """``records`` are (partition, event) in the order of each partition's offsets, ``in_outbox`` the ids of all rows."""
    committed, rolled_back = resolve(books, in_outbox)
    events = [event for _, event in records]
    appeared = dict.fromkeys(events)
    found = audit([Commit(event, 0.0) for event in committed], rolled_back, [Reading(event, 0.0) for event in events])
    evidence = {
        "lost": [event for event in committed if event not in appeared],
        "rolled_back_published": list(appeared.keys() - set(committed)),
        "out_of_order": late_events(appeared),
    }
    counts = {
        "committed": found.committed,
        "published": found.published,
        "rolled_back": found.rolled_back,
        "lost": found.lost,
        "rolled_back_published": found.rolled_back_published,
        "out_of_order": found.out_of_order,
        "duplicates": found.duplicates,
        "split_keys": split_keys(records),
        "unknown": len(books.unknown),
        "unknown_that_committed": len(committed) - len(books.committed),
        "commits_the_database_lost": sum(event.event_id not in in_outbox for event in books.committed),
        "ghosts_in_the_outbox": sum(event.event_id in in_outbox for event in books.rolled_back),
    }
    return Verdict(counts=counts, evidence=evidence)


# -- the relays ------------------------------------------------------------------------------------------------------


class _Fleet:
    """Relays by name, each on a log of its own. One that ends although nobody ended it is noted and started again."""

    def __init__(self, lab: Lab, database_url: str) -> None:
        self.unasked_exits: list[str] = []
        self._lab = lab
        self._environment = _relay_environment(database_url, lab.kafka)
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "fencepost", "relay", "run"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self._environment, "FENCEPOST_RELAY_NAME": name},
                start_new_session=True,  # Ctrl-C is the soak's to handle
            )
        self._lab.watchdog.guard(process.pid, signal.SIGKILL)
        self._running[name] = process

    def send(self, name: str, number: signal.Signals) -> None:
        self._running[name].send_signal(number)

    def end(self, name: str, number: signal.Signals) -> None:
        """End a relay by this signal and wait."""
        self.send(name, number)
        self._wait(name, number)

    def _wait(self, name: str, number: signal.Signals) -> None:
        """Until it has ended of this signal, which was sent once; one that does not obey is noted."""
        process = self._running.pop(name)
        try:
            code = process.wait(_RELAY_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self.unasked_exits.append(f"{name} did not stop within {_RELAY_STOP_SECONDS:g} s of {number.name}; {self._tail(name)}")
        else:
            if number is signal.SIGTERM and code:
                self.unasked_exits.append(f"{name} answered SIGTERM with exit code {code}; {self._tail(name)}")
        self._lab.watchdog.release(process.pid)

    def look(self) -> None:
        """Note relays that have ended by themselves, and start them again as a supervisor would."""
        for name, process in list(self._running.items()):
            if process.poll() is not None:
                self.unasked_exits.append(f"{name} ended by itself with {process.returncode}; {self._tail(name)}")
                print(self.unasked_exits[-1], flush=True)
                self.start(name)

    def stop(self) -> None:
        """Stop all at once; frozen ones are thawed first."""
        for process in self._running.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for name in list(self._running):
            self._wait(name, signal.SIGTERM)

    def log(self, name: str) -> Path:
        return self._lab.logs / f"{name}.log"

    def _tail(self, name: str) -> str:
        return f"its log {self.log(name)} ends:\n{tail(self.log(name))}"


def _relay_environment(database_url: str, kafka: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FENCEPOST_")}
    chosen = {**_RELAY_SETTINGS, "DATABASE_URL": database_url, "KAFKA_BOOTSTRAP_SERVERS": kafka}
    return kept | {f"FENCEPOST_{name}": str(value) for name, value in chosen.items()}


# -- the faults ------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Bench:
    """What a fault may lay its hands on, and the dice that decide how."""

    lab: Lab
    fleet: _Fleet
    topic: str
    database_url: str
    dice: random.Random
    faults: Counter[str] = field(default_factory=Counter)
    #: Age of the oldest row that still waited, right before the next fault: seconds, and after which kind.
    waited: dict[str, float] = field(default_factory=dict)

    def wait(self, bounds: tuple[float, float]) -> float:
        seconds = self.dice.uniform(*bounds)
        time.sleep(seconds)
        return seconds

    def leader(self) -> Broker:
        """The broker that leads a partition of the dice's choice."""
        partition = self.dice.randrange(_PARTITIONS)
        wanted = asyncio.run(_leader_of(self.lab.kafka, self.topic, partition))
        found = [broker for broker in self.lab.services.brokers if broker.node_id == wanted]
        return found[0] if found else self.lab.services.brokers[0]  # no dice: the schedule must not hang on the cluster's answer


def _relay_kill(bench: _Bench) -> str:
    return _relay_restart(bench, signal.SIGKILL)


def _relay_stop(bench: _Bench) -> str:
    return _relay_restart(bench, signal.SIGTERM)


def _relay_restart(bench: _Bench, number: signal.Signals) -> str:
    name = bench.dice.choice(_RELAYS)
    bench.fleet.end(name, number)
    try:
        seconds = bench.wait(_DOWN_SECONDS)
    finally:
        bench.fleet.start(name)
    return f"{name}, down {seconds:.1f} s"


def _relay_freeze(bench: _Bench) -> str:
    name = bench.dice.choice(_RELAYS)
    bench.fleet.send(name, signal.SIGSTOP)
    try:
        seconds = bench.wait(_FROZEN_SECONDS)
    finally:
        bench.fleet.send(name, signal.SIGCONT)
    return f"{name}, {seconds:.1f} s"


def _broker_stop(bench: _Bench) -> str:
    return _broker_restart(bench, Broker.stop)


def _broker_kill(bench: _Bench) -> str:
    return _broker_restart(bench, Broker.kill)


def _broker_restart(bench: _Bench, end: Callable[[Broker], None]) -> str:
    broker = bench.leader()
    end(broker)
    seconds = bench.wait(_DOWN_SECONDS)
    broker.start()
    return f"broker {broker.node_id}, down {seconds:.1f} s and its start"


def _broker_freeze(bench: _Bench) -> str:
    broker = bench.leader()
    broker.pause()
    try:
        seconds = bench.wait(_BROKER_FROZEN_SECONDS)
    finally:
        broker.resume()
    return f"broker {broker.node_id}, {seconds:.1f} s"


def _database_restart(bench: _Bench) -> str:
    bench.lab.services.postgres.restart()
    return "fast shutdown"


def _database_crash(bench: _Bench) -> str:
    bench.lab.services.postgres.restart(immediate=True)
    return "immediate shutdown, recovery from the log"


def _database_freeze(bench: _Bench) -> str:
    bench.lab.services.postgres.pause()
    try:
        seconds = bench.wait(_DATABASE_FROZEN_SECONDS)
    finally:
        bench.lab.services.postgres.resume()
    return f"{seconds:.1f} s"


def _backends_terminated(bench: _Bench) -> str:
    return f"{_ask(bench.database_url, _BACKENDS)[0][0]} backends"


_FAULTS: Final[Mapping[str, Callable[[_Bench], str]]] = {
    "relay_kill": _relay_kill,
    "relay_stop": _relay_stop,
    "relay_freeze": _relay_freeze,
    "broker_stop": _broker_stop,
    "broker_kill": _broker_kill,
    "broker_freeze": _broker_freeze,
    "database_restart": _database_restart,
    "database_crash": _database_crash,
    "database_freeze": _database_freeze,
    "backends_terminated": _backends_terminated,
}


def _schedule(dice: random.Random) -> Iterator[str]:
    """Every kind once in each round, in an order of its own: a short soak meets all of them."""
    while True:
        yield from dice.sample(sorted(_FAULTS), len(_FAULTS))


def _torment(bench: _Bench, seconds: float, seed: int) -> None:
    begun = time.monotonic()
    schedule = _schedule(bench.dice)
    time.sleep(_FIRST_PAUSE_SECONDS)
    while (elapsed := time.monotonic() - begun) < seconds:
        kind = next(schedule)
        told = _FAULTS[kind](bench)
        bench.faults[kind] += 1
        took = time.monotonic() - begun - elapsed
        pause = bench.wait(_PAUSE_SECONDS)
        oldest = _ask(bench.database_url, _OLDEST)[0][0]
        bench.waited[kind] = max(oldest, bench.waited.get(kind, 0.0))
        print(
            f"{elapsed:7.1f} s  seed {seed}  {kind}: {told}, {took:.1f} s in all; "
            f"{pause:.1f} s later the oldest row had waited {oldest:.1f} s",
            flush=True,
        )
        bench.fleet.look()


# -- the run ---------------------------------------------------------------------------------------------------------


def soak(options: argparse.Namespace) -> int:
    """Run it, print the table, write the JSON. Exit code 1 when a promise was broken or a relay did not do its work."""
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    print(f"soak: {options.minutes:g} minutes, {options.brokers} broker(s), seed {seed}", flush=True)
    with _lab(options.brokers) as lab, lab.database() as database_url:
        report, evidence = _run(lab, database_url, options, seed)
        kept = not any(report.figures[name] for name in ("violations", "undelivered", "outbox_updates", "unasked_exits"))
        if not kept:
            _keep_evidence(lab, database_url, evidence, seed)
    report.write(options.json)
    return 0 if kept else 1


@contextmanager
def _lab(brokers: int) -> Iterator[Lab]:
    watchdog = Watchdog()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="fencepost-soak-") as logs,
            start_services(brokers=brokers, kind="local") as services,
        ):
            yield Lab(services, Path(logs), watchdog)
    finally:
        watchdog.close()


def _run(lab: Lab, database_url: str, options: argparse.Namespace, seed: int) -> tuple[Report, Mapping[str, Sequence[Event]]]:
    topic = f"soak-{uuid.uuid4().hex[:8]}"
    asyncio.run(_create_topic(lab.kafka, topic, copies=min(3, options.brokers)))
    machine = lab.machine()
    fleet = _Fleet(lab, database_url)
    bench = _Bench(lab=lab, fleet=fleet, topic=topic, database_url=database_url, dice=random.Random(seed))
    try:
        with lab.worker("soak_writers", database_url=database_url, topic=topic, writers=_WRITERS, rate=_RATE, seed=seed) as writers:
            for name in _RELAYS:
                fleet.start(name)
            writers.go()
            _torment(bench, options.minutes * 60, seed)
            written = _result(writers)
        healed = _until_delivered(database_url, fleet)
    finally:
        fleet.stop()
    undelivered = _ask(database_url, _UNDELIVERED)[0][0]
    records = asyncio.run(_read(lab.kafka, topic))
    in_outbox = {event_id for (event_id,) in _ask(database_url, _EVENT_IDS)}
    verdict = judge(_books(written), in_outbox, records)
    figures: dict[str, Any] = {
        "seed": seed,
        "brokers": options.brokers,
        "minutes": options.minutes,
        "faults": dict(sorted(bench.faults.items())),
        **verdict.counts,
        "oldest_waited_seconds": dict(sorted(bench.waited.items())),
        "relay_log": _log_events(fleet),
        "writers_retries": written["retries"],
        "heal_seconds": round(healed, 1),
        "undelivered": undelivered,
        "outbox_updates": _ask(database_url, _UPDATES)[0][1] + _ask(database_url, _REWRITTEN)[0][0],
        "unasked_exits": len(fleet.unasked_exits),
        "violations": int(not verdict.kept),
    }
    for line in fleet.unasked_exits:
        print(line, file=sys.stderr)
    return Report(benchmark="soak", machine=machine, figures=figures), verdict.evidence


def _result(writers: Worker) -> Any:
    # Reading its result has no bound of its own: a worker that hangs is ended, and then its missing result is an error.
    limit = threading.Timer(_WRITERS_STOP_SECONDS, writers.end)
    limit.start()
    try:
        return writers.run()
    finally:
        limit.cancel()


def _books(written: Mapping[str, Any]) -> Books:
    return Books(**{name: [Event(*booked) for booked in written[name]] for name in ("committed", "rolled_back", "unknown")})


def _until_delivered(database_url: str, fleet: _Fleet) -> float:
    """Seconds until the delivery view had no row left, at most the bound."""
    begun = time.monotonic()
    while (elapsed := time.monotonic() - begun) < _HEAL_SECONDS and _ask(database_url, _UNDELIVERED)[0][0]:
        fleet.look()
        time.sleep(_TICK_SECONDS)
    return elapsed


def _ask(database_url: str, statement: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
    with psycopg.connect(database_url, autocommit=True, connect_timeout=10) as connection:
        return connection.execute(statement.encode(), parameters or None).fetchall()


def _log_events(fleet: _Fleet) -> dict[str, int]:
    """How often the relays warned of what."""
    found: Counter[str] = Counter()
    for name in _RELAYS:
        for line in fleet.log(name).read_text(errors="replace").splitlines():
            entry = json.loads(line) if line.startswith("{") and line.endswith("}") else {"level": "error", "event": "not_json"}
            if entry.get("level") in ("warning", "error", "critical"):
                found[str(entry.get("event"))] += 1
    return dict(sorted(found.items()))


def _keep_evidence(lab: Lab, database_url: str, evidence: Mapping[str, Sequence[Event]], seed: int) -> None:
    """Copy the relays' and the services' logs to a directory that stays, with the events and their receipts."""
    kept = Path(tempfile.mkdtemp(prefix=f"fencepost-soak-evidence-{seed}-"))
    logs = [*lab.logs.glob("*.log"), lab.services.postgres.log]
    for log in logs:
        (kept / log.name).write_bytes(log.read_bytes())
    for broker in lab.services.brokers:
        (kept / f"broker-{broker.node_id}.log").write_bytes(broker.log.read_bytes())
    found = {
        kind: {
            "events": events[:_EVIDENCE],
            "receipts": _ask(database_url, _RECEIPTS, [[event.event_id for event in events[:_EVIDENCE]]]) if events else [],
        }
        for kind, events in evidence.items()
    }
    (kept / "evidence.json").write_text(json.dumps(found, indent=1, default=str) + "\n")
    print(f"evidence kept in {kept}", file=sys.stderr)


# -- Kafka -----------------------------------------------------------------------------------------------------------


async def _create_topic(kafka: str, name: str, *, copies: int) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        config = {"min.insync.replicas": str(max(1, copies - 1))}
        await admin.create_topics([NewTopic(name, _PARTITIONS, copies, topic_configs=config)])
        async with asyncio.timeout(_TOPIC_SECONDS):
            while len(leaders := await _leaders(admin, name)) < _PARTITIONS or min(leaders.values()) < 0:  # noqa: ASYNC110
                await asyncio.sleep(_TICK_SECONDS)
    finally:
        await admin.close()


async def _leaders(admin: AIOKafkaAdminClient, topic: str) -> dict[int, int]:
    found = (await admin.describe_topics([topic]))[0]["partitions"]
    return {partition["partition"]: partition["leader"] for partition in found}


async def _leader_of(kafka: str, topic: str, partition: int) -> int | None:
    """None when nobody answers."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka, request_timeout_ms=_REQUEST_MILLISECONDS)
    try:
        await admin.start()
        return (await _leaders(admin, topic)).get(partition)
    except (KafkaError, OSError):
        return None
    finally:
        await admin.close()


async def _read(kafka: str, topic: str) -> list[tuple[int, Event]]:
    """(partition, event) of every record from the first offset to the end, in the order of each partition's offsets."""
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka, group_id=None, isolation_level="read_uncommitted")
    await consumer.start()
    try:
        partitions = [TopicPartition(topic, number) for number in range(_PARTITIONS)]
        consumer.assign(partitions)
        await consumer.seek_to_beginning(*partitions)
        ends = await consumer.end_offsets(partitions)
        records: list[tuple[int, int, Event]] = []
        async with asyncio.timeout(_READ_SECONDS):
            while any([await consumer.position(partition) < end for partition, end in ends.items()]):
                for found in (await consumer.getmany(timeout_ms=500)).values():
                    records += [(record.partition, record.offset, _event_of(record)) for record in found]
    finally:
        await consumer.stop()
    records.sort(key=lambda record: record[:2])
    return [(partition, event) for partition, _, event in records]


def _event_of(record: Any) -> Event:
    event_id = dict(record.headers)[wire.CE_ID].decode()
    return Event(event_id, record.key.decode(), int(record.value))
