"""A consumer as an operator runs it, in a process of its own, with the handlers of consumer_handlers.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fencepost.devservices import free_port
from fencepost.devservices.processes import Watchdog
from tests.support.consumers import SECRETS, Stage
from tests.support.service_process import ServiceProcess, Setting

__all__ = ["ConsumerProcesses"]

_ROOT: Final = Path(__file__).resolve().parents[2]


class ConsumerProcesses:
    """Starts consumers of a stage. ``crash`` is where one ends itself: place, before or after, and which time."""

    def __init__(self, made: Stage, directory: Path, watchdog: Watchdog) -> None:
        self._stage = made
        self._directory = directory
        self._watchdog = watchdog
        self._started: list[ServiceProcess] = []

    def start(
        self, *, crash: tuple[str, str, int] = ("nowhere", "before", 0), settings: Mapping[str, Setting] | None = None
    ) -> ServiceProcess:
        port = free_port()
        given: dict[str, Setting] = {
            "database_url": self._stage.database_url,
            "kafka_bootstrap_servers": self._stage.kafka,
            "consumer_topics": self._stage.topic,
            "consumer_group": self._stage.topic,
            "consumer_http_port": port,
            "consumer_commit_interval_ms": 100,
            "consumer_session_timeout_seconds": 6,
            "consumer_rebalance_grace_seconds": 2,
            "worker_lease_seconds": 2,
            "worker_lease_margin_seconds": 0.5,
        }
        process = ServiceProcess(
            ["-m", "tests.support.crashing_consumer", crash[0], crash[1], str(crash[2])],
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
