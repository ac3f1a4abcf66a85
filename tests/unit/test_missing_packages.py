"""Without an extra's packages each command says in one line what it needs, and sends nobody to a package index."""

import subprocess
import sys

import pytest


def run_without(package: str, module: str, *arguments: str) -> tuple[int, str]:
    """``python -m module …`` where the package is not installed; the exit code and all that it said."""
    code = (
        f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv = ['-m', *{list(arguments)!r}]; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [("structlog", "status", "relay"), ("structlog", "consumer", "consumer"), ("psutil", "demo", "dev")],
)
def test_a_command_without_its_extra_says_how_a_clone_brings_it(missing: str, command: str, extra: str) -> None:
    assert run_without(missing, "fencepost", command) == (
        2,
        f"fencepost {command}: it needs {missing}: in a clone of Fencepost, pip install '.[{extra}]'\n",
    )


def test_devservices_without_their_extra_say_so_in_one_line() -> None:
    assert run_without("psutil", "fencepost.devservices") == (
        2,
        "fencepost.devservices needs psutil: in a clone of Fencepost, pip install -e '.[dev]'\n",
    )


def test_a_program_that_imports_devservices_gets_the_error_itself() -> None:
    code = "import sys; sys.modules['psutil'] = None; import fencepost.devservices"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: ")
