"""From a record to its deliveries: what is read, who takes it, and why it is refused. No record is an error."""

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import pytest
from pydantic import BaseModel, field_validator
from structlog.testing import capture_logs

from consumer_sdk.adapters import plain_records
from consumer_sdk.delivery import Arrival, Delivery, Redrive, Refusal
from consumer_sdk.identity import Identity, step_key
from consumer_sdk.incarnation import Incarnation
from consumer_sdk.intake import Intake
from consumer_sdk.message import Message, Record
from consumer_sdk.message_handlers import MessageHandlers
from consumer_sdk.testing import event, record

SECRET: Final = "marker-4711"
TYPE: Final = "order.placed"
ID: Final = "018f6d2e-0000-7000-8000-000000000001"
INCARNATION: Final = Incarnation("c-1", UUID(int=7))
REDRIVE: Final = Redrive(UUID(int=1), 3, 5)
CODEC_FAILED: Final = Refusal("undecodable", "ValueError", "codec_failed")


class Order(BaseModel):
    number: int


class Fragile(BaseModel):
    number: int

    @field_validator("number")
    @classmethod
    def falls_over(cls, number: int) -> int:
        raise RuntimeError(SECRET)


class Reversed:
    """A codec of an author's."""

    def encode(self, payload: bytes) -> bytes:
        return payload[::-1]

    def decode(self, payload: bytes) -> bytes:
        if payload.startswith(b"!"):
            raise ValueError(SECRET)
        return payload[::-1]


async def nothing(_message: Any, _context: Any) -> None: ...


def app_with(*steps: str, codec: Any = None, **options: Any) -> MessageHandlers:
    app = MessageHandlers() if codec is None else MessageHandlers(codec=codec)
    for step in steps or ("store",):
        app.handler(TYPE, step=step, **options)(nothing)
    return app


def incarnations() -> Mapping[str, Incarnation]:
    return {"events": INCARNATION}


def intake(app: MessageHandlers) -> Intake:
    return Intake(app, consumer="billing", incarnations=incarnations)


def taken(app: MessageHandlers, given: Record) -> Delivery:
    (delivery,) = intake(app).deliveries(given, None)
    return delivery


def refused(app: MessageHandlers, given: Record) -> Refusal:
    delivery = taken(app, given)
    assert delivery.handler is None
    assert delivery.refusal is not None
    return delivery.refusal


def arrival(given: Record, finished: list[Arrival]) -> Arrival:
    return Arrival(given, 100, finished.append)


# What a handler gets


def test_a_message_is_read_as_its_handler_s_model() -> None:
    delivery = taken(app_with(model=Order), event(TYPE, {"number": 4}, event_id=ID, tenant_id="acme"))

    assert delivery.message is not None
    assert delivery.message.value == Order(number=4)
    assert delivery.identity == Identity(ID, "acme", "billing/store")
    assert (delivery.attempts, delivery.postponed, delivery.first_tried_at, delivery.refusal) == (0, 0, None, None)


def test_without_a_tenant_the_ledger_s_is_empty() -> None:
    assert taken(app_with(), event(TYPE, 1, tenant_id=None)).identity.tenant_id == ""


@pytest.mark.parametrize("value", [0, "", False, [], {}, None])
def test_any_json_is_a_payload(value: object) -> None:
    delivery = taken(app_with(), event(TYPE, b"null" if value is None else value))

    assert delivery.refusal is None
    assert delivery.message is not None
    assert delivery.message.value == value


def test_each_step_has_a_delivery_and_an_identity_of_its_own() -> None:
    """CONSUME-9."""
    given, finished = event(TYPE, {}, event_id=ID), list[Arrival]()
    deliveries = intake(app_with("store", "mail")).deliveries(given, own := arrival(given, finished))

    assert [one.identity.step for one in deliveries] == ["billing/store", "billing/mail"]
    assert {one.identity.run_key for one in deliveries} == {ID}
    own.done()
    assert finished == []
    own.done()
    assert finished == [own]


def test_a_payload_that_fits_one_step_and_not_the_other_is_refused_for_one() -> None:
    app = app_with("store", model=Order)
    app.handler(TYPE, step="mail")(nothing)
    first, second = intake(app).deliveries(event(TYPE, {"odd": 1}), None)

    assert first.refusal is not None
    assert (first.handler, first.identity.step) == (None, "billing/store")
    assert (second.refusal, second.identity.step) == (None, "billing/mail")


@pytest.mark.parametrize(("version", "step"), [(None, "any"), (1, "any"), (2, "second"), (3, "any")])
def test_a_version_has_its_handler(version: int | None, step: str) -> None:
    app = MessageHandlers()

    async def second(_message: Any, _context: Any) -> None: ...

    app.handler(TYPE, step="store")(nothing)
    app.handler(TYPE, step="store", version=2)(second)
    delivery = taken(app, event(TYPE, {}, schema_version=version))

    assert delivery.handler is not None
    assert (delivery.handler.function is second) == (step == "second")
    assert delivery.identity.step == "billing/store"


@pytest.mark.parametrize("suspect", [True, False])
def test_what_may_have_ended_its_process_is_told_to_every_delivery(suspect: bool) -> None:
    given = event(TYPE, {})
    deliveries = intake(app_with("store", "mail")).deliveries(given, Arrival(given, 1, lambda _: None, suspect))

    assert [one.suspect for one in deliveries] == [suspect, suspect]


def test_a_codec_decodes_before_anybody_validates() -> None:
    delivery = taken(app_with(codec=Reversed(), model=Order), event(TYPE, Reversed().encode(b'{"number": 4}')))

    assert delivery.message is not None
    assert delivery.message.value == Order(number=4)


@pytest.mark.parametrize("kind", ["fencepost.run_completed", "fencepost.workflow.told"])
def test_what_fencepost_says_of_runs_goes_through_no_codec(kind: str) -> None:
    app = MessageHandlers(codec=Reversed())
    app.handler(kind, step="store", model=Order)(nothing)
    delivery = taken(app, event(kind, b'{"number": 4}'))

    assert delivery.message is not None
    assert delivery.message.value == Order(number=4)


def test_a_message_without_an_id_is_its_place() -> None:
    app = app_with()
    app.adapter("events", plain_records(type=TYPE))
    delivery = taken(app, record(b"1", partition=3, offset=99))

    assert delivery.identity == Identity(f"place:c-1/{UUID(int=7)}/3/99", "", "billing/store")


def test_a_topic_that_was_made_anew_has_other_messages() -> None:
    app = app_with()
    app.adapter("events", plain_records(type=TYPE))
    now = [INCARNATION]
    own = Intake(app, consumer="billing", incarnations=lambda: {"events": now[0]})
    given = record(b"1", offset=99)
    keys = [own.deliveries(given, None)[0].identity.run_key]
    now[0] = Incarnation("c-1", UUID(int=8))
    keys.append(own.deliveries(given, None)[0].identity.run_key)

    assert len(set(keys)) == 2


# Refusals


@pytest.mark.parametrize(
    ("options", "given", "refusal"),
    [
        ({}, record(b"\xff"), Refusal("undecodable", "consumer_sdk.NotAMessage", "not_a_message")),
        ({}, record(None), Refusal("undecodable", "consumer_sdk.NotAMessage", "not_a_message")),
        ({}, event("order.lost", {}), Refusal("unknown_type", "consumer_sdk.NoHandler", "no_handler_for_type")),
        ({"version": 2}, event(TYPE, {}), Refusal("unknown_version", "consumer_sdk.NoHandler", "no_handler_for_version")),
        ({}, event(TYPE), Refusal("tombstone", "consumer_sdk.Tombstone", "tombstone")),
        ({"model": Order}, event(TYPE, {"odd": 1}), Refusal("invalid_payload", "ValidationError", "invalid_payload")),
        ({}, event(TYPE, b"{"), Refusal("invalid_payload", "JSONDecodeError", "invalid_payload")),
        ({}, event(TYPE, b""), Refusal("invalid_payload", "JSONDecodeError", "invalid_payload")),
        ({}, event(TYPE, b"\xff"), Refusal("invalid_payload", "UnicodeDecodeError", "invalid_payload")),
        ({"model": Fragile}, event(TYPE, {"number": 1}), Refusal("invalid_payload", "RuntimeError", "invalid_payload")),
        ({"codec": Reversed()}, event(TYPE, b"!x"), CODEC_FAILED),
    ],
    ids=[
        "not_a_message", "no value and no attribute", "unknown_type", "unknown_version", "tombstone", "a missing field", "no JSON",
        "nothing", "no UTF-8", "a model that raises", "codec",
    ],
)  # fmt: skip
def test_what_cannot_be_handled_is_refused(options: dict[str, Any], given: Record, refusal: Refusal) -> None:
    """CONSUME-12, CONSUME-13, CONSUME-14."""
    assert refused(app_with(**options), given) == refusal


@pytest.mark.parametrize("payload", [b"[" * 100_000, b"9" * 10_000], ids=["deep", "long number"])
def test_json_that_python_will_not_read_is_refused(payload: bytes) -> None:
    assert refused(app_with(), event(TYPE, payload)).reason == "invalid_payload"


def test_a_handler_of_tombstones_gets_them_without_a_value() -> None:
    """CONSUME-13."""
    delivery = taken(app_with(tombstones=True, model=Order), event(TYPE))

    assert delivery.refusal is None
    assert delivery.message is not None
    assert (delivery.message.payload, delivery.message.value) == (None, None)


@pytest.mark.parametrize("key", [None, b"k"])
def test_a_record_without_a_key_is_handled_as_any(key: bytes | None) -> None:
    """CONSUME-13."""
    assert taken(app_with(), event(TYPE, {}, key=key)).refusal is None


def test_what_could_not_be_read_is_known_by_its_place() -> None:
    """CONSUME-12."""
    delivery = taken(app_with(), record(b"\xff", partition=3, offset=99))

    assert delivery.identity == Identity(f"place:c-1/{UUID(int=7)}/3/99", "", step_key("billing", ""))
    assert (delivery.message, delivery.type) == (None, None)


def test_what_nobody_takes_is_known_by_its_id() -> None:
    """CONSUME-16: at another offset it is given up no second time."""
    delivery = taken(app_with(), event("order.lost", {}, event_id=ID, tenant_id="acme"))

    assert delivery.identity == Identity(ID, "acme", step_key("billing", ""))
    assert delivery.type == "order.lost"


@pytest.mark.parametrize("suspect", [True, False])
def test_a_refusal_is_one_delivery_of_its_record(suspect: bool) -> None:
    given, finished = record(b"\xff"), list[Arrival]()
    (delivery,) = intake(app_with("store", "mail")).deliveries(given, Arrival(given, 1, finished.append, suspect))
    assert delivery.arrival is not None
    delivery.arrival.done()

    assert len(finished) == 1


def raises(_record: Record) -> Message[None]:
    raise RuntimeError(SECRET)


@pytest.mark.parametrize(
    ("adapter", "error_class"), [(raises, "RuntimeError"), (lambda _: None, "TypeError")], ids=["raises", "none"]
)
def test_an_adapter_that_fails_ends_nothing(adapter: Callable[[Record], Any], error_class: str) -> None:
    """An adapter is the author's, and no record may end the consumer."""
    app = app_with()
    app.adapter("events", adapter)

    assert refused(app, event(TYPE, {})) == Refusal("undecodable", error_class, "adapter_failed")


def test_a_refusal_tells_where_a_model_was_not_kept_and_no_value() -> None:
    """CONSUME-14."""
    with capture_logs() as logs:
        refusal = refused(app_with(model=Order), event(TYPE, {"number": SECRET, SECRET: 1}, partition=3, offset=99))

    (line,) = logs
    assert (line["event"], line["topic"], line["partition"], line["offset"]) == ("payload_refused", "events", 3, 99)
    assert line["problems"] == ["number: int_parsing"]
    assert SECRET not in f"{logs} {refusal}"


@pytest.mark.parametrize("app", [app_with(model=Fragile), app_with(codec=Reversed())], ids=["model", "codec"])
def test_no_author_s_error_is_quoted(app: MessageHandlers) -> None:
    with capture_logs() as logs:
        refusals = [refused(app, event(TYPE, payload)) for payload in (b'!{"number": 1}', b'{"number": 1}')]

    assert SECRET not in f"{logs} {refusals}"


# Types that are passed over


@pytest.mark.parametrize("ignored", ["order.lost", "*"])
def test_a_type_that_is_ignored_is_done_at_once_and_counted(ignored: str) -> None:
    app, finished, given = app_with(), list[Arrival](), event("order.lost", {})
    app.ignore(ignored)
    own = intake(app)

    assert own.deliveries(given, arrival(given, finished)) == []
    assert (len(finished), own.ignored) == (1, 1)


def test_to_ignore_types_is_not_to_ignore_versions_nor_what_cannot_be_read() -> None:
    app = app_with(version=2)
    app.ignore("*")

    assert refused(app, event(TYPE, {})).reason == "unknown_version"
    assert refused(app, record(b"\xff")).reason == "undecodable"


def test_a_type_that_has_a_handler_is_not_ignored() -> None:
    app = app_with()
    app.ignore(TYPE, "*")

    assert taken(app, event(TYPE, {})).refusal is None


# Age


NOW: Final = datetime(2026, 3, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("age", "is_refused"), [(timedelta(0), False), (timedelta(milliseconds=1), True), (timedelta(days=9), True)]
)
def test_what_the_ledger_may_have_forgotten_is_not_handled_anew(age: timedelta, is_refused: bool) -> None:
    """CONSUME-17: it could be a second effect."""
    own = intake(app_with())
    own.remember_from(NOW)
    (delivery,) = own.deliveries(event(TYPE, {}, time=NOW - age), None)

    assert delivery.refusal == (Refusal("too_old", "consumer_sdk.TooOld", "older_than_ledger") if is_refused else None)


def test_a_ledger_that_never_forgets_takes_any_age() -> None:
    own = intake(app_with())
    own.remember_from(NOW)
    own.remember_from(None)

    assert own.deliveries(event(TYPE, {}, time=datetime(1999, 1, 1, tzinfo=UTC)), None)[0].refusal is None


# Redrives


def redelivered(app: MessageHandlers, given: Record, identity: Identity) -> Delivery:
    (delivery,) = intake(app).redeliveries(given, identity, REDRIVE)
    return delivery


def test_a_redrive_is_one_attempt_under_the_same_identity_of_the_handler_that_gave_up() -> None:
    """CONSUME-25."""
    given = event(TYPE, {}, event_id=ID, tenant_id="acme")
    delivery = redelivered(app_with("store", "mail", attempts=4), given, identity := Identity(ID, "acme", "billing/mail"))

    assert delivery.identity == identity
    assert delivery.handler is not None
    assert (delivery.handler.step, delivery.redrive, delivery.arrival) == ("mail", REDRIVE, None)
    assert (delivery.attempts, delivery.first_tried_at, delivery.is_apart) == (3, -math.inf, True)


def test_what_nobody_took_goes_to_all_that_take_it_now_and_the_last_of_them_ends_it() -> None:
    """CONSUME-25: under those handlers' identities, so that it is known when it comes again."""
    given = event(TYPE, {}, event_id=ID, tenant_id="acme")
    deliveries = intake(app_with("store", "mail")).redeliveries(given, Identity(ID, "acme", "billing/"), REDRIVE)

    assert [(one.identity, one.redrive) for one in deliveries] == [
        (Identity(ID, "acme", "billing/store"), None),
        (Identity(ID, "acme", "billing/mail"), REDRIVE),
    ]
    assert [(one.refusal, one.attempts, one.first_tried_at) for one in deliveries] == [(None, 4, -math.inf)] * 2  # one attempt each


@pytest.mark.parametrize(
    ("app", "given", "reason"),
    [
        (app_with(model=Order), event(TYPE, {"odd": 1}, event_id=ID, tenant_id="acme"), "invalid_payload"),
        (MessageHandlers(), event(TYPE, {}, event_id=ID, tenant_id="acme"), "unknown_type"),
        (app_with(), record(b"\xff"), "undecodable"),
    ],
    ids=["invalid_payload", "unknown_type", "undecodable"],
)
def test_a_redrive_that_is_refused_again_keeps_its_identity(app: MessageHandlers, given: Record, reason: str) -> None:
    delivery = redelivered(app, given, identity := Identity(ID, "acme", "billing/store"))

    assert (delivery.identity, delivery.handler, delivery.redrive) == (identity, None, REDRIVE)
    assert delivery.refusal is not None
    assert delivery.refusal.reason == reason


def test_a_redrive_of_a_type_that_is_ignored_by_now_is_refused() -> None:
    """It is not lost in silence: the operator has asked for it."""
    app = MessageHandlers()
    app.ignore("*")
    delivery = redelivered(app, event(TYPE, {}, event_id=ID), Identity(ID, "acme", "billing/store"))

    assert delivery.refusal == Refusal("unknown_type", "consumer_sdk.NoHandler", "type_ignored")
