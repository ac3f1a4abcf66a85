"""``fencepost status``: lanes, their owners, what waits and for how long, and what stands still."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fencepost.console import DatabaseUrl, JsonOutput, print_json, seconds
from fencepost.tables import print_rows
from relay.inspection import inspecting

__all__ = ["status"]

_WAITING_MOST: Final = 10_000


def status(database_url: DatabaseUrl = "", as_json: JsonOutput = False) -> None:
    """Show lanes, owners, lag and the age of the oldest undelivered row.

    Waiting rows are counted up to 10000 a lane. A lane without an owner, or one that stands still, is named below the
    tables with what to do.

    Examples:

      fencepost status

      fencepost status --json
    """
    lanes, relays = asyncio.run(_read(database_url))
    if as_json:
        print_json({"lanes": lanes, "relays": relays})
        return
    print_rows(
        ["lane", "owner", "generation", "lease left", "waiting", "oldest", "last mark", "state"],
        [_lane_row(lane) for lane in lanes],
        title="Lanes",
    )
    print_rows(
        ["relay", "version", "up", "lanes"],
        [(relay["relay_id"], relay["version"], seconds(relay["up_seconds"]), relay["lanes"]) for relay in relays],
        title="Relays",
    )
    for line in _advice(lanes, relays):
        print(line)  # noqa: T201 - the command's output


async def _read(database_url: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    async with inspecting(database_url) as inspector:
        lanes = [dict(row) for row in await inspector.rows("lanes", _WAITING_MOST)]
        relays = [dict(row) for row in await inspector.rows("relays")]
    for lane in lanes:
        lane["stopped"] = json.loads(lane["stopped"]) if lane["stopped"] else None
        if (lane["lease_seconds_left"] or 0) < 0:
            lane["lease_owner"] = None
    return lanes, relays


def _lane_row(lane: Mapping[str, Any]) -> Sequence[object]:
    waiting = f"{lane['waiting']}+" if lane["waiting"] >= _WAITING_MOST else lane["waiting"]
    state = lane["stopped"]["reason"] if lane["stopped"] else "draining late rows" if lane["draining_late_rows"] else "ok"
    if lane["lease_owner"] is None:
        state = "no owner"
    left, oldest, marked = (seconds(lane[name]) for name in ("lease_seconds_left", "oldest_age_seconds", "marked_seconds_ago"))
    return lane["lane"], lane["lease_owner"], lane["lease_generation"], left, waiting, oldest, marked, state


def _advice(lanes: Sequence[Mapping[str, Any]], relays: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    lines = []
    if not relays:
        lines.append("No relay is alive: start one with `fencepost relay run`. Rows wait and are not lost.")
    elif ownerless := [str(lane["lane"]) for lane in lanes if lane["lease_owner"] is None]:
        lines.append(f"Without an owner: lane {', '.join(ownerless)}. A live relay takes it within one lease.")
    for lane in lanes:
        stopped = lane["stopped"]
        if stopped and stopped["reason"] == "refused_row":
            lines.append(
                f"Lane {lane['lane']} stands still at event {stopped['event_id']}: the broker refuses it for topic "
                f"{stopped['topic']} ({stopped['error']}). Raise the topic's max.message.bytes or change its policy; "
                "the relay tries again every half minute."
            )
        elif stopped:
            lines.append(
                f"Lane {lane['lane']} waits for topic {stopped['topic'] or '(unknown)'}: {stopped['error']}. "
                "Create it, or bring its partitions' leaders back; the relay goes on by itself."
            )
    return lines
