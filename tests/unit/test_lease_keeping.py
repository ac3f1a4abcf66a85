"""Whom the keeper of leases tells of: a handler that was stopped, and had its time to end, and did not."""

import asyncio
from types import SimpleNamespace
from typing import Any, Final, cast
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from consumer_sdk.decision import StopReason
from consumer_sdk.jobs import JobKey
from consumer_sdk.lease_keeping import LeaseKeeper
from consumer_sdk.worker_settings import load_worker_settings
from fencepost.clock import lease_clock

KEY: Final = JobKey(UUID(int=1), "acme", 1)
GRACE: Final = 10.0
PATIENCE: Final = 5.0


def attempt(
    cancelled_again: list[JobKey],
    *,
    reason: StopReason | None = StopReason.ATTEMPT_DEADLINE,
    stopped_ago: float,
    over: bool = False,
) -> Any:
    return SimpleNamespace(
        reason=reason,
        stopped_at=lease_clock() - stopped_ago,
        told_that_it_does_not_end=False,
        has_progress_limit_passed=False,
        stop=lambda _reason: None,
        cancel_again=lambda: cancelled_again.append(KEY),
        state=SimpleNamespace(
            over=over,
            completed=False,
            trusted_until=lease_clock() + 60,
            deadline=None,
            claim=SimpleNamespace(key=KEY, workflow="report"),
        ),
    )


@pytest.mark.parametrize(
    ("how", "told"),
    [
        pytest.param({"stopped_ago": GRACE + PATIENCE + 1}, 1, id="does not end"),
        pytest.param({"stopped_ago": GRACE + PATIENCE + 1, "over": True}, 0, id="its outcome is not written yet"),
        pytest.param({"stopped_ago": GRACE + 1}, 0, id="cleans up"),
        pytest.param({"reason": None, "stopped_ago": 1_000.0}, 0, id="works"),
    ],
)
async def test_only_a_handler_that_does_not_end_is_told_of_and_cancelled_once_more(how: Any, told: int) -> None:
    """Once. A database that does not answer is no fault of the handler's, whose end it keeps from being written."""
    settings = load_worker_settings({"database_url": "postgresql://h/d", "worker_cancel_grace_seconds": GRACE})
    keeper = LeaseKeeper(cast("Any", None), settings, cast("Any", None), answered=lambda: None)
    cancelled_again: list[JobKey] = []
    keeper.attempts[KEY] = attempt(cancelled_again, **how)
    with capture_logs() as logs:
        keeper.watch()
        keeper.watch()
        await asyncio.sleep(0)
    assert [entry["event"] for entry in logs] == ["handler_does_not_end"] * told
    assert len(cancelled_again) == told
