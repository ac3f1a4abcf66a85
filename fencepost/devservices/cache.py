"""Where downloads and copies are kept between runs, and how several runs at once fill them without harm."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


def cache_directory() -> Path:
    """Return this user's cache directory, made if it is missing."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    directory = Path(base) / "fencepost"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def shared_directory() -> Path:
    """Return a directory that every user can read and only this one can write.

    Its name is known in advance, so somebody else may have made it; then a fresh one is used.
    """
    base = Path("/var/tmp") if Path("/var/tmp").is_dir() else Path(tempfile.gettempdir())
    directory = base / f"fencepost-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o755)
    state = directory.lstat()
    ours = stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & 0o022
    if not ours:
        directory = Path(tempfile.mkdtemp(prefix="fencepost-", dir=base))
    directory.chmod(0o755)
    return directory


@contextlib.contextmanager
def exclusive(lock_file: Path) -> Iterator[None]:
    """Hold a lock between processes; the system releases it when the holder dies."""
    with lock_file.open("ab") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def filled_once(directory: Path, fill: Callable[[Path], None]) -> Path:
    """Return the directory, filled by `fill` if it isn't there yet: it exists whole or not at all."""
    if directory.is_dir():
        return directory
    with exclusive(directory.with_name(directory.name + ".lock")):
        if directory.is_dir():
            return directory
        partial = directory.with_name(directory.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        fill(partial)
        partial.rename(directory)
    return directory
