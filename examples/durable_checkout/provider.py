"""The card provider, as a process: ``python -m examples.durable_checkout.provider PORT BOOK``.

It is the demo's provider, which honours keys and keeps its book in a file. As sandboxes of real ones do, it lets the amount decide:
one that ends in 02 is declined; one that ends in 04 is charged, and the first request for it gets no answer.
"""

import sys
import threading
import time
from pathlib import Path
from typing import Final

from demo.provider import Answer, Provider, ProviderServer, Temper, Wanted
from demo.provider_book import Book

__all__ = ["DECLINED_CENTS", "SILENT_CENTS"]

DECLINED_CENTS: Final = 2
SILENT_CENTS: Final = 4
#: Longer than its client waits.
_SILENT_SECONDS: Final = 4.0
#: Long enough that whoever is killed is in the middle of charges.
_DELAY_SECONDS: Final = 0.5


class Sandbox(Provider):
    """Decides by the amount."""

    def __init__(self, book: Book) -> None:
        super().__init__(book, Temper(delay_seconds=_DELAY_SECONDS))
        self._silent: set[str] = set()
        self._one_at_a_time = threading.Lock()

    def charge(self, wanted: Wanted) -> Answer | None:
        if wanted.amount % 100 == DECLINED_CENTS:
            return Answer(402, {"error": "declined"})
        answer = super().charge(wanted)
        if wanted.amount % 100 == SILENT_CENTS and self._is_first(wanted.key):
            time.sleep(_SILENT_SECONDS)
            return None
        return answer

    def _is_first(self, key: str) -> bool:
        with self._one_at_a_time:
            first = key not in self._silent
            self._silent.add(key)
        return first


if __name__ == "__main__":
    ProviderServer(int(sys.argv[1]), Sandbox(Book(Path(sys.argv[2])))).serve_forever()
