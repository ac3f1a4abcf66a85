"""A service of Fencepost as an operator runs it: a process of its own, set up by its environment, seen by HTTP, metrics and log."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from fencepost.devservices.processes import Watchdog, tail
from tests.support.waiting import eventually

READY_SECONDS: Final = 30.0
END_SECONDS: Final = 30.0
KILL_SECONDS: Final = 10.0
HTTP_SECONDS: Final = 5.0

Setting = str | int | float | bool


class ServiceProcess:
    """A process with its settings: `lease_seconds=5` becomes `FENCEPOST_LEASE_SECONDS=5`. ``environment`` is added as it is.

    Signals return at once; what waits is awaited.
    """

    def __init__(
        self,
        program: Sequence[str],
        settings: Mapping[str, Setting],
        *,
        http_port: int,
        log: Path,
        watchdog: Watchdog,
        environment: Mapping[str, str],
    ) -> None:
        self.http_port = http_port
        self.log = log
        self._watchdog = watchdog
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *program],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                env=_environment(settings) | dict(environment),
                start_new_session=True,
            )
        watchdog.guard(self._process.pid, signal.SIGKILL)

    @property
    def pid(self) -> int:
        """Process id of the service."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the service has not ended."""
        return self._process.poll() is None

    @property
    def url(self) -> str:
        """Where the service answers by HTTP, without a path."""
        return f"http://127.0.0.1:{self.http_port}"

    async def wait_ready(self, timeout: float = READY_SECONDS) -> None:  # noqa: ASYNC109 - each wait is bounded
        """Wait until /readyz answers 200; fail with the end of the log if the service ends or the time is over."""
        async with httpx.AsyncClient(timeout=HTTP_SECONDS) as client:

            async def ready() -> bool:
                if not self.running:
                    raise RuntimeError(f"the service ended with {self._process.returncode}; its log ends:\n{tail(self.log)}")
                with contextlib.suppress(httpx.HTTPError):
                    return (await client.get(f"{self.url}/readyz")).status_code == httpx.codes.OK
                return False

            try:
                await eventually(ready, timeout, message="the service is ready")
            except AssertionError as error:
                raise AssertionError(f"{error}; its log ends:\n{tail(self.log)}") from None

    async def metrics(self) -> dict[str, float]:
        """Return every sample of /metrics: `name` or `name{label="value"}` with the labels in order of their names."""
        async with httpx.AsyncClient(timeout=HTTP_SECONDS) as client:
            answer = await client.get(f"{self.url}/metrics")
        answer.raise_for_status()
        families = text_string_to_metric_families(answer.text)
        return {_key(sample.name, sample.labels): sample.value for family in families for sample in family.samples}

    async def wait(self, timeout: float = END_SECONDS) -> int:  # noqa: ASYNC109 - each wait is bounded
        """Wait for the service's end and return its exit code."""
        await eventually(lambda: not self.running, timeout, message="the service has ended")
        self._watchdog.release(self.pid)
        return self._process.wait()

    def terminate(self) -> None:
        """Ask the service to end in order (SIGTERM)."""
        self._process.terminate()

    def kill(self) -> None:
        """End the service as a crash would (SIGKILL) and wait for its end, which is immediate."""
        self._process.kill()
        self._process.wait(KILL_SECONDS)
        self._watchdog.release(self.pid)

    def pause(self) -> None:
        """Freeze the service (SIGSTOP)."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a frozen service go on (SIGCONT)."""
        self._process.send_signal(signal.SIGCONT)


def _environment(settings: Mapping[str, Setting]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FENCEPOST_")}
    return kept | {f"FENCEPOST_{name.upper()}": _text(value) for name, value in settings.items()}


def _text(value: Setting) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _key(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return f"{name}{{{inside}}}" if inside else name
