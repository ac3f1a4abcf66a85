"""Whether the ledger remembers a message for as long as it can come again. Pure."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Final

from aiokafka import errors

from fencepost.errors import TransientError

__all__ = ["retention_problems", "topic_retention"]

_MS_A_DAY: Final = 86_400_000
_REFUSED: Final = (errors.TopicAuthorizationFailedError.errno, errors.ClusterAuthorizationFailedError.errno)


def topic_retention(resource: Sequence[Any]) -> tuple[str, float | None]:
    """A topic, and for how many days it keeps its messages: infinity where for ever, or compacted; None where the broker does not
    say, for want of a right. ``resource`` as in Kafka's answer to DescribeConfigs. Raises ``TransientError`` where it failed.
    """
    code, topic, entries = resource[0], resource[3], {entry[0]: entry[1] for entry in resource[4]}
    if code and code not in _REFUSED:
        raise TransientError(f"Kafka: {errors.for_code(code).__name__} for the settings of topic {topic}")
    if code or entries.get("retention.ms") is None:
        return topic, None
    milliseconds = float(entries["retention.ms"])
    forever = milliseconds < 0 or "compact" in str(entries.get("cleanup.policy", ""))
    return topic, inf if forever else milliseconds / _MS_A_DAY


def retention_problems(topics: Mapping[str, float | None], *, ledger_days: float, replay_days: float) -> list[str]:
    """What is wrong, a line a topic. Numbers are days; ``ledger_days`` 0 is for ever. Of a topic: infinity keeps for ever, and None
    could not be read.

    A message can come again for as long as its topic keeps it, and once more for as long as an operator may replay it.
    """
    if not ledger_days:
        return []
    return [
        _problem(topic, kept, ledger_days, replay_days)
        for topic, kept in topics.items()
        if kept is None or kept + replay_days > ledger_days
    ]


def _problem(topic: str, kept: float | None, ledger_days: float, replay_days: float) -> str:
    if kept is None:
        return (
            f"topic {topic}: how long it keeps messages cannot be read, so whether FENCEPOST_LEDGER_RETENTION_DAYS "
            f"({ledger_days:g}) is enough is not known: the consumer's Kafka user lacks DESCRIBE_CONFIGS on the topic; grant it: "
            f"kafka-acls.sh --add --allow-principal User:NAME --operation DescribeConfigs --topic {topic}"
        )
    if kept == inf:
        return (
            f"topic {topic} keeps messages for ever, FENCEPOST_CONSUMER_REPLAY_DAYS is {replay_days:g} and the ledger forgets "
            f"after {ledger_days:g} days: set FENCEPOST_LEDGER_RETENTION_DAYS=0, or bound the topic's retention.ms"
        )
    return (
        f"topic {topic} keeps messages for {kept:g} days and FENCEPOST_CONSUMER_REPLAY_DAYS is {replay_days:g}, but the ledger "
        f"forgets after {ledger_days:g} days: set FENCEPOST_LEDGER_RETENTION_DAYS to at least {kept + replay_days:g}"
    )
