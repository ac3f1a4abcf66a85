"""Whether the ledger remembers a message for as long as it can come again. Pure."""

from collections.abc import Mapping
from math import inf

__all__ = ["retention_problems"]


def retention_problems(topics: Mapping[str, float], *, ledger_days: float, replay_days: float) -> list[str]:
    """What is wrong, a line a topic. Numbers are days; ``ledger_days`` 0 is for ever, a topic's infinity keeps for ever.

    A message can come again for as long as its topic keeps it, and once more for as long as an operator may replay it.
    """
    if not ledger_days:
        return []
    return [_problem(topic, kept, ledger_days, replay_days) for topic, kept in topics.items() if kept + replay_days > ledger_days]


def _problem(topic: str, kept: float, ledger_days: float, replay_days: float) -> str:
    if kept == inf:
        return (
            f"topic {topic} keeps messages for ever, FENCEPOST_CONSUMER_REPLAY_DAYS is {replay_days:g} and the ledger forgets "
            f"after {ledger_days:g} days: set FENCEPOST_LEDGER_RETENTION_DAYS=0, or bound the topic's retention.ms"
        )
    return (
        f"topic {topic} keeps messages for {kept:g} days and FENCEPOST_CONSUMER_REPLAY_DAYS is {replay_days:g}, but the ledger "
        f"forgets after {ledger_days:g} days: set FENCEPOST_LEDGER_RETENTION_DAYS to at least {kept + replay_days:g}"
    )
