"""Which lanes a relay should give up or reach for. Pure: the fleet in, a plan out.

Every live relay has a quota; the quotas add up to the number of lanes, the eldest relays taking the remainder. All
relays compute the same quotas from the same members, so a fleet settles and then stands still.
"""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Fleet", "Plan", "plan", "quota"]


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Live relays, eldest first; the number of lanes; how many of them are free for this relay to take."""

    members: Sequence[str]
    lanes: int
    free: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How many free lanes to claim and how many owned ones to hand over. One of the two is 0."""

    claim: int = 0
    release: int = 0


def quota(relay_id: str, fleet: Fleet) -> int:
    """How many lanes ``relay_id`` is entitled to; 0 for one that is no member."""
    if relay_id not in fleet.members:
        return 0
    share, remainder = divmod(fleet.lanes, len(fleet.members))
    return share + (fleet.members.index(relay_id) < remainder)


def plan(relay_id: str, owned: int, fleet: Fleet) -> Plan:
    """Claim only what is both wanted and free, so that a settled fleet makes no write that matches nothing."""
    wanted = quota(relay_id, fleet) - owned
    if wanted > 0:
        return Plan(claim=min(wanted, fleet.free))
    return Plan(release=-wanted)
