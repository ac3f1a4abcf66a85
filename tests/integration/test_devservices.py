"""Local services for real: they come back with ports and data, and nothing outlives the run that started it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import psycopg
import pytest
from aiokafka import AIOKafkaProducer

from fencepost.devservices import Services
from fencepost.devservices.processes import ManagedProcess, Watchdog
from tests.support.records import read_all
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

# A run that starts one child under a watchdog, names the processes, and then does nothing.
RUN = """
import signal, sys, time
from pathlib import Path
from fencepost.devservices.processes import ManagedProcess, Watchdog
home = Path(sys.argv[1])
dog = Watchdog()
dog.remove(home / "data")
child = ManagedProcess("child", [sys.executable, "-c", "import time; time.sleep(600)"], home / "log", dog)
child.start()
if sys.argv[2] == "frozen":
    child.pause()
print(dog.pid, child.pid, flush=True)
time.sleep(600)
"""


def killed_run(home: Path, state: str) -> list[psutil.Process]:
    """Start a run, kill it, and return its watchdog and its child."""
    with subprocess.Popen([sys.executable, "-c", RUN, str(home), state], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        left = [psutil.Process(int(pid)) for pid in run.stdout.readline().split()]
        run.kill()
    return left


async def publish(bootstrap_servers: str, topic: str, value: bytes) -> None:
    async with AIOKafkaProducer(bootstrap_servers=bootstrap_servers) as producer:
        await producer.send_and_wait(topic, value, partition=0)


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_broker_comes_back_on_its_port_with_its_data(own_services: Services, own_topic: TopicFactory, how: str) -> None:
    name = await own_topic(partitions=1)
    address, pid = own_services.bootstrap_servers, own_services.broker.pid
    await publish(address, name, b"before")

    getattr(own_services.broker, how)()
    own_services.broker.start()
    await publish(address, name, b"after")

    assert own_services.broker.pid != pid
    assert [record.value for record in await read_all(address, name)] == [b"before", b"after"]


@pytest.mark.parametrize("immediate", [False, True])
def test_postgresql_comes_back_on_its_port_with_what_was_committed(own_services: Services, immediate: bool) -> None:
    url = own_services.create_database()
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS id")

    own_services.postgres.restart(immediate=immediate)

    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT id FROM kept").fetchall() == [(1,)]


def test_a_frozen_postgresql_answers_nobody_until_it_is_resumed(own_services: Services) -> None:
    own_services.postgres.pause()
    try:
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(own_services.database_url, connect_timeout=2)
    finally:
        own_services.postgres.resume()
    psycopg.connect(own_services.database_url).close()


def test_postgresql_has_the_settings_that_tests_and_benchmarks_count_on(own_services: Services) -> None:
    expected = {"fsync": "on", "synchronous_commit": "on", "wal_level": "logical", "max_prepared_transactions": "50"}
    with psycopg.connect(own_services.database_url) as connection:
        for setting, value in expected.items():
            assert connection.execute("SELECT current_setting(%s)", [setting]).fetchone() == (value,)
        connection.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")


def test_postgresql_does_not_run_as_root(own_services: Services) -> None:
    assert psutil.Process(own_services.postgres.pid).uids().real != 0


@pytest.mark.parametrize("state", ["running", "frozen"])
async def test_a_killed_run_leaves_no_process_and_no_directory(tmp_path: Path, state: str) -> None:
    (tmp_path / "data").mkdir()
    watchdog, child = killed_run(tmp_path, state)

    await eventually(lambda: not _alive(child), message="the child has ended")
    await eventually(lambda: not _alive(watchdog), message="the watchdog has ended")
    assert not (tmp_path / "data").exists()


def test_a_watchdog_ends_nothing_that_was_released(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as bystander:
        dog = Watchdog()
        dog.guard(bystander.pid, signal.SIGKILL)
        dog.release(bystander.pid)
        dog.close()
        assert bystander.poll() is None
        bystander.kill()


def test_a_process_that_ignores_its_signal_is_killed_by_its_own_id(
    tmp_path: Path, watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencepost.devservices.processes.STOP_SECONDS", 0.2)
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ignoring', flush=True); time.sleep(600)"
    process = ManagedProcess("stubborn", [sys.executable, "-c", stubborn], tmp_path / "log", watchdog)
    process.start()
    pid = process.pid
    process.wait_until(lambda: "ignoring" in process.log.read_text(), timeout_seconds=20)

    process.stop()

    assert not psutil.pid_exists(pid)


def test_a_command_gets_the_addresses_and_its_exit_code_is_passed_on() -> None:
    asks = (
        "import os, sys; print(os.environ['FENCEPOST_DATABASE_URL'], os.environ['FENCEPOST_KAFKA_BOOTSTRAP_SERVERS']);sys.exit(7)"
    )
    environment = {"FENCEPOST_TEST_DATABASE_URL": "postgresql://u:p@d.example/postgres", "FENCEPOST_TEST_KAFKA": "k:1"}
    command = [sys.executable, "-m", "fencepost.devservices", "--", sys.executable, "-c", asks]
    started = time.monotonic()

    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)

    assert (done.returncode, done.stdout.split()) == (7, ["postgresql://u:p@d.example/postgres", "k:1"]), done.stderr
    assert time.monotonic() - started < 30


def _alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
