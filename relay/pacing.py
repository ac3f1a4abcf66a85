"""How long the relay may let writers have the cores between two polls. Pure but for the time given in.

A lone row goes at once. Under a steady stream every poll costs the writers' cores the same, however few rows it finds,
so the pause grows with the arrival rate up to a bound that the operator sets.
"""

import math
from typing import Final

__all__ = ["Pace"]

_SMOOTHING_SECONDS: Final = 0.2
_BUSY_ABOVE: Final = 400.0
_CALM_BELOW: Final = 200.0
# 20 ms at 2,000 rows a second: some 40 rows a poll.
_PAUSE_PER_RATE: Final = 2e-5


class Pace:
    """Watches rows arrive. ``busy`` has hysteresis, so that a rate near a bound does not flip the doorbell."""

    def __init__(self, pause_max_seconds: float, now: float) -> None:
        self._pause_max = pause_max_seconds
        self._last = now
        self.rate = 0.0
        self.busy = False

    def observe(self, rows: int, now: float) -> None:
        """A poll at ``now`` (seconds, any origin) found ``rows``."""
        elapsed = max(now - self._last, 0.001)
        self._last = now
        self.rate += (rows / elapsed - self.rate) * (1 - math.exp(-elapsed / _SMOOTHING_SECONDS))
        if self.rate > _BUSY_ABOVE:
            self.busy = True
        elif self.rate < _CALM_BELOW:
            self.busy = False

    def pause(self) -> float:
        """Seconds to leave to the writers before the next poll; 0 unless busy."""
        return min(self._pause_max, self.rate * _PAUSE_PER_RATE) if self.busy else 0.0
