"""Whoever serves durable routes is killed, frozen or cut off: one run for each key, each effect once, one answer."""

import asyncio
import base64
import contextlib
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import asyncpg
import httpx
import pytest
from structlog.testing import capture_logs

from consumer_sdk import WorkflowContext
from fencepost import cancelling
from fencepost.devservices import free_port
from fencepost.devservices.processes import Watchdog
from producer_sdk.http import Principal, Tx, accepting, routing, runtime
from producer_sdk.http.store import Monitor
from producer_sdk.http.transactions import _PoolTransaction
from tests.support.besieged_routes import SCHEMA
from tests.support.routes import (
    DOMAIN,
    Counterpart,
    Order,
    OrderIn,
    PlaceOrder,
    Shop,
    arrived_ago,
    bearer,
    current_principal,
    is_replay,
    slug,
    with_routes_arrived_ago,
)
from tests.support.run_invariants import violations
from tests.support.service_process import ServiceProcess
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import eventually

ROOT: Final = Path(__file__).resolve().parents[2]
APP: Final = "tests.support.besieged_routes"
LEASES: Final = {"worker_lease_seconds": 2, "worker_lease_margin_seconds": 0.5, "worker_poll_interval_ms": 50}
KILLS: Final = 8
PAUSE_SECONDS: Final = (0.0, 1.0)
FREEZE_SECONDS: Final = 3.0
AWAY_SECONDS: Final = 1.5
END_SECONDS: Final = 90.0


class Besieged:
    """Two servers and two workers, each of which may be killed and started anew. ``answers`` has what clients got, by key."""

    def __init__(self, database_url: str, connection: "asyncpg.Connection[Any]", logs: Path, watchdog: Watchdog) -> None:
        self.connection = connection
        self.answers: dict[str, list[httpx.Response]] = {}
        self._database_url = database_url
        self._logs = logs
        self._watchdog = watchdog
        self._clients: list[asyncio.Task[None]] = []
        self._secret = base64.b64encode(secrets.token_bytes(32)).decode()
        self._ports = [free_port() for _ in range(4)]
        self.staff: list[ServiceProcess] = [self._start(number) for number in range(4)]

    @property
    def servers(self) -> Sequence[ServiceProcess]:
        return self.staff[:2]

    @property
    def workers(self) -> Sequence[ServiceProcess]:
        return self.staff[2:]

    def _start(self, number: int) -> ServiceProcess:
        port = self._ports[number]
        serving = ("-m", "uvicorn", f"{APP}:app", "--port", str(port))
        working = ("-m", "fencepost", "worker", "run", f"{APP}:handlers")
        return ServiceProcess(
            serving if number < 2 else working,
            LEASES | {"database_url": self._database_url, "worker_http_port": port, "idempotency_secrets": f"1:{self._secret}"},
            http_port=port,
            log=self._logs / f"process-{number}.log",
            watchdog=self._watchdog,
            environment={"PYTHONPATH": str(ROOT)},
        )

    async def ready(self) -> None:
        for process in self.staff:
            await process.wait_ready()

    def kill(self, number: int) -> None:
        """The next one starts at once, and is ready when it is."""
        self.staff[number].kill()
        self.staff[number] = self._start(number)

    async def freeze(self, number: int, seconds: float) -> None:
        self.staff[number].pause()
        await asyncio.sleep(seconds)
        self.staff[number].resume()

    @asynccontextmanager
    async def insisting(self) -> AsyncIterator[list[str]]:
        """Keys that clients insist on, two each; behind the block each has its answer, and has it once more."""
        keys: list[str] = []
        try:
            yield keys
            async with asyncio.timeout(END_SECONDS):
                await asyncio.gather(*self._clients)
                await asyncio.gather(*(self.insist(key) for key in keys))
        finally:
            for client in self._clients:
                client.cancel()
            await asyncio.wait(self._clients)

    def take(self, keys: list[str], number: int) -> None:
        """So many new keys."""
        fresh = [f"key-{len(keys) + n}" for n in range(number)]
        keys += fresh
        self._clients += [asyncio.create_task(self.insist(key)) for key in fresh for _ in range(2)]

    async def ask(self, client: httpx.AsyncClient, key: str) -> httpx.Response:
        answer = await client.post(
            f"{random.choice(self.servers).url}/subscriptions",
            headers={"authorization": "ada", "idempotency-key": key},
            json={"item": key},
        )
        self.answers.setdefault(key, []).append(answer)
        return answer

    async def insist(self, key: str) -> None:
        """As a client does it: the same request until there is an answer."""
        async with httpx.AsyncClient(timeout=10) as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    answer = await self.ask(client, key)
                    if answer.status_code not in {202, 503}:
                        return
                await asyncio.sleep(0.05)

    async def check(self, keys: Sequence[str]) -> None:
        """One run for each key and iteration, each charged once; one answer, which is no replay once at most."""
        for key in keys:
            ended = [answer for answer in self.answers[key] if answer.status_code not in {202, 503}]
            assert {answer.status_code for answer in ended} == {201}, [answer.text for answer in ended]
            assert len({answer.content for answer in ended}) == 1
            known = [answer for answer in self.answers[key] if answer.status_code == 201 or "location" in answer.headers]
            assert sum("idempotent-replayed" not in answer.headers for answer in known) <= 1
        charged = Counter((row["item"], row["period"]) for row in await self.connection.fetch("SELECT * FROM stage.charges"))
        assert charged == {(key, period): 1 for key in keys for period in (0, 1)}
        counts = {
            table: await self.connection.fetchval(f"SELECT count(*) FROM {table}")
            for table in ("stage.orders", "fencepost.lineages", "fencepost.idempotency_keys", "fencepost.runs")
        }
        assert list(counts.values()) == [len(keys), len(keys), len(keys), 2 * len(keys)]
        assert await violations(self.connection) == []

    def end(self) -> None:
        for process in self.staff:
            process.kill()


@asynccontextmanager
async def besieged_on(database_url: str, logs: Path, watchdog: Watchdog, *, through: str | None = None) -> AsyncIterator[Besieged]:
    """``through``: the database's address for servers and workers, but for what they charge."""
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute(SCHEMA)
        besieged = Besieged(through or database_url, connection, logs, watchdog)
        try:
            await besieged.ready()
            yield besieged
        finally:
            besieged.end()
    finally:
        await connection.close()


async def test_kills_of_servers_and_workers_under_load_cost_no_effect_and_repeat_none(
    database_url: str, tmp_path: Path, watchdog: Watchdog
) -> None:
    """ROUTE-4, KEY-11, KEY-12, R5, S4: two clients insist on each key while everybody is killed at random."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with besieged_on(database_url, tmp_path, watchdog) as besieged:
        async with besieged.insisting() as keys:
            for _ in range(KILLS):
                besieged.take(keys, number=3)
                await asyncio.sleep(chance.uniform(*PAUSE_SECONDS))
                besieged.kill(chance.randrange(4))
        await besieged.check(keys)


async def test_processes_that_freeze_and_a_database_that_is_away_cost_no_effect_and_repeat_none(
    database_url: str, tmp_path: Path, watchdog: Watchdog
) -> None:
    """ROUTE-10, ROUTE-24, ROUTE-32, KEY-11, R5: workers freeze for longer than their leases, servers for as long, the
    database is out of reach, the network falls silent, and listening connections end."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with TcpProxy(database_url) as proxy, besieged_on(database_url, tmp_path, watchdog, through=proxy.url) as besieged:
        faults: list[Callable[[], Awaitable[None]]] = [
            *(partial(besieged.freeze, number, FREEZE_SECONDS) for number in range(4)),
            partial(away, proxy),
            partial(silent, proxy),
            partial(deaf, besieged),
        ]
        async with besieged.insisting() as keys:
            for fault in chance.sample(faults, len(faults)):
                besieged.take(keys, number=3)
                await asyncio.sleep(chance.uniform(*PAUSE_SECONDS))
                await fault()
        await besieged.check(keys)


async def away(proxy: TcpProxy) -> None:
    await proxy.refuse()
    await asyncio.sleep(AWAY_SECONDS)
    await proxy.accept()


async def silent(proxy: TcpProxy) -> None:
    proxy.silence()


async def deaf(besieged: Besieged) -> None:
    await besieged.connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name = 'fencepost-listen'"
    )


# The accepting transaction


@pytest.fixture
async def shop(database_url: str) -> AsyncIterator[Shop]:
    connection = await asyncpg.connect(database_url)
    await connection.execute(DOMAIN)
    yield Shop(database_url, connection)
    await connection.close()


async def test_a_commit_without_an_answer_keeps_no_connection_for_good(shop: Shop) -> None:
    """ROUTE-11, R31: the network falls silent while COMMITs are on their way. Nobody knows; later starts find a connection."""
    await hold_commits(shop)
    async with TcpProxy(shop.database_url) as proxy:
        behind = Shop(
            proxy.url, shop.connection,
            routes_start_connections=2, routes_request_deadline_seconds=4, routes_database_seconds=1,
        )  # fmt: skip
        async with behind.serving(behind.app(), raising=False) as http:
            client = Counterpart(http)
            requests = [asyncio.create_task(client.order(f"k-{n}")) for n in range(2)]
            await eventually(lambda: commits_waiting(shop, 2))
            proxy.silence()
            unknown = await asyncio.gather(*requests)
            assert [(answer.status_code, "location" in answer.headers) for answer in unknown] == [(202, False)] * 2
            await shop.connection.execute("SELECT pg_advisory_unlock(42)")

            async def starts() -> bool:
                return (await client.order("k-2", headers={"prefer": "respond-async"})).status_code == 202

            await eventually(starts, 20, message="a start finds a connection")
            attached = [await client.order(f"k-{n}", headers={"prefer": "respond-async"}) for n in range(2)]
    assert [(answer.status_code, is_replay(answer)) for answer in attached] == [(202, True)] * 2
    stored = await shop.stored()
    assert (stored["runs"], stored["orders"]) == (3, 3)


async def test_what_happens_to_the_connection_after_the_commit_changes_no_answer(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R31: the network falls silent right behind the answer of the COMMIT."""
    commit = _PoolTransaction.commit
    async with TcpProxy(shop.database_url) as proxy:

        async def then_silence(transaction: _PoolTransaction) -> None:
            await commit(transaction)
            proxy.silence()

        monkeypatch.setattr(_PoolTransaction, "commit", then_silence)
        behind = Shop(proxy.url, shop.connection, routes_database_seconds=1)
        async with behind.serving(behind.app(wait_seconds=0), raising=False) as http:
            answer = await Counterpart(http).order()
    assert (answer.status_code, is_replay(answer), "location" in answer.headers) == (202, False, True)


@pytest.mark.parametrize("sqlstate", ["40001", "40P01", "54000"])
async def test_a_commit_that_the_database_undoes_may_be_sent_again(shop: Shop, sqlstate: str) -> None:
    """KEY-15, T5: a serialization failure at the COMMIT, or a full queue of notifications, is no error of the application: nothing
    is stored, and the key is free."""
    await at_commit(shop, f"RAISE EXCEPTION 'no' USING ERRCODE = '{sqlstate}'")
    async with shop.serving(shop.app(), raising=False) as http, shop.working():
        client = Counterpart(http)
        answer = await client.order()
        assert (slug(answer), answer.headers["retry-after"]) == ("unavailable", "1")
        assert set((await shop.stored()).values()) == {0}
        await shop.connection.execute("DROP TRIGGER held ON stage.orders")
        assert not is_replay(await client.order())


@pytest.mark.parametrize("writes", [True, False])
async def test_a_server_that_became_a_reader_is_left(shop: Shop, writes: bool) -> None:
    """T5: starts are refused for as long as there is no writer, and no longer."""
    name = await shop.connection.fetchval("SELECT current_database()")

    @shop.durable.route(shop.workflow, name="quiet")
    async def quiet(order: OrderIn) -> PlaceOrder:
        return PlaceOrder(user="ada", order=order, row=1)

    router = shop.durable.router()
    router.post("/quiet", status_code=201)(quiet)
    app = shop.app(prepare=lambda app: app.include_router(router))
    async with shop.serving(app, raising=False) as http, shop.working():
        client = Counterpart(http)
        path = "/orders" if writes else "/quiet"
        await shop.connection.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
        refused = await client.order(path=path)
        assert (slug(refused), refused.headers["retry-after"]) == ("unavailable", "1")
        await shop.connection.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')
        assert (await client.order(path=path)).status_code == 201


async def test_a_database_that_is_away_and_then_not_migrated_yet_is_waited_for(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """ROUTE-32: as in a deploy where server, database and migration begin at once. It says what it waits for, and serves then."""
    monkeypatch.setattr(runtime, "_REOPEN_SECONDS", 0.05)
    await shop.connection.execute("ALTER SCHEMA fencepost RENAME TO later")
    async with TcpProxy(shop.database_url) as proxy:
        behind = Shop(proxy.url, shop.connection)
        await proxy.refuse()
        with capture_logs() as logs:
            async with behind.serving(behind.app(wait_seconds=0), ready=False, raising=False) as http:
                client = Counterpart(http)
                assert (await client.order()).status_code == 503
                await proxy.accept()
                await eventually(lambda: any(entry["event"] == "database_unusable" for entry in logs), message="it says so")
                assert (await client.order()).status_code == 503
                await shop.connection.execute("ALTER SCHEMA later RENAME TO fencepost")

                async def serves() -> bool:
                    return (await client.order()).status_code == 202

                await eventually(serves, message="it serves")
    told = next(entry for entry in logs if entry["event"] == "database_unusable")
    assert "fencepost migrate" in told["error"]


async def ends_it(tx: Any) -> None:
    await tx.execute("COMMIT")


async def undoes_it(tx: Any) -> None:
    await tx.execute("ROLLBACK")


async def passes_over_an_error(tx: Any) -> None:
    with contextlib.suppress(asyncpg.PostgresError):
        await tx.execute("SELECT 1 / 0")


async def commits_it_by_habit(tx: Any) -> None:
    """As drivers and SQLAlchemy have it; asyncpg has none."""
    await tx.execute("INSERT INTO stage.orders (item) VALUES ('x')")
    await tx.commit()


async def loses_it(tx: Any) -> None:
    tx.terminate()


@pytest.mark.parametrize(
    ("careless", "status"),
    [(ends_it, 500), (undoes_it, 500), (commits_it_by_habit, 500), (passes_over_an_error, 500), (loses_it, 503)],
)
async def test_a_handler_that_breaks_its_transaction_starts_nothing(shop: Shop, careless: Any, status: int) -> None:
    """JOB-2, 9.7-32: no run without its handler's writes, and the next request finds a sound connection."""

    @shop.durable.route(shop.workflow, name="careless")
    async def careless_orders(order: OrderIn, tx: Tx) -> PlaceOrder:
        await careless(tx)
        return PlaceOrder(user="ada", order=order, row=1)

    router = shop.durable.router()
    router.post("/careless", status_code=201)(careless_orders)
    app = shop.app(prepare=lambda app: app.include_router(router))
    async with shop.serving(app, raising=False) as http, shop.working():
        client = Counterpart(http)
        for _ in range(12):  # more than there are connections
            answer = await client.order(path="/careless")
            assert (answer.status_code, "location" in answer.headers) == (status, False)
        assert set((await shop.stored()).values()) == {0}
        assert (await client.order()).status_code == 201


async def test_a_transaction_that_fails_behind_the_run_s_row_is_told_as_failed(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """R31: a task that the handler left goes on with ``tx``. PostgreSQL answers the COMMIT with a ROLLBACK, and no error."""
    commit = _PoolTransaction.commit

    async def fails_before(transaction: _PoolTransaction) -> None:
        await passes_over_an_error(transaction.tx)
        await commit(transaction)

    async with shop.serving(shop.app(), raising=False) as http, shop.working():
        client = Counterpart(http)
        with monkeypatch.context() as patched:
            patched.setattr(_PoolTransaction, "commit", fails_before)
            for _ in range(12):  # more than there are connections
                answer = await client.order()
                assert (answer.status_code, "location" in answer.headers) == (500, False)
        assert set((await shop.stored()).values()) == {0}
        assert not is_replay(await client.order())


@pytest.mark.parametrize("tenant", ["", "a\0b", "a\ud800"])
async def test_a_tenant_that_is_none_is_told_so_everywhere(shop: Shop, tenant: str) -> None:
    """SEC: what a claim or a header holds may reach the principal."""
    app = shop.app()
    app.dependency_overrides[current_principal] = lambda: Principal(tenant, "ada")
    monitor = "/operations/00000000-0000-0000-0000-000000000000"
    async with shop.serving(app, raising=False) as http:
        answers = [
            await Counterpart(http).order(),
            await http.get(monitor),
            await http.post(f"{monitor}/cancel"),
            await http.post(f"{monitor}/stream-link"),
        ]
    assert [slug(answer) for answer in answers] == ["misconfigured"] * 4


async def has_continued(shop: Shop, run_id: UUID) -> bool:
    return bool(await shop.connection.fetchval("SELECT state = 'continued' FROM fencepost.runs WHERE run_id = $1", run_id))


async def at_commit(shop: Shop, do: str) -> None:
    await shop.connection.execute(
        f"CREATE FUNCTION stage.hold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {do}; RETURN NULL; END $$;"
        "CREATE CONSTRAINT TRIGGER held AFTER INSERT ON stage.orders DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION stage.hold()"
    )


async def hold_commits(shop: Shop) -> None:
    """Until the test unlocks 42."""
    await at_commit(shop, "PERFORM pg_advisory_xact_lock(42)")
    await shop.connection.execute("SELECT pg_advisory_lock(42)")


async def commits_waiting(shop: Shop, number: int) -> bool:
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'"
    return int(await shop.connection.fetchval(query)) == number


# What the author's code does


@pytest.mark.parametrize("stubborn", [True, False])
async def test_a_dependency_that_waits_while_it_cleans_up_at_the_deadline(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, stubborn: bool
) -> None:
    """R31: without a bound, as for the word of a connection that is silent. A second cancellation gets it out, and the client its
    answer. One that catches that too is told of, and nobody else waits for it."""
    monkeypatch.setattr(routing, "_CLEAN_UP_SECONDS", 0.01)
    asked, let_go = asyncio.Event(), asyncio.Event()

    async def principal() -> Principal:
        if asked.is_set():
            return Principal("acme", "ada")
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            try:
                await let_go.wait()
            finally:
                while stubborn and not let_go.is_set():
                    with contextlib.suppress(asyncio.CancelledError):
                        await let_go.wait()
        raise AssertionError

    app = shop.app(request_deadline_seconds=4, prepare=arrived_ago(2.9))
    app.dependency_overrides[current_principal] = principal
    async with shop.serving(app) as http, shop.working():
        client = Counterpart(http)
        with capture_logs() as logs:
            late = asyncio.create_task(client.order("k-1"))
            await asked.wait()
            await eventually(lambda: [entry["event"] for entry in logs] == ["dependency_does_not_end"])
            if stubborn:
                assert (await client.order("k-2", headers={"prefer": "respond-async"})).status_code == 202
                assert not late.done()
                let_go.set()
            answer = await late
    assert (answer.status_code, "location" in answer.headers) == (202, False)
    assert [entry["route"] for entry in logs if entry["event"] == "dependency_does_not_end"] == ["orders"]


@pytest.mark.parametrize("stubborn", [True, False])
async def test_a_start_that_does_not_end_gives_its_connection_back(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, stubborn: bool
) -> None:
    """R31: there are few, and all of them would be gone. Nothing of it is ever committed, however it goes on."""
    monkeypatch.setattr(accepting, "_CANCEL_SECONDS", 0.01)
    if not stubborn:
        monkeypatch.setattr(cancelling, "_AGAIN_SECONDS", 10.0)
    let_go, ended = asyncio.Event(), asyncio.Event()
    own = Shop(shop.database_url, shop.connection, routes_start_connections=1)

    @own.durable.route(own.workflow, name="slow", request_deadline_seconds=4)
    async def slow(order: OrderIn, tx: Tx) -> PlaceOrder:
        row = await tx.fetchval("INSERT INTO stage.orders (item) VALUES ('x') RETURNING id")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not stubborn:
                await asyncio.Event().wait()
            while not let_go.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await let_go.wait()
            ended.set()
        return PlaceOrder(user="ada", order=order, row=row)

    router = own.durable.router()
    router.post("/slow", status_code=201)(slow)
    app = own.app(prepare=with_routes_arrived_ago(router, 2.5))
    async with own.serving(app, raising=False) as http, own.working():
        client = Counterpart(http)
        with capture_logs() as logs:
            late = await client.order("k-1", path="/slow")
        assert (late.status_code, "location" in late.headers) == (202, False)
        assert [entry["event"] for entry in logs] == ["start_does_not_end"] * stubborn
        assert (await client.order("k-2", headers={"prefer": "respond-async"})).status_code == 202
        let_go.set()
        if stubborn:
            await ended.wait()
            await eventually(lambda: not app_tasks(own), message="it has ended")
        stored = await own.stored()
    assert (stored["runs"], stored["orders"]) == (1, 1)


def app_tasks(shop: Shop) -> Any:
    runtime = shop.durable.runtime
    return runtime is not None and runtime.accepting._tasks


def raises(_order: Order) -> dict[str, int]:
    raise LookupError


def returns_something_else(_order: Order) -> dict[str, int]:
    return {"id": "x"}  # type: ignore[dict-item]


@pytest.mark.parametrize("present", [raises, returns_something_else])
async def test_a_result_that_cannot_be_shaped_has_an_answer_and_ends_its_streams(shop: Shop, present: Any) -> None:
    """ROUTE-25, STREAM: exactly one final frame, whatever the author's function does; nothing is kept of it."""

    @shop.durable.workflow("publish")
    async def publish(context: WorkflowContext, number: int) -> Order:
        await context.publish(number)
        return Order(id=number, item="lamp")

    @shop.durable.stream(publish, present=present)
    async def streams(number: int) -> int:
        return number

    router = shop.durable.router()
    router.post("/streams")(streams)
    async with shop.serving(shop.app(prepare=lambda app: app.include_router(router), present=present)) as http, shop.working():
        answers = [await Counterpart(http).order() for _ in range(2)]
        stream = await http.post("/streams?number=1", headers=bearer() | {"idempotency-key": "k"})
    assert [slug(answer) for answer in answers] == ["result-unavailable"] * 2
    assert stream.text.count("event: problem") == 1
    assert await shop.count("fencepost.lineages WHERE answer IS NOT NULL") == 0


async def test_a_workflow_that_runs_away_can_be_cancelled(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """C7, R37: it continues as another run between the look and the cancellation, several times."""
    overtaken = 0

    @shop.durable.workflow("run_away")
    async def run_away(context: WorkflowContext, number: int) -> None:
        context.continue_as_new(number + 1)

    @shop.durable.route(run_away, wait_seconds=0)
    async def runs_away(number: int) -> int:
        return number

    router = shop.durable.router()
    router.post("/runs")(runs_away)
    async with shop.serving(shop.app(prepare=lambda app: app.include_router(router))) as http, shop.working():
        started = await http.post("/runs?number=1", headers=bearer() | {"idempotency-key": "k"})
        monitor = started.headers["location"]
        runtime = shop.durable.runtime
        assert runtime is not None
        find_monitor = runtime.store.find_monitor

        async def find_what_continues(tenant_id: str, monitor_id: UUID) -> Monitor | None:
            nonlocal overtaken
            found = await find_monitor(tenant_id, monitor_id)
            if found is not None and overtaken < 8:
                overtaken += 1
                await eventually(lambda: has_continued(shop, found.newest_run_id))
            return found

        monkeypatch.setattr(runtime.store, "find_monitor", find_what_continues)
        assert (await http.post(f"{monitor}/cancel", headers=bearer())).status_code in {200, 202}
        await shop.ended("cancelled")
        assert slug(await http.get(monitor, headers=bearer())) == "cancelled"


@pytest.mark.parametrize("isolation", ["serializable", "repeatable read"])
async def test_a_database_with_strict_isolation_gives_each_key_one_run(shop: Shop, isolation: str) -> None:
    """KEY-15: what loses may be sent again, and is no error."""
    name = await shop.connection.fetchval("SELECT current_database()")
    await shop.connection.execute(f"ALTER DATABASE \"{name}\" SET default_transaction_isolation = '{isolation}'")
    other = Shop(shop.database_url, shop.connection)
    async with (
        shop.serving(shop.app(), raising=False) as one,
        other.serving(other.app(), raising=False) as two,
        shop.working(),
    ):
        answers: list[httpx.Response] = []
        keys = [f"k-{number}" for number in range(4)]

        async def all_have_theirs() -> bool:
            latest = await asyncio.gather(*(Counterpart(http).order(key) for key in keys for http in (one, two) * 3))
            answers.extend(latest)
            return {answer.status_code for answer in latest} == {201}

        await eventually(all_have_theirs, 30, message="every key has its answer")
    assert {answer.status_code for answer in answers} <= {201, 202, 503}
    stored = await shop.stored()
    assert (stored["runs"], stored["orders"], stored["lineages"]) == (4, 4, 4)
