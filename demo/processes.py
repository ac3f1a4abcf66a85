"""The processes of a run by name: as an operator runs them, with their settings in the environment and a log each.

Whatever becomes of the run, they end with it.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal, Self

from fencepost.devservices import ServicesError
from fencepost.devservices.processes import ManagedProcess, Watchdog, tail

__all__ = ["Processes", "State"]

_PREFIX: Final = "FENCEPOST_"

State = Literal["running", "frozen", "gone"]


class Processes:
    """Leaving the block stops those that still run. A name may be started again once its process is gone."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self._processes: dict[str, ManagedProcess] = {}
        self._frozen: set[str] = set()
        self._watchdog = Watchdog()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop_all()
        finally:
            self._watchdog.close()

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        settings: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Python with these arguments. A setting ``LEASE_SECONDS`` becomes ``FENCEPOST_LEASE_SECONDS``; none is inherited."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(_PREFIX)}
        chosen = {f"{_PREFIX}{key}": str(value) for key, value in (settings or {}).items()}
        process = ManagedProcess(
            name,
            [sys.executable, *arguments],
            self.log(name),
            self._watchdog,
            environment={**inherited, **chosen, **(environment or {})},
        )
        process.start()
        self._processes[name] = process

    def kill(self, name: str) -> None:
        """kill -9: no goodbye, nothing released, whatever was in flight is left as it is."""
        self._processes.pop(name).kill()
        self._frozen.discard(name)

    def stop(self, *names: str) -> None:
        """SIGTERM, all at once, and wait. Those that are gone are gone."""
        stopping = [self._processes.pop(name) for name in names if name in self._processes]
        with ThreadPoolExecutor() as pool:
            list(pool.map(ManagedProcess.stop, stopping))
        self._frozen.difference_update(names)

    def stop_all(self) -> None:
        """All that still run."""
        self.stop(*self._processes)

    def freeze(self, name: str) -> None:
        """SIGSTOP: it stands still and does not know it."""
        self._processes[name].pause()
        self._frozen.add(name)

    def thaw(self, name: str) -> None:
        """SIGCONT: it goes on where it was, as if no time had passed."""
        self._processes[name].resume()
        self._frozen.discard(name)

    def state(self, name: str) -> State:
        """What became of it, by whoever runs it."""
        if name not in self._processes:
            return "gone"
        return "frozen" if name in self._frozen else "running"

    def pid(self, name: str) -> int:
        """Its process id, for whoever wants to kill it by hand."""
        return self._processes[name].pid

    def has_ended(self, name: str) -> bool:
        """Whether it was started and has ended by itself, or by somebody else's hand."""
        return name in self._processes and not self._processes[name].running

    def check(self) -> None:
        """Raise if one ended that nobody has ended."""
        for name, process in list(self._processes.items()):
            if not process.running:
                raise ServicesError(f"{name} ended by itself; its log ends:\n{tail(self.log(name))}")

    def log(self, name: str) -> Path:
        """Where it writes what it has to say."""
        return self.logs / f"{name}.log"
