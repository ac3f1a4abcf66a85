"""Who a message is: the same whenever it comes again, and nobody else's."""

import uuid
from dataclasses import dataclass
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from consumer_sdk.effects import EffectKey
from consumer_sdk.identity import _told, event_key, key_of_run, place_key, step_key
from consumer_sdk.message import Message
from consumer_sdk.testing import message

ID: Final = "018f6d2e-0000-7000-8000-000000000001"
TOPIC_ID: Final = uuid.UUID(int=7)
MOST_BYTES: Final = 256
LONG: Final = "x" * 300
TEXT: Final = st.one_of(st.text(max_size=6), st.sampled_from(["", "/", "%", "%2F", "a/b", ":", "é", LONG, LONG + "y", "\x00", " "]))


@dataclass(frozen=True)
class At:
    """A record by its place."""

    partition: int = 3
    offset: int = 99
    topic: str = "orders"
    key: bytes | None = b"k"
    value: bytes | None = b"v"
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp: int = 0


def told(**options: Any) -> Message[None]:
    return message("order.placed", None, **options)


def test_a_uuid_is_enough() -> None:
    """Whatever its source calls itself today."""
    assert event_key(told(event_id=ID, source="shop")) == event_key(told(event_id=ID, source="store")) == ID


def test_another_id_is_its_source_s() -> None:
    """CloudEvents 1.0: source and id together are unique."""
    assert event_key(told(event_id="7", source="shop")) == "event:shop/7"
    assert event_key(told(event_id="7", source="store")) == "event:store/7"


@pytest.mark.parametrize("text", [ID.upper(), ID.replace("-", ""), f"{{{ID}}}", f" {ID}", f"{ID}\n", f"{ID}0"])
def test_only_the_usual_form_of_a_uuid_counts_as_one(text: str) -> None:
    assert event_key(told(event_id=text)).startswith("event:")


@pytest.mark.parametrize(("spelled", "expected"), [(ID.upper(), ID), (ID, ID), ("run of another system", "run of another system")])
def test_a_run_is_named_as_the_database_writes_its_id(spelled: str, expected: str) -> None:
    """An erasure looks for that."""
    assert key_of_run(spelled) == expected


def test_the_same_event_at_another_place_is_the_same() -> None:
    """CONSUME-16."""
    first, second = (told(event_id="7", offset=offset, partition=offset, topic=f"t{offset}") for offset in (50, 57))

    assert event_key(first) == event_key(second)


def test_a_place_is_one_of_an_incarnation_of_a_topic_on_a_cluster() -> None:
    assert place_key(At(), cluster_id="c-1", topic_id=TOPIC_ID) == f"place:c-1/{TOPIC_ID}/3/99"


@pytest.mark.parametrize(
    "other",
    [
        place_key(At(), cluster_id="c-2", topic_id=TOPIC_ID),
        place_key(At(), cluster_id="c-1", topic_id=uuid.UUID(int=8)),
        place_key(At(partition=39, offset=9), cluster_id="c-1", topic_id=TOPIC_ID),
        place_key(At(partition=3, offset=9), cluster_id="c-1", topic_id=TOPIC_ID),
        place_key(At(), cluster_id=f"c-1/{TOPIC_ID}", topic_id=TOPIC_ID),
    ],
)
def test_another_place_is_another_message(other: str) -> None:
    assert place_key(At(), cluster_id="c-1", topic_id=TOPIC_ID) != other


@pytest.mark.parametrize("source", ["/", "a/b", "%2F", "a%b", "a b", "ä", "\x7f", LONG])
def test_whatever_its_parts_hold_a_key_is_short_and_printable(source: str) -> None:
    key = _told("event", source, "7")

    assert len(key) <= MOST_BYTES
    assert key.isascii()
    assert key.isprintable()
    assert " " not in key


def test_a_long_identity_is_its_digest() -> None:
    """The same one in every process and release: rows of the ledger are found by it."""
    assert _told("event", LONG, "7") == "event-sha256:33f46554c109db98f4c0d1235331b5c7af2009e5a54be690ff336965493c4446"


Parts = tuple[str, tuple[str, ...]]
PARTS: Final = st.one_of(
    st.tuples(st.just("event"), st.tuples(TEXT, TEXT)), st.tuples(st.just("place"), st.tuples(TEXT, TEXT, TEXT, TEXT))
)


@given(PARTS, PARTS)
@example(("event", ("a/b", "c")), ("event", ("a", "b/c")))
@example(("event", ("a%2Fb", "c")), ("event", ("a/b", "c")))
@example(("event", (LONG, "y")), ("event", (LONG[:-1], "xy")))
@example(("event", (LONG, "")), ("place", (LONG, "", "", "")))
def test_no_two_identities_share_a_key(one: Parts, other: Parts) -> None:
    assert (_told(one[0], *one[1]) == _told(other[0], *other[1])) == (one == other)


def joined_with_slashes(kind: str, *parts: str) -> str:
    """The broken model: parts as they are."""
    return f"{kind}:{'/'.join(parts)}"


def test_parts_joined_as_they_are_run_together() -> None:
    assert joined_with_slashes("event", "a/b", "c") == joined_with_slashes("event", "a", "b/c")


@pytest.mark.parametrize("text", ["\udc80", "a\ud800" * 200])
def test_text_that_utf_8_cannot_hold_has_an_identity_all_the_same(text: str) -> None:
    """An adapter may be the author's, and no record may end the consumer."""
    assert _told("event", "s", text) != _told("event", "s", "?")


# Steps


def test_a_step_is_the_consumer_s_and_the_handler_s() -> None:
    """CONSUME-9."""
    keys = {step_key(consumer, step) for consumer in ("billing", "shipping") for step in ("store", "mail")}

    assert keys == {"billing/store", "billing/mail", "shipping/store", "shipping/mail"}


def test_a_run_s_message_may_say_which_step_of_the_run_it_is_about() -> None:
    keys = {
        step_key("billing", "charge", told(run_id="r-1", step=step, operation=operation))
        for step in (None, "first", "second")
        for operation in (None, "card", "voucher")
    }

    assert len(keys) == 9


def test_without_a_run_what_a_message_says_of_its_step_counts_for_nothing() -> None:
    assert step_key("billing", "charge", told(step="first", operation="card")) == "billing/charge"


NAME: Final = st.one_of(st.none(), st.text(min_size=1, max_size=4, alphabet="a/% :é"))


@given(st.lists(st.tuples(NAME, NAME), min_size=2, max_size=2))
@example([("a", None), (None, "a")])
@example([("a/b", None), ("a", "b")])
def test_no_two_steps_share_a_key(said: list[tuple[str | None, str | None]]) -> None:
    one, other = (step_key("billing", "charge", told(run_id="r-1", step=step, operation=operation)) for step, operation in said)

    assert (one == other) == (said[0] == said[1])


@pytest.mark.parametrize("name", ["%" * 256, "é" * 128, "x" * 256])
def test_a_step_fits_the_ledger_however_long_its_parts_are(name: str) -> None:
    step = step_key("c" * 64, "s" * 64, told(run_id="r-1", step=name, operation=name))

    assert EffectKey("r-1", "", 0, step, 0, "card").checked().step == step
