"""A consumer as an operator runs it, in a process of its own, with the handlers of consumer_handlers.py."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fencepost.devservices import free_port
from fencepost.devservices.processes import Watchdog
from tests.support.consumers import SECRETS, Stage
from tests.support.service_process import ServiceProcess, Setting

__all__ = ["SESSION_SECONDS", "ConsumerProcess", "ConsumerProcesses"]

#: After this silence a member's partitions move. No broker takes less by default.
SESSION_SECONDS: Final = 6
_ROOT: Final = Path(__file__).resolve().parents[2]
_RUN: Final = ("-m", "fencepost", "consumer", "run", "tests.support.consumer_handlers:app")


class ConsumerProcess(ServiceProcess):
    """A consumer, with its log."""

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The log's entries of one event."""
        lines = self.log.read_text().split("\n")[:-1]
        entries = [json.loads(line) for line in lines if line.startswith("{")]
        return [entry for entry in entries if entry["event"] == event]


class ConsumerProcesses:
    """Starts consumers of a stage. ``crash`` is where one ends itself: place, before or after, and which time."""

    def __init__(self, made: Stage, directory: Path, watchdog: Watchdog) -> None:
        self._stage = made
        self._directory = directory
        self._watchdog = watchdog
        self._started: list[ConsumerProcess] = []

    def start(self, *, crash: tuple[str, str, int] | None = None, settings: Mapping[str, Setting] | None = None) -> ConsumerProcess:
        port = free_port()
        given: dict[str, Setting] = {
            "database_url": self._stage.database_url,
            "kafka_bootstrap_servers": self._stage.kafka,
            "consumer_topics": self._stage.topic,
            "consumer_group": self._stage.topic,
            "consumer_http_port": port,
            "consumer_commit_interval_ms": 100,
            "consumer_session_timeout_seconds": SESSION_SECONDS,
            "consumer_rebalance_grace_seconds": 2,
            "worker_lease_seconds": 2,
            "worker_lease_margin_seconds": 0.5,
        }
        crashing = () if crash is None else ("-m", "tests.support.crashing_consumer", *map(str, crash))
        process = ConsumerProcess(
            crashing or _RUN,
            given | dict(settings or {}),
            http_port=port,
            log=self._directory / f"consumer-{len(self._started)}.log",
            watchdog=self._watchdog,
            environment={"FENCEPOST_IDEMPOTENCY_SECRETS": SECRETS, "PYTHONPATH": str(_ROOT)},
        )
        self._started.append(process)
        return process

    def kill_all(self) -> None:
        """End all that still run."""
        for process in self._started:
            if process.running:
                process.resume()
                process.kill()
