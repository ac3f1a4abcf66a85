"""``fencepost trace``: what happened to one event, told from the outbox and the receipts."""

import asyncio
import json
import uuid
from typing import Annotated, Any, Final

import typer

from fencepost.console import DatabaseUrl, Inspector, JsonOutput, print_json
from fencepost.errors import ConfigurationError
from relay.inspection import inspecting
from relay.partitioner import partition_of

__all__ = ["trace"]

_RECEIPTS_MOST: Final = 10_000


def trace(
    event_id: Annotated[str, typer.Argument(help="The event id: ce_id on Kafka, event_id in the outbox.", metavar="EVENT_ID")],
    database_url: DatabaseUrl = "",
    as_json: JsonOutput = False,
) -> None:
    """Tell what happened to an event: when it was written, who published it, and where it lies on Kafka.

    Exit code 1 if the outbox does not hold it: never committed, or removed by retention. Payload, key and headers are
    not shown.

    Example:

      fencepost trace 01a2297b-0198-7227-a94b-e181bb24ee35
    """
    try:
        wanted = uuid.UUID(event_id.strip())
    except ValueError as error:
        raise ConfigurationError("EVENT_ID must be a UUID, such as 01a2297b-0198-7227-a94b-e181bb24ee35") from error
    story = asyncio.run(_story(database_url, wanted))
    if as_json:
        print_json(story)
    else:
        typer.echo("\n".join(_tell(story)))
    if not story["found"]:
        raise typer.Exit(1)


async def _story(database_url: str, event_id: uuid.UUID) -> dict[str, Any]:
    async with inspecting(database_url) as inspector:
        rows = await inspector.rows("event", event_id)
        if not rows:
            return {"event_id": str(event_id), "found": False}
        row = dict(rows[0])
        key = row.pop("key")
        xid = row.pop("xid")
        receipt = await _receipt(inspector, row["lane"], row["id"], xid)
    where = None if receipt is None else _where(receipt["partitions"], row["topic"], key)
    return {"found": True, **row, "receipt": receipt, "on_kafka": where}


async def _receipt(inspector: Inspector, lane: int, row_id: int, xid: str) -> dict[str, Any] | None:
    rows = await inspector.rows("receipt_of", lane, row_id, xid, _RECEIPTS_MOST)
    if not rows:
        return None
    receipt = dict(rows[0])
    receipt["partitions"] = json.loads(receipt["partitions"])
    return receipt


def _where(partitions: dict[str, Any], topic: str, key: bytes | None) -> dict[str, Any] | None:
    """Partition and the range of offsets that the event lies in; a keyless event's batch went to one partition."""
    written = partitions.get(topic)
    if written is None:
        return None
    offsets = written["offsets"]
    partition = next(iter(offsets)) if key is None else str(partition_of(key, written["count"]))
    if partition not in offsets:
        return None
    first, last = offsets[partition]
    return {"topic": topic, "partition": int(partition), "first_offset": first, "last_offset": last}


def _tell(story: dict[str, Any]) -> list[str]:
    if not story["found"]:
        return [
            f"Event {story['event_id']} is not in the outbox.",
            "Its transaction has not committed, was rolled back, or the row is past retention.",
            f"If it is the id of a run: fencepost runs show {story['event_id']}",
        ]
    lines = [
        f"Event {story['event_id']}, type {story['event_type']}, topic {story['topic']}, {story['record_bytes']} bytes",
        f"  written    {story['created_at']} as row {story['id']} of lane {story['lane']}",
    ]
    receipt = story["receipt"]
    if not story["delivered"] or receipt is None:
        state = "delivered; its receipt is past retention" if story["delivered"] else "waiting; `fencepost status` shows its lane"
        return [*lines, f"  state      {state}"]
    count = "1 row" if receipt["row_count"] == 1 else f"{receipt['row_count']} rows"
    lines.append(f"  delivered  {receipt['created_at']} by {receipt['relay_id']}, generation {receipt['generation']}, "
                 f"receipt {receipt['sequence']} ({count})")  # fmt: skip
    where = story["on_kafka"]
    if where is not None:
        lines.append(f"  on Kafka   partition {where['partition']}, {_offsets(where['first_offset'], where['last_offset'])}")
    return lines


def _offsets(first: int, last: int) -> str:
    return f"at offset {first}" if first == last else f"between offsets {first} and {last}"
