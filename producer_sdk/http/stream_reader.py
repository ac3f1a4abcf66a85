"""Reads the stream of one lineage in the order of its places: each stored chunk once, none skipped.

How the lineage stands is read before its chunks are, so whoever has read that it has ended has all of them. Commits may become
visible in another order than places are given: behind a gap nothing is sent until it has closed, or nobody can close it any more.
"""

from collections.abc import Callable, Sequence
from typing import Final

import structlog

from fencepost.batching import Batcher
from fencepost.codec import PayloadCodec
from fencepost.errors import TransientError
from producer_sdk.http import frames
from producer_sdk.http.cursor import START
from producer_sdk.http.decoding import decoded
from producer_sdk.http.live import LiveQueue
from producer_sdk.http.store import CUT_OFFSET, Chunk, LineageKey, Place, RouteStore, Standing
from producer_sdk.http.watch import Follower, Watch

__all__ = ["ChunkPages", "StreamReader"]

_log = structlog.get_logger(__name__)

_PAGE: Final = 256
#: As much as a server holds back for a client that does not read.
_PAGE_BYTES: Final = 65_536
#: So many chunks of a run are stored before its stream is cut.
_CUT_AFTER: Final = 10_000
#: How long a chunk may be on its way to the first place of a stream.
_GAP_SECONDS: Final = 1.0


class ChunkPages:
    """Pages of chunks: those that streams ask for while one is read are read together in the next statement."""

    def __init__(self, store: RouteStore) -> None:
        self._store = store
        self._reads: Batcher[tuple[LineageKey, Place], Sequence[Chunk]] = Batcher(self._read)

    async def behind(self, key: LineageKey, place: Place) -> Sequence[Chunk]:
        """The next chunks, at most a page. Raises ``TransientError``."""
        return await self._reads.put((key, place))

    async def _read(self, places: Sequence[tuple[LineageKey, Place]]) -> Sequence[Sequence[Chunk]]:
        return await self._store.read_chunks(places, most=_PAGE, most_bytes=_PAGE_BYTES)


class StreamReader:
    """``place``: up to where the stream has been read. ``standing``: as it was before the last read. ``unreadable``: the next chunk
    is one that the codec cannot read. ``live``: None without. ``told`` hears the kinds of frames and how many."""

    def __init__(
        self, pages: ChunkPages, watch: Watch, codec: PayloadCodec, *, follower: Follower, cursor: Place, live: LiveQueue | None,
        told: Callable[[str, int], None],
    ) -> None:  # fmt: skip
        self._pages = pages
        self._watch = watch
        self._codec = codec
        self._follower = follower
        self._live = live
        self._told = told
        self._page: Sequence[Chunk] = ()
        self.unreadable = False
        self.place = cursor
        self.standing = follower.standing

    @property
    def lacks(self) -> bool:
        """Whether chunks are stored that have not been read."""
        return self.standing is not None and self.place < _end(self.standing)

    @property
    def ended(self) -> bool:
        """Whether the lineage has ended and everything before its end has been read."""
        return self.standing is not None and self.standing.ended and not self.lacks

    async def open(self) -> bool:
        """Read the first page. False: there is no way on from the cursor. Raises ``TransientError``."""
        if self.place != START:
            return await self._goes_on()
        if await self._begins():
            return True
        await self._follower.wait(_GAP_SECONDS)
        return await self._begins()

    async def read(self) -> list[bytes]:
        """Frames of what is new, at most those of a page."""
        self.standing = self._follower.standing
        news: list[bytes] = []
        if self.standing is not None and self.lacks:
            try:
                news = await self._read_page(self.standing)
            except TransientError as error:
                _log.warning("chunks_not_read", error=str(error))
        return news + self._activities()

    def _activities(self) -> list[bytes]:
        taken = [] if self._live is None else self._live.take(self.place)
        if taken:
            self._told("activity", len(taken))
        return list(map(frames.activity, taken))

    async def _begins(self) -> bool:
        """Whether the first chunk that is stored is the first of an attempt, or there is none."""
        self.standing = self._follower.standing
        self._page = await self._pages.behind(self._follower.key, START) if self.lacks else ()
        return not self._page or self._page[0].place.offset == 0

    async def _goes_on(self) -> bool:
        """Whether the chunk at the cursor is stored, or the one right behind it."""
        cursor = self.place
        if self.standing is None or cursor > _end(self.standing):
            return False
        page = await self._pages.behind(self._follower.key, Place(cursor.attempt, cursor.offset - 1))
        at_cursor = bool(page) and page[0].place == cursor
        self._page = page[1:] if at_cursor else page
        return at_cursor or (bool(page) and page[0].place == Place(cursor.attempt, cursor.offset + 1))

    async def _read_page(self, standing: Standing) -> list[bytes]:
        page, self._page = self._page or await self._pages.behind(self._follower.key, self.place), ()
        if page:
            return self._in_order(page, standing)
        if standing.stream_attempt is not None and standing.stream_attempt > self.place.attempt:
            return [self._next_attempt(standing.stream_attempt)]
        # More was stored: the lineage has been erased since.
        self._watch.look(self._follower.key)
        return []

    def _in_order(self, page: Sequence[Chunk], standing: Standing) -> list[bytes]:
        """Frames of the page, up to the first gap that may still close."""
        news: list[bytes] = []
        sent = 0
        for chunk in page:
            if not (_is_next(self.place, chunk.place) or _is_settled(chunk.place, standing)):
                break
            data = self._content(chunk)
            if self.unreadable:
                break
            if chunk.place.attempt > self.place.attempt:
                news.append(self._next_attempt(chunk.place.attempt))
            self.place = chunk.place
            if self._live is not None:
                self._live.stored(chunk)
            news.append(frames.progress(chunk.place, data))
            sent += 1
        self._told("progress", sent)
        return news

    def _content(self, chunk: Chunk) -> bytes | None:
        if chunk.data is None:
            return None
        data = decoded(self._codec, chunk.data)
        if data is None:
            self.unreadable = True
        return data

    def _next_attempt(self, number: int) -> bytes:
        self.place = Place(number, -1)
        self._told("attempt", 1)
        return frames.attempt(number)


def _end(standing: Standing) -> Place:
    """The place of the last chunk."""
    if standing.stream_attempt is None:
        return START
    return Place(standing.stream_attempt, -1 if standing.last_offset is None else standing.last_offset)


def _is_settled(place: Place, standing: Standing) -> bool:
    """Whether nobody writes before that place any more: the run that could has ended, or another one has opened an attempt."""
    return standing.ended or (standing.stream_attempt is not None and place.attempt < standing.stream_attempt)


def _is_next(last: Place, place: Place) -> bool:
    if place.attempt > last.attempt:
        return place.offset == 0
    return place.offset == last.offset + 1 or (place.offset == CUT_OFFSET and last.offset + 1 >= _CUT_AFTER)
