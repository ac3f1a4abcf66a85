"""What operators see of workflows and do to them: parked runs, steps in a run's story, chains."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final
from uuid import UUID

import pytest

from consumer_sdk import Retryable, WorkflowContext
from fencepost.devservices import Services
from fencepost.workflows import Workflows
from tests.support.commands import Command
from tests.support.run_invariants import violations
from tests.support.session import SharedServices
from tests.support.workflows import SOON, Hall, hall_on

BY_ANA: Final = ("--tenant", "acme", "--actor", "ana", "--reason", "version 1 is back")


@pytest.fixture(scope="module")
def hall_url(services: Services, shared_services: SharedServices) -> Iterator[str]:
    """The module's database."""
    url = services.create_database(shared_services.template_url)
    yield url
    services.drop_database(url)


@pytest.fixture
async def hall(hall_url: str) -> AsyncIterator[Hall]:
    async with hall_on(hall_url) as hall:
        yield hall


@pytest.fixture
def command(hall_url: str) -> Command:
    return Command(hall_url)


async def noted(value: Any) -> Any:
    return value


def of_version(version: int) -> Workflows:
    workflows = Workflows()

    @workflows.workflow("order", version=version, retry=SOON)
    async def order(context: WorkflowContext, _value: None) -> int:
        return version

    return workflows


async def parked(hall: Hall) -> UUID:
    worker = await hall.work(of_version(2))
    run = await hall.accept()
    await hall.parked(run)
    await hall.stop(worker)
    return run


async def test_a_parked_run_is_listed_shown_and_resumed(hall: Hall, command: Command) -> None:
    run, other = await parked(hall), await hall.accept(tenant="other", workflow="invoice")

    (listed,) = await command.json("runs", "list", "--parked")
    assert (listed["run_id"], listed["parked_as"]) == (str(run), "workflow_changed")
    assert await command.json("runs", "list", "--parked", "--tenant", "other") == []
    assert await command.json("runs", "list", "--parked", "--workflow", "invoice") == []
    everything = {row["run_id"]: row["parked_as"] for row in await command.json("runs", "list")}
    assert everything == {str(run): "workflow_changed", str(other): None}
    assert "parked: workflow_changed" in (await command("runs", "list"))[1]
    told = (await command("runs", "show", run))[1]
    assert "parked until it is resumed: workflow_changed" in told
    assert f"fencepost runs resume {run}" in told

    assert (await command.json("runs", "resume", run, *BY_ANA, "--dry-run"))["outcome"] == "resumed"
    await hall.parked(run)
    assert (await command.json("runs", "resume", run, *BY_ANA))["outcome"] == "resumed"
    await hall.work(of_version(1))
    assert await hall.output(run) == 1
    story = [(entry["what"], entry["text"]) for entry in (await command.json("runs", "show", run))["timeline"]]
    assert ("resumed", "by ana: version 1 is back") in story


@pytest.mark.parametrize(
    ("known", "said"),
    [(True, "the run is not parked; nothing was changed"), (False, "tenant acme has no run")],
    ids=["ready", "unknown"],
)
async def test_what_is_not_parked_is_not_resumed(hall: Hall, command: Command, known: bool, said: str) -> None:
    run = await hall.accept() if known else UUID(int=7)
    code, answer = await command("runs", "resume", run, *BY_ANA)

    assert code == 1
    assert said in answer


async def test_parked_and_a_state_exclude_each_other(hall: Hall, command: Command) -> None:
    code, answer = await command("runs", "list", "--parked", "--state", "failed")

    assert code == 2
    assert "exclude each other" in answer


async def test_the_story_of_a_workflow_tells_its_steps_and_timers(hall: Hall, command: Command) -> None:
    workflows, errors = Workflows(), [Retryable("busy")]

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, number: int) -> int:
        await context.step("note", noted, "what nobody may read")
        await context.step("note", noted, 2)
        await context.sleep(60)
        if errors:
            raise errors.pop()
        if number == 0:
            context.continue_as_new(1)
        return number

    await hall.work(workflows)
    run = await hall.accept(0)
    await hall.sleeps(run)
    await hall.wakes(run)
    await hall.reaches(run, "continued")

    told = await command.json("runs", "show", run)
    story = [(entry["what"], entry["text"]) for entry in told["timeline"]]
    assert [text for what, text in story if what == "step"] == ["note: kept", "note: kept, for the 2. time", "fencepost.sleep: set"]
    _, second = await hall.lineage(run)
    assert story[-1] == ("run ended", f"continued as {second['run_id']}")
    assert "nobody may read" not in str(told)
    assert [row["run_id"] for row in await command.json("runs", "list", "--state", "continued")] == [str(run)]
    assert await command.json("effects", "list", "--state", "succeeded") == []


async def test_nothing_is_wrong_with_a_chain(hall: Hall, command: Command) -> None:
    """What `diagnose double-completion` looks for, and what holds of all rows."""
    workflows = Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, number: int) -> int:
        if number < 3:
            context.continue_as_new(number + 1)
        return number

    await hall.work(workflows)
    run = await hall.accept(0)
    await hall.ended(run)
    await asyncio.gather(*(hall.stop(worker) for worker in list(hall._running)))

    assert await violations(hall.connection) == []
    found = await command.json("diagnose", "double-completion")
    assert "fail" not in {finding["verdict"] for finding in found}
