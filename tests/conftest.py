"""The fixtures of all tests: services shared by the run, or a module's own, with databases, topics and relays on them.

Tests run in random order and in parallel. A test gets a database and topics of its own; only a module that asks for
`own_services` may stop, freeze or restart a service.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from fencepost.devservices import Services, start_services
from fencepost.devservices.processes import Watchdog
from tests.support.relay_process import RelayFactory, RelayProcess, Setting
from tests.support.session import Desk, Owner, SharedServices, Source, Visitor, migrated_database
from tests.support.topics import TopicFactory, topic_factory

SHARED: Final = "services"
OWN: Final = "own_services"
WORKER_INPUT: Final = "fencepost_services_desk"

_source = pytest.StashKey[Source]()
_desk = pytest.StashKey[Desk]()


def pytest_configure(config: pytest.Config) -> None:
    worker_input: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker_input is not None:
        config.stash[_source] = Visitor(worker_input[WORKER_INPUT])
    else:
        config.stash[_source] = Owner()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker that is about to start where to ask for services."""
    config: pytest.Config = node.config
    if _desk not in config.stash:
        owner = config.stash[_source]
        assert isinstance(owner, Owner)
        config.stash[_desk] = Desk(owner)
    node.workerinput[WORKER_INPUT] = config.stash[_desk].directions


def pytest_unconfigure(config: pytest.Config) -> None:
    if _desk in config.stash:
        config.stash[_desk].close()
    elif _source in config.stash:
        config.stash[_source].close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs services, so that `-m "not services"` runs the rest on a machine without them."""
    for item in items:
        if {SHARED, OWN} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.services)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the services here, if a chosen test needs them: a first download is no test's time."""
    on_controller = _desk in session.config.stash
    if on_controller or session.config.option.collectonly:
        return
    if any(SHARED in getattr(item, "fixturenames", ()) for item in session.items):
        session.config.stash[_source].get()


@pytest.fixture(scope="session")
def shared_services(pytestconfig: pytest.Config) -> SharedServices:
    """Addresses of the run's services."""
    return pytestconfig.stash[_source].get()


@pytest.fixture(scope="session")
def services(shared_services: SharedServices) -> Services:
    """The run's services, which all tests share: make databases and topics, stop nothing."""
    return shared_services.handle()


@pytest.fixture(scope="session")
def kafka(services: Services) -> str:
    """Addresses of the run's brokers."""
    return services.bootstrap_servers


@pytest.fixture
def database_url(services: Services, shared_services: SharedServices) -> Iterator[str]:
    """A migrated database of the test's own."""
    url = services.create_database(shared_services.template_url)
    yield url
    services.drop_database(url)


@pytest.fixture
def empty_database_url(services: Services) -> Iterator[str]:
    """A database of the test's own that no migration has touched."""
    url = services.create_database()
    yield url
    services.drop_database(url)


@pytest.fixture
def topic(kafka: str) -> TopicFactory:
    """Creates topics: `name = await topic(partitions=4)`. Their names are unique, so none is deleted."""
    return topic_factory(kafka)


@pytest.fixture(scope="module")
def own_services(request: pytest.FixtureRequest) -> Iterator[Services]:
    """Local services of the module's own, to be stopped, frozen and restarted.

    A module that needs several brokers says so by a constant `BROKERS`. A test leaves the services running.
    """
    with start_services(brokers=getattr(request.module, "BROKERS", 1), kind="local") as own:
        yield own


@pytest.fixture(scope="module")
def own_template(own_services: Services) -> str:
    """A migrated database on the module's own PostgreSQL, to clone."""
    return migrated_database(own_services)


@pytest.fixture
def own_database_url(own_services: Services, own_template: str) -> str:
    """A migrated database of the test's own on the module's own PostgreSQL."""
    return own_services.create_database(own_template)


@pytest.fixture
def own_topic(own_services: Services) -> TopicFactory:
    """Creates topics on the module's own Kafka."""
    return topic_factory(own_services.bootstrap_servers)


@pytest.fixture(scope="session")
def watchdog() -> Iterator[Watchdog]:
    """Ends the processes that tests started, should this test process be killed."""
    dog = Watchdog()
    yield dog
    dog.close()


@pytest.fixture
def start_relay(tmp_path: Path, watchdog: Watchdog) -> Iterator[RelayFactory]:
    """Starts relays: `relay = start_relay(database_url, kafka, lease_seconds=5)`; those left at the end are killed."""
    relays: list[RelayProcess] = []

    def start(database_url: str, kafka: str, **settings: Setting) -> RelayProcess:
        log = tmp_path / f"relay-{len(relays) + 1}.log"
        relays.append(RelayProcess(database_url, kafka, log=log, watchdog=watchdog, **settings))
        return relays[-1]

    yield start
    for relay in relays:
        relay.kill()
