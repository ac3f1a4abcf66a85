"""How long to wait before the next attempt. Pure: the caller keeps the numbers, and brings the random source and the time.

A delay is never 0, so no failure becomes a busy loop, and never above the cap, jitter included.
"""

import random as _random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, get_args

from fencepost.errors import ConfigurationError
from fencepost.retry_after import parse_retry_after

__all__ = ["JITTER_FRACTION", "LEAST_SECONDS", "MOST_SECONDS", "Jitter", "Retry"]

Jitter = Literal["exponential", "full", "decorrelated", "none"]

#: Bounds of every duration of a policy: a millisecond, and 30 days.
LEAST_SECONDS: Final = 0.001
MOST_SECONDS: Final = 30 * 86_400.0
#: What "exponential" may take off a delay. Half: before the cap, no delay is shorter than the one before it.
JITTER_FRACTION: Final = 0.5

# The least base has passed the greatest cap long before; more doublings would only overflow.
_DOUBLINGS: Final = 64


@dataclass(frozen=True, kw_only=True)
class Retry:
    """A policy of delays. Raises ``ConfigurationError`` for numbers that cannot work.

    ``jitter`` spreads what failed together; n counts from 0, and u is uniform:

    - ``exponential`` (default): d = min(cap, base * 2^n), less up to half of it.
    - ``full``: u(0, d), at least a millisecond. Spreads most; some retries come early.
    - ``decorrelated``: min(cap, u(base, 3 * previous)), starting from base. Needs the previous delay to be kept.
    - ``none``: d.

    ``retry_after_max_seconds`` bounds what a provider's Retry-After may ask for; defaults to the cap, 0 ignores it.
    """

    base_seconds: float = 1.0
    cap_seconds: float = 300.0
    jitter: Jitter = "exponential"
    retry_after_max_seconds: float | None = None

    def __post_init__(self) -> None:
        _check("base_seconds", self.base_seconds, least=LEAST_SECONDS)
        _check("cap_seconds", self.cap_seconds, least=LEAST_SECONDS)
        if self.base_seconds > self.cap_seconds:
            raise ConfigurationError(
                f"base_seconds ({self.base_seconds:g}) must not be above cap_seconds ({self.cap_seconds:g}): no delay would fit"
            )
        if self.retry_after_max_seconds is not None:
            _check("retry_after_max_seconds", self.retry_after_max_seconds, least=0)
        if self.jitter not in get_args(Jitter):
            raise ConfigurationError(f"jitter must be one of {', '.join(get_args(Jitter))}")

    def delay(self, attempt: int, previous_seconds: float | None = None, *, random: Callable[[], float] = _random.random) -> float:
        """Seconds before the next attempt, after ``attempt`` earlier retries (0 at the first failure).

        ``previous_seconds`` is what this returned the time before; None at the first failure. ``random`` returns numbers
        from 0 up to 1; the low end gives the shortest delay.
        """
        if attempt < 0:
            raise ValueError("attempt counts from 0")
        if self.jitter == "decorrelated":
            return self._decorrelated(previous_seconds, random())
        longest = min(self.cap_seconds, self.base_seconds * 2.0 ** min(attempt, _DOUBLINGS))
        if self.jitter == "full":
            return max(LEAST_SECONDS, longest * random())
        if self.jitter == "exponential":
            return longest * (1 - JITTER_FRACTION * (1 - random()))
        return longest

    def _decorrelated(self, previous_seconds: float | None, share: float) -> float:
        # A kept delay may be of another policy, or a provider's; within this one's bounds the range is never empty.
        previous = min(self.cap_seconds, max(self.base_seconds, previous_seconds or 0))
        return min(self.cap_seconds, self.base_seconds + share * (3 * previous - self.base_seconds))

    def retry_after_seconds(self, value: str, *, now: datetime) -> float | None:
        """What a provider's Retry-After asks for, within this policy; None for a value to ignore.

        It is the least to wait, not a delay of its own: wait for the longer of the two, or 0 asks for a busy loop.
        """
        asked = parse_retry_after(value, now=now)
        most = self.cap_seconds if self.retry_after_max_seconds is None else self.retry_after_max_seconds
        return None if asked is None else min(asked, most)


def _check(name: str, value: object, *, least: float) -> None:
    # Neither NaN nor infinity is between two numbers.
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= MOST_SECONDS:
        raise ConfigurationError(f"{name} must be a number of seconds from {least:g} to {MOST_SECONDS:.0f} (30 days)")
