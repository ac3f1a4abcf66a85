"""A worker as an operator runs it: `fencepost worker run` in a process of its own, with the handlers of worker_handlers.py."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from fencepost.devservices import free_port
from fencepost.devservices.processes import Watchdog
from tests.support.service_process import ServiceProcess, Setting
from tests.support.worker_handlers import STAGE_URL

__all__ = ["HANDLERS", "WorkerFactory", "WorkerProcess"]

HANDLERS: Final = "tests.support.worker_handlers:handlers"
_ROOT: Final = Path(__file__).resolve().parents[2]


#: ``start_worker(database_url, lease_seconds=1)``; ``stage_url`` is where the handlers' barriers are, if elsewhere.
WorkerFactory = Callable[..., "WorkerProcess"]


class WorkerProcess(ServiceProcess):
    """The worker's own settings without their prefix: ``lease_seconds=5`` becomes ``FENCEPOST_WORKER_LEASE_SECONDS=5``."""

    def __init__(
        self, database_url: str, *, stage_url: str, handlers: str, log: Path, watchdog: Watchdog, **settings: Setting
    ) -> None:
        port = free_port()
        chosen = {f"worker_{name}": value for name, value in (settings | {"http_port": port}).items()}
        super().__init__(
            ("-m", "fencepost", "worker", "run", handlers),
            chosen | {"database_url": database_url},
            http_port=port,
            log=log,
            watchdog=watchdog,
            environment={"PYTHONPATH": str(_ROOT), STAGE_URL: stage_url},
        )

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The log's entries of one event."""
        lines = self.log.read_text().split("\n")[:-1]
        entries = [json.loads(line) for line in lines if line.startswith("{")]
        return [entry for entry in entries if entry["event"] == event]
