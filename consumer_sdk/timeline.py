"""The story of one run: acceptance, attempts, effects, events and what operators did, oldest first.

Pure: rows in, entries out. Nothing that a run was given or gave back is in it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from fencepost.console import seconds

__all__ = ["Entry", "relative", "timeline"]

_Row = Mapping[str, Any]
_TERMINAL: Final = ("run_completed", "run_failed", "run_cancelled", "run_continued")
# At one instant, what causes comes before what follows.
_ORDER: Final = (
    "accepted", "lost", "claimed", "renewed", "cancel asked", "step", "effect", "completed", "failed", "released", "stopped",
    "event", "run ended", "replayed", "resumed",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line. ``facts`` say the same as ``text``, for machines."""

    at: datetime
    what: str
    text: str
    facts: dict[str, Any] = field(default_factory=dict)


def relative(at: datetime | None, now: datetime) -> str:
    """ "in 12 s" or "3 min ago", by the clock that ``now`` was read from."""
    if at is None:
        return ""
    left = (at - now).total_seconds()
    return f"in {seconds(left)}" if left > 0 else f"{seconds(-left)} ago"


def timeline(
    run: _Row, attempts: Sequence[_Row], events: Sequence[_Row], audit: Sequence[_Row], effects: Sequence[_Row] = ()
) -> list[Entry]:
    """The entries, oldest first. ``attempts`` in the order of their generations, ``events`` in that of their sequences."""
    followers: list[_Row | None] = [*attempts[1:], None]
    entries = [
        _accepted(run),
        *(entry for attempt, follower in zip(attempts, followers, strict=False) for entry in _attempt(run, attempt, follower)),
        *(entry for event in events for entry in _event(event, audit)),
        *(entry for effect in effects for entry in _effect(effect)),
        *(_replayed(row) for row in audit if row["command"] == "runs replay"),
        *(_resumed(row) for row in audit if row["command"] == "runs resume"),
    ]
    end = max((entry.at for entry in entries if entry.what != "replayed"), default=run["created_at"])
    return sorted(entries, key=lambda entry: (end if entry.what == "run ended" else entry.at, _ORDER.index(entry.what)))


def _accepted(run: _Row) -> Entry:
    bound = run["key_expires_at"] is not None
    text = "with an idempotency key" if bound else "without an idempotency key, or its retention is over"
    if run["replay_of"] is not None:
        text = f"as the replay of {run['replay_of']}"
    return Entry(at=run["created_at"], what="accepted", text=text, facts={"key_bound": bound, "replay_of": run["replay_of"]})


def _attempt(run: _Row, attempt: _Row, follower: _Row | None) -> Iterator[Entry]:
    generation, worker = attempt["generation"], attempt["worker"]
    facts = {"generation": generation, "attempt": attempt["number"], "worker": worker}
    text = f"by {worker}: attempt {attempt['number']} of {run['max_attempts']}, generation {generation}"
    yield Entry(at=attempt["claimed_at"], what="claimed", text=text, facts=facts)
    current = attempt["finished_at"] is None and generation == run["lease_generation"]
    renewed_at = attempt["renewed_at"] or (run["lease_renewed_at"] if current else None)
    if renewed_at is not None:
        yield Entry(
            at=renewed_at,
            what="renewed",
            text=f"by {worker}, for the last time so far" if current else f"by {worker}, for the last time",
            facts=facts,
        )
    if attempt["finished_at"] is not None:
        # A claim that finds an expired lease writes the loss and its own attempt at once: the loss is told first.
        at = min(attempt["finished_at"], follower["claimed_at"]) if follower else attempt["finished_at"]
        yield Entry(at=at, what=_ENDINGS[attempt["outcome"]], text=_ending(attempt), facts={**facts, **_verdict(attempt)})


# The rows of the ledger that are no effects.
_KEPT: Final = {"fencepost.step": "kept", "fencepost.timer": "set"}
_ENDINGS: Final = {"completed": "completed", "failed": "failed", "cancelled": "stopped", "released": "released", "lost": "lost"}


def _verdict(attempt: _Row) -> dict[str, Any]:
    return {name: attempt[name] for name in ("error_class", "error_code", "decision", "retry_delay", "cost")}


def _ending(attempt: _Row) -> str:
    who = f"attempt {attempt['number']}"
    match attempt["outcome"]:
        case "completed":
            text = f"{who} by {attempt['worker']}"
        case "cancelled":
            text = f"{who}: {attempt['worker']} obeyed the cancellation"
        case "released":
            text = f"{who} given back by {attempt['worker']}; it does not count"
        case "lost":
            text = f"{who}: the lease of {attempt['worker']} ran out"
        case _:
            text = f"{who}: {attempt['error_class']}, {attempt['error_code']}"
    return text + _decision(attempt)


def _decision(attempt: _Row) -> str:
    delay: timedelta | None = attempt["retry_delay"]
    if attempt["decision"] == "retry":
        return f"; retry in {seconds(delay.total_seconds())}" if delay else "; retry at once"
    return "; no further attempt" if attempt["decision"] == "dead" else ""


def _effect(effect: _Row) -> Iterator[Entry]:
    """Reserved, sent last, and answered; an effect without an answer says so where it was sent. A workflow's step or timer is one
    entry: it is kept at once."""
    name, state = effect["operation"], effect["state"]
    facts = {key: effect[key] for key in ("operation", "step", "occurrence", "state", "generation", "sends")}
    if name in _KEPT:
        text = f"{effect['step']}: {_KEPT[name]}{_again(effect['occurrence'])}"
        yield Entry(at=effect["finished_at"], what="step", text=text, facts=facts)
        return
    yield Entry(at=effect["created_at"], what="effect", text=f"{name}: reserved", facts=facts)
    if effect["sent_at"] is not None:
        times = f", {effect['sends']} times by then" if effect["sends"] > 1 else ""
        open_ends = {"unknown": "; its answer is not known", "absent": "; it did not happen"}
        yield Entry(at=effect["sent_at"], what="effect", text=f"{name}: sent{times}{open_ends.get(state, '')}", facts=facts)
    if effect["finished_at"] is not None:
        yield Entry(at=effect["finished_at"], what="effect", text=f"{name}: {state}", facts=facts)


def _again(occurrence: int) -> str:
    return f", for the {occurrence + 1}. time" if occurrence else ""


def _event(event: _Row, audit: Sequence[_Row]) -> Iterator[Entry]:
    facts = {"sequence": event["sequence"], "type": event["type"], "generation": event["fencing_token"]}
    if event["type"] == "run_cancel_requested":
        asked = _cancellation(audit, "requested")
        text = f"by {asked['actor']}: {asked['reason']}" if asked else "by whom is no longer known"
        yield Entry(at=event["created_at"], what="cancel asked", text=text, facts={**facts, **_who(asked)})
    elif event["type"] in _TERMINAL:
        yield Entry(at=event["created_at"], what="run ended", text=_end(event, audit), facts={**facts, **_why(event)})
    elif event["type"] != "run_queued":
        text = f"{event['sequence']}: {event['type']}, generation {event['fencing_token']}"
        yield Entry(at=event["created_at"], what="event", text=text, facts=facts)


def _cancellation(audit: Sequence[_Row], outcome: str) -> _Row | None:
    return next((row for row in audit if row["command"] == "runs cancel" and row["outcome"] == outcome), None)


def _who(row: _Row | None) -> dict[str, Any]:
    return {"actor": row["actor"], "reason": row["reason"]} if row else {}


def _why(event: _Row) -> dict[str, Any]:
    return {"decided_by": event["decided_by"], "ending": event["reason"], "error_code": event["error_code"]}


def _end(event: _Row, audit: Sequence[_Row]) -> str:
    state = event["type"].removeprefix("run_")
    at_once = _cancellation(audit, "cancelled")
    if state == "failed":
        return f"failed: {event['reason']}, error {event['error_code']}"
    if state == "continued":
        return f"continued as {event['continued_as']}"
    if state == "cancelled" and at_once is not None:
        return f"cancelled by {at_once['actor']}: {at_once['reason']}"
    return f"{state}, decided by the {event['decided_by']}"


def _replayed(row: _Row) -> Entry:
    text = f"as {row['new_run_id']} by {row['actor']}: {row['reason']}"
    return Entry(at=row["created_at"], what="replayed", text=text, facts={"new_run_id": row["new_run_id"], **_who(row)})


def _resumed(row: _Row) -> Entry:
    return Entry(at=row["created_at"], what="resumed", text=f"by {row['actor']}: {row['reason']}", facts=_who(row))
