"""A local Apache Kafka: one or several KRaft nodes, each broker and controller, on the JDK of a wheel.

A broker keeps its ports and data when it is stopped and started again. Ready means that the cluster itself names the
broker as one of its members.
"""

import asyncio
import base64
import os
import signal
import subprocess
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fencepost.devservices.errors import ServicesError
from fencepost.devservices.java import java_executable, kafka_jars
from fencepost.devservices.processes import ManagedProcess, Watchdog, accepts_connections, free_port, tail

START_SECONDS: Final = 90.0
FORMAT_SECONDS: Final = 60.0
REQUEST_MILLISECONDS: Final = 5_000
MOST_BROKERS: Final = 5

HEAP: Final = ("-Xms256m", "-Xmx512m", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20")
# The formatting tool lives for a second: no time for an optimising compiler.
TOOL_OPTIONS: Final = ("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")

LOGGING: Final = """\
rootLogger.level=info
rootLogger.appenderRef.console.ref=console
appender.console.type=Console
appender.console.name=console
appender.console.layout.type=PatternLayout
appender.console.layout.pattern=%d{ISO8601} %p %m (%c{1})%n
logger.config.name=org.apache.kafka.common.config.AbstractConfig
logger.config.level=warn
"""


@dataclass(frozen=True)
class Node:
    """The identity and the ports of one node."""

    number: int
    port: int
    controller_port: int


def cluster_properties(brokers: int) -> dict[str, str]:
    """Return the settings that every node of a cluster of this size has."""
    copies = min(brokers, 3)
    in_sync = max(1, copies - 1)
    return {
        "process.roles": "broker,controller",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "auto.create.topics.enable": "false",
        "num.partitions": "8",
        "default.replication.factor": str(copies),
        "min.insync.replicas": str(in_sync),
        # The internal topics: few partitions and as many copies as there are brokers for.
        "offsets.topic.num.partitions": "4",
        "offsets.topic.replication.factor": str(copies),
        "transaction.state.log.num.partitions": "4",
        "transaction.state.log.replication.factor": str(copies),
        "transaction.state.log.min.isr": str(in_sync),
        "share.coordinator.state.topic.num.partitions": "1",
        "share.coordinator.state.topic.replication.factor": str(copies),
        "share.coordinator.state.topic.min.isr": str(in_sync),
        # A consumer group doesn't wait for members that might come.
        "group.initial.rebalance.delay.ms": "0",
        # A killed broker may register again when its old session is over, so that session is short.
        "broker.heartbeat.interval.ms": "500",
        "broker.session.timeout.ms": "3000",
        # The default takes a quarter of this heap.
        "log.cleaner.dedupe.buffer.size": "8388608",
    }


def node_properties(node: Node, voters: list[Node], logs: Path) -> dict[str, str]:
    """Return the settings of one node: who it is, where it listens, who votes."""
    return {
        "node.id": str(node.number),
        "controller.quorum.voters": ",".join(f"{one.number}@127.0.0.1:{one.controller_port}" for one in voters),
        "listeners": f"PLAINTEXT://127.0.0.1:{node.port},CONTROLLER://127.0.0.1:{node.controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{node.port}",
        "log.dirs": str(logs),
    }


class Broker:
    """One node of the cluster."""

    def __init__(self, node: Node, process: ManagedProcess) -> None:
        self._node = node
        self._process = process

    @property
    def address(self) -> str:
        """Host and port that clients connect to."""
        return f"127.0.0.1:{self._node.port}"

    @property
    def node_id(self) -> int:
        """The broker's id in the cluster's metadata."""
        return self._node.number

    @property
    def pid(self) -> int:
        """Process id of the broker's Java."""
        return self._process.pid

    @property
    def log(self) -> Path:
        """The broker's log file."""
        return self._process.log

    def start(self) -> None:
        """Start the broker on its ports and data, and wait until the cluster counts it as a member."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start the broker without waiting: the first nodes of a cluster need one another to become ready."""
        self._process.start()

    def wait_ready(self) -> None:
        """Wait until the cluster counts this broker as a member."""
        self._process.wait_until(self._is_member, timeout_seconds=START_SECONDS)

    def stop(self) -> None:
        """Stop the broker in order (SIGTERM) and wait for its end."""
        self._process.stop()

    def kill(self) -> None:
        """End the broker as a crash would (SIGKILL)."""
        self._process.kill()

    def pause(self) -> None:
        """Freeze the broker (SIGSTOP): its connections stay open and nobody answers."""
        self._process.pause()

    def resume(self) -> None:
        """Let a frozen broker go on (SIGCONT)."""
        self._process.resume()

    def _is_member(self) -> bool:
        return accepts_connections(self._node.port) and self._node.number in members(self.address)


class LocalKafka:
    """The cluster of this run."""

    def __init__(self, directory: Path, watchdog: Watchdog, brokers: int) -> None:
        if not 1 <= brokers <= MOST_BROKERS:
            raise ServicesError(f"a local cluster has 1 to {MOST_BROKERS} brokers, not {brokers}")
        self._java = java_executable()
        self._jars = kafka_jars()
        self._nodes = [Node(number, free_port(), free_port()) for number in range(1, brokers + 1)]
        self._homes = {node.number: directory / f"kafka-{node.number}" for node in self._nodes}
        self.brokers = [Broker(node, self._process(node, watchdog)) for node in self._nodes]

    @property
    def bootstrap_servers(self) -> str:
        """The addresses of all brokers, separated by commas."""
        return ",".join(broker.address for broker in self.brokers)

    def create(self) -> None:
        """Format the nodes, start them together and wait until the cluster is complete."""
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        with ThreadPoolExecutor(len(self._nodes)) as pool:
            list(pool.map(lambda node: self._format(node, cluster), self._nodes))
        for broker in self.brokers:
            broker.launch()
        for broker in self.brokers:
            broker.wait_ready()

    def stop(self) -> None:
        """Stop every broker that runs, all at once: the last ones would have no quorum to leave in order."""
        with ThreadPoolExecutor(len(self.brokers)) as pool:
            list(pool.map(lambda broker: broker.stop(), self.brokers))

    def _format(self, node: Node, cluster: str) -> None:
        home = self._homes[node.number]
        home.mkdir()
        (home / "log4j2.properties").write_text(LOGGING)
        properties = cluster_properties(len(self._nodes)) | node_properties(node, self._nodes, home / "data")
        _write_properties(home / "server.properties", properties)
        tool = self._command(home, TOOL_OPTIONS, "kafka.tools.StorageTool")
        tool += ["format", f"--cluster-id={cluster}", "--config", str(home / "server.properties")]
        with (home / "format.log").open("wb") as log:
            done = subprocess.run(tool, stdout=log, stderr=subprocess.STDOUT, timeout=FORMAT_SECONDS, check=False)
        if done.returncode != 0:
            raise ServicesError(f"Kafka's storage could not be formatted:\n{tail(home / 'format.log')}")

    def _process(self, node: Node, watchdog: Watchdog) -> ManagedProcess:
        home = self._homes[node.number]
        return ManagedProcess(
            name=f"Kafka broker {node.number}",
            command=[*self._command(home, HEAP, "kafka.Kafka"), str(home / "server.properties")],
            log=home / "kafka.log",
            watchdog=watchdog,
            stop_signal=signal.SIGTERM,
            environment=dict(os.environ),
        )

    def _command(self, home: Path, options: tuple[str, ...], main_class: str) -> list[str]:
        logging = f"-Dlog4j2.configurationFile={home / 'log4j2.properties'}"
        return [self._java, *options, logging, "-cp", f"{self._jars}/*", main_class]


def members(bootstrap_servers: str) -> set[int]:
    """Ask the cluster for the ids of its live brokers; empty when it gives no answer."""
    # A thread of its own: the caller may be inside an event loop.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(_members(bootstrap_servers))).result()


async def _members(bootstrap_servers: str) -> set[int]:
    from aiokafka.admin import AIOKafkaAdminClient
    from aiokafka.errors import KafkaError

    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers, request_timeout_ms=REQUEST_MILLISECONDS)
    try:
        await admin.start()
        cluster = await admin.describe_cluster()
    except (KafkaError, OSError):
        return set()
    finally:
        await admin.close()
    return {broker["node_id"] for broker in cluster["brokers"]}


def _write_properties(path: Path, properties: Mapping[str, str]) -> None:
    path.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
