"""Streams of whole workflows by real workers: killed, continued, retried; and what a reader has in the end."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from consumer_sdk import WorkflowContext
from fencepost.workflows import Workflows
from tests.support.chunks import Frame, Reader
from tests.support.workflows import SOON, Hall, hall_on

pytestmark = pytest.mark.services


@pytest.fixture
async def hall(database_url: str) -> AsyncIterator[Hall]:
    async with hall_on(database_url) as hall:
        yield hall


async def test_a_killed_workers_stream_starts_over_with_what_had_ended(hall: Hall) -> None:
    """STREAM-14, STREAM-20: one step had ended and one had not. The second worker's stream holds the first as it was, and one text
    of the second; nothing of two executions is glued together."""
    workflows, reached = Workflows(), asyncio.Event()
    executions: list[str] = []

    async def look_up(context: WorkflowContext) -> str:
        executions.append("look up")
        for word in ("found", "it"):
            await context.publish(word)
        return "it"

    async def answer(context: WorkflowContext, about: str) -> str:
        executions.append("answer")
        mine = f"text {executions.count('answer')}"
        await context.publish([mine, 0])
        if executions.count("answer") == 1:
            reached.set()
            await asyncio.Event().wait()
        await context.publish([mine, 1])
        return f"{mine} about {about}"

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, _value: None) -> str:
        await context.publish("intro")

        async def look() -> str:
            return await look_up(context)

        async def tell(about: str) -> str:
            return await answer(context, about)

        return await context.step("answer", tell, await context.step("look up", look))

    first = await hall.work(workflows)
    run_id = await hall.accept()
    async with asyncio.timeout(10):
        await reached.wait()
    reader = Reader(hall.connection, run_id)
    seen = await reader.read()
    await hall.kill(first)
    await hall.work(workflows)

    assert await hall.output(run_id) == "text 2 about it"
    assert executions == ["look up", "answer", "answer"]
    assert seen == [Frame(0, 0, "intro"), Frame(0, 1, "found"), Frame(0, 2, "it"), Frame(0, 3, ["text 1", 0])]
    assert await reader.read() == [
        Frame(1, 0, "intro"), Frame(1, 1, "found"), Frame(1, 2, "it"), Frame(1, 3, ["text 2", 0]), Frame(1, 4, ["text 2", 1]),
    ]  # fmt: skip


async def test_a_workflow_that_publishes_in_steps_goes_on_with_its_stream_after_a_sleep(hall: Hall) -> None:
    workflows = Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, _value: None) -> None:
        for day in range(2):
            await context.step("report", context.publish, f"day {day}")
            await context.sleep(86_400)

    await hall.work(workflows)
    run_id = await hall.accept()
    for _ in range(2):
        await hall.sleeps(run_id)
        await hall.wakes(run_id)
    await hall.reaches(run_id, "completed")

    assert await Reader(hall.connection, run_id).read() == [Frame(0, 0, "day 0"), Frame(0, 1, "day 1")]
