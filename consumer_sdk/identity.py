"""Who a message is, wherever and however often it comes: the key of its row in the ledger.

The producer's id decides. A UUID is unique by itself; any other id is unique within its source only (CloudEvents 1.0, "id"). A
message without an id is its place: topic, partition and offset within one incarnation of a topic on one cluster. Parts are joined
so that no two identities run together, and an identity that is long or not printable is replaced by its digest.
"""

import hashlib
import re
from typing import Any, Final, NamedTuple
from urllib.parse import quote
from uuid import UUID

from consumer_sdk.message import Message, Record
from fencepost.secrets import joined

__all__ = ["Identity", "event_key", "key_of_run", "place_key", "step_key"]

_UUID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_MOST_BYTES: Final = 256
_MOST_STEP_BYTES: Final = 1_000
_PLAIN: Final = re.compile(r"[\x21-\x7e]{1,256}")


class Identity(NamedTuple):
    """The key of a message's row: run key, tenant and step, as the ledger names them."""

    run_key: str
    tenant_id: str
    step: str


def event_key(message: Message[Any]) -> str:
    """The run key of a message with an id of its producer's."""
    if _UUID.fullmatch(message.event_id):
        return message.event_id
    return _told("event", message.source, message.event_id)


def key_of_run(run_id: str) -> str:
    """The run key of a message about a run, as the database writes a run's id, however the message spells it."""
    try:
        return str(UUID(run_id))
    except ValueError:
        return run_id


def place_key(record: Record, *, cluster_id: str, topic_id: UUID) -> str:
    """The run key of a record that has no id, or cannot be read: its place."""
    return _told("place", cluster_id, str(topic_id), str(record.partition), str(record.offset))


def step_key(consumer: str, step: str, message: Message[Any] | None = None) -> str:
    """A handler's step as the ledger keeps it. A run's message may say which step and operation of the run it is about: two of one
    run are two effects then."""
    parts = [consumer, step]
    if message is not None and message.run_id is not None and (message.step or message.operation):
        parts += [message.step or "", message.operation or ""]
    text = "/".join(_quoted(part, safe=" :") for part in parts)
    if len(text) <= _MOST_STEP_BYTES:
        return text
    return f"{_quoted(consumer, safe=' :')}/{_quoted(step, safe=' :')}/sha256:{_digest(*parts)}"


def _told(kind: str, *parts: str) -> str:
    """``kind:a/b``, with whatever could be taken for a separator escaped; its digest where that does not fit."""
    text = f"{kind}:" + "/".join(_quoted(part, safe=":") for part in parts)
    if len(text) <= _MOST_BYTES and _PLAIN.fullmatch(text):
        return text
    return f"{kind}-sha256:{_digest(kind, *parts)}"


def _quoted(part: str, *, safe: str) -> str:
    return quote(part, safe=safe, errors="surrogatepass")


def _digest(*parts: str) -> str:
    return hashlib.sha256(joined(*(part.encode(errors="surrogatepass") for part in parts))).hexdigest()
