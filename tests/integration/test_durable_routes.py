"""Durable routes in this process, on a real PostgreSQL and with a real worker: what a client is told, and what is stored."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import asyncpg
import httpx
import pytest
from fastapi import BackgroundTasks, Body, Depends, FastAPI, HTTPException, Response
from fastapi.middleware.cors import CORSMiddleware
from structlog.testing import capture_logs

from consumer_sdk.classification import Terminal
from consumer_sdk.workflow_context import WorkflowContext
from fencepost.devservices import Services
from producer_sdk.http import EXPOSED_HEADERS, REQUEST_HEADERS, Tx
from producer_sdk.http.waiting import JsonReply
from tests.support.emptied import emptied
from tests.support.infinities import IN_MODELS, IN_PLAIN_VALUES, INFINITE, NAN, Constants, Measured
from tests.support.routes import (
    DOMAIN,
    SOON,
    Counterpart,
    Order,
    OrderIn,
    OutOfStock,
    PlaceOrder,
    Shop,
    arrived_ago,
    bearer,
    current_principal,
    is_replay,
    slug,
    with_routes_arrived_ago,
)
from tests.support.runs import Runs
from tests.support.session import SharedServices
from tests.support.waiting import eventually
from tests.support.wire_statements import reading_along

NOTHING = {"runs": 0, "jobs": 0, "run_events": 0, "idempotency_keys": 0, "lineages": 0, "orders": 0}
PASSWORD = "hunter2"
EXACT = b'{"b":1,"a":1.0,"n":12345678901234567890}'


@pytest.fixture(scope="module")
def routes_url(services: Services, shared_services: SharedServices) -> Iterator[str]:
    url = services.create_database(shared_services.template_url)
    yield url
    services.drop_database(url)


@pytest.fixture
async def shop(routes_url: str) -> AsyncIterator[Shop]:
    connection = await emptied(routes_url)
    await connection.execute(DOMAIN)
    yield Shop(routes_url, connection)
    await connection.close()


# Answers


async def test_the_first_answer_and_its_replay(shop: Shop) -> None:
    """ROUTE-1, R1, R2, R3, R18, T1, S26: the second is the first's bytes with both markers, and one run did the work once."""
    async with shop.open() as client:
        first, second = await client.order(), await client.order()
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.content == second.content
    assert (is_replay(first), is_replay(second)) == (False, True)
    assert shop.worked["lamp"] == shop.entered["lamp"] == 1
    assert (await shop.stored())["runs"] == 1


async def test_a_replay_is_byte_for_byte(shop: Shop) -> None:
    """ROUTE-2: member order, 1.0 and all digits, in the first answer and in each replay."""

    @shop.durable.workflow("exact")
    async def exact(_context: WorkflowContext, given: OrderIn) -> dict[str, Any]:
        return {"b": 1, "a": 1.0, "n": 12345678901234567890}

    @shop.durable.route(exact)
    async def exacts(order: OrderIn) -> OrderIn:
        return order

    router = shop.durable.router()
    router.post("/exact")(exacts)
    async with shop.open(prepare=lambda app: app.include_router(router)) as client:
        answers = [await client.order(path="/exact") for _ in range(4)]
    assert {answer.content for answer in answers} == {EXACT}
    assert {answer.headers["content-type"] for answer in answers} == {"application/json"}


async def test_pending_is_never_a_success_code(shop: Shop) -> None:
    """C6, ROUTE-3, R4, R16, T2, 9.2-7, 9.2-8, C9: 202 until it is finished, then 201."""
    shop.gate("lamp")
    async with shop.open(wait_seconds=0.2) as client:
        pending = await client.order()
        assert pending.status_code == 202
        assert pending.headers["retry-after"].isdigit()
        assert pending.headers["cache-control"] == "no-store"
        assert pending.headers["location"].startswith("/operations/")
        assert 'rel="status"' in pending.headers["link"]
        assert not is_replay(pending)
        assert is_replay(await client.order())
        shop.gate("lamp").set()
        await shop.ended()
        collected = await client.order()
    assert (collected.status_code, is_replay(collected)) == (201, True)


async def test_a_mapped_failure(shop: Shop) -> None:
    """ROUTE-5, ROUTE-33, SEC-3, R9, R24, R25, T3: type and details, not the message, after exactly one attempt."""
    shop.failures["lamp"] = OutOfStock(f"the password is {PASSWORD}", details={"left": 0})
    async with shop.open() as client:
        first, second = await client.order(), await client.order()
    assert slug(first) == "workflow-failed"
    assert (first.status_code, first.json()["error_type"], first.json()["error_details"]) == (422, "OutOfStock", {"left": 0})
    assert first.content == second.content
    assert (is_replay(first), is_replay(second)) == (False, True)
    assert PASSWORD not in first.text
    assert "retry-after" not in first.headers
    assert shop.worked["lamp"] == 1


@pytest.mark.parametrize(("kind", "ending", "attempts"), [(Terminal, "failed", 1), (KeyError, "attempts-exhausted", 5)])
async def test_an_unmapped_failure_is_final(shop: Shop, kind: type[Exception], ending: str, attempts: int) -> None:
    """L19, ROUTE-6, SEC-3, R17, R23, T3, X4: the same 500 each time, and no new attempt."""
    shop.failures["lamp"] = kind(PASSWORD)
    async with shop.open() as client:
        answers = [await client.order() for _ in range(4)]
    assert {(slug(answer), answer.status_code, answer.content) for answer in answers} == {(ending, 500, answers[0].content)}
    assert [is_replay(answer) for answer in answers] == [False, True, True, True]
    assert all(PASSWORD not in answer.text and "retry-after" not in answer.headers for answer in answers)
    assert shop.worked["lamp"] == attempts


async def test_two_kinds_of_422(shop: Shop) -> None:
    """ROUTE-7, ROUTE-34, 9.3-13: only the one about the schema names fields, and it shows no value."""
    async with shop.open() as client:
        await client.order()
        invalid = await client.order("k-2", item="lamp", qty=PASSWORD)
        reused = await client.order(item="sofa")
    assert (invalid.status_code, reused.status_code) == (422, 422)
    assert (slug(invalid), slug(reused)) == ("request-invalid", "idempotency-key-reused")
    assert invalid.json()["errors"] == [{"loc": ["body", "qty"], "type": "int_parsing"}]
    assert PASSWORD not in invalid.text
    assert "errors" not in reused.json()


async def test_a_reused_key_reveals_nothing(shop: Shop) -> None:
    """ROUTE-8, R19, R20, R21, T4: no run id, no monitor, no marker, nothing of the result."""
    async with shop.open(run_id_header=True) as client:
        first = await client.order()
        reused = await client.order(item="sofa")
    assert "fencepost-run-id" in first.headers
    assert slug(reused) == "idempotency-key-reused"
    assert not {"fencepost-run-id", "location", "idempotent-replayed", "x-idempotent-replayed"} & set(reused.headers)
    assert "lamp" not in reused.text


async def test_the_run_id_is_opt_in(shop: Shop) -> None:
    """R46"""
    async with shop.open() as client:
        assert "fencepost-run-id" not in (await client.order()).headers


async def test_strict_mode(shop: Shop) -> None:
    """ROUTE-9, X2, 9.1-4: 409 at once while it is not finished, then the stored result."""
    shop.gate("lamp")
    async with shop.open(strict=True, wait_seconds=20) as client:
        first = asyncio.create_task(client.order())
        await shop.waiting()
        duplicate = await client.order()
        assert slug(duplicate) == "in-progress"
        assert (duplicate.status_code, duplicate.headers["retry-after"]) == (409, "1")
        shop.gate("lamp").set()
        assert (await first).status_code == 201
        assert is_replay(await client.order())
    assert (await shop.stored())["runs"] == 1


@pytest.mark.parametrize("status", ["unreadable", "slow"])
async def test_a_read_error_of_a_known_run(shop: Shop, status: str) -> None:
    """ROUTE-10, R30, R43: pending with the run's headers, and the result later."""
    break_it = {
        "unreadable": "RAISE EXCEPTION 'no'",
        "slow": "PERFORM pg_sleep(30)",
    }[status]
    async with shop.open() as client:
        await client.order()
        await shop.connection.execute("ALTER FUNCTION fencepost.read_lineages RENAME TO read_lineages_hidden")
        await shop.connection.execute(
            "CREATE FUNCTION fencepost.read_lineages(uuid[], text[]) RETURNS SETOF fencepost.lineages LANGUAGE plpgsql AS "
            f"$$ BEGIN {break_it}; END $$"
        )
        try:
            pending = await client.order(headers={"prefer": "wait=0"})
            reused = await client.order(item="sofa")
        finally:
            await shop.connection.execute("DROP FUNCTION fencepost.read_lineages")
            await shop.connection.execute("ALTER FUNCTION fencepost.read_lineages_hidden RENAME TO read_lineages")
        assert (pending.status_code, is_replay(pending)) == (202, True)
        assert pending.headers["retry-after"] == "1"
        assert pending.headers["location"].startswith("/operations/")
        assert slug(reused) == "idempotency-key-reused"
        assert (await client.order()).status_code == 201


async def test_every_end_has_its_own_answer(shop: Shop) -> None:
    """ROUTE-25, T5, T6: cancelled, terminated, timed out, dead: four types, none with Retry-After, none pending."""
    for item in ("costly", "dead"):
        shop.failures[item] = OSError("again and again")
    ends = {
        "cancelled": "SELECT fencepost.cancel_run('acme', run_id, 'ops', 'a test') FROM fencepost.runs",
        "costly": "UPDATE fencepost.jobs SET cost_limit = 0",
        "late": "UPDATE fencepost.jobs SET deadline_at = clock_timestamp() - interval '1 second'",
        "dead": "UPDATE fencepost.jobs SET max_attempts = 1",
    }
    async with shop.serving(shop.app(wait_seconds=0)) as http:
        client = Counterpart(http)
        for item, end in ends.items():
            assert (await client.order(item, item)).status_code == 202
            await shop.connection.execute(
                f"{end} WHERE run_id = (SELECT run_id FROM fencepost.runs ORDER BY created_at DESC LIMIT 1)"
            )
        await Runs(shop.connection).reap()
        async with shop.working():
            await shop.ended("failed", 3)
        answers = {item: await client.order(item, item) for item in ends}
    assert {item: slug(answer) for item, answer in answers.items()} == {
        "cancelled": "cancelled", "costly": "terminated", "late": "timed-out", "dead": "attempts-exhausted",
    }  # fmt: skip
    assert all(is_replay(answer) and "retry-after" not in answer.headers for answer in answers.values())


async def test_an_erased_lineage(shop: Shop) -> None:
    """ROUTE-30, R45, T5: 410 without Retry-After, and nothing starts."""
    async with shop.open() as client:
        await client.order()
        monitor = (await client.order("k-2", headers={"prefer": "respond-async"})).headers.get("location")
        await shop.connection.execute("SELECT fencepost.erase_lineage(tenant_id, run_id, 'ops', 'asked') FROM fencepost.runs")
        erased = await client.order()
        assert monitor is None or slug(await client.http.get(monitor, headers=bearer())) == "erased"
    assert erased.status_code == 410
    assert slug(erased) in {"erased", "idempotency-key-expired"}
    assert "retry-after" not in erased.headers
    assert (await shop.stored())["runs"] == 2


async def test_a_long_lineage(shop: Shop) -> None:
    """ROUTE-26, R37 to R42: the answer of the last run, in as many statements as that of a single run."""

    @shop.durable.workflow("count_down", retry=SOON)
    async def count_down(context: WorkflowContext, left: int) -> str:
        if left:
            await context.continue_as_new(left - 1)
        return "done"

    @shop.durable.route(count_down, wait_seconds=25)
    async def counts(left: int) -> int:
        return left

    router = shop.durable.router()
    router.post("/counts")(counts)
    async with shop.open(prepare=lambda app: app.include_router(router)) as client:
        first = await client.order(path="/counts?left=40", content=b"")
        with Statements(shop) as statements:
            again = await client.order(path="/counts?left=40", content=b"")
    assert first.json() == again.json() == "done"
    assert is_replay(again)
    assert (await shop.stored())["runs"] == 41
    assert statements.names == ["look_up"]


async def test_present_shapes_a_result_once(shop: Shop) -> None:
    """ROUTE-2, R11: what was answered first is answered always, whatever the function says later."""
    shaped: list[int] = []

    def present(order: Order) -> dict[str, int]:
        shaped.append(order.id)
        return {"number": order.id, "times": len(shaped)}

    async with shop.open(present=present) as client:
        first, second = await client.order(), await client.order()
        monitor = await client.order("k-2", headers={"prefer": "respond-async"})
    assert first.json()["times"] == 1
    assert first.content == second.content
    assert len(shaped) <= 2
    assert monitor.status_code in {201, 202}


# The accepting transaction


async def test_the_handlers_writes_happen_once(shop: Shop) -> None:
    """ROUTE-21, L16, 9.7-31: five retries, two of them at once, and one domain row."""
    async with shop.open() as client:
        await client.order()
        await asyncio.gather(client.order(), client.order())
        for _ in range(3):
            await client.order()
    stored = await shop.stored()
    assert (stored["orders"], stored["runs"], shop.entered["lamp"]) == (1, 1, 1)


async def test_no_answer_before_the_commit(shop: Shop) -> None:
    """ROUTE-20, 9.7-32: a commit that fails is an error of the application; nothing is stored, and the key is free."""
    await shop.connection.execute(
        "CREATE TABLE stage.parents (id int PRIMARY KEY); CREATE TABLE stage.children "
        "(id int REFERENCES stage.parents DEFERRABLE INITIALLY DEFERRED)"
    )
    missing = [True]

    @shop.durable.route(shop.workflow, name="children")
    async def children(order: OrderIn, tx: Tx) -> PlaceOrder:
        if missing[0]:
            await tx.execute("INSERT INTO stage.children VALUES (1)")
        return PlaceOrder(user="ada", order=order, row=1)

    router = shop.durable.router()
    router.post("/children", status_code=201)(children)
    app = shop.app(prepare=lambda app: app.include_router(router))
    async with shop.serving(app, raising=False) as http, shop.working():
        client = Counterpart(http)
        failed = await client.order(path="/children")
        assert failed.status_code == 500
        assert not {"location", "fencepost-run-id"} & set(failed.headers)
        assert await shop.stored() == NOTHING
        missing[0] = False
        answer = await client.order(path="/children")
    assert (answer.status_code, is_replay(answer)) == (201, False)


async def test_a_handler_that_refuses_keeps_the_key_free(shop: Shop) -> None:
    """KEY-8: an HTTPException passes as FastAPI passes it; its writes are rolled back."""
    refuse = [True]

    @shop.durable.route(shop.workflow, name="guarded")
    async def guarded(order: OrderIn, tx: Tx) -> PlaceOrder:
        row = await tx.fetchval("INSERT INTO stage.orders (item) VALUES ('x') RETURNING id")
        if refuse[0]:
            raise HTTPException(403, "not today")
        return PlaceOrder(user="ada", order=order, row=row)

    router = shop.durable.router()
    router.post("/guarded", status_code=201)(guarded)
    async with shop.open(prepare=lambda app: app.include_router(router)) as client:
        refused = await client.order(path="/guarded")
        assert (refused.status_code, refused.json()) == (403, {"detail": "not today"})
        assert await shop.stored() == NOTHING
        refuse[0] = False
        assert not is_replay(await client.order(path="/guarded"))


@pytest.mark.parametrize("sqlstate", ["40001", "40P01", "57P01"])
async def test_a_passing_failure_of_the_handler_may_be_sent_again(shop: Shop, sqlstate: str) -> None:
    """9.7-29, T5: a serialization failure, a deadlock, a server that ends: 503 with Retry-After, nothing stored."""
    fail = [True]

    @shop.durable.route(shop.workflow, name="clashing")
    async def clashing(order: OrderIn, tx: Tx) -> PlaceOrder:
        if fail[0]:
            await tx.execute(f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{sqlstate}'; END $$")
        return PlaceOrder(user="ada", order=order, row=1)

    router = shop.durable.router()
    router.post("/clashing", status_code=201)(clashing)
    async with shop.open(prepare=lambda app: app.include_router(router)) as client:
        answer = await client.order(path="/clashing")
        assert slug(answer) == "unavailable"
        assert answer.headers["retry-after"] == "1"
        assert await shop.stored() == NOTHING
        fail[0] = False
        assert (await client.order(path="/clashing")).status_code == 201


async def test_a_start_that_is_late_is_rolled_back(shop: Shop) -> None:
    """ROUTE-11, R31: 202 without the run's headers, nothing stored, and the retry starts it."""
    forever = asyncio.Event()

    @shop.durable.route(shop.workflow, name="lazy", request_deadline_seconds=4)
    async def lazy(order: OrderIn, tx: Tx) -> PlaceOrder:
        row = await tx.fetchval("INSERT INTO stage.orders (item) VALUES ('x') RETURNING id")
        await forever.wait()
        return PlaceOrder(user="ada", order=order, row=row)

    router = shop.durable.router()
    router.post("/lazy", status_code=201)(lazy)
    async with shop.open(prepare=with_routes_arrived_ago(router, 2.5)) as client:
        late = await client.order(path="/lazy")
        assert (late.status_code, is_replay(late)) == (202, False)
        assert not {"location", "fencepost-run-id"} & set(late.headers)
        assert late.headers["retry-after"] == "1"
        assert await shop.stored() == NOTHING
        forever.set()
        answer = await client.order(path="/lazy")
    # Of the deadline of 4 s, 2.5 s had passed: no time to wait is left, and the start was in time.
    assert (answer.status_code, is_replay(answer), "location" in answer.headers) == (202, False, True)


async def test_a_commit_that_was_sent_goes_on(shop: Shop) -> None:
    """ROUTE-11, R31: nobody knows yet, so no run's headers; it commits, and the retry attaches to the one run."""
    await shop.connection.execute(
        "CREATE FUNCTION stage.hold() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NULL; END $$;"
        "CREATE CONSTRAINT TRIGGER hold AFTER INSERT ON stage.orders DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION stage.hold()"
    )
    await shop.connection.execute("SELECT pg_advisory_lock(42)")
    async with shop.open(request_deadline_seconds=4, prepare=arrived_ago(2.5)) as client:
        late = await client.order()
        assert (late.status_code, "location" in late.headers) == (202, False)
        await shop.connection.execute("SELECT pg_advisory_unlock(42)")
        await shop.ended()
        answer = await client.order()
        assert shop.durable.registry.get_sample_value("fencepost_route_starts_total", {"route": "orders"}) == 1
    assert (answer.status_code, is_replay(answer)) == (201, True)
    assert (await shop.stored())["runs"] == 1


async def test_an_answer_of_the_commit_that_never_comes(shop: Shop) -> None:
    """ROUTE-11: the connection ends while the COMMIT is on its way. 202, without the run's headers, and one run at most."""
    await shop.connection.execute(
        "CREATE FUNCTION stage.hold() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NULL; END $$;"
        "CREATE CONSTRAINT TRIGGER hold AFTER INSERT ON stage.orders DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION stage.hold()"
    )
    await shop.connection.execute("SELECT pg_advisory_lock(42)")
    async with shop.open() as client:
        request = asyncio.create_task(client.order())

        async def cut() -> bool:
            return bool(
                await shop.connection.fetchval(
                    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND wait_event = 'advisory'"
                )
            )

        await eventually(cut, message="the COMMIT waits")
        unknown = await request
        assert (unknown.status_code, "location" in unknown.headers) == (202, False)
        await shop.connection.execute("SELECT pg_advisory_unlock(42)")
        answer = await client.order()
    assert answer.status_code == 201
    assert (await shop.stored())["runs"] == 1


async def test_server_made_values_are_not_the_clients(shop: Shop) -> None:
    """FINGERPRINT-16, L4: the handler's own row number is in the input, and the retry replays it."""
    async with shop.open() as client:
        first = await client.order()
        await shop.connection.execute("INSERT INTO stage.orders (item) VALUES ('between')")
        second = await client.order()
    assert first.json() == second.json()
    assert is_replay(second)


# Time and caps


async def test_margins_count_from_arrival(shop: Shop) -> None:
    """ROUTE-12, R7, R29, R32, R36: of a deadline of 6 s, 3.8 s have passed before the route: it waits 0.2 s and not 30."""
    shop.gate("lamp")
    async with shop.open(wait_seconds=30, request_deadline_seconds=6, prepare=arrived_ago(3.8)) as client:
        async with asyncio.timeout(3):
            assert (await client.order()).status_code == 202
        shop.gate("lamp").set()


async def test_a_request_without_time_to_start(shop: Shop) -> None:
    """ROUTE-13, R31: its deadline passed before the route saw it: 202, nothing is stored, nothing is called."""
    async with shop.open(request_deadline_seconds=3, prepare=arrived_ago(3)) as client:
        answer = await client.order()
    assert (answer.status_code, "location" in answer.headers) == (202, False)
    assert await shop.stored() == NOTHING


async def test_a_full_waiter_cap(routes_url: str) -> None:
    """ROUTE-14, R28: the surplus is answered at once and its run is worked on; a slot that was freed is usable."""
    async with capped(routes_url, routes_max_waiters=2) as (shop, client):
        shop.gate("lamp")
        waiting = [asyncio.create_task(client.order(f"k-{n}", who=f"acme/{n}")) for n in range(2)]
        await shop.waiting(2)
        surplus = await client.order("k-3", "sofa", who="acme/3")
        assert (surplus.status_code, surplus.headers["retry-after"]) == (202, "1")
        assert "location" in surplus.headers
        await shop.ended()
        assert shop.worked["sofa"] == 1
        assert (await client.order("k-3", "sofa", who="acme/3")).status_code == 201
        shop.gate("lamp").set()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [201, 201]


async def test_nobody_waits_under_a_cap_of_none(routes_url: str) -> None:
    """ROUTE-14, R28, 9.2-10: and what is finished is answered at once."""
    async with capped(routes_url, routes_max_waiters=0) as (shop, client):
        assert (await client.order()).status_code == 202
        await shop.ended()
        assert (await client.order()).status_code == 201


async def test_one_principal_cannot_take_all(routes_url: str) -> None:
    """ROUTE-15, R28: A's surplus is pending with its runs committed, B waits; A's retries collect one run each."""
    async with capped(routes_url, routes_max_waiters=32, routes_max_waiters_per_principal=2) as (shop, client):
        shop.gate("lamp")
        of_a = [asyncio.create_task(client.order(f"a-{n}", who="acme/a")) for n in range(10)]
        await shop.waiting(2)
        of_b = asyncio.create_task(client.order("b", who="acme/b"))
        await shop.waiting(3)
        surplus = [answer.result() for answer in await _first_done(of_a, 8)]
        assert {answer.status_code for answer in surplus} == {202}
        assert (await shop.stored())["runs"] == 11
        shop.gate("lamp").set()
        assert (await of_b).status_code == 201
        await asyncio.gather(*of_a)
        await shop.ended(runs=11)
        assert [(await client.order(f"a-{n}", who="acme/a")).status_code for n in range(10)] == [201] * 10
    assert shop.worked["lamp"] == 11


async def test_a_start_rate(shop: Shop) -> None:
    """9.2-10: 429 starts nothing; what was started is answered whatever the rate."""
    async with shop.open(starts_per_minute=1) as client:
        assert (await client.order()).status_code == 201
        limited = await client.order("k-2")
        assert (slug(limited), limited.status_code) == ("rate-limited", 429)
        assert 1 <= int(limited.headers["retry-after"]) <= 60
        assert (await client.order()).status_code == 201
        assert (await client.order("k-2", who="acme/bob")).status_code == 201
    assert (await shop.stored())["runs"] == 2


@pytest.mark.parametrize(
    ("prefer", "applied"), [("wait=60", "wait=1"), ("wait=0", "wait=0"), ("respond-async", "respond-async"), ("wait=1", "wait=1")]
)
async def test_prefer_is_honoured_and_bounded(shop: Shop, prefer: str, applied: str) -> None:
    """ROUTE-16, L17, 9.2-9"""
    shop.gate("lamp")
    async with shop.open(wait_seconds=1) as client:
        async with asyncio.timeout(10):
            answer = await client.order(headers={"prefer": prefer})
        shop.gate("lamp").set()
    assert answer.status_code == 202
    assert answer.headers["preference-applied"] == applied
    assert "Prefer" in answer.headers["vary"]


async def test_a_disconnect_frees_the_slot_and_cancels_nothing(shop: Shop) -> None:
    """ROUTE-18, R5, 9.4-18: the run goes on, and a retry gets its result."""
    shop.gate("lamp")
    async with shop.open(wait_seconds=25) as client:
        app = shop.durable.runtime
        assert app is not None
        gone = asyncio.Event()
        visit = asyncio.create_task(dropped(client, gone))
        await shop.waiting()
        gone.set()
        await shop.waiting(0)
        await visit
        shop.gate("lamp").set()
        await shop.ended()
        answer = await client.order()
    assert (answer.status_code, is_replay(answer)) == (201, True)
    assert await shop.connection.fetchval("SELECT count(*) FROM fencepost.run_events WHERE type LIKE '%cancel%'") == 0


async def test_many_waiters_hold_no_connection(shop: Shop, routes_url: str) -> None:
    """ROUTE-22, R27, 9.7-34: under a request-scoped session, with pools far smaller than their number."""
    pool = await asyncpg.create_pool(routes_url, min_size=0, max_size=10)

    async def session() -> AsyncIterator[object]:
        async with pool.acquire() as connection:
            yield connection

    @shop.durable.route(shop.workflow, name="many", wait_seconds=25)
    async def many(order: OrderIn, connection: Annotated[Any, Depends(session)], tx: Tx) -> PlaceOrder:
        row = await connection.fetchval("SELECT 1")
        return PlaceOrder(user="ada", order=order, row=row)

    router = shop.durable.router()
    router.post("/many", status_code=201)(many)
    number = 100
    async with shop.serving(shop.app(prepare=lambda app: app.include_router(router))) as http:
        client = Counterpart(http)
        waiting = [asyncio.create_task(client.order(f"k-{n}", f"item {n}", path="/many")) for n in range(number)]
        await shop.waiting(number)
        async with asyncio.timeout(10):  # of the 25 s that they wait
            assert await pool.fetchval("SELECT 1") == 1
        names = await shop.connection.fetch(
            "SELECT application_name, state FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE 'fencepost%'"
        )
        assert [row["application_name"] for row in names].count("fencepost-listen") == 1
        assert len(names) <= 1 + shop.settings.routes_start_connections + shop.settings.routes_read_connections
        assert not any(str(row["state"]).startswith("idle in transaction") for row in names)
        async with shop.working():
            answers = await asyncio.gather(*waiting)
    await pool.close()
    assert [answer.json()["item"] for answer in answers] == [f"item {n}" for n in range(number)]


async def test_finished_between_look_and_listen(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """ROUTE-23, R26, 9.7-35: the run ends after the start and before the wait; no poll and no ring tells of it."""
    monkeypatch.setattr("producer_sdk.http.watch._FLOOR_SECONDS", 3600)

    class AtTheBarrier(JsonReply):
        async def __call__(self, started: Any, scope: Any, receive: Any, send: Any) -> None:
            await shop.ended()
            await super().__call__(started, scope, receive, send)

    async def late(order: OrderIn) -> PlaceOrder:
        return PlaceOrder(user="ada", order=order, row=1)

    options: dict[str, Any] = {
        "wait_seconds": 25.0, "request_deadline_seconds": None, "key_required": None, "key_retention_seconds": 60.0,
        "max_input_bytes": None, "starts_per_minute": None, "strict": False, "run_id_header": False, "form_field": None,
    }  # fmt: skip
    router = shop.durable.router()
    router.post("/late", status_code=201)(
        shop.durable.operation(shop.workflow, AtTheBarrier(), name="late", present=None, **options)(late)
    )
    async with shop.open(prepare=lambda app: app.include_router(router)) as client, asyncio.timeout(15):
        assert (await client.order(path="/late")).status_code == 201


async def test_the_listener_dies(shop: Shop) -> None:
    """ROUTE-24, 9.7-34: everybody is answered by the floor's read, and listening is restored."""
    shop.gate("lamp")
    async with shop.open(wait_seconds=25) as client:
        runtime = shop.durable.runtime
        assert runtime is not None
        waiting = [asyncio.create_task(client.order(f"k-{n}")) for n in range(5)]
        await shop.waiting(5)
        await shop.connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'fencepost-listen'"
        )
        await eventually(lambda: not runtime.watch.listening)
        shop.gate("lamp").set()
        async with asyncio.timeout(10):
            assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {201}
        await eventually(lambda: runtime.watch.listening)


# Availability


async def test_no_runtime_no_start(shop: Shop) -> None:
    """ROUTE-32, R47, T5, L1: 503 with Retry-After while the start-up has not run; the same key works later."""
    app = shop.app()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as http:
        answer = await Counterpart(http).order()
    assert (slug(answer), answer.headers["retry-after"]) == ("unavailable", "1")
    assert await shop.stored() == NOTHING
    async with shop.serving(app) as http, shop.working():
        assert not is_replay(await Counterpart(http).order())


async def test_a_missing_schema_is_misconfigured(shop: Shop) -> None:
    """T5: 500, final, nothing stored; the log names the remedy."""
    async with shop.open() as client:
        await shop.connection.execute("ALTER FUNCTION fencepost.find_key RENAME TO find_key_hidden")
        try:
            answer = await client.order()
        finally:
            await shop.connection.execute("ALTER FUNCTION fencepost.find_key_hidden RENAME TO find_key")
        assert (slug(answer), answer.status_code) == ("misconfigured", 500)
        assert await shop.stored() == NOTHING


# The browser and the rest of the application


async def test_a_browser_can_see_the_markers(shop: Shop) -> None:
    """ROUTE-29, 9.1-5"""

    def prepare(app: FastAPI) -> None:
        app.add_middleware(
            CORSMiddleware, allow_origins=["https://shop.example"], allow_methods=["POST"], allow_headers=REQUEST_HEADERS,
            expose_headers=EXPOSED_HEADERS,
        )  # fmt: skip

    async with shop.open(prepare=prepare, wait_seconds=0) as client:
        origin = {"origin": "https://shop.example"}
        pending = await client.order(headers=origin)
        exposed = {name.strip().lower() for name in pending.headers["access-control-expose-headers"].split(",")}
        assert {"idempotent-replayed", "x-idempotent-replayed", "retry-after", "location"} <= exposed
        wanted = "authorization,content-type,idempotency-key,last-event-id,prefer"
        asked = {"access-control-request-method": "POST", "access-control-request-headers": wanted}
        preflight = await client.http.options("/orders", headers=origin | asked)
        allowed = {name.strip().lower() for name in preflight.headers["access-control-allow-headers"].split(",")}
    assert preflight.status_code == 200
    assert set(wanted.split(",")) <= allowed


async def test_methods_that_need_no_key(shop: Shop) -> None:
    """ROUTE-27, 9.1-6: beside durable routes on one router, with a key and without."""
    router = shop.durable.router()

    @router.get("/orders")
    @router.put("/orders")
    @router.delete("/orders")
    async def plain() -> dict[str, str]:
        return {"plain": "yes"}

    router.put("/durable", status_code=201)(shop.orders(name="put-order"))
    async with shop.open(prepare=lambda app: app.include_router(router)) as client:
        for method in ("GET", "PUT", "DELETE"):
            for key in (None, "k-1"):
                answer = await client.order(key, method=method)
                assert (answer.status_code, answer.json()) == (200, {"plain": "yes"})
                assert not is_replay(answer)
        # A durable PUT was opted for: with a key it replays, without one it is a run of its own.
        assert [is_replay(await client.order("k-9", path="/durable", method="PUT")) for _ in range(2)] == [False, True]
        assert [is_replay(await client.order(None, path="/durable", method="PUT")) for _ in range(2)] == [False, False]


async def test_a_principal_is_asked_once(shop: Shop) -> None:
    """What principal and handler share is solved once, and include_router's dependencies run as ever."""
    asked: list[str] = []

    async def counted(principal: Annotated[Any, Depends(current_principal)]) -> Any:
        asked.append(principal.id)
        return principal

    async def gatekeeper() -> None:
        asked.append("gate")

    shop.durable.principal = counted

    @shop.durable.route(shop.workflow, name="asking")
    async def asking(order: OrderIn, who: Annotated[Any, Depends(counted)]) -> PlaceOrder:
        return PlaceOrder(user=who.id, order=order, row=1)

    router = shop.durable.router()
    router.post("/asking", status_code=201)(asking)

    def prepare(app: FastAPI) -> None:
        app.include_router(router, prefix="/v1", dependencies=[Depends(gatekeeper)])

    async with shop.open(prepare=prepare) as client:
        assert (await client.order(path="/v1/asking")).status_code == 201
        assert sorted(asked) == ["ada", "gate"]
        assert is_replay(await client.order(path="/v1/asking"))


async def test_statements_of_a_start_and_of_a_replay(shop: Shop) -> None:
    """L2, L8, R26: on the wire a replay is one statement. A start has its look-up, its transaction, and the handler's own."""
    noise = {"read_lineages", "arm_lineages"}  # the watch's, for all who wait at once
    async with reading_along(shop.database_url) as (url, wire):
        watched = Shop(url, shop.connection)
        async with watched.serving(watched.app(wait_seconds=0)) as http, shop.working():
            client = Counterpart(http)
            await client.order("k-0")  # connects and prepares
            wire.statements.clear()
            await client.order("k-1")
            started = [name for name in wire.statements if name not in noise]
            await shop.ended(runs=2)
            wire.statements.clear()
            assert is_replay(await client.order("k-1"))
            replayed = [name for name in wire.statements if name not in noise]
    assert replayed == ["look_up"]
    assert started[:7] == ["look_up", "BEGIN", "find_key", "INSERT", "accept", "start_lineage", "COMMIT"]
    assert len(started) == 8  # and the pool's own reset of what a handler may have left in the session


async def test_a_soft_cap_never_refuses_what_was_accepted(shop: Shop) -> None:
    """L8, R47: lowered after the start, it is asked of new keys only."""
    body = b'{"item": "lamp", "qty": 1' + b" " * 100 + b"}"
    async with shop.open() as client:
        assert (await client.order(content=body)).status_code == 201
    other = Shop(shop.database_url, shop.connection)
    async with other.open(max_input_bytes=50) as client:
        assert is_replay(await client.order(content=body))
        refused = await client.order("k-2", content=body)
        assert (slug(refused), refused.status_code) == ("input-too-large", 413)
    assert (await shop.stored())["runs"] == 1


async def test_a_hard_cap_comes_before_everything(routes_url: str) -> None:
    """R47, 9.2-10: announced or not, a larger body is not read."""
    async with capped(routes_url, routes_max_body_bytes=100) as (shop, client):

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b" " * 50

        announced = await client.order(content=b" " * 101)
        unannounced = await client.http.post(
            "/orders", headers=bearer() | {"idempotency-key": "k", "content-type": "application/json"}, content=pieces()
        )
        assert slug(announced) == slug(unannounced) == "input-too-large"
        assert await shop.stored() == NOTHING


async def test_a_form_is_sent_once(shop: Shop) -> None:
    """L22: a one-time key in a hidden field, and 303 to the monitor; sent twice it is one run."""
    form = {"item": "lamp", "qty": "2", "one_time": "f-1"}
    async with shop.open(form_field="one_time") as client:
        answers = [await client.http.post("/orders", data=form, headers=bearer()) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [303, 303]
        assert answers[0].headers["location"] == answers[1].headers["location"]
        await shop.ended()
        shown = await client.http.get(answers[0].headers["location"], headers=bearer())
        assert shown.json()["item"] == "lamp"
        keyless = await client.http.post("/orders", data={"item": "lamp"}, headers=bearer())
        assert slug(keyless) == "idempotency-key-missing"
        assert (await client.order("j-1")).status_code == 201
    assert (await shop.stored())["runs"] == 2


@pytest.mark.parametrize("query", ["x=%00", "dry=%00", "%00=1"])
async def test_text_that_no_key_can_be_bound_to(shop: Shop, query: str) -> None:
    """FINGERPRINT-12: refused as invalid, and no failure of the server."""
    async with shop.open() as client:
        refused = await client.order(path=f"/orders?{query}")
    assert (slug(refused), refused.json()["errors"]) == ("request-invalid", [{"loc": ["query"], "type": "text_invalid"}])
    assert await shop.stored() == NOTHING


async def test_the_deepest_body(shop: Shop) -> None:
    """FINGERPRINT-14: as deep as the parser lets pass, the handler's and the fingerprint's own levels fit around it."""

    @shop.durable.workflow("deep")
    async def deep(_context: WorkflowContext, given: list[list[Any]]) -> int:
        return len(given)

    @shop.durable.route(deep)
    async def deeps(given: Annotated[Any, Body()]) -> list[list[Any]]:
        return [[given]]

    router = shop.durable.router()
    router.post("/deep")(deeps)
    async with shop.open(prepare=lambda app: app.include_router(router)) as client:
        answers = [await client.order(f"k-{n}", path="/deep", content=b"[" * n + b"]" * n) for n in (32, 33)]
    assert (answers[0].status_code, slug(answers[1])) == (200, "body-invalid")


@pytest.mark.parametrize("content_type", ["text/plain", "application/xml", "multipart/form-data", ""])
async def test_a_body_of_another_kind(shop: Shop, content_type: str) -> None:
    """T4: JSON is what a durable route takes."""
    async with shop.open() as client:
        refused = await client.order(content=b'{"item": "lamp"}', headers={"content-type": content_type})
    assert (slug(refused), refused.status_code) == ("body-invalid", 400)


async def test_no_body_at_all(shop: Shop) -> None:
    async with shop.open() as client:
        refused = await client.order(content=b"")
    assert (slug(refused), refused.json()["errors"]) == ("request-invalid", [{"loc": ["body"], "type": "missing"}])


async def test_what_dependencies_read_belongs_to_the_request(shop: Shop) -> None:
    """R20, J16: a body and a query that only a dependency declares are bound to the key as they were written."""

    async def asked(order: OrderIn, dry: bool = False) -> OrderIn:
        return order

    @shop.durable.route(shop.workflow, name="asked")
    async def handler(order: Annotated[OrderIn, Depends(asked)]) -> PlaceOrder:
        return PlaceOrder(user="ada", order=order, row=1)

    @shop.durable.route(shop.workflow, name="both")
    async def both(first: OrderIn, second: OrderIn) -> PlaceOrder:
        return PlaceOrder(user="ada", order=first, row=1)

    async def second_of(second: OrderIn) -> OrderIn:
        return second

    @shop.durable.route(shop.workflow, name="mixed")
    async def mixed(first: OrderIn, second: Annotated[OrderIn, Depends(second_of)]) -> PlaceOrder:
        return PlaceOrder(user="ada", order=first, row=1)

    router = shop.durable.router()
    router.post("/mixed", status_code=201)(mixed)
    router.post("/asked", status_code=201)(handler)
    router.post("/both", status_code=201)(both)
    async with shop.open(prepare=lambda app: app.include_router(router)) as client:
        assert not is_replay(await client.order(path="/asked"))
        assert is_replay(await client.order(path="/asked"))
        assert slug(await client.order(path="/asked", item="sofa")) == "idempotency-key-reused"
        assert slug(await client.order(path="/asked?dry=1")) == "idempotency-key-reused"
        pair = b'{"first": {"item": "lamp"}, "second": {"item": "%s"}}'
        for path in ("/both", "/mixed"):
            answers = [await client.order(path=path, content=pair % item) for item in (b"a", b"a", b"b")]
            assert [answer.status_code for answer in answers] == [201, 201, 422]


async def test_what_dependencies_set_goes_along(shop: Shop) -> None:
    """Headers and background tasks of the principal's dependency, at the first answer and at replays."""
    done: list[str] = []

    async def principal(response: Response, tasks: BackgroundTasks, known: Annotated[Any, Depends(current_principal)]) -> Any:
        response.headers["x-asked"] = "yes"
        tasks.add_task(done.append, "audit")
        return known

    shop.durable.principal = principal
    async with shop.serving(shop.app()) as http, shop.working():
        answers = [await Counterpart(http).order() for _ in range(2)]
    assert [answer.headers["x-asked"] for answer in answers] == ["yes", "yes"]
    assert done == ["audit", "audit"]


async def test_a_client_that_leaves_while_it_sends(shop: Shop) -> None:
    """ROUTE-18: nothing is started and nothing is raised."""
    async with shop.open() as client:
        gone = asyncio.Event()
        gone.set()
        await dropped(client, gone, body=b'{"item"', more=True)
    assert await shop.stored() == NOTHING


async def test_an_input_larger_than_a_run_takes(shop: Shop) -> None:
    """R47, T5: what the handler has made of a body that was small enough."""

    @shop.durable.route(shop.workflow, name="large")
    async def large(order: OrderIn) -> PlaceOrder:
        return PlaceOrder(user="u" * 1_000_001, order=order, row=1)

    router = shop.durable.router()
    router.post("/large", status_code=201)(large)
    async with shop.open(prepare=lambda app: app.include_router(router)) as client:
        assert slug(await client.order(path="/large")) == "input-too-large"
    assert await shop.stored() == NOTHING


async def test_a_handler_that_returns_something_else(shop: Shop) -> None:
    """SEC-3: an error of the application's, whose message names types and no value."""

    @shop.durable.route(shop.workflow, name="wrong")
    async def wrong(order: OrderIn) -> Any:
        return {"user": PASSWORD}

    router = shop.durable.router()
    router.post("/wrong", status_code=201)(wrong)
    async with shop.open(prepare=lambda app: app.include_router(router)) as client:
        with pytest.raises(TypeError, match="returned a dict") as caught:
            await client.order(path="/wrong")
    assert PASSWORD not in str(caught.value)
    assert caught.value.__cause__ is None
    assert await shop.stored() == NOTHING


async def test_a_handler_that_returns_an_infinity_or_a_nan(shop: Shop) -> None:
    """SEC-3: the application's error, as any other input that does not fit; the workflow would get nothing in its place."""

    @shop.durable.workflow("measure")
    async def measure(_context: WorkflowContext, _value: Any) -> None: ...

    values = [*IN_PLAIN_VALUES.values(), *IN_MODELS.values()]
    given = iter(values)

    @shop.durable.route(measure, name="measured")
    async def measured(order: OrderIn) -> Any:
        return next(given)

    router = shop.durable.router()
    router.post("/measured", status_code=201)(measured)
    async with shop.open(prepare=lambda app: app.include_router(router)) as client:
        for value in values:
            with pytest.raises(TypeError, match=f"returned a {type(value).__name__}, which is no input of workflow measure"):
                await client.order(path="/measured")
    assert await shop.stored() == NOTHING


@pytest.mark.parametrize("value", [INFINITE, Measured(value=NAN), Constants(value=INFINITE)], ids=["float", "model", "constants"])
async def test_an_answer_shaped_to_an_infinity_or_a_nan_is_none(shop: Shop, value: object) -> None:
    """ROUTE-2: as any other that does not fit; its client would get nothing in its place, or what is no JSON."""

    def present(_order: Order) -> Any:
        return value

    with capture_logs() as logs:
        async with shop.open(present=present) as client:
            assert slug(await client.order()) == "result-unavailable"
    shaped = [(log["event"], log["error"]) for log in logs if log["event"] == "result_not_shaped"]
    assert shaped == [("result_not_shaped", "ValueError")]


@pytest.mark.parametrize("error", [ValueError, KeyError, RuntimeError, OSError])
async def test_an_answer_that_the_codec_cannot_read_is_a_problem(shop: Shop, error: type[Exception]) -> None:
    """ROUTE-30, R45: whatever the codec raises, at the route, at the monitor and for the failure as well."""

    class Failing:
        def encode(self, payload: bytes) -> bytes:
            return payload

        def decode(self, payload: bytes) -> bytes:
            if is_lost:
                raise error(PASSWORD)
            return payload

    is_lost = False
    shop = Shop(shop.database_url, shop.connection, codec=Failing())
    shop.failures["unicorn"] = OutOfStock()
    async with shop.open() as client:
        await client.order("k-1")
        await client.order("k-2", item="unicorn")
        is_lost = True
        with capture_logs() as logs:
            assert slug(await client.order("k-1")) == "result-unavailable"
            assert slug(await client.order("k-2", item="unicorn")) == "result-unavailable"
            for row in await shop.connection.fetch("SELECT monitor_id FROM fencepost.lineages"):
                answer = await client.http.get(f"/operations/{row['monitor_id']}", headers=bearer())
                assert slug(answer) == "result-unavailable"
    told = [log for log in logs if log["event"] == "stored_payload_not_read"]
    assert [log["error"] for log in told] == [error.__name__] * 4
    assert PASSWORD not in str(logs)


# Arrangements


@asynccontextmanager
async def capped(url: str, **settings: Any) -> AsyncIterator[tuple[Shop, Counterpart]]:
    connection = await emptied(url)
    await connection.execute(DOMAIN)
    shop = Shop(url, connection, **settings)
    async with shop.open(wait_seconds=20) as client:
        yield shop, client
    await connection.close()


async def _first_done(tasks: "list[asyncio.Task[Any]]", number: int) -> "list[asyncio.Task[Any]]":
    await eventually(lambda: sum(task.done() for task in tasks) >= number)
    return [task for task in tasks if task.done()]


async def dropped(client: Counterpart, gone: asyncio.Event, *, body: bytes = b'{"item": "lamp"}', more: bool = False) -> None:
    """A request whose client goes away at the event, straight at the application."""
    app = client.http._transport.app  # type: ignore[attr-defined]
    sent = [{"type": "http.request", "body": body, "more_body": more}]

    async def receive() -> Any:
        if sent:
            return sent.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None: ...

    headers = bearer() | {"idempotency-key": "k-1", "content-type": "application/json"}
    await app(
        {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/orders", "raw_path": b"/orders", "root_path": "", "query_string": b"", "client": None, "server": None,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        },
        receive,
        send,
    )  # fmt: skip


class Statements:
    """What the application's store was asked while the block ran, but for what the watch reads for all who wait."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self.names: list[str] = []

    def __enter__(self) -> "Statements":
        runtime = self._shop.durable.runtime
        assert runtime is not None
        self._store = runtime.store
        self._fetch = runtime.store._fetch

        async def fetch(name: str, *arguments: Any) -> Any:
            if name not in {"read_lineages", "arm_lineages"}:
                self.names.append(name)
            return await self._fetch(name, *arguments)

        self._store._fetch = fetch
        return self

    def __exit__(self, *_: object) -> None:
        self._store._fetch = self._fetch
