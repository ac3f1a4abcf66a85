"""``fencepost check`` looks at the topics that the events of runs go to, before a relay stands still for one."""

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from producer_sdk.command import RUNS_TOPIC
from tests.support.commands import Command, user_of
from tests.support.runs import Runs
from tests.support.topics import TopicFactory


@pytest.fixture
async def runs(database_url: str) -> AsyncIterator[Runs]:
    connection = await asyncpg.connect(database_url)
    yield Runs(connection)
    await connection.close()


async def topics(database_url: str, kafka: str, *asked: str) -> dict[str, dict[str, Any]]:
    """Findings about topics, by name."""
    options = [word for topic in asked for word in ("--topic", topic)]
    _, output = await Command(database_url)("check", "--json", *options, FENCEPOST_KAFKA_BOOTSTRAP_SERVERS=kafka)
    return {found["name"]: found for found in json.loads(output) if found["name"].startswith("topic ")}


async def forgotten(runs: Runs, topic: str) -> None:
    """A run whose events are no longer among the newest rows of the outbox."""
    await runs.accept(topic=topic)
    await runs.connection.execute("DELETE FROM fencepost.outbox")


def missing_topic() -> str:
    return f"missing-{uuid.uuid4().hex}"


async def test_before_the_first_run_the_default_topic_is_looked_at(database_url: str, kafka: str) -> None:
    found = await topics(database_url, kafka)
    assert found
    assert all(name.removeprefix("topic ").partition(":")[0] == RUNS_TOPIC for name in found)
    assert all(finding["status"] in ("ok", "warn") for finding in found.values())


async def test_a_topic_of_runs_that_is_missing_is_a_warning_with_its_remedy(runs: Runs, database_url: str, kafka: str) -> None:
    name = missing_topic()
    await forgotten(runs, name)
    found = await topics(database_url, kafka)
    assert list(found) == [f"topic {name}"]
    finding = found[f"topic {name}"]
    assert (finding["status"], finding["detail"]) == ("warn", "does not exist")
    assert finding["remedy"].startswith("create it before a command is accepted")


async def test_a_missing_topic_that_rows_wait_for_is_a_failure(runs: Runs, database_url: str, kafka: str) -> None:
    name = missing_topic()
    await runs.accept(topic=name)
    assert (await topics(database_url, kafka))[f"topic {name}"]["status"] == "fail"


async def test_a_topic_that_was_asked_for_is_needed_even_if_runs_name_it(runs: Runs, database_url: str, kafka: str) -> None:
    name = missing_topic()
    await forgotten(runs, name)
    assert (await topics(database_url, kafka, name))[f"topic {name}"]["status"] == "fail"


async def test_the_topics_of_the_newest_runs_are_looked_at_whole(
    runs: Runs, database_url: str, kafka: str, topic: TopicFactory
) -> None:
    names = {await topic(partitions=1), await topic(partitions=1)}
    for name in names:
        await forgotten(runs, name)
    found = await topics(database_url, kafka)
    assert {name.removeprefix("topic ").partition(":")[0] for name in found} == names
    assert {finding["status"] for finding in found.values()} <= {"ok", "warn"}


async def test_a_relay_s_own_role_may_ask_though_it_reads_no_runs(runs: Runs, database_url: str, kafka: str) -> None:
    await forgotten(runs, missing_topic())
    async with user_of("fencepost_relay", database_url) as address:
        found = await topics(address, kafka)
    assert found
    assert "fail" not in {finding["status"] for finding in found.values()}
