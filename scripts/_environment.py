"""Makes the repository's .venv with everything that development needs, and runs Python in it.

Needs Python 3.11 or newer and nothing else. The packages are installed when pyproject.toml changed since the last
time; otherwise nothing is done. Written so that an older Python can read it far enough to say that it is too old.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "installed-from"
LOCK = ROOT / ".cache" / "environment.lock"
OLDEST = (3, 11)
NEWEST = (3, 14)


def prepare() -> str:
    """Return the path of the environment's Python, made or brought up to date if need be."""
    LOCK.parent.mkdir(exist_ok=True)
    with LOCK.open("a") as lock:
        # Two scripts at once: the second waits for the first one's installation.
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = _fingerprint()
        if not _is_current(wanted):
            _require_python()
            _make_environment()
            _install()
            STAMP.write_text(wanted)
    os.environ["VIRTUAL_ENV"] = str(VENV)
    os.environ["PATH"] = f"{PYTHON.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return str(PYTHON)


def run(*arguments: str, directory: "Path | None" = None) -> None:
    """Become the environment's Python with these arguments; does not return."""
    python = prepare()
    if directory is not None:
        os.chdir(directory)
    sys.stdout.flush()
    os.execv(python, [python, *arguments])


def _fingerprint() -> str:
    return hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()


def _is_current(wanted: str) -> bool:
    return PYTHON.exists() and STAMP.exists() and STAMP.read_text() == wanted


def _require_python() -> None:
    if sys.version_info >= OLDEST:
        return
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        newer = shutil.which(f"python3.{minor}")
        if newer:
            os.execv(newer, [newer, *sys.argv])
    found = ".".join(str(part) for part in sys.version_info[:3])
    sys.exit(f"Fencepost needs Python 3.11 or newer, and python3 is {found} here: install one as python3.11 or newer.")


def _make_environment() -> None:
    if PYTHON.exists():
        return
    if importlib.util.find_spec("ensurepip") is None:
        sys.exit(
            "This Python cannot make virtual environments: its ensurepip is missing. "
            "On Debian and Ubuntu: apt install python3-venv. Elsewhere: install a complete Python."
        )
    _say("making .venv")
    _call([sys.executable, "-m", "venv", "--clear", str(VENV)])


def _install() -> None:
    _say("installing the packages of pyproject.toml into .venv (about a minute, once)")
    with contextlib.suppress(FileNotFoundError):
        STAMP.unlink()
    _call([str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-e", f"{ROOT}[dev]"])


def _call(command: "list[str]") -> None:
    # What a step prints is progress, not the script's result.
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
        sys.exit(f"failed: {' '.join(command)}")


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
