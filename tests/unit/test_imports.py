"""What a service pays for an import: the SDKs bring no driver and no client that the service did not choose."""

import json
import subprocess
import sys

import pytest

HEAVY = {"aiokafka", "prometheus_client", "asyncpg", "psycopg", "sqlalchemy", "django", "uvloop", "structlog", "typer", "relay"}


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after the statement."""
    code = f"import json, sys; {statement}; print(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("package", ["producer_sdk", "consumer_sdk", "fencepost"])
def test_a_package_for_services_loads_no_driver_and_no_client(package: str) -> None:
    assert loaded_by(f"import {package}") & HEAVY == set()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg", "sqlalchemy", "django"])
def test_an_adapter_loads_its_own_driver_only(driver: str) -> None:
    adapter = f"producer_sdk.{driver}"
    loaded = loaded_by(f"import {adapter}")

    # SQLAlchemy and Django bring what they like; the Kafka client, the metrics and the relay are nobody's here.
    assert loaded & {"aiokafka", "prometheus_client", "relay", "structlog", "typer"} == set()
    assert driver in loaded


def test_the_client_of_durable_routes_loads_httpx_and_nothing_of_the_server() -> None:
    loaded = loaded_by("import producer_sdk.http.client")
    assert loaded & (HEAVY | {"fastapi", "starlette"}) == set()
    assert "httpx" in loaded


def test_the_root_of_the_command_line_works_without_the_relay_extra() -> None:
    assert loaded_by("import fencepost.cli") & {"aiokafka", "prometheus_client", "uvloop", "structlog"} == set()
