"""Ends what a run started once the run itself is gone, however it went.

Runs as a process of its own with a pipe from the run as standard input. The run names each process it starts; when
the pipe closes, everything named and not yet released is ended. A process is known by its id and its start time, so
an id that the system gave to somebody else in the meantime is left alone.
"""

import os
import select
import shutil
import signal
import sys
from typing import Final

import psutil

# The pipe may be held open by a fork of the run that outlives it, so the parent is looked at as well.
PARENT_CHECK_SECONDS: Final = 1.0
# What a process gets to end by its own signal before it is killed.
GRACE_SECONDS: Final = 5.0
READ_BYTES: Final = 65_536


class Guarded:
    """What to end and what to remove when the run is gone."""

    def __init__(self) -> None:
        self.processes: dict[int, tuple[psutil.Process, int]] = {}
        self.directories: list[str] = []

    def obey(self, line: str) -> None:
        """Take one line of the protocol: `guard PID SIGNAL`, `release PID` or `remove DIRECTORY`."""
        verb, _, rest = line.partition(" ")
        if verb == "guard":
            pid, signal_number = (int(part) for part in rest.split())
            try:
                self.processes[pid] = (psutil.Process(pid), signal_number)
            except psutil.NoSuchProcess:
                return
        elif verb == "release":
            self.processes.pop(int(rest), None)
        elif verb == "remove":
            self.directories.append(rest)

    def end_all(self) -> None:
        """End every guarded process, then remove the directories."""
        everyone = [member for process, _ in self.processes.values() for member in _family(process)]
        for process, signal_number in self.processes.values():
            _signal(process, signal_number)
        # A frozen process takes its signal only once it goes on.
        for process in everyone:
            _signal(process, signal.SIGCONT)
        _, alive = psutil.wait_procs(everyone, timeout=GRACE_SECONDS)
        for process in alive:
            _signal(process, signal.SIGKILL)
        psutil.wait_procs(alive, timeout=GRACE_SECONDS)
        for directory in self.directories:
            shutil.rmtree(directory, ignore_errors=True)


def _family(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _signal(process: psutil.Process, signal_number: int) -> None:
    try:
        process.send_signal(signal_number)
    except psutil.NoSuchProcess:
        return


def main() -> None:
    """Follow the run until its pipe closes or it is no longer the parent."""
    guarded = Guarded()
    parent = int(sys.argv[1])
    pending = b""
    while True:
        orphaned = os.getppid() != parent
        # What the run wrote before it died still counts, so the pipe is emptied first.
        ready, _, _ = select.select([0], [], [], 0 if orphaned else PARENT_CHECK_SECONDS)
        received = os.read(0, READ_BYTES) if ready else None
        if received:
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                guarded.obey(line.decode())
        elif orphaned or received is not None:
            break
    guarded.end_all()


if __name__ == "__main__":
    main()
