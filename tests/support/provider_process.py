"""A provider of charges as a process of its own, by HTTP: ``python -m tests.support.provider_process PORT SEED``.

It takes its time, answers 500 after it has charged, hangs up without an answer, and asks for patience. It remembers keys and
does not honour them: whatever reaches it twice is charged twice. ``GET /charges/KEY`` is its status endpoint, ``GET /book`` all.
"""

import json
import random
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

__all__ = ["MOST_DELAY_SECONDS"]

#: No request that has arrived is charged later than this.
MOST_DELAY_SECONDS: Final = 0.4

_lock: Final = threading.Lock()
_book: Final[Counter[str]] = Counter()
_keys: Final[dict[str, str]] = {}
_chance: Final = random.Random()


class _Requests(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        order = self.rfile.read(size).decode()
        if len(order) < size:
            return  # whoever asked died in the middle of it
        with _lock:
            delay, mood = _chance.uniform(0, MOST_DELAY_SECONDS), _chance.random()
        if mood < 0.1:
            self._answer(429, {})
            return
        time.sleep(delay)
        with _lock:
            _book[order] += 1
            _keys[self.headers["Idempotency-Key"]] = order
        if mood < 0.2:
            self._answer(500, {})
        elif mood < 0.3:
            self.close_connection = True
        else:
            self._answer(200, {"order": order})

    def do_GET(self) -> None:
        with _lock:
            book, order = dict(_book), _keys.get(self.path.removeprefix("/charges/"))
        if self.path == "/book":
            self._answer(200, {"charges": book, "keys": len(_keys)})
        else:
            self._answer(404 if order is None else 200, {"order": order})

    def _answer(self, status: int, body: object) -> None:
        payload = json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)
        except OSError:
            return  # whoever asked is gone

    def log_message(self, *_: object) -> None:
        """Silent."""


if __name__ == "__main__":
    _chance.seed(int(sys.argv[2]))
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), _Requests).serve_forever()
