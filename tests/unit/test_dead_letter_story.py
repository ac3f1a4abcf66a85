"""The story of a dead letter: nothing secret unless asked for, nothing that a terminal obeys, and always what to do next."""

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from consumer_sdk.dead_letter_story import facts, header_rows, headers, next_steps, one_line, readable
from consumer_sdk.delivery import DEAD_REASONS

NOW: Final = datetime(2026, 11, 30, 3, 0, tzinfo=UTC)
SECRET: Final = "sk-live-0123456789"
ESCAPES: Final = "\x1b]0;owned\x07\x1b[2J\r\n\u202egnp.exe\x9b31m"


def letter(**parts: Any) -> dict[str, Any]:
    whole = {
        "dead_letter_id": "01a2", "consumer": "payments", "step": "payments/charge", "run_key": "e-1", "tenant_id": "acme",
        "topic": "orders", "partition": 3, "offset": 42, "recorded_at": NOW - timedelta(hours=2), "event_type": "order.placed",
        "reason": "rejected", "error_class": "Terminal", "error_code": "declined", "attempts": 3, "state": "dead", "redrives": 0,
        "holder": None, "held_until": None, "created_at": NOW - timedelta(hours=1), "changed_at": NOW - timedelta(hours=1),
        "key_bytes": 3, "key": b"o-1", "payload_bytes": 1_234, "header_count": 0, "header_names": None, "header_sizes": None,
        "header_values": None, "recorded": "failed", "now": NOW,
    }  # fmt: skip
    return whole | parts


def effect(operation: str = "card.charge", state: str = "succeeded", sends: int = 1) -> dict[str, Any]:
    return {"operation": operation, "state": state, "sends": sends}


def with_headers(*pairs: tuple[bytes, bytes | None]) -> dict[str, Any]:
    return letter(
        header_count=len(pairs),
        header_names=[name for name, _ in pairs],
        header_sizes=[None if value is None else len(value) for _, value in pairs],
        header_values=[value for _, value in pairs],
    )


def test_what_a_terminal_would_obey_is_escaped_in_one_line() -> None:
    told = one_line(f"a{ESCAPES}ü")
    assert told.isprintable()
    assert told.startswith(r"a\x1b]0;owned\x07\x1b[2J\r\n\u202egnp.exe\x9b31m")
    assert told.endswith("ü")


@pytest.mark.parametrize(
    ("value", "size", "told"),
    [
        (None, None, "none"),
        (b"", 0, ""),
        (b"plain", 5, "plain"),
        ("ü\n".encode(), 3, r"ü\n"),
        (b"\xff\x00", 2, r"\xff\x00"),
        (b"\x1b[31m", 5, r"\x1b[31m"),
        (b"abc", 3_000, "abc… (3,000 B)"),
        ("aü".encode()[:2], 3, "a… (3 B)"),
        (b"\xff\xfe\xfd\xfc\xfb", 9, r"\xff\xfe\xfd\xfc\xfb… (9 B)"),
    ],
)
def test_a_value_is_told_as_far_as_it_was_read(value: bytes | None, size: int | None, told: str) -> None:
    assert readable(value, size) == told


def test_of_headers_the_names_and_what_is_harmless_unless_more_was_asked_for() -> None:
    given = with_headers((b"ce_type", b"order.placed"), (b"authorization", SECRET.encode()), (b"empty", b""), (b"null", None))
    assert headers(given, values=False) == [
        {"name": "ce_type", "bytes": 12, "value": "order.placed"},
        {"name": "authorization", "bytes": len(SECRET), "value": None},
        {"name": "empty", "bytes": 0, "value": None},
        {"name": "null", "bytes": None, "value": None},
    ]
    assert [header["value"] for header in headers(given, values=True)] == ["order.placed", SECRET, "", "none"]


def test_odd_names_and_values_are_told_in_printable_characters() -> None:
    given = with_headers((b"\xff\xfe", b"\x00"), (ESCAPES.encode(), ESCAPES.encode()), ("ü".encode(), b"\xff"))
    rows = header_rows(given, values=True)
    assert all(cell.isprintable() for row in rows for cell in row if isinstance(cell, str))
    assert [row[0] for row in rows][::2] == [r"\xff\xfe", "ü"]


def test_the_facts_hold_neither_key_nor_payload_unless_asked_for() -> None:
    given = letter(key=SECRET.encode(), key_bytes=len(SECRET))
    assert SECRET not in str(list(facts(given, [], values=False)))
    assert dict(facts(given, [], values=True))["key"] == SECRET


def test_the_facts_say_where_why_and_what_became_of_it() -> None:
    own = effect("fencepost.message", "failed")
    told = dict(facts(letter(), [own, effect(), effect("mail.send", "unknown", 2)], values=False))
    assert told["message"] == "order.placed, orders/3@42"
    assert told["reason"] == "rejected: declined (Terminal), attempts: 3"
    assert told["effects"] == "card.charge succeeded; mail.send unknown, sent 2 times"
    assert "duplicate" in told["ledger"]
    bare = letter(event_type=None, tenant_id="", key=None, key_bytes=None, payload_bytes=None, recorded=None)
    told = dict(facts(bare, [], values=True))
    assert (told["key"], told["payload"], told["effects"]) == ("none", "none (a tombstone)", "none")
    assert "forgotten" in told["ledger"]
    held = letter(state="redriving", holder="host-1", held_until=NOW + timedelta(seconds=30))
    assert "in hand of host-1" in dict(facts(held, [], values=False))["state"]


@pytest.mark.parametrize("reason", DEAD_REASONS)
def test_every_reason_has_something_to_do_next(reason: str) -> None:
    first, *_, command = next_steps(letter(reason=reason), [])
    assert "find the cause" not in first
    assert "fencepost dead-letters redrive 01a2" in command
    assert ("--effects-checked" in command) == (reason == "ambiguous")


@pytest.mark.parametrize(("state", "word"), [("redriven", "handled"), ("discarded", "for good"), ("redriving", "Wait")])
def test_what_is_over_or_under_way_asks_for_no_redrive(state: str, word: str) -> None:
    (step,) = next_steps(letter(state=state), [])
    assert word in step


def test_an_effect_without_an_answer_comes_before_the_redrive() -> None:
    steps = next_steps(letter(run_key="e 1\n\x1b[2J"), [effect(state="unknown")])
    assert r"effects show acme 'e 1\n\x1b[2J'" in steps[-2]
