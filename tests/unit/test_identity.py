"""One intent has one identity: its key in its scope, and its request; neither can be read from what is stored."""

import base64
import copy
import hashlib
import itertools
import pickle
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, RootModel, computed_field, field_serializer

from fencepost.canonical_json import MAX_DEPTH, canonical_json, parse_json
from fencepost.errors import ConfigurationError, InvalidInput, InvalidJson, KeyInvalid, KeyMissing
from fencepost.secrets import Secrets
from producer_sdk import identity
from producer_sdk.identity import (
    CURRENT_PROFILE,
    UNKEYED,
    Scope,
    Unkeyed,
    check_key,
    fingerprint,
    key_hash,
    request_of,
)

ONE = bytes(range(32))
TWO = bytes(range(32, 64))
RING = Secrets({1: ONE}, write=[1])
SCOPE = Scope(tenant_id="acme", principal="user-7", operation="POST /orders")


def scope(**changes: Any) -> Scope:
    """A scope, with changes."""
    return Scope(**({"tenant_id": "acme", "principal": "user-7", "operation": "POST /orders"} | changes))


def digest_of(request: object, **changes: Any) -> bytes:
    """The fingerprint of a request, with changes to what surrounds it."""
    around: dict[str, Any] = {"scope": SCOPE, "workflow": "ship", "schema_version": 1} | changes
    return fingerprint(around.pop("secrets", RING), around.pop("version", 1), request=request_of(request), **around)


def digest_of_text(text: str) -> bytes:
    """The fingerprint of a JSON text that came over the wire."""
    return digest_of(parse_json(text))


# KEY-1 to 7: keys and scopes


@pytest.mark.parametrize("key", ["k", "k" * 255, string.printable[:94], " ", "b:c", "0190c3f2-6d1e-7c3a-9f00-0123456789ab"])
def test_a_key_of_printable_ascii_is_returned(key: str) -> None:  # KEY-2, KEY-4
    assert check_key(key) == key


@pytest.mark.parametrize(
    "key", ["", "k" * 256, "é", "a\n", "\n", "a\0", "\x7f", "a\x1f", "\ud800", b"bytes", 7, ["k"], UUID(int=1)]
)
def test_any_other_key_is_refused_and_not_quoted(key: object) -> None:  # KEY-2
    with pytest.raises(KeyInvalid) as caught:
        check_key(key)
    assert caught.value.code == "idempotency_key_invalid"
    assert str(caught.value) == "the idempotency key must be text of 1 to 255 printable ASCII characters"


def test_no_key_is_not_a_shared_key() -> None:  # KEY-5
    with pytest.raises(KeyMissing):
        check_key(None)
    with pytest.raises(KeyInvalid):
        check_key(UNKEYED)


def test_there_is_one_unkeyed() -> None:
    assert Unkeyed() is UNKEYED
    assert copy.deepcopy(UNKEYED) is UNKEYED
    assert pickle.loads(pickle.dumps(UNKEYED)) is UNKEYED
    assert repr(UNKEYED) == "UNKEYED"


def test_the_longest_key_in_the_longest_scope_takes_32_bytes() -> None:  # KEY-4
    key = "".join(random.choices(string.ascii_letters, k=255))
    longest = scope(tenant_id="é" * 128, principal="\U0001f602" * 3_000, operation="o" * 3_000)

    assert len(key_hash(RING, 1, longest, check_key(key))) == 32
    assert len(digest_of({"a": 1}, scope=longest)) == 32


@pytest.mark.parametrize("name", ["tenant_id", "principal", "operation"])
@pytest.mark.parametrize("part", ["", None, 7, b"a", "a\0", "a\ud800", "x" * 3_001])
def test_a_scope_has_three_whole_parts(name: str, part: object) -> None:  # SEC-5
    with pytest.raises(InvalidInput) as caught:
        scope(**{name: part})
    assert caught.value.field == name


def test_a_scope_without_a_part_cannot_be_written() -> None:  # SEC-5
    with pytest.raises(TypeError):
        Scope(tenant_id="acme", operation="POST /orders")  # type: ignore[call-arg]


@pytest.mark.parametrize("tenant", ["x" * 257, "é" * 129])
def test_a_tenant_has_256_bytes_at_most(tenant: str) -> None:
    with pytest.raises(InvalidInput, match="may have 256"):
        scope(tenant_id=tenant)


def test_a_refused_scope_is_not_quoted() -> None:
    with pytest.raises(InvalidInput) as caught:
        scope(principal="hunter2\0")
    assert "hunter2" not in str(caught.value)


def test_the_principal_is_not_shown() -> None:
    assert repr(SCOPE) == "Scope(tenant_id='acme', operation='POST /orders')"


@pytest.mark.parametrize("change", [{"tenant_id": "other"}, {"principal": "user-8"}, {"operation": "PATCH /orders"}])
def test_a_key_belongs_to_its_tenant_principal_and_operation(change: dict[str, str]) -> None:  # KEY-6, KEY-7, J11
    assert key_hash(RING, 1, scope(**change), "k") != key_hash(RING, 1, SCOPE, "k")
    assert digest_of({"a": 1}, scope=scope(**change)) != digest_of({"a": 1})


# SEC-6: parts do not run together

SEPARATORS = [
    ":",
    "::",
    "/",
    "|",
    "-",
    ",",
    ";",
    " ",
    "%",
    "\\",
    '"',
    '","',
    "\n",
    "\x01",
    "\x1e",
    "\x1f",
    "\x7f",
    "\u2028",
    "\u2400",
    "\uffff",
]


@pytest.mark.parametrize("separator", SEPARATORS)
def test_parts_do_not_run_together(separator: str) -> None:  # SEC-6
    identities = [
        (scope(operation="a"), f"b{separator}c"),
        (scope(operation=f"a{separator}b"), "c"),
        (scope(principal="a", operation=f"b{separator}c"), "d"),
        (scope(principal=f"a{separator}b", operation="c"), "d"),
        (scope(tenant_id="a", principal=f"b{separator}c"), "d"),
        (scope(tenant_id=f"a{separator}b", principal="c"), "d"),
    ]

    assert len({key_hash(RING, 1, where, key) for where, key in identities}) == len(identities)
    # The fingerprint has no key: its last part is the request.
    prints = {digest_of(key, scope=where) for where, key in identities}
    assert len(prints) == len(identities)


PARTS = st.tuples(*[st.text(alphabet="a:\x01", min_size=1, max_size=3)] * 4)


@given(PARTS, PARTS)
def test_two_identities_have_one_hash_only_if_they_are_equal(one: tuple[str, ...], other: tuple[str, ...]) -> None:  # SEC-6
    assert (hash_of(one) == hash_of(other)) == (one == other)


def hash_of(parts: tuple[str, ...]) -> bytes:
    """The key hash of tenant, principal, operation and key."""
    tenant, principal, operation, key = parts
    return key_hash(RING, 1, Scope(tenant_id=tenant, principal=principal, operation=operation), key)


# SEC-2: what is stored tells nothing


def test_what_is_stored_cannot_be_guessed() -> None:  # SEC-2
    key, request = "1234", {"code": 1234}
    stored = key_hash(RING, 1, SCOPE, key) + digest_of(request)

    assert key.encode() not in stored
    for guess in (key.encode(), canonical_json(request)):
        assert hashlib.sha256(guess).digest() not in stored


def test_another_secret_stores_other_values() -> None:  # SEC-2
    other = Secrets({1: TWO}, write=[1])

    assert key_hash(other, 1, SCOPE, "k") != key_hash(RING, 1, SCOPE, "k")
    assert digest_of({"a": 1}, secrets=other) != digest_of({"a": 1})


def test_a_key_and_a_request_of_one_text_have_two_digests() -> None:
    assert key_hash(RING, 1, SCOPE, "k") != digest_of("k")


KEY_HASH = "9cdee56aaee89b9e5c22834e91b0ebef39f7053f2a4ae05f67903dc1ebe11eaf"
FINGERPRINT = "26c0a28911d7c269717182f322f5e75c4a0bdccb4582a9b1425f276727a57ae0"


def test_digests_of_profile_1_never_change() -> None:  # stored rows are compared with them
    request = {"n": [1, 1.5, "é", None], "price": Decimal("1.50"), "at": datetime(2026, 1, 31, tzinfo=UTC)}

    assert key_hash(RING, 1, SCOPE, "k-1").hex() == KEY_HASH
    assert digest_of(request, profile=1).hex() == FINGERPRINT


# FINGERPRINT-1 to 18: one request, one digest. How the texts are refused and written: test_canonical_json.


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"b":1,"a":"A"}', '{ "a" : "\\u0041", "b" : 1 }'),  # FINGERPRINT-1
        ("[100,1,-0.0]", "[1e2,1.0,0]"),  # FINGERPRINT-8
        ('{"\\ufb33":1,"\\ud83d\\ude02":2}', '{"\\ud83d\\ude02":2,"\\ufb33":1}'),  # FINGERPRINT-3
        ("[1E30,4.50]", "[1e+30,4.5]"),  # FINGERPRINT-4
        ('{"a":"\\u002F"}', '{"a":"/"}'),  # FINGERPRINT-5
        ('{"a":{"c":1,"b":[{"e":1,"d":2}]}}', '{"a":{"b":[{"d":2,"e":1}],"c":1}}'),  # FINGERPRINT-6
    ],
)
def test_one_request_in_two_spellings_has_one_fingerprint(one: str, other: str) -> None:  # J12, J17
    assert digest_of_text(one) == digest_of_text(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"ids":[1,2]}', '{"ids":[2,1]}'),  # FINGERPRINT-2
        ('{"n":"\\u00e9"}', '{"n":"e\\u0301"}'),  # FINGERPRINT-7
        ("[100,1,0]", '["100",1,0]'),  # FINGERPRINT-8
        ('{"id":9007199254740992}', '{"id":9007199254740993}'),  # FINGERPRINT-9
        ("{}", '{"a":null}'),
        ("[true]", "[1]"),
    ],
)
def test_another_request_has_another_fingerprint(one: str, other: str) -> None:  # J13
    assert digest_of_text(one) != digest_of_text(other)


@pytest.mark.parametrize(
    "text",
    [
        '{"amount":1,"amount":100}',  # FINGERPRINT-10
        "[NaN]",  # FINGERPRINT-11
        "[1e400]",
        '["\\u0000"]',  # FINGERPRINT-12
        "\ufeff[]",  # FINGERPRINT-13
        "[" * 200_000,  # FINGERPRINT-14
        "1" * 5_000,
    ],
)
def test_a_refused_text_has_no_fingerprint(text: str) -> None:
    with pytest.raises(InvalidJson):
        digest_of_text(text)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "a\0", {"\ud800": 1}, {1: 2}, b"a"])
def test_a_command_without_a_canonical_form_has_no_fingerprint(value: object) -> None:  # FINGERPRINT-11, FINGERPRINT-12
    with pytest.raises(InvalidJson):
        digest_of({"a": value})


def test_a_request_may_be_as_deep_as_the_parser_allows() -> None:
    assert len(digest_of_text("[" * MAX_DEPTH + "]" * MAX_DEPTH)) == 32


@pytest.mark.parametrize("change", [{"workflow": "bill"}, {"schema_version": 2}])
def test_a_fingerprint_belongs_to_its_workflow_and_schema_version(change: dict[str, Any]) -> None:  # J16
    assert digest_of({"a": 1}, **change) != digest_of({"a": 1})


class Line(BaseModel):
    sku: str
    quantity: int = 1


class Order(BaseModel):
    lines: list[Line]
    price: Decimal = Decimal(0)


class LineLater(Line):
    gift: bool = False


class OrderLater(Order):
    lines: list[LineLater]  # type: ignore[assignment]
    currency: str = "EUR"
    tags: list[str] = Field(default_factory=list)
    seen: datetime = Field(default_factory=lambda: datetime.now(UTC))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def count(self) -> int:
        return len(self.lines)


BODY = {"lines": [{"sku": "a"}, {"sku": "b", "quantity": 2}], "price": "1.50"}


def test_a_new_field_with_a_default_changes_no_old_fingerprint() -> None:  # FINGERPRINT-15
    before = digest_of(Order.model_validate(BODY))

    assert digest_of(OrderLater.model_validate(BODY)) == before
    assert digest_of(OrderLater.model_validate(BODY | {"currency": "USD"})) != before
    assert digest_of(OrderLater.model_validate(BODY | {"lines": [{"sku": "a", "gift": True}]})) != before


def test_only_what_the_client_set_is_fingerprinted_at_every_level() -> None:  # FINGERPRINT-15
    request = {"order": OrderLater.model_validate(BODY), "path": ("a", [Line(sku="c")])}

    assert request_of(request) == {
        "order": {"lines": [{"sku": "a"}, {"sku": "b", "quantity": 2}], "price": Decimal("1.50")},
        "path": ["a", [{"sku": "c"}]],
    }


def test_server_made_values_are_not_the_clients() -> None:  # FINGERPRINT-16, J18
    first, second = (OrderLater.model_validate(BODY) for _ in range(2))
    inputs = [order.model_dump() | {"run": uuid4(), "at": datetime.now(UTC)} for order in (first, second)]

    assert inputs[0] != inputs[1]
    assert digest_of(first) == digest_of(second)


def test_the_representation_of_a_model_plays_no_part() -> None:
    class Shown(BaseModel):
        model_config = ConfigDict(extra="allow", populate_by_name=True)
        amount: Decimal = Field(alias="amt")
        password: str = Field(exclude=True)

        @field_serializer("amount")
        def _shown(self, _: Decimal) -> str:
            return "***"

    shown = Shown.model_validate({"amt": "1.5", "password": "p", "model_dump": 1})

    assert request_of(shown) == {"amount": Decimal("1.5"), "password": "p", "model_dump": 1}
    assert digest_of(shown) == digest_of(Shown.model_validate({"amount": "1.50", "password": "p", "model_dump": 1}))


class Speed(Enum):
    FAST = "fast"


class Shipment(BaseModel):
    at: datetime
    weight: Decimal
    id: UUID
    speed: Speed


def test_equal_values_of_python_types_have_one_fingerprint() -> None:
    number = uuid4()
    utc = {"at": "2026-01-31T12:00:00Z", "weight": "1.5", "id": str(number), "speed": "fast"}
    east = {"at": "2026-01-31T14:00:00+02:00", "weight": "1.500", "id": str(number).upper(), "speed": "fast"}

    assert digest_of(Shipment.model_validate(utc)) == digest_of(Shipment.model_validate(east))


def test_a_root_model_is_fingerprinted_by_what_it_holds() -> None:
    class Ids(RootModel[list[int]]):
        pass

    assert digest_of(Ids([1, 2])) == digest_of(Ids.model_validate([1, 2])) != digest_of(Ids([2, 1]))


@dataclass
class Plain:
    secret: str = "hunter2"


@pytest.mark.parametrize("value", [Plain(), [Plain()], {"a": Plain()}])
def test_a_dataclass_is_refused_because_it_does_not_say_what_was_set(value: object) -> None:
    with pytest.raises(InvalidJson, match="pydantic model or a dict") as caught:
        request_of(value)
    assert "hunter2" not in str(caught.value)


def test_a_request_that_holds_itself_is_refused_without_recursion_failure() -> None:
    circle: list[Any] = []
    circle.append(circle)

    with pytest.raises(InvalidJson, match="holds itself"):
        request_of(circle)


@pytest.mark.parametrize("value", [None, True, 1, 1.5, "a", [], {}, {"a": [1, {"b": None}]}])
def test_json_values_pass_as_they_are(value: object) -> None:
    assert request_of(value) == value


def test_a_new_profile_keeps_old_keys(monkeypatch: pytest.MonkeyPatch) -> None:  # FINGERPRINT-17
    stored = digest_of({"a": 1}, profile=1)
    monkeypatch.setitem(identity.PROFILES, 2, lambda value: b"2" + canonical_json(value))

    assert digest_of({"a": 1}, profile=2) != stored
    assert digest_of({"a": 1}, profile=1) == stored
    assert digest_of({"a": 2}, profile=1) != stored


def test_the_profile_is_part_of_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:  # FINGERPRINT-17
    monkeypatch.setitem(identity.PROFILES, 2, canonical_json)

    assert digest_of({"a": 1}, profile=2) != digest_of({"a": 1}, profile=1)


def test_an_unknown_profile_says_that_a_newer_release_wrote_the_key() -> None:  # FINGERPRINT-17
    with pytest.raises(ConfigurationError, match=f"profile {CURRENT_PROFILE + 1} is unknown: a newer release"):
        digest_of({}, profile=CURRENT_PROFILE + 1)


# KEY-20: secrets and their rotation


def test_written_versions_come_first_then_those_only_read_newest_first() -> None:
    secrets = {version: bytes([version]) * 32 for version in (1, 2, 3, 4)}

    assert Secrets(secrets, write=[2, 4]).versions == (2, 4, 3, 1)
    assert Secrets(secrets, write=(3,)).write == (3,)


def test_a_key_stored_under_the_old_secret_is_found_under_the_new_ring() -> None:  # KEY-20
    rotated = Secrets({1: ONE, 2: TWO}, write=[2])

    assert key_hash(rotated, 1, SCOPE, "k") == key_hash(RING, 1, SCOPE, "k")
    assert digest_of({"a": 1}, secrets=rotated) == digest_of({"a": 1})
    assert digest_of({"a": 2}, secrets=rotated) != digest_of({"a": 1})
    assert key_hash(rotated, 2, SCOPE, "k") != key_hash(rotated, 1, SCOPE, "k")


def test_a_later_change_of_the_mapping_changes_no_ring() -> None:
    given_secrets = {1: ONE}
    ring = Secrets(given_secrets, write=[1])
    given_secrets[1] = TWO

    assert key_hash(ring, 1, SCOPE, "k") == key_hash(RING, 1, SCOPE, "k")


def test_no_secret_is_shown() -> None:
    shown = repr(Secrets({1: b"hunter2" * 9, 2: TWO}, write=[1]))

    assert shown == "Secrets(versions=(1, 2), write=(1,))"


@pytest.mark.parametrize(
    ("secrets", "write"),
    [
        ({}, [1]),
        ({1: b"hunter2"}, [1]),
        ({1: ONE[:31]}, [1]),
        ({1: "hunter2" * 9}, [1]),
        ({0: ONE}, [0]),
        ({-1: ONE}, [-1]),
        ({32_768: ONE}, [32_768]),
        ({True: ONE}, [True]),
        ({"1": ONE}, ["1"]),
        ({1: ONE, 2: ONE}, [1]),
        ({1: ONE}, []),
        ({1: ONE}, [2]),
        ({1: ONE}, [1, 1]),
        ({1: ONE}, [True]),
        ({1: ONE, 2: TWO, 3: ONE + TWO}, [1, 2, 3]),
    ],
)
def test_a_ring_that_cannot_work_is_refused_and_not_quoted(secrets: Any, write: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Secrets(secrets, write=write)
    assert "hunter2" not in str(caught.value)


def test_a_version_that_this_process_lacks_is_named() -> None:
    with pytest.raises(ConfigurationError, match="version 9"):
        key_hash(RING, 9, SCOPE, "k")


def encoded(*secrets: bytes) -> str:
    """The environment variable for secrets of versions 1 and on."""
    return ",".join(f"{version}:{base64.b64encode(secret).decode()}" for version, secret in enumerate(secrets, 1))


@pytest.mark.parametrize(
    ("secrets", "write", "versions"),
    [
        (encoded(ONE), None, (1,)),
        (f" {encoded(ONE)} \n", "1", (1,)),
        (encoded(ONE, TWO), "1", (1, 2)),
        (encoded(ONE, TWO), "1, 2", (1, 2)),
        (encoded(ONE, TWO), "2", (2, 1)),
        (encoded(ONE, TWO).replace(",", " , "), "2", (2, 1)),
    ],
)
def test_a_ring_is_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, secrets: str, write: str | None, versions: tuple[int, ...]
) -> None:
    monkeypatch.setenv("FENCEPOST_IDEMPOTENCY_SECRETS", secrets)
    monkeypatch.delenv("FENCEPOST_IDEMPOTENCY_WRITE", raising=False)
    if write is not None:
        monkeypatch.setenv("FENCEPOST_IDEMPOTENCY_WRITE", write)

    ring = Secrets.from_environment()

    assert ring.versions == versions
    assert key_hash(ring, 1, SCOPE, "k") == key_hash(RING, 1, SCOPE, "k")


@pytest.mark.parametrize(
    "secrets",
    [
        None,
        "",
        " ",
        "hunter2",
        "1:hunter2",
        "1:hunter2!" * 9,
        f"{encoded(ONE)}!",
        encoded(b"hunter2"),
        encoded(ONE) + ",",
        f"{encoded(ONE)},{encoded(TWO)}",
    ]
    + [f"{version}:{base64.b64encode(ONE).decode()}" for version in ("", "0", "-1", "x", "1.0", "99999", "1" * 5_000, "\u0661")],
)
def test_secrets_that_cannot_be_read_are_refused_by_name_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, secrets: str | None
) -> None:
    monkeypatch.setenv("FENCEPOST_IDEMPOTENCY_WRITE", "1")
    monkeypatch.delenv("FENCEPOST_IDEMPOTENCY_SECRETS", raising=False)
    if secrets is not None:
        monkeypatch.setenv("FENCEPOST_IDEMPOTENCY_SECRETS", secrets)

    with pytest.raises(ConfigurationError, match="FENCEPOST_IDEMPOTENCY_SECRETS") as caught:
        Secrets.from_environment()
    assert "hunter2" not in str(caught.value)


def test_the_remedy_makes_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FENCEPOST_IDEMPOTENCY_SECRETS", raising=False)

    with pytest.raises(ConfigurationError, match="openssl rand -base64 32"):
        Secrets.from_environment()


@pytest.mark.parametrize("write", ["", " ", "3", "1,1", "1,2,3", "x", "1;2", "-1"])
def test_written_versions_that_cannot_be_read_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, write: str) -> None:
    monkeypatch.setenv("FENCEPOST_IDEMPOTENCY_SECRETS", encoded(ONE, TWO))
    monkeypatch.setenv("FENCEPOST_IDEMPOTENCY_WRITE", write)

    with pytest.raises(ConfigurationError, match="FENCEPOST_IDEMPOTENCY_WRITE"):
        Secrets.from_environment()


def test_a_second_secret_is_never_written_by_default(monkeypatch: pytest.MonkeyPatch) -> None:  # that would skip two phases
    monkeypatch.setenv("FENCEPOST_IDEMPOTENCY_SECRETS", encoded(ONE, TWO))
    monkeypatch.delenv("FENCEPOST_IDEMPOTENCY_WRITE", raising=False)

    with pytest.raises(ConfigurationError, match="FENCEPOST_IDEMPOTENCY_WRITE is required"):
        Secrets.from_environment()


# KEY-20: a model of the unique index, with two processes of a rolling deploy on one key

PHASES = (
    Secrets({1: ONE}, write=[1]),
    Secrets({1: ONE, 2: TWO}, write=[1]),
    Secrets({1: ONE, 2: TWO}, write=[1, 2]),
    Secrets({1: ONE, 2: TWO}, write=[2]),
    Secrets({2: TWO}, write=[2]),
)
Index = set[tuple[int, bytes]]


def accepting(ring: Secrets, index: Index) -> Iterator[bool]:
    """One acceptance in its two steps, look and write; the second says whether it created the run."""
    seen = any((version, key_hash(ring, version, SCOPE, "k")) in index for version in ring.versions)
    yield False
    rows = {(version, key_hash(ring, version, SCOPE, "k")) for version in ring.write}
    created = not seen and not rows & index  # one row that is there already undoes the whole transaction
    index |= rows if created else set()
    yield created


def runs(rings: tuple[Secrets, Secrets], order: tuple[int, ...]) -> int:
    """How many runs one key starts when the steps of two processes come in this order."""
    index: Index = set()
    steps = [accepting(ring, index) for ring in rings]
    return sum(next(steps[process]) for process in order)


def most_and_least_runs(one: Secrets, other: Secrets) -> tuple[int, int]:
    """Over all orders of the steps of two processes."""
    found = [runs((one, other), order) for order in set(itertools.permutations((0, 0, 1, 1)))]
    return max(found), min(found)


@pytest.mark.parametrize("ring", PHASES, ids=repr)
def test_two_processes_of_one_phase_start_one_run(ring: Secrets) -> None:
    assert most_and_least_runs(ring, ring) == (1, 1)


@pytest.mark.parametrize(("one", "other"), list(itertools.pairwise(PHASES)), ids=repr)
def test_two_processes_of_neighbouring_phases_start_one_run(one: Secrets, other: Secrets) -> None:  # KEY-20
    assert set(one.write) & set(other.write)
    assert most_and_least_runs(one, other) == (1, 1)


def test_a_rotation_that_skips_the_phase_of_two_written_versions_starts_two_runs() -> None:  # the broken model
    assert most_and_least_runs(PHASES[1], PHASES[3]) == (2, 1)


def test_a_rotation_that_writes_a_version_not_all_can_read_starts_two_runs_even_one_after_the_other() -> None:
    assert runs((PHASES[3], PHASES[0]), (0, 0, 1, 1)) == 2


@pytest.mark.parametrize(("stored", "later"), list(itertools.pairwise(PHASES[:4])), ids=repr)
def test_a_key_of_one_phase_replays_in_the_next(stored: Secrets, later: Secrets) -> None:  # KEY-20
    assert runs((stored, later), (0, 0, 1, 1)) == runs((later, stored), (0, 0, 1, 1)) == 1


def test_a_key_of_two_written_versions_outlives_the_first_secret() -> None:  # KEY-20
    assert runs((PHASES[2], PHASES[4]), (0, 0, 1, 1)) == 1
