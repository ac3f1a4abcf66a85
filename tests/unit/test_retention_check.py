"""The ledger remembers a message for as long as it can come again, or the consumer says in numbers why it cannot."""

from collections.abc import Mapping
from math import inf

import pytest

from consumer_sdk.retention_check import retention_problems, topic_retention
from fencepost.errors import TransientError

TOPIC_AUTHORIZATION_FAILED, CLUSTER_AUTHORIZATION_FAILED, UNKNOWN_TOPIC = 29, 31, 3


def told(code: int = 0, settings: Mapping[str, str] | None = None) -> tuple[object, ...]:
    """A topic's part of Kafka's answer."""
    entries = [(name, value, False, 5, False, ()) for name, value in (settings or {}).items()]
    return (code, None, 2, "orders", entries)


def test_a_ledger_that_forgets_too_early_is_told_with_the_three_numbers_and_the_remedy() -> None:
    """CONSUME-17."""
    (problem,) = retention_problems({"orders": 7}, ledger_days=9, replay_days=3)

    assert problem.startswith("topic orders keeps messages for 7 days")
    assert "FENCEPOST_CONSUMER_REPLAY_DAYS is 3" in problem
    assert "forgets after 9 days" in problem
    assert problem.endswith("set FENCEPOST_LEDGER_RETENTION_DAYS to at least 10")


@pytest.mark.parametrize(
    ("kept", "ledger", "replay", "fits"),
    [
        (7, 10, 3, True),  # CONSUME-17
        (7, 9.99, 3, False),
        (7, 7, 0, True),
        (0, 0.5, 1, False),
        (inf, 3650, 0, False),
        (inf, 0, 3650, True),
        (7, 0, 3, True),
    ],
)
def test_what_fits(kept: float, ledger: float, replay: float, fits: bool) -> None:
    assert (retention_problems({"orders": kept}, ledger_days=ledger, replay_days=replay) == []) is fits


def test_a_topic_that_keeps_for_ever_needs_a_ledger_that_does() -> None:
    (problem,) = retention_problems({"orders": inf}, ledger_days=30, replay_days=7)

    assert "keeps messages for ever" in problem
    assert "FENCEPOST_LEDGER_RETENTION_DAYS=0, or bound the topic's retention.ms" in problem


def test_each_topic_is_told() -> None:
    topics = {"orders": 30.0, "payments": 1.0, "audit": inf}

    problems = retention_problems(topics, ledger_days=14, replay_days=7)

    assert [problem.split()[1] for problem in problems] == ["orders", "audit"]


def test_no_topic_no_problem() -> None:
    assert retention_problems({}, ledger_days=1, replay_days=7) == []


@pytest.mark.parametrize(
    ("settings", "days"),
    [
        ({"retention.ms": "604800000", "cleanup.policy": "delete"}, 7),
        ({"retention.ms": "-1", "cleanup.policy": "delete"}, inf),
        ({"retention.ms": "604800000", "cleanup.policy": "compact"}, inf),
        ({"retention.ms": "604800000", "cleanup.policy": "compact,delete"}, inf),
        ({"retention.ms": "43200000"}, 0.5),
    ],
)
def test_a_topics_retention_is_read_from_its_settings(settings: dict[str, str], days: float) -> None:
    assert topic_retention(told(settings=settings)) == ("orders", days)


@pytest.mark.parametrize("answer", [told(TOPIC_AUTHORIZATION_FAILED), told(CLUSTER_AUTHORIZATION_FAILED), told()])
def test_a_retention_that_may_not_be_read_is_not_for_ever(answer: tuple[object, ...]) -> None:
    """It says which right is missing, and how to grant it."""
    (problem,) = retention_problems(dict([topic_retention(answer)]), ledger_days=30, replay_days=7)

    assert "orders" in problem
    assert "for ever" not in problem
    assert "lacks DESCRIBE_CONFIGS" in problem
    assert "--operation DescribeConfigs --topic orders" in problem


def test_a_ledger_that_never_forgets_needs_no_right_to_read_it() -> None:
    assert retention_problems({"orders": None}, ledger_days=0, replay_days=7) == []


def test_an_answer_that_failed_for_another_reason_is_asked_for_again() -> None:
    with pytest.raises(TransientError, match=r"UnknownTopicOrPartitionError.*orders"):
        topic_retention(told(UNKNOWN_TOPIC))
