"""PostgreSQL and Kafka in containers, where a Docker daemon answers.

The containers have the settings that the local services have. testcontainers ends them with the run, also when the
run is killed.
"""

import contextlib
import gc
import secrets
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fencepost.devservices.errors import ServicesError
from fencepost.devservices.kafka import cluster_properties, members
from fencepost.devservices.pins import KAFKA_IMAGE, POSTGRES_IMAGE
from fencepost.devservices.postgres import SETTINGS, SUPERUSER, can_connect
from fencepost.devservices.processes import free_port

if TYPE_CHECKING:
    from testcontainers.core.container import DockerContainer

DAEMON_TIMEOUT_SECONDS: Final = 2
START_SECONDS: Final = 120.0
POLL_SECONDS: Final = 0.2
POSTGRES_PORT: Final = 5432
CONTROLLER_PORT: Final = 9093
KAFKA_LOGS: Final = Path("/tmp/fencepost-kafka")
# A container has no other way in than its network, and reports on itself by `docker logs`.
LOCAL_ONLY_SETTINGS: Final = frozenset({"listen_addresses", "unix_socket_directories"})


def docker_answers() -> bool:
    """Whether a Docker daemon can be reached from here."""
    import docker  # type: ignore[import-untyped]
    from docker.errors import DockerException  # type: ignore[import-untyped]

    client = None
    with contextlib.suppress(DockerException):
        client = docker.from_env(timeout=DAEMON_TIMEOUT_SECONDS)
    if client is None:
        _collect_abandoned_sockets()
        return False
    try:
        return bool(client.ping())
    except (DockerException, OSError):
        return False
    finally:
        client.close()


def _collect_abandoned_sockets() -> None:
    # A docker client that fails to connect leaves its socket to the collector, which warns about it; where warnings
    # are errors, that would fail whoever comes next.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@dataclass(frozen=True)
class Container:
    """A started container and the address of its service."""

    address: str
    stop: Callable[[], None]


def start_postgres() -> Container:
    """Start PostgreSQL and wait until it takes a connection."""
    from testcontainers.core.container import DockerContainer

    password = secrets.token_hex(16)
    settings = [f"-c{name}={value}" for name, value in SETTINGS.items() if name not in LOCAL_ONLY_SETTINGS]
    container = DockerContainer(POSTGRES_IMAGE)
    container.with_env("POSTGRES_PASSWORD", password).with_exposed_ports(POSTGRES_PORT)
    container.with_command(["postgres", *settings])

    def address() -> str:
        host = _reachable(container.get_container_host_ip())
        port = container.get_exposed_port(POSTGRES_PORT)
        return f"postgresql://{SUPERUSER}:{password}@{host}:{port}/postgres"

    return _start("PostgreSQL", container, address, can_connect)


def start_kafka() -> Container:
    """Start a Kafka broker and wait until it counts itself as a member of its cluster."""
    from testcontainers.core.container import DockerContainer

    container = DockerContainer(KAFKA_IMAGE)
    # The broker tells clients where it is, so its port outside has to be known before it starts.
    port = free_port()
    host = _reachable(container.get_docker_client().host())
    properties = cluster_properties(brokers=1) | {
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{CONTROLLER_PORT}",
        "listeners": f"PLAINTEXT://0.0.0.0:{port},CONTROLLER://127.0.0.1:{CONTROLLER_PORT}",
        "advertised.listeners": f"PLAINTEXT://{host}:{port}",
        "log.dirs": str(KAFKA_LOGS),
    }
    container.with_envs(**{"KAFKA_" + name.upper().replace(".", "_"): value for name, value in properties.items()})
    container.with_bind_ports(port, port)
    return _start("Kafka", container, lambda: f"{host}:{port}", lambda address: bool(members(address)))


def _start(name: str, container: "DockerContainer", address: Callable[[], str], ready: Callable[[str], bool]) -> Container:
    try:
        container.start()
        where = address()
        _wait_until_ready(name, container, lambda: ready(where))
    except BaseException:
        container.stop()
        raise
    return Container(where, container.stop)


def _wait_until_ready(name: str, container: "DockerContainer", ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        if time.monotonic() > deadline:
            output, errors = container.get_logs()
            log = (output + errors).decode(errors="replace")[-4000:]
            raise ServicesError(f"{name}'s container was not ready after {START_SECONDS:.0f} s; its log ends:\n{log}")
        time.sleep(POLL_SECONDS)


def _reachable(host: str) -> str:
    # A published port listens on IPv4, and localhost may be tried as IPv6 first.
    return "127.0.0.1" if host == "localhost" else host
