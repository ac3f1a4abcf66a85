"""Starts PostgreSQL and Kafka from packages, the server and a worker, until Ctrl-C: ``python -m examples.durable_hello``."""

import argparse
import sys
from uuid import uuid4

from examples.stage import keep_open, port_number


def begin(url: str) -> str:
    """There is no page to open: what to send first, under a key that nobody has used."""
    return f"""The service listens at {url}. Order a lamp, in another terminal:

  curl -si {url}/orders -H 'Authorization: Bearer ada' -H 'Content-Type: application/json' \\
    -H 'Idempotency-Key: {uuid4()}' -d '{{"item":"lamp"}}'

Send it again: it is the same order. What else there is: docs/guides/durable-routes-tutorial.md"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.durable_hello", description="The tutorial's service.")
    parser.add_argument("--port", type=port_number, default=8080, help="where it listens; default 8080")
    port = parser.parse_args().port
    sys.exit(keep_open("examples.durable_hello.app:app", "examples.durable_hello.app:durable", port=port, begin=begin))
