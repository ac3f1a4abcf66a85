"""Child processes of a run: started with a log file, ended by their own id, never by name.

Each child is named to a watchdog process before anything else happens to it, so it ends with the run even when the
run is killed. Waiting is always bounded, and an error shows the end of the child's log.
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import IO, Final, TypedDict

import psutil

from fencepost.devservices import watchdog
from fencepost.devservices.errors import ServicesError

# Below the range that systems hand out for outgoing connections: a port stays free while its service is stopped, and
# a client that retries a stopped service can't connect to itself.
PORTS: Final = range(20_000, 32_000)
PORT_ATTEMPTS: Final = 200

POLL_SECONDS: Final = 0.05
STOP_SECONDS: Final = 30.0
KILL_SECONDS: Final = 10.0
LOG_TAIL_LINES: Final = 25


def free_port() -> int:
    """Find a port of 127.0.0.1 that nothing listens on now."""
    for _ in range(PORT_ATTEMPTS):
        # Not the module random: test processes that are seeded alike would all try the same ports at the same time.
        port = secrets.choice(PORTS)
        with contextlib.closing(socket.socket()) as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise ServicesError(f"no free port between {PORTS.start} and {PORTS.stop}; close some of what listens there")


def accepts_connections(port: int) -> bool:
    """Whether something listens on this port of 127.0.0.1."""
    with contextlib.closing(socket.socket()) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    """Return the last lines of a log file, or say that it is empty."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"


@dataclass(frozen=True)
class Account:
    """A user that a child runs as."""

    name: str
    uid: int
    gid: int


class Watchdog:
    """The run's end of the watchdog process: names what to end and what to remove if the run dies."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-P", watchdog.__file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Process id of the watchdog itself."""
        return self._process.pid

    def guard(self, pid: int, end_signal: signal.Signals) -> None:
        """From now on, end this process by this signal when the run is gone."""
        self._tell(f"guard {pid} {end_signal.value}")

    def release(self, pid: int) -> None:
        """The process has ended and its id may be used again."""
        self._tell(f"release {pid}")

    def remove(self, directory: Path) -> None:
        """Remove this directory when the run is gone."""
        self._tell(f"remove {directory}")

    def close(self) -> None:
        """Let the watchdog end what is left, and wait for it."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._input.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(KILL_SECONDS)

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _tell(self, line: str) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            self._input.write(f"{line}\n".encode())
            self._input.flush()


@dataclass
class ManagedProcess:
    """A service's process: can be started again with the same command after it ended."""

    name: str
    command: Sequence[str]
    log: Path
    watchdog: Watchdog
    stop_signal: signal.Signals = signal.SIGTERM
    # How the watchdog ends it: quickly, and without leaving children or shared memory behind.
    crash_signal: signal.Signals = signal.SIGKILL
    account: Account | None = None
    environment: Mapping[str, str] | None = None
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)

    @property
    def pid(self) -> int:
        """Process id of the running process."""
        return self._running().pid

    @property
    def running(self) -> bool:
        """Whether the process was started and hasn't ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process; its output is appended to the log."""
        if self.running:
            raise ServicesError(f"{self.name} is already running")
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                list(self.command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.log.parent,
                env=self.environment,
                start_new_session=True,
                **credentials(self.account),
            )
        self.watchdog.guard(self._process.pid, self.crash_signal)

    def stop(self, stop_signal: signal.Signals | None = None) -> None:
        """Ask the process to end and wait; kill it if it doesn't. Nothing happens if it has ended already."""
        if not self.running:
            self._forget()
            return
        self.resume()
        self._running().send_signal(stop_signal or self.stop_signal)
        try:
            self._running().wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._running().kill()
            self._running().wait(KILL_SECONDS)
        self._forget()

    def kill(self) -> None:
        """End the process by SIGKILL, as a crash would."""
        self._running().kill()
        self._running().wait(KILL_SECONDS)
        self._forget()

    def pause(self) -> None:
        """Freeze the process and its children (SIGSTOP)."""
        self._signal_family(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a frozen process and its children go on (SIGCONT)."""
        self._signal_family(signal.SIGCONT)

    def wait_until(self, ready: Callable[[], bool], *, timeout_seconds: float) -> None:
        """Wait until `ready` is true; raise with the end of the log if the process ends or the time is over."""
        deadline = time.monotonic() + timeout_seconds
        while not ready():
            if not self.running:
                raise ServicesError(f"{self.name} ended while it started; its log {self.log} ends:\n{tail(self.log)}")
            if time.monotonic() > deadline:
                raise ServicesError(
                    f"{self.name} was not ready after {timeout_seconds:.0f} s; try again on a less busy machine. "
                    f"Its log {self.log} ends:\n{tail(self.log)}"
                )
            time.sleep(POLL_SECONDS)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServicesError(f"{self.name} is not running; start it first")
        return self._process

    def _forget(self) -> None:
        if self._process is not None:
            self.watchdog.release(self._process.pid)
            self._process = None

    def _signal_family(self, signal_number: signal.Signals) -> None:
        # The process before its children: a frozen parent starts no child that the list would miss.
        process = psutil.Process(self._running().pid)
        process.send_signal(signal_number)
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal_number)


class Credentials(TypedDict, total=False):
    """The arguments of Popen that make a child another user's."""

    user: int
    group: int
    extra_groups: list[int]


def credentials(account: Account | None) -> Credentials:
    """Return what Popen needs to run a child as this account, and nothing for the account of the run itself."""
    return Credentials(user=account.uid, group=account.gid, extra_groups=[]) if account else Credentials()
