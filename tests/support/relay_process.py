"""A relay as an operator runs it: a process of its own, set up by its environment, seen by HTTP, metrics and log."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from fencepost.devservices import free_port
from fencepost.devservices.processes import Watchdog
from tests.support.service_process import ServiceProcess, Setting

__all__ = ["RelayFactory", "RelayProcess", "Setting"]

RelayFactory = Callable[..., "RelayProcess"]


class RelayProcess(ServiceProcess):
    """`fencepost relay run` with its settings: `lease_seconds=5` becomes `FENCEPOST_LEASE_SECONDS=5`."""

    program: ClassVar[Sequence[str]] = ("-m", "fencepost", "relay", "run")

    def __init__(self, database_url: str, kafka: str, *, log: Path, watchdog: Watchdog, **settings: Setting) -> None:
        port = int(settings.pop("http_port", 0)) or free_port()
        chosen = settings | {"database_url": database_url, "kafka_bootstrap_servers": kafka, "http_port": port}
        super().__init__(self.program, chosen, http_port=port, log=log, watchdog=watchdog, environment={})
