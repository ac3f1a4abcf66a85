"""What is done to whoever serves the payments. Each fault waits until its victim is in the middle of a call: then it hurts."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from demo.payments_consumer import LIMITS
from demo.payments_services import PROVIDER, SESSION_SECONDS, PaymentsServices
from demo.payments_state import PaymentsState
from demo.processes import Processes
from demo.relays import RELAYS, Fleet, LaneView
from fencepost.devservices import ServicesError

__all__ = ["CONSUMERS", "PaymentsFaults"]

#: Two that stay, and one that comes and goes.
CONSUMERS: Final = ("payments-1", "payments-2", "payments-3")
_FIRST, _SECOND, _GUEST = CONSUMERS
# Past its session, and past the deadline of every call that it has out.
_FROZEN_SECONDS: Final = max(SESSION_SECONDS, LIMITS.timeout_seconds + LIMITS.in_flight_seconds) + 2.0
_AWAY_SECONDS: Final = 1.0
_AT_WORK_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.02


class PaymentsFaults:
    """Each fault leaves things so that everybody can come back, and ``say`` tells what was done."""

    def __init__(
        self,
        *,
        processes: Processes,
        fleet: Fleet,
        staff: PaymentsServices,
        state: PaymentsState,
        lanes: LaneView,
        say: Callable[[str], None],
    ) -> None:
        self._processes = processes
        self._fleet = fleet
        self._staff = staff
        self._state = state
        self._lanes = lanes
        self._say = say

    @property
    def all(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """Every fault once."""
        return (
            self.kill_a_relay, self.kill_a_consumer, self.kill_the_provider, self.freeze_a_consumer, self.rebalance
        )  # fmt: skip

    async def kill_a_relay(self) -> None:
        """The one with most lanes; one that was killed before comes back first."""
        self._fleet.start_missing()
        await asyncio.sleep(_AWAY_SECONDS)
        held = await self._lanes.held()
        victim = max(RELAYS, key=lambda name: held.get(name, 0))
        self._fleet.kill(victim)
        self._say(f"kill -9 {victim}, which held {held.get(victim, 0)} lanes")

    async def kill_a_consumer(self) -> None:
        """Its partitions stand still until its session is over."""
        calls = await self.until_calling(_FIRST)
        self._processes.kill(_FIRST)
        self._staff.start_consumer(_FIRST)
        self._say(f"kill -9 {_FIRST} with calls out: {calls}; another takes its place")

    async def kill_the_provider(self) -> None:
        """It comes back with the book that it kept."""
        calls = await self.until_calling()
        self._processes.kill(PROVIDER)
        self._say(f"kill -9 of the provider with calls out: {calls}; it comes back with the book that it kept")
        await asyncio.sleep(_AWAY_SECONDS)
        self._staff.start_provider()

    async def freeze_a_consumer(self) -> None:
        """Long enough that others take over all it has; then it goes on."""
        calls = await self.until_calling(_SECOND)
        self._processes.freeze(_SECOND)
        self._say(f"SIGSTOP {_SECOND} with calls out: {calls}, for {_FROZEN_SECONDS:g} s: past its session and their deadlines")
        await asyncio.sleep(_FROZEN_SECONDS)
        self._processes.thaw(_SECOND)
        self._say(f"SIGCONT {_SECOND}")

    async def rebalance(self) -> None:
        """A guest joins, and leaves in order in the middle of its work."""
        self._staff.start_consumer(_GUEST)
        calls = await self.until_calling(_GUEST)
        await asyncio.to_thread(self._processes.stop, _GUEST)
        self._say(f"{_GUEST} joined, took over a share, and left again with calls out: {calls}")

    async def until_calling(self, name: str | None = None) -> int:
        """Calls are out, a consumer's or anybody's; how many. Raises ``ServicesError`` if there are none for long."""
        deadline = time.monotonic() + _AT_WORK_SECONDS
        while not (calls := await self._state.calling(name)):
            self._processes.check()
            if time.monotonic() > deadline:
                raise ServicesError(f"{name or 'no consumer'} made no call for a while; try again on a less busy machine")
            await asyncio.sleep(_LOOK_SECONDS)
        return calls
