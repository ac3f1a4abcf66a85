"""What is refused when a durable route is declared, and what the description of the API says of it. Nothing is connected to."""

from collections.abc import Callable
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI, Form
from fastapi.middleware.gzip import GZipMiddleware
from pydantic import BaseModel
from starlette.responses import PlainTextResponse

from fencepost.errors import ConfigurationError
from fencepost.retry import Retry
from producer_sdk.http import Durable, Principal, RouteSettings, Tx, WorkflowFailure, load_route_settings


class OrderIn(BaseModel):
    item: str


class Order(BaseModel):
    id: int


class Shown(BaseModel):
    number: int


class OutOfStock(WorkflowFailure): ...


async def current_principal() -> Principal:
    return Principal("acme", "ada")


async def place_order(_context: Any, order: OrderIn) -> Order:
    return Order(id=len(order.item))


async def orders(order: OrderIn, tx: Tx) -> OrderIn:
    return order


@pytest.fixture
def durable() -> Durable:
    durable = Durable(principal=current_principal)
    durable.workflow("place_order", failures={OutOfStock: 422})(place_order)
    return durable


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"wait_seconds": -1}, "wait_seconds"),
        ({"wait_seconds": float("nan")}, "wait_seconds"),
        ({"request_deadline_seconds": 1}, "request_deadline_seconds"),
        ({"request_deadline_seconds": 2}, "request_deadline_seconds"),
        ({"request_deadline_seconds": True}, "request_deadline_seconds"),
        ({"key_retention_seconds": 0}, "key_retention_seconds"),
        ({"max_input_bytes": 0}, "max_input_bytes"),
        ({"starts_per_minute": 0}, "starts_per_minute"),
        ({"name": "a name"}, "name"),
        ({"present": lambda result: result}, "present"),
    ],
)
def test_options_that_cannot_work(durable: Durable, options: dict[str, Any], says: str) -> None:
    """ROUTE-13, R34, R36: a deadline that leaves no time to start is refused before anything is served."""
    with pytest.raises(ConfigurationError, match=says):
        durable.route(place_order, **options)(orders)


def test_a_wait_longer_than_the_deadline_is_fine(durable: Durable) -> None:
    """ROUTE-12, R36: it is cut, since the route knows the deadline."""
    durable.route(place_order, wait_seconds=30, request_deadline_seconds=10)(orders)


def test_names_are_unique(durable: Durable) -> None:
    """KEY-7: two operations under one name would share their keys."""
    durable.route(place_order)(orders)
    with pytest.raises(ConfigurationError, match="name is taken"):
        durable.route(place_order)(orders)


def test_only_a_workflow_of_the_registry(durable: Durable) -> None:
    """R8"""
    with pytest.raises(ConfigurationError, match="no workflow of this registry"):
        durable.route(current_principal)  # type: ignore[arg-type]


@pytest.mark.parametrize("principal", [None, "ada", 1])
def test_a_principal_is_mandatory(principal: Any) -> None:
    """SEC-5, R12"""
    with pytest.raises(ConfigurationError, match="principal"):
        Durable(principal=principal)
    with pytest.raises(TypeError):
        Durable()  # type: ignore[call-arg]


def test_a_plain_function_is_no_handler(durable: Durable) -> None:
    def handler(order: OrderIn) -> OrderIn:
        return order

    with pytest.raises(ConfigurationError, match="async def"):
        durable.route(place_order)(handler)


@pytest.mark.parametrize("annotation", [Principal, Principal | None, Annotated[Principal, "who asks"]])
def test_a_principal_that_the_client_would_send_is_refused(durable: Durable, annotation: Any) -> None:
    """SEC-5: without Depends it is a field of the body to FastAPI."""

    async def handler(order: OrderIn, user: annotation) -> OrderIn:
        return order

    with pytest.raises(ConfigurationError, match=r"route handler: user: .*write user: Annotated\[Principal, Depends\("):
        durable.route(place_order)(handler)


def test_a_principal_that_a_dependency_returns_is_taken(durable: Durable) -> None:
    async def marked(order: OrderIn, user: Annotated[Principal, Depends(current_principal)]) -> OrderIn:
        return order

    async def by_default(order: OrderIn, user: Principal = Depends(current_principal)) -> OrderIn:  # noqa: B008 - FastAPI's older way
        return order

    for handler in (marked, by_default):
        durable.router().post("/orders")(durable.route(place_order)(handler))


def test_there_is_one_accepting_transaction(durable: Durable) -> None:
    async def handler(order: OrderIn, tx: Tx, other: Tx) -> OrderIn:
        return order

    with pytest.raises(ConfigurationError, match="one accepting transaction"):
        durable.route(place_order)(handler)


@pytest.mark.parametrize(
    "options",
    [
        {"response_model": Shown},
        {"response_model_exclude_none": True},
        {"response_model_include": {"id"}},
        {"response_model_by_alias": False},
        {"response_class": PlainTextResponse},
    ],
)
def test_what_would_change_a_stored_answer_is_refused(durable: Durable, options: dict[str, Any]) -> None:
    """ROUTE-2: another body than the stored one could not be replayed."""
    with pytest.raises(ConfigurationError, match="present"):
        durable.router().post("/orders", **options)(durable.route(place_order)(orders))


@pytest.mark.parametrize("options", [{}, {"response_model": Order}, {"response_model": None}])
def test_the_success_model_may_be_named(durable: Durable, options: dict[str, Any]) -> None:
    durable.router().post("/orders", **options)(durable.route(place_order)(orders))


def test_what_present_returns_is_the_success_model(durable: Durable) -> None:
    def present(order: Order) -> Shown:
        return Shown(number=order.id)

    durable.router().post("/orders", response_model=Shown)(durable.route(place_order, present=present)(orders))


def test_a_form_parameter_is_refused(durable: Durable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms are read by form_field, which needs no parser of multipart bodies."""
    monkeypatch.setattr("fastapi.dependencies.utils.ensure_multipart_is_installed", lambda: None)

    async def handler(item: Annotated[str, Form()]) -> OrderIn:
        return OrderIn(item=item)

    with pytest.raises(ConfigurationError, match="form_field"):
        durable.router().post("/orders")(durable.route(place_order)(handler))


async def test_a_durable_route_belongs_on_a_durable_router(durable: Durable) -> None:
    """On a plain router it would be an ordinary handler, without a key."""
    with pytest.raises(ConfigurationError, match=r"durable\.router"):
        await durable.route(place_order)(orders)()  # type: ignore[call-arg]


async def test_a_middleware_outside_of_the_stamp_stops_the_start(durable: Durable) -> None:
    """R32: install comes last, or arrivals are stamped late."""
    app = FastAPI()
    durable.install(app)
    app.add_middleware(GZipMiddleware)
    with pytest.raises(ConfigurationError, match=r"after every app\.add_middleware"):
        async with app.router.lifespan_context(app):
            pass


def test_monitors_of_two_registries_do_not_share_a_path(durable: Durable) -> None:
    """ROUTE-17: the second one's monitors would not exist."""
    app = FastAPI()
    durable.install(app)
    with pytest.raises(ConfigurationError, match="prefix="):
        Durable(principal=current_principal).install(app)
    Durable(principal=current_principal, prefix="/other").install(app)


def settings(**values: object) -> RouteSettings:
    return load_route_settings({"database_url": "postgresql://localhost/x"} | values)


@pytest.mark.parametrize("seconds", [0, 1, 2, 3601])
def test_a_deadline_that_leaves_no_time_is_refused(seconds: float) -> None:
    """R35, ROUTE-13, R34"""
    with pytest.raises(ConfigurationError, match="FENCEPOST_ROUTES_REQUEST_DEADLINE_SECONDS"):
        settings(routes_request_deadline_seconds=seconds)


def test_settings_state_their_relations() -> None:
    with pytest.raises(ConfigurationError, match="FENCEPOST_ROUTES_DATABASE_SECONDS"):
        settings(routes_request_deadline_seconds=3, routes_database_seconds=3)
    with pytest.raises(ConfigurationError, match="FENCEPOST_ROUTES_NONSENSE"):
        settings(routes_nonsense=1)


def test_a_setting_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEPOST_DATABASE_URL", "postgresql://localhost/x\n")
    monkeypatch.setenv("FENCEPOST_ROUTES_MAX_WAITERS", " 5 ")
    assert load_route_settings().routes_max_waiters == 5


def described(durable: Durable, declare: Callable[..., Any], path: str = "/orders", **options: Any) -> dict[str, Any]:
    router = durable.router()
    router.post(path, **options)(declare)
    app = FastAPI()
    app.include_router(router)
    operation: dict[str, Any] = app.openapi()["paths"][path]["post"]
    return operation


def header_names(operation: dict[str, Any], status: int) -> set[str]:
    return set(operation["responses"][str(status)].get("headers", {}))


def test_the_description_shows_the_contract(durable: Durable) -> None:
    """ROUTE-28, L21"""
    operation = described(durable, durable.route(place_order)(orders), status_code=201)
    parameters = {one["name"]: one["required"] for one in operation["parameters"]}
    assert parameters == {"Idempotency-Key": True, "Prefer": False}
    success = operation["responses"]["201"]
    assert success["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Order"}
    assert {"Idempotent-Replayed", "X-Idempotent-Replayed"} <= header_names(operation, 201)
    assert {"Retry-After", "Location", "Idempotent-Replayed"} <= header_names(operation, 202)
    for status in (400, 409, 410, 413, 422, 429, 500, 503):
        assert set(operation["responses"][str(status)]["content"]) == {"application/problem+json"}
    assert "Retry-After" in header_names(operation, 503)
    types = operation["responses"]["422"]["content"]["application/problem+json"]["schema"]["properties"]["type"]["enum"]
    assert {one.rpartition(":")[2] for one in types} == {"request-invalid", "idempotency-key-reused", "workflow-failed"}
    assert "tx" not in str(operation)


def test_the_description_of_a_stream(durable: Durable) -> None:
    """ROUTE-28: the event stream and its cursor."""
    operation = described(durable, durable.stream(place_order)(orders))
    assert "text/event-stream" in operation["responses"]["200"]["content"]
    assert "Last-Event-ID" in {one["name"] for one in operation["parameters"]}
    assert "stream-cursor-gone" in str(operation["responses"]["410"])


def test_a_key_that_may_be_left_out_is_described_so(durable: Durable) -> None:
    """KEY-5"""
    operation = described(durable, durable.route(place_order, key_required=False)(orders))
    assert {one["name"]: one["required"] for one in operation["parameters"]}["Idempotency-Key"] is False


def test_the_authors_own_descriptions_stand(durable: Durable) -> None:
    operation = described(
        durable, durable.route(place_order)(orders), responses={418: {"description": "Teapot"}, 202: {"description": "Later"}}
    )
    assert operation["responses"]["418"]["description"] == "Teapot"
    assert operation["responses"]["202"]["description"] == "Later"
    assert "Retry-After" in header_names(operation, 202)


def test_a_mapped_failure_ends_the_run_whatever_the_policy(durable: Durable) -> None:
    """ROUTE-33, R25: the mapping is the workflow's own, so no policy can contradict it."""

    @durable.workflow("refund", failures={OutOfStock: 409}, retry=Retry(cap_seconds=1))
    async def refund(_context: Any, order: OrderIn) -> Order:
        raise OutOfStock

    assert durable.newest(refund).status_of(OutOfStock()) == 409


def test_the_public_names_are_there() -> None:
    """Each of them, and no other."""
    import producer_sdk.http

    assert all(getattr(producer_sdk.http, name) is not None for name in producer_sdk.http.__all__)
    assert set(producer_sdk.http._HOMES) == set(producer_sdk.http.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        producer_sdk.http.nothing  # noqa: B018
