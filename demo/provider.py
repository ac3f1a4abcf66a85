"""A payment provider that misbehaves, as a process of its own: ``python -m demo.provider PORT --book FILE --seed N``.

- ``POST /charges`` with the header ``Idempotency-Key`` and ``{"order": ..., "amount": ...}`` charges an order. The same key and
  body get the same charge again, the same key with another body 422. ``Fencing-Token`` is noted with the charge.
- ``GET /charges/KEY`` is the status endpoint: the charge, or 404. ``GET /book`` is everything (``demo.provider_book``).

Its moods are dice with given shares: it answers 500 before or after it has charged, hangs until nobody waits any more, hangs up
without an answer, asks for patience with 429 or 503, and declines some orders for good with 402. A request with ``Charge-Before``
(Unix seconds) is not charged later than that: this bounds how long it may be on its way, also past a frozen process.

With ``--forget-keys`` no key is honoured: whatever reaches it charges, and charging an order once is the caller's doing alone.
"""

import argparse
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple

from demo.provider_book import Book

__all__ = ["Answer", "Moods", "Provider", "ProviderServer", "Temper", "Wanted"]

_CALM: Final = "calm"
_MOST_BODY_BYTES: Final = 10_000


@dataclass(frozen=True, kw_only=True)
class Moods:
    """The share of requests that meet each mood, together at most 1; ``declined`` is a share of the orders."""

    fail_before: float = 0.0
    fail_after: float = 0.0
    hang: float = 0.0
    hang_up: float = 0.0
    too_many: float = 0.0
    unavailable: float = 0.0
    declined: float = 0.0

    def __post_init__(self) -> None:
        shares = asdict(self)
        if any(share < 0 for share in shares.values()) or self.declined > 1 or sum(self.of_requests.values()) > 1 + 1e-9:
            raise ValueError("shares are from 0 to 1, those of requests together as well")

    @property
    def of_requests(self) -> Mapping[str, float]:
        return {name: share for name, share in asdict(self).items() if name != "declined"}

    def of(self, dice: random.Random) -> str:
        """The mood that the dice say."""
        names, shares = [*self.of_requests, _CALM], [*self.of_requests.values()]
        return dice.choices(names, [*shares, max(0.0, 1 - sum(shares))])[0]


@dataclass(frozen=True, kw_only=True)
class Temper:
    """How it behaves otherwise. ``delay_seconds``: the longest time before it charges. ``hang_seconds``: how long it hangs."""

    moods: Moods = Moods()
    seed: int = 0
    forget_keys: bool = False
    delay_seconds: float = 0.05
    hang_seconds: float = 30.0
    retry_after_seconds: int = 1


class Wanted(NamedTuple):
    """A request to charge."""

    key: str
    token: int
    order: str
    amount: int
    before: float

    @classmethod
    def read(cls, headers: "Message[str, str]", body: bytes) -> "Wanted":
        """Raises ``ValueError`` for what is no request to charge."""
        match json.loads(body):
            case {"order": str(order), "amount": int(amount)} if amount > 0:
                key, token = headers.get("Idempotency-Key", ""), int(headers.get("Fencing-Token", "0"))
                if not key:
                    raise ValueError("a request needs its Idempotency-Key")
                return cls(key, token, order, amount, float(headers.get("Charge-Before", "inf")))
        raise ValueError("a charge has an order and a positive amount")


class Answer(NamedTuple):
    """What is answered."""

    status: int
    body: object
    headers: Mapping[str, str] = {}


class Provider:
    """Decides and keeps the book. Safe for threads."""

    def __init__(self, book: Book, temper: Temper) -> None:
        self._book = book
        self._temper = temper
        self._requests: Counter[str] = Counter()
        self._lock = threading.Lock()

    def charge(self, wanted: Wanted) -> Answer | None:
        """Charge or refuse, in the mood of the moment; None is a hang-up."""
        dice = self._dice(wanted.order)
        mood = self._temper.moods.of(dice)
        if (refusal := self._refusal(mood)) is not None:
            with self._lock:
                self._book.receive(wanted.key)
            return refusal
        time.sleep(dice.uniform(0, self._temper.delay_seconds))
        with self._lock:
            answer = self._settled(wanted)
        return self._told(mood, answer)

    def state(self, key: str) -> Answer:
        """What became of ``key``."""
        with self._lock:
            charge = self._book.charged(key)
        return _error(404, "no charge") if charge is None else Answer(200, charge._asdict())

    def book(self) -> Answer:
        with self._lock:
            return Answer(200, self._book.as_json())

    def _dice(self, order: str) -> random.Random:
        """The same for the same request of the order, whichever thread is quicker."""
        with self._lock:
            self._requests[order] += 1
            return random.Random(f"{self._temper.seed}/{order}/{self._requests[order]}")

    def _refusal(self, mood: str) -> Answer | None:
        """What a mood answers that charges nothing."""
        patience = {"Retry-After": str(self._temper.retry_after_seconds)}
        match mood:
            case "fail_before":
                return _error(500, "failed")
            case "too_many":
                return _error(429, "too many requests", patience)
            case "unavailable":
                return _error(503, "unavailable", patience)
        return None

    def _settled(self, wanted: Wanted) -> Answer:
        """The truth, whatever is told of it."""
        if time.time() >= wanted.before:
            return _error(408, "too late")  # and so no repeat: who asked can be frozen at any moment, and this one charges nothing
        self._book.receive(wanted.key)
        known = None if self._temper.forget_keys else self._book.charged(wanted.key)
        if known is not None:
            same = (known.order, known.amount) == (wanted.order, wanted.amount)
            return Answer(200, known._asdict()) if same else _error(422, "the key belongs to another charge")
        if random.Random(f"{self._temper.seed}/{wanted.order}").random() < self._temper.moods.declined:
            self._book.decline(wanted.order)
            return _error(402, "declined")
        charge = self._book.charge(key=wanted.key, order=wanted.order, amount=wanted.amount, token=wanted.token)
        return Answer(200, charge._asdict())

    def _told(self, mood: str, answer: Answer) -> Answer | None:
        """What the caller gets to hear of it."""
        match mood:
            case "fail_after":
                return _error(500, "failed")
            case "hang":
                time.sleep(self._temper.hang_seconds)
                return None
            case "hang_up":
                return None
        return answer


class ProviderServer(ThreadingHTTPServer):
    """Serves a provider on a port of 127.0.0.1; 0 takes a free one."""

    request_queue_size = 128

    def __init__(self, port: int, provider: Provider) -> None:
        super().__init__(("127.0.0.1", port), _Requests)
        self.provider = provider


class _Requests(BaseHTTPRequestHandler):
    server: ProviderServer
    timeout = 10.0

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length", "0"))
        if self.path != "/charges" or not 0 < size <= _MOST_BODY_BYTES:
            self._answer(_error(400, "no charge"))
            return
        body = self.rfile.read(size)
        if len(body) < size:
            return  # whoever asked died in the middle of it
        try:
            wanted = Wanted.read(self.headers, body)
        except ValueError:
            self._answer(_error(400, "no charge"))
            return
        answer = self.server.provider.charge(wanted)
        if answer is not None:
            self._answer(answer)

    def do_GET(self) -> None:
        if self.path == "/book":
            self._answer(self.server.provider.book())
        elif self.path.startswith("/charges/"):
            self._answer(self.server.provider.state(self.path.removeprefix("/charges/")))
        else:
            self._answer(_error(400, "no such place"))  # not 404, which says that there is no charge

    def _answer(self, answer: Answer) -> None:
        payload = json.dumps(answer.body).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(payload)), **answer.headers}
        try:
            self.send_response(answer.status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(payload)
        except OSError:
            return  # whoever asked is gone

    def log_message(self, *_: object) -> None:
        """Silent."""


def _error(status: int, what: str, headers: Mapping[str, str] | None = None) -> Answer:
    return Answer(HTTPStatus(status), {"error": what}, headers or {})


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo.provider", description="A payment provider that misbehaves.")
    parser.add_argument("port", type=int, metavar="PORT")
    parser.add_argument("--book", type=Path, required=True, help="where the book is kept; read first if it exists")
    parser.add_argument("--forget-keys", action="store_true", help="honour no key: whatever arrives charges")
    for field in fields(Temper):
        if field.name not in {"moods", "forget_keys"}:
            kind: Any = type(field.default)
            parser.add_argument(_flag(field.name), type=kind, default=field.default)
    for field in fields(Moods):
        parser.add_argument(_flag(field.name), type=float, default=0.0, metavar="SHARE")
    return parser.parse_args(arguments)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until the process ends."""
    given = vars(_arguments(arguments))
    moods = Moods(**{field.name: given[field.name] for field in fields(Moods)})
    rest = {field.name: given[field.name] for field in fields(Temper) if field.name != "moods"}
    ProviderServer(given["port"], Provider(Book(given["book"]), Temper(moods=moods, **rest))).serve_forever()


if __name__ == "__main__":
    main()
