"""The routes benchmark in a tiny size: a side that does not work any more fails here, not in the next measurement."""

from pathlib import Path

import pytest

from benchmarks.lab import BenchmarkFailed, Lab
from benchmarks.routes import routes
from fencepost.devservices import Services, free_port
from fencepost.devservices.processes import Watchdog


@pytest.fixture
def lab(services: Services, tmp_path: Path, watchdog: Watchdog) -> Lab:
    """A bench on the run's services, whose processes it does not look at."""
    return Lab(Services("given", services.database_url, services.bootstrap_servers), tmp_path, watchdog)


def test_the_routes_benchmark_reports_replays_first_requests_and_a_crowd_that_waits(lab: Lab) -> None:
    found = routes(lab, repeats=1, seconds=0.3, waiters=12, rows=3).as_json()

    figures, first = found["figures"], found["figures"]["first_request"]
    assert set(found["ratios"]) == {"replay_vs_bare_route"}
    assert all(figures[way]["answers_per_second"] > 0 and figures[way]["server_cpu_us"] > 0 for way in ("replay", "bare"))
    assert figures["replay"]["statements"] < figures["first_without_wait"]["statements"]
    for kind in ("that_returns_at_once", "that_works_50_ms"):
        assert first[kind]["over_the_workflow_ms"]["count"] == first[kind]["completion_to_client_ms"]["count"] == 3
    assert first["that_works_50_ms"]["over_the_workflow_ms"]["p50"] > 0
    crowd = figures["12_waiters"]
    assert crowd["answered"] == crowd["completion_to_client_ms"]["count"] == 12
    assert crowd["connections_of_application"] <= 10


def test_a_client_that_is_answered_otherwise_than_it_should_be_fails_the_routes_benchmark(lab: Lab, database_url: str) -> None:
    port = free_port()
    given = {"way": "bare", "prefix": "x", "count": 1, "pause_seconds": 0, "work_seconds": 0}

    with lab.worker("route_server", database_url=database_url, port=port, secret="benchmark" * 4):  # noqa: SIM117
        with lab.worker("route_calls", port=port, **given) as client, pytest.raises(BenchmarkFailed, match="an answer 500"):
            client.run()  # there is no table for the bare route to read
