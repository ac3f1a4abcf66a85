"""The accepting transaction as the application's own session: SQLAlchemy and SQLModel, on asyncpg and psycopg."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import asyncpg
import pytest
from fastapi import FastAPI, HTTPException
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlmodel import Field, SQLModel
from sqlmodel.ext.asyncio.session import AsyncSession as ModelSession

from fencepost.devservices import Services
from fencepost.errors import TransactionRequired
from producer_sdk.http import IN_TRANSACTION, SessionTransactions
from producer_sdk.http.transactions import is_passing
from tests.support.emptied import emptied
from tests.support.routes import DOMAIN, Counterpart, OrderIn, PlaceOrder, Shop, is_replay, slug
from tests.support.session import SharedServices
from tests.support.waiting import eventually

NOTHING = {"runs": 0, "jobs": 0, "run_events": 0, "idempotency_keys": 0, "lineages": 0, "orders": 0}
INSERT = text("INSERT INTO stage.orders (item) VALUES (:item) RETURNING id")


class Row(SQLModel, table=True):
    __tablename__ = "orders"
    __table_args__ = {"schema": "stage"}

    id: int | None = Field(default=None, primary_key=True)
    item: str


@pytest.fixture(scope="module")
def routes_url(services: Services, shared_services: SharedServices) -> Iterator[str]:
    url = services.create_database(shared_services.template_url)
    yield url
    services.drop_database(url)


@pytest.fixture(params=["asyncpg", "psycopg"])
async def engine(request: pytest.FixtureRequest, routes_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(
        routes_url.replace("postgresql://", f"postgresql+{request.param}://"), pool_size=2, max_overflow=0, pool_timeout=1
    )
    yield engine
    await engine.dispose()


@pytest.fixture
async def shop(routes_url: str, engine: AsyncEngine) -> AsyncIterator[Shop]:
    connection = await emptied(routes_url)
    await connection.execute(DOMAIN)
    shop = Shop(routes_url, connection)
    shop.durable._transactions = SessionTransactions(async_sessionmaker(engine))
    yield shop
    await connection.close()


@asynccontextmanager
async def selling(shop: Shop, handler: Callable[..., Any], **options: Any) -> AsyncIterator[Counterpart]:
    router = shop.durable.router()
    router.post("/orders", status_code=201)(shop.durable.route(shop.workflow, **options)(handler))
    app = FastAPI()
    app.include_router(router)
    shop.durable.install(app)
    async with shop.serving(app) as http, shop.working():
        yield Counterpart(http)


async def orders(order: OrderIn, session: Annotated[AsyncSession, IN_TRANSACTION]) -> PlaceOrder:
    row = (await session.execute(INSERT, {"item": order.item})).scalar_one()
    return PlaceOrder(user="ada", order=order, row=row)


async def test_a_session_commits_with_the_run(shop: Shop) -> None:
    """L16, ROUTE-1, ROUTE-21: one domain row and one run, whatever is retried."""
    async with selling(shop, orders) as client:
        answers = [await client.order() for _ in range(3)]
    assert [(answer.status_code, is_replay(answer)) for answer in answers] == [(201, False), (201, True), (201, True)]
    assert (await shop.stored()) | {"run_events": 0} == dict.fromkeys(NOTHING, 1) | {"run_events": 0}


async def test_a_session_of_sqlmodel(shop: Shop, engine: AsyncEngine) -> None:
    """L16"""
    shop.durable._transactions = SessionTransactions(async_sessionmaker(engine, class_=ModelSession))

    async def modelled(order: OrderIn, session: Annotated[ModelSession, IN_TRANSACTION]) -> PlaceOrder:
        row = Row(item=order.item)
        session.add(row)
        await session.flush()
        assert row.id is not None
        return PlaceOrder(user="ada", order=order, row=row.id)

    async with selling(shop, modelled) as client:
        assert is_replay(await client.order()) is False
        assert is_replay(await client.order())
    assert await shop.count("stage.orders") == 1


async def test_a_session_that_fails_stores_nothing(shop: Shop) -> None:
    """ROUTE-20, KEY-8: neither the domain row nor the run; the key is free."""
    fail = [True]

    async def failing(order: OrderIn, session: Annotated[AsyncSession, IN_TRANSACTION]) -> PlaceOrder:
        placed = await orders(order, session)
        if fail[0]:
            raise LookupError
        return placed

    async with selling(shop, failing) as client:
        with pytest.raises(LookupError):
            await client.order()
        assert await shop.stored() == NOTHING
        fail[0] = False
        assert is_replay(await client.order()) is False


@pytest.mark.parametrize("sqlstate", ["40001", "40P01"])
async def test_a_clash_may_be_sent_again(shop: Shop, sqlstate: str) -> None:
    """9.7-29, KEY-15: 503 with Retry-After, nothing stored."""
    fail = [True]

    async def clashing(order: OrderIn, session: Annotated[AsyncSession, IN_TRANSACTION]) -> PlaceOrder:
        if fail[0]:
            await session.execute(text(f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{sqlstate}'; END $$"))
        return await orders(order, session)

    async with selling(shop, clashing) as client:
        answer = await client.order()
        assert (slug(answer), answer.headers["retry-after"]) == ("unavailable", "1")
        assert await shop.stored() == NOTHING
        fail[0] = False
        assert (await client.order()).status_code == 201


async def test_an_exhausted_pool_of_the_applications(shop: Shop, engine: AsyncEngine) -> None:
    """ROUTE-32: 503 after the pool's own time-out, and nothing hangs."""
    async with selling(shop, orders) as client:
        async with engine.connect(), engine.connect():
            answer = await client.order()
        assert slug(answer) == "unavailable"
        assert (await client.order()).status_code == 201


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_strict_isolation(shop: Shop, engine: AsyncEngine, isolation: str) -> None:
    """KEY-15, 9.7-29: of callers at once one creates; the others are told to come again, never a 500."""
    strict = engine.execution_options(isolation_level=isolation)
    shop.durable._transactions = SessionTransactions(async_sessionmaker(strict))
    async with selling(shop, orders, wait_seconds=0) as client:
        answers = await asyncio.gather(*(client.order() for _ in range(6)))
        assert {answer.status_code for answer in answers} <= {201, 202, 503}
        await shop.ended()
        assert (await client.order()).status_code == 201
    assert (await shop.stored())["runs"] == 1


async def test_a_session_that_is_late_is_rolled_back(shop: Shop) -> None:
    """ROUTE-11, R31"""
    forever = asyncio.Event()

    async def lazy(order: OrderIn, session: Annotated[AsyncSession, IN_TRANSACTION]) -> PlaceOrder:
        placed = await orders(order, session)
        await forever.wait()
        return placed

    async with selling(shop, lazy, request_deadline_seconds=2.1) as client:
        late = await client.order()
        assert (late.status_code, "location" in late.headers) == (202, False)
        assert await shop.stored() == NOTHING
        forever.set()
        assert not is_replay(await client.order())


async def test_an_answer_of_the_commit_that_never_comes(shop: Shop) -> None:
    """ROUTE-11, R31: the connection ends while the COMMIT is on its way. 202 without the run's headers, and one run at most."""
    await shop.connection.execute(
        "CREATE FUNCTION stage.hold() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NULL; END $$;"
        "CREATE CONSTRAINT TRIGGER hold AFTER INSERT ON stage.orders DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION stage.hold()"
    )
    await shop.connection.execute("SELECT pg_advisory_lock(42)")
    cut = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
        "WHERE datname = current_database() AND wait_event = 'advisory'"
    )
    async with selling(shop, orders) as client:
        request = asyncio.create_task(client.order())
        await eventually(lambda: shop.connection.fetchval(cut), message="the COMMIT waits")
        unknown = await request
        assert (unknown.status_code, "location" in unknown.headers) == (202, False)
        await shop.connection.execute("SELECT pg_advisory_unlock(42)")
        assert (await client.order()).status_code == 201
    assert (await shop.stored())["runs"] == 1


def test_whose_fault_an_error_is() -> None:
    """T5: the application's own errors are not the database's."""
    wrapped = HTTPException(409)
    wrapped.__cause__ = asyncpg.DeadlockDetectedError()
    assert is_passing(asyncpg.DeadlockDetectedError())
    assert not is_passing(wrapped)
    assert not is_passing(LookupError())
    assert not is_passing(TimeoutError())
    assert not is_passing(ConnectionError())


@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
async def test_a_handler_that_ends_the_transaction_starts_nothing(shop: Shop, end: str) -> None:
    """JOB-2, L16: the session would begin another one by itself, for a run without the handler's writes."""
    ending = [True]

    async def ends(order: OrderIn, session: Annotated[AsyncSession, IN_TRANSACTION]) -> PlaceOrder:
        row = (await session.execute(INSERT, {"item": order.item})).scalar_one()
        if ending[0]:
            await getattr(session, end)()
        return PlaceOrder(user="ada", order=order, row=row)

    async with selling(shop, ends, name="orders") as client:
        with pytest.raises(TransactionRequired):
            await client.order()
        stored = await shop.stored()
        assert (stored["runs"], stored["idempotency_keys"], stored["lineages"]) == (0, 0, 0)
        ending[0] = False
        assert (await client.order()).status_code == 201


async def test_a_commit_that_the_driver_does_not_wait_for_is_not_known(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """ROUTE-11, R31: a driver's own time-out is no error of the application; the run may be there, and is."""
    commit = AsyncSession.commit

    async def times_out(session: AsyncSession) -> None:
        await commit(session)
        raise TimeoutError

    async with selling(shop, orders) as client:
        with monkeypatch.context() as patch:
            patch.setattr(AsyncSession, "commit", times_out)
            unknown = await client.order()
        assert (unknown.status_code, "location" in unknown.headers) == (202, False)
        answer = await client.order()
    assert (answer.status_code, is_replay(answer)) == (201, True)
