"""The times of a request, and the digest of who asks. Pure."""

import dataclasses
from typing import Any, cast

import pytest

from fencepost.secrets import Secrets
from producer_sdk.http.headers import Preference
from producer_sdk.http.operation import Call, Operation
from producer_sdk.http.principal import Principal

ARRIVAL = 1000.0


@dataclasses.dataclass
class Route:
    """As much of an operation as times depend on."""

    name: str
    wait_seconds: float


def call(*, deadline_seconds: float = 30, wait_seconds: float = 10, prefer: Preference | None = None) -> Call:
    return Call(
        operation=cast("Operation", cast("Any", Route("orders", wait_seconds))), method="POST", success_status=201,
        preference=prefer or Preference(), arrival=ARRIVAL, deadline=ARRIVAL + deadline_seconds,
    )  # fmt: skip


def test_a_start_ends_a_second_before_the_deadline() -> None:
    """R30, R31"""
    assert call(deadline_seconds=30).start_until == ARRIVAL + 29


@pytest.mark.parametrize(
    ("deadline", "wait", "prefer", "granted"),
    [
        (30, 10, Preference(), 10),
        (10, 30, Preference(), 8),
        (3, 30, Preference(), 1),
        (2.1, 30, Preference(), 0.1),
        (2, 30, Preference(), 0),
        (30, 10, Preference(3), 3),
        (30, 10, Preference(60), 10),
        (10, 60, Preference(60), 8),
        (30, 10, Preference(0), 0),
        (30, 10, Preference(None, respond_async=True), 0),
        (30, 10, Preference(5, respond_async=True), 0),
        (30, 0, Preference(5), 0),
    ],
)
def test_the_wait_in_force(deadline: float, wait: float, prefer: Preference, granted: float) -> None:
    """ROUTE-12, ROUTE-16, R29, R32, R36, L17: from the arrival on, two seconds before the deadline at most."""
    of = call(deadline_seconds=deadline, wait_seconds=wait, prefer=prefer)
    assert of.granted_seconds == pytest.approx(granted)
    assert of.wait_until == pytest.approx(ARRIVAL + granted)


def test_the_operation_is_method_and_name() -> None:
    """KEY-7, J11"""
    assert call().scope_operation == "POST orders"


def test_whose_it_is_does_not_run_together() -> None:
    """SEC-2, SEC-6: tenant and id by their lengths, under the service's secret."""
    secrets = Secrets({1: b"1" * 32, 2: b"2" * 32}, write=[1])
    principals = [Principal("a", "bc"), Principal("ab", "c"), Principal("abc", ""), Principal("", "abc")]
    digests = [principal.digest(secrets, version) for principal in principals for version in (1, 2)]
    assert len(set(digests)) == len(digests)
    assert {len(digest) for digest in digests} == {32}
    assert "bc" not in repr(principals[0])
