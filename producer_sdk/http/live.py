"""Live chunks on their way from workers to streams: best effort, bounded, and never after the text that replaces them.

A live chunk says before which place of its stream it was sent. It waits in its stream's queue until the chunks before that place
have gone out, and is dropped once a stored chunk of its own step from that place on has. A full queue drops what comes.
"""

import base64
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple
from uuid import UUID

import structlog

from fencepost.codec import PLAIN, PayloadCodec
from producer_sdk.http.store import Chunk, LineageKey, Place

__all__ = ["CHANNEL", "Live", "LiveQueue"]

_log = structlog.get_logger(__name__)

CHANNEL: Final = "fencepost_live"

_MOST_WAITING: Final = 256
#: What a reader is told of a live chunk: a higher attempt means that what came of an earlier one is void.
_SHOWN: Final = ("step", "occurrence", "attempt", "index")


class _LiveChunk(NamedTuple):
    """``before``: the place that the stream's next stored chunk would have got."""

    before: Place
    step: tuple[str, int]
    data: bytes


class LiveQueue:
    """The live chunks of one stream. ``bell`` is rung for each that is kept, ``dropped`` for each that is not. ``codec``: what the
    lineage's chunks come through."""

    def __init__(self, bell: Callable[[], None], dropped: Callable[[], None], codec: PayloadCodec) -> None:
        self.codec = codec
        self._bell = bell
        self._dropped = dropped
        self._waiting: deque[_LiveChunk] = deque()
        self._stored: dict[tuple[str, int], Place] = {}

    def put(self, chunk: _LiveChunk) -> None:
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(chunk)
            self._bell()
        else:
            self._dropped()

    def stored(self, chunk: Chunk) -> None:
        """A stored chunk has gone out: what its step sent live before is no longer news."""
        self._stored[chunk.step, chunk.occurrence] = chunk.place

    def take(self, place: Place) -> list[bytes]:
        """The data of what may go out, now that the stream has gone out up to ``place``."""
        ready: list[bytes] = []
        while self._waiting and self._waiting[0].before <= Place(place.attempt, place.offset + 1):
            chunk = self._waiting.popleft()
            stored = self._stored.get(chunk.step)
            if chunk.before.attempt == place.attempt and (stored is None or stored < chunk.before):
                ready.append(chunk.data)
            else:
                self._dropped()
        return ready


class Live:
    """``hear`` takes what comes in on ``CHANNEL``; ``follow`` gives a stream its part of it. ``dropped`` is told of each that a
    stream could not take."""

    def __init__(self, *, dropped: Callable[[], None] = lambda: None) -> None:
        self._dropped = dropped
        self._queues: dict[LineageKey, set[LiveQueue]] = {}

    @property
    def followed(self) -> bool:
        """Whether anybody listens."""
        return bool(self._queues)

    @contextmanager
    def follow(self, key: LineageKey, bell: Callable[[], None], codec: PayloadCodec = PLAIN) -> Iterator[LiveQueue]:
        """The live chunks of a lineage, from now on. ``codec``: the lineage's."""
        queue = LiveQueue(bell, self._dropped, codec)
        self._queues.setdefault(key, set()).add(queue)
        try:
            yield queue
        finally:
            queues = self._queues[key]
            queues.discard(queue)
            if not queues:
                del self._queues[key]

    def hear(self, payload: str) -> None:
        """Hand on the chunks of a notification. What cannot be read is a newer worker's, or nobody's of ours."""
        if not self._queues:
            return
        try:
            values = json.loads(payload)
        except ValueError:
            values = None
        for value in values if isinstance(values, list) else [None]:
            self._hand_on(value)

    def _hand_on(self, value: Any) -> None:
        """Each chunk by itself: one that cannot be read keeps back no other."""
        try:
            queues = self._queues.get(LineageKey(UUID(value["root"]), value["tenant"]), ())
            chunk = _read(value, next(iter(queues)).codec) if queues else None
        except Exception as error:  # noqa: BLE001 - a boundary: the codec is the author's, and others' chunks follow
            _log.warning("live_chunk_not_read", error=type(error).__name__)
            return
        if chunk is not None:
            for queue in queues:
                queue.put(chunk)


def _read(value: Mapping[str, Any], codec: PayloadCodec) -> _LiveChunk:
    attempt, offset = value["before"]
    shown = {name: value[name] for name in _SHOWN}
    return _LiveChunk(
        before=Place(int(attempt), int(offset)),
        step=(str(value["step"]), int(value["occurrence"])),
        data=json.dumps(shown | _content(value, codec)).encode(),
    )


def _content(value: Mapping[str, Any], codec: PayloadCodec) -> dict[str, Any]:
    if value.get("truncated"):
        return {"truncated": True}
    if "encoded" in value:
        return {"data": json.loads(codec.decode(base64.b64decode(value["encoded"], validate=True)))}
    return {"data": value["data"]}
