"""The story of one dead letter: where it came from, why it was given up, what became of it since, and what to do next.

Pure: rows in, lines out. What came over the wire is escaped: no byte of it reaches the terminal as a command. Key, values of
headers and payload may be secret and are told only where they were asked for.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from consumer_sdk.timeline import relative

__all__ = ["cause", "facts", "header_rows", "headers", "next_steps", "one_line", "readable"]

_Row = Mapping[str, Any]
_MESSAGE: Final = "fencepost.message"
_SAFE_HEADERS: Final = frozenset(
    {"ce_id", "ce_source", "ce_specversion", "ce_tenantid", "ce_time", "ce_type", "content-type", "traceparent"}
)

_MEND: Final = {
    "undecodable": "no adapter or codec could read the record: mend it and redrive, or discard what is no message",
    "unknown_type": "no handler takes this type: deploy one and redrive, or ignore the type and discard",
    "unknown_version": "no handler takes this version of the type: deploy one and redrive",
    "tombstone": "no handler takes a message without a payload: allow tombstones and redrive, or discard",
    "invalid_payload": "the payload does not fit the handler's model: mend the model or the producer, then redrive",
    "too_old": "it is older than the ledger remembers and may have been handled: find out, then do it by hand or discard; a redrive"
    " is refused again",
    "rejected": "the handler refused it: mend what the error's code names, then redrive, or discard",
    "ambiguous": "something outside may have happened that nobody knows of: ask the provider first; then redrive with"
    " --effects-checked, or discard",
    "attempts_exhausted": "every attempt failed: mend the cause, then redrive",
    "patience_exhausted": "it waited for longer than the handler's patience: see what for, then redrive",
    "run_failed": "the run behind it is dead: `fencepost runs replay`, then redrive",
}


def one_line(text: str) -> str:
    """The text in one line, with an escape for each character that a terminal might obey, or that hides others."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def readable(value: bytes | None, size: int | None) -> str:
    """The beginning of a value of ``size`` bytes: as text, escaped, with what is no UTF-8 as ``\\xff``."""
    if value is None or size is None:
        return "none"
    # A character that the cut went through is left out; elsewhere such bytes are the value's own.
    cut = len(value) < size
    escaped = one_line(_whole_characters(value) if cut else value.decode("utf-8", "backslashreplace"))
    return f"{escaped}… ({size:,} B)" if cut else escaped


def _whole_characters(value: bytes) -> str:
    for dropped in range(4):
        try:
            return value[: len(value) - dropped].decode()
        except UnicodeDecodeError:
            continue
    return value.decode("utf-8", "backslashreplace")


def headers(letter: _Row, *, values: bool) -> list[dict[str, Any]]:
    """Name, size and, where it is harmless or ``values`` were asked for, the beginning of each value."""
    rows = zip(letter["header_names"] or (), letter["header_sizes"] or (), letter["header_values"] or (), strict=True)
    return [_header(readable(name, len(name)), size, value, values=values) for name, size, value in rows]


def _header(name: str, size: int | None, value: bytes | None, *, values: bool) -> dict[str, Any]:
    told = readable(value, size) if values or name in _SAFE_HEADERS else None
    return {"name": name, "bytes": size, "value": told}


def header_rows(letter: _Row, *, values: bool) -> list[Sequence[object]]:
    """The same for people."""
    return [
        (header["name"], "null" if header["bytes"] is None else f"{header['bytes']:,} B", header["value"] or "")
        for header in headers(letter, values=values)
    ]


def cause(letter: _Row) -> str:
    """The reason, and the code where it says more."""
    reason, code = letter["reason"], letter["error_code"]
    return str(reason) if code == reason else f"{reason}: {code}"


def facts(letter: _Row, effects: Sequence[_Row], *, values: bool) -> Iterator[tuple[str, str]]:
    """Names and texts, in the order in which an operator asks."""
    now = letter["now"]
    yield "message", f"{letter['event_type'] or 'unreadable'}, {letter['topic']}/{letter['partition']}@{letter['offset']}"
    yield "recorded", f"in Kafka {_when(letter['recorded_at'], now)}"
    yield "identity", f"{letter['run_key']} of tenant {letter['tenant_id'] or '(none)'}"
    yield "consumer", f"{letter['consumer']}, step {letter['step']}"
    yield "reason", f"{cause(letter)} ({letter['error_class']}), attempts: {letter['attempts']}"
    yield "given up", _when(letter["created_at"], now)
    yield "state", _state(letter)
    yield "key", _key(letter, values=values)
    yield "payload", "none (a tombstone)" if letter["payload_bytes"] is None else f"{letter['payload_bytes']:,} B"
    yield "ledger", _recorded(letter)
    yield "effects", "; ".join(_effect(row) for row in effects if row["operation"] != _MESSAGE) or "none"


def _when(at: datetime, now: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC, {relative(at, now)}"


def _state(letter: _Row) -> str:
    held = f"; in hand of {letter['holder']}, until {relative(letter['held_until'], letter['now'])}" if letter["holder"] else ""
    return f"{letter['state']} since {_when(letter['changed_at'], letter['now'])}; redrives: {letter['redrives']}{held}"


def _key(letter: _Row, *, values: bool) -> str:
    if letter["key_bytes"] is None:
        return "none"
    return readable(letter["key"], letter["key_bytes"]) if values else f"{letter['key_bytes']:,} B"


def _recorded(letter: _Row) -> str:
    match letter["recorded"]:
        case None:
            return "knows nothing of the message: it was forgotten, past its retention"
        case "failed":
            return "the message is given up; a further delivery of it is a duplicate"
        case state:
            return f"the message is handled ({state})"


def _effect(row: _Row) -> str:
    sends = f", sent {row['sends']} times" if row["sends"] > 1 else ""
    return f"{row['operation']} {row['state']}{sends}"


def next_steps(letter: _Row, effects: Sequence[_Row]) -> list[str]:
    """What to do now: sentences, and commands that can be copied."""
    match letter["state"]:
        case "redriven":
            return ["Nothing: it was handled after all."]
        case "discarded":
            return ["Nothing: it was given up for good. It cannot be redriven."]
        case "redriving":
            return [f"Wait: consumer {letter['consumer']} takes it in hand. If nothing happens, none of that name is running."]
    open_ones = [row for row in effects if row["state"] in ("sent", "unknown")]
    checked = " --effects-checked" if letter["reason"] == "ambiguous" else ""
    advice = _MEND.get(letter["reason"], "find the cause, then redrive or discard")
    steps = [f"{advice[0].upper()}{advice[1:]}."]
    if open_ones:
        told = f"fencepost effects show {_quoted(letter['tenant_id'])} {_quoted(letter['run_key'])}"
        steps.append(f"An effect has no answer yet; a redrive would stop at it. See it, then resolve it:\n  {told}")
    steps.append(
        f"To handle it anew:\n  fencepost dead-letters redrive {letter['dead_letter_id']}{checked} --actor … --reason … --wait 30"
    )
    return steps


def _quoted(text: str) -> str:
    return one_line(shlex.quote(text))
