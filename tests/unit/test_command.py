"""A command is checked whole when it is built; its key's answer is judged without a database."""

import base64
import dataclasses
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest
from pydantic import BaseModel, model_serializer

from producer_sdk import (
    UNKEYED,
    Accepted,
    Command,
    ConfigurationError,
    IdempotencyConflict,
    InProgress,
    InvalidCommand,
    KeyExpired,
    KeyInvalid,
    KeyMissing,
    Scope,
    Secrets,
)
from producer_sdk.acceptance import (
    KEY_RETENTION_SECONDS,
    MAX_COMMANDS_PER_CALL,
    Acceptance,
    Answer,
    Patience,
    Submission,
    _process_secrets,
    acceptances,
    persist,
    persist_async,
)
from producer_sdk.command_rules import MAX_INPUT_BYTES
from producer_sdk.identity import CURRENT_PROFILE, fingerprint
from producer_sdk.runs import cancel_parameters
from tests.support.infinities import IN_MODELS, IN_PLAIN_VALUES

SECRETS = Secrets({1: b"1" * 32, 2: b"2" * 32}, write=(2, 1))
SCOPE = Scope(tenant_id="acme", principal="ana", operation="POST /reports")
RUN = "01890a5d-ac96-774b-bcce-b302099a8057"


class Item(BaseModel):
    sku: str
    count: int = 1


class Order(BaseModel):
    at: datetime
    items: list[Item] = []


def command(**changes: Any) -> Command:
    """A command that may be accepted, with changes."""
    return Command(**({"workflow": "report", "input": {"month": 1}} | changes))


def refusal(**changes: Any) -> InvalidCommand:
    with pytest.raises(InvalidCommand) as caught:
        command(**changes)
    assert caught.value.limit
    assert caught.value.remedy
    assert "secret" not in "".join(traceback.format_exception(caught.value)[1:])
    return caught.value


# The command


def test_a_command_has_these_defaults() -> None:
    made = command()
    assert (made.version, made.delay_seconds, made.max_attempts, made.deadline_seconds) == (1, 0, 5, None)
    assert (made.cost_limit, made.topic, made.traceparent) == (None, "fencepost.runs", None)
    assert made.run_id.version == 7
    assert command().run_id != made.run_id


def test_the_input_is_kept_as_compact_json() -> None:
    assert command(input={"a": [1, None], "b": "\u2713"}).input == '{"a":[1,null],"b":"\u2713"}'.encode()
    assert command(input=None).input == b"null"
    assert command(input=b'{ "a" : 1.50 }').input == b'{"a":1.5}'


def test_a_model_is_kept_as_it_dumps_and_bound_as_the_client_sent_it() -> None:
    order = Order(at=datetime(2026, 1, 31, tzinfo=UTC), items=[Item(sku="s")])
    made = command(input=order)
    assert made.input == b'{"at":"2026-01-31T00:00:00Z","items":[{"sku":"s","count":1}]}'
    assert made.request == {"at": datetime(2026, 1, 31, tzinfo=UTC), "items": [{"sku": "s"}]}
    assert command(input={"order": Item(sku="s")}).input == b'{"order":{"sku":"s","count":1}}'


def test_the_request_is_the_input_unless_it_is_given() -> None:
    assert command().request == {"month": 1}
    assert command(input=b'{"month":1}').request == {"month": 1}
    assert command(request={"other": 2}).request == {"other": 2}
    assert command(request=None).request is None


def test_a_command_keeps_what_it_was_given_when_the_callers_objects_change() -> None:
    given = {"items": [1]}
    made = command(input=given)
    given["items"].append(2)
    assert made.input == b'{"items":[1]}'
    assert made.request == {"items": [1]}


def test_a_command_cannot_be_changed_and_a_replaced_one_is_checked() -> None:
    made = command(request={"a": 1}, cost_limit=0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.workflow = "other"  # type: ignore[misc]
    assert dataclasses.replace(made) == made
    assert dataclasses.replace(made, workflow="other").input == made.input
    with pytest.raises(InvalidCommand):
        dataclasses.replace(made, workflow="")


def test_input_and_request_are_in_no_repr() -> None:
    assert "secret" not in repr(command(input={"secret": "secret"}, request={"secret": 1}))


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def endless() -> object:
    value: list[object] = []
    value.append(value)
    return value


class Unspeakable(BaseModel):
    """A model whose own serializer raises."""

    @model_serializer
    def dumped(self) -> str:
        raise ValueError("secret")


@pytest.mark.parametrize(
    "value",
    [
        float("nan"), {"secret": float("inf")}, {"secret": object()}, {("secret",): 1}, "secret\ud800", "secret\0", b"secret",
        {"secret\ud800": 1}, "s" * (MAX_INPUT_BYTES - 1), nested(65), nested(100_000), endless(), 10**1_000,
        {1: "secret", "1": 2}, b'{"secret":1,"secret":2}', b"\xffsecret",
    ],
    ids=range(16),
)  # fmt: skip
def test_an_input_that_a_worker_could_misread_is_refused(value: object) -> None:
    assert refusal(input=value).field == "input"


@pytest.mark.parametrize("value", [*IN_PLAIN_VALUES.values(), *IN_MODELS.values()], ids=[*IN_PLAIN_VALUES, *IN_MODELS])
def test_an_input_with_an_infinity_or_a_nan_is_refused(value: object) -> None:
    """Also where the key is bound to a request of its own: a worker would get nothing in its place."""
    refused = refusal(input={"measured": value}, request={"month": 1})
    assert (refused.field, refused.limit) == ("input", "must be a value that JSON can hold: it holds NaN or an infinity")


def test_an_input_at_the_limit_is_kept() -> None:
    assert len(command(input="s" * (MAX_INPUT_BYTES - 2)).input) == MAX_INPUT_BYTES
    assert command(input=nested(64)).input.startswith(b"[" * 64)
    command(input=10**999)


def test_an_error_of_ours_says_the_size_and_what_to_do() -> None:
    assert "1000001" in str(refusal(input="s" * (MAX_INPUT_BYTES - 1)))
    assert str(refusal(workflow="secret/x")).startswith("workflow: must be 1 to 200 characters")


@pytest.mark.parametrize("value", [object(), float("nan"), {1: "secret"}, "secret\0", nested(65)], ids=range(5))
def test_a_request_without_a_canonical_form_is_refused(value: object) -> None:
    assert refusal(request=value).field == "request"


def test_names_that_are_no_text_are_refused() -> None:
    assert refusal(input={1: "secret"}).field == "input"
    assert str(refusal(input={1: "secret"})).startswith("input: a name at depth 1 must be text; convert it")
    assert refusal(request={1: "secret"}).field == "request"


@pytest.mark.parametrize("value", [{1: "secret"}, {"secret": {1, 2}}, {"at": Decimal("1.50"), 2: 3}], ids=range(3))
def test_an_error_blames_no_argument_that_was_not_passed(value: object) -> None:
    assert refusal(input=value).field == "input"
    assert refusal(input={}, request=value).field == "request"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (float("nan"), "it holds NaN or an infinity"),
        ({"secret": [float("-inf")]}, "it holds NaN or an infinity"),
        (endless(), "it holds itself"),
        (nested(65), "is nested deeper than 64"),
        (nested(100_000), "it is nested deeper than 64"),
        (10**1_000, "holds a number of more than 1000 digits"),
        (10**10_000, "it holds a number of more than 1000 digits"),
        (Unspeakable(), "a part of it cannot be dumped"),
    ],
    ids=range(8),
)
def test_each_reason_against_an_input_has_its_own_words_and_its_limit(value: object, reason: str) -> None:
    refused = refusal(input=value)
    assert reason in refused.limit
    assert "NaN" in reason or "NaN" not in refused.limit


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("workflow", ["", "a b", "a/b", "w" * 201, "\u00fc", "a\n", None, 7]),
        ("version", [0, -1, 2**31, True, 1.0, "1", None]),
        ("topic", ["", ".", "..", "a b", "t" * 250, "a\n", None]),
        ("delay_seconds", [-1, 366 * 86_400 + 1, float("nan"), float("inf"), True, "1", None, 10**400]),
        ("max_attempts", [0, 1_001, True, 1.5, None]),
        ("deadline_seconds", [0, 0.0009, 366 * 86_400 + 1, float("nan"), "1", True]),
        ("cost_limit", [0, -1, 10**15 + 1, 10**400, float("nan"), float("inf"), Decimal("1e-19"), Decimal("sNaN"), True, "1"]),
        ("run_id", ["secret", RUN, 7]),
        ("traceparent", ["", "a\0b", "t" * 257, "\ud800", 7]),
    ],
)
def test_a_value_outside_its_limits_is_refused(field: str, values: list[object]) -> None:
    for value in values:
        assert refusal(**{field: value}).field == field, value


def test_what_reaches_a_limit_exactly_is_kept() -> None:
    command(workflow="w" * 200, version=2**31 - 1, topic="t" * 249, delay_seconds=366 * 86_400, max_attempts=1_000)
    command(deadline_seconds=0.001, cost_limit=10**15, traceparent="t" * 256, run_id=uuid4())
    assert command(cost_limit=0.1).cost_limit == Decimal("0.1")


# The key


def acceptance(made: Command | None = None, key: Any = "k-1", **options: Any) -> Acceptance:
    given: dict[str, Any] = {"secrets": SECRETS, "key_retention_seconds": KEY_RETENTION_SECONDS} | options
    return Acceptance(made or command(), SCOPE, key, **given)


def answer(outcome: str, *, isolation: str = "read committed", **stored: Any) -> Answer:
    values = {
        "run_id": RUN,
        "run_state": "queued",
        "key_version": None,
        "profile": None,
        "schema_version": None,
        "fingerprint": None,
    }
    return Answer(outcome=outcome, isolation=isolation, **(values | stored))


def found(made: Command, *, version: int = 1, schema_version: int = 1, state: str = "queued") -> Answer:
    """The answer for a key that was stored with this command's request."""
    stored = fingerprint(SECRETS, version, scope=SCOPE, workflow=made.workflow, schema_version=schema_version, request=made.request)
    return answer(
        "found", run_state=state, key_version=version, profile=CURRENT_PROFILE, schema_version=schema_version, fingerprint=stored
    )


def test_a_created_run_says_so() -> None:
    accepted = acceptance().judged(answer("created"))
    assert accepted == Accepted("created", UUID(RUN), "queued")
    assert accepted.created


@pytest.mark.parametrize(
    ("argument", "arguments"),
    [
        ("command", ({"workflow": "secret"}, SCOPE, "k", SECRETS)),
        ("scope", (command(), "secret", "k", SECRETS)),
        ("scope", (command(), None, "k", SECRETS)),
        ("secrets", (command(), SCOPE, "k", "secret")),
    ],
)
def test_an_argument_of_another_kind_is_named_with_what_to_pass(argument: str, arguments: tuple[Any, ...]) -> None:
    given, scope, key, secrets = arguments
    with pytest.raises(TypeError, match=rf"^{argument} must be a \w+, is a \w+; pass \w+\(") as caught:
        Acceptance(given, scope, key, secrets=secrets, key_retention_seconds=60)
    assert "secret'" not in str(caught.value)


def test_a_submission_of_another_kind_is_named_with_what_to_pass() -> None:
    with pytest.raises(TypeError, match=r"^a submission must be a Submission, is a tuple; pass Submission\("):
        acceptances([(command(), SCOPE, "k")], secrets=SECRETS, key_retention_seconds=60)  # type: ignore[list-item]


# Cancelling


def cancelling(**changes: Any) -> tuple[Any, ...]:
    given: dict[str, Any] = {"run_id": UUID(RUN), "tenant_id": "acme", "actor": "ana", "reason": "a test", "expected_version": None}
    return cancel_parameters(**(given | changes))


@pytest.mark.parametrize(
    ("field", "remedy", "values"),
    [
        ("actor", "say who acts", [None, "", " ", "\n\t", "s" * 257]),
        ("reason", "say why", [None, "", "  ", "s" * 2_001]),
        ("tenant_id", "pass the id of the run's tenant", [None, "", "s" * 257]),
        ("expected_version", "pass the version that read_run gave, or None", ["3", "secret", 0, -1, 1.0, True, 2**63]),
    ],
)
def test_a_cancellation_is_checked_before_any_statement(field: str, remedy: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(InvalidCommand) as caught:
            cancelling(**{field: value})
        assert caught.value.field == field, value
        assert caught.value.remedy == remedy, value
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("field", ["actor", "reason", "tenant_id"])
@pytest.mark.parametrize("value", ["secret\0", "secret\ud800", b"secret", 7], ids=range(4))
def test_who_cancels_and_why_is_text(field: str, value: object) -> None:
    with pytest.raises(InvalidCommand) as caught:
        cancelling(**{field: value})
    assert caught.value.field == field
    assert "secret" not in str(caught.value)


def test_a_cancellation_at_its_limits_is_sent() -> None:
    sent = cancelling(actor="a" * 256, reason="r" * 2_000, expected_version=2**63 - 1)
    assert sent == ("acme", RUN, "a" * 256, "r" * 2_000, 2**63 - 1)


@pytest.mark.parametrize("version", [1, 2])
def test_an_equal_request_is_replayed_with_the_state_of_its_run(version: int) -> None:
    accepted = acceptance().judged(found(command(), version=version, state="failed"))
    assert accepted == Accepted("replayed", UUID(RUN), "failed")
    assert not accepted.created


def test_another_request_is_a_conflict() -> None:
    with pytest.raises(IdempotencyConflict) as caught:
        acceptance(command(request={"month": 2})).judged(found(command()))
    assert caught.value.code == "idempotency_conflict"


def test_another_workflow_is_a_conflict() -> None:
    with pytest.raises(IdempotencyConflict):
        acceptance(command(workflow="other")).judged(found(command()))


def test_a_request_is_compared_under_the_schema_version_of_its_time() -> None:
    assert not acceptance(command(version=2)).judged(found(command(), schema_version=1)).created


def test_a_profile_of_a_newer_release_is_an_operators_matter() -> None:
    with pytest.raises(ConfigurationError, match="upgrade"):
        acceptance().judged(found(command())._replace(profile=999))


def test_an_expired_key_is_told_apart() -> None:
    with pytest.raises(KeyExpired):
        acceptance().judged(answer("expired"))


def test_in_progress_says_when_only_a_new_transaction_can_help() -> None:
    with pytest.raises(InProgress, match=r"try again$"):
        acceptance().judged(answer("in_progress"))
    with pytest.raises(InProgress, match=r"REPEATABLE READ.* in a new transaction"):
        acceptance().judged(answer("in_progress", isolation="repeatable read"))


def test_a_key_is_required_and_must_be_well_formed() -> None:
    with pytest.raises(KeyMissing):
        acceptance(key=None)
    for key in ("", "secret\n", "s" * 256, "\u00fc", b"secret"):
        with pytest.raises(KeyInvalid):
            acceptance(key=key)


def test_a_run_without_a_key_needs_no_secrets() -> None:
    assert acceptance(key=UNKEYED, secrets=None).parameters()[-7:] == ([], [], [], 0, None, None, None)


@pytest.fixture
def fresh_process() -> Iterator[None]:
    """Nobody has read the environment's secrets, before or after."""
    _process_secrets.cache_clear()
    yield
    _process_secrets.cache_clear()


@pytest.mark.usefixtures("fresh_process")
def test_a_key_without_secrets_is_an_operators_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FENCEPOST_IDEMPOTENCY_SECRETS", raising=False)
    with pytest.raises(ConfigurationError, match="FENCEPOST_IDEMPOTENCY_SECRETS"):
        acceptance(secrets=None).parameters()


@pytest.mark.usefixtures("fresh_process")
def test_the_environments_secrets_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEPOST_IDEMPOTENCY_SECRETS", f"1:{base64.b64encode(b'1' * 32).decode()}")
    monkeypatch.delenv("FENCEPOST_IDEMPOTENCY_WRITE", raising=False)
    made = command()
    given = acceptance(made, secrets=None).parameters()
    assert given == acceptance(made, secrets=Secrets({1: b"1" * 32}, write=[1])).parameters()
    monkeypatch.delenv("FENCEPOST_IDEMPOTENCY_SECRETS")
    assert acceptance(made, secrets=None).parameters() == given


def test_every_process_locks_the_versions_of_a_key_in_one_order() -> None:
    assert acceptance().parameters()[11] == [1, 2]
    assert acceptance(secrets=Secrets({1: b"1" * 32, 2: b"2" * 32, 3: b"3" * 32}, write=(3, 2))).parameters()[11] == [2, 3, 1]


@pytest.mark.parametrize("seconds", [0, 0.5, 3_660 * 86_400 + 1, float("nan"), "1", None])
def test_a_retention_outside_its_limits_is_refused(seconds: Any) -> None:
    with pytest.raises(InvalidCommand, match="key_retention_seconds"):
        acceptance(key_retention_seconds=seconds)


def test_a_call_takes_so_many_commands_and_no_more() -> None:
    submission = Submission(command(), SCOPE, UNKEYED)
    with pytest.raises(InvalidCommand, match=f"submissions: {MAX_COMMANDS_PER_CALL + 1} in one call"):
        acceptances([submission] * (MAX_COMMANDS_PER_CALL + 1), secrets=SECRETS, key_retention_seconds=60)


# Waiting


def patience(wait_seconds: float, clock: Callable[[], float] = lambda: 0.0) -> Patience:
    return Patience(wait_seconds, clock=clock, jitter=lambda _, most: most)


def test_pauses_grow_to_a_bound_and_end_with_the_time() -> None:
    now = 0.0
    waiting = patience(1, lambda: now)
    pauses = []
    while (pause := waiting.pause_after(answer("in_progress"))) is not None:
        pauses.append(pause)
        now += pause
    assert pauses == pytest.approx([0.01, 0.02, 0.04, 0.08, 0.16, 0.25, 0.25, 0.19])
    assert now == pytest.approx(1)


def test_no_time_is_one_try() -> None:
    tries = []

    def attempt() -> Answer:
        tries.append(1)
        return answer("in_progress")

    assert persist(attempt, Patience(0)).outcome == "in_progress"
    assert len(tries) == 1


async def test_a_key_is_tried_until_there_is_an_answer() -> None:
    given = [answer("in_progress"), answer("in_progress"), answer("created")]
    answers = iter(given * 2)

    async def attempt() -> Answer:
        return next(answers)

    def at_once() -> Patience:
        return Patience(60, jitter=lambda *_: 0.0)

    assert persist(lambda: next(answers), at_once()) == given[-1]
    assert await persist_async(attempt, at_once()) == given[-1]
    assert next(answers, None) is None


@pytest.mark.parametrize("outcome", ["created", "found", "expired"])
def test_an_answer_ends_the_waiting(outcome: str) -> None:
    assert patience(9).pause_after(answer(outcome)) is None


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_a_snapshot_that_cannot_change_is_not_waited_for(isolation: str) -> None:
    assert patience(9).pause_after(answer("in_progress", isolation=isolation)) is None


@pytest.mark.parametrize("seconds", [-1, 61, float("nan"), None, True])
def test_a_wait_outside_its_limits_is_refused(seconds: Any) -> None:
    with pytest.raises(InvalidCommand, match="wait_seconds"):
        Patience(seconds)
