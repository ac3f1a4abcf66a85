"""A clock that stands still until the test moves it: deadlines pass when a test says so, and nothing has to wait for them."""

from datetime import UTC, datetime, timedelta

__all__ = ["Clock"]


class Clock:
    """``start`` defaults to the time of day at which it is made."""

    def __init__(self, start: datetime | None = None) -> None:
        self._now = datetime.now(UTC) if start is None else start

    def now(self) -> datetime:
        """The time, with its zone."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let so much time pass."""
        if seconds < 0:
            raise ValueError("time does not go back")
        self._now += timedelta(seconds=seconds)
