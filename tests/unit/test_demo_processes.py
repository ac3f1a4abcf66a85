"""The demo's processes: what is done to them by name, and that none outlives the run or ends unnoticed."""

from pathlib import Path
from typing import Final

import psutil
import pytest

from demo.processes import Processes
from fencepost.devservices import ServicesError
from tests.support.waiting import eventually

SLEEPS: Final = ("-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)")


async def started(processes: Processes, name: str) -> psutil.Process:
    """The process behind the name, which has begun."""
    processes.start(name, SLEEPS)
    text = await eventually(lambda: processes.log(name).read_text().split(), message="it runs")
    return psutil.Process(int(text[-1]))


async def test_a_process_is_frozen_thawed_killed_and_started_again_by_its_name(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        first = await started(processes, "a")
        assert processes.state("a") == "running"
        processes.freeze("a")
        assert processes.state("a") == "frozen"
        await eventually(lambda: first.status() == psutil.STATUS_STOPPED)  # the kernel delivers a signal a moment later
        processes.thaw("a")
        assert processes.state("a") == "running"
        await eventually(lambda: first.status() == psutil.STATUS_SLEEPING)
        processes.kill("a")
        assert (processes.state("a"), first.is_running()) == ("gone", False)
        processes.check()
        processes.start("a", SLEEPS)
        assert processes.state("a") == "running"


async def test_what_still_runs_is_stopped_at_the_end_even_if_it_is_frozen(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        left = [await started(processes, "a"), await started(processes, "b")]
        processes.freeze("b")

    assert not any(process.is_running() for process in left)


async def test_a_process_that_ends_by_itself_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("a", ["-c", "import sys; sys.exit('out of paper')"])

        def told() -> bool:
            try:
                processes.check()
            except ServicesError as error:
                return "a ended by itself" in str(error) and "out of paper" in str(error)
            return False

        await eventually(told)


async def test_a_process_gets_its_own_settings_and_none_of_the_run_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEPOST_OTHER", "x")
    shown = "import os; print(sorted(f'{k}={v}' for k, v in os.environ.items() if k.startswith(('FENCEPOST', 'TOPIC'))))"
    with Processes(tmp_path) as processes:
        processes.start("a", ["-c", f"{shown}; import time; time.sleep(600)"], settings={"RATE": 3}, environment={"TOPIC": "t"})
        text = await eventually(processes.log("a").read_text)

    assert text.strip() == "['FENCEPOST_RATE=3', 'TOPIC=t']"
