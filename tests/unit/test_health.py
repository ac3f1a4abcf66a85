"""The server of /livez, /readyz and /metrics says which of its two settings is at fault where it cannot listen."""

import pytest
from prometheus_client import CollectorRegistry

from fencepost.errors import ConfigurationError
from fencepost.health import HealthServer


def serving(host: str, port: int) -> HealthServer:
    return HealthServer(host, port, prefix="FENCEPOST_CONSUMER_", registry=CollectorRegistry(), live=list, ready=list)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1", "::1::"], ids=["name", "address", "malformed"])
def test_a_host_that_is_none_of_this_machine_is_told_and_no_port(host: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"^FENCEPOST_CONSUMER_HTTP_HOST: .* no address of this machine: .*0\.0\.0\.0"
    ) as raised:
        serving(host, 0)
    assert host in str(raised.value)
    assert "HTTP_PORT" not in str(raised.value)


def test_a_port_that_is_taken_is_told_with_its_remedy() -> None:
    first = serving("127.0.0.1", 0)
    try:
        with pytest.raises(ConfigurationError, match=f"FENCEPOST_CONSUMER_HTTP_PORT: .*:{first.port}: .*a port of its own"):
            serving("127.0.0.1", first.port)
    finally:
        first.close()
