"""Addresses that can never work are refused before anything is tried, and no message quotes a part of one."""

import pytest

from fencepost.addresses import check_bootstrap_servers, check_database_url
from fencepost.errors import ConfigurationError


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://app@db/app",
        "postgres://app:secret@db:5432/app?sslmode=verify-full",
        "postgresql://app:s3cret%23PW@[::1]:5432/app",
        "postgresql:///app?host=/run/postgresql",
        "  postgresql://app@db/app\n",
    ],
)
def test_an_address_that_may_work_is_taken_without_its_blanks(url: str) -> None:
    assert check_database_url(url) == url.strip()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://u:s3cret#PW@127.0.0.1:5432/db", "percent-encode"),
        ("postgresql://u:s3cret/PW@127.0.0.1:5432/db", "percent-encode"),
        ("postgresql+asyncpg://u:s3cret@h/db", "leave it out"),
        ("mysql://u:s3cret@h/db", "is not an address"),
        ("host=h password=s3cret", "is not an address"),
        ("postgresql://u:s3cret@h:port/db", "percent-encode"),
        (" ", "is required"),
    ],
)
def test_an_address_that_can_never_work_is_refused_without_quoting_it(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        check_database_url(url)
    assert "FENCEPOST_DATABASE_URL" in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("servers", ["kafka", "kafka:9092", "a:1, b:2,", "[::1]:9092", "10.0.0.1:9092"])
def test_a_list_of_brokers_is_taken(servers: str) -> None:
    assert " " not in check_bootstrap_servers(servers)


@pytest.mark.parametrize("servers", ["http://kafka:9092", "kafka:9092/topic", "kafka:port", "a b:9092", ","])
def test_a_broker_that_is_no_host_and_port_is_refused(servers: str) -> None:
    with pytest.raises(ConfigurationError, match="FENCEPOST_KAFKA_BOOTSTRAP_SERVERS"):
        check_bootstrap_servers(servers)
