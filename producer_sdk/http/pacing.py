"""How often a principal may start an operation: a bucket each that fills steadily. In this process only; nothing is stored."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from fencepost.clock import lease_clock
from producer_sdk.http.principal import Principal

__all__ = ["StartPace"]

_MOST_BUCKETS: Final = 10_000
_MINUTE: Final = 60.0


class StartPace:
    """Buckets by operation and principal. The ones unused for longest are forgotten, that is, full again."""

    def __init__(self, clock: Callable[[], float] = lease_clock) -> None:
        self._clock = clock
        self._buckets: OrderedDict[tuple[str, Principal], tuple[float, float]] = OrderedDict()

    def seconds_until(self, operation: str, principal: Principal, per_minute: int | None) -> float:
        """Take one start of ``per_minute``; 0 if there was one, else seconds until there is. None: no limit."""
        if per_minute is None:
            return 0.0
        now, each = self._clock(), _MINUTE / per_minute
        left, at = self._buckets.pop((operation, principal), (float(per_minute), now))
        left = min(left + (now - at) / each, float(per_minute))
        self._keep((operation, principal), (left - 1.0 if left >= 1.0 else left, now))
        return 0.0 if left >= 1.0 else (1.0 - left) * each

    def _keep(self, key: tuple[str, Principal], bucket: tuple[float, float]) -> None:
        self._buckets[key] = bucket
        if len(self._buckets) > _MOST_BUCKETS:
            self._buckets.popitem(last=False)
