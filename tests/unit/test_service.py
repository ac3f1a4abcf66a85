"""A process that has failed ends, whatever its handlers have left, and says why."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
END_SECONDS: Final = 30.0


LEFT: Final = ["task", "generator", "thread", "worker thread"]


def ended(fault: str, left: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tests.support.failing_service", fault, left]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=END_SECONDS, check=False)


@pytest.mark.parametrize("left", [*LEFT, "spawning task", "nothing"])
def test_a_stop_in_order_is_one_whatever_handlers_have_left(left: str) -> None:
    process = ended("none", left)
    assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("configuration", 2, "fencepost: the secrets are gone\n"),
        ("invariant", 1, "fencepost: a part of the worker failed\n"),
        ("other", 1, "fencepost: ValueError\n"),
    ],
)
def test_a_service_that_failed_ends_in_spite_of_what_does_not(left: str, fault: str, code: int, said: str) -> None:
    process = ended(fault, left)
    assert (process.returncode, process.stderr) == (code, said)


def test_a_fault_stays_one_where_a_task_exits_while_it_cleans_up() -> None:
    process = ended("configuration", "task that exits at its end")
    assert process.returncode == 1
    assert process.stderr.rstrip().endswith("ConfigurationError: the secrets are gone")


def test_a_task_that_exits_ends_the_process() -> None:
    """sys.exit() in a task that a handler has begun passes by everything."""
    assert ended("none", "exiting task").returncode == 1


@pytest.mark.parametrize("left", ["nothing", "spawning task"])
def test_where_everything_has_ended_the_error_is_the_caller_s(left: str) -> None:
    process = ended("configuration", left)
    assert process.returncode == 1
    assert process.stderr.rstrip().endswith("ConfigurationError: the secrets are gone")
