"""The local clock, for leases only. Every comparison between processes is the database's."""

import time

__all__ = ["lease_clock"]

if hasattr(time, "CLOCK_BOOTTIME"):

    def lease_clock() -> float:
        """Seconds since boot, sleep included: a suspended machine must wake up knowing that its leases are over."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:

    def lease_clock() -> float:
        """Monotonic seconds; where the system has no clock that counts its own suspension."""
        return time.monotonic()
