"""Which offsets of a partition are done: pure arithmetic over the records that were received, never over numbers between them.

Offsets have gaps (transaction markers, compaction), so the next record's offset is not this one's plus one. What may be committed
is the offset of the first record that is not done or, if all are, the one after the last.
"""

from collections import deque

__all__ = ["OffsetTracker"]


class OffsetTracker:
    """The window of one partition, from its assignment to its revocation. ``start`` is the offset that is read first.
    ``suspects``: so many records from there, before ``end``, may have ended the process that held them before."""

    def __init__(self, start: int, *, suspects: int = 0, end: int = 0) -> None:
        self._order: deque[int] = deque()
        self._done: set[int] = set()
        self.next = start
        self.committed: int | None = None
        self._suspects = suspects
        self._suspects_end = end
        self._last_suspect = -1

    def receive(self, offset: int) -> bool:
        """A record has arrived. False: it was received before, or comes from before the window; it is not to be handled."""
        if offset < self.next:
            return False
        if self.is_suspect(offset):
            self._suspects -= 1
            self._last_suspect = offset
        self._order.append(offset)
        self.next = offset + 1
        return True

    def is_suspect(self, offset: int) -> bool:
        """Whether a record that arrives now may have ended a process."""
        return self._suspects > 0 and offset < self._suspects_end

    def finish(self, offset: int) -> None:
        """The record is done, whatever it came to."""
        self._done.add(offset)
        while self._order and self._order[0] in self._done:
            self._done.discard(self._order.popleft())

    @property
    def place(self) -> int:
        """The offset to read next after all that is done without a gap."""
        return self._order[0] if self._order else self.next

    @property
    def committable(self) -> int | None:
        """The same, if it is not committed yet."""
        return None if self.place == self.committed else self.place

    @property
    def has_suspects(self) -> bool:
        """Whether one that may have ended a process is not done, or has not arrived."""
        return self.place <= self._last_suspect or self.is_suspect(self.next)

    @property
    def span(self) -> int:
        """How many records are received and not committable: what a crash would have delivered again."""
        return len(self._order)
