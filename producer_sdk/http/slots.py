"""Room for so many at once: in the process, and for each owner, so that none takes all."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

__all__ = ["Slots"]


class Slots:
    """``changed`` is told how many are taken."""

    def __init__(self, *, most: int, most_each: int, changed: Callable[[int], None] = lambda _: None) -> None:
        self._most = most
        self._most_each = most_each
        self._changed = changed
        self._by_owner: Counter[Hashable] = Counter()
        self._taken = 0

    @property
    def taken(self) -> int:
        return self._taken

    @contextmanager
    def take(self, owner: Hashable) -> Iterator[bool]:
        """Take a slot for as long as the block runs; False: there is none."""
        if self._taken >= self._most or self._by_owner[owner] >= self._most_each:
            yield False
            return
        self._move(owner, 1)
        try:
            yield True
        finally:
            self._move(owner, -1)

    def _move(self, owner: Hashable, by: int) -> None:
        self._taken += by
        self._by_owner[owner] += by
        if not self._by_owner[owner]:
            del self._by_owner[owner]
        self._changed(self._taken)
