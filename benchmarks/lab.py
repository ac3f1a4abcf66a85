"""The bench: services, databases, topics, processes and their CPU time. Everything it starts ends with it."""

import asyncio
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

import psutil
import psycopg
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from fencepost.devservices import Services, free_port, start_services
from fencepost.devservices.pins import KAFKA_VERSION
from fencepost.devservices.processes import Watchdog, tail
from migrations import migrate

__all__ = ["BenchmarkFailed", "Lab", "Service", "Worker", "cpu_seconds", "open_lab"]

_READY_SECONDS: Final = 60.0
_RESULT_SECONDS: Final = 900.0
_STOP_SECONDS: Final = 30.0
_TICK_SECONDS: Final = 0.05
_MIB: Final = 1024 * 1024


class BenchmarkFailed(RuntimeError):
    """A side of the benchmark did not do its work; its numbers would mean nothing."""


class Lab:
    """Services of this run, and the processes on them."""

    def __init__(self, services: Services, logs: Path, watchdog: Watchdog) -> None:
        self.services = services
        self.logs = logs
        self.watchdog = watchdog

    @property
    def kafka(self) -> str:
        return self.services.bootstrap_servers

    @contextmanager
    def database(self, template: str | None = None) -> Iterator[str]:
        """A migrated database of its own, or a copy of ``template``, to which nobody may be connected."""
        url = self.services.create_database(template)
        try:
            if template is None:
                asyncio.run(migrate(url))
            yield url
        finally:
            self.services.drop_database(url)

    def topic(self, partitions: int) -> str:
        """A new topic whose partitions have leaders."""
        name = f"bench-{uuid.uuid4().hex[:8]}"
        asyncio.run(_create_topic(self.kafka, name, partitions))
        return name

    def records_on(self, topic: str, partitions: int) -> int:
        """How many records the topic holds."""
        return asyncio.run(_records_on(self.kafka, topic, partitions))

    @contextmanager
    def relay(self, database_url: str, **settings: object) -> Iterator["Service"]:
        """A relay that is ready; stopped in order at the end of the block."""
        chosen = {"database_url": database_url, "kafka_bootstrap_servers": self.kafka, **settings}
        with Service(self, "relay", ["relay", "run"], chosen, port_setting="http_port") as relay:
            yield relay

    @contextmanager
    def job_worker(self, database_url: str, handlers: str, **settings: object) -> Iterator["Service"]:
        """A worker of runs that is ready; stopped in order at the end of the block."""
        chosen = {"database_url": database_url, **settings}
        with Service(self, "worker", ["worker", "run", handlers], chosen, port_setting="worker_http_port") as worker:
            yield worker

    @contextmanager
    def worker(self, name: str, **parameters: object) -> Iterator["Worker"]:
        """A process of ``benchmarks.workers`` that waits for its start signal."""
        worker = Worker(self, name, parameters)
        try:
            worker.wait_ready()
            yield worker
        finally:
            worker.end()

    def postgres_cpu(self) -> float | None:
        """CPU seconds of the database server with all its backends, ended ones included; None where it is not local."""
        return _family_cpu(self.services.postgres.pid) if self.services.kind == "local" else None

    def kafka_cpu(self) -> float | None:
        """CPU seconds of the broker; None where it is not local."""
        return cpu_seconds(self.services.broker.pid) if self.services.kind == "local" else None

    def machine(self) -> dict[str, Any]:
        """What the numbers were taken on."""
        with psycopg.connect(self.services.database_url) as connection:
            postgres = connection.execute("SHOW server_version").fetchone()
        return {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "postgres": postgres[0].split()[0] if postgres else "unknown",
            "kafka": KAFKA_VERSION if self.services.kind == "local" else "unknown",
            "services": self.services.kind,
            "load_at_start": round(os.getloadavg()[0], 1),
        }


class Service:
    """A service of ``fencepost`` as a process of its own. ``settings`` are named as in its environment, without the prefix."""

    def __init__(self, lab: Lab, name: str, arguments: Sequence[str], settings: Mapping[str, object], *, port_setting: str) -> None:
        self._name = name
        self._port = free_port()
        self._log = lab.logs / f"{name}-{self._port}.log"
        chosen = {port_setting: self._port, **settings}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FENCEPOST_")}
        environment |= {f"FENCEPOST_{name.upper()}": str(value) for name, value in chosen.items()}
        self._process = _start(lab, [sys.executable, "-m", "fencepost", *arguments], self._log, env=environment)

    def __enter__(self) -> Self:
        """Returns when it is ready."""
        try:
            self._wait_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu(self) -> float:
        return cpu_seconds(self.pid)

    def rss_mib(self) -> float:
        return float(psutil.Process(self.pid).memory_info().rss) / _MIB

    def check(self) -> None:
        """Raise if it has ended."""
        if self._process.poll() is not None:
            raise BenchmarkFailed(f"the {self._name} ended with {self._process.returncode}; its log ends:\n{tail(self._log)}")

    def log_tail(self) -> str:
        """The last lines of its log."""
        return tail(self._log)

    def _wait_ready(self) -> None:
        """Until database and broker answer it."""
        deadline = time.monotonic() + _READY_SECONDS
        while not self._is_ready():
            self.check()
            if time.monotonic() > deadline:
                raise BenchmarkFailed(f"the {self._name} was not ready in time; its log ends:\n{tail(self._log)}")
            time.sleep(_TICK_SECONDS)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _stop(self) -> None:
        _stop(self._process)


class Worker:
    """Prints READY, waits for a line, works, prints one JSON document."""

    def __init__(self, lab: Lab, name: str, parameters: Mapping[str, object]) -> None:
        self._name = name
        self._log = lab.logs / f"{name}.log"
        command = [sys.executable, "-m", f"benchmarks.workers.{name}", json.dumps({"kafka": lab.kafka, **parameters})]
        self._process = _start(lab, command, self._log, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "READY":
            raise BenchmarkFailed(f"{self._name} did not start; its log ends:\n{tail(self._log)}")

    def go(self) -> None:
        """Begin; for a consumer, end."""
        assert self._process.stdin is not None
        self._process.stdin.write("GO\n")
        self._process.stdin.flush()

    def result(self) -> Any:
        """Wait for what it found."""
        assert self._process.stdout is not None
        text = self._process.stdout.read()
        if self._process.wait(_STOP_SECONDS) or not text:
            raise BenchmarkFailed(f"{self._name} failed; its log ends:\n{tail(self._log)}")
        return json.loads(text)

    def run(self) -> Any:
        """Begin, and wait for what it found."""
        self.go()
        return self.result()

    def end(self) -> None:
        _stop(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


@contextmanager
def open_lab() -> Iterator[Lab]:
    """Start the services; stop them and every process at the end."""
    watchdog = Watchdog()
    try:
        with tempfile.TemporaryDirectory(prefix="fencepost-bench-") as logs, start_services() as services:
            yield Lab(services, Path(logs), watchdog)
    finally:
        watchdog.close()


def cpu_seconds(pid: int) -> float:
    """User and system time of one process."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _family_cpu(pid: int) -> float:
    parent = psutil.Process(pid)
    own = parent.cpu_times()
    total = float(own.user + own.system + own.children_user + own.children_system)
    for child in parent.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += cpu_seconds(child.pid)
    return total


def _start(lab: Lab, command: list[str], log: Path, **options: Any) -> "subprocess.Popen[Any]":
    with log.open("ab") as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, **options}
        process = subprocess.Popen(command, start_new_session=True, **streams)
    lab.watchdog.guard(process.pid, signal.SIGKILL)
    return process


def _stop(process: "subprocess.Popen[Any]") -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def _create_topic(kafka: str, name: str, partitions: int) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(name, partitions, 1)])
        async with asyncio.timeout(_READY_SECONDS):
            await _until_led(admin, name, partitions)
    finally:
        await admin.close()


async def _until_led(admin: AIOKafkaAdminClient, name: str, partitions: int) -> None:
    while True:
        found = (await admin.describe_topics([name]))[0]["partitions"]
        if len(found) == partitions and all(partition["leader"] >= 0 for partition in found):
            return
        await asyncio.sleep(_TICK_SECONDS)


async def _records_on(kafka: str, topic: str, partitions: int) -> int:
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka, group_id=None)
    await consumer.start()
    try:
        ends = await consumer.end_offsets([TopicPartition(topic, number) for number in range(partitions)])
        return sum(ends.values())
    finally:
        await consumer.stop()


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
