"""The payment provider's book: its own truth about the money it moved. In a file, a line an entry, written before the answer.

A line is flushed to the operating system, so a provider that is killed with -9 finds all that it answered for when it is started
again. A line that was cut off in the middle was never answered for, and is dropped.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["Book", "Charge"]

_CHARGE: Final = "charge"
_DECLINED: Final = "declined"
_REPEAT: Final = "repeat"


class Charge(NamedTuple):
    """Money that moved. ``token`` is the fencing token that the request carried."""

    charge: str
    key: str
    order: str
    amount: int
    token: int


class Book:
    """Not for two threads at once: whoever asks and writes holds one lock for both."""

    def __init__(self, path: Path) -> None:
        self.charges: list[Charge] = []
        self.declined: set[str] = set()
        self.repeats = 0
        self._by_key: defaultdict[str, list[Charge]] = defaultdict(list)
        whole = _whole_lines(path)
        for line in whole.splitlines():
            self._enter(json.loads(line))
        self._file = path.open("ab")
        self._file.truncate(len(whole))

    def charged(self, key: str) -> Charge | None:
        """The first charge that was made under ``key``."""
        made = self._by_key.get(key)
        return made[0] if made else None

    def charge(self, *, key: str, order: str, amount: int, token: int) -> Charge:
        """Move the money."""
        made = Charge(f"ch_{len(self.charges) + 1:06d}", key, order, amount, token)
        self._write({_CHARGE: made._asdict()})
        return made

    def decline(self, order: str) -> None:
        """Note that the order was refused for good."""
        if order not in self.declined:
            self._write({_DECLINED: order})

    def receive(self, key: str) -> None:
        """Note a request that came although its key has been charged: whether or not it charges again, it should not have come."""
        if key in self._by_key:
            self._write({_REPEAT: key})

    def as_json(self) -> dict[str, Any]:
        """All of it: every charge, the orders that were declined, how many requests came for a key that had been charged."""
        return {
            "charges": [charge._asdict() for charge in self.charges],
            "declined": sorted(self.declined),
            "repeats": self.repeats,
        }

    def close(self) -> None:
        self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        self._enter(entry)

    def _enter(self, entry: dict[str, Any]) -> None:
        match entry:
            case {"charge": made}:
                charge = Charge(**made)
                self.charges.append(charge)
                self._by_key[charge.key].append(charge)
            case {"declined": order}:
                self.declined.add(order)
            case {"repeat": _}:
                self.repeats += 1


def _whole_lines(path: Path) -> bytes:
    """What was written to its end."""
    written = path.read_bytes() if path.exists() else b""
    return written[: written.rfind(b"\n") + 1]
