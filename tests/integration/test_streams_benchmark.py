"""The streams benchmark in a tiny size: a side that does not work any more fails here, not in the next measurement."""

from pathlib import Path

import pytest

from benchmarks.lab import Lab
from benchmarks.streams import streams
from fencepost.devservices import Services
from fencepost.devservices.processes import Watchdog


@pytest.fixture
def lab(services: Services, tmp_path: Path, watchdog: Watchdog) -> Lab:
    """A bench on the run's services, whose processes it does not look at."""
    return Lab(Services("given", services.database_url, services.bootstrap_servers), tmp_path, watchdog)


def test_the_streams_benchmark_reports_idle_streams_the_way_to_a_client_and_a_drain(lab: Lab) -> None:
    found = streams(lab, repeats=1, seconds=0.3, count=5, rows=600).as_json()["figures"]

    assert found["idle_5_streams"]["cpu_share_of_one_core"] >= 0
    assert found["chunk_to_client_ms"]["count"] == 30
    assert found["drain"]["chunks_per_second"] > 0
