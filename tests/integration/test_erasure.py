"""Erasure of a lineage: nothing of what was said is left in any table, whoever was in the middle of what, and nothing comes back.

Every payload of these tests holds the marker, and every table is searched for it.
"""

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final
from uuid import UUID

import asyncpg
import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel

import producer_sdk.asyncpg
from consumer_sdk import Applied, Effect, Message, MessageContext, MessageHandlers, Terminal, WorkflowContext, WorkflowFailure
from consumer_sdk.lineages_command import _erase
from fencepost.devservices import Services
from fencepost.errors import ConfigurationError, InvalidCommand, RunNotFound, TransactionRequired
from fencepost.workflows import Workflows
from tests.support.commands import Command, user_of
from tests.support.consumers import SECRETS, Ping, stage
from tests.support.dumps import everything_stored
from tests.support.emptied import emptied
from tests.support.routes import DOMAIN, SOON, Shop, bearer, slug
from tests.support.run_invariants import violations
from tests.support.session import SharedServices
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually
from tests.support.workflows import Hall, hall_on

MARKER: Final = "strictly-between-us"
BY_ANA: Final = ("--actor", "ana", "--reason", "the customer asked")
BY: Final = {"actor": "ana", "reason": "the customer asked"}
ERASE: Final = "SELECT outcome FROM fencepost.erase_lineage('acme', $1, 'ana', 'the customer asked')"


@pytest.fixture(scope="module")
def erasure_url(services: Services, shared_services: SharedServices) -> Iterator[str]:
    """The module's database."""
    url = services.create_database(shared_services.template_url)
    yield url
    services.drop_database(url)


@pytest.fixture
async def hall(erasure_url: str) -> AsyncIterator[Hall]:
    async with hall_on(erasure_url) as hall:
        yield hall


@pytest.fixture
async def shop(erasure_url: str) -> AsyncIterator[Shop]:
    connection = await emptied(erasure_url)
    await connection.execute(DOMAIN)
    await connection.execute("TRUNCATE fencepost.effects, fencepost.audit")
    yield Shop(erasure_url, connection)
    await connection.close()


@pytest.fixture
def command(erasure_url: str) -> Command:
    return Command(erasure_url)


# -- a lineage of three runs, by routes ---------------------------------------------------------------------------------------


class Letter(BaseModel):
    text: str
    left: int = 1


class Refused(WorkflowFailure):
    """Mapped to 422."""


def shown(letter: Letter) -> dict[str, str]:
    return {"shown": letter.text}


class Teller:
    """POST /told and POST /streamed of one workflow: it goes on as new once, is refused, and succeeds when it is replayed."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.refuses = True

    def routes(self, app: FastAPI) -> None:
        durable = self.shop.durable
        workflow = durable.workflow("tell", failures={Refused: 422}, retry=SOON)(self._tell)
        router = durable.router()
        router.post("/told")(durable.route(workflow, name="told", present=shown)(_same))
        router.post("/streamed")(durable.stream(workflow, name="streamed", present=shown)(_same))
        app.include_router(router)

    async def _tell(self, context: WorkflowContext, letter: Letter) -> Letter:
        async def said(text: str) -> str:
            await context.publish({"said": text})
            return text

        await context.step("say", said, letter.text)
        await context.once("provider.keep", request=letter.text, call=_keeping(letter.text))
        await context.event("told", {"said": letter.text})
        await context.save({"seen": letter.text})
        if letter.left:
            context.continue_as_new(Letter(text=letter.text, left=letter.left - 1))
        if self.refuses:
            raise Refused(details={"text": letter.text})
        return letter


async def _same(letter: Letter) -> Letter:
    return letter


def _keeping(text: str) -> Callable[[Effect], Any]:
    async def keep(_effect: Effect) -> Applied:
        return Applied({"kept": text}, reference=text)

    return keep


@asynccontextmanager
async def telling(shop: Shop, command: Command) -> AsyncIterator[tuple[httpx.AsyncClient, dict[str, httpx.Response]]]:
    """A client, and the last answers of each route, whose lineages have three runs each."""
    teller = Teller(shop)
    async with shop.serving(shop.app(prepare=teller.routes)) as client, shop.working():
        for path in ("/told", "/streamed"):
            assert MARKER in (await told(client, path)).text
        teller.refuses = False
        for failed in await shop.connection.fetch("SELECT run_id FROM fencepost.runs WHERE state = 'failed'"):
            ended, output = await command("runs", "replay", failed["run_id"], "--tenant", "acme", *BY_ANA)
            assert ended == 0, output
        answers = {path: await told(client, path) for path in ("/told", "/streamed")}
        assert all(answer.status_code == 200 and MARKER in answer.text for answer in answers.values())
        yield client, answers


async def told(client: httpx.AsyncClient, path: str, **headers: str) -> httpx.Response:
    sent = bearer() | {"idempotency-key": path} | headers
    return await client.post(path, headers=sent, json={"text": MARKER})


async def lineages(shop: Shop) -> list[asyncpg.Record]:
    """Each lineage's runs in their order, and its monitor."""
    return await shop.connection.fetch(
        "SELECT l.route, l.monitor_id, array_agg(r.run_id ORDER BY r.iteration, r.created_at) AS runs"
        " FROM fencepost.lineages AS l JOIN fencepost.runs AS r USING (root_run_id, tenant_id) GROUP BY 1, 2 ORDER BY 1"
    )


async def marked(connection: "asyncpg.Connection[Any]") -> list[str]:
    """Where the marker stands."""
    return [line for line in (await everything_stored(connection)).splitlines() if MARKER in line]


@pytest.mark.parametrize("named", ["first run", "second run", "newest run", "monitor"])
async def test_nothing_of_a_lineage_is_left_whatever_it_is_named_by(shop: Shop, command: Command, named: str) -> None:
    """SEC-8, ROUTE-30, L7, S42, R45, S29: three runs, from the input to the answer; retries get 410, and nothing starts."""
    async with telling(shop, command) as (client, _):
        places = {line.partition(":")[0] for line in await marked(shop.connection)}
        assert places >= {
            f"fencepost.{column}" for column in (
                "runs.input", "runs.output", "runs.failure", "chunks.data", "effects.result", "effects.provider_reference",
                "jobs.checkpoint", "run_events.detail", "outbox.payload", "lineages.answer",
            )
        }  # fmt: skip
        for found in await lineages(shop):
            assert len(found["runs"]) == 3
            ids = dict(
                zip(["first run", "second run", "newest run", "monitor"], [*found["runs"], found["monitor_id"]], strict=True)
            )
            answer = await command.json("lineages", "erase", "acme", ids[named], *BY_ANA)
            root = str(found["runs"][0])
            assert answer == {"tenant_id": "acme", "dry_run": False, "run_id": root, "outcome": "erased", "runs": 3}
            again = await command.json("lineages", "erase", "acme", ids[named], *BY_ANA)
            assert (again["outcome"], again["runs"]) == ("already_erased", 0)
        assert await marked(shop.connection) == []
        before = await shop.stored()
        for path in ("/told", "/streamed"):
            assert_gone(await told(client, path))
            assert_gone(await client.post(path, headers=bearer() | {"idempotency-key": path}, json={"text": "another"}))
        assert_gone(await told(client, "/streamed", **{"last-event-id": "0.0"}))
        for found in await lineages(shop):
            for accepted in ("application/json", "text/event-stream"):
                assert_gone(await client.get(f"/operations/{found['monitor_id']}", headers=bearer() | {"accept": accepted}))
        assert await shop.stored() == before
    keys = await shop.connection.fetch("SELECT run_id, fingerprint, erased FROM fencepost.idempotency_keys")
    assert [tuple(key) for key in keys] == [(None, None, True)] * 2
    assert await violations(shop.connection) == []


def assert_gone(answer: httpx.Response) -> None:
    assert (answer.status_code, slug(answer)) == (410, "erased")
    assert "retry-after" not in answer.headers


async def test_what_waits_to_be_published_is_an_event_without_its_details(shop: Shop, command: Command) -> None:
    """SEC-8: consumers still see that it was, and every sequence."""
    async with telling(shop, command):
        for found in await lineages(shop):
            await shop.connection.fetchrow(ERASE, found["runs"][0])
    rows = await shop.connection.fetch("SELECT payload FROM fencepost.outbox WHERE event_type = 'fencepost.workflow.told'")
    assert len(rows) == 6
    for row in rows:
        event = json.loads(row["payload"])
        assert event.keys() == {
            "run_id", "tenant_id", "sequence", "type", "workflow", "workflow_version", "state", "occurred_at",
        }  # fmt: skip
        assert event["type"] == "workflow.told"


async def test_a_dry_run_erases_nothing_and_people_are_told(shop: Shop, command: Command) -> None:
    async with telling(shop, command):
        root = (await lineages(shop))[0]["runs"][0]
        before = await marked(shop.connection)
        assert await command("lineages", "erase", "acme", root, *BY_ANA, "--dry-run") == (0, "Would be erased: 3 runs.\n")
        assert await marked(shop.connection) == before
        assert await command("lineages", "erase", "acme", root, *BY_ANA) == (0, "Erased: 3 runs.\n")
        assert await command("lineages", "erase", "acme", root, *BY_ANA) == (0, "Already erased. Nothing was changed.\n")
    rows = await shop.connection.fetch("SELECT actor, reason, detail FROM fencepost.audit WHERE command = 'lineages erase'")
    assert [(row["actor"], row["reason"], json.loads(row["detail"])) for row in rows] == [
        ("ana", "the customer asked", {"tenant_id": "acme", "run_id": str(root), "runs": 3})
    ]


# -- messages of the lineage --------------------------------------------------------------------------------------------------


async def test_messages_of_its_runs_that_were_given_up(
    database_url: str, kafka: str, topic: TopicFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEC-8: dead letters, their published copies, and results of effects; a message that comes later leaves only its fact."""
    monkeypatch.setenv("FENCEPOST_IDEMPOTENCY_SECRETS", SECRETS)
    app = MessageHandlers()

    @app.handler("ping", model=Ping, step="keep")
    async def keep(_message: Message[Ping], context: MessageContext) -> None:
        await context.once("provider.keep", request=1, call=_keeping(MARKER))
        raise Terminal("refused")

    published = await topic(partitions=1)
    async with hall_on(database_url) as hall, stage(database_url, kafka, topic) as made:
        run, other = await hall.accept(MARKER), await hall.accept("another")
        headers = {"ce_tenantid": "acme", "x-name": MARKER}
        async with made.running(app, consumer_dead_letter_topic=published):
            for about in (run, other):
                kept = MARKER if about == run else "another's"
                await made.send({"n": 1, "name": kept}, key=kept, headers=headers | {"ce_runid": str(about), "x-name": kept})
            await made.until_committed({0: 2})
            places = {line.partition(":")[0] for line in await marked(hall.connection)}
            assert places >= {
                "fencepost.dead_letters.payload", "fencepost.dead_letters.key", "fencepost.dead_letters.header_values",
                "fencepost.outbox.payload", "fencepost.outbox.key", "fencepost.outbox.header_values", "fencepost.effects.result",
            }  # fmt: skip
            await hall.connection.fetchrow(ERASE, run)
            others = "UPDATE fencepost.effects SET result = NULL, provider_reference = NULL WHERE run_key = $1"
            await hall.connection.execute(others, str(other))  # whose handler said the same
            assert await marked(hall.connection) == []
            await made.send({"n": 2, "name": MARKER}, key=MARKER, headers=headers | {"ce_runid": str(run)})
            await made.until_committed({0: 3})
        letters = {row["offset"]: (row["state"], row["payload"]) for row in await made.dead()}
        assert letters == {0: ("discarded", None), 1: ("dead", b'{"n": 1, "name": "another\'s"}'), 2: ("dead", None)}
        left = [line for line in await marked(hall.connection) if "effects." not in line]  # what the later message did anew
        assert left == []


# -- live runs ----------------------------------------------------------------------------------------------------------------

#: What a worker is about to write, and how its statement is called.
WRITES: Final = {
    "step": "record_steps", "publish": "publish_chunks", "once": "finish_effect", "begin": "finish_effect", "save": "renew",
    "event": "append_event", "continue": "continue_run", "complete": "complete", "fail": "fail",
}  # fmt: skip


class Stubborn:
    """A workflow that comes to the moment before a write, waits there whoever cancels it, and then writes."""

    def __init__(self, write: str) -> None:
        self.write = write
        self.there = asyncio.Event()
        self.gate = asyncio.Event()
        self.workflows = Workflows()
        self.workflows.workflow("order", retry=SOON, failures={Refused: 422})(self._order)

    async def _order(self, context: WorkflowContext, text: str) -> str:
        match self.write:
            case "step":
                await context.step("say", self._waited, text)
            case "once":
                await context.once("provider.keep", request=1, call=self._kept)
            case _:
                await self._waited(text)
                await self._written(context, text)
        return text

    async def _written(self, context: WorkflowContext, text: str) -> None:
        match self.write:
            case "publish":
                await context.publish({"said": text})
            case "save":
                await context.save({"seen": text})
            case "event":
                await context.event("told", {"said": text})
            case "begin":
                await context.once("provider.keep", request=1, call=self._kept)
            case "continue":
                context.continue_as_new(text)
            case "fail":
                raise Refused(details=text)

    async def _waited(self, text: str) -> str:
        self.there.set()
        while not self.gate.is_set():
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                continue
        return text

    async def _kept(self, _effect: Effect) -> Applied:
        return Applied(await self._waited(MARKER), reference=MARKER)


@pytest.mark.parametrize("write", WRITES)
async def test_what_a_live_run_writes_after_its_erasure_is_refused(hall: Hall, write: str) -> None:
    """SEC-8: the run ends as cancelled, once."""
    stubborn = Stubborn(write)
    worker = await hall.work(stubborn.workflows)
    run = await hall.accept(MARKER)
    await stubborn.there.wait()
    assert await hall.connection.fetchval(ERASE, run) == "erased"
    stubborn.gate.set()
    await hall.stop(worker)
    await assert_erased(hall, run)


@pytest.mark.parametrize("write", WRITES)
async def test_what_a_live_run_writes_during_its_erasure_is_refused(hall: Hall, write: str) -> None:
    """SEC-8: the write was on its way, and waits for the erasure's commit or comes again behind it."""
    stubborn = Stubborn(write)
    worker = await hall.work(stubborn.workflows)
    run = await hall.accept(MARKER)
    await stubborn.there.wait()
    eraser = await asyncpg.connect(hall.database_url)
    try:
        async with eraser.transaction():
            assert await eraser.fetchval(ERASE, run) == "erased"
            opened_at = await hall.connection.fetchval("SELECT clock_timestamp()")
            stubborn.gate.set()
            await eventually(lambda: _asked(hall, WRITES[write], opened_at), message=f"{write} is on its way")
    finally:
        await eraser.close()
    await hall.stop(worker)
    await assert_erased(hall, run)


async def _asked(hall: Hall, statement: str, since: Any) -> bool:
    """A write that does not wait for the locked row has asked why it changed nothing."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query ~ $1 AND query_start >= $2"
    return bool(await hall.connection.fetchval(query, f"^-- fencepost:({statement}|why_lost)\n", since))


async def assert_erased(hall: Hall, run: UUID) -> None:
    assert await marked(hall.connection) == []
    assert [(row["state"], row["erased_at"] is not None) for row in await hall.lineage(run)] == [("cancelled", True)]
    events = await hall.connection.fetch("SELECT type, detail FROM fencepost.run_events WHERE run_id = $1 ORDER BY sequence", run)
    assert [row["type"] for row in events] == ["run_queued", "run_cancelled"]
    assert json.loads(events[-1]["detail"]) == {"decided_by": "erasure"}
    assert await violations(hall.connection) == []


async def test_an_answer_that_is_being_shaped_meanwhile_is_not_kept(shop: Shop) -> None:
    """SEC-8: the route's statement waits for the erasure, and finds the answer's place taken."""
    keep = "SELECT fencepost.keep_answer('acme', $1, $1, $2)"
    async with shop.open() as client:
        assert (await client.order()).status_code == 201
    run = await shop.connection.fetchval("SELECT run_id FROM fencepost.runs")
    eraser, route = await asyncpg.connect(shop.database_url), await asyncpg.connect(shop.database_url)
    try:
        async with eraser.transaction():
            await eraser.fetchrow(ERASE, run)
            keeping = asyncio.create_task(route.fetchval(keep, run, MARKER.encode()))
            await eventually(lambda: _waits(shop.connection, "%keep_answer%"))
        assert await keeping is None
    finally:
        await eraser.close()
        await route.close()
    assert await marked(shop.connection) == []


async def _waits(connection: "asyncpg.Connection[Any]", query: str) -> bool:
    waiting = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE $1"
    )
    return bool(await connection.fetchval(waiting, query))


# -- several at once ----------------------------------------------------------------------------------------------------------


async def erased(database_url: str, run: UUID) -> Mapping[str, Any]:
    """As the command does it, which cannot be invoked several times at once in one process."""
    return await _erase(database_url, ("acme", run, "ana", "asked"), dry_run=False)


async def test_of_several_erasures_at_once_one_finds_something_to_do(hall: Hall) -> None:
    run = await hall.accept(MARKER)
    answers = await asyncio.gather(*[erased(hall.database_url, run) for _ in range(4)])
    assert sorted(answer["outcome"] for answer in answers) == ["already_erased"] * 3 + ["erased"]
    assert await hall.connection.fetchval("SELECT count(*) FROM fencepost.audit") == 1


async def test_a_deadlock_is_tried_again(hall: Hall, command: Command) -> None:
    """40P01: somebody holds the first run's row and wants the job that the erasure holds."""
    run = await hall.accept(MARKER)
    name = await hall.connection.fetchval("SELECT current_database()")
    await hall.connection.execute(f"ALTER DATABASE {name} SET deadlock_timeout = '3s'")
    other = await asyncpg.connect(hall.database_url, server_settings={"deadlock_timeout": "5min"})
    try:
        async with other.transaction():
            await other.execute("SELECT FROM fencepost.runs WHERE run_id = $1 FOR SHARE", run)
            erasing = asyncio.create_task(command.json("lineages", "erase", "acme", run, *BY_ANA))
            await eventually(lambda: _waits(hall.connection, "%erase_lineage%"))
            await other.execute("SELECT FROM fencepost.jobs WHERE run_id = $1 FOR UPDATE", run)
            assert not erasing.done()
        assert (await erasing)["outcome"] == "erased"
    finally:
        await other.close()
        await hall.connection.execute(f"ALTER DATABASE {name} RESET deadlock_timeout")
    await assert_erased(hall, run)


async def test_erasures_among_continuations_and_replays(hall: Hall) -> None:
    """SEC-8: lineages that grow while they are erased are erased whole, and no worker fails of it."""
    workflows = Workflows()

    @workflows.workflow("order", retry=SOON, failures={Refused: 422})
    async def order(context: WorkflowContext, text: str) -> str:
        await context.step("say", _echo, text)
        if context.iteration % 4 == 3:
            raise Refused(details=text)
        context.continue_as_new(text)

    async def replayed() -> None:
        failed = await hall.connection.fetch("SELECT run_id FROM fencepost.runs WHERE state = 'failed' AND erased_at IS NULL")
        for row in failed:
            with contextlib.suppress(asyncpg.DeadlockDetectedError):  # with an erasure; whoever is ended may ask again
                await hall.connection.fetchrow(
                    "SELECT fencepost.replay_run('acme', $1, gen_random_uuid(), 'ana', 'test', 1000, interval '30 days')",
                    row["run_id"],
                )

    worker = await hall.work(workflows, worker_concurrency=8)
    runs = [await hall.accept(MARKER) for _ in range(8)]
    for run in runs:
        await hall.reaches(run, "continued")
    erasing = [asyncio.create_task(erased(hall.database_url, run)) for run in runs]
    while not all(one.done() for one in erasing):
        await replayed()
    answers = [await one for one in erasing]
    assert [answer["outcome"] for answer in answers] == ["erased"] * 8
    assert all(answer["runs"] >= 2 for answer in answers)
    await hall.stop(worker)
    assert await marked(hall.connection) == []
    assert await hall.connection.fetchval("SELECT bool_and(erased_at IS NOT NULL) FROM fencepost.runs")
    assert await violations(hall.connection) == []


async def _echo(text: str) -> str:
    return text


STEP: Final = """
INSERT INTO fencepost.effects (run_key, tenant_id, iteration, step, occurrence, operation, state, run_id, run_generation, holder,
                               fingerprint, fingerprint_version, provider_key, result, finished_at)
SELECT r.root_run_id, r.tenant_id, r.iteration, 'say', 0, 'fencepost.step', 'succeeded', r.run_id, j.lease_generation, 'w',
       sha256('x'), 1, '', convert_to($2, 'UTF8'), clock_timestamp()
FROM fencepost.jobs AS j JOIN fencepost.runs AS r USING (run_id, tenant_id) WHERE j.run_id = $1 FOR SHARE OF j
"""


async def test_what_a_run_keeps_that_was_added_while_the_erasure_waited_is_gone_as_well(hall: Hall) -> None:
    """SEC-8: steps and effects of all iterations are under the first run's id, and the erasure has not seen the newest run yet."""
    go_on, begun, workflows = asyncio.Event(), [asyncio.Event(), asyncio.Event()], Workflows()

    @workflows.workflow("order", retry=SOON)
    async def order(context: WorkflowContext, text: str) -> str:
        if context.iteration:
            begun[context.iteration - 1].set()
            await (go_on.wait() if context.iteration == 1 else asyncio.Event().wait())
        context.continue_as_new(text)

    worker = await hall.work(workflows)
    run = await hall.accept(MARKER)
    await begun[0].wait()
    first, newest = await asyncpg.connect(hall.database_url), await asyncpg.connect(hall.database_url)
    try:
        async with newest.transaction():
            async with first.transaction():
                await first.execute("SELECT FROM fencepost.jobs WHERE run_id = $1 FOR KEY SHARE", run)
                erasing = asyncio.create_task(erased(hall.database_url, run))
                await eventually(lambda: _waits(hall.connection, "%erase_lineage%"))
                go_on.set()
                await begun[1].wait()
                await newest.execute(STEP, (await hall.lineage(run))[-1]["run_id"], MARKER)
            await eventually(lambda: _blocks(hall.connection, newest), message="the erasure has come to the newest run")
        assert (await erasing)["runs"] == 3
    finally:
        await first.close()
        await newest.close()
    await hall.stop(worker)
    assert await marked(hall.connection) == []


async def _blocks(connection: "asyncpg.Connection[Any]", blocking: "asyncpg.Connection[Any]") -> bool:
    query = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid)) AND query LIKE '%erase_lineage%')"
    return bool(await connection.fetchval(query, blocking.get_server_pid()))


# -- who may ------------------------------------------------------------------------------------------------------------------


async def test_another_tenants_lineage_does_not_exist(shop: Shop, command: Command) -> None:
    """SEC-4: a run's id and a monitor's id of another tenant answer as any id does."""
    async with shop.open() as client:
        await client.order(item=MARKER)
    (found,) = await lineages(shop)
    before = await everything_stored(shop.connection)
    for unknown in (found["runs"][0], found["monitor_id"], uuid.uuid4()):
        ended, output = await command("lineages", "erase", "other", unknown, *BY_ANA)
        assert (ended, output) == (
            1,
            "fencepost: the tenant has no run and no monitor of this id; `fencepost runs list` shows the runs\n",
        )
    assert await everything_stored(shop.connection) == before


async def test_what_is_no_id_is_refused_unquoted_with_where_to_find_one(command: Command) -> None:
    ended, output = await command("lineages", "erase", "acme", "customer-4711", *BY_ANA)
    assert ended == 2
    assert "must be the id of a run or of its monitor, a UUID; `fencepost runs list` shows the runs" in output
    assert "customer-4711" not in output


async def test_an_erasure_needs_a_name_and_a_reason(hall: Hall, command: Command) -> None:
    """SEC-10"""
    run = await hall.accept(MARKER)
    for given in (
        ("--actor", "ana"),
        ("--reason", "asked"),
        ("--actor", " ", "--reason", "asked"),
        ("--actor", "ana", "--reason", ""),
    ):
        assert (await command("lineages", "erase", "acme", run, *given))[0] == 2
    async with hall.connection.transaction():
        for actor, reason in ((" ", "asked"), ("ana", ""), ("a" * 257, "asked")):
            with pytest.raises(InvalidCommand):
                await producer_sdk.asyncpg.erase(hall.connection, run, tenant_id="acme", actor=actor, reason=reason)
    assert await marked(hall.connection) != []


@pytest.mark.parametrize(
    ("role", "may"),
    [("fencepost_producer", False), ("fencepost_consumer", False), ("fencepost_relay", False), ("fencepost_operator", True)],
)
async def test_operators_may_erase_and_services_may_not(hall: Hall, role: str, may: bool) -> None:
    """SEC-10"""
    run = await hall.accept(MARKER)
    async with user_of(role, hall.database_url) as url:
        if may:
            assert (await Command(url).json("lineages", "erase", "acme", run, *BY_ANA))["outcome"] == "erased"
        else:
            with pytest.raises(ConfigurationError, match="grant fencepost_operator"):
                await Command(url)("lineages", "erase", "acme", run, *BY_ANA)
    assert (await marked(hall.connection) == []) is may


async def test_a_service_erases_in_its_own_transaction_if_it_was_granted_the_function(hall: Hall) -> None:
    """SEC-10: with its domain rows, or not at all."""
    run = await hall.accept(MARKER)
    erase = producer_sdk.asyncpg.erase
    async with user_of("fencepost_producer", hall.database_url) as url:
        service = await asyncpg.connect(url)
        user = await service.fetchval("SELECT current_user")
        try:
            with pytest.raises(TransactionRequired):
                await erase(service, run, tenant_id="acme", **BY)
            with pytest.raises(ConfigurationError, match=r"GRANT EXECUTE ON FUNCTION fencepost\.erase_lineage"):
                async with service.transaction():
                    await erase(service, run, tenant_id="acme", **BY)
            await hall.connection.execute(f"GRANT EXECUTE ON FUNCTION fencepost.erase_lineage TO {user}")
            with pytest.raises(InvalidCommand, match="read committed"):
                async with service.transaction(isolation="repeatable_read"):
                    await erase(service, run, tenant_id="acme", **BY)
            with pytest.raises(RunNotFound):
                async with service.transaction():
                    await erase(service, run, tenant_id="other", **BY)
            taken_back = service.transaction()
            await taken_back.start()
            assert (await erase(service, run, tenant_id="acme", **BY)).outcome == "erased"
            await taken_back.rollback()
            assert await marked(hall.connection) != []
            async with service.transaction():
                assert (await erase(service, run, tenant_id="acme", **BY)).runs == 1
                assert (await erase(service, run, tenant_id="acme", **BY)).outcome == "already_erased"
        finally:
            await service.close()
            await hall.connection.execute(f"REVOKE ALL ON FUNCTION fencepost.erase_lineage FROM {user}")
    assert await marked(hall.connection) == []
