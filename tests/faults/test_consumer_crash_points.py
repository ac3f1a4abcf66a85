"""A consumer ends at every point between the poll and the commit of offsets; another goes on, and everything exists once."""

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import pytest

from fencepost.devservices.processes import Watchdog
from tests.support.consumer_handlers import SCHEMA
from tests.support.consumer_process import ConsumerProcesses
from tests.support.consumers import Stage, stage
from tests.support.records import read_all
from tests.support.relay_process import RelayFactory
from tests.support.runs import Runs
from tests.support.service_process import Setting
from tests.support.topics import TopicFactory, create_topic

pytestmark = pytest.mark.services

MESSAGES: Final = 3
POLLED: Final = [("poll", "after", 1), ("known", "before", 2)]
OFFSETS: Final = [("commit_offsets", "before", 2), ("commit_offsets", "after", 2)]
EFFECT: Final = [
    ("reserve", "before", 1), ("reserve", "after", 1), ("send", "after", 1), ("finish", "before", 1), ("finish", "after", 1),
]  # fmt: skip
COMMIT: Final = [("commit", "before", 1), ("commit", "after", 1)]
WITHIN: Final = [("record_within", "before", 1), ("record_within", "after", 1), *COMMIT]
# A single message's row goes out with BEGIN.
BEGUN: Final = [("begin", "before", 1), ("begin", "after", 1), *COMMIT]
RECORD: Final = [("record", "before", 1), ("record", "after", 1)]
DEAD: Final = [("store_dead", "before", 1), ("store_dead", "after", 1)]
POINTS: Final = {
    "once": [*POLLED, *EFFECT, *RECORD, *OFFSETS],
    "transaction": [*POLLED, *BEGUN, *OFFSETS],
    "both": [*EFFECT[2:], *BEGUN],
    "batch": [POLLED[0], *WITHIN, *OFFSETS],
    "poison": [*POLLED, *DEAD, *OFFSETS],
    "fencepost.run_queued": [("claim_run", "before", 1), ("claim_run", "after", 1), *EFFECT[2:], *WITHIN, *OFFSETS],
}
EVERY: Final = [(kind, point) for kind, points in POINTS.items() for point in points]


@pytest.fixture
async def made(database_url: str, kafka: str, topic: TopicFactory) -> AsyncIterator[Stage]:
    async with stage(database_url, kafka, topic) as one:
        await one.connection.execute(SCHEMA)
        yield one


@pytest.fixture
def processes(made: Stage, tmp_path: Path, watchdog: Watchdog) -> Iterator[ConsumerProcesses]:
    started = ConsumerProcesses(made, tmp_path, watchdog)
    yield started
    started.kill_all()


async def sent(made: Stage, kind: str) -> list[str]:
    """The events, of several keys; for runs the events of runs that were accepted."""
    if kind != "fencepost.run_queued":
        return [await made.send({"n": number}, type=kind, key=f"k{number}") for number in range(MESSAGES)]
    runs, events = Runs(made.connection, workflow="report"), list[str]()
    for number in range(MESSAGES):
        run_id = await runs.accept()
        headers = {"ce_runid": str(run_id), "ce_tenantid": runs.tenant}
        events.append(await made.send({"n": number}, type=kind, key=str(run_id), headers=headers))
    return events


@pytest.mark.parametrize(("kind", "point"), EVERY, ids=lambda part: "-".join(map(str, part)) if isinstance(part, tuple) else part)
async def test_whatever_the_point_everything_exists_once(
    made: Stage, processes: ConsumerProcesses, start_relay: RelayFactory, kind: str, point: tuple[str, str, int]
) -> None:
    """CONSUME-2, 8, 15, 21; LEDGER-2, 3, 4, 9, 12, 13."""
    dead_letters = f"{made.topic}-dead"
    if kind == "poison":
        await create_topic(made.kafka, dead_letters, 1)
    # A static member: the process that comes after it has its partitions at once, and not when the session is over.
    settings: dict[str, Setting] = {"consumer_instance": "one"}
    if kind == "poison":
        settings["consumer_dead_letter_topic"] = dead_letters
    events = await sent(made, kind)
    crashing = processes.start(crash=point, settings=settings)
    assert await crashing.wait(60) == -9
    processes.start(settings=settings)
    await made.until_committed({0: MESSAGES})
    outcomes = await made.outcomes()
    assert outcomes == dict.fromkeys(events, "failed" if kind == "poison" else "succeeded")
    if kind in {"once", "both", "fencepost.run_queued"}:
        calls = await made.connection.fetch("SELECT event_id FROM calls")
        assert Counter(row["event_id"] for row in calls) == Counter(events)
        states = await made.connection.fetch("SELECT state FROM fencepost.effects WHERE operation = 'charge'")
        assert {row["state"] for row in states} <= {"succeeded", "applied"}
    if kind in {"transaction", "both", "batch", "fencepost.run_queued"}:
        written = await made.connection.fetch("SELECT event_id FROM written")
        assert Counter(row["event_id"] for row in written) == Counter(events)
    if kind == "poison":
        letters = await made.dead()
        assert [letter["run_key"] for letter in letters] == events
        start_relay(made.database_url, made.kafka)
        published = await read_all(made.kafka, dead_letters, count=MESSAGES)
        assert len({dict(record.headers)["ce_id"] for record in published}) == MESSAGES
        assert {dict(record.headers)["ce_type"] for record in published} == {b"fencepost.message_dead_lettered"}
    if kind == "fencepost.run_queued":
        states = await made.connection.fetch("SELECT state, output FROM fencepost.runs")
        assert {(row["state"], row["output"]) for row in states} == {("completed", b'{"done":true}')}


async def test_a_message_that_ends_its_process_is_given_up_and_the_partition_moves_on(
    made: Stage, processes: ConsumerProcesses
) -> None:
    """The first end is nobody's yet; two more are its attempts; then it is given up before it begins, and nobody else is blamed."""
    await made.send({}, type="deadly", key="a")
    await made.send({"n": 1}, type="transaction", key="b")
    static: dict[str, Setting] = {"consumer_instance": "one"}
    for _ in range(3):
        assert await processes.start(settings=static).wait(60) == 3
    processes.start(settings=static)
    await made.until_committed({0: 2})
    (letter,) = await made.dead()
    assert (letter["event_type"], letter["error_code"]) == ("deadly", "process_ended")
    assert await made.connection.fetchval("SELECT count(*) FROM begun") == 3
    assert await made.connection.fetchval("SELECT count(*) FROM written") == 1
