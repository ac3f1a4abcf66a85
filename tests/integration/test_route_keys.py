"""Keys, principals and fingerprints over HTTP: what is one operation, and what never is."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Annotated, Any

import asyncpg
import pytest
from fastapi import Body, FastAPI, Header
from pydantic import BaseModel, HttpUrl

from consumer_sdk.workflow_context import WorkflowContext
from fencepost.canonical_json import canonical_json
from fencepost.devservices import Services
from fencepost.secrets import Secrets
from producer_sdk.http import Durable, Principal
from tests.support.emptied import emptied
from tests.support.routes import DOMAIN, SECRETS, Counterpart, Order, OrderIn, PlaceOrder, Shop, bearer, is_replay, slug
from tests.support.runs import Runs
from tests.support.session import SharedServices
from tests.support.waiting import eventually

NOTHING = {"runs": 0, "jobs": 0, "run_events": 0, "idempotency_keys": 0, "lineages": 0, "orders": 0}


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


@pytest.fixture
async def client(shop: Shop) -> AsyncIterator[Counterpart]:
    """Of POST /orders, PATCH /orders and POST /refunds, and of POST /anything, which takes any JSON."""
    router = shop.durable.router()
    router.patch("/orders", status_code=201)(shop.orders(name="change"))
    router.post("/refunds", status_code=201)(shop.orders(name="refund"))
    router.post("/anything/{where}")(anything(shop))
    async with shop.open(prepare=lambda app: app.include_router(router)) as client:
        yield client


def anything(shop: Shop) -> Any:
    @shop.durable.workflow("echo")
    async def echo(_context: WorkflowContext, given: Any) -> str:
        return "done"

    @shop.durable.route(echo)
    async def echoes(where: int, given: Annotated[Any, Body()], loud: bool = False, times: int = 1) -> Any:
        return None

    return echoes


async def test_two_spellings_of_one_key(shop: Shop, client: Counterpart) -> None:
    """KEY-1"""
    answers = [await client.order(key) for key in ("k-1", '"k-1"', '"k-1"; v=2')]
    assert [is_replay(answer) for answer in answers] == [False, True, True]
    assert len({answer.content for answer in answers}) == 1
    assert (await shop.stored())["runs"] == 1


@pytest.mark.parametrize("key", ["", '""', "a,b", '"a", "b"', '"a', '"a\\n"', "a b", "a;b", "é", "k" * 256])
async def test_only_a_well_formed_key_gets_in(shop: Shop, client: Counterpart, key: str) -> None:
    """KEY-2, T4"""
    answer = await client.http.post(
        "/orders", headers=[(b"authorization", b"Bearer acme/ada"), (b"idempotency-key", key.encode())], json={"item": "lamp"}
    )
    assert (slug(answer), answer.status_code) == ("idempotency-key-invalid", 400)
    assert await shop.stored() == NOTHING


@pytest.mark.parametrize("second", ["k-1", "k-2"])
async def test_a_repeated_key_field(shop: Shop, client: Counterpart, second: str) -> None:
    """KEY-3"""
    headers = [("authorization", "Bearer acme/ada"), ("idempotency-key", "k-1"), ("idempotency-key", second)]
    answer = await client.http.post("/orders", headers=headers, json={"item": "lamp"})
    assert slug(answer) == "idempotency-key-invalid"
    assert await shop.stored() == NOTHING


async def test_the_longest_key_in_a_long_scope(shop: Shop, client: Counterpart) -> None:
    """KEY-4, 9.7-38"""
    key, who = "".join(chr(33 + 7 * n % 90) for n in range(2000)), "u" * 3000
    key = key.replace('"', "x").replace(",", "y").replace(";", "z")[:255]
    answers = [await client.order(key, who=f"acme/{who}") for _ in range(2)]
    assert [(answer.status_code, is_replay(answer)) for answer in answers] == [(201, False), (201, True)]


async def test_no_key_is_not_a_shared_key(shop: Shop, client: Counterpart) -> None:
    """KEY-5, T4, 9.1-3"""
    answers = [await client.order(None, item) for item in ("lamp", "sofa")]
    assert {(slug(answer), answer.status_code) for answer in answers} == {("idempotency-key-missing", 400)}
    assert await shop.stored() == NOTHING


async def test_an_optional_key(shop: Shop) -> None:
    """KEY-5: two runs with two results, and no replay."""
    async with shop.open(key_required=False) as client:
        answers = [await client.order(None, item) for item in ("lamp", "sofa")]
        assert [answer.json()["item"] for answer in answers] == ["lamp", "sofa"]
        assert is_replay(await client.order("k")) is is_replay(answers[0]) is False
        assert is_replay(await client.order("k"))
    assert (await shop.stored())["runs"] == 3


async def test_a_key_belongs_to_its_principal_and_tenant(shop: Shop, client: Counterpart) -> None:
    """C4, KEY-6, R12, R13"""
    answers = [await client.order(who=who) for who in ("acme/ada", "acme/bob", "zoo/ada")]
    assert [is_replay(answer) for answer in answers] == [False, False, False]
    assert len({answer.content for answer in answers}) == 3
    assert (await shop.stored())["runs"] == 3


async def test_a_key_belongs_to_its_operation(shop: Shop, client: Counterpart) -> None:
    """KEY-7"""
    answers = [
        await client.order(), await client.order(path="/refunds"), await client.order(method="PATCH"),
    ]  # fmt: skip
    assert [(answer.status_code, is_replay(answer)) for answer in answers] == [(201, False)] * 3
    assert (await shop.stored())["runs"] == 3


async def test_an_include_prefix_changes_no_operation(shop: Shop) -> None:
    """C8, KEY-7: the name is the operation, not the path: the same router under /v1 and /v2 is one operation."""
    router = shop.durable.router()
    router.post("/again", status_code=201)(shop.orders(name="again"))

    def prepare(app: FastAPI) -> None:
        app.include_router(router, prefix="/v1")
        app.include_router(router, prefix="/v2")

    async with shop.open(prepare=prepare) as client:
        first, second = await client.order(path="/v1/again"), await client.order(path="/v2/again")
    assert (is_replay(first), is_replay(second)) == (False, True)


async def test_a_refused_body_does_not_spend_the_key(shop: Shop, client: Counterpart) -> None:
    """KEY-8"""
    assert slug(await client.order(qty="many")) == "request-invalid"
    answer = await client.order()
    assert (answer.status_code, is_replay(answer)) == (201, False)
    assert (await shop.stored())["runs"] == 1


@pytest.mark.parametrize("state", ["queued", "leased", "completed", "dead", "cancelled"])
async def test_the_body_is_checked_in_every_state(shop: Shop, state: str) -> None:
    """KEY-9"""
    shop.failures["dead"] = asyncio.InvalidStateError()
    shop.gate("leased")
    async with shop.serving(shop.app(wait_seconds=0)) as http, AsyncExitStack() as stack:
        client = Counterpart(http)
        await client.order(item=state)
        if state == "dead":
            await shop.connection.execute("UPDATE fencepost.jobs SET max_attempts = 1")
        if state == "cancelled":
            await shop.connection.execute("SELECT fencepost.cancel_run('acme', run_id, 'ops', 'a test') FROM fencepost.runs")
        if state != "queued":
            await stack.enter_async_context(shop.working())
        await eventually(lambda: _is_in(shop, state))
        changed = await client.order(item="other")
        assert slug(changed) == "idempotency-key-reused"
        assert "location" not in changed.headers
        shop.gate("leased").set()
    assert (await shop.stored())["runs"] == 1


async def _is_in(shop: Shop, state: str) -> bool:
    return bool(await shop.connection.fetchval("SELECT state FROM fencepost.jobs") == state)


async def test_the_lost_acknowledgement(shop: Shop) -> None:
    """KEY-12, R5: the answer of the first request never left the process; another process attaches to its run."""
    async with shop.serving(shop.app(wait_seconds=0)) as http:
        await Counterpart(http).order()
    other = Shop(shop.database_url, shop.connection)
    async with other.open() as client:
        answer = await client.order()
    assert (answer.status_code, is_replay(answer)) == (201, True)
    assert (await shop.stored()) | {"run_events": 0} == dict.fromkeys(NOTHING, 1) | {"run_events": 0}
    assert await shop.connection.fetchval("SELECT count(*) FROM fencepost.run_events WHERE type = 'run_queued'") == 1


async def test_duplicates_behind_an_open_transaction(shop: Shop) -> None:
    """C2, KEY-13, 9.7-28: those of this process and of another answer at once, hold no connection and delay nobody."""
    inside, go_on = asyncio.Event(), asyncio.Event()

    @shop.durable.route(shop.workflow, name="slow")
    async def slow(order: OrderIn) -> PlaceOrder:
        if order.item == "lamp":
            inside.set()
            await go_on.wait()
        return PlaceOrder(user="ada", order=order, row=1)

    router = shop.durable.router()
    router.post("/slow", status_code=201)(slow)
    other = Shop(shop.database_url, shop.connection, routes_start_connections=1)

    @other.durable.route(other.workflow, name="slow", wait_seconds=0)
    async def slow_too(order: OrderIn) -> PlaceOrder:
        return PlaceOrder(user="ada", order=order, row=2)

    other_router = other.durable.router()
    other_router.post("/slow", status_code=201)(slow_too)
    async with (
        shop.open(prepare=lambda app: app.include_router(router)) as client,
        other.serving(other.app(prepare=lambda app: app.include_router(other_router))) as http,
    ):
        there = Counterpart(http)
        first = asyncio.create_task(client.order(path="/slow"))
        await inside.wait()
        async with asyncio.timeout(10):
            duplicates = await asyncio.gather(
                *(client.order(path="/slow") for _ in range(10)), *(there.order(path="/slow") for _ in range(10))
            )
            assert {(answer.status_code, "location" in answer.headers) for answer in duplicates} == {(202, False)}
            assert (await client.order("k-2", "sofa", path="/slow")).status_code == 201
            assert (await there.order("k-3", "sofa", path="/slow")).status_code == 202
        go_on.set()
        assert (await first).status_code == 201
        assert is_replay(await there.order(path="/slow"))
    assert (await shop.stored())["runs"] == 3


async def test_duplicates_in_one_process_touch_no_connection(routes_url: str, shop: Shop) -> None:
    """KEY-13: the only connection for starts is the first one's."""
    inside, go_on = asyncio.Event(), asyncio.Event()
    small = Shop(routes_url, shop.connection, routes_start_connections=1)

    @small.durable.route(small.workflow, name="slow")
    async def slow(order: OrderIn) -> PlaceOrder:
        inside.set()
        await go_on.wait()
        return PlaceOrder(user="ada", order=order, row=1)

    router = small.durable.router()
    router.post("/slow", status_code=201)(slow)
    async with small.open(prepare=lambda app: app.include_router(router)) as client:
        first = asyncio.create_task(client.order(path="/slow"))
        await inside.wait()
        duplicates = await asyncio.gather(*(client.order(path="/slow") for _ in range(20)))
        assert {answer.status_code for answer in duplicates} == {202}
        go_on.set()
        assert (await first).status_code == 201


async def test_the_first_rolls_back(shop: Shop) -> None:
    """KEY-14: the duplicate's retry creates the run."""
    inside, go_on = asyncio.Event(), asyncio.Event()

    @shop.durable.route(shop.workflow, name="slow")
    async def slow(order: OrderIn) -> PlaceOrder:
        if not go_on.is_set():
            inside.set()
            await go_on.wait()
            raise LookupError
        return PlaceOrder(user="ada", order=order, row=1)

    router = shop.durable.router()
    router.post("/slow", status_code=201)(slow)
    async with shop.open(prepare=lambda app: app.include_router(router)) as client:
        first = asyncio.create_task(client.order(path="/slow"))
        await inside.wait()
        assert (await client.order(path="/slow")).status_code == 202
        go_on.set()
        with pytest.raises(LookupError):
            await first
        answer = await client.order(path="/slow")
    assert (answer.status_code, is_replay(answer)) == (201, False)


async def test_fifty_at_once(shop: Shop, client: Counterpart) -> None:
    """KEY-16: one run, one effect, fifty equal bodies, and exactly one final answer without the markers."""

    async def collected() -> Any:
        answer = await client.order()
        return await eventually(lambda: _final(client)) if answer.status_code == 202 else answer

    answers = await asyncio.gather(*(collected() for _ in range(50)))
    assert len({answer.content for answer in answers}) == 1
    assert {answer.status_code for answer in answers} == {201}
    assert [is_replay(answer) for answer in answers].count(False) <= 1
    assert (shop.worked["lamp"], (await shop.stored())["orders"]) == (1, 1)


async def _final(client: Counterpart) -> Any:
    answer = await client.order()
    return None if answer.status_code == 202 else answer


async def test_a_workers_death_does_not_hold_the_key(shop: Shop) -> None:
    """KEY-11: pending until the lease has run out and another worker has done it; one run, generation 2."""
    async with shop.serving(shop.app(wait_seconds=0)) as http:
        client = Counterpart(http)
        await client.order()
        await Runs(shop.connection, "gone", workflow="place_order").claim()
        assert (await client.order()).status_code == 202
        await shop.connection.execute("UPDATE fencepost.jobs SET lease_expires_at = clock_timestamp()")
        async with shop.working():
            await shop.ended()
        answer = await client.order()
    assert (answer.status_code, is_replay(answer)) == (201, True)
    assert await shop.connection.fetchval("SELECT lease_generation FROM fencepost.jobs") == 2
    assert (await shop.stored())["runs"] == 1


async def test_an_expired_key_does_not_run_again(shop: Shop, client: Counterpart) -> None:
    """KEY-18, L5, L6: the same body and another one; nothing starts."""
    await client.order()
    await shop.connection.execute(
        "UPDATE fencepost.idempotency_keys SET created_at = created_at - interval '2 days', "
        "expires_at = clock_timestamp() - interval '1 second'"
    )
    for item in ("lamp", "sofa"):
        answer = await client.order(item=item)
        assert (slug(answer), answer.status_code) == ("idempotency-key-expired", 410)
    assert (await shop.stored())["runs"] == 1


async def test_retention_is_the_routes(shop: Shop) -> None:
    """L15"""
    async with shop.open(key_retention_seconds=60) as client:
        await client.order()
    assert await shop.connection.fetchval(
        "SELECT expires_at - created_at BETWEEN interval '59 seconds' AND interval '61 seconds' FROM fencepost.idempotency_keys"
    )


async def test_a_run_outlives_its_key(shop: Shop) -> None:
    """L11, KEY-19: while a key answers, its run cannot be deleted; an expired key is a tombstone, which holds nothing."""
    async with shop.open() as client:
        await client.order()
        await shop.ended()
        with pytest.raises(asyncpg.ForeignKeyViolationError):
            await shop.connection.execute("DELETE FROM fencepost.runs")
        await shop.connection.execute(
            "UPDATE fencepost.idempotency_keys"
            " SET run_id = NULL, fingerprint = NULL, fingerprint_profile = NULL, schema_version = NULL"
        )
        await shop.connection.execute("DELETE FROM fencepost.runs")
        assert slug(await client.order()) == "idempotency-key-expired"
    assert (await shop.stored())["runs"] == 0


async def test_rotation_of_secrets_keeps_keys_and_monitors(shop: Shop) -> None:
    """KEY-20, L20: under the next secret the key replays, a changed body is refused, and the monitor knows its principal."""
    shop.gate("lamp")
    async with shop.open(wait_seconds=0) as client:
        location = (await client.order()).headers["location"]
        shop.gate("lamp").set()
        await shop.ended()
    rotated = Shop(shop.database_url, shop.connection, secrets=Secrets({1: b"1" * 32, 2: b"2" * 32}, write=[2]))
    async with rotated.open() as client:
        assert is_replay(await client.order())
        assert slug(await client.order(item="sofa")) == "idempotency-key-reused"
        assert (await client.http.get(location, headers=bearer())).status_code == 200
    assert (await shop.stored())["runs"] == 1


# Fingerprints


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (b'{"b":1,"a":"A"}', b'{ "a" : "\\u0041", "b" : 1 }', True),
        (b'{"ids":[1,2]}', b'{"ids":[2,1]}', False),
        ('{"n":"é"}'.encode(), b'{"n":"e\\u0301"}', False),
        (b"[100,1,-0.0]", b"[1e2,1.0,0]", True),
        (b"[100,1,-0.0]", b'["100",1,0]', False),
        (b'{"id":9007199254740992}', b'{"id":9007199254740993}', False),
        (b"null", b"null", True),
    ],
)
async def test_one_request_is_one_meaning(client: Counterpart, first: bytes, second: bytes, same: bool) -> None:
    """FINGERPRINT-1, FINGERPRINT-2, FINGERPRINT-7, FINGERPRINT-8, FINGERPRINT-9, 9.5-23"""
    assert (await client.order(path="/anything/1", content=first)).status_code == 200
    again = await client.order(path="/anything/1", content=second)
    assert is_replay(again) if same else slug(again) == "idempotency-key-reused"


@pytest.mark.parametrize(
    ("path", "same"),
    [
        ("/anything/1?loud=true", True),
        ("/anything/1?loud=1", True),
        ("/anything/01?loud=on", True),
        ("/anything/2?loud=true", False),
        ("/anything/1", False),
        ("/anything/1?loud=true&times=1", False),
        ("/anything/1?loud=true&unknown=1", False),
    ],
)
async def test_path_and_query_belong_to_the_request(client: Counterpart, path: str, same: bool) -> None:
    """J16: as they were validated; what the client did not set is no part of it."""
    assert (await client.order(path="/anything/1?loud=true", content=b"1")).status_code == 200
    again = await client.order(path=path, content=b"1")
    assert is_replay(again) if same else slug(again) == "idempotency-key-reused"


@pytest.mark.parametrize(
    "body",
    [
        b'{"amount":1,"amount":100}', b'{"a":{"b":{"c":1,"c":2}}}', b"[NaN]", b"[Infinity]", b"[-Infinity]", b"[1e400]",
        b'["\\u0000"]', b'["\\ud800"]', b'{"\\udc00":1}', "[1]".encode("utf-16"), b"\xef\xbb\xbf[1]", b'["\xff"]',
        b"[" * 200_000 + b"]" * 200_000, b"[" + b"9" * 5000 + b"]", b"{", b"'a'",
    ],
    ids=["twice", "twice within", "NaN", "Infinity", "-Infinity", "1e400", "NUL", "surrogate", "surrogate name", "UTF-16", "BOM",
         "bytes", "depth", "digits", "cut", "quotes"],
)  # fmt: skip
async def test_what_two_readers_could_take_in_two_ways(shop: Shop, client: Counterpart, body: bytes) -> None:
    """FINGERPRINT-10 to FINGERPRINT-14, 9.5-20, 9.5-21, 9.7-37: 400, nothing stored, the key is free, and the process goes on."""
    refused = await client.order(path="/anything/1", content=body)
    assert (slug(refused), refused.status_code) == ("body-invalid", 400)
    assert await shop.stored() == NOTHING
    assert not is_replay(await client.order(path="/anything/1", content=b"1"))


async def test_a_new_optional_field_keeps_old_fingerprints(shop: Shop, client: Counterpart) -> None:
    """FINGERPRINT-15, 9.5-22"""
    assert (await client.order()).status_code == 201

    class Newer(OrderIn):
        gift: bool = False

    later = Shop(shop.database_url, shop.connection)

    @later.durable.route(later.workflow, name="orders")
    async def orders(order: Newer) -> PlaceOrder:
        return PlaceOrder(user="ada", order=order, row=1)

    router = later.durable.router()
    router.post("/orders", status_code=201)(orders)
    app = FastAPI()
    app.include_router(router)
    later.durable.install(app)
    async with later.serving(app) as http:
        assert is_replay(await Counterpart(http).order())
        assert slug(await Counterpart(http).order(gift=True)) == "idempotency-key-reused"


async def test_values_without_a_canonical_form(shop: Shop) -> None:
    """What pydantic makes of a text, a URL or a set say, is bound as it was written."""

    class Link(BaseModel):
        url: HttpUrl
        tags: set[str] = set()

    @shop.durable.route(shop.workflow, name="links")
    async def links(link: Link) -> PlaceOrder:
        return PlaceOrder(user="ada", order=OrderIn(item="lamp"), row=1)

    router = shop.durable.router()
    router.post("/links", status_code=201)(links)
    async with shop.open(prepare=lambda app: app.include_router(router)) as client:
        given = {"url": "https://shop.example/x", "tags": ["b", "a"]}
        bodies = [given, dict(reversed(given.items())), given | {"tags": ["a"]}]
        answers = [await client.order(path="/links", content=json.dumps(body).encode()) for body in bodies]
    assert [answer.status_code for answer in answers] == [201, 201, 422]


# Secrets


async def test_stored_identities_cannot_be_guessed(shop: Shop, client: Counterpart) -> None:
    """SEC-2, L20: neither key nor digests of key and request; under another secret other values."""
    await client.order("4711", "0042")
    body = canonical_json({"item": "0042"})
    request = canonical_json({"path": {}, "query": {}, "body": {"item": "0042"}})
    guesses = [b"4711", *(hashlib.sha256(text).digest() for text in (b"4711", body, request, b"acme", b"ada"))]
    rows = await shop.connection.fetch("SELECT key_hash, fingerprint FROM fencepost.idempotency_keys")
    (whose,) = await shop.connection.fetch("SELECT principal_hash FROM fencepost.lineages")
    stored = [bytes(value) for row in [*rows, whose] for value in row.values()]
    assert not any(guess in value for guess in guesses for value in stored)
    principal = Principal("acme", "ada")
    assert principal.digest(SECRETS, 1) in stored
    assert principal.digest(Secrets({1: b"2" * 32}, write=[1]), 1) not in stored


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("a", "b:c"), ("a:b", "c")),
        (("a", "b/c"), ("a/b", "c")),
        (("a", "bc"), ("ab", "c")),
        (("a.", "b"), ("a", ".b")),
        (("a|", "b"), ("a", "|b")),
    ],
)
async def test_parts_do_not_run_together(shop: Shop, client: Counterpart, first: tuple[str, str], second: tuple[str, str]) -> None:
    """SEC-6: principal and key."""
    answers = [await client.order(key, who=f"acme/{who}") for who, key in (first, second)]
    assert [(answer.status_code, is_replay(answer)) for answer in answers] == [(201, False)] * 2


@pytest.mark.parametrize("who", ["/ada", "acme/", "t" * 257 + "/ada", "acme/" + "u" * 3001, "not a principal"])
async def test_a_scope_is_mandatory(shop: Shop, who: str) -> None:
    """SEC-5, R12: a principal without a tenant, without an id, or none at all: 500, and nothing stored."""

    async def principal(authorization: Annotated[str, Header()]) -> Any:
        tenant, slash, user = authorization.removeprefix("Bearer ").partition("/")
        return Principal(tenant, user) if slash else authorization

    shop.durable.principal = principal
    async with shop.open() as client:
        answer = await client.order(who=who)
        assert (slug(answer), answer.status_code) == ("misconfigured", 500)
        assert who not in answer.text
        assert await shop.stored() == NOTHING


async def test_who_is_nobody_is_refused_first(shop: Shop, client: Counterpart) -> None:
    """S26: the principal comes before the key and the body; the application's own refusal passes."""
    answer = await client.http.post("/orders", headers={"authorization": "Basic x"}, content=b"{")
    assert answer.status_code == 401
    keyless = await client.order(None, content=b"{")
    assert slug(keyless) == "idempotency-key-missing"
    large = await client.order(content=b"{" * 1_000_001)
    assert slug(large) == "input-too-large"
    assert isinstance(shop.durable, Durable)


class Turned:
    """A codec that leaves nothing readable, with a mark by which it knows its own."""

    def encode(self, payload: bytes) -> bytes:
        return b"\x00mark" + payload[::-1]

    def decode(self, payload: bytes) -> bytes:
        if not payload.startswith(b"\x00mark"):
            raise ValueError("not encoded")
        return payload[5:][::-1]


async def test_a_codec_of_the_applications(shop: Shop) -> None:
    """SEC-9, S44: input, result and shaped answer are stored encoded, and answered as they were."""
    shop.durable.codec = Turned()

    def present(order: Order) -> dict[str, str]:
        return {"shaped": order.item}

    async with shop.open(present=present) as client:
        first, second = await client.order(item="palindrome"), await client.order(item="palindrome")
    assert first.json() == second.json() == {"shaped": "palindrome"}
    row = await shop.connection.fetchrow("SELECT r.input, r.output, l.answer FROM fencepost.runs AS r, fencepost.lineages AS l")
    assert row is not None
    assert all(bytes(value).startswith(b"\x00mark") and b"palindrome" not in bytes(value) for value in row.values())
